"""A second opinion: the whole integer program, without presolve of ours, for a solver of OR-Tools' MathOpt.

    x[v,s] in {0,1}    strategy s of node v                      sum_s x[v,s] = 1                        (_nodes)
    y[e,a,b] >= 0      cell of an edge's table:  sum_b y[e,a,b] = sum of x[u,s] with label a, and so for v  (_edge)
    memory             for every time that matters: sum counts * bytes * x + counts * bytes * y <= capacity (_rows)

The same mathematics as ``cpsat``, stated anew from the program, so that a mistake in one is not one in the other.
Objective in units of the largest finite cost, memory in units of the capacity: solvers work with absolute tolerances.
"""

from __future__ import annotations

import datetime
import math
import time
from typing import Any

import numpy as np

from autoshard_ilp._ortools import load_mathopt, silent_stdout
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.rows.memory import Owners
from autoshard_ilp.program.rows.onchip import chip_aside
from autoshard_ilp.program.solve import check

SOLVERS = ("highs", "scip")


@chip_aside
def solve_mathopt(program: Program, options: SolverOptions, solver: str = "highs") -> Solution:
    """Solve with another solver, for comparison; meant for programs of up to some ten thousand table cells.

    Args:
        program: nodes, edges, lifetimes, capacity (seconds and bytes).
        options: time limit, relative gap and seed.
        solver: "highs" or "scip".

    Returns:
        A solution as from :func:`~autoshard_ilp.program.solve.solve`; optimal within the solver's own tolerances (a
        relative gap of 1e-9 is asked for; rows may be exceeded by 1e-6 of the capacity, which is repaired by
        ``report["tight_capacity"]``: a second run with that much less).

    Raises:
        InputShapeError: malformed arrays, or an unknown solver.
    """
    if solver not in SOLVERS:
        raise InputShapeError(f"A second solver is one of {SOLVERS}. Received: {solver!r}.")
    check(program, None)
    began = time.monotonic()
    model = _Model(program)
    status, choices, bound = model.solve(options, solver)
    report: dict[str, Any] = {"solver": solver}
    capacity = program.capacity
    if choices is not None and capacity is not None and program.peak(choices) > capacity:
        report["tight_capacity"] = True
        status, choices, _ = _Model(program, capacity - math.ceil(1e-5 * capacity)).solve(options, solver)
        status = "feasible" if choices is not None else "unknown"
    seconds = time.monotonic() - began
    if status == "infeasible":
        return Solution("infeasible", None, math.inf, math.inf, 0, seconds, report)
    if choices is None:
        return Solution("feasible", None, math.inf, bound, 0, seconds, report)
    cost = program.cost(choices)
    return Solution(status, choices, cost, min(bound, cost), program.peak(choices), seconds, report)


class _Model:
    """The program as a MathOpt model; ``capacity`` replaces the program's own."""

    def __init__(self, program: Program, capacity: int | None = None) -> None:
        self.mathopt = load_mathopt()
        self.program = program
        self.capacity = program.capacity if capacity is None else capacity
        finite = [n.costs[np.isfinite(n.costs)] for n in program.nodes]
        finite += [e.table[np.isfinite(e.table)] for e in program.edges]
        self.unit = max((float(np.abs(c).max()) for c in finite if len(c)), default=0.0) or 1.0
        self.model = self.mathopt.Model(name="sharding")
        self.objective: list[Any] = []
        self.possible = self._nodes()
        self.cells = [self._edge(e) for e in range(len(program.edges))]
        if self.capacity is not None:
            self._rows()
        self.model.minimize(self.mathopt.fast_sum(self.objective))

    def _nodes(self) -> bool:
        """x and its one-hot rows; False when a node has no finite strategy."""
        self.x: list[dict[int, Any]] = []
        for node in self.program.nodes:
            own = {int(s): self.model.add_binary_variable() for s in np.flatnonzero(np.isfinite(node.costs))}
            self.objective += [float(node.costs[s]) / self.unit * x for s, x in own.items()]
            self.x.append(own)
            if own:
                self.model.add_linear_constraint(self.mathopt.fast_sum(own.values()) == 1.0)
        return all(self.x)

    def _edge(self, number: int) -> dict[tuple[int, int], Any]:
        """y of one edge and its linking rows."""
        edge = self.program.edges[number]
        cells = {
            (int(a), int(b)): self.model.add_variable(lb=0.0, ub=1.0) for a, b in np.argwhere(np.isfinite(edge.table))
        }
        self.objective += [float(edge.table[at]) / self.unit * y for at, y in cells.items() if edge.table[at]]
        for axis, (v, labels) in enumerate(((edge.u, edge.u_labels), (edge.v, edge.v_labels))):
            for label in range(edge.table.shape[axis]):
                left = self.mathopt.fast_sum([y for at, y in cells.items() if at[axis] == label])
                right = self.mathopt.fast_sum([x for s, x in self.x[v].items() if labels[s] == label])
                self.model.add_linear_constraint(left - right == 0.0)
        return cells

    def _rows(self) -> None:
        """One row per time whose set of owners is maximal."""
        assert self.capacity is not None
        scale = 1.0 / max(1, self.capacity)
        for time_ in maximal_times(self.program):
            row = Owners(self.program).row(time_)
            terms = []
            for v, count in zip(row.nodes.tolist(), row.node_counts.tolist(), strict=True):
                held: Any = self.program.nodes[v].bytes
                terms += [count * int(held[s]) * scale * x for s, x in self.x[v].items() if held[s]]
            for e, count in zip(row.edges.tolist(), row.edge_counts.tolist(), strict=True):
                held = self.program.edges[e].bytes
                terms += [count * int(held[at]) * scale * y for at, y in self.cells[e].items() if held[at]]
            self.model.add_linear_constraint(self.mathopt.fast_sum(terms) <= self.capacity * scale)

    def solve(self, options: SolverOptions, solver: str) -> tuple[str, np.ndarray | None, float]:
        """Status, choices and a lower bound in seconds."""
        if not self.possible:
            return "infeasible", None, math.inf
        mathopt = self.mathopt
        kind = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}[solver]
        limit = datetime.timedelta(seconds=max(0.1, options.time_limit))
        parameters = mathopt.SolveParameters(
            time_limit=limit,
            relative_gap_tolerance=max(options.relative_gap, 1e-9),
            absolute_gap_tolerance=0.0,
            random_seed=options.seed % (2**31 - 1),
        )
        with silent_stdout():
            result = mathopt.solve(self.model, kind, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return "infeasible", None, math.inf
        bound = result.dual_bound() * self.unit
        if not result.has_primal_feasible_solution():
            return "unknown", None, bound
        values = [np.array([result.variable_values(x) for x in own.values()]) for own in self.x]
        choices = np.array([list(own)[int(np.argmax(part))] for own, part in zip(self.x, values, strict=True)])
        proved = reason == mathopt.TerminationReason.OPTIMAL
        return ("optimal" if proved else "feasible"), choices.astype(np.int64), bound


def maximal_times(program: Program) -> list[int]:
    """Times that suffice for the memory constraint: the last before a lifetime ends, once something has begun."""
    lt = program.lifetimes
    if not len(lt.owner):
        return []
    begins, ends = np.zeros(int(np.max(lt.end)) + 1, bool), np.zeros(int(np.max(lt.end)) + 1, bool)
    begins[lt.start], ends[lt.end] = True, True
    times, fresh = [], False
    for t in range(len(ends)):
        if ends[t] and fresh:
            times.append(t - 1)
            fresh = False
        fresh = fresh or bool(begins[t])
    return times

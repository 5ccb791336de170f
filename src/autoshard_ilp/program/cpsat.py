"""The integer program for OR-Tools CP-SAT, over what presolve left.

    x[v,s] in {0,1}    strategy s of node v                    sum_s x[v,s] = 1                      (_add_nodes)
    y[f,a,b,..] >= 0   cell of a factor's table, linked to labels, not to strategies:
                       sum over the other axes of y[f, a, ..] = sum of x[v,s] with label a           (_add_factor)
    memory             sum counts * bytes * x  +  sum counts * bytes * y  <= capacity                (_add_row)
    objective          integers: floor(cost / unit), so the solver's bound times unit is a valid
                       bound in seconds, and the rounding error is at most one unit per chosen cost  (_objective)

The equalities make the relaxation the local polytope, far tighter than ``y >= x + x - 1``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp._ortools import load_cp_model
from autoshard_ilp.errors import AutoshardError
from autoshard_ilp.program.model import Program
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.memory import Row, usage
from autoshard_ilp.program.stoppable import run_stoppable

RESOLUTION = 2**34  # integer objective units between the base and the upper bound
MAX_INT = 2**60
ROW_UNITS = 2**20  # resolution of memory rows at first
PEAK_UNITS = 2**24  # resolution of the least peak
WORKERS = 8  # not the number of cores: the same plan on every machine


@dataclass(frozen=True, eq=False)
class CpResult:
    """``status`` is "optimal", "feasible", "infeasible" or "unknown"; ``bound`` in seconds is valid in every case."""

    status: str
    choices: np.ndarray | None
    bound: float
    rounding_error_seconds: float
    variables: int
    constraints: int
    interrupted: bool = False  # by KeyboardInterrupt; the caller keeps the choices, then raises it again


@dataclass(frozen=True)
class CpOptions:
    """Limits of one CP-SAT run; ``absolute_gap`` in seconds, ``deadline`` in monotonic seconds."""

    deadline: float
    seed: int = 0
    workers: int | None = None
    absolute_gap: float = 0.0


class _Builder:
    """One model under construction."""

    def __init__(self, net: Net, program: Program, upper: float) -> None:
        cp_model = load_cp_model()

        self.cp = cp_model
        self.model = cp_model.CpModel()
        self.net, self.program = net, program
        self.x: dict[int, dict[int, Any]] = {}
        self.y: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
        least = {v: float(net.cost[v][net.alive[v]].min()) for v in net.live}
        table_least = {n: float(f.table.min()) for n, f in net.factors.items()}
        for n, low in table_least.items():
            if low == math.inf:
                raise EmptyNodeError(net.factors[n].scope[0])
        self.base = net.constant + math.fsum(least.values()) + math.fsum(table_least.values())
        self.least, self.table_least = least, table_least
        terms = len(least) + len(table_least)
        self.span = self._span(upper)
        self.unit = self.span / RESOLUTION if self.span > 0 else 1.0
        self.rounding = terms * self.unit if self.span > 0 else 0.0
        self.terms: list[Any] = []
        self.coefficients: list[int] = []

    def _span(self, upper: float) -> float:
        """Largest total above ``base`` that matters: up to the upper bound, else the sum of the largest costs."""
        if math.isfinite(upper):
            slack = 1e-12 * abs(upper)  # float noise of the sums behind ``base``
            if self.base > upper + 100 * slack:
                raise EmptyNodeError("bound")
            return max(slack, (upper - self.base) * (1 + 1e-9))
        total = 0.0
        for v in self.net.live:
            total += float(self.net.cost[v][self.net.alive[v]].max()) - self.least[v]
        for n, f in self.net.factors.items():
            finite = f.table[np.isfinite(f.table)]
            total += float(finite.max()) - self.table_least[n] if len(finite) else 0.0
        return total

    def _objective(self, variable: Any, seconds: float) -> None:
        units = int(seconds / self.unit)
        if units:
            self.terms.append(variable)
            self.coefficients.append(units)

    def add_nodes(self) -> None:
        """x and its one-hot rows; a strategy beyond the upper bound gets no variable."""
        for v in self.net.live:
            own = {}
            for s in self.net.alive[v]:
                extra = float(self.net.cost[v][s]) - self.least[v]
                if extra <= self.span:
                    own[int(s)] = self.model.new_bool_var("")
                    self._objective(own[int(s)], extra)
            self.x[v] = own
            self.model.add_exactly_one(own.values())

    def _label_sums(self, v: int, labels: np.ndarray, count: int) -> list[list[Any]]:
        sums: list[list[Any]] = [[] for _ in range(count)]
        for s, variable in self.x[v].items():
            sums[labels[s]].append(variable)
        return sums

    def add_factor(self, number: int) -> None:
        """y and its linking rows (local polytope in label space)."""
        f = self.net.factors[number]
        extra = f.table - self.table_least[number]
        sums = [self._label_sums(v, lab, n) for v, lab, n in zip(f.scope, f.labels, f.table.shape, strict=True)]
        present = [np.array([bool(s) for s in own]) for own in sums]
        mask = extra <= self.span
        for k, p in enumerate(present):
            mask &= p.reshape([-1 if i == k else 1 for i in range(mask.ndim)])
        cells = np.argwhere(mask)
        slices: list[list[list[Any]]] = [[[] for _ in range(n)] for n in f.table.shape]
        own: list[tuple[tuple[int, ...], Any]] = []
        for cell in cells:
            index = tuple(int(i) for i in cell)
            variable = self.model.new_bool_var("")
            own.append((index, variable))
            self._objective(variable, float(extra[index]))
            for k, a in enumerate(index):
                slices[k][a].append(variable)
        self.y[number] = own
        for k in range(f.table.ndim):
            for a, left in enumerate(slices[k]):
                right = sums[k][a]
                if not right:
                    continue
                if not left:
                    for variable in right:
                        self.model.add(variable == 0)
                else:
                    self.model.add(self._sum(left) == self._sum(right))

    def _sum(self, variables: Sequence[Any]) -> Any:
        return self.cp.LinearExpr.sum(list(variables))

    def usage(self, row: int, unit: int = 1) -> tuple[Any, int]:
        """Linear expression of what a row uses in units of bytes (each term rounded down), and its largest value."""
        variables: list[Any] = []
        weights: list[int] = []
        constant = int(self.net.base[row])
        largest = constant
        for v, own in self.x.items():
            held = self.net.used[v]
            if held is None:
                continue
            largest += max((int(held[row, s]) for s in own), default=0)
            for s, variable in own.items():
                if held[row, s]:
                    variables.append(variable)
                    weights.append(int(held[row, s]) // unit)
        for n, cells in self.y.items():
            used = self.net.factors[n].used
            if used is None:
                continue
            largest += max((int(used[(row, *i)]) for i, _ in cells), default=0)
            for index, variable in cells:
                if used[(row, *index)]:
                    variables.append(variable)
                    weights.append(int(used[(row, *index)]) // unit)
        expression = self.cp.LinearExpr.weighted_sum(variables, weights) + constant // unit
        return expression, largest // unit

    def choices(self, solver: Any) -> np.ndarray:
        """The strategy of every node in the solver's best assignment."""
        choices = np.zeros(len(self.net.cost), np.int64)
        for v, own in self.x.items():
            choices[v] = next(s for s, variable in own.items() if solver.boolean_value(variable))
        return choices

    def add_hint(self, choices: np.ndarray) -> None:
        """Start from known choices."""
        for v, own in self.x.items():
            for s, variable in own.items():
                self.model.add_hint(variable, int(choices[v] == s))
        for n, cells in self.y.items():
            f = self.net.factors[n]
            at = tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))
            for index, variable in cells:
                self.model.add_hint(variable, int(index == at))


@dataclass(frozen=True)
class CpRun:
    """How one search ended; ``interrupted``: by KeyboardInterrupt, after which what was found is still there."""

    solver: Any
    status: Any
    interrupted: bool


def run_solver(
    model: Any, options: CpOptions, report: Callable[[float, float], None] | None = None, absolute_gap: float = 0.0
) -> CpRun:
    """Solve a model in a thread of its own, so that Ctrl-C reaches this one and stops the search.

    Args:
        model: a ``CpModel``.
        options: deadline, seed, workers.
        report: called with objective and bound (integer units) at each better solution; what it raises is raised here
            once the search has stopped.
        absolute_gap: integer units.
    """
    cp_model: Any = load_cp_model()
    solver = cp_model.CpSolver()
    configure(solver, options)
    solver.parameters.absolute_gap_limit = max(absolute_gap, 0.99)
    raised: list[BaseException] = []

    class Report(cp_model.CpSolverSolutionCallback):  # type: ignore[name-defined]
        def on_solution_callback(self) -> None:
            try:
                if report is not None and not raised:
                    report(self.objective_value, self.best_objective_bound)
            except BaseException as error:  # must not cross the C++ frames below
                raised.append(error)
                self.stop_search()

    status, interrupted = run_stoppable("cp-sat", lambda: solver.solve(model, Report()), solver.stop_search)
    for error in raised:
        if not isinstance(error, KeyboardInterrupt):
            raise error
        interrupted = True
    if status == cp_model.MODEL_INVALID:
        raise AutoshardError(f"CP-SAT refused the model. Received: {model.validate()[:300]}. Please report this.")
    return CpRun(solver, status, interrupted)


def configure(solver: Any, options: CpOptions) -> None:
    """Deterministic settings: fixed number of workers, interleaved search, a seed, the time that is left."""
    workers = options.workers or WORKERS
    p = solver.parameters
    p.num_workers = workers
    p.interleave_search = workers > 1
    p.random_seed = options.seed % (2**31 - 1)
    p.max_time_in_seconds = max(0.01, options.deadline - time.monotonic())
    p.linearization_level = 2
    p.catch_sigint_signal = False  # Python handles Ctrl-C, see run_solver


def solve_net(
    net: Net,
    program: Program,
    rows: Sequence[Row],
    capacity: int | None,
    options: CpOptions,
    *,
    upper: float = math.inf,
    hint: np.ndarray | None = None,
    on_progress: Callable[[dict], None] | None = None,
    unit: int = 1,
) -> CpResult:
    """Minimise the net's cost under memory rows with CP-SAT.

    Args:
        net: what presolve left (``constant`` included in all results).
        program: the original program (bytes of the owners in ``rows``).
        rows: memory rows, the ones the net was built with.
        capacity: bytes per device of each row.
        options: time, seed, workers, gap.
        upper: seconds; only assignments at or below it are of interest.
        hint: choices of all nodes.
        on_progress: called with a dict at each better solution.
        unit: bytes; rows are stated in it, rounded down term by term, which is fast, but only a relaxation when above
            1 (coefficients of billions slow CP-SAT down by orders of magnitude).

    Raises:
        AutoshardError: the model is beyond CP-SAT's integer range.
        EmptyNodeError: a factor has no finite entry.
    """
    cp_model: Any = load_cp_model()

    b = _Builder(net, program, upper)
    b.add_nodes()
    for number in net.factors:
        b.add_factor(number)
        if time.monotonic() > options.deadline:
            return CpResult("unknown", None, b.base, 0.0, 0, 0)
    for r, row in enumerate(rows):
        assert capacity is not None
        expression, largest = b.usage(r, unit)
        if largest >= MAX_INT:
            raise AutoshardError(
                f"A memory row must stay below 2**60 bytes for the solver. Received: {largest} at time {row.time}. "
                "Give bytes in a larger unit."
            )
        if largest > capacity // unit:
            b.model.add(expression <= capacity // unit)
    b.model.minimize(cp_model.LinearExpr.weighted_sum(b.terms, b.coefficients))
    if hint is not None:
        b.add_hint(hint)
    tell = None
    if on_progress is not None:

        def tell(objective: float, bound: float) -> None:
            on_progress(
                {"stage": "cp-sat", "objective": b.base + objective * b.unit, "lower_bound": b.base + bound * b.unit}
            )

    run = run_solver(b.model, options, tell, options.absolute_gap / b.unit)
    sizes = (len(b.model.proto.variables), len(b.model.proto.constraints))
    if run.status == cp_model.INFEASIBLE:
        return CpResult("infeasible", None, upper, 0.0, *sizes)
    bound = b.base + max(0.0, run.solver.best_objective_bound) * b.unit
    if run.status == cp_model.UNKNOWN:
        return CpResult("unknown", None, bound, b.rounding, *sizes, run.interrupted)
    status = "optimal" if run.status == cp_model.OPTIMAL else "feasible"
    return CpResult(status, b.choices(run.solver), bound, b.rounding, *sizes, run.interrupted)


def solve_rows(
    net: Net, program: Program, rows: Sequence[Row], capacity: int, options: CpOptions, **more: Any
) -> CpResult:
    """:func:`solve_net` with coarse rows first; with exact ones when the coarse answer exceeds a row by a little."""
    unit = max(1, capacity // ROW_UNITS)
    result = solve_net(net, program, rows, capacity, options, unit=unit, **more)
    if unit == 1 or result.choices is None or result.interrupted:
        return result
    full = net.complete(result.choices)
    if all(usage(program, row, full) <= capacity for row in rows):
        return result
    return solve_net(net, program, rows, capacity, options, **more)


def minimise_peak(
    net: Net,
    program: Program,
    rows: Sequence[Row],
    options: CpOptions,
    lower: int,
    upper: int,
    hint: np.ndarray | None = None,
) -> tuple[np.ndarray | None, int]:
    """The assignment of ``net`` with the least largest row usage, costs aside.

    Returns:
        Choices below ``upper`` bytes (None: none found), and a valid lower bound in bytes for these rows.
    """
    cp_model: Any = load_cp_model()

    b = _Builder(net, program, math.inf)
    b.add_nodes()
    for number in net.factors:
        b.add_factor(number)
    # Bytes in units, rounded down term by term: what the units prove holds for bytes; plans are measured in bytes.
    unit = max(1, upper // PEAK_UNITS)
    peak = b.model.new_int_var(lower // unit - 1 if unit > 1 else lower, max(lower, upper) // unit, "peak")
    for r in range(len(rows)):
        b.model.add(b.usage(r, unit)[0] <= peak)
    b.model.minimize(peak)
    if hint is not None:
        b.add_hint(hint)
    run = run_solver(b.model, options)
    if run.status == cp_model.INFEASIBLE:
        return None, upper
    known = run.status != cp_model.UNKNOWN
    bound = max(lower, math.ceil(run.solver.best_objective_bound - 0.5) * unit) if known else lower
    choices = b.choices(run.solver) if run.status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    if run.interrupted and choices is None:
        raise KeyboardInterrupt
    return choices, bound

"""The integer program for HiGHS, through OR-Tools MathOpt: what prices and bounds left, under memory rows.

    x[v,s] in {0,1}    strategy s of node v                    sum_s x[v,s] = 1
    y[f,a,b,..] >= 0   cell of a factor's table                sum over the other axes of y[f, a, ..]
                                                                 = sum of x[v,s] with label a
    memory             sum bytes * x + sum bytes * y <= capacity, in parts of the capacity

The variables are those of :mod:`autoshard_ilp.program.cpsat`. The linear relaxation (the local polytope with memory
rows) is close to the optimum where the net is nearly a tree, so a simplex solver needs few branches, and its rounding
finds plans that fill the memory. Memory rows hold within a tolerance; callers check plans in whole bytes.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp._ortools import load_mathopt, load_solve_interrupter, silent_stdout
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.stoppable import run_stoppable

TOLERANCE = 1e-9
"""Relative gap, and by how much rows and reduced costs of the scaled program may be off."""

STOP_SECONDS = 2.0
"""How long a solver that was told to stop is waited for."""

RATIO = 1e-9
"""Costs below this part of the largest are left out of the program: they are below what HiGHS resolves."""


@dataclass(frozen=True, eq=False)
class MilpResult:
    """``status`` is "optimal", "feasible", "infeasible" or "unknown"; ``bound`` in seconds is valid in every case.

    ``error_seconds`` is what costs too small for the program add to the choices: they may be that far from the best.
    """

    status: str
    choices: np.ndarray | None
    bound: float
    error_seconds: float
    interrupted: bool = False


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The optimum of the linear relaxation.

    Attributes:
        prices: of the memory rows, seconds per byte.
        bound: seconds; ``margin_seconds`` is what tolerances may take from it.
        excess: per column, seconds by which a plan that uses it is dearer than the bound, at least (reduced cost).
    """

    prices: np.ndarray
    bound: float
    excess: np.ndarray
    margin_seconds: float


@dataclass(eq=False)
class _Arrays:
    """Columns, and the entries of the matrix, as they grow."""

    cost: list[np.ndarray]
    rows: list[np.ndarray]
    columns: list[np.ndarray]
    values: list[np.ndarray]
    n_columns: int = 0
    n_rows: int = 0

    def add_columns(self, cost: np.ndarray) -> np.ndarray:
        """New columns with these costs; their numbers."""
        numbers = np.arange(self.n_columns, self.n_columns + len(cost))
        self.cost.append(cost)
        self.n_columns += len(cost)
        return numbers

    def add_rows(self, count: int) -> np.ndarray:
        """New rows; their numbers."""
        numbers = np.arange(self.n_rows, self.n_rows + count)
        self.n_rows += count
        return numbers

    def add_entries(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | float) -> None:
        """Entries of the matrix."""
        self.rows.append(np.asarray(rows, np.int64))
        self.columns.append(np.asarray(columns, np.int64))
        self.values.append(np.broadcast_to(np.asarray(values, np.float64), len(columns)))


class Milp:
    """One model of a net.

    Args:
        net: what is left; all factors finite somewhere.
        capacity: bytes of every row of the net.
        upper: seconds; only assignments at or below it are of interest.
        spare: bytes of it to leave free.

    Raises:
        EmptyNodeError: a factor has no finite entry.
    """

    def __init__(self, net: Net, capacity: int, upper: float = math.inf, spare: int = 0) -> None:
        self.net, self.scale = net, max(1, capacity)
        self.room = capacity - spare - net.base
        self.arrays = _Arrays([], [], [], [])
        self.x: dict[int, np.ndarray] = {}  # columns
        self.strategies: dict[int, np.ndarray] = {}  # of those columns
        self.y: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # cells and their columns
        self.base = net.constant
        self.span = self._span(upper)
        held: list[tuple[np.ndarray, np.ndarray]] = []  # columns, bytes per row of memory
        for v in net.live:
            held += self._node(v)
        self.n_binary = self.arrays.n_columns
        one_hot = self.arrays.n_rows
        for number in net.factors:
            held += self._factor(number)
        least = np.zeros(self.arrays.n_rows)
        least[:one_hot] = 1.0
        self.lower, self.upper = least, least.copy()
        self._memory(held)
        self.columns_cost = np.concatenate(self.arrays.cost or [np.zeros(0)])
        self.unit = float(self.columns_cost.max(initial=0.0)) or 1.0

    def _span(self, upper: float) -> float:
        """Seconds above ``base`` that matter; adds up ``base``, the sum of all minima, on the way."""
        net = self.net
        parts = [float(net.cost[v][net.alive[v]].min()) for v in net.live]
        for f in net.factors.values():
            parts.append(float(f.table.min()))
            if math.isinf(parts[-1]):
                raise EmptyNodeError(f.scope[0])
        self.base += math.fsum(parts)
        if math.isinf(upper):
            return float(np.finfo(np.float64).max)
        noise = 1e-12 * abs(upper)  # of the sums behind ``base``
        if self.base > upper + 100 * noise:
            raise EmptyNodeError("bound")
        return max(noise, (upper - self.base) * (1 + 1e-9))

    def _node(self, v: int) -> list[tuple[np.ndarray, np.ndarray]]:
        net = self.net
        alive = net.alive[v]
        cost = net.cost[v][alive]
        low = float(cost.min())
        alive, cost = alive[cost - low <= self.span], cost[cost - low <= self.span]
        self.strategies[v] = alive
        self.x[v] = self.arrays.add_columns(cost - low)
        self.arrays.add_entries(np.repeat(self.arrays.add_rows(1), len(alive)), self.x[v], 1.0)
        own = net.used[v]
        return [] if own is None else [(self.x[v], own[:, alive])]

    def _factor(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        f = self.net.factors[number]
        low = float(f.table.min())
        finite = f.table - low <= self.span
        cells = np.argwhere(finite)
        y = self.arrays.add_columns(f.table[finite] - low)
        self.y[number] = cells, y
        for axis, (v, labels) in enumerate(zip(f.scope, f.labels, strict=True)):
            rows = self.arrays.add_rows(f.table.shape[axis])
            self.arrays.add_entries(rows[cells[:, axis]], y, 1.0)
            self.arrays.add_entries(rows[labels[self.strategies[v]]], self.x[v], -1.0)
        return [] if f.used is None else [(y, f.used[:, finite])]

    def _memory(self, held: list[tuple[np.ndarray, np.ndarray]]) -> None:
        rows = self.arrays.add_rows(len(self.net.base))
        for columns, used in held:
            at, which = np.nonzero(used)
            self.arrays.add_entries(rows[at], columns[which], used[at, which] / self.scale)
        self.lower = np.concatenate((self.lower, np.full(len(rows), -math.inf)))
        self.upper = np.concatenate((self.upper, self.room / self.scale))

    def _proto(self, relaxed: bool = False) -> Any:
        from ortools.math_opt import model_pb2

        a = self.arrays
        proto = model_pb2.ModelProto()
        n = a.n_columns
        proto.variables.ids.extend(range(n))
        proto.variables.lower_bounds.extend([0.0] * n)
        proto.variables.upper_bounds.extend([1.0] * n)
        binary = 0 if relaxed else self.n_binary
        proto.variables.integers.extend([True] * binary + [False] * (n - binary))
        cost = self.columns_cost / self.unit
        cost[cost < RATIO] = 0.0
        paid = np.flatnonzero(cost)
        proto.objective.linear_coefficients.ids.extend(paid.tolist())
        proto.objective.linear_coefficients.values.extend(cost[paid].tolist())
        proto.linear_constraints.ids.extend(range(a.n_rows))
        proto.linear_constraints.lower_bounds.extend(self.lower.tolist())
        proto.linear_constraints.upper_bounds.extend(self.upper.tolist())
        rows, columns, values = (np.concatenate(p or [np.zeros(0)]) for p in (a.rows, a.columns, a.values))
        order = np.lexsort((columns, rows))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(rows[order].astype(np.int64).tolist())
        matrix.column_ids.extend(columns[order].astype(np.int64).tolist())
        matrix.coefficients.extend(values[order].tolist())
        return proto

    def solve(self, deadline: float, seed: int = 0, gap_seconds: float = 0.0) -> MilpResult:
        """Minimise; ``deadline`` in monotonic seconds, ``gap_seconds`` between plan and bound are good enough."""
        result, interrupted = self._run(self._proto(), deadline, seed, gap_seconds)
        if result is None:
            return MilpResult("unknown", None, self.base, 0.0, interrupted)
        return self._read(load_mathopt(), result, interrupted)

    def relax(self, deadline: float, seed: int = 0) -> Relaxation | None:
        """The linear relaxation; None when it is not solved in time.

        Raises:
            EmptyNodeError: even fractions of strategies do not fit.
            KeyboardInterrupt: as it came.
        """
        result, interrupted = self._run(self._proto(relaxed=True), deadline, seed)
        if interrupted:
            raise KeyboardInterrupt
        reasons = load_mathopt().TerminationReason
        if result.termination.reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
            raise EmptyNodeError("rows")
        if result.termination.reason != reasons.OPTIMAL or not result.has_dual_feasible_solution():
            return None
        first = self.arrays.n_rows - len(self.room)
        prices, excess = np.zeros(len(self.room)), np.zeros(self.arrays.n_columns)
        for row, value in result.dual_values().items():
            if row.id >= first:
                prices[row.id - first] = max(0.0, -value) * self.unit / self.scale
        for column, value in result.reduced_costs().items():
            excess[column.id] = max(0.0, value) * self.unit
        bound = self.base + max(0.0, result.objective_value()) * self.unit
        return Relaxation(prices, bound, excess, 10 * TOLERANCE * self.unit)

    def without(self, relaxation: Relaxation, limit: float) -> Net:
        """A copy of the net without the strategies and cells that are in no plan of at most ``limit`` seconds."""
        gone = relaxation.bound + relaxation.excess > limit + relaxation.margin_seconds
        net = self.net.copy()
        for v, columns in self.x.items():
            net.forbid(v, self.strategies[v][gone[columns]])
        for number, (cells, columns) in self.y.items():
            out = np.zeros(net.factors[number].table.shape, bool)
            out[tuple(cells[gone[columns]].T)] = True
            net.forbid_cells(number, out)
        return net

    def _run(self, proto: Any, deadline: float, seed: int, gap_seconds: float = 0.0) -> tuple[Any, bool]:
        """What HiGHS makes of a model, and whether Ctrl-C came meanwhile (then None)."""
        mathopt = load_mathopt()
        model = mathopt.Model.from_model_proto(proto)
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=max(0.01, deadline - time.monotonic())),
            relative_gap_tolerance=TOLERANCE,
            absolute_gap_tolerance=gap_seconds / self.unit,
            random_seed=seed % (2**31 - 1),
            highs=_options(),
        )
        stop = load_solve_interrupter().SolveInterrupter()
        kind = mathopt.SolverType.HIGHS
        with silent_stdout():
            return run_stoppable(
                "highs",
                lambda: mathopt.solve(model, kind, params=parameters, interrupter=stop),
                stop.interrupt,
                STOP_SECONDS,
            )

    def _read(self, mathopt: Any, result: Any, interrupted: bool) -> MilpResult:
        reasons = mathopt.TerminationReason
        reason = result.termination.reason
        if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
            return MilpResult("infeasible", None, math.inf, 0.0, interrupted)
        bound = result.dual_bound()
        bound = self.base + (max(0.0, bound) * self.unit if math.isfinite(bound) else 0.0)
        if not result.has_primal_feasible_solution():
            return MilpResult("unknown", None, bound, 0.0, interrupted)
        x = np.zeros(self.arrays.n_columns)
        for variable, value in result.variable_values().items():
            x[variable.id] = value
        choices = np.zeros(len(self.net.cost), np.int64)
        for v, columns in self.x.items():
            choices[v] = self.strategies[v][int(np.argmax(x[columns]))]
        status = "optimal" if reason == reasons.OPTIMAL else "feasible"
        tiny = np.where(self.columns_cost < RATIO * self.unit, self.columns_cost, 0.0)
        return MilpResult(status, choices, bound, float(tiny @ x), interrupted)


def _options() -> Any:
    from ortools.math_opt.solvers import highs_pb2

    options = highs_pb2.HighsOptionsProto()
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance", "mip_feasibility_tolerance"):
        options.double_options[name] = TOLERANCE
    return options

"""CP-SAT on a flat program that reductions and value bounds have made small enough.

    x[v,s] in {0,1}, y[e,a,b] >= 0      sum_s x[v,s] = 1,  sum_b y[e,a,b] = x[u,a],  sum_a y[e,a,b] = x[v,b]
    rows                                sum of use * x <= room, added when a solution exceeds them

Costs are integers (rounded down in units, so the bound is valid); bytes are rounded down in coarse units first, and a
row that a solution exceeds by less than the rounding is stated again in bytes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autoshard_ilp._ortools import load_cp_model
from autoshard_ilp.program.cpsat import CpOptions, run_solver
from autoshard_ilp.program.large.flat import Flat

RESOLUTION = 2**36  # objective units between the sum of all minima and the upper bound
EXACT_SPAN = 2**44  # integer costs up to this stay as they are
ROW_UNITS = 2**20
NEW_ROWS = 8  # per solution


@dataclass(frozen=True, eq=False)
class Answer:
    """``x``: best assignment that fits, or None. ``bound`` is valid for the program in every case."""

    x: np.ndarray | None
    cost: float
    bound: float
    proved: bool  # nothing is cheaper than ``cost`` (or than the upper bound given)
    rounding: float  # cost units that proof and bound may be off
    interrupted: bool = False


class _Model:
    """One CP-SAT model; rows are added to it from solve to solve."""

    def __init__(self, flat: Flat, upper: float) -> None:
        self.cp = load_cp_model()
        self.flat = flat
        self.model = self.cp.CpModel()
        owner = np.repeat(np.arange(len(flat.eu)), np.diff(flat.toff))
        least_cost = np.minimum.reduceat(flat.cost, flat.off[:-1])
        least_cell = np.minimum.reduceat(flat.table, flat.toff[:-1]) if len(flat.table) else np.zeros(0)
        self.base = float(least_cost.sum() + least_cell.sum())
        costs = flat.cost - np.repeat(least_cost, flat.counts)
        cells = flat.table - least_cell[owner]
        finite = cells[np.isfinite(cells)]
        span = upper - self.base if math.isfinite(upper) else float(costs.sum() + finite.sum())
        self.span = max(span, 1e-12 * max(1.0, abs(self.base)))
        whole = self.span < EXACT_SPAN and all(bool((part == np.floor(part)).all()) for part in (flat.cost, finite))
        self.unit = 1.0 if whole else self.span / RESOLUTION
        self.rounding = 0.0 if whole else self.unit * (flat.nodes + len(flat.eu))
        self.variables: list = []
        self.weights: list[int] = []
        self.x: list = [None] * len(costs)
        for v in range(flat.nodes):
            own = [self._variable(i, costs) for i in range(flat.off[v], flat.off[v + 1]) if costs[i] <= self.span]
            self.model.add_exactly_one(own)
        for e in range(len(flat.eu)):
            self._link(e, cells)
        self.model.minimize(self.cp.LinearExpr.weighted_sum(self.variables, self.weights))

    def _price(self, variable: object, cost: float) -> None:
        if int(cost / self.unit):
            self.variables.append(variable)
            self.weights.append(int(cost / self.unit))

    def _variable(self, i: int, costs: np.ndarray) -> object:
        self.x[i] = self.model.new_bool_var("")
        self._price(self.x[i], float(costs[i]))
        return self.x[i]

    def _link(self, e: int, cells: np.ndarray) -> None:
        """The local polytope of one table; cells dearer than the span are left out."""
        f = self.flat
        ou, ov = int(f.off[f.eu[e]]), int(f.off[f.ev[e]])
        table = cells[f.toff[e] : f.toff[e + 1]].reshape(f.counts[f.eu[e]], f.counts[f.ev[e]])
        rows: list[list] = [[] for _ in range(table.shape[0])]
        columns: list[list] = [[] for _ in range(table.shape[1])]
        for a, b in np.argwhere(table <= self.span).tolist():
            if self.x[ou + a] is None or self.x[ov + b] is None:
                continue
            y = self.model.new_bool_var("")
            self._price(y, float(table[a, b]))
            rows[a].append(y)
            columns[b].append(y)
        for start, sums in ((ou, rows), (ov, columns)):
            for a, own in enumerate(sums):
                if self.x[start + a] is not None:
                    self.model.add(self.cp.LinearExpr.sum(own) == self.x[start + a])

    def add_row(self, r: int, unit: int) -> None:
        """State memory row ``r`` in units of ``unit`` bytes, every term rounded down."""
        f = self.flat
        variables, weights = [], []
        for g in np.flatnonzero((f.sstart <= r) & (r < f.send)).tolist():
            v = int(np.searchsorted(f.soff, g, side="right")) - 1
            for s in range(f.off[v + 1] - f.off[v]):
                held = int(f.use[f.uoff[g] + s]) // unit
                if held and self.x[f.off[v] + s] is not None:
                    variables.append(self.x[f.off[v] + s])
                    weights.append(held)
        room = int(f.capacity - f.base[r])
        self.model.add(self.cp.LinearExpr.weighted_sum(variables, weights) <= room // unit)

    def hint(self, x: np.ndarray) -> None:
        """Start from ``x``."""
        self.model.clear_hints()
        chosen = set((self.flat.off[:-1] + x).tolist())
        for i, variable in enumerate(self.x):
            if variable is not None:
                self.model.add_hint(variable, int(i in chosen))

    def read(self, solver: object) -> np.ndarray:
        """The assignment found."""
        value = [v is not None and solver.boolean_value(v) for v in self.x]  # type: ignore[attr-defined]
        return np.flatnonzero(value) - self.flat.off[:-1]


def solve_exactly(flat: Flat, rows: list[int], upper: float, hint: np.ndarray | None, options: CpOptions) -> Answer:
    """Minimise ``flat`` (whose times are memory rows) below ``upper``.

    Args:
        flat: the program.
        rows: memory rows to begin with.
        upper: only cheaper assignments are of interest.
        hint: an assignment to start from.
        options: deadline (monotonic seconds), seed, workers.
    """
    m = _Model(flat, upper)
    unit = max(1, flat.capacity // ROW_UNITS)
    stated: dict[int, int] = {}
    for r in rows:
        stated[r] = unit
        m.add_row(r, unit)
    best, cost, bound = None, upper, m.base
    while True:
        if hint is not None:
            m.hint(hint)
        run = run_solver(m.model, options)
        if run.status == m.cp.INFEASIBLE:
            return Answer(best, cost, cost, True, m.rounding, run.interrupted)
        bound = max(bound, m.base + run.solver.best_objective_bound * m.unit)
        if run.status == m.cp.UNKNOWN:
            return Answer(best, cost, min(bound, cost), False, m.rounding, run.interrupted)
        hint = m.read(run.solver)
        excess = flat.usage(hint) - flat.capacity
        over = np.flatnonzero(excess > 0)
        if not len(over):
            if flat.value(hint) < cost:
                best, cost = hint, flat.value(hint)
            proved = run.status == m.cp.OPTIMAL
            return Answer(best, cost, cost if proved else min(bound, cost), proved, m.rounding, run.interrupted)
        if run.interrupted or time.monotonic() > options.deadline:
            return Answer(best, cost, min(bound, cost), False, m.rounding, run.interrupted)
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        peaks = sorted((int(part[np.argmax(excess[part])]) for part in runs), key=lambda r: -excess[r])
        for r in peaks[:NEW_ROWS]:
            exact = 1 if r in stated else unit
            stated[r] = exact
            m.add_row(r, exact)

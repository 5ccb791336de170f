"""The Lagrangian dual of the memory rows, by cutting planes over message passing.

For prices l >= 0 per byte and row,

    D(l) = min_x  cost(x) + sum_r l_r (usage_r(x) - capacity)

bounds the optimum from below, and message passing bounds D(l) from below. Any assignment x gives a cut: D(l) is at most
``cost(x) + l (usage(x) - capacity)`` for all l. The next prices maximise the least cut within a box around the best
prices; the box grows when they are better and shrinks when they are not. Few rows ever carry a price, so the linear
programs stay small: rows enter when a plan exceeds them.

Source of the box method: R. E. Marsten, W. W. Hogan, J. W. Blankenship, "The boxstep method for large-scale
optimization", Operations Research 23 (1975).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.large import kernels_messages
from autoshard_ilp.program.large.graph import Graph
from autoshard_ilp.program.large.local import priced

SWEEPS = 4  # per price vector
MOST_CUTS = 200
NEW_ROWS = 10  # per cut
PATIENCE = 60  # steps without a notable rise
CONVERGED = 1e-9  # relative distance of bound and model
WIDEST = 4.0  # the box: prices may change by this factor ..
FIRST_STEP = 0.02  # .. and rows without a price may get this part of the bound per capacity


@dataclass(eq=False)
class Dual:
    """Prices, bound and value bounds of one graph; ``step`` improves them."""

    graph: Graph
    bound: float = -math.inf
    upper: float = math.inf  # the best known cost, if any
    converged: bool = False
    steps: int = 0
    last_rise: int = 0  # step of the last notable rise of the bound
    spread: float = WIDEST
    birth: float = FIRST_STEP
    cuts: list[tuple[float, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        f = self.graph.flat
        self.prices = np.zeros(len(self.graph.room))
        self.next = self.prices
        self.proposal: np.ndarray | None = None  # prices to try next, from another search
        self.messages = np.zeros(self.graph.moff[-1])
        self.hat = np.zeros(int(f.counts.max(initial=1)))
        self.x = np.zeros(f.nodes, np.int64)
        self.excess = np.zeros(len(f.cost))
        self.value_bounds = np.full(len(f.cost), -np.inf)  # what an assignment with this value costs at least
        self.rows: dict[int, None] = {}
        self.scale = float(max(1, f.capacity))
        self.room = self.graph.room.astype(np.float64)

    @property
    def settled(self) -> bool:
        """True when the bound does not rise any more, or hardly."""
        return self.converged or self.steps - self.last_rise > PATIENCE

    def warm_start(self, old: Dual, times: np.ndarray) -> None:
        """Begin with the prices of an earlier dual; ``times``: for each row, its number there."""
        self.next = self.prices = old.prices[times]
        place = {int(t): r for r, t in enumerate(times)}
        self.rows = {place[r]: None for r in old.rows if r in place}
        self.upper = old.upper

    def step(self) -> np.ndarray:
        """One price vector: sweep, cut, move. Returns the decoded assignment (which may not fit)."""
        proposal, self.proposal = self.proposal, None
        if proposal is not None:
            self.next = proposal
        better = self._evaluate(self.next, SWEEPS if self.steps and proposal is None else 3 * SWEEPS)
        self.add_cut(self.x)
        self.steps += 1
        if better:
            self.spread, self.birth = min(WIDEST, self.spread * 1.3), min(0.05, self.birth * 1.5)
        else:
            self.spread, self.birth = max(1.02, self.spread**0.8), max(1e-5, self.birth * 0.8)
        if self.rows and self.cuts:
            self.next, model = self._master()
        else:  # rows without a cut come from an earlier dual
            self.next, model = self.prices, math.inf if self.rows else self.bound
        scale = max(abs(self.bound), 1e-300)
        close = model - self.bound <= CONVERGED * scale
        self.converged = close and (self.spread > 1.5 if self.rows else self.steps > 50)
        if close and not self.converged:  # perhaps only because the box is small
            self.spread, self.birth = WIDEST, FIRST_STEP
        return self.x.copy()

    def _evaluate(self, prices: np.ndarray, sweeps: int) -> bool:
        """Message passing at ``prices``; True when the bound rose."""
        f, g = self.graph.flat, self.graph
        theta = priced(g, prices)
        offset = float(prices @ self.room)
        before = -math.inf
        bound = -math.inf
        for _ in range(sweeps):
            before = bound
            bound = kernels_messages.sweep(
                *(f.off, theta, g.ioff, g.nbr, g.opp, g.tb, g.tab, g.moff, self.messages, self.hat, self.x),
                self.excess,
            )
            # during a backward pass the trees through a node hold true min-marginals, and the bound so far is at
            # least that of the pass before
            if before > -math.inf:
                np.maximum(self.value_bounds, before - offset + self.excess, out=self.value_bounds)
        value = bound - offset
        if value <= self.bound:
            return False
        if value > self.bound + 1e-7 * abs(value):
            self.last_rise = self.steps
        self.bound, self.prices = value, prices
        return True

    def add_cut(self, x: np.ndarray) -> None:
        """Use an assignment as a cut; the worst rows that it exceeds may get a price."""
        f = self.graph.flat
        cost = f.value(x)
        if not math.isfinite(cost):
            return
        excess = (f.usage(x) - f.capacity) / self.scale
        over = np.flatnonzero(excess > 0)
        self.cuts.append((cost, excess))
        if not len(over):
            return
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        peaks = [int(run[np.argmax(excess[run])]) for run in runs]
        peaks.sort(key=lambda r: -excess[r])
        self.rows.update(dict.fromkeys(peaks[:NEW_ROWS]))

    def _master(self) -> tuple[np.ndarray, float]:
        """The prices in the box that maximise the least cut, and that maximum."""
        from scipy.optimize import linprog

        rows = np.fromiter(self.rows, np.int64)
        costs = np.array([c for c, _ in self.cuts])
        slopes = np.array([g[rows] for _, g in self.cuts])
        rest = self.prices.copy()  # of the other rows: they move together, by one factor
        rest[rows] = 0.0
        unit = max(abs(self.bound), float(np.abs(costs).min()), 1e-300)
        center = self.prices[rows] * self.scale / unit
        low, high = center / self.spread, center * self.spread + self.birth
        low[low < self.birth] = 0.0
        together = np.array([float(g @ rest) for _, g in self.cuts]) * self.scale / unit
        slopes = np.hstack((slopes, together[:, None]))
        low, high = np.append(low, 1.0 / self.spread), np.append(high, self.spread)
        result = linprog(
            np.concatenate(([-1.0], np.zeros(len(low)))),
            A_ub=np.hstack((np.ones((len(costs), 1)), -slopes)),
            b_ub=costs / unit,
            bounds=[(None, None), *zip(low.tolist(), high.tolist(), strict=True)],
            method="highs",
        )
        if result.x is None:
            self.spread, self.birth = WIDEST, FIRST_STEP
            return self.prices, math.inf
        prices = rest * max(0.0, result.x[-1])
        prices[rows] = np.maximum(0.0, result.x[1:-1]) * unit / self.scale
        if len(self.cuts) > MOST_CUTS:
            tight = np.argsort(result.slack, kind="stable")[: MOST_CUTS * 3 // 4].tolist()
            kept = sorted({*tight, *range(len(self.cuts) - 20, len(self.cuts))})
            self.cuts = [self.cuts[i] for i in kept]
        return prices, float(result.x[0]) * unit

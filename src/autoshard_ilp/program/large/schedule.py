"""What a search does, turn by turn: episodes that begin at a decoded or at the best assignment.

| episode | turns |
|---|---|
| walk | prices decode into an assignment; repair; local search at the dual's prices, at none, and in between |
| anneal | from the best: local search that also accepts what is dearer, less and less; then without prices |
| trade | from the best: local search that regards prices only; the cheapest subset of its changes that fits |
| dive | a few values that the bounds leave open are forced, and message passing decodes what follows from them |

After each turn, the parts of the present assignment that make the best one cheaper go into it.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from autoshard_ilp.program.cpsat import CpOptions
from autoshard_ilp.program.large import kernels_messages
from autoshard_ilp.program.large.crossover import combine, combine_best
from autoshard_ilp.program.large.local import LocalSearch, priced
from autoshard_ilp.program.large.stage import Stage
from autoshard_ilp.program.large.walk import PriceWalk

Turn = tuple[float, float]  # scale of the dual's prices, heat as part of the gap

DESCENT: tuple[Turn, ...] = ((1.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 0.0), (0.2, 0.0), (0.0, 0.0))
SHARES = {"walk": 0.15, "anneal": 0.4, "trade": 0.15, "dive": 0.3}  # of the episodes, once an assignment fits
LARGEST_TREE = 512
FORCED_PERCENT = 50
REPAIRS = 15  # turns before another start is tried
ENOUGH_STEPS = 80  # of the walk, before something that does not fit is repaired
HOPELESS = 1.0  # gaps above the best at which a descent from a decoded assignment ends
TRADE_SPREAD = 0.1  # relative spread of the prices at which memory is traded
TRADE_SECONDS = 2.0  # for CP-SAT
DIVE_SWEEPS = 6
MOST_FORCED = 3  # values per dive


class Schedule:
    """``turn`` spends one slice of time.

    Args:
        stage: the program and its searches.
        seed: of random choices.
        start: assignment to begin with; None: the first comes from the price walk.
        deadline: monotonic seconds.
    """

    def __init__(self, stage: Stage, seed: int, start: np.ndarray | None, deadline: float) -> None:
        self.stage, self.deadline = stage, deadline
        self.walk = PriceWalk(stage.graph, seed)
        first = np.zeros(stage.graph.flat.nodes, np.int64) if start is None else start
        self.local = LocalSearch(stage.graph, first, seed)
        self.random = np.random.default_rng(seed)
        self.penalty = np.zeros(len(stage.graph.room))
        self.candidate: tuple[int, float, np.ndarray] | None = None  # 1: exceeds memory, 2: impossible; figure; itself
        self.walking = start is None
        self.turns: deque[Turn] = deque(() if start is None else DESCENT)
        self.scratch = np.zeros(len(stage.graph.flat.cost))
        self.repairs = 0
        self.steps = 0  # of the walk in this episode

    def turn(self, seconds: float) -> None:
        """One slice."""
        if self.walking:
            self._walk(seconds)
        elif not self.local.fits:
            self._repair(seconds / 4)
        elif self.turns:
            self._descend(seconds)
        else:
            self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        """Choose the next episode."""
        best = self.stage.pool.best
        kind = "walk" if best is None else self.random.choice(list(SHARES), p=list(SHARES.values()))
        if kind == "walk" or best is None:
            self.walking = True
            self._walk(seconds)
            return
        self.local.move_to(best)
        if kind == "trade":
            self._trade(best, seconds)
            return
        if kind == "dive":
            self._dive(best, seconds)
            return
        heat = float(10.0 ** self.random.uniform(-5.0, -1.5))
        scale = float(self.random.choice((0.0, 0.2, 0.5, 1.0)))
        self.turns.extend(((scale, heat), (scale, heat / 5), (scale, 0.0), (0.0, 0.0)))
        self._descend(seconds)

    @property
    def _gap(self) -> float:
        pool = self.stage.pool
        return max(1e-9 * abs(pool.cost), pool.cost - self.stage.dual.bound) if pool.best is not None else 0.0

    def _descend(self, seconds: float) -> None:
        """One turn of local search; turns without prices repeat as long as they help."""
        local, pool = self.local, self.stage.pool
        scale, heat = self.turns.popleft()
        before = local.score[0]
        local.set_prices(self.stage.dual.prices * scale)
        local.run(seconds, LARGEST_TREE, FORCED_PERCENT, heat * self._gap)
        if local.best is not None:
            pool.offer(local.best, float(local.score[3]))
        self._cross()
        if scale == heat == 0.0 and local.score[0] < before:
            self.turns.appendleft((0.0, 0.0))
        if scale == heat == 0.0 and local.score[0] > pool.cost + HOPELESS * self._gap:
            self.turns.clear()

    def _walk(self, seconds: float) -> None:
        """Collect decoded assignments; move local search to the best of them."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._consider(self.walk.step())
            self.steps += 1
        for x in list(self.stage.starts):
            self._consider(x)
        self.stage.starts.clear()
        if self.candidate is None or (self.candidate[0] and self.steps < ENOUGH_STEPS):
            return
        self.local.move_to(self.candidate[2])
        self.penalty[:] = 0.0
        self.candidate, self.repairs, self.steps = None, 0, 0
        self.walking, self.turns = False, deque(DESCENT)

    def _consider(self, x: np.ndarray) -> None:
        flat = self.stage.graph.flat
        cost = flat.value(x)
        possible = np.isfinite(cost)
        over = float(np.maximum(0, flat.usage(x) - flat.capacity).sum(dtype=np.float64))
        candidate = (2 * (not possible) + (over > 0), over or cost, x)
        if self.candidate is None or candidate[:2] < self.candidate[:2]:
            self.candidate = candidate
        if possible and not over:
            self.stage.pool.offer(x, cost)

    def _cross(self) -> None:
        """Bring the better parts of the present assignment into the best one."""
        local, pool = self.local, self.stage.pool
        flat, best = self.stage.graph.flat, pool.best
        if best is None or not local.fits or not np.isfinite(flat.value(local.x)):
            return
        child = combine(flat, best, local.x, self.stage.dual.prices)
        cost = flat.value(child)
        if cost < flat.value(best):
            pool.offer(child, cost)
            local.move_to(child)

    def _trade(self, best: np.ndarray, seconds: float) -> None:
        """Let the best assignment buy and sell memory at about the dual's prices; keep what pays and fits.

        Local search without the rows changes many parts, each of which pays at those prices; the cheapest subset
        that fits is a knapsack problem.
        """
        local, flat = self.local, self.stage.graph.flat
        factor = float(np.exp(self.random.normal(0.0, TRADE_SPREAD)))
        heat = self._gap * float(self.random.choice((0.0, 1e-4, 1e-3)))
        local.set_prices(self.stage.dual.prices * factor)
        local.run(seconds, LARGEST_TREE, FORCED_PERCENT, heat, free=True)
        other = local.x.copy()
        local.move_to(best)
        if np.isfinite(flat.value(other)):
            self._take_best_parts(best, other)

    def _take_best_parts(self, best: np.ndarray, other: np.ndarray) -> None:
        """The knapsack crossover of the best assignment with another one, which need not fit."""
        until = min(self.deadline, time.monotonic() + TRADE_SECONDS)
        if time.monotonic() > until - 0.05:
            return
        flat = self.stage.graph.flat
        child = combine_best(flat, best, other, CpOptions(until, 0, 1))
        cost = flat.value(child)
        if cost < flat.value(best):
            self.stage.pool.offer(child, cost)
            self.local.move_to(child)

    def _dive(self, best: np.ndarray, seconds: float) -> None:
        """Force values that may still be part of a better assignment; polish what message passing makes of it."""
        stage, flat, g = self.stage, self.stage.graph.flat, self.stage.graph
        own = flat.off[:-1] + best
        open_values = stage.dual.value_bounds < stage.pool.cost
        open_values[own] = False
        choices = np.flatnonzero(open_values)
        if not len(choices):
            return
        theta = priced(g, stage.dual.prices * float(np.exp(self.random.normal(0.0, TRADE_SPREAD))))
        for i in self.random.choice(choices, self.random.integers(1, MOST_FORCED + 1)).tolist():
            v = int(np.searchsorted(flat.off, i, side="right")) - 1
            kept = theta[i]
            theta[flat.off[v] : flat.off[v + 1]] = np.inf
            theta[i] = kept
        messages, x = stage.dual.messages.copy(), best.copy()
        for _ in range(DIVE_SWEEPS):
            kernels_messages.sweep(
                *(flat.off, theta, g.ioff, g.nbr, g.opp, g.tb, g.tab, g.moff, messages, self.walk.hat, x),
                self.scratch,
            )
        if not np.isfinite(flat.value(x)):
            return
        self.local.set_prices(stage.dual.prices)
        self.local.move_to(x)
        self.local.run(seconds, LARGEST_TREE, FORCED_PERCENT, 0.0, free=True)
        x = self.local.x.copy()
        self.local.move_to(best)
        if np.isfinite(flat.value(x)):
            self._take_best_parts(best, x)
            self.local.move_to(x)
            self.penalty[:], self.repairs = 0.0, 0
            self.turns.extend(((1.0, 0.0), (0.0, 0.0)))

    def _repair(self, seconds: float) -> None:
        """Raise the prices of the rows that are exceeded."""
        stage, local = self.stage, self.local
        over = local.over().astype(np.float64)
        prices = self.walk.prices
        typical = float(prices.sum()) or 0.05 * abs(local.score[0]) / max(1, stage.graph.flat.capacity)
        self.penalty[over > 0] *= 1.3
        self.penalty += 0.3 * typical * over / over.sum()
        local.set_prices(prices + self.penalty)
        local.run(seconds, LARGEST_TREE, FORCED_PERCENT)
        self.repairs += 1
        self.walking = self.repairs > REPAIRS

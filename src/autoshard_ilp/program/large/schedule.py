"""What a search does, turn by turn: episodes of price walk, repair, local search, crossover."""

from __future__ import annotations

import time

import numpy as np

from autoshard_ilp.program.large.crossover import combine
from autoshard_ilp.program.large.local import LocalSearch
from autoshard_ilp.program.large.stage import Stage
from autoshard_ilp.program.large.walk import PriceWalk

SCALES = (1.0, 0.0, 0.5, 0.0, 0.2, 0.0)  # of the prices in local search, turn by turn
LARGEST_TREE = 512
FORCED_PERCENT = 50
REPAIRS = 15  # turns before another start is tried
ENOUGH_STEPS = 80  # of the walk, before something that does not fit is repaired


class Schedule:
    """``turn`` spends one slice of time.

    Args:
        stage: the program and its searches.
        seed: of random choices.
        start: assignment to begin with; None: the first comes from the price walk.
    """

    def __init__(self, stage: Stage, seed: int, start: np.ndarray | None) -> None:
        self.stage = stage
        self.walk = PriceWalk(stage.graph, seed)
        first = np.zeros(stage.graph.flat.nodes, np.int64) if start is None else start
        self.local = LocalSearch(stage.graph, first, seed)
        self.penalty = np.zeros(len(stage.graph.room))
        self.candidate: tuple[int, float, np.ndarray] | None = None  # 1: exceeds memory, 2: impossible; figure; itself
        self.position = -1 if start is None else 0  # in the episode: -1 walk, then repair and the scales
        self.repairs = 0
        self.steps = 0  # of the walk in this episode

    def turn(self, seconds: float) -> None:
        """One slice."""
        local = self.local
        if self.position < 0:
            self._walk(seconds)
        elif not local.fits:
            self._repair(seconds / 4)
        else:
            scale = SCALES[self.position]
            before = local.score[0]
            local.set_prices(self.stage.dual.prices * scale)
            local.run(seconds, LARGEST_TREE, FORCED_PERCENT)
            if local.best is not None:
                self.stage.pool.offer(local.best, float(local.score[3]))
            self._cross()
            if scale > 0 or not local.score[0] < before:
                self.position += 1
            if self.position == len(SCALES):
                self.position = -1

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
        self.candidate, self.position, self.repairs, self.steps = None, 0, 0, 0

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
        if self.repairs > REPAIRS:
            self.position = -1

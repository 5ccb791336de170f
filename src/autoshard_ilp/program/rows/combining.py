"""The best plan within the strategies of a few plans: the decisions they share are made, and the rest is small.

Plans met on the way to good prices hold too much at one moment or cost too much at another; the good parts of several
together often fit. So little is left to decide that there may be a row for every moment at which a plan does not fit.
"""

from __future__ import annotations

import math
import time

import numpy as np

from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.rows.memory import Row, violated_times
from autoshard_ilp.program.rows.under import UnderRows
from autoshard_ilp.program.window.window import Window

POOL = 8  # plans combined, with the best known
POOL_SECONDS = 2.0
POOR = 0.1  # relative gap of a plan that is poor: then, first ..
PAIR = 2  # .. fewer plans, which hold less
POOR_SHARE = 0.2  # of the time left, where no plan is known
POOL_PART = 0.4  # of that time, for one window
POOL_STEP = 0.02  # relative, of the first window above the bound ..
POOL_GROWTH = 4.0  # .. and of the next
POOL_CELLS = 60_000  # what is left of more takes long, and is only worth it while the best plan is poor
POOL_TRIES = 3  # windows that hold too much, before it gives up
CELLS = 5_000  # largest table that presolve makes


def combine(owner: UnderRows, prices: np.ndarray) -> list[int]:
    """Offer the best plan within the strategies of the last plans seen and the best known.

    Args:
        owner: the plans seen, the rows, the search.
        prices: of the rows, seconds per byte.

    Returns:
        Times to add as rows, where a plan was found that does not fit.
    """
    search, rows, fresh = owner.search, list(owner.rows), list[int]()
    none = math.isinf(search.upper)
    poor = none or search.upper - search.lower > POOR * abs(search.upper)
    for most in (PAIR, POOL) if poor else (POOL,):
        now = time.monotonic()
        seconds = max(POOL_SECONDS, POOR_SHARE * (search.deadline - now) if none else 0.0)
        combination = _Combination(owner, most, math.inf if poor else POOL_CELLS, min(search.deadline, now + seconds))
        fresh = combination.run(rows, prices)
        if owner.stop():
            break
    return fresh


class _Combination:
    """The strategies of so many plans, the last ones seen and the best; small, if there are at most ``cells`` left."""

    def __init__(self, owner: UnderRows, most: int, cells: float, deadline: float) -> None:
        self.owner, self.search, self.cells, self.deadline = owner, owner.search, cells, deadline
        best = self.search.best
        self.keep = [np.zeros(len(n.costs), bool) for n in owner.program.nodes]
        for choices in owner.seen[-most:] + ([] if best is None else [best]):
            for v, s in enumerate(choices.tolist()):
                self.keep[v][s] = True

    def run(self, rows: list[Row], prices: np.ndarray) -> list[int]:
        """Offer the best plan; adds to ``rows`` moments at which others do not fit, and returns the last of these."""
        owner, fresh = self.owner, list[int]()
        while time.monotonic() < self.deadline:
            plan = self._best(rows, np.append(prices, np.zeros(len(rows) - len(prices))))
            if plan is None or self.search.offer(plan):
                return []
            fresh = violated_times(owner.program, plan, owner.capacity, {r.time for r in rows})
            if not fresh:
                break
            rows += [owner.owners.row(t) for t in fresh]
        return fresh

    def _best(self, rows: list[Row], prices: np.ndarray) -> np.ndarray | None:
        """The best plan under rows, if it is better than the best known.

        Windows far above the bound hold too much, so they get wider only as long as they hold no plan.
        """
        owner, search, capacity = self.owner, self.search, self.owner.capacity
        try:
            net = build_net(owner.program, self.keep, rows, owner.room.cells)
            search.presolve(net, 99, CELLS, capacity)
            if not net.live:
                return None if (net.base > capacity).any() else net.complete(np.zeros(len(net.cost), np.int64))
            if net.size()["cells"] > self.cells:
                return None
            reduce.compress_all(net)
            window = Window(net, capacity, [prices, np.full(len(rows), owner.first_price())], self.deadline)
        except EmptyNodeError:
            return None
        known, failed, tries = max(search.lower, window.bound), math.inf, 0
        step = POOL_STEP * max(abs(known), owner.first_price() * capacity)
        while known < search.upper and tries < POOL_TRIES and time.monotonic() < self.deadline:
            limit = min(known + step, search.upper)
            if limit >= failed:
                limit = 0.5 * (known + failed)
            now = time.monotonic()
            found = window.solve(limit, now + POOL_PART * (self.deadline - now))
            if found.choices is not None:
                return net.complete(found.choices)
            if found.status == "infeasible":
                known, step = limit, POOL_GROWTH * step
            else:
                failed, tries = limit, tries + 1
        return None

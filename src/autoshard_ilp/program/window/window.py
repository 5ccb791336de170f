"""The best plan of at most a given cost, or the proof that there is none.

A limit close to the optimum leaves few rows, however many plans there are: nodes are eliminated where that leaves few,
message passing over what is left raises the bounds, which leaves fewer; then wider nodes follow.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.prices import PricedRows
from autoshard_ilp.program.window.fronts import best_plan
from autoshard_ilp.program.window.partial import completed, keep_wanted
from autoshard_ilp.program.window.relations import Relations
from autoshard_ilp.program.window.relaxations import Relaxations
from autoshard_ilp.program.window.tighten import tighten
from autoshard_ilp.program.window.widths import Widths

ROWS = 20_000  # of a bucket, at first
MOST_ROWS = 1_300_000
WIDER = 4
DEPTH = 8  # splits of what stays wide, one within the other
LESS = 0.8  # of the rows: worth trying again before buckets get wider


@dataclass(frozen=True, eq=False)
class Found:
    """``status`` is "optimal", "infeasible" (no plan within the limit) or "unknown" (too wide, or out of time).

    ``choices`` may be a plan, not proved the best, where the status is unknown. ``bound`` is a lower bound of all plans
    that fit, in seconds: at most the limit, or what the plan costs.
    ``relaxed`` is what the relaxations proved before rows of several together were found to leave nothing. ``left``:
    what plans within the limit may use, per live node its strategies; None where time ran out before that was known.
    """

    status: str
    choices: np.ndarray | None
    bound: float
    relaxed: float
    left: dict[int, np.ndarray] | None = None


class Window:
    """The plans of a net within limits.

    Args:
        net: presolved, labels compressed, true costs, with memory rows.
        capacity: bytes of every row.
        prices: seconds per byte and row: those to try, the best known first.
        deadline: monotonic seconds, after which the first bounds rise no more.
        settled: messages of the net under the first prices, where some are known.

    Raises:
        EmptyNodeError: a node has no finite strategy.
    """

    def __init__(
        self,
        net: Net,
        capacity: int,
        prices: Sequence[np.ndarray],
        deadline: float = math.inf,
        settled: Messages | None = None,
    ) -> None:
        self.net = net
        self.relaxed = Relaxations(net, capacity, prices, deadline, settled)

    @property
    def bound(self) -> float:
        """A lower bound in seconds of all plans that fit."""
        return self.relaxed.seconds(self.relaxed.bounds())

    def solve(self, limit: float, deadline: float) -> Found:
        """The best plan of at most ``limit`` seconds; ``deadline`` in monotonic seconds."""
        relaxed = self.relaxed
        self.limit, self.limits, self.deadline = limit, relaxed.limits(limit), deadline
        self.best: np.ndarray | None = None
        self.proved = -math.inf
        self.left: dict[int, np.ndarray] | None = None
        bounds = relaxed.bounds()
        try:
            if (bounds > self.limits).any() or (self.net.base > relaxed.capacity).any():
                raise EmptyNodeError(-1)
            ended = self._search(Relations(relaxed, self.limits - bounds), bounds, ROWS, DEPTH)
        except EmptyNodeError:
            ended = True
        known = max(self.proved, relaxed.seconds(bounds))
        if not ended:
            return Found("unknown", self.best, min(self.limit, known), known, self.left)
        status = "infeasible" if self.best is None else "optimal"
        return Found(status, self.best, self.limit, known)

    def _search(self, relations: Relations, bounds: np.ndarray, most: int, depth: int) -> bool:
        """Look for plans within the limit, which every plan found lowers; False where something is left open.

        Args:
            relations: used up.
            bounds: of the relaxations.
            most: rows of a bucket.
            depth: how often what is too wide may be split.
        """
        top = depth == DEPTH
        try:
            while True:
                self._narrow(relations, most)
                if not relations.live:
                    bounds = bounds + relations.finish()
                    break
                if time.monotonic() > self.deadline:
                    return False
                before = relations.count()
                bounds, chosen = tighten(relations, bounds, self.limits, self.deadline)
                if top:
                    self.proved = self.relaxed.seconds(bounds)
                if chosen is not None and self._try(relations, chosen):
                    relations.room = self.limits - bounds
                    relations.prune()
                if relations.count() > LESS * before:
                    if most * WIDER <= MOST_ROWS:
                        most *= WIDER
                    elif depth:
                        if top:
                            self.left = relations.left()
                        return self._split(relations, bounds, most, depth)
                    else:
                        return False
        except EmptyNodeError:
            return True
        if top:
            self.proved = self.relaxed.seconds(bounds)
        outside = keep_wanted(self.relaxed, relations.buckets, self.limits)
        if not len(relations.buckets[-1].strategy):
            return True
        found = best_plan(self.relaxed, relations.buckets, outside, self.limit, self.deadline)
        if top and not found.ended:
            self.left, self.proved = relations.left(), max(self.proved, found.bound)
        if found.choices is not None:
            self.best, self.limit = found.choices, self.net.value(found.choices)
            self.limits = self.relaxed.limits(self.limit)
        return found.ended

    def _try(self, relations: Relations, chosen: dict[int, int]) -> bool:
        """Take over the plan of what is chosen of the nodes left, and its cost as the limit, where it is wanted."""
        choices = completed(self.relaxed, relations, chosen)
        if choices is None:
            return False
        cost = self.net.value(choices)
        if not cost < self.limit or not PricedRows(self.net, self.relaxed.capacity).fits(choices):
            return False
        self.best, self.limit = choices, cost
        self.limits = self.relaxed.limits(cost)
        return True

    def _split(self, relations: Relations, bounds: np.ndarray, most: int, depth: int) -> bool:
        """Both halves of what is too wide, the one with the least bound first; False where one is left open."""
        halves: list[tuple[float, int, Relations, np.ndarray]] = []
        parts = relations.branches()
        if not parts:
            return False
        for half in parts:
            try:
                found, _ = tighten(half, bounds, self.limits, self.deadline)
            except EmptyNodeError:
                continue
            halves.append((self.relaxed.seconds(found), len(halves), half, found))
        ended = True
        for _, _, half, found in sorted(halves, key=lambda h: h[:2]):
            ended = ended and self._search(half, found, most, depth - 1)
        return ended

    def _narrow(self, relations: Relations, most: int) -> None:
        """Eliminate every node whose bucket has at most that many rows, narrow ones first."""
        widths = Widths(relations)
        width = {v: widths.of(v) for v in relations.live}
        heap = [(w, v) for v, w in width.items()]
        heapq.heapify(heap)
        while heap and time.monotonic() < self.deadline:
            now, v = heapq.heappop(heap)
            if width.get(v) != now:
                continue
            del width[v]
            for w in relations.eliminate(v, most) or ():
                width[w] = widths.of(w)
                heapq.heappush(heap, (width[w], w))

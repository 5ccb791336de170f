"""The best plan of at most a given cost, or the proof that there is none.

A limit close to the optimum leaves few rows, however many plans there are: nodes are eliminated where that leaves few,
message passing over what is left raises the bounds, which leaves fewer; then wider nodes follow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.window.partial import best_plan, keep_wanted
from autoshard_ilp.program.window.relations import Relations
from autoshard_ilp.program.window.relaxations import Relaxations
from autoshard_ilp.program.window.tighten import tighten

ROWS = 20_000  # of a bucket, at first
MOST_ROWS = 400_000
WIDER = 4
LESS = 0.8  # of the rows: worth trying again before buckets get wider


@dataclass(frozen=True, eq=False)
class Found:
    """``status`` is "optimal", "infeasible" (no plan within the limit) or "unknown" (too wide, or out of time).

    ``bound`` is a lower bound of all plans that fit, in seconds: at most the limit, or what the plan costs.
    ``relaxed`` is what the relaxations proved before rows of several together were found to leave nothing.
    """

    status: str
    choices: np.ndarray | None
    bound: float
    relaxed: float


class Window:
    """The plans of a net within limits.

    Args:
        net: presolved, labels compressed, true costs, with memory rows.
        capacity: bytes of every row.
        prices: seconds per byte and row: those to try, the best known first.

    Raises:
        EmptyNodeError: a node has no finite strategy.
    """

    def __init__(self, net: Net, capacity: int, prices: Sequence[np.ndarray]) -> None:
        self.net = net
        self.relaxed = Relaxations(net, capacity, prices)
        self.bounds = self.relaxed.bounds()  # of the last limit tried

    @property
    def bound(self) -> float:
        """A lower bound in seconds of all plans that fit."""
        return self.relaxed.seconds(self.relaxed.bounds())

    def solve(self, limit: float, deadline: float) -> Found:
        """The best plan of at most ``limit`` seconds; ``deadline`` in monotonic seconds."""
        relaxed = self.relaxed
        limits, self.bounds = relaxed.limits(limit), relaxed.bounds()
        try:
            if (self.bounds > limits).any() or (self.net.base > relaxed.capacity).any():
                raise EmptyNodeError(-1)
            relations = Relations(relaxed, limits - self.bounds)
            ended = self._eliminate(relations, limits, deadline)
        except EmptyNodeError:
            return Found("infeasible", None, limit, relaxed.seconds(self.bounds))
        known = relaxed.seconds(self.bounds)
        choices = None
        if ended:
            outside = keep_wanted(relaxed, relations.buckets, limits)
            ended, choices = best_plan(relaxed, relations.buckets, outside, limits, deadline)
        if not ended:
            return Found("unknown", None, min(limit, known), known)
        if choices is None:
            return Found("infeasible", None, limit, known)
        return Found("optimal", choices, self.net.value(choices), known)

    def _eliminate(self, relations: Relations, limits: np.ndarray, deadline: float) -> bool:
        """Eliminate all nodes; False where that takes too many rows or too long. Raises the bounds on the way.

        Raises:
            EmptyNodeError: no plan is within the limits.
        """
        most = ROWS
        while True:
            self._narrow(relations, most, deadline)
            if not relations.live:
                self.bounds = self.bounds + relations.finish()
                return True
            if time.monotonic() > deadline:
                return False
            before = relations.count()
            self.bounds = tighten(relations, self.bounds, limits, deadline)
            if relations.count() > LESS * before:
                most *= WIDER
                if most > MOST_ROWS:
                    return False

    @staticmethod
    def _narrow(relations: Relations, most: int, deadline: float) -> None:
        """Eliminate every node whose bucket has at most that many rows, narrow ones first."""
        width = {v: relations.width(v) for v in relations.live}
        while width and time.monotonic() < deadline:
            v = min(width, key=lambda w: (width[w], w))
            del width[v]
            for w in relations.eliminate(v, most) or ():
                width[w] = relations.width(w)

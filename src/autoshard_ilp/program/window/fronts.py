"""From the rows of buckets to the cheapest plan that fits: fronts of partial plans, first coarse, then finer.

A front of cost and bytes in several memory rows may hold thousands of partial plans per group of rows. Merged to a few,
its costs are lower bounds, and good ones: nothing is priced, so that there is no gap of duality, and partial plans are
merged only where they are alike. Forwards they say what the plans of a group cost and hold at least; backwards what the
rest of the plan does. A row that nothing completes to a plan within the limit goes. What is left needs less merging,
and fronts may be larger each time, until nothing is merged: then they are exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.bounds import SAFETY
from autoshard_ilp.program.prices import PricedRows
from autoshard_ilp.program.window import kernels
from autoshard_ilp.program.window import kernels_fronts as compiled
from autoshard_ilp.program.window.kernels_fronts import Children, Rows, States, Within
from autoshard_ilp.program.window.partial import never_too_much
from autoshard_ilp.program.window.relations import Bucket
from autoshard_ilp.program.window.relaxations import BYTES, Relaxations

SIZES = (8, 32, 128, 512, 2048)  # of the fronts of one group; comparing more takes seconds per group
WORK = 200_000_000  # pairs looked at in one bucket: seconds
TRIED = 20  # plans that merged fronts stand for, in one pass


@dataclass(frozen=True, eq=False)
class Answer:
    """``ended``: ``choices`` is the cheapest plan within the limit, or None as there is none.

    Otherwise ``choices`` may be some plan. ``bound``: a lower bound in seconds of all plans within the limit.
    """

    ended: bool
    choices: np.ndarray | None
    bound: float


@dataclass(eq=False)
class Front:
    """Partial plans of one bucket, by group and cost.

    Attributes:
        states: their cost and bytes.
        value: in each relaxation.
        origin: the row of the bucket, and the state of each child.
        least: (groups, relaxations), of the states' values.
    """

    states: States
    value: np.ndarray
    origin: np.ndarray
    least: np.ndarray


def best_plan(
    relaxed: Relaxations, buckets: list[Bucket], outside: list[np.ndarray], limit: float, deadline: float
) -> Answer:
    """The cheapest plan of at most ``limit`` seconds within the rows of memory.

    Args:
        relaxed: what the net costs and holds.
        buckets: after :func:`~autoshard_ilp.program.window.partial.keep_wanted`; rows are taken out.
        outside: its answer.
        limit: seconds.
        deadline: monotonic seconds.
    """
    return _Passes(relaxed, buckets, outside, limit, deadline).run()


class _Passes:
    """Forwards and backwards over the buckets."""

    def __init__(
        self, relaxed: Relaxations, buckets: list[Bucket], outside: list[np.ndarray], limit: float, deadline: float
    ) -> None:
        self.relaxed, self.buckets, self.outside, self.deadline = relaxed, buckets, outside, deadline
        self.best: np.ndarray | None = None
        self.within = self._within(limit)
        self.fronts: list[Front] = []
        self.exact = True
        self.rests = self._least_rests()

    def run(self) -> Answer:
        bound = -math.inf
        for most in SIZES:
            if not self._forward(most):
                break
            costs = self.fronts[-1].states.cost
            if not len(costs):
                return Answer(True, self.best, math.inf)
            bound = max(bound, float(costs[0]) + self.relaxed.net.constant)
            if self.exact:
                return Answer(True, self._plan(0), bound)
            for state in range(min(TRIED, len(costs))):
                if self._try(self._plan(state)):
                    break
            if not self._backward(most):
                break
        return Answer(False, self.best, bound)

    def _within(self, seconds: float) -> Within:
        """What plans of at most so many seconds stay within, and a little for float noise."""
        relaxed = self.relaxed
        prices = relaxed.weights[:, 1:][relaxed.weights[:, 0] > 0]
        some = float(prices.max(initial=0.0)) or (abs(seconds) if 0 < abs(seconds) < math.inf else 1.0) / max(
            relaxed.capacity, 1
        )
        rows = len(relaxed.net.base)
        margin = SAFETY * abs(seconds) if math.isfinite(seconds) else 0.0
        return Within(
            seconds + margin,
            np.full(rows, relaxed.capacity, np.int64),
            relaxed.limits(seconds),
            relaxed.weights,
            np.full(rows, some),
        )

    def _least_rests(self) -> list[States]:
        """Per bucket and group one rest of the plan: as cheap and as small as any, by the relaxations of one thing."""
        weights, found = self.relaxed.weights, []
        alone = [int(np.flatnonzero((weights == one).all(axis=1))[0]) for one in np.eye(weights.shape[1])]
        for outside in self.outside:
            some = np.isfinite(outside).all(axis=1)
            least = outside[some][:, alone]
            at = np.concatenate(([0], np.cumsum(some))).astype(np.int64)
            used = np.ceil(least[:, 1:] - BYTES).astype(np.int64)
            found.append(States(at, least[:, 0].copy(), np.ascontiguousarray(used)))
        return found

    def _forward(self, most: int) -> bool:
        """Fronts of at most ``most`` per group; rows without any go. False where it takes too long."""
        self.fronts, self.exact = [], True
        free = never_too_much(self.relaxed, self.buckets)
        for number, (bucket, fitting) in enumerate(zip(self.buckets, free, strict=True)):
            if time.monotonic() > self.deadline or not self._front(number, bucket, fitting, most):
                return False
        return True

    def _front(self, number: int, bucket: Bucket, fitting: np.ndarray, most: int) -> bool:
        relaxed = self.relaxed
        own = relaxed.value(bucket.cost, bucket.used)
        rest, alive = self.outside[number][bucket.group], np.ones(len(own), bool)
        for child, group in bucket.children:
            front = self.fronts[child]
            some = front.states.at[group] < front.states.at[group + 1]
            rest = rest + np.where(some[:, None], front.least[group], 0.0)
            alive &= some
        alive &= (rest + own <= self.within.limits).all(axis=1)
        bucket.keep(alive)
        at = np.concatenate(([0], np.cumsum(np.bincount(bucket.group, minlength=bucket.groups)))).astype(np.int64)
        children, first = self._children(bucket)
        rows = Rows(at, bucket.cost, np.ascontiguousarray(bucket.used), own[alive], _columns(bucket), rest[alive])
        ended, exact, alive, states, origin = compiled.forward(
            rows, children, self.rests[number], fitting, self.within, most, WORK
        )
        if not ended:
            return False
        bucket.keep(alive)
        origin[:, 0] = (np.cumsum(alive) - 1)[origin[:, 0]]
        origin[:, 1:] -= first
        value = relaxed.value(states.cost, states.used)
        least = kernels.least_by(np.repeat(np.arange(bucket.groups), np.diff(states.at)), value, bucket.groups)
        self.fronts.append(Front(states, value, origin, least))
        self.exact = self.exact and exact
        return True

    def _children(self, bucket: Bucket) -> tuple[Children, np.ndarray]:
        """The fronts of the children, and where each one's states begin."""
        parts = [self.fronts[child] for child, _ in bucket.children]
        begins, first, states = _joined([p.states for p in parts], bucket.used.shape[1])
        none = np.zeros((0, len(self.within.limits)))
        value = np.concatenate([p.value for p in parts] or [none])
        least = np.concatenate([np.vstack((p.least, np.zeros((1, none.shape[1])))) for p in parts] or [none])
        return Children(begins, states, value, least), first

    def _backward(self, most: int) -> bool:
        """Fronts of the rest of the plan, for all groups; False where it takes too long."""
        net = self.relaxed.net
        whole = States(np.array([0, 1]), np.array([net.constant]), net.base[None].astype(np.int64))
        rests: list[States] = [whole] * len(self.buckets)
        for number in range(len(self.buckets) - 1, -1, -1):
            bucket = self.buckets[number]
            for place, (child, group) in enumerate(bucket.children):
                if time.monotonic() > self.deadline:
                    return False
                others = bucket.children[:place] + bucket.children[place + 1 :]
                begins, _, fronts = _joined([self.fronts[c].states for c, _ in others], bucket.used.shape[1])
                ended, rests[child] = compiled.backward(
                    np.argsort(group, kind="stable"),
                    group,
                    bucket.group,
                    bucket.cost,
                    np.ascontiguousarray(bucket.used),
                    np.delete(_columns(bucket), place, axis=1),
                    begins,
                    fronts,
                    rests[number],
                    self.fronts[child].states,
                    self.within,
                    most,
                    WORK,
                )
                if not ended:
                    return False
        self.rests = rests
        return True

    def _plan(self, state: int) -> np.ndarray:
        """The choices of the net's live nodes (others 0) that a state of the last bucket stands for."""
        choices = np.zeros(len(self.relaxed.net.cost), np.int64)
        todo = [(len(self.buckets) - 1, state)]
        while todo:
            number, at = todo.pop()
            bucket, front = self.buckets[number], self.fronts[number]
            if bucket.node >= 0:
                choices[bucket.node] = bucket.strategy[front.origin[at, 0]]
            todo += [(child, int(front.origin[at, 1 + j])) for j, (child, _) in enumerate(bucket.children)]
        return choices

    def _try(self, choices: np.ndarray) -> bool:
        """Take a plan over, and its cost as the limit, where it fits and is within the limit."""
        net, capacity = self.relaxed.net, self.relaxed.capacity
        cost = net.value(choices)
        if cost > self.within.seconds or not PricedRows(net, capacity).fits(choices):
            return False
        self.best, self.within = choices, self._within(cost)
        return True


def _columns(bucket: Bucket) -> np.ndarray:
    """The groups of the children, (rows, children)."""
    shape = len(bucket.children), len(bucket.group)  # either may be 0
    return np.array([group for _, group in bucket.children], np.int64).reshape(shape).T.copy()


def _joined(parts: list[States], moments: int) -> tuple[np.ndarray, np.ndarray, States]:
    """Where the groups of each begin and where its states do, and all of them as one."""
    begins = np.concatenate(([0], np.cumsum([len(p.at) for p in parts]))).astype(np.int64)[:-1]
    first = np.concatenate(([0], np.cumsum([len(p.cost) for p in parts]))).astype(np.int64)[:-1]
    at = np.concatenate([p.at + b for p, b in zip(parts, first, strict=True)] or [np.zeros(0, np.int64)])
    cost = np.concatenate([p.cost for p in parts] or [np.zeros(0)])
    used = np.concatenate([p.used for p in parts] or [np.zeros((0, moments), np.int64)])
    return begins, first, States(at, cost, used)

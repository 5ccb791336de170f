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

from autoshard_ilp.program.nets.bounds import SAFETY
from autoshard_ilp.program.rows.prices import PricedRows
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
            at = _sums(some)
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
        columns = _columns([group for _, group in bucket.children], len(bucket.group))
        used = np.ascontiguousarray(bucket.used)
        rows = Rows(_starts(bucket.group, bucket.groups), bucket.cost, used, own[alive], columns, rest[alive])
        children, first = self._children([self.fronts[child] for child, _ in bucket.children])
        ended, exact, alive, states, origin = compiled.joined(
            rows, children, self.rests[number], fitting, self.within, most, WORK
        )
        if not ended:
            return False
        bucket.keep(alive)
        origin[:, 0] = (np.cumsum(alive) - 1)[origin[:, 0]]
        origin[:, 1:] -= first
        self.fronts.append(self._valued(states, origin))
        self.exact = self.exact and exact
        return True

    def _valued(self, states: States, origin: np.ndarray) -> Front:
        value, groups = self.relaxed.value(states.cost, states.used), len(states.at) - 1
        least = kernels.least_by(np.repeat(np.arange(groups), np.diff(states.at)), value, groups)
        return Front(states, value, origin, least)

    def _children(self, fronts: list[Front]) -> tuple[Children, np.ndarray]:
        """These fronts one after the other, and where each one's states begin."""
        begins = _sums([len(f.states.at) for f in fronts])[:-1]
        first = _sums([len(f.states.cost) for f in fronts])[:-1]
        at = np.concatenate([f.states.at + b for f, b in zip(fronts, first, strict=True)] or [np.zeros(0, np.int64)])
        cost = np.concatenate([f.states.cost for f in fronts] or [np.zeros(0)])
        used = np.concatenate([f.states.used for f in fronts] or [np.zeros((0, len(self.relaxed.net.base)), np.int64)])
        none = np.zeros((1, len(self.within.limits)))
        value = np.concatenate([f.value for f in fronts] or [none[:0]])
        least = np.concatenate([np.vstack((f.least, none)) for f in fronts] or [none[:0]])
        return Children(begins, States(at, cost, used), value, least), first

    def _backward(self, most: int) -> bool:
        """Fronts of the rest of the plan, for all groups; False where it takes too long.

        To a child, that is a row of the bucket with a state of each other child and a rest of the row's group.
        """
        net = self.relaxed.net
        whole = States(np.array([0, 1]), np.array([net.constant]), net.base[None].astype(np.int64))
        rests: list[States] = [whole] * len(self.buckets)
        for number in range(len(self.buckets) - 1, -1, -1):
            bucket = self.buckets[number]
            above = (self._valued(rests[number], np.zeros((0, 0), np.int64)), bucket.group)
            for place in range(len(bucket.children)):
                if time.monotonic() > self.deadline:
                    return False
                found = self._rest(bucket, above, place, most)
                if found is None:
                    return False
                rests[bucket.children[place][0]] = found
        self.rests = rests
        return True

    def _rest(self, bucket: Bucket, above: tuple[Front, np.ndarray], place: int, most: int) -> States | None:
        """Fronts of everything but one child of a bucket, for each of its groups; None: it takes too long.

        Args:
            above: the rests of the bucket's groups, and each row's group.
            place: of the child.
            most: states of a front.
        """
        relaxed, (child, group) = self.relaxed, bucket.children[place]
        mine = self.fronts[child]
        parts = [above] + [(self.fronts[c], g) for c, g in bucket.children[:place] + bucket.children[place + 1 :]]
        rest = mine.least[group] + sum(front.least[g] for front, g in parts)
        own = relaxed.value(bucket.cost, bucket.used)
        order = np.argsort(group, kind="stable")
        order = order[(rest + own <= self.within.limits).all(axis=1)[order]]
        columns = _columns([g[order] for _, g in parts], len(order))
        at = _starts(group[order], len(mine.least))
        rows = Rows(at, bucket.cost[order], bucket.used[order], own[order], columns, rest[order])
        children, _ = self._children([front for front, _ in parts])
        free = np.full((len(mine.least), bucket.used.shape[1]), compiled.NOTHING)
        ended, _, _, states, _ = compiled.joined(rows, children, mine.states, free, self.within, most, WORK)
        return states if ended else None

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


def _columns(groups: list[np.ndarray], rows: int) -> np.ndarray:
    """The groups of the children, (rows, children)."""
    return np.array(groups, np.int64).reshape(len(groups), rows).T.copy()  # either may be 0


def _starts(group: np.ndarray, groups: int) -> np.ndarray:
    """Where each group begins in rows ordered by group, and where the last one ends."""
    return _sums(np.bincount(group, minlength=groups))


def _sums(sizes: np.ndarray | list[int]) -> np.ndarray:
    """How many there are before each, and in all."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

"""From the buckets of an elimination to the best plan: what each row can at best be part of, then fronts.

Forwards and backwards, every row learns the least value of all plans with it, in every relaxation; what exceeds a limit
goes, and the rest is told again. Then each group of rows keeps the partial plans that no other beats in cost and in the
bytes of every memory row: any plan that fits stays one, and no dearer, when such a one takes the place of the part it
beats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.window import kernels
from autoshard_ilp.program.window.relations import Bucket
from autoshard_ilp.program.window.relaxations import Relaxations

MADE = 1_000_000  # partial plans of one bucket, at most
FEWER = 0.8  # of the rows: worth telling the others


@dataclass(eq=False)
class Front:
    """Partial plans of one bucket, by group.

    Attributes:
        at: where each group's states begin, and where the last one ends.
        cost, used, value: seconds, bytes (states, memory rows), and in each relaxation.
        origin: its row of the bucket, and its state of each child.
        least: (groups, relaxations), of the states' values.
    """

    at: np.ndarray
    cost: np.ndarray
    used: np.ndarray
    value: np.ndarray
    origin: np.ndarray
    least: np.ndarray


def keep_wanted(relaxed: Relaxations, buckets: list[Bucket], limits: np.ndarray) -> list[np.ndarray]:
    """Drop the rows that are in no plan within the limits.

    Args:
        relaxed: what the net costs and holds.
        buckets: in the order of elimination; rows are taken out.
        limits: of the relaxations.

    Returns:
        Per bucket and group, in each relaxation, the least value of everything but the rows of that group: of the rest
        of the plan.
    """
    while True:
        before = sum(len(b.strategy) for b in buckets)
        outside = _sweep(buckets, lambda b: relaxed.value(b.cost, b.used), relaxed.constant, limits)
        if sum(len(b.strategy) for b in buckets) >= FEWER * before:
            return outside


def _sweep(
    buckets: list[Bucket], value_of: Callable[[Bucket], np.ndarray], constant: np.ndarray, limits: np.ndarray
) -> list[np.ndarray]:
    """Forwards the least value of each row with all its children, backwards that of the rest of the plan.

    Args:
        buckets: in the order of elimination; rows beyond a limit are taken out.
        value_of: the values of a bucket's rows alone, (rows, measures).
        constant: what all plans have in common, per measure.
        limits: per measure.

    Returns:
        Per bucket, the least value of the rest of the plan: (groups, measures).
    """
    values: list[np.ndarray] = []
    least: list[np.ndarray] = []  # per bucket and group
    for bucket in buckets:
        value = value_of(bucket)
        for child, group in bucket.children:
            value += least[child][group]
        values.append(value)
        least.append(kernels.least_by(bucket.group, value, bucket.groups))
    outside = [np.zeros(0)] * len(buckets)
    outside[-1] = constant[None]
    for i in range(len(buckets) - 1, -1, -1):
        bucket = buckets[i]
        total = values[i] + outside[i][bucket.group]
        fits = ((total <= limits) & np.isfinite(total)).all(axis=1)  # infinite: a child has nothing left
        bucket.keep(fits)
        for child, group in bucket.children:
            rest = total[fits] - least[child][group]
            outside[child] = kernels.least_by(group, rest, buckets[child].groups)
    return outside


def _never_too_much(relaxed: Relaxations, buckets: list[Bucket]) -> list[np.ndarray]:
    """Bytes that a partial plan may hold and still fit, whatever the rest of the plan: (groups, memory rows)."""
    base = relaxed.net.base.astype(np.float64)
    no_limit = np.full(len(base), np.inf)
    most = _sweep(buckets, lambda b: -b.used.astype(np.float64), -base, no_limit)  # the least of what is negative
    return [np.where(np.isfinite(m), relaxed.capacity + m, 0.0).astype(np.int64) for m in most]


def best_plan(
    relaxed: Relaxations,
    buckets: list[Bucket],
    outside: list[np.ndarray],
    limits: np.ndarray,
    deadline: float,
) -> tuple[bool, np.ndarray | None]:
    """The cheapest plan within the rows of memory and the limits.

    Args:
        relaxed: what the net costs and holds.
        buckets: after :func:`keep_wanted`.
        outside: its answer.
        limits: of the relaxations.
        deadline: monotonic seconds.

    Returns:
        Whether it came to an end, and the choices of the net's live nodes (others 0); None: there is no such plan.
    """
    fronts: list[Front] = []
    free = _never_too_much(relaxed, buckets)
    for bucket, rest, fitting in zip(buckets, outside, free, strict=True):
        found = None if time.monotonic() > deadline else _front(relaxed, bucket, fronts, rest, fitting, limits)
        if found is None:
            return False, None
        fronts.append(found)
    last = fronts[-1]
    if not len(last.cost):
        return True, None
    choices = np.zeros(len(relaxed.net.cost), np.int64)
    todo = [(len(buckets) - 1, int(np.argmin(last.cost)))]
    while todo:
        b, state = todo.pop()
        bucket, front = buckets[b], fronts[b]
        if bucket.node >= 0:
            choices[bucket.node] = bucket.strategy[front.origin[state, 0]]
        todo += [(child, int(front.origin[state, 1 + j])) for j, (child, _) in enumerate(bucket.children)]
    return True, choices


def _front(
    relaxed: Relaxations,
    bucket: Bucket,
    fronts: list[Front],
    outside: np.ndarray,
    fitting: np.ndarray,
    limits: np.ndarray,
) -> Front | None:
    """The front of a bucket from those of its children; None where it takes too long.

    Args:
        outside: per group and relaxation, a lower bound of the rest of the plan.
        fitting: per group and memory row, bytes that are never too much; fewer are no advantage.
    """
    own, groups = relaxed.value(bucket.cost, bucket.used), bucket.groups
    rest, alive = outside[bucket.group], np.ones(len(own), bool)
    for child, group in bucket.children:
        front = fronts[child]
        some = front.at[group] < front.at[group + 1]
        rest = rest + np.where(some[:, None], front.least[group], 0.0)
        alive &= some
    alive &= (rest + own <= limits).all(axis=1)
    rows = np.flatnonzero(alive)
    counts = np.bincount(bucket.group[rows], minlength=groups)
    parts = [fronts[child] for child, _ in bucket.children]
    begins = np.concatenate(([0], np.cumsum([len(p.cost) for p in parts]))).astype(np.int64)
    child_at = np.concatenate(([0], np.cumsum([len(p.at) for p in parts]))).astype(np.int64)
    none = np.zeros((0, len(limits)))
    at, cost, used, origin = kernels.fronts(
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        bucket.cost[rows],
        np.ascontiguousarray(bucket.used[rows]),
        own[rows],
        np.column_stack([g[rows] for _, g in bucket.children]) if parts else np.zeros((len(rows), 0), np.int64),
        child_at,
        np.concatenate([p.at + b for p, b in zip(parts, begins[:-1], strict=True)] or [np.zeros(0, np.int64)]),
        np.concatenate([p.cost for p in parts] or [np.zeros(0)]),
        np.concatenate([p.used for p in parts] or [np.zeros((0, bucket.used.shape[1]), np.int64)]),
        np.concatenate([p.value for p in parts] or [none]),
        np.concatenate([np.vstack((p.least, np.zeros((1, len(limits))))) for p in parts] or [none]),
        rest[rows],
        fitting,
        limits,
        MADE,
    )
    if not len(at):
        return None
    value = relaxed.value(cost, used)
    origin[:, 0] = rows[origin[:, 0]]
    origin[:, 1:] -= begins[:-1]
    found = kernels.least_by(np.repeat(np.arange(groups), np.diff(at)), value, groups)
    return Front(at, cost, used, value, origin, found)

"""What each row of an elimination's buckets can at best be part of.

Forwards and backwards, every row learns the least value of all plans with it, in every relaxation; what exceeds a limit
goes, and the rest is told again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard_ilp.program.window import kernels
from autoshard_ilp.program.window.relations import Bucket, Relations
from autoshard_ilp.program.window.relaxations import Relaxations

FEWER = 0.8  # of the rows: worth telling the others


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
    values, least = _forwards(buckets, value_of)
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


def _forwards(
    buckets: list[Bucket], value_of: Callable[[Bucket], np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per bucket the values of its rows with all their children, and the least of each group."""
    values: list[np.ndarray] = []
    least: list[np.ndarray] = []
    for bucket in buckets:
        value = value_of(bucket)
        for child, group in bucket.children:
            value += least[child][group]
        values.append(value)
        least.append(kernels.least_by(bucket.group, value, bucket.groups))
    return values, least


def never_too_much(relaxed: Relaxations, buckets: list[Bucket]) -> list[np.ndarray]:
    """Bytes that a partial plan may hold and still fit, whatever the rest of the plan: (groups, memory rows)."""
    base = relaxed.net.base.astype(np.float64)
    no_limit = np.full(len(base), np.inf)
    most = _sweep(buckets, lambda b: -b.used.astype(np.float64), -base, no_limit)  # the least of what is negative
    return [np.where(np.isfinite(m), relaxed.capacity + m, 0.0).astype(np.int64) for m in most]


def completed(relaxed: Relaxations, relations: Relations, chosen: dict[int, int]) -> np.ndarray | None:
    """Choices of all live nodes (others 0): ``chosen`` of those left, with the best rows of buckets in relaxation 0.

    None where what is chosen is in no row that is left.
    """
    choices = np.zeros(len(relaxed.net.cost), np.int64)
    choices[list(chosen)] = list(chosen.values())
    todo: list[tuple[int, int]] = []
    for r in relations.relations.values():
        if r.group is None:
            continue
        rows = np.ones(len(r.group), bool)
        for v, labels, column in zip(r.scope, r.labels, r.columns, strict=True):
            rows &= column == labels[choices[v]]
        if not rows.any():
            return None
        todo.append((r.bucket, int(r.group[np.flatnonzero(rows)[0]])))
    values, _ = _forwards(relations.buckets, lambda b: relaxed.value(b.cost, b.used)[:, :1])
    while todo:
        number, own = todo.pop()
        bucket = relations.buckets[number]
        first, last = np.searchsorted(bucket.group, (own, own + 1))
        row = int(first) + int(np.argmin(values[number][first:last, 0]))
        if bucket.node >= 0:
            choices[bucket.node] = bucket.strategy[row]
        todo += [(child, int(groups[row])) for child, groups in bucket.children]
    return choices

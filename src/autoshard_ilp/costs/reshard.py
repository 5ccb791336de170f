"""Resharding: the cheapest sequence of slice, all-to-all and all-gather from one layout to another.

Every mesh axis changes in one of four ways: it stays, it starts to shard a dimension (slice: no communication), it
stops (all-gather), or it moves to another dimension (all-to-all). Slices come first because they shrink what follows,
all-gathers last because they grow it; of the all-gathers the one that leaves the least to the dearer link goes first.
An axis that starts or stops sharding a dimension while a *later* mesh axis keeps sharding it would leave the shards in
the wrong order, which costs a permute of the small shard besides. A dimension that does not divide is gathered whole
before it is cut otherwise; one that would not divide between two steps is cut last, or gathered, too. Partial sums are
never resharded: who reads them takes them as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from autoshard_ilp.sharding import WHOLE, Layout, local_bytes, reordered_axes

KEEP, SLICE, GATHER, MOVE = range(4)


class CollectiveSeconds(Protocol):
    """What resharding needs from the collective cost model."""

    def seconds(self, kind: str, axes: tuple[int, ...], payload_bytes: float) -> float: ...

    def alpha_beta(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """Seconds per call, and per payload byte."""
        ...


@dataclass(frozen=True)
class Step:
    """One step of a resharding; ``kind`` is "slice" or a collective, ``payload_bytes`` as the cost model counts."""

    kind: str
    axes: tuple[int, ...]
    payload_bytes: float
    after: Layout


def steps(
    shape: Sequence[int], itemsize: float, start: Layout, end: Layout, sizes: Sequence[int], costs: CollectiveSeconds
) -> list[Step]:
    """Cheapest steps from layout ``start`` to ``end`` of a tensor (shape in elements, itemsize in bytes)."""
    if start == end:
        return []

    def held(layout: Layout) -> int:
        return local_bytes(shape, itemsize, layout, sizes)

    done: list[Step] = []
    now = start

    def change(kind: str, axes: tuple[int, ...], dims: tuple[int, ...]) -> None:
        nonlocal now
        after = list(now)
        for axis, dim in zip(axes, dims, strict=True):
            after[axis] = dim
        before, now = now, tuple(after)
        gathered = held(before) * math.prod(sizes[axis] for axis in axes)  # padded, where the shards are
        payload: float = {"all-gather": gathered, "all-to-all": held(before)}.get(kind, 0)
        done.append(Step(kind, axes, payload, now))
        for layout, dim in ((before, before[axes[0]]), (now, dims[0])):
            order = reordered_axes(axes, layout, dim)
            if order:
                done.append(Step("collective-permute", order, min(held(before), held(now)), now))

    def slices(dims: Iterable[int]) -> None:
        """One step per dimension, so that a dimension that does not divide is cut once."""
        for dim in dims:
            axes = tuple(a for a in range(len(sizes)) if now[a] == WHOLE and end[a] == dim)
            if axes:
                change("slice", axes, (dim,) * len(axes))

    whole_first = _gathered_first(shape, start, end, sizes)
    last = _cut_last(shape, start, end, sizes, whole_first)
    slices(dim for dim in sorted(set(end) - {WHOLE}) if dim not in whole_first | last)
    for axis in reversed([a for a in range(len(sizes)) if WHOLE not in (start[a], end[a]) and start[a] != end[a]]):
        if not {start[axis], end[axis]} & whole_first:
            change("all-to-all", (axis,), (end[axis],))
    by_dim: dict[int, list[int]] = {}
    for axis, dim in enumerate(now):
        if dim != WHOLE and (end[axis] == WHOLE or {dim, end[axis]} & whole_first):
            by_dim.setdefault(dim, []).append(axis)
    for group in _best_gather_order([tuple(g) for g in by_dim.values()], held(now), sizes, costs):
        change("all-gather", group, (WHOLE,) * len(group))
    slices(sorted(set(end) - {WHOLE}))
    return done


def _gathered_first(shape: Sequence[int], start: Layout, end: Layout, sizes: Sequence[int]) -> frozenset[int]:
    """Dimensions that are gathered whole before they are cut anew: uneven ones, whose shards would not line up.

    A dimension of 50257 over 4 devices has shards of 12565, over 8 devices shards of 6283, and 2 x 6283 > 12565: no
    device has all that its new shard needs. XLA gathers such a tensor, and so it does for an all-to-all of it.
    """

    def axes(layout: Layout, dim: int) -> tuple[int, ...]:
        return tuple(a for a, d in enumerate(layout) if d == dim)

    def uneven(dim: int) -> bool:
        return any(shape[dim] % n for n in (_shards(end, dim, sizes), *_between(start, end, dim, sizes, found)))

    moved = {d for a, b in zip(start, end, strict=True) if a != b and WHOLE not in (a, b) for d in (a, b)}
    changed = {d for d in {*start, *end} - {WHOLE} if axes(start, d) != axes(end, d)}
    changed = {d for d in changed if d in moved or (d in start and d in end)}
    found = frozenset[int]()
    while more := {dim for dim in changed - found if uneven(dim)}:
        found |= more  # an axis that does not move there stays where it is until the gathers
    return found


def _cut_last(
    shape: Sequence[int], start: Layout, end: Layout, sizes: Sequence[int], whole_first: frozenset[int]
) -> frozenset[int]:
    """Dimensions that divide at all times if they are cut last, but not if they are cut first.

    300 columns over 4 devices become 300 over 2 others: over all 8 they do not divide, and XLA would gather them.
    """

    def divides(dim: int, *, cut: bool) -> bool:
        between = _between(start, end, dim, sizes, whole_first, cut=cut)
        return not any(shape[dim] % n for n in (_shards(end, dim, sizes), *between))

    dims = {*end} - {WHOLE}
    return frozenset(dim for dim in dims if not divides(dim, cut=True) and divides(dim, cut=False))


def _shards(layout: Layout, dim: int, sizes: Sequence[int]) -> int:
    return math.prod(size for size, d in zip(sizes, layout, strict=True) if d == dim)


def _between(
    start: Layout, end: Layout, dim: int, sizes: Sequence[int], whole_first: frozenset[int], *, cut: bool = False
) -> Iterator[int]:
    """Shards of a dimension until the gathers begin, which leave divisors of them; ``cut``: it is cut first."""
    now = [b if cut and (a, b) == (WHOLE, dim) else a for a, b in zip(start, end, strict=True)]
    yield _shards(tuple(now), dim, sizes)
    for axis in reversed([a for a in range(len(sizes)) if WHOLE not in (start[a], end[a]) and start[a] != end[a]]):
        if not {start[axis], end[axis]} & whole_first:
            now[axis] = end[axis]
        yield _shards(tuple(now), dim, sizes)


def seconds(plan: Sequence[Step], costs: CollectiveSeconds) -> float:
    """Time of a sequence of steps."""
    return sum(costs.seconds(s.kind, s.axes, s.payload_bytes) for s in plan if s.kind != "slice")


def _best_gather_order(
    groups: list[tuple[int, ...]], local: float, sizes: Sequence[int], costs: CollectiveSeconds
) -> list[tuple[int, ...]]:
    def total(order: Iterable[tuple[int, ...]]) -> float:
        held, time = float(local), 0.0
        for group in order:
            for axis in group:
                held *= sizes[axis]
            time += costs.seconds("all-gather", group, held)
        return time

    return list(min(itertools.permutations(groups), key=total)) if len(groups) > 1 else groups

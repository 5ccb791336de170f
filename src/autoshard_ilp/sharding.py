"""Layouts: how one tensor lies on a mesh, as plain tuples.

A :data:`Layout` has one entry per *mesh axis*: the tensor dimension that the axis shards, or :data:`WHOLE` when the
tensor is replicated over that axis. When several mesh axes shard one dimension, the earlier mesh axis is the major one.
So on a mesh ``(data, model)`` the layout ``(0, 1)`` is ``PartitionSpec("data", "model")``, ``(0, 0)`` is
``PartitionSpec(("data", "model"))`` and ``(-1, 0)`` is ``PartitionSpec("model")``.

Tuples of small integers hash and compare quickly, and make "what changes between two layouts" one comparison per axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

T = TypeVar("T")

Layout = tuple[int, ...]
Together = tuple[tuple[int, ...], ...]
"""Groups of mesh axes that always shard the same dimension, or none."""

WHOLE = -1
PARTIAL = -2
"""Entry of a layout inside the step: the devices along the mesh axis hold partial sums of the whole extent."""

ASKED_OFTEN = 1 << 16
"""Answers kept: programs of three mesh axes ask for a few shapes in a few hundred layouts a hundred thousand times."""


def replicated(n_axes: int) -> Layout:
    """The layout that keeps a full copy on every device."""
    return (WHOLE,) * n_axes


def shards_of_dims(layout: Layout, rank: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of shards of each tensor dimension."""
    return _shards_of_dims(layout, rank, tuple(axis_sizes))


@lru_cache(maxsize=ASKED_OFTEN)
def _shards_of_dims(layout: Layout, rank: int, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    shards = [1] * rank
    for dim, size in zip(layout, axis_sizes, strict=True):
        if dim >= 0:
            shards[dim] *= size
    return tuple(shards)


def local_shape(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's shard; a dimension that does not divide is padded up, as XLA does."""
    return _local_shape(tuple(shape), layout, tuple(axis_sizes))


@lru_cache(maxsize=ASKED_OFTEN)
def _local_shape(shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    shards = _shards_of_dims(layout, len(shape), axis_sizes)
    return tuple(-(-d // n) for d, n in zip(shape, shards, strict=True))


def local_bytes(shape: Sequence[int], itemsize: float, layout: Layout, axis_sizes: Sequence[int]) -> int:
    """Bytes of one device's shard, padding included."""
    return math.ceil(math.prod(local_shape(shape, layout, axis_sizes)) * itemsize)


def divides(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    """Whether every dimension is a multiple of its number of shards, as jit's arguments and results must be.

    There is nothing to shard of an empty dimension.
    """
    return _divides(tuple(shape), layout, tuple(axis_sizes))


@lru_cache(maxsize=ASKED_OFTEN)
def _divides(shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]) -> bool:
    shards = _shards_of_dims(layout, len(shape), axis_sizes)
    return all(d % n == 0 and (d or n == 1) for d, n in zip(shape, shards, strict=True))


def reordered_axes(moved: Sequence[int], layout: Layout, dim: int) -> tuple[int, ...]:
    """Mesh axes over which the shards of a dimension are permuted when ``moved`` axes leave or enter it.

    Args:
        moved: axes that a collective runs over.
        layout: while they shard the dimension.
        dim: the dimension; :data:`WHOLE` needs none.

    Returns:
        All axes on the dimension, where a later axis than one of ``moved`` stays there; else none.
    """
    if dim == WHOLE or not any(layout[a] == dim and a not in moved for a in range(min(moved) + 1, len(layout))):
        return ()
    return tuple(a for a, d in enumerate(layout) if d == dim)


def jointly(choices: Sequence[Sequence[T]], together: Sequence[Sequence[int]] = ()) -> Iterator[tuple[T, ...]]:
    """One choice of each mesh axis, in every way; axes that go ``together`` have the same choices, and choose alike."""
    if not together:
        return itertools.product(*choices)
    head = {axis: group[0] for group in together for axis in group}
    heads = [axis for axis in range(len(choices)) if head.get(axis, axis) == axis]
    place = {axis: i for i, axis in enumerate(heads)}
    at = [place[head.get(axis, axis)] for axis in range(len(choices))]
    return (tuple([chosen[i] for i in at]) for chosen in itertools.product(*(choices[axis] for axis in heads)))


def keeps_together(layout: Layout, together: Sequence[Sequence[int]]) -> bool:
    """Whether axes that go together shard the same dimension of a tensor, or none."""
    return all(layout[axis] == layout[group[0]] for group in together for axis in group)


@cache
def divisible_layouts(shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout of a tensor whose sharded dimensions divide evenly, the replicated one first.

    A mesh axis of size 1 shards nothing, so it is always :data:`WHOLE`.
    """
    choices = [(WHOLE,) if size == 1 else (WHOLE, *range(len(shape))) for size in axis_sizes]
    return tuple(layout for layout in itertools.product(*choices) if divides(shape, layout, axis_sizes))


def to_partition_spec(layout: Layout, rank: int, axis_names: Sequence[str]) -> Any:
    """``jax.sharding.PartitionSpec`` of a layout, without trailing ``None``."""
    from jax.sharding import PartitionSpec

    per_dim: list[list[str]] = [[] for _ in range(rank)]
    for name, dim in zip(axis_names, layout, strict=True):
        if dim >= 0:
            per_dim[dim].append(name)
    entries = [None if not names else names[0] if len(names) == 1 else tuple(names) for names in per_dim]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_partition_spec(spec: Sequence[Any], axis_names: Sequence[str]) -> Layout:
    """Layout of a PartitionSpec (or of a plain sequence of ``None``, a name, or a tuple of names).

    Raises:
        ValueError: an axis is unknown or used twice, or several axes on one dimension are not in mesh order.
    """
    layout = [WHOLE] * len(axis_names)
    for dim, entry in enumerate(spec):
        if entry is None:
            continue
        names = (entry,) if isinstance(entry, str) else tuple(entry)
        for name in names:
            if name not in axis_names:
                raise ValueError(f"mesh axis {name!r} does not exist; the mesh has axes {tuple(axis_names)}")
            axis = list(axis_names).index(name)
            if layout[axis] != WHOLE:
                raise ValueError(f"mesh axis {name!r} is used twice in {tuple(spec)}")
            layout[axis] = dim
        order = [list(axis_names).index(n) for n in names]
        if order != sorted(order):
            raise ValueError(f"axes {names} on one dimension must be in mesh order {tuple(axis_names)}, major to minor")
    return tuple(layout)


def before_broadcast(result: Layout, dims: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Layout:
    """The layout in which a broadcast reads its operand for a layout of its result: what it repeats is whole.

    Args:
        result: of the result.
        dims: the result's dimension for each of the operand's, as ``jax.lax.broadcast_in_dim`` takes them.
        before, after: shapes of the operand and of the result.
    """
    kept = {d: i for i, d in enumerate(dims) if before[i] == after[d]}
    return tuple(kept.get(place, WHOLE) for place in result)

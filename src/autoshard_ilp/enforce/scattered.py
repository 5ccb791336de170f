"""Partial sums scattered onto dimensions by one reduce-scatter that XLA keeps, and added up over the other axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp._jax_compat import row_major
from autoshard_ilp.costs.scatter import spans_slice, stages
from autoshard_ilp.costs.tpu.tile_shape import LANES, ROWS, SHORT_ROWS
from autoshard_ilp.enforce import parts
from autoshard_ilp.enforce.parts import grown, reordered
from autoshard_ilp.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
)

SAFE_MULTIPLE = 256
"""A multiple that fills whole tiles whichever dimension is tiled (found by compiling for v5e)."""


@dataclass(frozen=True)
class Computed:
    """What is known of the order of dimensions in which a result is computed, if anything is.

    Attributes:
        leading: the dimension that its readers move to the front.
        windowed: whether a convolution of a window of two dimensions or more computes it.
        kept: whether it has the order of an operand: no product computes it in another one.
    """

    leading: int = 0
    windowed: bool = False
    kept: bool = False


def reduced(
    value: Any,
    sums: Sequence[int],
    result: Layout,
    axis_names: Sequence[str],
    sizes: Sequence[int],
    slice_shape: Sequence[int],
    order: Computed,
) -> Any:
    """Partial sums scattered onto the dimensions that the result's layout names, then added up over the other axes."""
    import jax

    by_dim: dict[int, list[int]] = {}
    for axis in sums:
        by_dim.setdefault(result[axis], []).append(axis)
    for dim in sorted(d for d in by_dim if d >= 0):
        value = _scattered(value, by_dim[dim], dim, axis_names, sizes, slice_shape, order)
        stay = [a for a, d in enumerate(result) if d == dim and a not in by_dim[dim]]
        value = reordered(value, (*stay, *by_dim[dim]), sorted((*stay, *by_dim[dim])), axis_names, sizes)
    if WHOLE in by_dim:
        value = jax.lax.psum(value, tuple(axis_names[a] for a in by_dim[WHOLE]))
    return value[None] if PARTIAL in by_dim else value


def _scattered(
    value: Any,
    axes: Sequence[int],
    dim: int,
    axis_names: Sequence[str],
    sizes: Sequence[int],
    slice_shape: Sequence[int],
    order: Computed,
) -> Any:
    """Partial sums of all devices along mesh ``axes``, added up and scattered onto ``dim``.

    XLA:TPU keeps arrays in tiles and turns a reduce-scatter whose shards do not fill whole tiles, in the layout that it
    happens to choose, into an all-reduce and a slice: twice the bytes. A dimension of its own in front, one entry per
    shard, is never tiled. Where shards fill tiles in every layout, and what is beside them fills lanes (a vocabulary of
    50272 does not), it is left out, since it can cost a copy; in front of the first dimension, or of the ``leading``
    one of the order in which the result is computed, it costs none, and saves what XLA pads to scatter in equal pieces.
    In front of the first dimension of a matrix whose readers want its transpose it would cost one: their order would
    reach the product's sums before they are scattered. (Those of 32 bits; of 16 bits no such copies were seen.)
    What has more dimensions (heads, experts) may be computed in an order in which that one is not the first: there one
    is asked for (:func:`_scattered_in_rows`). So it is of convolutions, the order of whose other dimensions is kept:
    moved behind the window's they would be padded many times.
    """
    import jax

    if value.dtype.kind == "c":  # XLA:TPU knows no reduce-scatter of complex numbers
        both = (jax.numpy.real(value), jax.numpy.imag(value))
        return jax.lax.complex(*(_scattered(p, axes, dim, axis_names, sizes, slice_shape, order) for p in both))
    names = tuple(axis_names[a] for a in axes)
    n_shards = math.prod(sizes[a] for a in axes)
    rows = value.shape[dim] // n_shards
    in_stages = spans_slice(axes, sizes, slice_shape)
    turned = value.ndim == 2 and order.leading == 1 and value.dtype == "float32"
    first = dim == order.leading or (math.prod(value.shape[:dim]) == 1 and not turned)
    inner = not first and 0 < dim < value.ndim - 1
    whole_tiles = inner and value.shape[-1] % LANES == 0 and rows % SHORT_ROWS == 0
    beside = max((n for d, n in enumerate(value.shape) if d != dim), default=1)
    whole_beside = not slice_shape or beside % LANES == 0
    if not in_stages and ((not first and rows % SAFE_MULTIPLE == 0 and whole_beside) or whole_tiles):
        return jax.lax.psum_scatter(value, names, scatter_dimension=dim, tiled=True)
    if slice_shape and order.windowed and not (in_stages or first):
        split = value.reshape(*value.shape[:dim], n_shards, rows, *value.shape[dim + 1 :])
        front = row_major(jax.numpy.moveaxis(split, dim, 0))
        return jax.lax.psum_scatter(front, names, scatter_dimension=0, tiled=False)
    front = jax.numpy.moveaxis(value, dim, 0)
    shard = (rows, *front.shape[1:])
    numbers = math.prod(shard)
    front = front.reshape(n_shards, *shard)
    front = _in_whole_tiles(front) if slice_shape else front
    if in_stages:
        shards = _scattered_in_stages(front, axes, axis_names, sizes, slice_shape)
    elif slice_shape and front.ndim > 3:
        shards = _scattered_in_rows(front, names)
    else:
        if slice_shape and order.kept and not first:
            front = row_major(front)  # the order that it has puts shards into tiles
        shards = jax.lax.psum_scatter(front, names, scatter_dimension=0, tiled=False)
    return jax.numpy.moveaxis(shards.reshape(-1)[:numbers].reshape(shard), 0, dim)


def _scattered_in_rows(front: Any, names: tuple[str, ...]) -> Any:
    """Partial sums scattered over their first dimension, in an order in memory that is asked for.

    Of the many orders of more than two dimensions XLA:TPU happens to take one whose tiles are not filled, and
    all-reduces. That of the dimensions is kept where the last fills lanes, so that a variable's gradient needs no copy;
    else the longest comes last, and rows are filled up where there are many.
    """
    import jax

    order = list(range(front.ndim))
    if front.shape[-1] % LANES:
        order = [0, *sorted(order[1:], key=lambda d: front.shape[d])]
    ordered = jax.numpy.transpose(front, order)
    shape = ordered.shape
    rows = -(-shape[-2] // ROWS) * ROWS if shape[-2] >= parts.MANY_ROWS else shape[-2]
    sent = row_major(grown(ordered, (*shape[:-2], rows, shape[-1])))
    shards = jax.lax.psum_scatter(sent, names, scatter_dimension=0, tiled=False)
    back = [order.index(d) - 1 for d in range(1, front.ndim)]
    return jax.numpy.transpose(shards[..., : shape[-2], :], back)


def _in_whole_tiles(front: Any) -> Any:
    """Shards, one per entry of the first dimension, in a shape in which XLA:TPU scatters them.

    It lays the longest dimension along the lanes, and beside it the one that is padded least. Of a few rows it makes
    tiles of as many rows, and all-reduces (compiled for v5e 4x4: kernels of 12 heads of 64, 16 shards of 4). Where a
    dimension fills the rows of whole tiles, or all are long, it scatters. Few rows of many numbers are filled up: the
    logits of two sequences of a batch, of a vocabulary of 20001.
    """
    n_shards, *shard = front.shape
    along_lanes = max(range(len(shard)), key=lambda d: shard[d])
    beside = [n for d, n in enumerate(shard) if d != along_lanes]
    whole = any(n % ROWS == 0 for n in beside) or not any(1 < n < ROWS for n in beside)
    numbers, tile = math.prod(shard), ROWS * LANES
    if whole or (numbers % tile and numbers < ROWS * tile):
        return front
    filled = grown(front.reshape(n_shards, numbers), (n_shards, -(-numbers // tile) * tile))
    return filled.reshape(n_shards, -1, LANES)


def _scattered_in_stages(
    value: Any, axes: Sequence[int], axis_names: Sequence[str], sizes: Sequence[int], slice_shape: Sequence[int]
) -> Any:
    """Partial sums scattered by the stages of :mod:`autoshard_ilp.costs.scatter`, one shard per entry of the first
    dimension."""
    import jax

    left = [a for a in axes if sizes[a] > 1]
    counts = [sizes[a] for a in left]
    if len(left) == 1:  # one axis in two parts: as many devices apart as the last part has, then neighbours
        minor = next(d for d in range(2, counts[0] + 1) if counts[0] % d == 0)
        major = counts[0] // minor
        name = axis_names[left[0]]
        value = value.reshape(major, minor, *value.shape[1:])
        apart = [[q * minor + r for q in range(major)] for r in range(minor)]
        value = jax.lax.psum_scatter(value, name, scatter_dimension=0, axis_index_groups=apart, tiled=False)
        near = [[q * minor + r for r in range(minor)] for q in range(major)]
        return jax.lax.psum_scatter(value, name, scatter_dimension=0, axis_index_groups=near, tiled=False)
    value = value.reshape(*counts, *value.shape[1:])
    for stage in stages(left, sizes, slice_shape):
        places = [left.index(a) for a in stage]
        if places != list(range(len(stage))):  # XLA:TPU would keep the order in memory, and all-reduce
            value = row_major(jax.numpy.moveaxis(value, places, range(len(stage))))
        value = value.reshape(-1, *value.shape[len(stage) :])
        value = jax.lax.psum_scatter(value, tuple(axis_names[a] for a in stage), scatter_dimension=0, tiled=False)
        left = [a for a in left if a not in stage]
    return value

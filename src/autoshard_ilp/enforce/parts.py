"""What a device computes with its part of an array, under ``shard_map``: the steps of all collectives written out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard_ilp.sharding import (
    PARTIAL,
    Layout,
    to_partition_spec,
)

FILLED_UP = frozenset({"tpu"})
"""Platforms on which dimensions beside a collective are filled up where they do not divide, and pieces that one cuts or
joins to rows of whole tiles."""

MANY_ROWS = 256
"""Rows of a piece from which on filling up costs little (6 % of what is sent at most). XLA:TPU cuts and joins pieces of
rows that do not fill tiles by shifting every row, in a program as long as they are (a table of 50272 x 4096 on v5e 4x4,
gathered from pieces of 3142: 9 MB of program, which take memory and 20 s to compile; 0.2 MB and 1 s filled up)."""


def mapped(
    function: Callable[..., Any],
    args: Sequence[Any],
    in_shapes: Sequence[tuple[int, ...]],
    operands: Sequence[Layout | None],
    out_shape: tuple[int, ...],
    result: Layout,
    mesh: Any,
    axis_names: Sequence[str],
    *,
    and_a_scalar: bool = False,
) -> Any:
    """A function of one device's parts, run on every device of a mesh under ``shard_map``.

    Args:
        function: of the parts of ``args`` that have a layout.
        in_shapes, operands: of the arguments, whole; a layout of None: an argument that is not handed on.
        out_shape, result: of the one result, whole.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.
        and_a_scalar: whether it also returns a scalar, the same on all devices as far as anyone looks.
    """
    import jax
    from jax.sharding import PartitionSpec

    in_specs = tuple(
        spec_of(layout, len(shape), axis_names) for layout, shape in zip(operands, in_shapes, strict=True) if layout
    )
    out_specs: Any = spec_of(result, len(out_shape), axis_names)
    if and_a_scalar:
        out_specs = (out_specs, PartitionSpec())
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)


def spec_of(layout: Layout, rank: int, axis_names: Sequence[str]) -> Any:
    """PartitionSpec of a layout; of partial sums, with the dimension in front."""
    from jax.sharding import PartitionSpec

    spec = to_partition_spec(layout, rank, axis_names)
    sums = tuple(name for name, place in zip(axis_names, layout, strict=True) if place == PARTIAL)
    return PartitionSpec(sums, *spec) if sums else spec


def reordered(
    part: Any, before: Sequence[int], after: Sequence[int], axis_names: Sequence[str], sizes: Sequence[int]
) -> Any:
    """Shards of one dimension exchanged among devices, so that their order along the mesh axes changes.

    Args:
        part: one device's shard, under ``shard_map``.
        before, after: the mesh axes that shard the dimension, major to minor: as the shards lie, and as they shall.
        axis_names, sizes: of all mesh axes.
    """
    import jax

    if tuple(before) == tuple(after):
        return part
    axes = sorted(before)

    def number(at: Mapping[int, int], order: Sequence[int]) -> int:
        """Mixed-radix number of coordinates, read in an order of axes."""
        found = 0
        for axis in order:
            found = found * sizes[axis] + at[axis]
        return found

    devices = [dict(zip(axes, at, strict=True)) for at in itertools.product(*(range(sizes[a]) for a in axes))]
    holder = {number(at, before): number(at, axes) for at in devices}
    pairs = [(holder[number(at, after)], number(at, axes)) for at in devices]
    return jax.lax.ppermute(part, tuple(axis_names[a] for a in axes), pairs)


def grown(value: Any, shape: Sequence[int]) -> Any:
    """A value with zeros behind it, up to a shape."""
    import jax

    more = [(0, n - m, 0) for n, m in zip(shape, value.shape, strict=True)]
    return jax.lax.pad(value, value.dtype.type(0), more) if tuple(shape) != value.shape else value

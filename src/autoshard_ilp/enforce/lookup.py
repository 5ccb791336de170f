"""Look-ups in a table whose rows are sharded, where the partitioner would send more than the plan does.

Each device fetches the rows that it has, and zeros elsewhere; the sum over devices is the result. XLA's partitioner
writes that sum as one all-reduce over all the axes, and makes a reduce-scatter of it only where the result is then cut
over the same axes, along one dimension; over a whole TPU slice it makes none even then
(:mod:`autoshard_ilp.costs.scatter`), nor where another axis computes copies. A plan that scatters over some axes and
adds up over others (a table over all devices, its rows read by sequences that only some axes share) would send, and
hold, the whole result; so the sums are written out here, as :mod:`.enforce.manual` does for products. So they are
where what was found stays partial, since a later sum adds it up (:mod:`autoshard_ilp.deferral`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp._jax_compat import whole_slice
from autoshard_ilp.costs.scatter import spans_slice
from autoshard_ilp.enforce.manual import unreduced
from autoshard_ilp.enforce.parts import mapped
from autoshard_ilp.enforce.scattered import Computed, reduced
from autoshard_ilp.rules.rule import OpView, Rule
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, divides, local_shape

UNSIGNED = frozenset({"uint32", "uint64"})
"""Dtypes of indices from which no row can be subtracted, and that another dtype does not hold."""


@dataclass(frozen=True)
class _Position:
    """One number of an index: of rows along ``dim`` of the table, ``size`` in all, sharded over mesh ``axes``."""

    number: int
    dim: int
    size: int
    axes: tuple[int, ...]


def stays_partial(op: OpView) -> bool:
    """Whether :func:`look_up` can leave what each device finds as partial sums, however the table's rows lie."""
    if op.primitive != "gather" or len(op.out_shapes) != 1:
        return False
    numbers = op.params["dimension_numbers"]
    return len(numbers.start_index_map) == 1 and not numbers.operand_batching_dims and op.in_dtypes[1] not in UNSIGNED


def look_up(
    op: OpView,
    rule: Rule,
    args: Sequence[Any],
    layouts: tuple[Sequence[Layout | None], Layout | None],
    mesh: Any,
    axis_names: Sequence[str],
) -> Any | None:
    """A gather device by device, its partial sums scattered over some mesh axes and added up over others, or left.

    Args:
        op, rule: the whole operation and its rule.
        args: the table and the indices.
        layouts: of the operands, and of the result.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.

    Returns:
        The result in its layout; None for other operations, where the partitioner does the same by itself, and where
        dimensions do not divide.
    """
    import jax
    import jax.numpy as jnp

    operands, result = layouts
    if op.primitive != "gather" or result is None:
        return None
    sums, before = unreduced(rule, operands) or ((), ())
    sides = [*zip(op.in_shapes, operands, strict=True), (op.out_shapes[0], before), (op.out_shapes[0], result)]
    sizes = [mesh.shape[name] for name in axis_names]
    slice_shape = whole_slice(mesh)
    scattered = [a for a in sums if result[a] >= 0]
    as_planned = len({result[a] for a in sums}) < 2 and not (scattered and spans_slice(scattered, sizes, slice_shape))
    as_planned = as_planned and PARTIAL not in result and not (scattered and makes_copies(operands, result, sizes))
    if (as_planned and not (scattered and along_inner(op))) or PARTIAL in before:
        return None
    if any(place != result[a] for a, place in enumerate(before) if a not in sums):
        return None
    if not all(layout is not None and divides(shape, layout, sizes) for shape, layout in sides):
        return None
    numbers, mode = op.params["dimension_numbers"], op.params["mode"]
    table = operands[0]
    assert table is not None
    rows = [
        _Position(i, d, op.in_shapes[0][d], tuple(a for a in sums if table[a] == d))
        for i, d in enumerate(map(int, numbers.start_index_map))
    ]
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    if numbers.operand_batching_dims or (fills and not all(position.axes for position in rows)):
        return None
    if op.in_dtypes[1] in UNSIGNED:
        return None
    shape = local_shape(op.out_shapes[0], before, sizes)
    of_table = local_shape(op.in_shapes[0], table, sizes)
    windows = tuple(
        here if window == whole else window
        for window, whole, here in zip(op.params["slice_sizes"], op.in_shapes[0], of_table, strict=True)
    )
    batch = tuple(d for d in range(len(shape)) if d not in numbers.offset_dims)

    def one_device(part: Any, indices: Any) -> Any:
        if jnp.iinfo(indices.dtype).bits < 32 or not jnp.issubdtype(indices.dtype, jnp.signedinteger):
            indices = indices.astype(jnp.int32)
        mine, outside, first, found = True, False, True, []
        for position in rows:
            at = indices[..., position.number]
            if mode == jax.lax.GatherScatterMode.CLIP:
                at = jnp.clip(at, 0, position.size - windows[position.dim])
            if position.axes:
                extent = position.size // math.prod(sizes[a] for a in position.axes)
                offset = jax.lax.axis_index(tuple(axis_names[a] for a in position.axes)) * extent
                outside = outside | (at < 0) | (at >= position.size)
                first = first & (offset == 0)
                at = at - offset.astype(at.dtype)
                mine = mine & (at >= 0) & (at < extent)
            found.append(at)
        out = jax.lax.gather(
            part,
            jnp.stack(found, axis=-1),
            numbers,
            windows,
            indices_are_sorted=len(rows) == 1 and bool(op.params["indices_are_sorted"]),
            mode=jax.lax.GatherScatterMode.CLIP,
        )
        out = jnp.where(jax.lax.broadcast_in_dim(mine, out.shape, batch), out, jnp.zeros((), out.dtype))
        if fills:  # one device says so for all
            there = jax.lax.broadcast_in_dim(outside & first, out.shape, batch)
            out = jnp.where(there, _fill(op.params["fill_value"], out.dtype), out)
        return reduced(out, sums, result, axis_names, sizes, slice_shape, Computed())

    return mapped(one_device, args, op.in_shapes, operands, op.out_shapes[0], result, mesh, axis_names)


def makes_copies(operands: Sequence[Layout | None], result: Layout, sizes: Sequence[int]) -> bool:
    """Whether a mesh axis shares nothing of a look-up, so that devices along it compute copies of one another. XLA's
    partitioner shares the indices out over that axis as well, adds up, and permutes, where sums are scattered."""
    layouts = [result, *(layout for layout in operands if layout is not None)]
    return any(size > 1 and all(layout[a] == WHOLE for layout in layouts) for a, size in enumerate(sizes))


def along_inner(op: OpView) -> bool:
    """Whether rows are looked up along another dimension than the first (``take`` along axis 1): the result has
    dimensions of the table before those of the indices. Where sums are scattered there, XLA's partitioner returns wrong
    numbers, or makes a program that its verifier refuses (jaxlib 0.10.2)."""
    table = [int(d) for d in op.params["dimension_numbers"].offset_dims]
    batch = [d for d in range(len(op.out_shapes[0])) if d not in table]
    return min(table, default=0) < max(batch, default=0)


def _fill(value: Any, dtype: Any) -> Any:
    """What stands for rows that are not there: as ``jax.lax.gather`` has it where no value is given."""
    import jax.numpy as jnp

    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = jnp.nan
        elif jnp.issubdtype(dtype, jnp.signedinteger):
            value = jnp.iinfo(dtype).min
        else:
            value = jnp.iinfo(dtype).max
    return jnp.asarray(value, dtype)

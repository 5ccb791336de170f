"""Gather, scatter and slices at positions known only when the program runs.

An embedding look-up, a gather of rows: ``(v d, b s 1) -> (b s d) reduction={v}``. With the table's rows sharded, each
device fetches the rows it has, zeros elsewhere, and the parts are added. Its gradient, a scatter-add:
``(v d, b s 1, b s d) -> (v d) reduction={b,s}``: with rows sharded each device adds the updates that fall in its range;
with the updates sharded each device adds its own updates to zeros, and the parts are added.

The dimension numbers are those of the XLA operation semantics, under "Gather" and "Scatter".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard_ilp.rules.builder import Builder, is_summable
from autoshard_ilp.rules.reduce import reduction_kind
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dim, Kind, OpView, Rule

# How partial results combine when the updates are sharded. Not here: a plain scatter, where the last update wins.
SCATTER_COMBINE = {"scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max"}


@register("gather")
def gather(op: OpView) -> Rule:
    """Slices of the operand at the given indices; see the module docstring."""
    numbers = op.params["dimension_numbers"]
    windows = [int(n) for n in op.params["slice_sizes"]]
    operand_shape, index_shape = op.in_shapes
    indexed = {int(d) for d in numbers.start_index_map}
    batching = [int(d) for d in numbers.operand_batching_dims]
    searched = {d for d in indexed if windows[d] == 1}
    b = Builder()

    operand: list[Dim] = []
    for d, size in enumerate(operand_shape):
        if d in batching or windows[d] == size:
            operand.append(b.dim(size))
        elif d in searched and is_summable(op.in_dtypes[0]):
            operand.append(b.dim(size, Kind.REDUCTION))
        else:
            operand.append(b.dim(size, Kind.REPLICATE))
    partners = _partners(numbers.start_indices_batching_dims, batching, operand)
    rows = [partners.get(i) or b.dim(size) for i, size in enumerate(index_shape[:-1])]
    offsets = [d for d in range(len(operand_shape)) if d not in numbers.collapsed_slice_dims and d not in batching]
    slices = [operand[d] if windows[d] == operand_shape[d] else b.dim(windows[d], Kind.REPLICATE) for d in offsets]
    result = _interleave(len(op.out_shapes[0]), numbers.offset_dims, slices, rows)
    return b.rule([tuple(operand), (*rows, b.dim(index_shape[-1], Kind.REPLICATE))], [result])


@register("scatter", "scatter-sub", *SCATTER_COMBINE)
def scatter(op: OpView) -> Rule:
    """Updates of the operand at the given indices; see the module docstring."""
    numbers = op.params["dimension_numbers"]
    operand_shape, index_shape, update_shape = op.in_shapes
    indexed = {int(d) for d in numbers.scatter_dims_to_operand_dims}
    batching = [int(d) for d in numbers.operand_batching_dims]
    inserted = {int(d) for d in numbers.inserted_window_dims}
    window_dims = [d for d in range(len(operand_shape)) if d not in inserted and d not in batching]
    windows = dict(zip(window_dims, (update_shape[int(u)] for u in numbers.update_window_dims), strict=True))
    combine = SCATTER_COMBINE.get(op.primitive)
    # Where shards are padded, XLA (jaxlib 0.10) applies a single update once too often, and the padding of rows as if
    # it were an update: wrong results, both.
    single = math.prod(index_shape[:-1]) == 1
    b = Builder()

    operand: list[Dim] = []
    for d, size in enumerate(operand_shape):
        window = windows.get(d, 1)
        # One element per update: each device keeps the updates in its range. Wider windows may straddle two ranges.
        free = d in batching or window == size or (window == 1 and d in indexed)
        operand.append(b.dim(size, Kind.PASS if free else Kind.REPLICATE, even=single))
    partners = _partners(numbers.scatter_indices_batching_dims, batching, operand)
    kind = reduction_kind(combine, op.in_dtypes[0]) if combine else Kind.REPLICATE
    rows = [
        partners.get(i) or b.dim(size, kind, combine=combine or "add", even=True)
        for i, size in enumerate(index_shape[:-1])
    ]
    slices = [operand[d] if windows[d] == operand_shape[d] else b.dim(windows[d], Kind.REPLICATE) for d in window_dims]
    updates = _interleave(len(update_shape), numbers.update_window_dims, slices, rows)
    indices = (*rows, b.dim(index_shape[-1], Kind.REPLICATE))
    return b.rule([tuple(operand), indices, updates], [tuple(operand)])


@register("dynamic_slice")
def dynamic_slice(op: OpView) -> Rule:
    """Dimensions that are taken in full pass, the others stay whole on both sides."""
    source, target = op.in_shapes[0], op.out_shapes[0]
    b = Builder()
    operand = [b.dim(n, Kind.PASS if n == m else Kind.REPLICATE) for n, m in zip(source, target, strict=True)]
    result = [d if n == m else b.dim(m, Kind.REPLICATE) for d, n, m in zip(operand, source, target, strict=True)]
    starts = [() for _ in op.in_shapes[1:]]
    return b.rule([tuple(operand), *starts], [tuple(result)])


@register("dynamic_update_slice")
def dynamic_update_slice(op: OpView) -> Rule:
    """Dimensions that are overwritten in full pass, the others stay whole."""
    source, part = op.in_shapes[:2]
    b = Builder()
    operand = [b.dim(n, Kind.PASS if n == m else Kind.REPLICATE) for n, m in zip(source, part, strict=True)]
    update = [d if n == m else b.dim(m, Kind.REPLICATE) for d, n, m in zip(operand, source, part, strict=True)]
    starts = [() for _ in op.in_shapes[2:]]
    return b.rule([tuple(operand), tuple(update), *starts], [tuple(operand)])


def _partners(index_dims: Sequence[int], operand_dims: Sequence[int], operand: Sequence[Dim]) -> dict[int, Dim]:
    """The factor that a batching dimension of the indices shares with the operand."""
    return {int(i): operand[int(d)] for i, d in zip(index_dims, operand_dims, strict=True)}


def _interleave(rank: int, window_positions: Sequence[int], windows: list[Dim], rows: list[Dim]) -> tuple[Dim, ...]:
    """Window dimensions at their positions, the dimensions of the indices in the others, both in order."""
    positions = {int(p) for p in window_positions}
    window, row = iter(windows), iter(rows)
    return tuple(next(window) if i in positions else next(row) for i in range(rank))

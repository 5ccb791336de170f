"""Collectives written out, where a partitioner left to itself would choose others than the plan's.

Told only the layouts, XLA:TPU turns a reduce-scatter or an all-gather next to a product into a loop of permutes that
keeps many partial products alive, writes an all-reduce and a permute where one axis computes copies; XLA:CPU makes no
reduce-scatter. Under ``jax.shard_map`` each device computes on its part and the collective is the one that was priced:

* an operation whose partial sums are reduce-scattered, arrive partial or stay partial (:func:`run`);
* an all-gather or all-to-all on the way from one layout to the next (:func:`move`);
* no collective at all where devices repeat what they hold (:func:`repeat`).

Several mesh axes on one dimension are major to minor in mesh order. A collective over an axis that leaves or enters a
dimension which a later axis keeps sharding brings the shards in another order; :func:`_reordered` permutes the small
shards before or after it, as the cost model prices it.

Partial sums over mesh axes A travel between operations as an array with one dimension in front, of one entry per device
along A. Where a dimension does not divide, both functions answer None and a sharding constraint must do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp._jax_compat import platform_of, row_major, whole_slice
from autoshard_ilp.costs.primitives import PRODUCTS
from autoshard_ilp.costs.scatter import spans_slice, stages
from autoshard_ilp.costs.tpu.tile_shape import LANES, ROWS, SHORT_ROWS
from autoshard_ilp.rules.rule import Kind, OpView, Rule
from autoshard_ilp.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    before_broadcast,
    divides,
    local_shape,
    shards_of_dims,
    to_partition_spec,
)

#: Operations that may run on one device's parts; the value names a parameter that holds the result's shape.
LOCAL: Mapping[str, str] = {
    "dot_general": "",
    "conv_general_dilated": "",
    "reduce_sum": "",
    "add": "",
    "add_any": "",
    "transpose": "",
    "copy": "",
    "reshape": "new_sizes",
    "squeeze": "",
    "convert_element_type": "",
}


SAFE_MULTIPLE = 256
"""A multiple that fills whole tiles whichever dimension is tiled (found by compiling for v5e)."""


WINDOW_DIMS = 4
"""Dimensions of a convolution's result, of a window of two dimensions or more."""

WITHOUT_TURNED_PRODUCTS = frozenset({"cpu"})
"""Platforms that make one product of a product and a transposition of its result after they have looked for dtypes that
they cannot multiply. XLA:CPU then stops at 16-bit operands with a 32-bit result; a scatter transposes such results."""

SPLIT_PRODUCTS = frozenset({"gpu"})
"""Platforms that split products of few tiles along the contraction (:mod:`.costs.gpu.splitk`). A look at one
element of such a product adds that element's pieces up; all others lie there, several times the result, until something
reads the whole. Behind a barrier the look reads the sum (Flux of small width under a tight budget, compiled for eight
H100s: 51.5 to 44.6 MB of temporaries, by as many kernels)."""

SENT_IN_PIECES = frozenset({"cpu"})
"""Platforms that cut the operand of an all-to-all into slices before arrays have layouts in memory. A slice of padding
then becomes a constant, one beside it what a transposition made, and XLA:CPU refuses operands laid out differently."""

FILLED_UP = frozenset({"tpu"})
"""Platforms on which dimensions beside a collective are filled up where they do not divide, and pieces that one cuts or
joins to rows of whole tiles."""

MANY_ROWS = 256
"""Rows of a piece from which on filling up costs little (6 % of what is sent at most). XLA:TPU cuts and joins pieces of
rows that do not fill tiles by shifting every row, in a program as long as they are (a table of 50272 x 4096 on v5e 4x4,
gathered from pieces of 3142: 9 MB of program, which take memory and 20 s to compile; 0.2 MB and 1 s filled up)."""


def runs_partial(op: OpView) -> bool:
    """Whether :func:`run` can run an operation at all."""
    if op.primitive == "conv_general_dilated":
        return int(op.params["feature_group_count"]) == int(op.params["batch_group_count"]) == 1
    return op.primitive in LOCAL


def unreduced(rule: Rule, operands: Sequence[Layout | None]) -> tuple[tuple[int, ...], Layout] | None:
    """What one device's share of an operation leaves before any reduction.

    Args:
        rule: of the operation.
        operands: layout in which each operand is read; None: undecided.

    Returns:
        Mesh axes over which the result holds partial sums, in mesh order, and its layout over the others; None where
        the operands do not agree on what an axis shards.
    """
    if not operands or any(layout is None for layout in operands):
        return None
    known = [layout for layout in operands if layout is not None]
    sums, result = [], []
    for axis in range(len(known[0])):
        places = [(dims, layout[axis]) for dims, layout in zip(rule.operands, known, strict=True)]
        factors = {PARTIAL if d == PARTIAL else dims[d][0] if dims[d] else "" for dims, d in places if d != WHOLE}
        factor = factors.pop() if factors else WHOLE
        if factors or factor == "":
            return None
        if factor == PARTIAL:
            agreed = all(d == PARTIAL for _, d in places)
        else:
            agreed = all((d != WHOLE) == any(dim[:1] == (factor,) for dim in dims) for dims, d in places)
        kind = rule.factors[factor] if isinstance(factor, str) else None
        if not agreed or (kind is not None and kind.kind is Kind.REDUCTION and kind.combine != "add"):
            return None
        if factor == PARTIAL or (kind is not None and kind.kind is Kind.REDUCTION):
            sums.append(axis)
        result.append(next((i for i, dim in enumerate(rule.results[0]) if dim[:1] == (factor,)), WHOLE))
    return tuple(sums), tuple(result)


def run(
    bind: Callable[..., Any],
    op: OpView,
    rule: Rule,
    args: Sequence[Any],
    layouts: tuple[Sequence[Layout | None], Layout | None],
    mesh: Any,
    axis_names: Sequence[str],
    *,
    looked_at: bool = False,
    leading: int = 0,
) -> Any | None:
    """An operation whose partial sums are scattered or left partial, device by device.

    Args:
        bind: the primitive's ``bind``.
        op, rule: the whole operation and its rule.
        args: operands; partial ones with their dimension in front.
        layouts: of the operands, and of the one result.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.
        looked_at: also return :func:`never_known_before` of one device's own result, before any reduction. Partial sums
            are then added up over devices here, too.
        leading: dimension of the result that its readers move to the front. Compilers compute it in that order.

    Returns:
        The result in its layout; None where there is nothing to scatter or leave (or to add up, if it is looked at), or
        dimensions do not divide.
    """
    import jax

    operands, result = layouts
    if not runs_partial(op) or len(op.out_shapes) != 1 or result is None:
        return None
    sums, before = unreduced(rule, operands) or ((), ())
    arrives = any(PARTIAL in layout for layout in operands if layout is not None)
    if not arrives and all(result[a] == WHOLE for a in sums) and not (looked_at and sums):
        return None
    if any(place != result[a] for a, place in enumerate(before) if a not in sums):
        return None
    sizes = [mesh.shape[name] for name in axis_names]
    sides = [*zip(op.in_shapes, operands, strict=True), (op.out_shapes[0], before), (op.out_shapes[0], result)]
    if not all(layout is not None and divides(shape, layout, sizes) for shape, layout in sides):
        filled = _filled_up(op, rule, args, operands, (before, result), mesh, sizes)
        if filled is None or looked_at:
            return None
        view, args = filled
        out = run(bind, view, rule, args, layouts, mesh, axis_names, leading=leading)
        return None if out is None else out[tuple(slice(n) for n in op.out_shapes[0])]
    params = dict(op.params)
    if LOCAL[op.primitive]:
        params[LOCAL[op.primitive]] = local_shape(op.out_shapes[0], before, sizes)

    slice_shape = whole_slice(mesh)
    platform = platform_of(mesh)
    kept = platform in WITHOUT_TURNED_PRODUCTS and op.primitive == "dot_general" and _widens(op)
    kept = kept or (looked_at and platform in SPLIT_PRODUCTS)

    def one_device(*parts: Any) -> Any:
        whole = [part[0] if PARTIAL in layout else part for part, layout in zip(parts, operands, strict=True) if layout]
        out = bind(*whole, **params)
        partial = out[0] if isinstance(out, (list, tuple)) else out
        partial = jax.lax.optimization_barrier(partial) if kept else partial
        windowed = op.primitive == "conv_general_dilated" and len(op.out_shapes[0]) >= WINDOW_DIMS
        order = Computed(leading, windowed, kept=op.primitive not in PRODUCTS)
        total = reduced(partial, sums, result, axis_names, sizes, slice_shape, order)
        return (total, never_known_before(partial)) if looked_at else total

    return mapped(
        one_device, args, op.in_shapes, operands, op.out_shapes[0], result, mesh, axis_names, and_a_scalar=looked_at
    )


def _widens(op: OpView) -> bool:
    """Whether the result of an operation has another dtype than an operand."""
    return any(dtype != op.out_dtypes[0] for dtype in op.in_dtypes)


def _filled_up(
    op: OpView,
    rule: Rule,
    args: Sequence[Any],
    operands: Sequence[Layout | None],
    results: tuple[Layout, Layout],
    mesh: Any,
    sizes: Sequence[int],
) -> tuple[OpView, list[Any]] | None:
    """A product whose dimensions that do not divide are filled up with zeros, and its operands.

    Args:
        op, rule: the whole operation and its rule.
        args: its operands.
        operands: their layouts.
        results: the result's layout before and after the reduction.
        mesh: of the devices.
        sizes: of its axes.

    Returns:
        None where a dimension that does not divide is scattered, or something else than one of a product. Zeros add
        nothing to a sum over a dimension that is reduced.
    """
    before, after = results
    if platform_of(mesh) not in FILLED_UP or op.primitive != "dot_general":
        return None
    if any(layout is None or PARTIAL in layout for layout in (*operands, after)):
        return None
    whole: dict[str, int] = {}  # factor -> its extent in whole shards
    for layout in results:
        shards = shards_of_dims(layout, len(op.out_shapes[0]), sizes)
        for d, (dim, n, k) in enumerate(zip(rule.results[0], op.out_shapes[0], shards, strict=True)):
            if n % k:
                if any((before[a] == d) != (after[a] == d) for a in range(len(sizes))):
                    return None
                whole[dim[0]] = -(-n // k) * k
    for dims, shape, read in zip(rule.operands, op.in_shapes, operands, strict=True):
        assert read is not None
        for dim, n, k in zip(dims, shape, shards_of_dims(read, len(shape), sizes), strict=True):
            if n % k and len(dim) == 1:
                whole.setdefault(dim[0], -(-n // k) * k)
    shapes = [
        tuple(whole.get(dim[0], n) if len(dim) == 1 else n for dim, n in zip(dims, shape, strict=True))
        for dims, shape in zip((*rule.operands, *rule.results), (*op.in_shapes, *op.out_shapes), strict=True)
    ]
    layouts = (*operands, after)
    if not whole or not all(lay and divides(shape, lay, sizes) for shape, lay in zip(shapes, layouts, strict=True)):
        return None
    filled = [_grown(arg, shape) for arg, shape in zip(args, shapes, strict=False)]
    return replace(op, in_shapes=tuple(shapes[:-1]), out_shapes=(shapes[-1],)), filled


def _grown(value: Any, shape: Sequence[int]) -> Any:
    """A value with zeros behind it, up to a shape."""
    import jax

    more = [(0, n - m, 0) for n, m in zip(shape, value.shape, strict=True)]
    return jax.lax.pad(value, value.dtype.type(0), more) if tuple(shape) != value.shape else value


def never_known_before(part: Any) -> Any:
    """A boolean scalar that is always false, but that no compiler can tell before one device's array is there."""
    first = part[(0,) * part.ndim]
    if first.dtype.kind in "iub":
        first = first.astype("float32")  # compilers know that whole numbers are equal to themselves
    return (first != first) & (first == first)


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
        value = _reordered(value, (*stay, *by_dim[dim]), sorted((*stay, *by_dim[dim])), axis_names, sizes)
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
        parts = (jax.numpy.real(value), jax.numpy.imag(value))
        return jax.lax.complex(*(_scattered(p, axes, dim, axis_names, sizes, slice_shape, order) for p in parts))
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
    rows = -(-shape[-2] // ROWS) * ROWS if shape[-2] >= MANY_ROWS else shape[-2]
    sent = row_major(_grown(ordered, (*shape[:-2], rows, shape[-1])))
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
    filled = _grown(front.reshape(n_shards, numbers), (n_shards, -(-numbers // tile) * tile))
    return filled.reshape(n_shards, -1, LANES)


def _scattered_in_stages(
    value: Any, axes: Sequence[int], axis_names: Sequence[str], sizes: Sequence[int], slice_shape: Sequence[int]
) -> Any:
    """Partial sums scattered by the stages of :mod:`autoshard_ilp.costs.scatter`, one shard per entry of the first
    dimension."""
    import jax

    left = [a for a in axes if sizes[a] > 1]
    parts = [sizes[a] for a in left]
    if len(left) == 1:  # one axis in two parts: as many devices apart as the last part has, then neighbours
        minor = next(d for d in range(2, parts[0] + 1) if parts[0] % d == 0)
        major = parts[0] // minor
        name = axis_names[left[0]]
        value = value.reshape(major, minor, *value.shape[1:])
        apart = [[q * minor + r for q in range(major)] for r in range(minor)]
        value = jax.lax.psum_scatter(value, name, scatter_dimension=0, axis_index_groups=apart, tiled=False)
        near = [[q * minor + r for r in range(minor)] for q in range(major)]
        return jax.lax.psum_scatter(value, name, scatter_dimension=0, axis_index_groups=near, tiled=False)
    value = value.reshape(*parts, *value.shape[1:])
    for stage in stages(left, sizes, slice_shape):
        places = [left.index(a) for a in stage]
        if places != list(range(len(stage))):  # XLA:TPU would keep the order in memory, and all-reduce
            value = row_major(jax.numpy.moveaxis(value, places, range(len(stage))))
        value = value.reshape(-1, *value.shape[len(stage) :])
        value = jax.lax.psum_scatter(value, tuple(axis_names[a] for a in stage), scatter_dimension=0, tiled=False)
        left = [a for a in left if a not in stage]
    return value


def _reordered(
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


def move(value: Any, before: Layout, after: Layout, mesh: Any, axis_names: Sequence[str]) -> Any | None:
    """A value brought from one layout to the next by one all-gather or all-to-all, its shards reordered where need be.

    Args:
        value: laid out as ``before`` says.
        before, after: layouts that differ in one step of :func:`autoshard_ilp.costs.reshard.steps`.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.

    Returns:
        The value in the layout ``after``; None where this is no such step, or a dimension does not divide.
    """
    import jax

    changed = [a for a, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    olds, news = {before[a] for a in changed}, {after[a] for a in changed}
    sizes = [mesh.shape[name] for name in axis_names]
    shape = tuple(value.shape)
    if len(olds) != 1 or len(news) != 1 or min(*olds, *(d for d in news if d != WHOLE), 0) < 0:
        return None
    old, new = olds.pop(), news.pop()
    if not divides(shape, before, sizes) or not divides(shape, after, sizes):
        shards = shards_of_dims(before, len(shape), sizes)
        grown = tuple(
            n if d in (old, new) else -(-n // k) * k for d, (n, k) in enumerate(zip(shape, shards, strict=True))
        )
        even = divides(grown, before, sizes) and divides(grown, after, sizes)
        if not even or platform_of(mesh) not in FILLED_UP:
            return None
        moved = move(_grown(value, grown), before, after, mesh, axis_names)
        return None if moved is None else moved[tuple(slice(n) for n in shape)]
    names = tuple(axis_names[a] for a in changed)
    n_devices, filled_up = math.prod(sizes[a] for a in changed), platform_of(mesh) in FILLED_UP

    def orders(dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes on a dimension besides the changed ones: those last, as the collective needs it, and in mesh order."""
        stay = [a for a, d in enumerate(before) if d == dim and a not in changed]
        return (*stay, *changed), tuple(sorted((*stay, *changed)))

    def one_device(part: Any) -> Any:
        last, sorted_ = orders(old)
        part = _reordered(part, sorted_, last, axis_names, sizes)
        if new == WHOLE:
            return _gathered(part, names, old, filled_up)
        if platform_of(mesh) in SENT_IN_PIECES:
            part = jax.lax.optimization_barrier(part)
        part = _exchanged(part, names, (old, new), n_devices, filled_up)
        last, sorted_ = orders(new)
        return _reordered(part, last, sorted_, axis_names, sizes)

    return mapped(one_device, [value], [shape], [before], shape, after, mesh, axis_names)


def _in_tiles(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """A shape of which some dimensions are filled up to whole tiles: those of MANY_ROWS that fill no sublanes."""
    uneven = [d for d in dims if shape[d] >= MANY_ROWS and shape[d] % ROWS]
    return [-(-n // SHORT_ROWS) * SHORT_ROWS if d in uneven else n for d, n in enumerate(shape)]


def _joined(pieces: Any, shape: Sequence[int], dim: int) -> Any:
    """Pieces of a shape, each one entry of the first dimension and perhaps filled up, joined along one of their own.

    A loop puts one after the other: cut and concatenated at once, XLA:TPU holds all of them once more.
    """
    import jax

    def put(i: Any, joined: Any) -> Any:
        piece = jax.lax.dynamic_index_in_dim(pieces, i, 0, keepdims=False)[tuple(slice(n) for n in shape)]
        return jax.lax.dynamic_update_slice_in_dim(joined, piece, i * shape[dim], axis=dim)

    whole = [len(pieces) * n if d == dim else n for d, n in enumerate(shape)]
    return jax.lax.fori_loop(0, len(pieces), put, jax.numpy.zeros(whole, pieces.dtype))


def _gathered(part: Any, names: tuple[str, ...], dim: int, filled_up: bool) -> Any:
    """All devices' parts joined along a dimension; ``filled_up``: sent in whole tiles where they have many rows."""
    import jax

    sent = _in_tiles(part.shape, [dim]) if filled_up else part.shape
    if tuple(sent) == part.shape:
        return jax.lax.all_gather(part, names, axis=dim, tiled=True)
    return _joined(jax.lax.all_gather(_grown(part, sent), names, axis=0, tiled=False), part.shape, dim)


def _exchanged(part: Any, names: tuple[str, ...], dims: tuple[int, int], n_devices: int, filled_up: bool) -> Any:
    """One device's part cut along a dimension, and all devices' pieces for it joined along another.

    Args:
        part: what is cut.
        names: the mesh axes over which pieces go.
        dims: along which pieces are joined, and along which the part is cut.
        n_devices: along these axes.
        filled_up: whether pieces of many rows are sent in whole tiles.
    """
    import jax

    join, cut = dims
    piece = [n // n_devices if d == cut else n for d, n in enumerate(part.shape)]
    sent = _in_tiles(piece, dims) if filled_up else piece
    if sent == piece:
        return jax.lax.all_to_all(part, names, split_axis=cut, concat_axis=join, tiled=True)
    pieces = jax.numpy.stack([_grown(p, sent) for p in jax.numpy.split(part, n_devices, axis=cut)])
    return _joined(jax.lax.all_to_all(pieces, names, split_axis=0, concat_axis=0, tiled=True), piece, join)


def repeat(
    value: Any, dims: Sequence[int], shape: Sequence[int], result: Layout, mesh: Any, axis_names: Sequence[str]
) -> Any | None:
    """A broadcast of which every device makes its own part.

    Args:
        value: what is repeated.
        dims: the result's dimension for each of its dimensions, as ``jax.lax.broadcast_in_dim`` takes them.
        shape: of the result.
        result: its layout, without partial sums.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.

    Returns:
        The broadcast value; None where a dimension does not divide.
    """
    import jax

    sizes = [mesh.shape[name] for name in axis_names]
    operand = before_broadcast(result, dims, value.shape, shape)
    if not divides(shape, result, sizes):
        return None

    def one_device(part: Any) -> Any:
        return jax.lax.broadcast_in_dim(part, local_shape(shape, result, sizes), tuple(dims))

    return mapped(one_device, [value], [value.shape], [operand], tuple(shape), result, mesh, axis_names)


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

"""Collectives written out, where a partitioner left to itself would choose others than the plan's.

Told only the layouts, XLA:TPU turns a reduce-scatter or an all-gather next to a product into a loop of permutes that
keeps many partial products alive, writes an all-reduce and a permute where one axis computes copies; XLA:CPU makes no
reduce-scatter. Under ``jax.shard_map`` each device computes on its part and the collective is the one that was priced:

* an operation whose partial sums are reduce-scattered, arrive partial or stay partial (:func:`run`, :mod:`.scattered`);
* an all-gather or all-to-all on the way from one layout to the next (:mod:`.moved`);
* no collective at all where devices repeat what they hold (:func:`repeat`).

Several mesh axes on one dimension are major to minor in mesh order. A collective over an axis that leaves or enters a
dimension which a later axis keeps sharding brings the shards in another order; ``parts.reordered`` permutes the small
shards before or after it, as the cost model prices it.

Partial sums over mesh axes A travel between operations as an array with one dimension in front, of one entry per device
along A. Where a dimension does not divide, these functions answer None and a sharding constraint must do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp._jax_compat import platform_of, whole_slice
from autoshard_ilp.costs.primitives import PRODUCTS
from autoshard_ilp.enforce import parts
from autoshard_ilp.enforce.parts import grown, mapped
from autoshard_ilp.enforce.scattered import Computed, reduced
from autoshard_ilp.rules.rule import Kind, OpView, Rule
from autoshard_ilp.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    before_broadcast,
    divides,
    local_shape,
    shards_of_dims,
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
    if platform_of(mesh) not in parts.FILLED_UP or op.primitive != "dot_general":
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
    filled = [grown(arg, shape) for arg, shape in zip(args, shapes, strict=False)]
    return replace(op, in_shapes=tuple(shapes[:-1]), out_shapes=(shapes[-1],)), filled


def never_known_before(part: Any) -> Any:
    """A boolean scalar that is always false, but that no compiler can tell before one device's array is there."""
    first = part[(0,) * part.ndim]
    if first.dtype.kind in "iub":
        first = first.astype("float32")  # compilers know that whole numbers are equal to themselves
    return (first != first) & (first == first)


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

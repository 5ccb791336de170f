"""Reductions and cumulative reductions. ``reduce_sum`` over the second dimension: ``(a b) -> (a) reduction={b}``."""

from __future__ import annotations

from autoshard_ilp.rules.builder import Builder, is_summable, without
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dims, Kind, OpView, Rule

COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
}


def reduction_kind(combine: str, dtype: str) -> Kind:
    """Whether partial results can be combined by an all-reduce.

    Collectives add, multiply and order numbers, and combine booleans with and/or. They do not combine the bits of
    integers, and complex numbers have no order.
    """
    if combine in ("and", "or"):
        return Kind.REDUCTION if dtype == "bool" else Kind.REPLICATE
    if combine in ("max", "min") and dtype.startswith("complex"):
        return Kind.REPLICATE
    return Kind.REDUCTION if is_summable(dtype) else Kind.REPLICATE


@register(*COMBINE)
def reduce(op: OpView) -> Rule:
    """A reduction with one operand, over ``axes``."""
    combine = COMBINE[op.primitive]
    return _over_axes(op, tuple(op.params["axes"]), reduction_kind(combine, op.in_dtypes[0]), combine)


@register("argmax", "argmin", "reduce_xor")
def whole_axis(op: OpView) -> Rule:
    """Reductions whose partial results no all-reduce combines: the reduced axes stay whole."""
    return _over_axes(op, tuple(op.params["axes"]), Kind.REPLICATE, "add")


@register("reduce")
def general_reduce(op: OpView) -> Rule:
    """A reduction by any function, of n arrays with n initial values: the reduced dimensions stay whole."""
    b = Builder()
    axes = {int(a) for a in op.params["dimensions"]}
    n = len(op.in_shapes) // 2
    dims = _dims(b, op.in_shapes[0], axes, Kind.REPLICATE, "add")
    return b.rule([dims] * n + [()] * n, [without(dims, axes)] * n)


@register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: OpView) -> Rule:
    """Each element depends on all before it along ``axis``, which stays whole."""
    b = Builder()
    dims = _dims(b, op.in_shapes[0], {int(op.params["axis"])}, Kind.REPLICATE, "add")
    return b.rule([dims], [dims])


def _over_axes(op: OpView, axes: tuple[int, ...], kind: Kind, combine: str) -> Rule:
    b = Builder()
    dims = _dims(b, op.in_shapes[0], {int(a) for a in axes}, kind, combine)
    return b.rule([dims], [without(dims, (int(a) for a in axes))])


def _dims(b: Builder, shape: tuple[int, ...], axes: set[int], kind: Kind, combine: str) -> Dims:
    return tuple(b.dim(size, kind, combine=combine) if i in axes else b.dim(size) for i, size in enumerate(shape))

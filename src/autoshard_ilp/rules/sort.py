"""Sorting: the sorted dimension stays whole, the others pass through."""

from __future__ import annotations

from autoshard_ilp.rules.builder import Builder
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Kind, OpView, Rule


@register("sort")
def sort(op: OpView) -> Rule:
    """Several arrays sorted together along ``dimension``: ``(a b, a b) -> (a b, a b) replicate={b}``."""
    b = Builder()
    axis = int(op.params["dimension"])
    dims = tuple(b.dim(n, Kind.REPLICATE if i == axis else Kind.PASS) for i, n in enumerate(op.in_shapes[0]))
    return b.rule([dims] * len(op.in_shapes), [dims] * len(op.out_shapes))


@register("top_k", "approx_top_k")
def top_k(op: OpView) -> Rule:
    """The k largest along one axis, with their indices: ``(a b) -> (a k, a k) replicate={b,k}``."""
    b = Builder()
    (source,) = op.in_shapes
    axis = int(op.params["axis" if op.primitive == "top_k" else "reduction_dimension"]) % len(source)
    dims = [b.dim(n, Kind.REPLICATE if i == axis else Kind.PASS) for i, n in enumerate(source)]
    found = list(dims)
    found[axis] = b.dim(op.out_shapes[0][axis], Kind.REPLICATE, stem="k")
    return b.rule([tuple(dims)], [tuple(found)] * len(op.out_shapes))

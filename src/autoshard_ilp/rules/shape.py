"""Primitives that rearrange dimensions. ``reshape`` of (4, 6) to (24,): ``(a b) -> ((a b))``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard_ilp.rules.builder import Builder, NoRule
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dim, Dims, Kind, OpView, Rule


@register("squeeze", "expand_dims")
def squeeze(op: OpView) -> Rule:
    """Dimensions of size 1 come or go: ``(a 1 b) -> (a b)``."""
    b = Builder()
    operand, result = refine(b, op.in_shapes[0], op.out_shapes[0])
    return b.rule([operand], [result])


@register("reshape")
def reshape(op: OpView) -> Rule:
    """The finest factors that both shapes are made of; see :func:`refine`."""
    source, target = op.in_shapes[0], op.out_shapes[0]
    if len(op.in_shapes) != 1:  # sizes known only when the program runs
        raise NoRule
    order = op.params.get("dimensions")
    order = range(len(source)) if order is None else [int(i) for i in order]
    b = Builder()
    read, result = refine(b, [source[i] for i in order], target)
    operand: list[Dim] = [()] * len(source)
    for i, dim in zip(order, read, strict=True):
        operand[i] = dim
    return b.rule([tuple(operand)], [result])


def refine(b: Builder, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Common factors of two shapes with the same elements in the same (row-major) order.

    Both shapes are read from their major ends. What is left of the current dimension on each side shares its greatest
    common divisor as a factor; this goes on while one of the two is used up. When neither is, as for 3 and 4 in
    ``(6, 4) -> (8, 3)`` after the common 2, no further factor is common: the rest stays whole on each side, up to the
    next place where the two shapes have the same number of elements to their left.
    """
    if 0 in source or 0 in target:
        return b.dims(source, Kind.REPLICATE), b.dims(target, Kind.REPLICATE)
    left: list[Dim] = [()] * len(source)
    right: list[Dim] = [()] * len(target)
    i = j = 0
    rest_l = source[0] if source else 1
    rest_r = target[0] if target else 1
    while i < len(source) and j < len(target):
        if rest_l == 1 or rest_r == 1:
            if rest_l == 1:
                i += 1
                rest_l = source[i] if i < len(source) else 1
            else:
                j += 1
                rest_r = target[j] if j < len(target) else 1
            continue
        common = math.gcd(rest_l, rest_r)
        dim = b.dim(common)
        left[i] += dim
        right[j] += dim
        rest_l //= common
        rest_r //= common
        if rest_l > 1 and rest_r > 1:
            i, j = _keep_whole(b, source, target, left, right, (i, j), (rest_l, rest_r))
            rest_l = source[i] if i < len(source) else 1
            rest_r = target[j] if j < len(target) else 1
    return tuple(left), tuple(right)


def _keep_whole(
    b: Builder,
    source: Sequence[int],
    target: Sequence[int],
    left: list[Dim],
    right: list[Dim],
    at: tuple[int, int],
    rest: tuple[int, int],
) -> tuple[int, int]:
    """Give the rest of both sides factors of their own until the element counts meet; returns where they do."""
    (i, j), (size_l, size_r) = at, rest
    left[i] += b.dim(size_l, Kind.REPLICATE)
    right[j] += b.dim(size_r, Kind.REPLICATE)
    while size_l != size_r:
        if size_l < size_r:
            i += 1
            left[i] = b.dim(source[i], Kind.REPLICATE)
            size_l *= source[i]
        else:
            j += 1
            right[j] = b.dim(target[j], Kind.REPLICATE)
            size_r *= target[j]
    return i + 1, j + 1


@register("transpose")
def transpose(op: OpView) -> Rule:
    """``(a b) -> (b a)``."""
    b = Builder()
    dims = b.dims(op.in_shapes[0])
    return b.rule([dims], [tuple(dims[int(i)] for i in op.params["permutation"])])


@register("broadcast_in_dim")
def broadcast_in_dim(op: OpView) -> Rule:
    """``(a) -> (a b)``; a repeated dimension is a factor of the result alone."""
    if len(op.in_shapes) != 1:
        raise NoRule
    b = Builder()
    result = b.dims(op.out_shapes[0])
    placed = [int(i) for i in op.params["broadcast_dimensions"]]
    operand = tuple(result[i] if size != 1 else () for i, size in zip(placed, op.in_shapes[0], strict=True))
    return b.rule([operand], [result])


@register("iota")
def iota(op: OpView) -> Rule:
    """``() -> (a b)``; the counted dimension passes too, each device starts at its own offset."""
    if op.in_shapes:
        raise NoRule
    b = Builder()
    return b.rule([], [b.dims(op.out_shapes[0])])


@register("tile")
def tile(op: OpView) -> Rule:
    """Copies side by side: ``(a) -> ((r a))``, the copies are the major factor."""
    b = Builder()
    operand = b.dims(op.in_shapes[0])
    copies = [b.dim(int(n), stem="r") for n in op.params["reps"]]
    return b.rule([operand], [tuple(r + a for r, a in zip(copies, operand, strict=True))])


@register("concatenate")
def concatenate(op: OpView) -> Rule:
    """The concatenated dimension stays whole: ``(a b, a c) -> (a d) replicate={b,c,d}``."""
    axis = int(op.params["dimension"])
    if len(op.in_shapes) == 1:
        b = Builder()
        dims = b.dims(op.in_shapes[0])
        return b.rule([dims], [dims])
    return _whole_axis(op, axis, axis)


@register("split")
def split(op: OpView) -> Rule:
    """The split dimension stays whole: ``(a b) -> (a c, a d) replicate={b,c,d}``."""
    axis = int(op.params["axis"])
    return _whole_axis(op, axis, axis)


@register("stack")
def stack(op: OpView) -> Rule:
    """The new dimension stays whole: ``(a, a) -> (a b) replicate={b}``."""
    return _whole_axis(op, None, int(op.params["axis"]))


@register("unstack")
def unstack(op: OpView) -> Rule:
    """The dimension taken apart stays whole: ``(a b) -> (a, a) replicate={b}``."""
    return _whole_axis(op, int(op.params["axis"]), None)


@register("rev")
def rev(op: OpView) -> Rule:
    """Reversed dimensions stay whole."""
    b = Builder()
    turned = {int(i) for i in op.params["dimensions"]}
    dims = tuple(b.dim(n, Kind.REPLICATE if i in turned else Kind.PASS) for i, n in enumerate(op.in_shapes[0]))
    return b.rule([dims], [dims])


@register("pad")
def pad(op: OpView) -> Rule:
    """Padded (or trimmed) dimensions stay whole, on both sides; the padding value is a scalar."""
    untouched = [all(int(n) == 0 for n in amounts) for amounts in op.params["padding_config"]]
    rule = same_or_whole(op.in_shapes[0], op.out_shapes[0], untouched)
    return Rule((*rule.operands, ()), rule.results, rule.factors)


@register("slice")
def slice_(op: OpView) -> Rule:
    """Dimensions that are taken in full pass, the others stay whole on both sides."""
    (source,), (target,) = op.in_shapes, op.out_shapes
    return same_or_whole(source, target, [n == m for n, m in zip(source, target, strict=True)])


def same_or_whole(source: Sequence[int], target: Sequence[int], untouched: Sequence[bool]) -> Rule:
    """Rule of an operation that leaves some dimensions as they are and needs the others whole."""
    b = Builder()
    operand: list[Dim] = []
    result: list[Dim] = []
    for n, m, same in zip(source, target, untouched, strict=True):
        operand.append(b.dim(n, Kind.PASS if same else Kind.REPLICATE))
        result.append(operand[-1] if same else b.dim(m, Kind.REPLICATE))
    return b.rule([tuple(operand)], [tuple(result)])


def _whole_axis(op: OpView, in_axis: int | None, out_axis: int | None) -> Rule:
    """All dimensions are shared by all operands and results, but for one axis of each, which stays whole."""
    b = Builder()
    shape = list(op.in_shapes[0])
    if in_axis is not None:
        del shape[in_axis]
    shared = b.dims(shape)

    def side(sizes: tuple[int, ...], axis: int | None) -> Dims:
        if axis is None:
            return shared
        return (*shared[:axis], b.dim(sizes[axis], Kind.REPLICATE), *shared[axis:])

    return b.rule([side(s, in_axis) for s in op.in_shapes], [side(s, out_axis) for s in op.out_shapes])

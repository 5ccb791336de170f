"""Convolutions and windowed reductions.

``conv_general_dilated`` with a 3x3 kernel, NHWC and HWIO: ``(b x x2 c, w w2 c o) -> (b x x2 o)`` with
``reduction={c}``, ``permutation={x,x2}`` (neighbours exchange a halo) and ``replicate={w,w2}``.

What a window does along one dimension is decided by :func:`window_dims` from the sizes of both sides, for all of these
primitives. Dimension numbers, groups and dilations follow the XLA operation semantics ("Conv", "ReduceWindow").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard_ilp.rules.builder import Builder, NoRule, arithmetic_weight, is_summable
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Dim, Dims, Kind, OpView, Rule


@dataclass(frozen=True)
class Window:
    """A window along one dimension: elements, step, padding, and dilation of the input and of the window itself."""

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    in_dilation: int = 1
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Input positions from the first to the last element of the window."""
        return (self.size - 1) * self.dilation + 1 if self.size else 0

    @property
    def padded(self) -> bool:
        return (self.pad_low, self.pad_high) != (0, 0)

    @property
    def is_point(self) -> bool:
        """Each result element reads the input element in the same place."""
        return self.size == self.stride == self.in_dilation == 1 and not self.padded

    @property
    def is_patch(self) -> bool:
        """Windows lie side by side and cover the input from its start: each reads a part of its own."""
        return self.in_dilation == 1 and self.extent <= self.stride and not self.pad_low and self.pad_high <= 0


def window_dims(b: Builder, n_in: int, n_out: int, window: Window, overlap: Kind = Kind.PERMUTATION) -> tuple[Dim, Dim]:
    """Factors of one windowed dimension, of the input and of the result.

    * A window of one element passes.
    * Windows side by side, ``n_in = n_out * stride``: ``((x s)) -> (x)``, x passes and s, inside a window, stays whole.
    * Overlapping windows that keep the size (or divide it by the stride, or multiply it by the input's dilation): x is
      a permutation, neighbours exchange a halo (``overlap`` says so).
    * Anything else stays whole on both sides.
    """
    if window.is_point and n_in == n_out:
        x = b.dim(n_in, stem="x")
        return x, x
    if window.in_dilation == 1 and n_in == n_out * window.stride:
        x = b.dim(n_out, Kind.PASS if window.is_patch else overlap, stem="x")
        return x + b.dim(window.stride, Kind.REPLICATE, stem="s"), x
    if window.stride == 1 and n_out == n_in * window.in_dilation:
        x = b.dim(n_in, overlap, stem="x")
        return x, x + b.dim(window.in_dilation, Kind.REPLICATE, stem="s")
    return b.dim(n_in, Kind.REPLICATE, stem="x"), b.dim(n_out, Kind.REPLICATE, stem="y")


@register("conv_general_dilated")
def conv_general_dilated(op: OpView) -> Rule:
    """Batch and output features pass, input features are a reduction, groups are a major factor shared by both.

    Convolutions in groups run device by device (see ``local.py``), so their overlapping windows stay whole.
    """
    p = op.params
    numbers = p["dimension_numbers"]
    left, right, out = (tuple(int(i) for i in spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    (lhs_shape, rhs_shape), (out_shape,) = op.in_shapes, op.out_shapes
    groups, batch_groups = int(p["feature_group_count"]), int(p["batch_group_count"])
    b = Builder()
    lhs: list[Dim] = [()] * len(lhs_shape)
    rhs: list[Dim] = [()] * len(rhs_shape)
    result: list[Dim] = [()] * len(out_shape)

    kind = Kind.REDUCTION if is_summable(op.out_dtypes[0]) else Kind.REPLICATE
    group = b.dim(max(groups, batch_groups), stem="g")
    batch = b.dim(out_shape[out[0]], stem="b")
    features_in = b.dim(rhs_shape[right[1]], kind, stem="c")
    features_out = b.dim(rhs_shape[right[0]] // max(groups, batch_groups), stem="o")
    lhs[left[0]] = (group if batch_groups > 1 else ()) + batch
    lhs[left[1]] = (group if groups > 1 else ()) + features_in
    rhs[right[1]] = features_in
    rhs[right[0]] = result[out[1]] = group + features_out
    result[out[0]] = batch

    overlap = Kind.PERMUTATION if groups == batch_groups == 1 else Kind.REPLICATE
    taps = 1
    for n, (i, j, k) in enumerate(zip(left[2:], right[2:], out[2:], strict=True)):
        low, high = (int(x) for x in p["padding"][n])
        strides, in_dilation, dilation = (
            int(p[name][n]) for name in ("window_strides", "lhs_dilation", "rhs_dilation")
        )
        window = Window(rhs_shape[j], strides, low, high, in_dilation, dilation)
        lhs[i], rhs[j], result[k] = _spatial(b, lhs_shape[i], out_shape[k], window, kind, overlap)
        taps *= real_taps(lhs_shape[i], out_shape[k], window)
    flops = 2.0 * out_shape[out[0]] * out_shape[out[1]] * rhs_shape[right[1]] * taps
    return b.rule([tuple(lhs), tuple(rhs)], [tuple(result)], flops * arithmetic_weight(op.out_dtypes[0]))


def _spatial(b: Builder, n_in: int, n_out: int, window: Window, kind: Kind, overlap: Kind) -> tuple[Dim, Dim, Dim]:
    """Factors of one spatial dimension of the input, the kernel and the result."""
    whole_input = (
        n_out == 1 and window.size == n_in and not window.padded and window.dilation == window.in_dilation == 1
    )
    if whole_input:  # e.g. the weight gradient of a 1x1 convolution: a product over all positions
        x = b.dim(n_in, kind, stem="x")
        return x, x, ()
    x_in, x_out = window_dims(b, n_in, n_out, window, overlap)
    return x_in, b.dim(window.size, Kind.REPLICATE, stem="w"), x_out


@lru_cache(maxsize=4096)
def real_taps(n_in: int, n_out: int, window: Window) -> int:
    """How many (result position, kernel element) pairs of one dimension meet an input element.

    Result position o and kernel element k read position ``o * stride + k * dilation - pad_low`` of the dilated input,
    where only multiples of ``in_dilation`` below ``n_in * in_dilation`` hold data; the rest is padding or holes, and
    costs nothing.
    """
    (few, step_few), (many, step_many) = sorted(((n_out, window.stride), (window.size, window.dilation)))
    positions = np.arange(many) * step_many - window.pad_low
    total = 0
    for i in range(few):
        at = positions + i * step_few
        real = (at >= 0) & (at < n_in * window.in_dilation) & (at % window.in_dilation == 0)
        total += int(np.count_nonzero(real))
    return total


@register("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(op: OpView) -> Rule:
    """Windows reduced to one element each."""
    b = Builder()
    source, target = _windowed(b, op, op.in_shapes[0], op.out_shapes[0])
    return b.rule([source], [target])


@register("reduce_window")
def general_reduce_window(op: OpView) -> Rule:
    """n arrays and n initial values, reduced by any function."""
    n = len(op.in_shapes) // 2
    b = Builder()
    source, target = _windowed(b, op, op.in_shapes[0], op.out_shapes[0])
    return b.rule([source] * n + [()] * n, [target] * n)


@register("select_and_scatter_add")
def select_and_scatter_add(op: OpView) -> Rule:
    """Gradient of a pooling: the source goes to the chosen element of each window of the operand."""
    b = Builder()
    operand, source = _windowed(b, op, op.in_shapes[1], op.in_shapes[0])
    return b.rule([source, operand], [operand])


@register("select_and_scatter")
def select_and_scatter(op: OpView) -> Rule:
    """The general form: operand, source, initial value."""
    b = Builder()
    operand, source = _windowed(b, op, op.in_shapes[0], op.in_shapes[1])
    return b.rule([operand, source, ()], [operand])


@register("select_and_gather_add")
def select_and_gather_add(op: OpView) -> Rule:
    """Tangents of the chosen element of each window."""
    b = Builder()
    operand, result = _windowed(b, op, op.in_shapes[0], op.out_shapes[0])
    return b.rule([operand, operand], [result])


def _windowed(b: Builder, op: OpView, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Factors of the side that the windows read and of the side with one element per window."""
    p = op.params
    rank = len(source)
    if len(target) != rank:
        raise NoRule
    base = p.get("base_dilation") or (1,) * rank
    dilation = p.get("window_dilation") or (1,) * rank
    left: list[Dim] = []
    right: list[Dim] = []
    for i in range(rank):
        low, high = (int(x) for x in p["padding"][i])
        size, stride = int(p["window_dimensions"][i]), int(p["window_strides"][i])
        x_in, x_out = window_dims(
            b, source[i], target[i], Window(size, stride, low, high, int(base[i]), int(dilation[i]))
        )
        left.append(x_in)
        right.append(x_out)
    return tuple(left), tuple(right)

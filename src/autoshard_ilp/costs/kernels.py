"""What an operation costs on a GPU or CPU besides the roofline of what it reads and writes, as seen on real ones.

Seen with ``benchmarks/measured_single_device.py`` on an H200 (jax 0.11.2): the fixed time of a kernel; random bits,
115 integer operations per two words of Threefry (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011), which took 9 of 75 ms of GPT-2's step; rows of an odd vocabulary, which halve the rate of the products with it
or worse; and batched products of attention, whose operands are copied into an order in which the batch comes first.
On CPUs (``benchmarks/measured_steps.py``) the same took time: random bits 19 of 109 ms of a small GPT-2's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.costs.compute import ProductDims, Traffic
from autoshard_ilp.costs.grouped import FAMILIES, MOVED, groups_of
from autoshard_ilp.costs.primitives import RANDOM, REDUCTIONS, UNFUSIBLE
from autoshard_ilp.graph import Graph, Op

ALIGNMENT_BYTES = 16
"""Of rows that matrix units read at full rate (NVIDIA, "Matrix Multiplication Background User's Guide")."""

COUNTED = frozenset({"gpu", "cpu"})
"""Families of hardware on which this was measured."""

BYTES_PER_PLACE = 10.0
"""What the gradient of a max pooling reads, as it were, for each place of each window: 2.4 to 3.1e11 places per second
on an H100, for windows of 2 x 2 and 3 x 3 (DenseNet-121, Xception, a U-Net; measured 2026-11-25)."""

MAX_POSITIONS = 64
"""Elements of the largest kernel whose gradient is told from other convolutions (8 x 8)."""

PER_POSITION, PER_TAP = "position", "tap"

COPIED = 2
"""A copy reads and writes."""


def with_kernels(traffic: Traffic, graph: Graph, op: Op, profile: Any) -> Traffic:
    """The traffic of one execution of an operation with what it costs on hardware of the families :data:`COUNTED`.

    Args:
        traffic: by the buffers that are read and written.
        graph: of the step.
        op: one of its operations, none of its boundary.
        profile: says at which rates.
    """
    kernel = bool(traffic.writes) or op.primitive in UNFUSIBLE or op.primitive.startswith(REDUCTIONS)
    found = replace(traffic, kernels=int(kernel))
    if op.primitive in RANDOM and profile.random_words_per_s:
        words = sum(_words(graph.tensors[t].shape, graph.tensors[t].itemsize) for t in op.outputs)
        return replace(found, random_words=words)
    if op.primitive == "select_and_scatter_add" and profile.family == "gpu":
        shape = graph.tensors[op.inputs[0]].shape
        return replace(
            found, reads=(*found.reads, (0, shape, BYTES_PER_PLACE * math.prod(op.params["window_dimensions"])))
        )
    groups = groups_of(graph, op)
    if groups > 1 and profile.family in FAMILIES:
        left = graph.tensors[op.inputs[0]]
        copied = (0, left.shape, float(MOVED * groups * left.itemsize))
        return replace(found, share=1 / groups, reads=(*found.reads, copied))
    if op.primitive == "conv_general_dilated":
        return _convolution(found, graph, op, profile)
    if op.primitive == "dot_general":
        return _product(found, graph, op, profile)
    return found


def _convolution(traffic: Traffic, graph: Graph, op: Op, profile: Any) -> Traffic:
    found = replace(traffic, share=profile.convolution_efficiency)
    if profile.family != "gpu":
        return found
    products, (positions, taps) = products_instead(graph, op), _places(graph, op)
    if products == PER_TAP:
        return replace(found, kernels=taps, reads=taps * found.reads, writes=(COPIED * taps - 1) * found.writes)
    if products == PER_POSITION:
        copied = 0 if sums_of_one_feature(graph, op) else COPIED
        return replace(found, kernels=positions, reads=(1 + copied) * positions * found.reads)
    return replace(found, share=found.share / filled_in_taps(graph, op))


def products_instead(graph: Graph, op: Op) -> str:
    """Whether a convolution runs on GPUs as one product per element of its result or of its kernel
    (:mod:`autoshard_ilp.enforce.taps`): :data:`PER_POSITION`, :data:`PER_TAP`, or "" where cuDNN computes it."""
    if is_slow_kernel_gradient(graph, op):
        return PER_POSITION
    plain = op.params["feature_group_count"] == 1 and all(d == 1 for d in op.params["lhs_dilation"])
    return PER_TAP if plain and filled_in_taps(graph, op) > 1 else ""


def runs_forward(graph: Graph, op: Op) -> bool:
    """Whether XLA:GPU computes a kernel's gradient by cuDNN's forward convolution, of operands that it transposes.

    It tells such a gradient by its window, the image, being larger than its result. (Of 13 sizes compiled for H100, all
    with images of more positions than the kernel ran as ``convBackwardFilter``, none of the others.)
    """
    positions, taps = _places(graph, op)
    return taps <= positions and is_kernel_gradient(graph, op) and not products_instead(graph, op)


def swapped_by_xla(graph: Graph, op: Op) -> bool:
    """Whether XLA would take the image of a convolution for its kernel, and the kernel for an image that it dilates.

    Its algebraic simplifier (``SwapConvOperands``) does so where the image has fewer positions than the kernel. Where
    the image is dilated, as in the gradient of a strided convolution's image, cuDNN's kernel for that is then out of
    reach, and the kernel is padded by what the image is spread to: ``f32[5,5,256,512]`` to ``f32[256,14,14,512]`` for
    images of 4 x 4, 7.8 times as large. An image of one position is left alone.
    """
    if op.primitive != "conv_general_dilated" or all(d == 1 for d in op.params["lhs_dilation"]):
        return False
    if op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1 or is_kernel_gradient(graph, op):
        return False
    numbers = op.params["dimension_numbers"]
    image, kernel = (graph.tensors[t].shape for t in op.inputs)
    pairs = [(image[d], kernel[t]) for d, t in zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)]
    return math.prod(k for _, k in pairs) > math.prod(k if n == 1 else n for n, k in pairs)


def filled_in_taps(graph: Graph, op: Op) -> float:
    """How many times the taps of its kernel cuDNN would compute of a convolution.

    cuDNN pads both ends alike. Where a dilated convolution is padded at one end, as a causal one is, XLA:GPU pads its
    operand before, and its kernel with zeros between the taps: two taps of dilation 128 become 129 (a WaveNet compiled
    for H100: 3.8 times the FLOP of its step; ``xla/service/gpu/transforms/conv_padding_legalization``).
    """
    dilations = op.params["rhs_dilation"]
    if all(d == 1 for d in dilations) or is_kernel_gradient(graph, op):
        return 1.0
    numbers = op.params["dimension_numbers"]
    before = graph.tensors[graph.behind(op.inputs[0], ("hub",))].producer
    padded = graph.ops[before] if before is not None and graph.ops[before].primitive == "pad" else None
    even, filled = True, 1.0
    for n, (low, high) in enumerate(op.params["padding"]):
        at_low, at_high, _ = padded.params["padding_config"][numbers.lhs_spec[2 + n]] if padded else (0, 0, 0)
        even &= low + at_low == high + at_high
        taps = graph.tensors[op.inputs[1]].shape[numbers.rhs_spec[2 + n]]
        filled *= (dilations[n] * (taps - 1) + 1) / taps
    return 1.0 if even else filled


def is_kernel_gradient(graph: Graph, op: Op) -> bool:
    """Whether a convolution makes a kernel's gradient: its window is an image, its result a kernel.

    What it is made of is summed over the batch. Where that is not the first dimension, only sizes tell: those of the
    image are larger, unless a kernel of 5 x 5 makes 4 x 4 positions.
    """
    positions, taps = _places(graph, op)
    backward = op.phase == "backward" and not op.params.get("recomputed")
    numbers = op.params["dimension_numbers"]
    over_batch = numbers.lhs_spec[1] == numbers.rhs_spec[1] == 0
    return backward and positions <= MAX_POSITIONS and (over_batch or taps > positions)


def _places(graph: Graph, op: Op) -> tuple[int, int]:
    """Positions of a convolution's result, and of its window."""
    numbers = op.params["dimension_numbers"]
    out, window = graph.tensors[op.outputs[0]].shape, graph.tensors[op.inputs[1]].shape
    return math.prod(out[d] for d in numbers.out_spec[2:]), math.prod(window[d] for d in numbers.rhs_spec[2:])


def is_slow_kernel_gradient(graph: Graph, op: Op) -> bool:
    """Whether a convolution is a kernel's gradient that XLA:GPU does not recognise as such: of a dilated convolution
    (it has a stride) or of a transposed one (its image is dilated)."""
    grouped = op.params["feature_group_count"] > 1
    spaced = [s > 1 or d > 1 for s, d in zip(op.params["window_strides"], op.params["lhs_dilation"], strict=True)]
    twice = any(a > 1 and b > 1 for a, b in zip(op.params["lhs_dilation"], op.params["rhs_dilation"], strict=True))
    return any(spaced) and not twice and not grouped and is_kernel_gradient(graph, op)


def sums_of_one_feature(graph: Graph, op: Op) -> bool:
    """Whether products per position of a convolution have one feature on a side, in the gradient of a depthwise kernel.

    XLA:GPU multiplies and adds up in one kernel then, and takes the piece of the image inside it.
    """
    features = graph.tensors[op.inputs[0]].shape[op.params["dimension_numbers"].lhs_spec[0]]
    return int(op.params["batch_group_count"]) == features


def _words(shape: Sequence[int], itemsize: float) -> float:
    return math.prod(shape) * max(1.0, itemsize / 4)


def _product(traffic: Traffic, graph: Graph, op: Op, profile: Any) -> Traffic:
    (contract, _), batch = op.params["dimension_numbers"]
    tensors = [graph.tensors[t] for t in (*op.inputs[:2], *op.outputs)]
    unaligned = any(t.shape and t.shape[-1] * t.itemsize % ALIGNMENT_BYTES for t in tensors)
    left = len(tensors[0].shape) - len(contract) - len(batch[0])
    reads, writes = list(traffic.reads), list(traffic.writes)
    for i, dims in enumerate(batch):
        if tuple(dims) != tuple(range(len(dims))):
            reads += COPIED * [entry for entry in traffic.reads if entry[0] == i]
    if batch[0] and any(graph.ops[reader].primitive == "transpose" for reader, _ in tensors[-1].consumers):
        writes += COPIED * list(traffic.writes)
    return replace(
        traffic,
        reads=tuple(reads),
        writes=tuple(writes),
        product=ProductDims(len(batch[0]), left, tensors[-1].shape) if profile.processors else None,
        share=profile.unaligned_efficiency if unaligned else 1.0,
    )

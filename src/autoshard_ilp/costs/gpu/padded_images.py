"""Copies of images that XLA:GPU writes before cuDNN's convolutions, and pieces of them for products instead.

**Padding at one end.** cuDNN pads both ends alike. Where a convolution does not, as with a stride of 2 over an even
image ("same" of Keras), XLA:GPU writes the padded image before the call
(``xla/service/gpu/transforms/conv_padding_legalization``): all of the padding for the convolution, and for the
kernel's gradient what the two ends differ by. Where that is the same, one copy serves both, and waits for the second.
It takes the place of an image that only these two read, and that XLA makes in a kernel of its own.

**Gradients of kernels as large as the images that they make** run as forward convolutions: XLA:GPU transposes both
operands, the features in the place of the batch, and fills in padding and dilation.

**Three spatial dimensions.** cuDNN has them behind the channels. What is computed is written so; what the step is given
is copied.

**Products instead of convolutions** (:mod:`autoshard_ilp.enforce.taps`) read one piece of the image at a time.

Seen in programs compiled for H100 (3 x 3 with stride 2 over 128 x 128 pixels: ``f32[8,129,129,64]`` beside
``f32[8,128,128,64]`` until the gradient).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.costs.kernels import (
    PER_POSITION,
    is_kernel_gradient,
    products_instead,
    runs_forward,
    sums_of_one_feature,
    swapped_by_xla,
)
from autoshard_ilp.costs.padding import shape_on_device
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.strategies import Strategy

CONVOLUTION = "conv_general_dilated"

DEEP = 3
"""Spatial dimensions from which on channels come first."""


@dataclass(frozen=True)
class Copied:
    """A copy of a convolution's image.

    Attributes:
        padding: elements added to each dimension of the image.
        last: the operation that reads it last.
        instead: the image itself is not written.
    """

    padding: tuple[int, ...]
    last: int
    instead: bool


def copied_images(graph: Graph) -> dict[int, Copied]:
    """Convolutions that a copy of their image is made for, and the copy."""
    found: dict[int, Copied] = {}
    forward = [op for op in graph.ops if op.primitive == CONVOLUTION and _is_plain(graph, op)]
    for op in forward:
        image = graph.behind(op.inputs[0], ("hub",))
        gradients = [g for g in graph.readers(image) if _is_gradient_of(graph, g, op)]
        ends = op.params["padding"]
        uneven = any(low != high for low, high in ends)
        moved = len(ends) >= DEEP and _is_given(graph, image)
        if not (uneven or moved):
            continue
        dims = op.params["dimension_numbers"].lhs_spec[2:]
        whole = _along(graph, image, dims, [low + high for low, high in ends] if uneven else [0] * len(dims))
        same = not uneven or all(min(low, high) == 0 for low, high in ends)
        last = max([op.id, *(g.id for g in gradients)]) if same else op.id
        alone = {r.id for r in graph.readers(image)} == {op.id, *(g.id for g in gradients)}
        found[op.id] = Copied(whole, last, same and alone and _is_fused(graph, image))
        if not same:
            differ = _along(graph, image, dims, [abs(low - high) for low, high in ends])
            found |= {g.id: Copied(differ, g.id, False) for g in gradients}
    return found


def image_bytes(
    graph: Graph, op: Op, copied: Copied, strategies: Sequence[Strategy], axis_sizes: Sequence[int]
) -> np.ndarray:
    """Bytes that one device holds besides for the copy of a convolution's image, per strategy."""
    tensor = graph.tensors[op.inputs[0]]
    held = np.zeros(len(strategies), np.int64)
    for i, strategy in enumerate(strategies):
        layout = strategy.operands[0]
        if layout is None:
            continue
        own = shape_on_device(tensor.shape, layout, axis_sizes)
        padded = math.prod(n + more for n, more in zip(own, copied.padding, strict=True))
        held[i] = math.ceil((padded - copied.instead * math.prod(own)) * tensor.itemsize)
    return held


def piece_bytes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds besides while products compute a convolution one after the other, per strategy."""
    held = np.zeros(len(strategies), np.int64)
    if op.primitive != CONVOLUTION or products_instead(graph, op) != PER_POSITION or sums_of_one_feature(graph, op):
        return held
    numbers = op.params["dimension_numbers"]
    image, window = (graph.tensors[t] for t in op.inputs)
    for i, strategy in enumerate(strategies):
        left, right = strategy.operands
        if left is None or right is None:
            continue
        images, windows = (shape_on_device(t.shape, x, axis_sizes) for t, x in ((image, left), (window, right)))
        dilated = any(d > 1 for d in op.params["lhs_dilation"])
        own, dims, others, theirs = (
            (windows, numbers.rhs_spec, images, numbers.lhs_spec)
            if dilated
            else (images, numbers.lhs_spec, windows, numbers.rhs_spec)
        )
        piece = math.prod(own[d] for d in dims[:2]) * math.prod(others[d] for d in theirs[2:])
        held[i] = math.ceil(piece * (window if dilated else image).itemsize)
    return held


def transposed_bytes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds besides of the operands of a kernel's gradient that runs forward, per strategy."""
    held = np.zeros(len(strategies), np.int64)
    if op.primitive != CONVOLUTION or not runs_forward(graph, op):
        return held
    numbers = op.params["dimension_numbers"]
    source = graph.behind(op.inputs[0], ("hub",))
    convolved = all(reader.primitive == CONVOLUTION for reader in graph.readers(source))
    instead = convolved and _is_fused(graph, source)  # the copy is all that is kept of it
    for i, strategy in enumerate(strategies):
        left, right = strategy.operands
        if left is None or right is None:
            continue
        image, window = (
            list(shape_on_device(graph.tensors[t].shape, layout, axis_sizes))
            for t, layout in zip(op.inputs, (left, right), strict=True)
        )
        own = tuple(image)
        for n, (d, t) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
            image[d] += max(0, sum(op.params["padding"][n]))
            window[t] = (window[t] - 1) * op.params["rhs_dilation"][n] + 1
        if instead:
            held[i] -= math.ceil(math.prod(own) * graph.tensors[op.inputs[0]].itemsize)
        sizes = zip((image, window), op.inputs, strict=True)
        held[i] += math.ceil(sum(math.prod(shape) * graph.tensors[t].itemsize for shape, t in sizes))
    return held


def enlarged_bytes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds besides for the gradient of a strided convolution's image, per strategy.

    cuDNN makes that of an image padded alike at both ends, of which XLA cuts the image's own. Where the cotangent is
    smaller than the kernel it is copied with zeros (:func:`autoshard_ilp.enforce.taps.of_larger_image`).
    """
    held = np.zeros(len(strategies), np.int64)
    dilated = op.primitive == CONVOLUTION and any(d > 1 for d in op.params["lhs_dilation"])
    if not dilated or is_kernel_gradient(graph, op) or products_instead(graph, op):
        return held
    numbers, swapped = op.params["dimension_numbers"], swapped_by_xla(graph, op)
    (image, kernel), result = (graph.tensors[t] for t in op.inputs), graph.tensors[op.outputs[0]]
    for i, strategy in enumerate(strategies):
        if strategy.operands[0] is None:
            continue
        copied = list(shape_on_device(image.shape, strategy.operands[0], axis_sizes))
        unreduced = strategy.results[0] if strategy.partial is None else strategy.partial
        own = shape_on_device(result.shape, unreduced, axis_sizes)
        made = list(own)
        places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        for n, (d, t, o) in enumerate(places):
            copied[d] = max(copied[d], kernel.shape[t]) if swapped else copied[d]
            spread = kernel.shape[t] + (copied[d] - 1) * op.params["lhs_dilation"][n]
            low = kernel.shape[t] - 1 - op.params["padding"][n][0]
            made[o] += abs(spread - own[o] - 2 * low)
        held[i] = math.ceil((math.prod(made) - math.prod(own)) * result.itemsize)
        held[i] += math.ceil(swapped * math.prod(copied) * image.itemsize)
    return held


def made_for_each(graph: Graph) -> list[int]:
    """Images that are written for no one: each of two convolutions has a copy that is padded in another way, and XLA
    computes what it pads inside the kernel that writes the copy."""
    found = []
    for op in graph.ops:
        if op.primitive != CONVOLUTION or not _is_plain(graph, op):
            continue
        image = graph.behind(op.inputs[0], ("hub",))
        ends = op.params["padding"]
        gradients = [g for g in graph.readers(image) if _is_gradient_of(graph, g, op)]
        differ = any(low != high for low, high in ends) and any(min(low, high) for low, high in ends)
        alone = {r.id for r in graph.readers(image)} == {op.id, *(g.id for g in gradients)}
        if gradients and differ and alone and _is_fused(graph, image):
            found.append(image)
    return found


def _is_plain(graph: Graph, op: Op) -> bool:
    """Whether cuDNN computes a convolution whose image is not dilated and which makes no kernel's gradient."""
    dilated = any(d > 1 for d in op.params["lhs_dilation"])
    return not dilated and not is_kernel_gradient(graph, op) and not products_instead(graph, op)


def _is_gradient_of(graph: Graph, gradient: Op, op: Op) -> bool:
    """Whether a reader of a convolution's image makes its kernel's gradient, by cuDNN."""
    if gradient.primitive != CONVOLUTION or not is_kernel_gradient(graph, gradient):
        return False
    places = (graph.tensors[gradient.outputs[0]].shape, gradient.params["dimension_numbers"].out_spec)
    kernel = (graph.tensors[op.inputs[1]].shape, op.params["dimension_numbers"].rhs_spec)
    sizes = [[shape[d] for d in spec[2:]] for shape, spec in (places, kernel)]
    strided = tuple(gradient.params["rhs_dilation"]) == tuple(op.params["window_strides"])
    cudnn = not products_instead(graph, gradient) and not runs_forward(graph, gradient)
    return sizes[0] == sizes[1] and strided and cudnn


def _along(graph: Graph, image: int, dims: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements added to every dimension of an image."""
    added = dict(zip(dims, sizes, strict=True))
    return tuple(max(0, added.get(d, 0)) for d in range(len(graph.tensors[image].shape)))


def _is_given(graph: Graph, image: int) -> bool:
    """Whether a step starts with an image."""
    producer = graph.tensors[graph.behind(image, VIEWS)].producer
    return producer is not None and graph.ops[producer].primitive == "argument"


def _is_fused(graph: Graph, image: int) -> bool:
    """Whether XLA makes an image in a kernel of its own, which may pad it: not an argument, nor a library's ReLU."""
    producer = graph.tensors[graph.behind(image, VIEWS)].producer
    made = None if producer is None else graph.ops[producer]
    if made is None or made.primitive == "argument" or not fusible(made):
        return False
    return made.primitive != "max" or not _is_library_relu(graph, made)


def _is_library_relu(graph: Graph, op: Op) -> bool:
    """Whether a maximum is part of a convolution's call, which does not return what a gradient reads besides."""
    for t in op.inputs:
        source = graph.behind(t, ("hub", *VIEWS))
        producer = graph.tensors[source].producer
        made = None if producer is None else graph.ops[producer]
        if made is not None and made.primitive == "add":
            before = [graph.tensors[graph.behind(i, ("hub", *VIEWS))].producer for i in made.inputs]
            made = next((graph.ops[p] for p in before if p is not None and _convolves(graph.ops[p])), made)
        if made is not None and _convolves(made):
            return all(reader is op for reader in graph.readers(source))
    return False


def _convolves(op: Op) -> bool:
    return op.primitive == CONVOLUTION

"""Convolutions that a backend computes badly, or XLA partitions wrongly, as products of matrices.

**Kernel gradients** that XLA:GPU does not recognise as such become convolutions whose window is the whole image and
whose result is a few positions. cuDNN computes them by one thread block per tile of the result: 2 of 8 x 10^3 TFLOP/s
on an H100 (of a WaveNet's step of 95 ms, 55; of a U-Net's of 18 ms, 5). They are the gradients of dilated convolutions,
which have a stride, and of transposed ones, whose image is dilated. With t over the window, each position s of the
result is one product over a strided slice::

    out[n, o, s] = sum over f, t of  image[n, f, s * stride + t * dilation] * window[o, f, t]

**Dilated convolutions padded at one end** (causal ones): cuDNN pads both ends alike, so XLA:GPU fills the kernel with
zeros between its taps (:func:`autoshard_ilp.costs.kernels.filled_in_taps`). They are one product per tap::

    out[n, o, s] = sum over t of  sum over f of  image[n, f, s * stride + t * dilation] * kernel[o, f, t]

**Batch-grouped convolutions** (``batch_group_count > 1``: JAX's kernel gradient of every depthwise or grouped
convolution) run device by device (``rules/local.py``). cuDNN has a kernel for them. XLA:TPU makes the groups a spatial
dimension and their features the lanes, of which there are 128: a convolution in 32 groups of four features wrote its
image 32 times as large (v5e: 719 MB of peak, 74 as products). XLA:CPU has loops. Both multiply position by position::

    out[n, (g, o), s] = sum over f, t of  image[(g, n), f, s * stride + t * dilation] * window[(g, o), f, t]

Groups of one feature, of depthwise convolutions, they compute well. The slices lie behind barriers, one after the
other: otherwise XLA makes all of them in one kernel, as many pieces of the image as the kernel has elements.

Where the layouts let no device work on its own part, XLA partitions them, wrongly: on a mesh of two axes it sums the
partial results over devices that only hold copies, and returns a multiple of the right value, even for plain data
parallelism over one of the axes. It partitions products correctly, and a convolution in groups of *features* ``(g f)``,
which takes their place where there are too many positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard_ilp.costs.kernels import MAX_POSITIONS, PER_POSITION, PER_TAP, products_instead, swapped_by_xla
from autoshard_ilp.graph import Graph, Op

PLATFORMS = frozenset({"gpu"})
"""On which cuDNN computes convolutions."""

FEWEST_IN_LANES = 64
"""Features of a group from which on XLA:TPU fills its lanes well enough: half of them."""


def as_products(graph: Graph, op: Op, platform: str) -> Callable[..., Any] | None:
    """A function equal to a convolution's ``bind``, of products; None where the backend does well, and for other
    operations.

    Args:
        graph: of the step.
        op: one of its operations.
        platform: of the mesh's devices.
    """
    if op.primitive != "conv_general_dilated":
        return None
    if platform not in PLATFORMS:
        return _position_by_position(graph, op, platform)
    if swapped_by_xla(graph, op):
        return of_larger_image
    ways: dict[str, Callable[..., Any]] = {PER_POSITION: product_per_position, PER_TAP: product_per_tap}
    return ways.get(products_instead(graph, op))


def without_batch_groups(params: Mapping[str, Any], out_shape: Sequence[int]) -> Callable[..., Any] | None:
    """A function equal to a batch-grouped convolution's ``bind`` that XLA partitions correctly; None for other
    convolutions.

    Args:
        params: of the convolution.
        out_shape: of its result.
    """
    if params["batch_group_count"] == 1:
        return None
    few = math.prod(out_shape[d] for d in params["dimension_numbers"].out_spec[2:]) <= MAX_POSITIONS
    return product_per_position if few else feature_grouped


def _position_by_position(graph: Graph, op: Op, platform: str) -> Callable[..., Any] | None:
    """For backends without cuDNN."""
    numbers, groups = op.params["dimension_numbers"], op.params["batch_group_count"]
    features = graph.tensors[op.inputs[0]].shape[numbers.lhs_spec[0]] // groups
    if features == 1 or (platform == "tpu" and features >= FEWEST_IN_LANES):
        return None
    return without_batch_groups(op.params, graph.tensors[op.outputs[0]].shape)


def product_per_position(image: Any, window: Any, **params: Any) -> Any:
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    spatial, taps = numbers.lhs_spec[2:], numbers.rhs_spec[2:]
    image, params = _filled_where_both_dilate(image, params)
    positions = _positions(image.shape, window.shape, params)
    products: list[Any] = []
    for position in itertools.product(*map(range, positions)):
        # One slice at a time: XLA would cut the first with the image, when that is made, and the others all at once.
        left, right, products[-1:] = lax.optimization_barrier((image, window, products[-1:]))
        for i, (d, t) in enumerate(zip(spatial, taps, strict=True)):
            at = position[i] * params["window_strides"][i] - params["padding"][i][0]
            n, m = image.shape[d], window.shape[t]
            if params["lhs_dilation"][i] > 1:
                right = _spaced(right, t, -at, params["lhs_dilation"][i], n)
            else:
                left = _spaced(left, d, at, params["rhs_dilation"][i], m)
        left, mine = _split(left, numbers.lhs_spec[0], groups)
        right, theirs = _split(right, numbers.rhs_spec[0], groups)
        contracting = (
            [mine[d] for d in (numbers.lhs_spec[1], *spatial)],
            [theirs[d] for d in (numbers.rhs_spec[1], *taps)],
        )
        group = ([mine[numbers.lhs_spec[0]]], [theirs[numbers.rhs_spec[0]]]) if groups > 1 else ((), ())
        products.append(_product(left, right, contracting, params, group))
    features = image.shape[numbers.lhs_spec[0]] // groups
    out = jnp.stack(products, axis=-1)  # (g, n, o), those left out that are 1 where there are groups
    out = jnp.moveaxis(out.reshape(groups, features, -1, *positions), 1, 0)
    out = out.reshape(features, -1, *positions)
    return out.transpose(_back(numbers.out_spec))


def feature_grouped(image: Any, window: Any, **params: Any) -> Any:
    """A batch-grouped convolution as one in groups of features."""
    numbers, groups = params["dimension_numbers"], params["batch_group_count"]
    batch, feature = numbers.lhs_spec[:2]
    n = image.shape[batch] // groups
    split = image.reshape(*image.shape[:batch], groups, n, *image.shape[batch + 1 :])
    order = [d for d in range(split.ndim) if d != batch]
    order.insert(order.index(feature + (feature > batch)), batch)
    shape = list(image.shape)
    shape[batch], shape[feature] = n, groups * image.shape[feature]
    in_groups = {**params, "feature_group_count": groups, "batch_group_count": 1}
    return lax.conv_general_dilated_p.bind(split.transpose(order).reshape(shape), window, **in_groups)


def of_larger_image(image: Any, kernel: Any, **params: Any) -> Any:
    """A convolution of an image with as many positions as the kernel has, zeros behind its own that stand for padding.

    They lie behind a barrier, or XLA would make padding of them again.
    """
    numbers, padding = params["dimension_numbers"], list(params["padding"])
    edges = [(0, 0, 0)] * image.ndim
    for i, (d, t) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        more = max(0, kernel.shape[t] - image.shape[d])
        edges[d] = (0, more, 0)
        low, high = padding[i]
        padding[i] = (low, high - more * params["lhs_dilation"][i])
    image = lax.optimization_barrier(lax.pad(image, jnp.zeros((), image.dtype), edges))
    return lax.conv_general_dilated_p.bind(image, kernel, **{**params, "padding": tuple(padding)})


def product_per_tap(image: Any, kernel: Any, **params: Any) -> Any:
    numbers = params["dimension_numbers"]
    spatial, taps = numbers.lhs_spec[2:], numbers.rhs_spec[2:]
    positions = _positions(image.shape, kernel.shape, params)
    dtype = params["preferred_element_type"] or jnp.result_type(image.dtype, kernel.dtype)
    wide = {**params, "preferred_element_type": jnp.promote_types(dtype, "float32")}
    total = None
    for tap in itertools.product(*(range(kernel.shape[t]) for t in taps)):
        piece, part = image, kernel
        for i, (d, t) in enumerate(zip(spatial, taps, strict=True)):
            at = tap[i] * params["rhs_dilation"][i] - params["padding"][i][0]
            piece = _spaced(piece, d, at, params["window_strides"][i], positions[i])
            part = lax.slice_in_dim(part, tap[i], tap[i] + 1, axis=t)
        part = lax.squeeze(part, taps)
        features = numbers.rhs_spec[1] - sum(numbers.rhs_spec[1] > t for t in taps)
        contracting = ((numbers.lhs_spec[1],), (features,))
        product = _product(piece, part, contracting, wide)  # the image's other dimensions in order, then o
        total = product if total is None else total + product
    assert total is not None
    kept = [d for d in range(image.ndim) if d != numbers.lhs_spec[1]]
    order = [kept.index(numbers.lhs_spec[0]), total.ndim - 1, *(kept.index(d) for d in spatial)]
    return total.transpose(order).transpose(_back(numbers.out_spec)).astype(dtype)


def _positions(image: Sequence[int], window: Sequence[int], params: Mapping[str, Any]) -> list[int]:
    """Positions of a convolution's result, by spatial dimension."""
    numbers, found = params["dimension_numbers"], []
    for i, (d, t) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        spread = (image[d] - 1) * params["lhs_dilation"][i] + 1 + sum(params["padding"][i])
        found.append((spread - (window[t] - 1) * params["rhs_dilation"][i] - 1) // params["window_strides"][i] + 1)
    return found


def _filled_where_both_dilate(image: Any, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The image with the zeros of its dilation in the dimensions in which the window is dilated too."""
    edges, dilations = [(0, 0, 0)] * image.ndim, list(params["lhs_dilation"])
    for i, d in enumerate(params["dimension_numbers"].lhs_spec[2:]):
        if dilations[i] > 1 and params["rhs_dilation"][i] > 1:
            edges[d], dilations[i] = (0, 0, dilations[i] - 1), 1
    if any(map(any, edges)):
        image = lax.pad(image, jnp.zeros((), image.dtype), edges)
    return image, {**params, "lhs_dilation": tuple(dilations)}


def _split(value: Any, dim: int, groups: int) -> tuple[Any, dict[int, int]]:
    """Splits ``dim`` into (groups, rest), a rest or groups of one left out; returns where each old dimension is now."""
    rest = value.shape[dim] // groups
    if groups == 1 or rest == 1:
        return value, {d: d for d in range(value.ndim)}
    shape = (*value.shape[:dim], groups, rest, *value.shape[dim + 1 :])
    return value.reshape(shape), {d: d + (d > dim) for d in range(value.ndim)}


def _spaced(value: Any, dim: int, start: int, step: int, count: int) -> Any:
    """``count`` elements of a dimension from ``start`` on, ``step`` apart; zeros where there are none."""
    last = start + (count - 1) * step
    low, high = max(0, -start), max(0, last + 1 - value.shape[dim])
    if low or high:
        edges = [(0, 0, 0)] * value.ndim
        edges[dim] = (low, high, 0)
        value = lax.pad(value, jnp.zeros((), value.dtype), edges)
    return lax.slice_in_dim(value, start + low, last + low + 1, step, axis=dim)


def _product(left: Any, right: Any, contracting: Any, params: Mapping[str, Any], batch: Any = ((), ())) -> Any:
    return lax.dot_general(
        left,
        right,
        (contracting, batch),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _back(out_spec: Sequence[int]) -> list[int]:
    """The permutation from (batch, features, spatial) to the order of a result."""
    return sorted(range(len(out_spec)), key=lambda i: out_spec[i])

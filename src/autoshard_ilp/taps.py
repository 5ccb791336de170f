"""Convolutions that cuDNN computes badly, as products of matrices, on GPUs.

**Kernel gradients** that XLA:GPU does not recognise as such become convolutions whose window is the whole image and
whose result is a few positions. cuDNN computes them by one thread block per tile of the result: 2 of 8 x 10^3 TFLOP/s
on an H100 (of a WaveNet's step of 95 ms, 55; of a U-Net's of 18 ms, 5). They are the gradients of dilated convolutions,
which have a stride, and of transposed ones, whose image is dilated. With t over the window, each position s of the
result is one product over a strided slice::

    out[n, o, s] = sum over f, t of  image[n, f, s * stride + t * dilation] * window[o, f, t]

**Dilated convolutions padded at one end** (causal ones): cuDNN pads both ends alike, so XLA:GPU fills the kernel with
zeros between its taps (:func:`autoshard_ilp.costs.kernels.filled_in_taps`). They are one product per tap::

    out[n, o, s] = sum over t of  sum over f of  image[n, f, s * stride + t * dilation] * kernel[o, f, t]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard_ilp.costs.kernels import PER_POSITION, PER_TAP, products_instead
from autoshard_ilp.graph import Graph, Op

PLATFORMS = frozenset({"gpu"})


def as_products(graph: Graph, op: Op, platform: str) -> Callable[..., Any] | None:
    """A function equal to a convolution's ``bind``, of products; None where cuDNN does well, and for other operations.

    Args:
        graph: of the step.
        op: one of its operations.
        platform: of the mesh's devices.
    """
    if platform not in PLATFORMS or op.primitive != "conv_general_dilated":
        return None
    ways: dict[str, Callable[..., Any]] = {PER_POSITION: product_per_position, PER_TAP: product_per_tap}
    return ways.get(products_instead(graph, op))


def product_per_position(image: Any, window: Any, **params: Any) -> Any:
    numbers = params["dimension_numbers"]
    spatial, taps = numbers.lhs_spec[2:], numbers.rhs_spec[2:]
    products: list[Any] = []
    positions = _positions(image.shape, window.shape, params)
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
        contracting = ((numbers.lhs_spec[1], *spatial), (numbers.rhs_spec[1], *taps))
        products.append(_product(left, right, contracting, params))
    out = jnp.stack(products, axis=-1)
    out = out.reshape(*out.shape[:2], *positions)
    return out.transpose(_back(numbers.out_spec))


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


def _spaced(value: Any, dim: int, start: int, step: int, count: int) -> Any:
    """``count`` elements of a dimension from ``start`` on, ``step`` apart; zeros where there are none."""
    last = start + (count - 1) * step
    low, high = max(0, -start), max(0, last + 1 - value.shape[dim])
    if low or high:
        edges = [(0, 0, 0)] * value.ndim
        edges[dim] = (low, high, 0)
        value = lax.pad(value, jnp.zeros((), value.dtype), edges)
    return lax.slice_in_dim(value, start + low, last + low + 1, step, axis=dim)


def _product(left: Any, right: Any, contracting: Any, params: Mapping[str, Any]) -> Any:
    return lax.dot_general(
        left,
        right,
        (contracting, ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _back(out_spec: Sequence[int]) -> list[int]:
    """The permutation from (batch, features, spatial) to the order of a result."""
    return sorted(range(len(out_spec)), key=lambda i: out_spec[i])

"""Operations of every family that rules know, drawn at random; :mod:`random_programs` puts them together.

Each function takes a :class:`random_programs.Draw` and gives one value. Indices and counts come from an argument of the
program, so that no compiler folds them. What has no reverse derivative reads its operands through ``stop_gradient``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from random_calls import FAMILIES as CALLS

MODES = ("clip", "fill", "promise_in_bounds")


def _unary(d: Any) -> Any:
    x = d.value()
    functions = (
        jnp.sin,
        jnp.tanh,
        jax.nn.gelu,
        jax.nn.silu,
        lambda v: jnp.exp(-v * v),
        lambda v: jnp.log1p(v * v),
        lambda v: lax.erf_inv(jnp.tanh(v) * 0.9),
        lambda v: lax.rsqrt(1 + v * v),
        lambda v: lax.clamp(-0.5, v, 0.7),
        lambda v: v.astype(jnp.bfloat16).astype(jnp.float32),
        lambda v: lax.reduce_precision(v, 8, 10),
        lambda v: lax.integer_pow(v * 0.5, 3),
        lambda v: jnp.abs(lax.complex(v, v * 0.3) ** 2),
        lambda v: lax.real(lax.conj(lax.complex(v, 1.0 - v)) * lax.complex(v, v)),
        lambda v: lax.optimization_barrier((v, v * 2))[1],
        lambda v: jnp.where(jnp.isfinite(v), v, 0.0),
    )
    return d.one(functions)(x)


def _binary(d: Any) -> Any:
    x = d.value()
    y = d.value(allowed=lambda v: v.shape == x.shape)
    z = d.value(allowed=lambda v: v.ndim <= x.ndim and v.shape == x.shape[x.ndim - v.ndim :])
    functions = (
        lambda: x + y,
        lambda: x * y,
        lambda: x / (1 + y * y),
        lambda: jnp.maximum(x, y),
        lambda: jnp.where(x > y, x, -y),
        lambda: x + z,
        lambda: lax.select_n(x > 0, x, y),
        lambda: jnp.logaddexp(x, y),
        lambda: jnp.hypot(x + 3, y),
        lambda: lax.atan2(x + 3, y),
        lambda: lax.select_n((x > 0).astype(jnp.int32) + (y > 0), x, y, x * y),
        lambda: x + jnp.ones((2,) + (1,) * x.ndim),
        lambda: jnp.where(jnp.logical_xor(x > 0, y > 0.1), x, 1.0),
    )
    return d.one(functions)()


def _integers(d: Any) -> Any:
    shape = d.value().shape
    i, j = d.indices(7, *shape), d.indices(5, *shape)
    functions = (
        lambda: i * j - i,
        lambda: i // (j + 1),
        lambda: i % (j + 2),
        lambda: lax.shift_left(i, j),
        lambda: lax.population_count(i ^ j),
        lambda: lax.clz(i | j),
        lambda: (i & j).astype(jnp.int8).sum(),
        lambda: lax.bitcast_convert_type(i + jnp.int32(1 << 30), jnp.float32),
        lambda: jnp.sort(i, -1) if shape else i,
        lambda: jnp.any(i > 3) | jnp.all(j > 0),
        lambda: jnp.max(i, initial=0) + jnp.min(j, initial=9),
        lambda: jax.nn.one_hot(i, 7),
        lambda: jnp.cumsum(i.reshape(-1)),
        lambda: jnp.argmax(i.reshape(-1)),
        lambda: lax.rem(-i, j + 1),
        lambda: jnp.bincount(i.reshape(-1), length=7),
        lambda: jnp.searchsorted(jnp.arange(7) * 2, j),
        lambda: jnp.nonzero(i.reshape(-1) > 3, size=4)[0],
    )
    found = d.one(functions)()
    return found if d.below(2) else found.astype(jnp.float32) * 0.1


def _reduce(d: Any) -> Any:
    x = d.value(1)
    axes = tuple(i for i in range(x.ndim) if d.below(2)) or (d.below(x.ndim),)
    functions = (
        lambda: jnp.sum(x, axes),
        lambda: jnp.mean(x, axes),
        lambda: jnp.max(x, axes),
        lambda: jnp.prod(x * 0.5, axes),
        lambda: jnp.min(x, axes, keepdims=True),
        lambda: jnp.var(x, axes),
        lambda: jax.nn.logsumexp(x, axes),
        lambda: jnp.argmax(x, axes[0]),
        lambda: jnp.argmin(x, axes[0], keepdims=True),
        lambda: jnp.any(x > 1, axes),
        lambda: jnp.all(x > -1, axes),
        lambda: jax.nn.softmax(x, axes),
        lambda: lax.stop_gradient(
            lax.reduce(lax.stop_gradient(x), jnp.float32(0), lambda a, b: a + b - a * b * 0, axes)
        ),
        lambda: jnp.linalg.norm(x, axis=axes[0]),
        lambda: jnp.median(x, axes[0]),
        lambda: lax.associative_scan(jnp.add, x, axis=axes[0]),
        lambda: jnp.nanmean(jnp.where(x > 2, jnp.nan, x), axes),
    )
    return d.one(functions)()


def _cumulative(d: Any) -> Any:
    x = d.value(1)
    axis, reverse = d.below(x.ndim), bool(d.below(2))
    functions = (
        lambda: lax.cumsum(x, axis, reverse),
        lambda: lax.cumprod(x * 0.5 + 1, axis, reverse),
        lambda: lax.cummax(x, axis, reverse),
        lambda: lax.cummin(x, axis, reverse),
        lambda: lax.cumlogsumexp(x, axis, reverse),
        lambda: jnp.diff(x, axis=axis, prepend=0.5),
    )
    return d.one(functions)()


def _dot(d: Any) -> Any:
    x, y = d.value(1), d.value(1)
    if not x.shape or not y.shape:
        return x * 2
    left, right = list(d.rng.permutation(x.ndim)), list(d.rng.permutation(y.ndim))
    pairs = []
    for i in left:
        j = next((j for j in right if x.shape[i] == y.shape[j] and j not in [b for _, b in pairs]), None)
        if j is not None and d.below(3):
            pairs.append((int(i), int(j)))
    n_batch = d.below(len(pairs) + 1)
    numbers = (
        tuple(zip(*pairs[n_batch:], strict=True)) or ((), ()),
        tuple(zip(*pairs[:n_batch], strict=True)) or ((), ()),
    )
    if (x.size * y.size) > 1 << 20:
        return x * 2
    functions = (
        lambda: lax.dot_general(x, y, numbers),
        lambda: lax.dot_general(x, y, numbers),
        lambda: lax.dot_general(
            x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), numbers, preferred_element_type=jnp.float32
        ),
        lambda: lax.dot_general(
            d.indices(9, *x.shape).astype(jnp.int8),
            d.indices(5, *y.shape).astype(jnp.int8),
            numbers,
            preferred_element_type=jnp.int32,
        ),
        lambda: lax.real(lax.dot_general(lax.complex(x, x), lax.complex(y, -y), numbers)),
    )
    return d.one(functions)()


def _reshape(d: Any) -> Any:
    x = d.value(1)
    primes: list[int] = []
    for n in x.shape:
        for p in (2, 3, 5, 7):
            while n and n % p == 0:
                primes.append(p)
                n //= p
    sizes = [1] * (1 + d.below(4))
    for p in primes if d.below(2) else d.rng.permutation(primes):
        sizes[d.below(len(sizes))] *= int(p)
    if primes and d.below(2):  # neighbours merged or split in place
        flat = [int(p) for p in primes]
        cuts = sorted({d.below(len(flat) + 1) for _ in range(3)} | {0, len(flat)})
        sizes = [math.prod(flat[a:b]) for a, b in itertools.pairwise(cuts)]
    return lax.reshape(x, sizes) if d.below(4) else lax.reshape(x, sizes, d.rng.permutation(x.ndim).tolist())


def _shape(d: Any) -> Any:
    x = d.value(1)
    axis = d.below(x.ndim)
    y = d.value(
        allowed=lambda v: (
            v.ndim == x.ndim and all(a == b for k, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if k != axis)
        )
    )
    y = (
        y
        if y.ndim == x.ndim and all(a == b for k, (a, b) in enumerate(zip(y.shape, x.shape, strict=True)) if k != axis)
        else x
    )
    functions = (
        lambda: jnp.transpose(x, d.rng.permutation(x.ndim)),
        lambda: lax.rev(x, (axis,)),
        lambda: jnp.flip(x),
        lambda: jnp.concatenate([x, y], axis),
        lambda: jnp.concatenate([x, y * 2, lax.slice_in_dim(x, 0, 1, axis=axis)], axis),
        lambda: jnp.stack([x, x * 2], axis),
        lambda: jnp.split(x, 2, axis)[1] if x.shape[axis] % 2 == 0 else x,
        lambda: jnp.tile(x, (2,) * x.ndim),
        lambda: jnp.repeat(x, 2, axis),
        lambda: jnp.roll(x, d.below(9) - 4, axis),
        lambda: jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], d.size(), *x.shape[axis:])),
        lambda: x + lax.broadcasted_iota(jnp.float32, x.shape, axis) * 0.1,
        lambda: jnp.moveaxis(x, axis, 0),
        lambda: lax.pad(
            x, jnp.float32(0.3), [(d.below(5) - 2 if n > 4 else 0, d.below(4), d.below(3)) for n in x.shape]
        ),
        lambda: lax.slice(x, [d.below(n) for n in x.shape], x.shape, [1 + d.below(3) for _ in x.shape]),
        lambda: lax.slice_in_dim(x, 0, max(1, x.shape[axis] - 1), axis=axis),
        lambda: jnp.triu(x) if x.ndim > 1 else x,
        lambda: sum(jnp.unstack(x, axis=axis)) if x.shape[axis] < 9 else x,
        lambda: jnp.diagonal(x) if x.ndim > 1 else x,
        lambda: jnp.pad(x, 1, mode="reflect") if min(x.shape) > 1 else x,
        lambda: lax.squeeze(x[None], (0,)),
    )
    return d.one(functions)()


def _window(d: Any) -> Any:
    x = d.value(1)
    sizes = [min(n, 1 + d.below(3)) for n in x.shape]
    strides = [1 + d.below(2) for _ in sizes]
    dilation = [1 + d.below(2) for _ in sizes]
    padding = d.one(("SAME", "VALID", [(d.below(2) if s > 1 else 0, d.below(3) if s > 1 else 0) for s in sizes]))
    if padding == "VALID":
        dilation = [1] * x.ndim
    functions = (
        lambda: lax.reduce_window(x, 0.0, lax.add, sizes, strides, padding, window_dilation=dilation),
        lambda: lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, padding),
        lambda: lax.reduce_window(x, jnp.inf, lax.min, sizes, strides, padding),
        lambda: lax.reduce_window(x, 0.0, lax.add, sizes, [1] * x.ndim, "SAME"),
        lambda: lax.stop_gradient(
            jax.grad(lambda v: jnp.sum(jnp.sin(lax.reduce_window(v, -jnp.inf, lax.max, sizes, strides, "SAME"))))(x)
        ),
        lambda: lax.stop_gradient(
            jax.grad(lambda v: jnp.sum(lax.reduce_window(v, 0.0, lax.add, sizes, strides, padding) ** 2))(x)
        ),
        lambda: lax.stop_gradient(
            lax.reduce_window(lax.stop_gradient(x) * 0.5 + 1, 1.0, lax.mul, sizes, strides, padding)
        ),
    )
    found = d.one(functions)()
    return jnp.where(jnp.isfinite(found), found, 0.0)


def _convolution(d: Any) -> Any:
    spatial = 1 + d.below(2)
    groups = d.one((1, 1, 1, 2, 4))
    batch_groups = d.one((1, 1, 1, 2)) if groups == 1 else 1
    batch, per_group = d.one((1, 2, 4, 6, 8)) * batch_groups, d.one((1, 2, 3, 4))
    out = d.one((1, 2, 3, 4, 8)) * groups * batch_groups
    places = [d.one((3, 4, 5, 6, 8)) for _ in range(spatial)]
    taps = [1 + d.below(3) for _ in range(spatial)]
    lhs, rhs = {"N": batch, "C": per_group * groups}, {"I": per_group, "O": out}
    letters = "HW"[:spatial]
    lhs.update(zip(letters, places, strict=True))
    rhs.update(zip(letters, taps, strict=True))
    spec = ["".join(d.rng.permutation(list(s + letters))) for s in ("NC", "IO", "NC")]
    x, w = d.shaped(*(lhs[c] for c in spec[0])), d.shaped(*(rhs[c] for c in spec[1]))
    stride = [1 + d.below(2) for _ in letters]
    inside = [1 + d.below(2) if d.below(2) else 1 for _ in letters]
    apart = [1 + d.below(2) for _ in letters]
    padding = d.one(("SAME", "VALID", [(d.below(3), d.below(4) - (1 if n > 4 else 0)) for n in places]))
    if padding == "VALID":
        apart = [1] * spatial
    if padding in ("SAME", "VALID") and max(inside) > 1:
        padding = [(t, t) for t in taps]
    return lax.conv_general_dilated(
        x,
        w,
        stride,
        padding,
        inside,
        apart,
        tuple(spec),
        groups,
        batch_groups,
    )


def _gather(d: Any) -> Any:
    x = d.value(1)
    axis, mode = d.below(x.ndim), d.one(MODES)
    n, count = x.shape[axis], d.one((1, 1, 2, 3, 5, 8, 12))
    beyond = 0 if mode == "promise_in_bounds" else d.one((0, 0, 3))
    rows = d.indices(n + beyond, count) - (beyond if mode != "fill" else 0) // 2
    starts = [d.indices(k + beyond) for k in x.shape]
    sizes = [min(k, 1 + d.below(k)) for k in x.shape]
    first = d.indices(x.shape[0], count)
    functions = (
        lambda: jnp.take(x, rows, axis, mode="clip" if mode == "promise_in_bounds" else mode),
        lambda: jnp.take(x, rows[0], axis, mode="clip"),
        lambda: x.at[first].get(mode=mode),
        lambda: x.at[first[0]].get(mode=mode),
        lambda: x[first, d.indices(x.shape[1], count)] if x.ndim > 1 else x[first],
        lambda: x[:, d.indices(x.shape[1], count, 2)] if x.ndim > 1 else x[first],
        lambda: x[first, ..., d.indices(x.shape[-1], count)] if x.ndim > 1 else x[first],
        lambda: jnp.take_along_axis(x, d.indices(n, *(count if k == axis else s for k, s in enumerate(x.shape))), axis),
        lambda: lax.dynamic_slice(x, starts, sizes),
        lambda: lax.dynamic_slice_in_dim(x, starts[axis], sizes[axis], axis),
        lambda: lax.dynamic_index_in_dim(x, starts[axis], axis, keepdims=bool(d.below(2))),
        lambda: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, sizes[axis], axis))(rows),
        lambda: jax.vmap(lambda v, i: jnp.take(v, i, 0, mode="clip"))(x, d.indices(n, x.shape[0])) if x.ndim > 1 else x,
        lambda: (
            jax.vmap(lambda v, i: lax.dynamic_slice_in_dim(v, i, 1, 0))(x, d.indices(n, x.shape[0]))
            if x.ndim > 1
            else x
        ),
    )
    return d.one(functions)()


def _scatter(d: Any) -> Any:
    x = d.value(1)
    mode, count = d.one(("clip", "drop", "promise_in_bounds")), d.one((1, 1, 2, 3, 5, 8, 12))
    beyond = 0 if mode == "promise_in_bounds" else d.one((0, 0, 3))
    n, axis = x.shape[0], d.below(x.ndim)
    rows = d.indices(n + beyond, count)
    distinct = jnp.argsort(d.indices(97, n) * 16 + jnp.arange(n))[: min(n, count)]
    part = d.shaped(count, *x.shape[1:])
    starts = [d.indices(k + beyond) for k in x.shape]
    small = d.shaped(*(1 + d.below(k) for k in x.shape))
    one = x.at[rows[0]] if d.below(2) else x.at[(slice(None),) * axis + (d.indices(x.shape[axis] + beyond),)]
    other = d.indices(x.shape[1], count) if x.ndim > 1 else None
    functions = (
        lambda: x.at[rows].add(part, mode=mode),
        lambda: lax.stop_gradient(x).at[rows].multiply(lax.stop_gradient(part), mode=mode),
        lambda: x.at[rows].max(part, mode=mode),
        lambda: x.at[rows].min(part, mode=mode),
        lambda: x.at[distinct].set(d.shaped(distinct.shape[0], *x.shape[1:]), mode=mode),
        lambda: x.at[distinct].set(0.5, unique_indices=True),
        lambda: one.set(0.7, mode=mode),
        lambda: one.add(0.7, mode=mode),
        lambda: one.min(0.1, mode=mode),
        lambda: one.max(0.2, mode=mode),
        lambda: x.at[rows, other].add(0.3, mode=mode) if other is not None else x.at[rows].add(0.3),
        lambda: x.at[:, other].add(0.3, mode=mode) if other is not None else x.at[rows].add(0.3),
        lambda: x.at[rows[0], other[0]].set(0.3, mode=mode) if other is not None else x.at[rows[0]].set(1.0),
        lambda: x.at[distinct, ..., 0].set(0.3) if x.ndim > 1 else x,
        lambda: lax.dynamic_update_slice(x, small, starts),
        lambda: lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, 1, axis=axis) * 2, starts[axis], axis),
        lambda: lax.dynamic_update_index_in_dim(
            x, 0.5 * lax.index_in_dim(x, 0, axis, keepdims=False), starts[axis], axis
        ),
        lambda: jax.vmap(lambda v, i: v.at[i].add(1.5, mode=mode))(x, d.indices(x.shape[1], n)) if x.ndim > 1 else x,
        lambda: jax.vmap(lambda v, i: v.at[i].set(1.5, mode=mode))(x, d.indices(x.shape[1], n)) if x.ndim > 1 else x,
        lambda: (
            jax.vmap(lambda v, i: lax.dynamic_update_slice_in_dim(v, v[:2] * 2, i, 0))(x, d.indices(x.shape[1], n))
            if x.ndim > 1
            else x
        ),
        lambda: jax.ops.segment_sum(x, d.indices(5, n), 5),
        lambda: jnp.zeros((6, *x.shape[1:])).at[d.indices(6, n)].add(x),
        lambda: jax.ops.segment_max(x, jnp.sort(d.indices(5, n)), 5, indices_are_sorted=True),
        lambda: x.at[1:3].set(0.2),
        lambda: x.at[..., -1].add(0.4),
        lambda: x.at[::2].multiply(0.4),
    )
    found = d.one(functions)()
    return jnp.where(jnp.isfinite(found), found, 0.0)


FAMILIES = {
    "unary": _unary,
    "binary": _binary,
    "integers": _integers,
    "reduce": _reduce,
    "cumulative": _cumulative,
    "dot": _dot,
    "reshape": _reshape,
    "shape": _shape,
    "window": _window,
    "convolution": _convolution,
    "gather": _gather,
    "scatter": _scatter,
    **CALLS,
}
"""Every family by name."""

"""The second half of the operations of :mod:`random_operations`: orders, loops, branches, random bits, matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _order(d: Any) -> Any:
    x = d.value(1)
    axis = d.below(x.ndim)
    i = d.indices(3, *x.shape)
    functions = (
        lambda: jnp.sort(x, axis, descending=bool(d.below(2))),
        lambda: jnp.argsort(x, axis),
        lambda: lax.sort((i, x, x * 2), dimension=axis, num_keys=2)[2],
        lambda: lax.sort((i, x), dimension=axis)[1],
        lambda: lax.sort((x, i), dimension=axis, num_keys=1)[1],
        lambda: lax.top_k(x, 1 + d.below(x.shape[-1]))[0],
        lambda: lax.top_k(x, 1 + d.below(x.shape[-1]))[1],
        lambda: jnp.partition(x, 0, axis),
        lambda: lax.stop_gradient(lax.approx_max_k(x, 1, reduction_dimension=axis)[0]),
    )
    return d.one(functions)()


def _loop(d: Any) -> Any:
    x, w = d.value(2), d.value()
    shift = jnp.mean(w)

    def cell(carry: Any, row: Any) -> Any:
        h, n = carry
        h = jnp.tanh(h * 0.5 + row[0] + shift)
        return (h, n + 1), (h * row[0], jnp.sum(h), n + row[1])

    def scan(reverse: bool) -> Any:
        carry, stacked = lax.scan(cell, (jnp.zeros(x.shape[1:]), 0), (x, d.indices(4, x.shape[0])), reverse=reverse)
        return (carry[0], stacked[0], stacked[1], stacked[2])

    def nested(v: Any) -> Any:
        return lax.scan(
            lambda c, r: (c + lax.scan(lambda a, b: (a * 0.5 + b, a), jnp.zeros(r.shape[1:]), r)[0], c),
            jnp.zeros(v.shape[2:]),
            v,
        )

    still = lax.stop_gradient(x)
    count = d.indices(4)
    functions = (
        lambda: d.one(scan(False)),
        lambda: d.one(scan(True)),
        lambda: d.one(scan(bool(d.below(2)))),
        lambda: d.one(nested(x)) if x.ndim > 2 else x,
        lambda: lax.fori_loop(0, 1 + d.below(3), lambda i, s: jnp.sin(s) + 0.1 * i, x),
        lambda: lax.fori_loop(0, count, lambda i, s: jnp.sin(s) + 0.1 * i, still),
        lambda: lax.while_loop(lambda s: jnp.sum(jnp.abs(s[0])) > 1, lambda s: (s[0] * 0.5, s[1] + 1), (still, 0))[
            d.below(2)
        ],
        lambda: lax.map(lambda r: jnp.cumsum(r) + shift, x) if x.ndim == 2 else x,
        lambda: lax.fori_loop(0, x.shape[0], lambda i, s: s.at[i].set(jnp.sin(s[(i + 1) % x.shape[0]])), still),
        lambda: lax.fori_loop(0, x.shape[0], lambda i, s: lax.dynamic_update_slice_in_dim(s, s[:1] * 0.9, i, 0), x),
        lambda: jax.vmap(lambda r: lax.while_loop(lambda v: jnp.sum(jnp.abs(v)) > 1, lambda v: v * 0.5, r))(still),
        lambda: lax.scan(lambda c, _: (jnp.roll(c, 1, 0) * 0.9, c[0]), x, None, length=3)[d.below(2)],
        lambda: lax.scan(lambda c, i: (c, lax.dynamic_index_in_dim(x, i, 0)), 0.0, d.indices(x.shape[0], 3))[1],
    )
    return d.one(functions)()


def _branch(d: Any) -> Any:
    x, i = d.value(1), d.indices(3)
    two = (lambda v: (jnp.sin(v) * 2, jnp.sum(v)), lambda v: (v - jnp.max(v), jnp.mean(v)))
    functions = (
        lambda: lax.cond(i > 1, *two, x)[d.below(2)],
        lambda: lax.cond(jnp.sum(x) > 0, *two, x)[d.below(2)],
        lambda: lax.switch(i, (jnp.sin, lambda v: v, lambda v: jnp.cumsum(v, 0)), x),
        lambda: jax.vmap(lambda v: lax.cond(jnp.sum(v) > 0, *two, v))(x)[d.below(2)],
        lambda: lax.cond(i > 0, lambda v: v[::-1], lambda v: v * 0, x),
        lambda: jax.vmap(lambda j: lax.switch(j, (lambda: x[0], lambda: x[-1] * 2)))(d.indices(2, 3)),
    )
    return d.one(functions)()


@jax.custom_jvp
def _own_jvp(x: Any) -> Any:
    return jnp.sin(x) * x


_own_jvp.defjvp(lambda p, t: (_own_jvp(p[0]), t[0] * jnp.cos(p[0] * 0.9)))


@jax.custom_vjp
def _own_vjp(x: Any) -> Any:
    return jnp.cumsum(x, 0)


_own_vjp.defvjp(lambda x: (jnp.cumsum(x, 0), x), lambda x, g: (g * jnp.tanh(x),))


def _transformed(d: Any) -> Any:
    x = d.value(1)
    functions = (
        lambda: _own_jvp(x),
        lambda: _own_vjp(x),
        lambda: jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)) * v)(x),
        lambda: jax.checkpoint(lambda v: v @ v.T, policy=jax.checkpoint_policies.dots_saveable)(
            x.reshape(-1, x.shape[-1])[:16]
        ),
        lambda: jax.vmap(lambda r: jax.nn.softmax(r.reshape(-1)), in_axes=d.below(x.ndim))(x),
        lambda: jax.jvp(lambda v: jnp.sort(v * v, 0), (x,), (jnp.cos(x),))[1],
        lambda: jax.jit(lambda v: v[::-1] + 1)(x),
        lambda: jax.linearize(lambda v: v * v / (1 + v * v), x)[1](jnp.sin(x)),
        lambda: jax.hessian(lambda v: jnp.sum(jnp.sin(v) * v))(x.reshape(-1)[:4]),
    )
    return d.one(functions)()


def _random(d: Any) -> Any:
    shape = d.value().shape
    key = jax.random.fold_in(
        jax.random.key(3, impl=d.one(("threefry2x32", "threefry2x32", "rbg", "unsafe_rbg"))), d.indices(5)
    )
    functions = (
        lambda: jax.random.normal(key, shape),
        lambda: jax.random.uniform(key, shape),
        lambda: jax.random.bernoulli(key, 0.4, shape).astype(jnp.float32),
        lambda: jax.random.bits(key, shape) % 11,
        lambda: jax.random.randint(key, shape, 0, 9),
        lambda: jax.random.permutation(key, 12),
        lambda: jax.vmap(lambda k: jax.random.normal(k, shape))(jax.random.split(key, 3)),
        lambda: jax.random.truncated_normal(key, -2, 2, shape),
        lambda: jax.random.gumbel(key, shape),
        lambda: jax.random.categorical(key, d.value(1)),
        lambda: jax.random.key_data(jax.random.split(key, 4)),
        lambda: jax.random.choice(key, d.value(1), (5,)),
        lambda: jax.random.permutation(key, d.value(1)),
    )
    return d.one(functions)()


def _matrices(d: Any) -> Any:
    n, batch = d.one((2, 3, 4, 6, 8)), d.one(((), (2,), (4,), (3, 2), (8,)))
    a = d.shaped(*batch, n, n) * 0.3
    spd = a @ jnp.swapaxes(a, -1, -2) + 2 * jnp.eye(n)
    b = d.shaped(*batch, n, d.one((1, 2, 4)))
    lower = jnp.tril(a) + 2 * jnp.eye(n)
    spread = spd + jnp.diag(jnp.arange(n) * 3.0)
    functions = (
        lambda: jnp.linalg.cholesky(spd),
        lambda: lax.linalg.triangular_solve(lower, b, left_side=True, lower=True, transpose_a=bool(d.below(2))),
        lambda: lax.linalg.triangular_solve(lower, jnp.swapaxes(b, -1, -2), left_side=False, lower=True),
        lambda: jnp.linalg.eigvalsh(spread),
        lambda: jnp.abs(jnp.linalg.eigh(spread)[1]),
        lambda: jnp.abs(jnp.linalg.qr(spread)[1]),
        lambda: jnp.linalg.svd(spread, compute_uv=False),
        lambda: jnp.linalg.solve(spd, b),
        lambda: jnp.linalg.inv(spd),
        lambda: jnp.linalg.slogdet(spd)[1],
        lambda: jnp.linalg.det(spd) * 0.01,
        lambda: jnp.abs(jnp.linalg.svd(spread)[0]),
        lambda: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(spd), True), b),
        lambda: jnp.linalg.matrix_power(a, 3),
        lambda: jax.scipy.linalg.expm(a * 0.1),
    )
    return d.one(functions)()


def _fourier(d: Any) -> Any:
    x = d.value(1)
    axis = d.below(x.ndim)
    functions = (
        lambda: jnp.abs(jnp.fft.fft(x, axis=axis)),
        lambda: jnp.fft.ifft(jnp.fft.fft(x, axis=axis) * (0.5 + 0.1j), axis=axis).real,
        lambda: jnp.fft.irfft(jnp.fft.rfft(x, axis=axis), n=x.shape[axis], axis=axis),
        lambda: jnp.fft.fft2(x).imag if x.ndim > 1 else x,
        lambda: jnp.convolve(x.reshape(-1)[:32], jnp.asarray([0.5, 1.0, -0.3]), mode="same"),
        lambda: jax.scipy.signal.convolve2d(x, x[:2, :2], mode="same") if x.ndim == 2 else x,
    )
    return d.one(functions)() * 0.3


FAMILIES = {
    "order": _order,
    "loop": _loop,
    "branch": _branch,
    "transformed": _transformed,
    "random": _random,
    "matrices": _matrices,
    "fourier": _fourier,
}
"""Every family of this half by name."""

"""Random programs: a seed gives a function of a few small arrays, its arguments, and what it is made of.

Values stay of the size of one, and integers small, so that rounding does not grow from operation to operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from random_operations import FAMILIES

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MOST_ELEMENTS = 4096


class Draw:
    """Random choices while a program is traced; the same for every trace."""

    def __init__(self, seed: int, values: list[Any], sizes: list[int]) -> None:
        self.rng, self.values, self.sizes = np.random.default_rng(seed), values, sizes

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def size(self) -> int:
        return self.sizes[self.below(len(self.sizes))]

    def value(self, rank: int = 0, allowed: Callable[[Any], bool] = lambda x: True) -> Any:
        """A float value of at least ``rank`` dimensions."""
        found = [x for x in self.values if x.ndim >= rank and x.dtype == jnp.float32 and x.size and allowed(x)]
        return found[self.below(len(found))] if found else jnp.ones((self.size(),) * rank)

    def indices(self, below: int, *shape: int) -> Any:
        return jnp.asarray(self.rng.integers(0, below, shape), jnp.int32)


class WideDraw(Draw):
    """Draws for :mod:`random_operations`; integers come from an argument of the program."""

    def __init__(self, seed: int, values: list[Any], sizes: list[int], integers: Any) -> None:
        super().__init__(seed, values, sizes)
        self.integers = integers

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def indices(self, below: int, *shape: int) -> Any:
        count = math.prod(shape)
        start = self.below(len(self.integers))
        return jnp.resize(jnp.roll(self.integers, start), (count,)).reshape(shape) % max(below, 1)

    def shaped(self, *shape: int) -> Any:
        """Numbers of a value in another shape."""
        return jnp.resize(self.value().reshape(-1), shape)


def _elementwise(d: Draw) -> Any:
    x = d.value()
    y = d.value(allowed=lambda v: v.shape == x.shape)
    return (jnp.sin(x), jnp.tanh(x) * y, x + y, jnp.where(x > y, x, -y), jax.nn.gelu(x))[d.below(5)]


def _reduce(d: Draw) -> Any:
    x = d.value(1)
    axes = tuple(i for i in range(x.ndim) if d.below(2)) or (0,)
    reduction = (jnp.sum, jnp.mean, jnp.max, jnp.prod, lambda v, a: jnp.argmax(v, a[0]))[d.below(5)]
    return reduction(x * 0.5, axes)


def _dot(d: Draw) -> Any:
    x, y = d.value(1), d.value(1)
    pairs = [(i, j) for i in range(x.ndim) for j in range(y.ndim) if x.shape[i] == y.shape[j]]
    if not pairs:
        return x[..., None] * y.reshape(-1)[:3]
    i, j = pairs[d.below(len(pairs))]
    batch = next(((b, c) for b, c in pairs if b != i and c != j and d.below(2)), None)
    numbers = (((i,), (j,)), ((batch[0],), (batch[1],)) if batch else ((), ()))
    return lax.dot_general(x, y, numbers)


def _shape(d: Draw) -> Any:
    x = d.value(2)
    i = d.below(x.ndim - 1)
    merged = x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])
    return (
        merged,
        jnp.transpose(x, d.rng.permutation(x.ndim)),
        jnp.concatenate([x, x[:1], x], 0),
        jnp.broadcast_to(x[:, None], (x.shape[0], d.size(), *x.shape[1:])),
        jnp.roll(jnp.flip(x, 1), d.below(5) - 2, 0),
    )[d.below(5)]


def _window(d: Draw) -> Any:
    x = d.value(1)
    start = [d.below(n) for n in x.shape]
    padding = [(d.below(4) - 1 if n > 1 else 0, d.below(3), d.below(2)) for n in x.shape]
    return (
        lax.slice(x, start, x.shape, [1 + d.below(2) for _ in x.shape]),
        lax.pad(x, jnp.float32(0), padding),
        lax.reduce_window(x, 0.0, lax.add, [min(n, 1 + d.below(3)) for n in x.shape], [1] * x.ndim, "SAME"),
        lax.dynamic_update_slice(x, x[:1] * 2, [d.indices(3)] * x.ndim),
        jnp.cumsum(x, d.below(x.ndim)),
    )[d.below(5)]


def _index(d: Draw) -> Any:
    x = d.value(1)
    axis, rows = d.below(x.ndim), d.indices(x.shape[0], x.shape[0])
    return (
        jnp.take(x, d.indices(x.shape[axis], d.size()), axis),
        x.at[rows].add(x),
        jnp.take_along_axis(x, d.indices(x.shape[axis], *x.shape), axis),
        jnp.sort(x, axis),
        lax.top_k(x, 1)[0],
    )[d.below(5)]


def _control(d: Draw) -> Any:
    x, w = d.value(2), d.value()

    def cell(carry: Any, row: Any) -> tuple[Any, Any]:
        carry = jnp.tanh(carry * 0.5 + row + jnp.mean(w))
        return carry, carry * row

    return (
        lax.scan(cell, jnp.zeros(x.shape[1:]), x, reverse=bool(d.below(2)))[1],
        lax.fori_loop(0, 1 + d.below(3), lambda i, s: jnp.sin(s) + 0.1 * i, x),
        lax.cond(jnp.sum(x) > 0, lambda v: jnp.sin(v) * 2, lambda v: v - jnp.max(v), x),
        jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)) * v)(x),
        jax.vmap(lambda row: jax.nn.softmax(row, 0), in_axes=d.below(x.ndim))(x),
    )[d.below(5)]


OPERATIONS = (_elementwise, _elementwise, _reduce, _dot, _dot, _shape, _shape, _window, _index, _control)


def program(seed: int, length: int = 10, choice: Sequence[int] = SIZES) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its arguments; every third one is a training step of what the others compute."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.choice(choice, 3)]
    shapes = [tuple(int(n) for n in rng.choice(sizes, rng.integers(0, 4))) for _ in range(rng.integers(1, 4))]
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def forward(*arguments: Any) -> tuple[Any, ...]:
        draw = Draw(seed, list(arguments), sizes)
        for _ in range(length):
            found = OPERATIONS[draw.below(len(OPERATIONS))](draw)
            found = found / (1 + jnp.abs(found) * 0.1) if found.dtype == jnp.float32 else found
            if found.size <= MOST_ELEMENTS:
                draw.values.append(found)
        return draw.values[-1], draw.values[draw.below(len(draw.values))]

    def update(*arguments: Any) -> tuple[Any, ...]:
        def loss(values: tuple[Any, ...]) -> Any:
            return sum(jnp.mean(x) for x in forward(*values) if x.dtype == jnp.float32 and x.size)

        value, gradients = jax.value_and_grad(lambda values: loss(values) + 0.0 * jnp.sum(values[0]))(arguments)
        return *jax.tree.map(lambda x, g: x - 0.1 * g, arguments, gradients), value

    return (update if seed % 3 == 0 else forward), args


def wide_program(
    seed: int, length: int = 6, families: Sequence[str] = tuple(FAMILIES)
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As :func:`program`, of operations of all ``families``; every second one is a training step."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.choice(SIZES[1:], 3)]
    shapes = [tuple(int(n) for n in rng.choice(sizes, rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    integers = jnp.asarray(rng.integers(0, 1000, int(rng.choice([5, 8, 12, 16]))), jnp.int32)

    def forward(counts: Any, *arguments: Any) -> tuple[Any, ...]:
        draw = WideDraw(seed, list(arguments), sizes, counts)
        for _ in range(length):
            found = FAMILIES[families[draw.below(len(families))]](draw)
            found = found / (1 + jnp.abs(found) * 0.1) if found.dtype == jnp.float32 else found
            if found.size <= MOST_ELEMENTS:
                draw.values.append(found)
        return draw.values[-1], draw.values[draw.below(len(draw.values))]

    def update(counts: Any, *arguments: Any) -> tuple[Any, ...]:
        def loss(values: tuple[Any, ...]) -> Any:
            found = forward(counts, *values)
            return sum(jnp.mean(x) for x in found if x.dtype == jnp.float32 and x.size) + 0.0 * jnp.sum(values[0])

        value, gradients = jax.value_and_grad(loss)(arguments)
        return *jax.tree.map(lambda x, g: x - 0.1 * g, arguments, gradients), value

    return (update if seed % 2 else forward), (integers, *args)

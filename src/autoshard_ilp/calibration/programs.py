"""Programs whose iterations are timed: each is a jitted loop over one operation, the iteration count an argument.

Inside a loop every iteration depends on the one before, so nothing overlaps, nothing is hoisted and the cost of a call
from Python is paid once. Where an operation changes the size of its operand, one small slice brings it back.

A GPU waits for the host before every iteration of a loop whose length is no constant, for longer than a small kernel
takes. There one iteration is a loop of constant length, which is queued ahead, and a product in it is written out
several times: ``repeats`` says how many operations an iteration is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Loop = tuple[Callable[[Any, Any], Any], Any]
"""A compiled ``(operand, iterations) -> operand``, and its operand."""

WRITTEN_OUT = 8
"""Products of a matrix with the one before in the body of an inner loop."""


def repeats(mesh: Any) -> int:
    """Operations in one iteration of a loop, on these devices."""
    return 64 if mesh.devices.flat[0].platform == "gpu" else 1


def collective_loop(mesh: Any, kind: str, axes: tuple[str, ...], payload_bytes: int) -> tuple[Loop, int]:
    """A loop over one collective of float32 numbers.

    Args:
        mesh: ``jax.sharding.Mesh``.
        kind: one of ``costs.profile.COLLECTIVE_KINDS``.
        axes: mesh axes that the group spans.
        payload_bytes: wished bytes, in the convention of ``costs.collectives``; rounded up to whole shards.

    Returns:
        The loop and the bytes it really moves.
    """
    n = math.prod(mesh.shape[a] for a in axes)
    elements = max(1, -(-payload_bytes // (4 * n))) * n
    local = elements // n if kind == "all-gather" else elements
    body = _BODIES[kind]

    def device(x: Any, count: Any) -> Any:
        return _repeated(mesh, count, lambda _, y: body(y, axes, n), x)

    return _loop(mesh, device, (local,), jnp.float32), 4 * elements


def matmul_loop(mesh: Any, shape: tuple[int, int, int], dtype: Any) -> Loop:
    """A loop over products on every device, 2 m k n floating point operations each.

    Args:
        shape: (m, k, n). Where k and n differ, every other product is one of (m, n, k): as many operations, on as many
            numbers.
    """
    m, k, n = shape
    written_out = _written_out(mesh, shape)

    def unit_columns(x: Any) -> Any:
        # Columns of length one keep repeated products finite in every dtype.
        return (x / jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), 0)).astype(x.dtype)).astype(x.dtype)

    def device(operands: Any, count: Any) -> Any:
        start, *matrices = operands
        weights = [unit_columns(w) for w in matrices]

        def body(_: Any, y: Any) -> Any:
            for i in range(written_out):
                y = (y @ weights[i % len(weights)]).astype(y.dtype)
            return y

        return _repeated(mesh, count, body, start, written_out)

    shapes = ((m, k), (k, n)) if k == n else ((m, k), (k, n), (n, k))
    return _loop(mesh, device, shapes, dtype)


def products(mesh: Any, shape: tuple[int, int, int]) -> int:
    """Products in one iteration of :func:`matmul_loop`."""
    return max(repeats(mesh), _written_out(mesh, shape))


def _written_out(mesh: Any, shape: tuple[int, int, int]) -> int:
    """Products in the body of the innermost loop."""
    if repeats(mesh) > 1:
        return WRITTEN_OUT
    return 1 if shape[1] == shape[2] else 2


def memory_loop(mesh: Any, local_bytes: int) -> Loop:
    """A loop that reads and writes ``local_bytes`` on every device."""

    def device(x: Any, count: Any) -> Any:
        return _repeated(mesh, count, lambda i, y: y * 0.5 + i.astype(jnp.float32), x)

    return _loop(mesh, device, (local_bytes // 4,), jnp.float32)


def update_calls(mesh: Any, local_bytes: int) -> tuple[Loop, int]:
    """Calls that update ``local_bytes`` of weights and their two slots in place on every device, and the bytes moved.

    For CPUs: a loop over one array, which stays in caches and is written where it is read, runs there at four times the
    rate that the passes of real steps reach (measured on 16 cores: 31 to 47 GB/s per device against 9).
    """

    def device(weights: Any, mean: Any, square: Any, gradient: Any) -> Any:
        mean = mean * 0.9 + gradient * 0.1
        square = square * 0.999 + gradient * gradient * 0.001
        return weights - mean / (jnp.sqrt(square) + 1e-7), mean, square

    spec = PartitionSpec(tuple(mesh.axis_names))
    mapped = jax.shard_map(device, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 3, check_vma=False)
    update = jax.jit(mapped, donate_argnums=(0, 1, 2))
    *state, gradient = (_operand(mesh, (local_bytes // 4,), spec, jnp.float32) for _ in range(4))

    def calls(_: Any, count: Any) -> Any:
        for _ in range(count):
            state[:] = update(*state, gradient)
        return state[0]

    return (calls, None), 7 * (local_bytes // 4) * 4


def reduction_loop(mesh: Any, local_bytes: int) -> Loop:
    """A loop that reads ``local_bytes`` on every device to sum up their rows."""
    rows = max(1, local_bytes // (4 * ROW_ELEMENTS))

    def body(i: Any, state: Any) -> Any:
        x, sums = state
        return x, jnp.sum(x * (i.astype(jnp.float32) + sums[0]), axis=1)

    def device(x: Any, count: Any) -> Any:
        _, sums = _repeated(mesh, count, body, (x.reshape(rows, ROW_ELEMENTS), jnp.zeros(rows)))
        return x.at[:rows].add(sums)

    return _loop(mesh, device, (rows * ROW_ELEMENTS,), jnp.float32)


def random_loop(mesh: Any, words: int) -> Loop:
    """A loop that draws 32-bit words on every device and sums them up: arithmetic alone."""

    def body(i: Any, state: Any) -> Any:
        key, total = state
        return key, total + jnp.sum(jax.random.bits(jax.random.fold_in(key, i), (words,)) >> 16)

    def device(x: Any, count: Any) -> Any:
        _, total = _repeated(mesh, count, body, (jax.random.key(x[0].astype(jnp.int32)), jnp.uint32(0)))
        return x + total.astype(jnp.float32)

    return _loop(mesh, device, (1,), jnp.float32)


def convolution_loop(mesh: Any, shape: tuple[int, int, int], dtype: Any) -> Loop:
    """A loop over 3 x 3 convolutions on every device that keep size and channels.

    Args:
        shape: (images, side, channels).
    """
    images, side, channels = shape

    def device(operands: Any, count: Any) -> Any:
        start, kernel = operands
        kernel = (kernel / math.sqrt(9 * channels)).astype(kernel.dtype)

        def body(_: Any, y: Any) -> Any:
            for _ in range(WRITTEN_OUT):
                y = jax.lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return y

        return _repeated(mesh, count, body, start, WRITTEN_OUT)

    return _loop(mesh, device, ((images, side, side, channels), (3, 3, channels, channels)), dtype)


ROW_ELEMENTS = 1024


def _repeated(mesh: Any, count: Any, body: Callable[[Any, Any], Any], start: Any, written_out: int = 1) -> Any:
    """``count`` iterations of ``repeats`` operations, of which ``body`` holds ``written_out``."""
    length = repeats(mesh) // written_out
    if length <= 1:
        return jax.lax.fori_loop(0, count, body, start)

    def iteration(i: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, length, lambda j, s: body(i + j, s), state)

    return jax.lax.fori_loop(0, count, iteration, start)


def _all_gather(x: Any, axes: tuple[str, ...], n: int) -> Any:
    return jax.lax.all_gather(x, axes, tiled=True)[: x.shape[0]]


def _reduce_scatter(x: Any, axes: tuple[str, ...], n: int) -> Any:
    piece = jax.lax.psum_scatter(x, axes, tiled=True)
    return jax.lax.dynamic_update_slice(x, piece, (0,))


def _all_to_all(x: Any, axes: tuple[str, ...], n: int) -> Any:
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)


def _permute(x: Any, axes: tuple[str, ...], n: int) -> Any:
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


_BODIES: dict[str, Callable[[Any, tuple[str, ...], int], Any]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": lambda x, axes, n: jax.lax.psum(x, axes),
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}


def _loop(mesh: Any, device: Callable[[Any, Any], Any], shapes: Any, dtype: Any) -> Loop:
    """A program that runs ``device`` everywhere, and its operand: arrays of these shapes, or the only one."""
    names = tuple(mesh.axis_names)
    several = isinstance(shapes[0], tuple)
    locals_ = shapes if several else (shapes,)
    specs = tuple(PartitionSpec(names, *(None,) * (len(shape) - 1)) for shape in locals_)
    ins = (specs if several else specs[0], PartitionSpec())
    program = jax.shard_map(device, mesh=mesh, in_specs=ins, out_specs=specs[0], check_vma=False)
    operands = tuple(_operand(mesh, shape, spec, dtype) for shape, spec in zip(locals_, specs, strict=True))
    return jax.jit(program), operands if several else operands[0]


def _operand(mesh: Any, local_shape: tuple[int, ...], spec: PartitionSpec, dtype: Any) -> Any:
    """The same numbers on every device: zeros in vectors, random ones in larger arrays."""
    shape = (local_shape[0] * mesh.size, *local_shape[1:])
    # Zeros would let some processors run faster than on real data, but sums of anything else overflow in the end.
    drawn = np.zeros(local_shape)
    if len(local_shape) > 1:
        drawn = np.resize(np.random.default_rng(0).standard_normal(DRAWN, np.float32), local_shape)
    local = drawn.astype(dtype)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: local)


DRAWN = 1_000_003
"""Random numbers that are drawn; larger operands repeat them, in other columns of every row."""

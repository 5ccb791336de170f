"""Programs whose iterations are timed: each is a jitted loop over one operation, the iteration count an argument.

Inside a loop every iteration depends on the one before, so nothing overlaps, nothing is hoisted and the cost of a call
from Python is paid once. Where an operation changes the size of its operand, one small slice brings it back.
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
        return jax.lax.fori_loop(0, count, lambda _, y: body(y, axes, n), x)

    return _loop(mesh, device, (local,), jnp.float32), 4 * elements


def matmul_loop(mesh: Any, size: int, dtype: Any) -> Loop:
    """A loop over a product of two square matrices on every device; 2 size^3 floating point operations each."""

    def device(x: Any, count: Any) -> Any:
        # Columns of length one keep repeated products of a matrix with itself finite in every dtype.
        w = (x / jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), 0)).astype(x.dtype)).astype(x.dtype)
        return jax.lax.fori_loop(0, count, lambda _, y: (y @ w).astype(x.dtype), w)

    return _loop(mesh, device, (size, size), dtype)


def memory_loop(mesh: Any, local_bytes: int) -> Loop:
    """A loop that reads and writes ``local_bytes`` on every device."""

    def device(x: Any, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda i, y: y * 0.5 + i.astype(jnp.float32), x)

    return _loop(mesh, device, (local_bytes // 4,), jnp.float32)


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


def _loop(mesh: Any, device: Callable[[Any, Any], Any], local_shape: tuple[int, ...], dtype: Any) -> Loop:
    names = tuple(mesh.axis_names)
    spec = PartitionSpec(names, *(None,) * (len(local_shape) - 1))
    program = jax.shard_map(device, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    shape = (local_shape[0] * mesh.size, *local_shape[1:])
    # Zeros would let some processors run faster than on real data, but sums of anything else overflow in the end.
    zero = len(local_shape) == 1

    drawn = np.zeros(local_shape) if zero else np.random.default_rng(0).standard_normal(local_shape, np.float32)
    local = drawn.astype(dtype)
    operand = jax.make_array_from_callback(shape, sharding, lambda index: local)
    return jax.jit(program), operand

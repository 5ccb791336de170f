"""Fourier transforms in a plan: what XLA:CPU runs only in rows, also of complex numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autoshard_ilp as autoshard
from autoshard_ilp._jax_compat import binder


def long_convolution(weights: dict[str, Any], momentum: dict[str, Any], x: Any, y: Any) -> Any:
    """A step with momentum: gates around a convolution as long as the sequence (dimension 1)."""

    def loss(weights: dict[str, Any]) -> Any:
        u, v, w = jnp.split(x @ weights["in"], 3, -1)
        length = 2 * x.shape[1]
        spectrum = jnp.fft.rfft(u * v, length, axis=1) * jnp.fft.rfft(weights["kernel"], length, axis=0)
        mixed = jnp.fft.irfft(spectrum, length, axis=1)[:, : x.shape[1]]
        return (((mixed * w) @ weights["out"] - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value


@pytest.mark.parametrize("shape", [(2, 3), (2, 4), (2, 2, 2)])
def test_a_long_convolution_runs_as_on_one_device(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)

    def normal(*sizes: int) -> np.ndarray:
        return random.normal(size=sizes).astype("float32")

    weights = {"in": normal(16, 48) / 4, "out": normal(16, 16) / 4, "kernel": 0.1 * normal(16, 16)}
    args = weights, jax.tree.map(np.zeros_like, weights), normal(8, 16, 16), normal(8, 16, 16)
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, tuple("abc"[: len(shape)]), axis_types=(AxisType.Auto,) * len(shape), devices=devices)
    host = autoshard.profile("cpu-host")
    # Slow enough for a small step to be divided.
    slow = replace(
        host,
        peak_flops_per_s_by_dtype={kind: 1e-6 * rate for kind, rate in host.peak_flops_per_s_by_dtype.items()},
        memory_bytes_per_s=1e-5 * host.memory_bytes_per_s,
        kernel_launch_seconds=1e-15,
        hop_seconds=1e-15,
        call_seconds_by_kind=dict.fromkeys(host.call_seconds_by_kind, 1e-15),
    )
    plan = autoshard.optimize_fn(long_convolution, args, mesh, hardware=slow, progress=False)
    assert plan.collectives and any(any(s.spec) for s in jax.tree.leaves(plan.in_shardings))
    placed = jax.tree.map(jax.device_put, args, plan.in_shardings)
    for got, wanted in zip(
        jax.tree.leaves(plan.jit()(*placed)), jax.tree.leaves(jax.jit(long_convolution)(*args)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [jnp.fft.rfft, jnp.fft.irfft, jnp.fft.ifft])
def test_both_ends_of_a_transform_lie_in_rows_on_a_cpu(transform: Any) -> None:
    """XLA:CPU gave a shard that came from another device the order of that collective, and then refused to run it."""
    x = jnp.ones((4, 9), "float32" if transform is jnp.fft.rfft else "complex64")
    (eqn,) = (e for e in jax.make_jaxpr(transform)(x).eqns[-1:] if e.primitive.name in ("fft", "jit", "pjit"))
    inner = eqn.params["jaxpr"].jaxpr.eqns if "jaxpr" in eqn.params else [eqn]
    (fft,) = (e for e in inner if e.primitive.name == "fft")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    bound = jax.make_jaxpr(lambda value: binder(fft, mesh)(value, **fft.params))(x)
    names = [e.primitive.name for e in bound.eqns]
    assert names == ["layout_constraint", "fft", "layout_constraint"]

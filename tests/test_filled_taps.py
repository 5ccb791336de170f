"""Dilated convolutions that are padded at one end: XLA:GPU fills their kernels in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard_ilp.costs.kernels import filled_in_taps
from autoshard_ilp.flatten import build_graph
from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo_text import parse_module
from compiled import mesh_of, needs_cuda, sharding

X, KERNEL = jax.ShapeDtypeStruct((8, 512, 64), "float32"), jax.ShapeDtypeStruct((2, 64, 64), "float32")
PADDINGS = {"causal": (64, 0), "same": (32, 32), "none": (0, 0)}


def convolution(low: int, high: int) -> Any:
    def step(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (low, high), (0, 0))) if low + high else x
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", rhs_dilation=(64,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    return step


@pytest.mark.parametrize(("name", "expected"), [("causal", 65 / 2), ("same", 1.0), ("none", 1.0)])
def test_taps_are_filled_in_where_one_end_is_padded(name: str, expected: float) -> None:
    jaxpr = jax.make_jaxpr(convolution(*PADDINGS[name]))(X, KERNEL)
    graph = build_graph(jaxpr, argument_paths=["x", "kernel"], result_paths=["y"])
    (op,) = (op for op in graph.ops if op.primitive == "conv_general_dilated")
    assert filled_in_taps(graph, op) == expected


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["causal", "same"])
def test_the_gpu_compiler_computes_as_many(name: str) -> None:
    mesh = mesh_of("h100:8")
    ins = tuple(sharding(mesh, (-1, -1), 3) for _ in range(2))
    compiled = jax.jit(convolution(*PADDINGS[name]), in_shardings=ins).lower(X, KERNEL).compile()
    taps = 65 if name == "causal" else 2
    assert matmul_flops(parse_module(compiled.as_text())) == pytest.approx(2 * 8 * 512 * 64 * 64 * taps, rel=0.15)

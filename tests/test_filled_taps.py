"""Dilated convolutions that are padded at one end: XLA:GPU fills their kernels in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

from autoshard_ilp.costs.gpu.splitk import split_bytes
from autoshard_ilp.costs.kernels import filled_in_taps
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.rules import rule_for
from autoshard_ilp.strategies import strategies_of
from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo_text import parse_module
from compiled import mesh_of, needs_cuda, peaks_on_h100s, sharding

X, KERNEL = jax.ShapeDtypeStruct((8, 512, 64), "float32"), jax.ShapeDtypeStruct((2, 64, 64), "float32")
PADDINGS = {"causal": (64, 0), "same": (32, 32), "none": (0, 0)}


def convolution(low: int, high: int) -> Any:
    def step(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (low, high), (0, 0))) if low + high else x
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", rhs_dilation=(64,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    return step


def traced(name: str) -> tuple[Graph, Op]:
    jaxpr = jax.make_jaxpr(convolution(*PADDINGS[name]))(X, KERNEL)
    graph = build_graph(jaxpr, argument_paths=["x", "kernel"], result_paths=["y"])
    (op,) = (op for op in graph.ops if op.primitive == "conv_general_dilated")
    return graph, op


@pytest.mark.parametrize(("name", "expected"), [("causal", 65 / 2), ("same", 1.0), ("none", 1.0)])
def test_taps_are_filled_in_where_one_end_is_padded(name: str, expected: float) -> None:
    graph, op = traced(name)
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


@pytest.mark.parametrize(("name", "products"), [("causal", 2), ("same", 0)])
def test_a_product_per_tap_is_held_until_they_are_added_up(name: str, products: int) -> None:
    graph, op = traced(name)
    view = graph.view(op)
    ways = strategies_of(rule_for(view), view.in_shapes, view.out_shapes, (8,))
    held = split_bytes(graph, op, ways, (8,))
    beside = 8 * 512 * 64 * max(0, 4 * products - 4)  # the sum itself is counted elsewhere
    assert held[0] == beside, "the first strategy keeps everything whole"
    assert min(held) == beside // 8, "the batch, or the result's features, over all devices"


def network() -> keras.Model:
    x = inputs = keras.Input((512, 256))
    for i in range(4):
        x = keras.layers.Conv1D(256, 5, padding="causal", dilation_rate=2**i, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(8)(x[:, -1]))
    model.compile("adam", "mse")
    return model


@needs_cuda
@pytest.mark.cuda
def test_causal_convolutions_take_what_the_plan_says() -> None:
    compiled, planned = peaks_on_h100s(network, 256)
    assert compiled == pytest.approx(planned, rel=0.05)

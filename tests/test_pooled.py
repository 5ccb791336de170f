"""ReLUs that XLA:GPU writes beside a sum over the places of an image."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_cuda, peaks_on_h100s


def graph_of(places: int, dtype: str, use: Any) -> Graph:
    """A step that convolves, cuts negative numbers off, and uses what is left in some way; and its gradient."""

    def loss(kernel: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return use(jnp.maximum(made, 0.0)).astype("float32").sum()

    shapes = (3, 3, 64, 64), (8, places, places, 64)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    return insert_hubs(build_graph(jaxpr, argument_paths=["kernel", "x"], result_paths=["y"]))


def scaled(x: Any) -> Any:
    return x * jnp.sin(x.mean((1, 2), keepdims=True))


def normalised(x: Any) -> Any:
    wide = x.astype("float32")
    less = wide - wide.mean((1, 2), keepdims=True)
    return (less / jnp.sqrt(jnp.square(less).mean((1, 2), keepdims=True))).astype(x.dtype) ** 2


@pytest.mark.parametrize(
    ("places", "dtype", "use", "expected"),
    [
        pytest.param(64, "float32", scaled, True, id="scaled by its average"),
        pytest.param(64, "bfloat16", scaled, True, id="in 16 bits"),
        pytest.param(32, "float32", scaled, False, id="of few places"),
        pytest.param(64, "float32", lambda x: x.mean((1, 2)), False, id="only averaged"),
        pytest.param(64, "float32", lambda x: x * jnp.sin(x.mean(3, keepdims=True)), False, id="over channels"),
        pytest.param(32, "bfloat16", normalised, True, id="normalised in 16 bits"),
        pytest.param(32, "float32", normalised, False, id="normalised: the difference is written"),
    ],
)
def test_a_relu_is_written_beside_its_sum(places: int, dtype: str, use: Any, expected: bool) -> None:
    graph = graph_of(places, dtype, use)
    cut = next(op.outputs[0] for op in graph.ops if op.primitive == "max")
    assert bool(analyse(graph, "gpu").stored[cut]) == expected


def scaled_norm(places: int, images: int, of: Any) -> tuple[Graph, int]:
    """A step that convolves, scales each channel, and reduces over places; and what was scaled."""

    def loss(kernel: Any, scale: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        normal = made * scale
        return (normal * jnp.sin(of(normal, axis=(1, 2), keepdims=True))).sum()

    shapes = (3, 3, 64, 64), (64,), (images, places, places, 64)
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["kernel", "scale", "x"], result_paths=["y", "z"]))
    convolution = next(op for op in graph.ops if op.primitive == "conv_general_dilated")
    product = next(r for r in graph.readers(convolution.outputs[0]) if r.primitive == "mul" and r.phase == "forward")
    return graph, product.outputs[0]


@pytest.mark.parametrize("of", [jnp.mean, jnp.max])
@pytest.mark.parametrize(
    ("places", "images", "devices", "expected"),
    [(64, 32, 1, True), (64, 64, 1, False), (64, 64, 2, True), (80, 32, 1, False), (16, 32, 1, False)],
)
def test_few_sums_are_of_what_was_written(places: int, images: int, devices: int, expected: bool, of: Any) -> None:
    graph, scaled = scaled_norm(places, images, of)
    assert bool(analyse(graph, "gpu", devices=devices).stored[scaled]) == expected


def excited(normal: bool) -> Any:
    def layer(x: Any) -> Any:
        x = keras.layers.Conv2D(64, 3, padding="same", activation=None if normal else "relu")(x)
        return keras.layers.BatchNormalization()(x) if normal else x

    x = inputs = keras.Input((64, 64, 3))
    x = layer(x)
    for _ in range(2):
        gate = keras.layers.Dense(64, activation="sigmoid")(keras.layers.GlobalAveragePooling2D(keepdims=True)(x))
        x = layer(x * gate)
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", "mse")
    return model


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("normal", "batch"), [(False, 64), (False, 512), pytest.param(True, 64, marks=pytest.mark.slow)]
)
def test_squeeze_and_excitation_takes_what_the_plan_says(normal: bool, batch: int) -> None:
    compiled, planned = peaks_on_h100s(partial(excited, normal), batch)
    assert compiled == pytest.approx(planned, rel=0.05)

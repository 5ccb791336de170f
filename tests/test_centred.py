"""Arrays less their averages, which XLA:GPU writes for variances."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_cuda, peaks_on_h100s


def graph_of(shape: tuple[int, ...], axes: tuple[int, ...], gradient: bool = True) -> Graph:
    """A step that normalises over some dimensions, and its gradient."""

    def loss(x: Any) -> Any:
        x = jnp.sin(x).astype("float32")
        less = x - x.mean(axes, keepdims=True)
        return jnp.sin(less / jnp.sqrt(jnp.square(less).mean(axes, keepdims=True))).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss) if gradient else loss)(jax.ShapeDtypeStruct(shape, "bfloat16"))
    return insert_hubs(build_graph(jaxpr, argument_paths=["x"], result_paths=["y"]))


def written(graph: Graph, family: str) -> bool:
    stored = analyse(graph, family).stored
    difference = next(op.outputs[0] for op in graph.ops if op.primitive == "sub")
    return bool(stored[difference])


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        pytest.param((8, 32, 32, 128), (1, 2), True, id="places of each image"),
        pytest.param((8, 32, 32, 128, 1), (1, 2, 4), True, id="groups of one channel"),
        pytest.param((8, 16, 16, 128), (1, 2), False, id="few places"),
        pytest.param((8, 32, 32, 128), (0, 1, 2), False, id="a batch of images"),
        pytest.param((4, 32, 32, 128), (0, 1, 2), True, id="a small batch of images"),
        pytest.param((8, 96, 96, 128), (1, 2), False, id="many places of each image"),
        pytest.param((4096, 1536), (0,), True, id="a batch of many features"),
        pytest.param((4096, 1024), (0,), True, id="a batch of features"),
        pytest.param((8192, 1536), (0,), False, id="a large batch"),
        pytest.param((16, 4096), (0,), True, id="a tiny batch"),
        pytest.param((64, 16, 128), (2,), False, id="features of each token"),
    ],
)
def test_what_an_average_is_taken_from_is_written(shape: Any, axes: Any, expected: bool) -> None:
    graph = graph_of(shape, axes)
    assert written(graph, "gpu") == expected
    assert not written(graph, "tpu")


def test_without_a_backward_pass_nothing_is_kept() -> None:
    assert not written(graph_of((8, 32, 32, 128), (1, 2), gradient=False), "gpu")


def normalised() -> Any:
    x = inputs = keras.Input((32, 32, 3))
    mixed: dict[str, Any] = {"dtype": "mixed_bfloat16"}
    x = keras.layers.Conv2D(128, 3, padding="same", **mixed)(x)
    for _ in range(3):
        x = keras.layers.Activation("relu", **mixed)(keras.layers.GroupNormalization(32, **mixed)(x))
        x = keras.layers.Conv2D(128, 3, padding="same", **mixed)(x)
    model = keras.Model(inputs, keras.layers.Conv2D(3, 3, padding="same", dtype="float32")(x))
    model.compile("adam", "mse")
    return model


@needs_cuda
@pytest.mark.cuda
def test_group_normalisations_take_what_the_plan_says() -> None:
    compiled, planned = peaks_on_h100s(normalised, 64)
    assert compiled == pytest.approx(planned, rel=0.05)

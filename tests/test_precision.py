"""What XLA:TPU rounds early: 32-bit floats that only products read are held and sent as 16-bit ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.precision import precision
from autoshard_ilp.graph import build_graph, insert_hubs

TPU, GPU = SimpleNamespace(family="tpu"), SimpleNamespace(family="gpu")
MESH = {"data": 2, "model": 4}
SIZE = 64


def sent_as(function: Any, profile: Any = TPU, dtype: str = "float32") -> list[float]:
    """Bytes per element in which the weight, the second argument, reaches each operation that reads it."""
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), dtype)
    jaxpr = jax.make_jaxpr(function)(shape, shape)
    results = [f"r{i}" for i in range(len(jaxpr.jaxpr.outvars))]
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["x", "w"], result_paths=results))
    found = precision(graph, profile)
    weight = graph.ops[graph.arguments[1]].outputs[0]
    return [found.moved(graph, graph.ops[op], i) for op, i in graph.tensors[weight].consumers]


def looped(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0]


ROUNDED = {
    "product": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.T.reshape(SIZE, SIZE),
    "relu": lambda x, w: x @ jnp.maximum(w, 0.0),
    "two products": lambda x, w: jnp.tanh(x @ w) @ w.T,
    "loop": looped,
    "converted": lambda x, w: jnp.sum(w.astype("bfloat16")),
}
KEPT = {
    "sum besides": lambda x, w: (x @ w, jnp.sum(w * w)),
    "arithmetic first": lambda x, w: x @ jnp.exp(w),
    "HIGHEST": lambda x, w: jnp.dot(x, w, precision="highest"),
    "HIGH": lambda x, w: jnp.dot(x, w, precision="high"),
    "result": lambda x, w: (x @ w, w),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_only_products_read_is_rounded(name: str) -> None:
    assert set(sent_as(ROUNDED[name])) == {2.0}
    assert set(sent_as(ROUNDED[name], GPU)) == {4.0}
    assert set(sent_as(ROUNDED[name], dtype="bfloat16")) == {2.0}


@pytest.mark.parametrize("name", KEPT)
def test_what_something_else_reads_is_kept(name: str) -> None:
    assert 4.0 in sent_as(KEPT[name])


def dense() -> Any:
    model = keras.Sequential(
        [keras.Input((256,)), *[keras.layers.Dense(512, "relu") for _ in range(2)], keras.layers.Dense(256)]
    )
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.tpu
@pytest.mark.parametrize("mode", ["predict", "train"])
def test_the_tpu_compiler_sends_half_of_float32_weights(mode: str) -> None:
    pytest.importorskip("libtpu")
    options = {"batch_size": 256, "hardware": "tpu-v5e:2x4", "mode": mode, "progress": False}
    checked = autoshard.baseline(dense, MESH, "fsdp", **options).verify("tpu-v5e:2x4")
    assert checked.predicted_bytes_per_device > 0
    assert checked.compiled_bytes_per_device == pytest.approx(checked.predicted_bytes_per_device, rel=0.01)
    assert checked.unplanned_bytes_per_device <= 0.01 * checked.predicted_bytes_per_device

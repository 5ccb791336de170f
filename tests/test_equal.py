"""Casts of a variable that two calls of a layer make alike."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.equal import merge_equal_casts
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_cuda

WIDTH, ROWS = 64, 32
BATCH, LENGTH, VOCABULARY = 16, 128, 4096


def graph_of(function: Any) -> Graph:
    w, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    jaxpr = jax.make_jaxpr(function)(w, x, x)
    return build_graph(jaxpr, argument_paths=["w", "x", "y"], result_paths=["z"])


def casts(graph: Graph) -> list[int]:
    return [op.id for op in graph.ops if op.primitive == "convert_element_type"]


def test_two_calls_of_a_layer_read_one_cast() -> None:
    graph = graph_of(lambda w, x, y: x @ w.astype("bfloat16") + y @ w.astype("bfloat16"))
    merged = merge_equal_casts(graph)
    assert len(casts(graph)) == 2
    (cast,) = casts(merged)
    hub = next(op for op in insert_hubs(merged).ops if op.primitive == "hub")
    (result,) = merged.ops[cast].outputs
    assert [r.primitive for r in merged.readers(result)] == ["dot_general"] * 2
    assert merged.tensors[hub.inputs[0]].dtype == "bfloat16"


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda w, x, y: x @ w.astype("bfloat16") + w.astype("bfloat16")[:ROWS], id="used otherwise"),
        pytest.param(lambda w, x, y: x @ w.astype("bfloat16") + y @ w.astype("float16"), id="to another type"),
        pytest.param(lambda w, x, y: (x @ w.astype("bfloat16"), y * 2)[0], id="one cast"),
    ],
)
def test_what_is_not_equal_stays_as_it_is(function: Any) -> None:
    graph = graph_of(function)
    assert merge_equal_casts(graph) is graph


def encoder_and_decoder() -> Any:
    """One embedding for two inputs, as translation models have, in mixed precision."""
    sources, targets = (keras.Input((LENGTH,), dtype="int32", name=name) for name in ("sources", "targets"))
    embedding = keras.layers.Embedding(VOCABULARY, 256, dtype="mixed_bfloat16")
    dense = keras.layers.Dense(256, "relu", dtype="mixed_bfloat16", name="shared")
    both = keras.layers.Concatenate(axis=1)([dense(embedding(sources)), dense(embedding(targets))])
    model = keras.Model([sources, targets], keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(both)))
    model.compile("sgd", "mse")
    return model


def test_a_shared_layer_trains_as_on_one_device() -> None:
    rng = np.random.default_rng(0)
    x = [rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype("int32") for _ in range(2)]
    y = rng.normal(size=(BATCH, 4)).astype("float32")
    losses = []
    for mesh in (None, {"data": 2, "model": 4}):
        keras.utils.set_random_seed(0)
        model = encoder_and_decoder()
        if mesh is not None:
            pins = {".*embeddings": ("model", None), "shared/kernel": (None, "model")}
            options: dict[str, Any] = {"hardware": "h100", "inputs": x, "targets": y, "progress": False}
            autoshard.optimize(model, mesh, pins=pins, **options).apply(model)
        losses.append([float(model.train_on_batch(x, y)) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    assert losses[0][2] < losses[0][0]


@needs_cuda
@pytest.mark.cuda
def test_a_shared_table_is_gathered_once() -> None:
    pins = {".*embeddings": (("data", "model"), None), "inputs": (("data", "model"),)}
    plan = autoshard.optimize(
        encoder_and_decoder, {"data": 2, "model": 4}, hardware="h100", batch_size=512, pins=pins, progress=False
    )
    found = plan.verify("h100:8")
    gathered = [c for c in plan.collectives if c.kind == "all-gather" and "embedding" in c.tensor]
    assert [(c.count, c.bytes_per_device) for c in gathered] == [(1, VOCABULARY * 256 * 2 * 7 / 8)]
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)

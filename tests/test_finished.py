"""The backward pass waits for updates of gradients that no device shares, for bias gradients and for tied tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import autoshard_ilp as autoshard
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce import finished, inplace, order
from autoshard_ilp.enforce.finished import updates_waited_for
from autoshard_ilp.enforce.inplace import waiting_updates
from autoshard_ilp.enforce.order import Order, order_of
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_tpu
from two_layers import CLASSES, WIDTH, graph_of, shapes, without_and_with


def orders(graph: Graph, unshared: Callable[..., bool] = lambda op: True) -> tuple[Order, Order]:
    before = order_of(graph, "tpu")
    return before, updates_waited_for(graph, before, waiting_updates(graph, "tpu"), "tpu", unshared)


def test_an_update_takes_the_place_of_its_product() -> None:
    graph = graph_of()
    before, after = orders(graph)
    (place,) = before.waits
    (product,), (update,) = before.waits[place], after.waits[place]
    assert graph.ops[product].primitive == "dot_general"
    result = next(r for r, a in graph.aliases if graph.ops[a].outputs[0] == graph.ops[graph.arguments[1]].outputs[0])
    assert graph.tensors[graph.behind(graph.ops[result].inputs[0], ("hub",))].producer == update
    assert update in after.early[place[0]]  # it is traced before what waits for it
    assert after.gradients == {update}


def test_what_two_updates_need_runs_once() -> None:
    """A learning rate that decays is computed before the first of them."""
    order = Order(waits={}, early={3: (7, 8), 5: (7, 9)})
    graph = graph_of()
    found = [item.id for item in order.of(graph.ops[:10])]
    assert found == [0, 1, 2, 7, 8, 3, 4, 9, 5, 6]


def test_what_devices_share_is_waited_for_as_before() -> None:
    before, after = orders(graph_of(), lambda op: False)
    assert after == before


def test_an_update_that_needs_all_gradients_is_not_waited_for() -> None:
    """Clipped by their norm, no gradient is used before the backward pass has ended."""
    before, after = orders(graph_of(clip=True))
    assert before.waits
    assert after.waits == before.waits


def test_tpus_and_gpus_wait_for_updates() -> None:
    graph = graph_of()
    for platform, waits in (("tpu", True), ("gpu", True), ("cpu", False)):
        before = order_of(graph, platform)
        assert (updates_waited_for(graph, before, {}, platform, lambda op: True) != before) == waits


@pytest.mark.parametrize("classes", [CLASSES, CLASSES - 3])
def test_waiting_changes_no_value(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    """Also where the columns do not divide: their shards are filled up to be looked at."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    graph = graph_of(classes)
    layouts = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            shape = graph.tensors[t].shape
            held = shape.index(classes) if classes in shape and op.primitive not in ("argument", "result") else -1
            layouts[op.id, j] = (held,)
    run = lambda: jax.jit(planned_function(graph, Decisions(results=layouts), mesh, ("data",)))  # noqa: E731
    sets = [(order, "PLATFORMS"), (order, "SCATTERED_ONLY"), (inplace, "PLATFORMS"), (finished, "PLATFORMS")]
    plain, waiting = without_and_with(monkeypatch, sets, run, classes)
    assert waiting.count("stablehlo.select") > plain.count("stablehlo.select")
    assert (waiting.count("stablehlo.pad") > plain.count("stablehlo.pad")) == (classes != CLASSES)


def test_gradients_of_biases_are_waited_for_on_tpus() -> None:
    """Of three layers, the last one's is known before the backward pass begins; the first one's is the last thing."""

    def step(weights: Any, biases: Any, x: Any) -> Any:
        def loss(weights: Any, biases: Any) -> Any:
            y = x
            for w, b in zip(weights, biases, strict=True):
                y = jax.nn.relu(y @ w + b)
            return jnp.sum(jnp.sin(y))

        found = jax.grad(loss, (0, 1))(weights, biases)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, (weights, biases), found)

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 3
    biases = [jax.ShapeDtypeStruct((WIDTH,), "float32")] * 3
    jaxpr = jax.make_jaxpr(step)(weights, biases, shapes()[2])
    paths = [f"p{i}" for i in range(6)]
    graph = insert_hubs(build_graph(jaxpr, argument_paths=[*paths, "x"], result_paths=paths))
    sums = {
        platform: {op for op in order_of(graph, platform).gradients if graph.ops[op].primitive == "reduce_sum"}
        for platform in ("tpu", "gpu")
    }
    assert (len(sums["tpu"]), len(sums["gpu"])) == (2, 0)
    assert sums["tpu"] <= order_of(graph, "tpu").sums  # each device's own sum, before any reduction


@needs_tpu
@pytest.mark.tpu
def test_gradients_of_tied_tables_are_looked_at_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits XLA:TPU would write them twice, for it holds them in 32."""
    import keras
    from keras_hub.layers import ReversibleEmbedding

    from autoshard_ilp.costs.precision import added_up_wide
    from autoshard_ilp.enforce import ties

    def tied() -> Any:
        table = ReversibleEmbedding(8192, 256, dtype="mixed_bfloat16")
        inputs = keras.Input((128,), dtype="int32")
        x = keras.layers.Dense(256, "relu", dtype="mixed_bfloat16")(table(inputs))
        net = keras.Model(inputs, table(x, reverse=True))
        net.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return net

    plan = autoshard.optimize(tied, {"model": 4}, hardware="tpu-v5p", batch_size=16, progress=False)
    graph = plan.trail.graph
    (product,) = (op for op in graph.ops if op.eqn is not None and added_up_wide(graph, op))
    looked_at = []
    monkeypatch.setattr(ties, "never", recording(ties.never, looked_at))
    mesh = plan_mesh("tpu-v5p:2x2x1")
    plan.jit(mesh).lower(*plan.abstract_args(mesh))
    shape = graph.tensors[product.outputs[0]].shape
    assert {str(value.dtype) for value in looked_at if value.shape == shape} == {"float32"}


def recording(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def recorded(value: Any, *rest: Any) -> Any:
        calls.append(value)
        return function(value, *rest)

    return recorded


def language_model() -> Any:
    """Wide layers before the logits' weight, which the plan shards over its columns."""
    import keras

    x = inputs = keras.Input((512,), dtype="int32")
    x = keras.layers.Embedding(8192, 1024, dtype="mixed_bfloat16")(x)
    for width in (8192, 1024, 8192, 1024):
        x = keras.layers.Dense(width, "relu", use_bias=False, dtype="mixed_bfloat16")(x)
    net = keras.Model(inputs, keras.layers.Dense(32768, use_bias=False, dtype="mixed_bfloat16")(x))
    net.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return net


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
@pytest.mark.parametrize("waits", [True, False])
def test_logits_are_freed_by_the_backward_pass_on_tpu(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, the gradient of the logits' weight is computed at the end: 485 MB instead of 446."""
    if not waits:
        monkeypatch.setattr(finished, "PLATFORMS", frozenset())
    target = "tpu-v5p:2x2x2"
    plan = autoshard.optimize(language_model, {"model": 8}, hardware=target, batch_size=32, progress=False)
    peak = plan.verify(target).compiled_peak_bytes
    assert peak is not None
    assert (peak < 465e6) == waits


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
@pytest.mark.parametrize("kept", [True, False])
def test_variables_of_few_heads_are_not_copied(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of four heads of 128 per device: XLA:TPU would copy them and their slots into another order."""
    import keras

    from autoshard_ilp.apply import planned

    def attention() -> Any:
        x = inputs = keras.Input((256, 2048))
        x = keras.layers.MultiHeadAttention(16, 128, use_bias=False, dtype="mixed_bfloat16")(x, x)
        net = keras.Model(inputs, x)
        net.compile(optimizer="adam", loss="mse")
        return net

    if not kept:
        monkeypatch.setattr(planned, "whole_rows", lambda rows: -(-rows // 8) * 8)
    target = "tpu-v5p:2x2x1"
    pins = {".*(query|key|value)/kernel": PartitionSpec(None, "model", None)}
    plan = autoshard.optimize(attention, {"model": 4}, hardware=target, batch_size=32, pins=pins, progress=False)
    mesh = plan_mesh(target)
    text = plan.jit(mesh).lower(*plan.abstract_args(mesh)).compile().as_text()
    assert bool(re.findall(r" f32\[2048,4,128\]\{(?!2,1,0)[^}]*\} copy\(", text)) != kept


def plan_mesh(target: str) -> Any:
    from autoshard_ilp.verify import compile_only_mesh, parse_target

    return compile_only_mesh(parse_target(target), ("model",), (4,))

"""Weight gradients are computed when the backward pass reaches them: less memory on GPU, the same values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import autoshard_ilp as autoshard
from autoshard_ilp.apply import Decisions, operations, planned_function
from autoshard_ilp.costs.tpu.heap import REPORTED
from autoshard_ilp.course import Course, Segment
from autoshard_ilp.enforce import latesums, manual, order, scattered, ties
from autoshard_ilp.enforce.latesums import Room
from autoshard_ilp.enforce.order import order_of
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.placement import decisions
from autoshard_ilp.report import held_bytes
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda, needs_tpu

ROWS, WIDTH, LAYERS = 16384, 512, 5


def step(weights: Any, slots: Any, x: Any) -> Any:
    """One step of momentum of an MLP without residuals: each layer's cotangent replaces the one before."""

    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jax.nn.relu(y @ w)
        return jnp.sum(y**2)

    gradients = jax.grad(loss)(weights)
    slots = [0.9 * s + g for s, g in zip(slots, gradients, strict=True)]
    return [w - 1e-6 * s for w, s in zip(weights, slots, strict=True)], slots


def shapes(rows: int = ROWS, width: int = WIDTH) -> Any:
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * LAYERS
    return weights, weights, jax.ShapeDtypeStruct((rows, width), "float32")


def graph_of(rows: int = ROWS, width: int = WIDTH) -> Graph:
    jaxpr = jax.make_jaxpr(step)(*shapes(rows, width))
    paths = [f"a{i}" for i in range(2 * LAYERS + 1)]
    return insert_hubs(build_graph(jaxpr, argument_paths=paths, result_paths=[f"r{i}" for i in range(2 * LAYERS)]))


def planned(graph: Graph, mesh: Mesh, rows: int) -> Any:
    """The step, its batch sharded over the mesh, gradients reduced or scattered where they are computed."""
    layouts = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            layouts[op.id, j] = (0,) if graph.tensors[t].shape[:1] == (rows,) else (-1,)
    run = planned_function(graph, Decisions(results=layouts), mesh, ("data",))
    whole, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(run, in_shardings=(*[whole] * (len(graph.arguments) - 1), by_row))


def cpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


def test_every_gradient_but_the_last_is_waited_for_once() -> None:
    graph = graph_of()
    found = order_of(graph, "gpu")
    products = [op for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    weights = [op.id for op in products if graph.tensors[op.outputs[0]].shape == (WIDTH, WIDTH)]
    waited = [g for gradients in found.waits.values() for g in gradients]
    assert sorted(waited) == sorted(weights)[:-1] == sorted(found.gradients)
    for (op_id, _), gradients in found.waits.items():
        assert max(gradients) < op_id and graph.ops[op_id].phase == "backward"


def test_other_compilers_are_left_alone() -> None:
    assert not order_of(graph_of(), "cpu").waits


def labelled(weights: Any, slots: Any, x: Any) -> Any:
    """One step of a classifier of three layers, then which class it sees, by two reductions of its logits."""

    def loss(weights: Any) -> Any:
        y = x
        for w in weights[:-1]:
            y = jax.nn.relu(y @ w)
        logits = y @ weights[-1]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1)), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    slots = [0.9 * s + g for s, g in zip(slots, gradients, strict=True)]
    weights = [w - 1e-6 * s for w, s in zip(weights, slots, strict=True)]
    best = jnp.max(logits, axis=-1, keepdims=True)
    place = jnp.min(jnp.where(logits == best, jnp.arange(logits.shape[1]), logits.shape[1]), axis=-1)
    return weights, slots, place


def labelled_step(rows: int, widths: Sequence[int]) -> tuple[Graph, Any]:
    weights = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)]
    shapes = weights, weights, jax.ShapeDtypeStruct((rows, widths[0]), "float32")
    results = [f"r{i}" for i in range(2 * len(weights) + 1)]
    paths = [f"a{i}" for i in range(2 * len(weights) + 1)]
    graph = build_graph(jax.make_jaxpr(labelled)(*shapes), argument_paths=paths, result_paths=results)
    return insert_hubs(graph), jax.tree.leaves(shapes)


def test_the_backward_pass_waits_for_metrics_on_tpu() -> None:
    graph, _ = labelled_step(2048, (64, 1024, 512))
    metrics = [op.id for op in graph.ops if op.phase == "update" and op.primitive.startswith("reduce_")]
    found = order_of(graph, "tpu")
    ((carrier, _),) = (place for place, waited in found.waits.items() if set(metrics) <= set(waited))
    assert set(metrics) <= found.gradients and len(metrics) == 2
    assert graph.ops[carrier].phase == "backward"
    order = [item.id for item in found.of(graph.schedule()[0])]
    assert sorted(order) == [item.id for item in graph.schedule()[0]]
    done: set[int] = set()
    for i in order:
        producers = {graph.tensors[t].producer for t in graph.ops[i].inputs} - {None}
        assert producers <= done, "something runs before what it reads"
        done.add(i)
    assert all(order.index(m) < order.index(carrier) for m in metrics)


def with_bias(weights: Any, bias: Any, x: Any) -> Any:
    """One step of a classifier of two layers whose logits have a bias."""

    def loss(weights: Any, bias: Any) -> Any:
        logits = jax.nn.relu(x @ weights[0]) @ weights[1] + bias
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

    of_weights, of_bias = jax.grad(loss, (0, 1))(weights, bias)
    return [w - 1e-3 * g for w, g in zip(weights, of_weights, strict=True)], bias - 1e-3 * of_bias


def with_bias_step(rows: int, classes: int) -> tuple[Graph, Any]:
    weights = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 128), (128, classes))]
    of_bias, x = jax.ShapeDtypeStruct((classes,), "float32"), jax.ShapeDtypeStruct((rows, 64), "float32")
    jaxpr = jax.make_jaxpr(with_bias)(weights, of_bias, x)
    graph = build_graph(jaxpr, argument_paths=["w0", "w1", "b", "x"], result_paths=["w0", "w1", "b"])
    return insert_hubs(graph), [*weights, of_bias, x]


def test_the_backward_pass_waits_for_sums_over_the_gradient_it_begins_with_on_tpu() -> None:
    graph, _ = with_bias_step(4096, 512)
    found = order_of(graph, "tpu")
    (total,) = found.sums
    assert graph.ops[total].primitive == "reduce_sum" and graph.tensors[graph.ops[total].outputs[0]].shape == (512,)
    product = next(op for op in graph.ops if op.phase == "backward" and op.primitive == "dot_general")
    assert [place[0] for place, waited in found.waits.items() if total in waited] == [product.id]
    assert not order_of(graph, "gpu").sums
    assert not order_of(with_bias_step(64, 512)[0], "tpu").sums, "small"


def test_waiting_for_sums_changes_no_value_and_looks_at_each_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 4096
    graph, shapes = with_bias_step(rows, 512)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in shapes]
    found = []
    monkeypatch.setattr(order, "PLATFORMS", frozenset({"cpu"}))
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(order, "METRICS_FIRST", platforms)
        jitted = planned(graph, cpu_mesh(), rows)
        compiled = jitted.lower(*args).compile().as_text()
        found.append((jitted(*args), jitted.lower(*args).as_text(), compiled.count("all-reduce(")))
    (plain, text, reductions), (waiting, text_waiting, reductions_waiting) = found
    assert text_waiting.count("stablehlo.select") > text.count("stablehlo.select")
    assert reductions_waiting == reductions
    for a, b in zip(plain, waiting, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@needs_tpu
@pytest.mark.parametrize("waits", [True, False])
def test_logits_with_a_bias_are_freed_by_the_backward_pass_on_tpu(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, loss and bias gradient are one kernel at the end of the step, and the logits, 67 MB, are held
    for it in device memory: 176 MB instead of 142. (So it is where sums are scattered with a dimension of their own in
    front. As they are scattered here without, it is 147 either way.)"""
    import keras

    monkeypatch.setattr(scattered, "SAFE_MULTIPLE", 1 << 30)

    def build() -> Any:
        x = inputs = keras.Input((512,), dtype="int32")
        x = keras.layers.Embedding(8192, 1024, dtype="mixed_bfloat16")(x)
        for _ in range(8):
            x = keras.layers.Dense(1024, "relu", dtype="mixed_bfloat16")(x)
        net = keras.Model(inputs, keras.layers.Dense(8192)(x))
        net.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return net

    if not waits:
        monkeypatch.setattr(order, "METRICS_FIRST", frozenset())
        monkeypatch.setattr(order, "SUMS_TOO", frozenset())
        monkeypatch.setattr(latesums, "SLACK", 1.0)
    plan = autoshard.optimize(build, {"data": 8}, hardware="tpu-v5e:2x4", batch_size=32, progress=False)
    found = plan.verify("tpu-v5e:2x4")
    print(found.compiled_peak_bytes, found.predicted_peak_bytes)
    assert found.compiled_peak_bytes is not None
    assert (found.compiled_peak_bytes < 150e6) == waits


@needs_cuda
def test_activations_are_freed_as_the_backward_pass_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, graph = compile_only_mesh(parse_target("h100:8"), ("data",), (8,)), graph_of()
    held = {}
    for platforms in (frozenset(), frozenset({"gpu"})):
        monkeypatch.setattr(order, "PLATFORMS", platforms)
        lowered = planned(graph, mesh, ROWS).lower(*jax.tree.leaves(shapes()))
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        held[bool(platforms)] = compiled.memory_analysis().temp_size_in_bytes
    activation = ROWS // 8 * WIDTH * 4
    print(held, activation)
    assert held[True] <= held[False] - activation


@needs_tpu
@pytest.mark.tpu
def test_only_sums_over_devices_are_waited_for_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, graph = compile_only_mesh(parse_target("tpu-v5e:2x4"), ("data",), (8,)), graph_of(1024, 256)

    def comparisons(rows: int) -> int:
        lowered = planned(graph, mesh, rows).lower(*jax.tree.leaves(shapes(1024, 256)))
        return lowered.as_text().count("stablehlo.compare")

    batch_shared, batch_whole = 1024, -1
    waiting = [comparisons(rows) for rows in (batch_shared, batch_whole)]
    monkeypatch.setattr(order, "PLATFORMS", frozenset({"gpu"}))
    shared, whole = (comparisons(rows) for rows in (batch_shared, batch_whole))
    assert waiting[0] >= shared + LAYERS - 1  # each looks at a reduced gradient
    assert waiting[1] == whole


@pytest.mark.parametrize(("rows", "waits"), [(1024, True), (32, False)])
def test_gradients_of_gathered_copies_are_waited_for_on_tpu(
    rows: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody shares these gradients, but who puts one off holds what was gathered for it: more than itself, or less."""
    width = 256
    graph, mesh = graph_of(rows, width), cpu_mesh()
    monkeypatch.setattr(order, "MIN_COPY_BYTES", 0)
    monkeypatch.setattr(order, "PLATFORMS", frozenset({"cpu"}))
    monkeypatch.setattr(operations, "SCATTERED_ONLY", frozenset({"cpu"}))
    results, operands = {}, {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            results[op.id, j] = (0,) if graph.tensors[t].shape[:1] == (rows,) else (-1,)
        if op.primitive == "dot_general" and graph.tensors[op.outputs[0]].shape == (width, width):
            contracted = [dims[0] for dims in op.params["dimension_numbers"][0]]
            operands |= {(op.id, 0): (-1,), (op.id, 1): (1 - contracted[1],)}
            results[op.id, 0] = (1,)
    asked = []
    monkeypatch.setattr(ties, "never", lambda value, *_: asked.append(value.shape) or value[0, 0] != value[0, 0])
    run = planned_function(graph, Decisions(results=results, operands=operands), mesh, ("data",))
    jax.make_jaxpr(run)(*jax.tree.leaves(shapes(rows, width)))
    assert asked == [(width, width)] * (LAYERS - 1 if waits else 0)


def test_waiting_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 1024, 256
    graph, mesh = graph_of(rows, width), cpu_mesh()
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in jax.tree.leaves(shapes(rows, width))]
    found = []
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(order, "PLATFORMS", platforms)
        jitted = planned(graph, mesh, rows)
        found.append((jitted(*args), jitted.lower(*args).as_text()))
    (plain, text), (waiting, text_waiting) = found
    assert text_waiting.count("stablehlo.select") > text.count("stablehlo.select")
    for a, b in zip(plain, waiting, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_waiting_for_metrics_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2048
    graph, shapes = labelled_step(rows, (64, 128, 256))
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in shapes]
    found = []
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(order, "METRICS_FIRST", platforms)
        jitted = planned(graph, cpu_mesh(), rows)
        found.append((jitted(*args), jitted.lower(*args).as_text()))
    (plain, text), (waiting, text_waiting) = found
    assert text_waiting.count("stablehlo.select") > text.count("stablehlo.select")
    for a, b in zip(plain, waiting, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@needs_tpu
def test_logits_are_freed_by_the_backward_pass_on_tpu() -> None:
    """Without waiting the logits and three masks are held to the end of the step: 447 MB."""
    import keras

    def build() -> Any:
        inputs = keras.Input((512,), dtype="int32")
        x = keras.layers.Embedding(8192, 512)(inputs)
        for _ in range(2):
            x = keras.layers.Dense(512, "relu")(x)
        net = keras.Model(inputs, keras.layers.Dense(32768, dtype="mixed_bfloat16")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
        return net

    plan = autoshard.optimize(build, {"data": 8}, hardware="tpu-v5e:2x4", batch_size=64, progress=False)
    found = plan.verify("tpu-v5e:2x4")
    print(found.compiled_peak_bytes, found.predicted_peak_bytes)
    assert found.compiled_peak_bytes is not None and found.compiled_peak_bytes <= 370e6
    # The masks of the accuracy's argmax, 8 sequences of 512 tokens: a bit per logit, packed along the sequences.
    assert "u8[512,32768]" in found.text
    built, choices = plan.trail.built, plan.trail.solution.choices
    held = [held_bytes(built, i, choices) for i in range(len(built.program.lifetimes.owner))]
    holes = 1 + REPORTED * autoshard.profile("tpu-v5e").heap_loss_share
    assert held.count(math.ceil(512 * 32768 * holes)) >= 3


def biased_layers(biases: Any, w: Any, x: Any) -> Any:
    """New biases of an MLP whose layers share one kernel that is not trained."""

    def loss(biases: Any) -> Any:
        y = x
        for b in biases:
            y = jnp.tanh(y @ w + b)
        return jnp.sum(y * y)

    return [b - g for b, g in zip(biases, jax.grad(loss)(biases), strict=True)]


def plan_of_biased_layers() -> Any:
    biases = [jax.ShapeDtypeStruct((WIDTH,), "float32")] * LAYERS
    w, x = (jax.ShapeDtypeStruct((rows, WIDTH), "float32") for rows in (WIDTH, ROWS))
    pins = {"args/1": (None, None), "args/2": ("data",)}
    return autoshard.optimize_fn(biased_layers, (biases, w, x), {"data": 8}, hardware="h100", progress=False, pins=pins)


def test_sums_wait_on_gpu_where_the_budget_leaves_no_room_to_put_them_off() -> None:
    plan = plan_of_biased_layers()
    graph, one = plan.trail.graph, ROWS // 8 * WIDTH * 4
    sums = {op.id for op in order.sums_put_off(graph)}
    assert len(sums) == LAYERS and plan.decisions().sums == sums, "they would exceed what the plan says"

    def waited(room: int) -> frozenset[int]:
        held = Room(peak_bytes=64 * LAYERS * one, budget_bytes=64 * LAYERS * one + room)
        return decisions(graph, plan.placement, room=held, axis_sizes=(8,)).sums

    assert waited(0) == sums and waited(LAYERS * one) == frozenset()
    assert len(waited(2 * one)) == LAYERS - 2
    emptier = Course((Segment("", "backward", "compute", "", 0.5, 0.5),), (0.0, 0.5), {"activations": (one, 0)})
    room = Room(peak_bytes=one, course=emptier)
    assert len(decisions(graph, plan.placement, room=room, axis_sizes=(8,)).sums) == LAYERS - 1, "room for one later"
    assert order_of(graph, "gpu", waited(0)).sums and not order_of(graph, "gpu").sums


@needs_cuda
@pytest.mark.parametrize("summed", [True, False], ids=["scattered over devices", "cut for their update"])
def test_split_gradients_are_added_up_before_they_are_looked_at(summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a barrier, a look adds up one element's pieces only. The batch is sharded where gradients are summed."""
    mesh, graph = compile_only_mesh(parse_target("h100:8"), ("data",), (8,)), graph_of()
    results: dict[tuple[int, int], Any] = {}
    operands: dict[tuple[int, int], Any] = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            made = op.phase in ("backward", "update") if summed else op.phase == "update"
            held = op.primitive == "argument" or (made and op.primitive != "hub")
            rows = summed and graph.tensors[t].shape[:1] == (ROWS,)
            results[op.id, j] = (0,) if rows or (held and graph.tensors[t].shape == (WIDTH, WIDTH)) else (-1,)
        if op.primitive == "dot_general":
            whole = [i for i, t in enumerate(op.inputs) if not summed or graph.tensors[t].shape == (WIDTH, WIDTH)]
            operands |= {(op.id, i): (-1,) for i in whole}
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    temporaries = {}
    for platforms in (frozenset(), frozenset({"gpu"})):
        monkeypatch.setattr(manual, "SPLIT_PRODUCTS", platforms)
        run = planned_function(graph, Decisions(results=results, operands=operands), mesh, ("data",))
        batch = by_row if summed else NamedSharding(mesh, PartitionSpec())
        shardings = (*[by_row] * (len(graph.arguments) - 1), batch)
        lowered = jax.jit(run, in_shardings=shardings).lower(*jax.tree.leaves(shapes()))
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        temporaries[bool(platforms)] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[True] <= temporaries[False] - 4 * WIDTH * WIDTH * 4

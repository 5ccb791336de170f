"""A table that is looked up and that makes the logits, in mixed precision, on GPUs: one copy, freed in time."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import keras
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.apply import operations
from autoshard_ilp.enforce import order
from autoshard_ilp.enforce.order import order_of
from autoshard_ilp.graph import Graph
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda

VOCABULARY, WIDTH, HIDDEN, LENGTH, BATCH = 4096, 256, 8192, 128, 64
MESH = {"data": 2, "model": 4}
PINS: dict[str, Any] = {".*embeddings": (("data", "model"), None), "inputs": (("data", "model"),)}
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "pins": PINS, "progress": False}


def language_model(hidden: int = WIDTH) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        table = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH, name="tokens")
        ids = keras.Input((LENGTH,), dtype="int32")
        x = table(ids)
        for _ in range(2):
            y = keras.layers.Dense(hidden, "relu")(keras.layers.LayerNormalization()(x))
            x = x + keras.layers.Dense(WIDTH)(y)
        model = keras.Model(ids, table(keras.layers.LayerNormalization()(x), reverse=True))
    finally:
        keras.config.set_dtype_policy(before)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(language_model, MESH, hardware="h100", **OPTIONS)


def graph_of(plan: autoshard.Plan) -> Graph:
    assert plan.executable is not None
    return plan.executable.graph


def casts_of_the_table(plan: autoshard.Plan) -> int:
    casts = (op for op in graph_of(plan).ops if op.primitive == "convert_element_type")
    return sum(graph_of(plan).tensors[op.inputs[0]].shape == (VOCABULARY, WIDTH) == _shape(plan, op) for op in casts)


def _shape(plan: autoshard.Plan, op: Any) -> tuple[int, ...]:
    return graph_of(plan).tensors[op.outputs[0]].shape


def test_what_a_plan_counts_as_one_copy_depends_on_the_hardware(plan: autoshard.Plan) -> None:
    """The gradient of each use is cast as well. A question about other hardware is asked of that one's graph."""
    other = autoshard.optimize(language_model, MESH, hardware="tpu-v5e:2x4", **OPTIONS)
    assert casts_of_the_table(other) == casts_of_the_table(plan) + 1
    asked = plan.what_if(hardware="tpu-v5e:2x4")
    assert casts_of_the_table(asked) == casts_of_the_table(other)
    assert asked.cost.total_s == pytest.approx(other.cost.total_s, rel=1e-6)
    back = other.what_if(hardware="h100")
    assert back.one_copy and back.cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-6)
    found = autoshard.pareto(other, hardware="h100", budgets=[int(1.1 * plan.memory.peak_bytes)])
    assert found.points[0].total_s == pytest.approx(plan.cost.total_s, rel=1e-6)


@pytest.mark.slow
@needs_cuda
@pytest.mark.cuda
def test_the_table_is_gathered_once(plan: autoshard.Plan, tmp_path: Path) -> None:
    """A loaded plan has the same graph, and prices what was compiled as the plan that was saved."""
    gathered = [c for c in plan.collectives if c.kind == "all-gather" and "tokens" in c.tensor]
    assert sum(c.count * c.bytes_per_device for c in gathered) == VOCABULARY * WIDTH * 2 * 7 / 8
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json", language_model)
    found, same = loaded.verify("h100:8"), plan.verify("h100:8")
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)
    assert found.compiled_communication_seconds == pytest.approx(same.compiled_communication_seconds)
    assert found.compiled_communication_seconds


def test_the_backward_pass_waits_for_the_value_of_the_loss(plan: autoshard.Plan) -> None:
    """At the cotangent of each token's loss, which is small, not at that of the logits."""
    graph = graph_of(plan)
    (place,) = order._losses_first(graph)
    assert order._losses_first(graph)[place] == tuple(
        op.id
        for op in graph.ops
        if op.primitive == "reduce_sum" and op.phase == "forward" and _shape(plan, op) == (BATCH, LENGTH)
        and not order._needed_by_backward(graph)[op.outputs[0]]
    )  # fmt: skip
    carrier = graph.ops[place[0]]
    assert carrier.phase == "backward"
    assert graph.tensors[carrier.inputs[place[1]]].shape in ((BATCH, LENGTH), (BATCH, LENGTH, 1))
    assert place in order_of(graph, "gpu").waits
    assert place not in order_of(graph, "tpu").waits


@needs_cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_the_logits_are_not_held_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    build = functools.partial(language_model, HIDDEN)
    plan = autoshard.optimize(build, MESH, hardware="h100", remat="full", **OPTIONS)
    peaks = []
    for platforms in (frozenset(), frozenset({"gpu"})):
        monkeypatch.setattr(order, "LOSSES_FIRST", platforms)
        peaks.append(plan.verify("h100:8").compiled_peak_bytes)
    held, waited = peaks
    print(peaks)
    assert held is not None and waited is not None
    assert held - waited > 0.9 * BATCH * LENGTH * VOCABULARY * 2 / 8


@needs_cuda
@pytest.mark.cuda
def test_a_transposed_table_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = autoshard.optimize(language_model, MESH, hardware="h100", remat="selective", **OPTIONS)
    mesh = compile_only_mesh(parse_target("h100:8"), tuple(MESH), tuple(MESH.values()))
    waits = []
    for platforms in (frozenset(), frozenset({"gpu"})):
        monkeypatch.setattr(operations, "VIEWED_FREELY", platforms)
        text = plan.jit(mesh).lower(*plan.abstract_args(mesh)).as_text()
        waits.append(len(re.findall(r"call @_where", text)))
    print(waits)
    assert waits[1] == waits[0] - 1

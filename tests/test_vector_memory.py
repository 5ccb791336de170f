"""What TPUs keep on the chip: exact in the integer program, part of every figure, and absent elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.costs.tpu.onchip import FORWARD
from autoshard_ilp.models import load_model_factory
from autoshard_ilp.program import brute_force, minimum_capacity, solve
from autoshard_ilp.program.mathopt import solve_mathopt
from autoshard_ilp.program.model import Lifetimes, Program, SolverOptions
from compiled import needs_tpu
from program_cases import programs, random_program

MIB = 2**20


def credited(program: Program, size: int) -> tuple[Program, Program]:
    """A program with one more instant, at which its first lifetime is left; and the same with ``size`` on the chip."""
    lt = program.lifetimes
    ends = lt.end.copy()
    ends[0] = int(lt.end.max()) + 1
    plain = replace(program, lifetimes=Lifetimes(lt.is_edge, lt.owner, lt.start, ends))
    return plain, replace(plain, on_chip_bytes=size, on_chip_instants=int(ends.max()) - 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(memory=True), st.integers(1, 120), st.integers(0, 150))
def test_the_solver_is_exact_with_bytes_on_the_chip(program: Program, size: int, capacity: int) -> None:
    if not program.edges or not len(program.lifetimes.owner):
        return
    plain, program = credited(program, size)
    sizes = [range(len(n.costs)) for n in program.nodes]
    for choices in itertools.islice(itertools.product(*sizes), 20):
        usage, raw = program.usage_over_time(choices), plain.usage_over_time(choices)
        assert usage[-1] == raw[-1] >= 0
        np.testing.assert_array_equal(usage[:-1], raw[:-1] - size)
    program = replace(program, capacity=capacity)
    expected, found = brute_force(program), solve(program, SolverOptions())
    assert found.status == expected.status
    if expected.choices is not None:
        assert found.objective == pytest.approx(expected.objective, rel=1e-6, abs=1e-12)
        assert found.choices is not None and program.peak(found.choices) <= capacity
        lower, upper, _ = minimum_capacity(program, SolverOptions())
        least = min(program.peak(c) for c in itertools.product(*sizes) if np.isfinite(program.cost(c)))
        assert lower <= least <= upper and upper == least


def test_the_second_solver_has_bytes_on_the_chip_too() -> None:
    """At the least capacity: a byte less of it on the chip, and nothing would fit."""
    _, program = credited(random_program(5, 6, "tree", "plain", forbidden=0.0, memory=True), 20)
    least, _, _ = minimum_capacity(program, SolverOptions())
    program = replace(program, capacity=least)
    expected, found = brute_force(program), solve_mathopt(program, SolverOptions())
    assert expected.status == found.status == "optimal"
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)
    assert found.peak_bytes <= least


def model() -> Any:
    import keras

    net = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024, "relu") for _ in range(3))])
    net.compile(optimizer="sgd", loss="mse")
    return net


@pytest.mark.parametrize("kept", [0, 32 * MIB, 1024 * MIB])
def test_a_plan_counts_what_stays_on_the_chip(kept: int) -> None:
    profile = replace(autoshard.profile("tpu-v5e"), vector_memory_bytes=0, heap_loss_share=0.0)
    options: dict[str, Any] = {"batch_size": 8192, "progress": False}
    whole = autoshard.optimize(model, {"data": 4}, hardware=profile, **options)
    plan = autoshard.optimize(model, {"data": 4}, hardware=replace(profile, vector_memory_bytes=kept), **options)
    memory = plan.memory
    assert sum(memory.parts.values()) == memory.peak_bytes
    assert min(memory.parts.values()) >= 0
    stays = memory.parameters + memory.optimizer + memory.state + memory.inputs
    assert memory.peak_bytes == max(whole.memory.peak_bytes - kept, memory.peak_bytes if kept > 100 * MIB else 0)
    if kept > 100 * MIB:
        assert memory.peak_bytes - stays < 0.05 * memory.peak_bytes  # the logs that are returned
    assert max(plan.course.total_bytes()) == memory.peak_bytes
    again = autoshard.optimize(model, {"data": 4}, memory.peak_bytes, hardware=plan.trail.request.profile, **options)
    assert again.memory.peak_bytes <= memory.peak_bytes
    assert again.cost.total_s == pytest.approx(plan.cost.total_s)


def test_without_a_backward_pass_more_stays_on_the_chip() -> None:
    profile = replace(autoshard.profile("tpu-v5e"), heap_loss_share=0.0)
    options: dict[str, Any] = {"batch_size": 2**14, "mode": "predict", "progress": False, "pins": {"inputs": "data"}}
    off, on = (
        autoshard.optimize(model, {"data": 4}, hardware=replace(profile, vector_memory_bytes=kept), **options)
        for kept in (0, 13 * MIB)
    )
    assert off.memory.peak_bytes - on.memory.peak_bytes == round(FORWARD * 13 * MIB)


@needs_tpu
def test_what_one_loop_writes_for_the_next_stays_on_the_chip() -> None:
    """A stack is written to for as long as its loop runs, and never idle, however long that takes."""
    layers = keras.layers
    tokens = keras.Input((512,), dtype="int32")
    x = layers.Embedding(1000, 256)(tokens)
    net = keras.Model(tokens, layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(x)))
    options: dict[str, Any] = {"hardware": "tpu-v5e", "batch_size": 128, "mode": "predict", "progress": False}
    plan = autoshard.optimize(net, {"data": 8}, **options)
    assert plan.memory.activations < MIB, "8 MB are stacked by each device"
    assert plan.verify("tpu-v5e:2x4").compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)


@needs_tpu
@pytest.mark.slow
def test_what_a_lookup_cuts_out_of_a_tied_table_stays_until_the_logits() -> None:
    """An eighth of the rows on each device, in 32 bits: both are read as 16, but the table is not stored as that."""
    factory = load_model_factory("hub:gemma3_1b?layers=1", sequence_length=512)
    options: dict[str, Any] = {"hardware": "tpu-v5e", "batch_size": 8, "mode": "predict", "progress": False}
    plan = autoshard.optimize(factory, {"data": 2, "model": 4}, **options)
    assert plan.memory.gathered == 262144 // 8 * 1152 * 4
    assert plan.verify("tpu-v5e:2x4").compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.01)


@needs_tpu
def test_capped_logits_are_written_once() -> None:
    """134 MB on each device, as results of the step: the product that the cap reads is in the same kernel."""
    mixed = keras.DTypePolicy("mixed_bfloat16")
    tokens = keras.Input((512,), dtype="int32")
    table = keras_hub.layers.ReversibleEmbedding(131072, 512, logit_soft_cap=30.0, dtype=mixed)
    hidden = keras.layers.Dense(512, "relu", dtype=mixed)(table(tokens))
    net = keras.Model(tokens, table(hidden, reverse=True))
    options: dict[str, Any] = {"hardware": "tpu-v5e", "batch_size": 8, "mode": "predict", "progress": False}
    plan = autoshard.optimize(net, {"data": 2, "model": 4}, pins={".*embeddings": None}, **options)
    assert plan.verify("tpu-v5e:2x4").compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.01)


@needs_tpu
def test_what_is_gathered_for_capped_logits_is_written_nevertheless() -> None:
    def capped(x: Any, w: Any, kernel: Any) -> Any:
        return jnp.tanh((x @ w) @ kernel)

    shapes = (2**15, 4096), (4096, 4096), (4096, 2**14)
    args = tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    pins = {"args/0": ("data", None), "args/1": None, "args/2": (None, "data"), "outputs": (None, "data")}
    plan = autoshard.optimize_fn(capped, args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False)
    assert plan.memory.gathered == 2**15 * 4096 * 2, "268 MB do not fit on the chip"
    assert plan.verify("tpu-v5e:2x4").compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.01)


def test_what_waits_longer_than_copies_of_the_whole_chip_take_is_in_device_memory() -> None:
    """Logits take long to compute: what the layers before have made for the backward pass is not on the chip then."""
    import keras

    def build(n_classes: int) -> Any:
        hidden = [keras.layers.Dense(2048, "relu", dtype="mixed_bfloat16") for _ in range(2)]
        net = keras.Sequential([keras.Input((2048,)), *hidden, keras.layers.Dense(n_classes, dtype="mixed_bfloat16")])
        net.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return net

    def plan(n_classes: int, hardware: Any = "tpu-v5e") -> Any:
        options: dict[str, Any] = {"hardware": hardware, "batch_size": 8192, "progress": False}
        return autoshard.optimize(lambda: build(n_classes), {"data": 4}, pins={"inputs": "data"}, **options)

    rows, hidden = 8192 // 4, 2 * 2048  # examples of one device, bytes of one in a hidden layer
    short, long = plan(1024).memory, plan(65536).memory
    assert short.activations < 64 * 1024, "all on the chip, but for the logs that are returned"
    logits, gradient = rows * 65536 * 2, 65536 * 2048 * 2 // 4  # as whole tiles; holes come on top
    assert long.activations >= logits + gradient + 2 * rows * hidden, "what waits for the logits leaves the chip"
    slow = plan(1024, replace(autoshard.profile("tpu-v5e"), vector_idle_copies=0.1)).memory
    assert slow.activations >= 2 * rows * hidden, "where XLA thinks that all takes long, everything waits"


@needs_tpu
@pytest.mark.slow
def test_v6e_keeps_on_the_chip_what_is_counted() -> None:
    factory = load_model_factory("hub:bert_base?layers=2", sequence_length=512)
    options: dict[str, Any] = {"batch_size": 32, "sequence_length": 512, "progress": False}
    plan = autoshard.optimize(factory, {"data": 2, "model": 4}, hardware="tpu-v6e", **options)
    assert plan.verify("tpu-v6e:2x4").compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)


def test_no_step_holds_less_than_nothing() -> None:
    """What fits in vector memory leaves the arguments outside, and no less than nothing."""

    def outer(x: Any) -> Any:
        return ((x[:, None] * x[None, :]) ** 2).sum()

    plan = autoshard.optimize_fn(outer, (np.ones(64, np.float32),), {"data": 2}, hardware="tpu-v5e", progress=False)
    assert plan.memory.peak_bytes == 64 * 4
    larger = autoshard.optimize_fn(
        outer, (np.ones(2**14, np.float32),), {"data": 1}, hardware="tpu-v5e", progress=False
    )
    assert larger.memory.peak_bytes == 2**14 * 4


def test_only_tpus_have_it() -> None:
    assert autoshard.profile("tpu-v5e").vector_memory_bytes == 80 * MIB
    assert autoshard.profile("h100").vector_memory_bytes == 0


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_holes_in_the_heap_count_twice(mode: str) -> None:
    """Of what is held for a part of the step, where activations wait for a backward pass; not of arguments."""
    profile = replace(autoshard.profile("tpu-v5e"), vector_memory_bytes=4 * MIB)
    options: dict[str, Any] = {"batch_size": 8192, "progress": False, "mode": mode}
    peaks, passing = [], []
    for share in (0.0, 0.05):
        plan = autoshard.optimize(model, {"data": 4}, hardware=replace(profile, heap_loss_share=share), **options)
        parts = plan.memory.parts
        assert sum(parts.values()) == plan.memory.peak_bytes == max(plan.course.total_bytes())
        peaks.append(plan.memory.peak_bytes)
        passing.append(parts["activations"] + parts["gathered"] + parts["gradients"])
    assert passing[0] > 10 * MIB
    added = 0.1 * passing[0] if mode == "train" else 0
    assert peaks[1] - peaks[0] == pytest.approx(added, rel=1e-3, abs=64)


BLOCKS = [
    ("gelu", "mixed_bfloat16", (), 2),
    ("gelu", "mixed_bfloat16", (16,), 1),  # products of merged dimensions
    ("gelu", "float32", (), 1),
    ("silu", "mixed_bfloat16", (), 1),
]


def residual(activation: str, dtype: str, tokens: tuple[int, ...], n_blocks: int, width: int) -> Any:
    import keras

    x = inputs = keras.Input((*tokens, width))
    for _ in range(n_blocks):
        h = keras.layers.Dense(4 * width, activation, dtype=dtype)(x)
        x = keras.layers.Add(dtype=dtype)([x, keras.layers.Dense(width, dtype=dtype)(h)])
    net = keras.Model(inputs, keras.layers.Dense(8, dtype="float32")(x))
    net.compile(optimizer="sgd", loss="mse")
    return net


@pytest.mark.parametrize(("activation", "dtype", "tokens", "written"), BLOCKS)
def test_error_functions_written_for_the_backward_pass(
    activation: str, dtype: str, tokens: tuple[int, ...], written: int
) -> None:
    """Exact GELUs of 16 bits keep their error function beside the product's result; others are computed again."""
    plan = autoshard.optimize(
        lambda: residual(activation, dtype, tokens, 1, 512),
        {"data": 2},
        hardware="tpu-v5e",
        batch_size=64 if tokens else 1024,
        progress=False,
    )
    graph, stored = plan.trail.graph, plan.trail.costs.buffers.stored
    wide = [t for t in graph.tensors if t.shape[-1:] == (2048,) and len(t.shape) > 1 and stored[t.id]]
    wide = [t for t in wide if t.producer is not None and graph.ops[t.producer].primitive != "argument"]
    assert len([t for t in wide if graph.ops[t.producer].phase == "forward"]) == written

"""Optima that can be worked out by hand: textbook layouts where they win, and proofs by pins where they do not.

The toy hardware has no latency but ten microseconds per collective, and memory so fast that only arithmetic and
collectives count, so every total below is a closed form in bytes and FLOP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from keras import layers, ops

import autoshard_ilp as autoshard
from autoshard_ilp.costs.collectives import CollectiveCosts
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS, load_profile
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.program import brute_force
from profiles_for_tests import toy

CALL_SECONDS = 1e-5
FLOPS_PER_S = 1e11
HARDWARE = toy(FLOPS_PER_S, 1e18, call_seconds_by_kind=dict.fromkeys(COLLECTIVE_KINDS, CALL_SECONDS))
F32 = 4


def plan_of(
    model: Callable[[], keras.Model], mesh: dict[str, int], memory_budget: int | None = None, **options: Any
) -> autoshard.Plan:
    """A proved plan."""
    plan = autoshard.optimize(model, mesh, memory_budget, **{"hardware": HARDWARE, "progress": False, **options})
    assert plan.status == "optimal"
    assert plan.gap == 0.0
    assert plan.cost.total_s == pytest.approx(plan.trail.program.cost(plan.trail.solution.choices), rel=1e-9)
    return plan


def tensors_moved(plan: autoshard.Plan) -> list[tuple[str, tuple[str, ...], float]]:
    """(kind, mesh axes, executions) of every collective, without scalars such as the loss."""
    return sorted((c.kind, c.mesh_axes, c.count) for c in plan.collectives if not c.tensor.endswith("[]"))


def seconds(
    mesh: dict[str, int], kind: str, payload_bytes: float, axes: Sequence[str] | None = None, hardware: Any = HARDWARE
) -> float:
    """Closed form of one collective over ``axes`` (None: all)."""
    names = tuple(mesh)
    costs = CollectiveCosts(MeshLinks.create(hardware, names, tuple(mesh.values())))
    return costs.seconds(kind, tuple(names.index(a) for a in axes or names), payload_bytes)


def saved(mesh: dict[str, int], kind: str, members: int, hardware: Any = HARDWARE) -> float:
    """Fixed seconds that one of so many combined collectives over all axes does not pay."""
    names = tuple(mesh)
    costs = CollectiveCosts(MeshLinks.create(hardware, names, tuple(mesh.values())))
    return (1 - 1 / members) * costs.alpha_beta(kind, tuple(range(len(names))))[0]


def mlp(width: int, hidden: int, before: int | None = None, optimizer: str = "sgd") -> Callable[[], keras.Model]:
    """Builder of ``[before ->] width -> hidden -> width`` without biases."""

    def build() -> keras.Model:
        x = inputs = keras.Input((before or width,), name="x")
        if before:
            x = layers.Dense(width, use_bias=False, name="first")(x)
        x = layers.Dense(hidden, use_bias=False, activation="relu", name="up")(x)
        model = keras.Model(inputs, layers.Dense(width, use_bias=False, name="down")(x))
        model.compile(optimizer=optimizer, loss="mse")
        return model

    return build


# -- one axis --


def test_small_weights_and_a_large_batch_are_data_parallel() -> None:
    batch, width, hidden, mesh = 4096, 32, 64, {"data": 4}
    plan = plan_of(mlp(width, hidden), mesh, batch_size=batch)
    assert tensors_moved(plan) == [("all-reduce", ("data",), 1.0)] * 2
    assert {c.tensor for c in plan.collectives if not c.tensor.endswith("[]")} == {"float32[32,64]", "float32[64,32]"}
    assert plan.specs["up/kernel"] == P() and plan.specs["down/kernel"] == P()
    assert plan.specs["inputs/x"] == P("data") and plan.specs["targets/down"] == P("data")

    one_matmul = 2 * batch * width * hidden / FLOPS_PER_S  # five of them: the first layer passes no gradient on
    weights, activations = F32 * width * hidden, F32 * batch * width
    loss = seconds(mesh, "all-reduce", F32)
    data_parallel = (
        5 * one_matmul / 4 + 2 * (seconds(mesh, "all-reduce", weights) - saved(mesh, "all-reduce", 2)) + loss
    )
    whole = 5 * one_matmul
    megatron = 5 * one_matmul / 4 + seconds(mesh, "all-reduce", activations)
    fsdp = 5 * one_matmul / 4 + loss + 2 * seconds(mesh, "reduce-scatter", weights)
    fsdp += 2 * seconds(mesh, "all-gather", weights)  # the copies of the forward pass serve the backward pass
    fsdp -= 2 * (saved(mesh, "reduce-scatter", 2) + saved(mesh, "all-gather", 2))
    assert data_parallel < min(whole, megatron, fsdp)
    assert plan.cost.total_s == pytest.approx(data_parallel, rel=1e-5)

    sharded = plan_of(
        mlp(width, hidden), mesh, batch_size=batch, pins={"up/kernel": (None, "data"), "down/kernel": ("data",)}
    )
    assert sharded.cost.total_s == pytest.approx(fsdp, rel=1e-5)
    everything_whole = plan_of(mlp(width, hidden), mesh, batch_size=batch, pins={"kernel|inputs|targets": ()})
    assert everything_whole.cost.total_s == pytest.approx(data_parallel, rel=1e-5), "whole inputs are sliced for free"


def test_large_weights_and_a_small_batch_are_column_then_row_parallel() -> None:
    batch, before, width, hidden, mesh = 16, 24, 256, 1024, {"model": 4}
    model = mlp(width, hidden, before)
    plan = plan_of(model, mesh, batch_size=batch)
    assert plan.specs["up/kernel"] == P(None, "model")
    assert plan.specs["down/kernel"] == P("model")
    assert tensors_moved(plan) == [("all-reduce", ("model",), 1.0)] * 2
    assert {c.operation for c in plan.collectives} == {"down/dot_general", "up/dot_general"}

    block, first = 2 * batch * width * hidden / FLOPS_PER_S, 2 * batch * before * width / FLOPS_PER_S
    weights, activations = F32 * width * hidden, F32 * batch * width
    megatron = 6 * block / 4 + 2 * first + 2 * seconds(mesh, "all-reduce", activations)
    data_parallel = (6 * block + 2 * first) / 4 + 2 * seconds(mesh, "all-reduce", weights)
    whole = 6 * block + 2 * first
    assert megatron < min(data_parallel, whole)
    assert plan.cost.total_s == pytest.approx(megatron, rel=1e-5)

    for pins in (
        {"up/kernel": ("model",), "down/kernel": (None, "model")},
        {"kernel": ()},
        {"inputs|targets": "model"},
    ):
        assert plan_of(model, mesh, batch_size=batch, pins=pins).cost.total_s > plan.cost.total_s * (1 + 1e-6)


def deep(width: int, depth: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        x = inputs = keras.Input((width,), name="x")
        for i in range(depth):
            x = layers.Dense(width, use_bias=False, name=f"dense_{i}")(x)
        model = keras.Model(inputs, x)
        model.compile(optimizer=keras.optimizers.Adam(amsgrad=True), loss="mse")
        return model

    return build


def test_a_budget_below_the_replicated_state_shards_weights_and_slots() -> None:
    batch, width, depth, mesh = 1024, 256, 3, {"data": 4}
    weight = F32 * width * width
    budget = int(11.5 * weight)  # the state is 12 weights, or 3 when all of it is sharded
    whole = plan_of(deep(width, depth), mesh, batch_size=batch, pins={"kernel": ()})
    assert whole.memory.peak_bytes > budget
    assert {kind for kind, _, _ in tensors_moved(whole)} == {"all-reduce"}
    tight = plan_of(deep(width, depth), mesh, budget, batch_size=batch)
    assert tight.memory.peak_bytes <= budget
    slots = {p: spec for p, spec in tight.specs.items() if p.startswith("adam") and "kernel" in p}
    assert len(slots) == 3 * depth and all("data" in spec for spec in slots.values())
    assert any("data" in spec for p, spec in tight.specs.items() if p.endswith("/kernel"))
    moved = tensors_moved(tight)
    times = {k: sum(n for kind, _, n in moved if kind == k) for k in ("all-gather", "reduce-scatter", "all-reduce")}
    assert sum(times.values()) == len(moved)
    # A scattered gradient needs room next to its partial sums; where that room is missing it is summed in place.
    assert times["reduce-scatter"] + times["all-reduce"] == depth > times["all-reduce"]
    assert times["all-gather"] >= depth, "every sharded slot or weight comes back whole, once or once per pass"
    matmuls = (3 * depth - 1) * 2 * batch * width * width / 4 / FLOPS_PER_S
    collectives = sum(count * seconds(mesh, kind, weight) for kind, count in times.items())
    # Gradients are reduced together, and weights gathered together where they are gathered once.
    members = {**times, "all-gather": depth}
    collectives -= sum(count * saved(mesh, kind, depth) for kind, count in members.items())
    assert tight.cost.total_s == pytest.approx(matmuls + collectives + seconds(mesh, "all-reduce", F32), rel=1e-5)


class SharedWeight(layers.Layer):
    """One matrix used forwards on one input and transposed on another."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(name="shared")
        self.kernel = self.add_weight(shape=(rows, columns), name="kernel")

    def call(self, inputs: Any) -> Any:
        return [ops.matmul(inputs[0], self.kernel), ops.matmul(inputs[1], ops.transpose(self.kernel))]

    def compute_output_shape(self, shapes: Any) -> Any:
        rows, columns = self.kernel.shape
        return [(shapes[0][0], columns), (shapes[1][0], rows)]


@pytest.mark.parametrize(("rows", "columns", "spec"), [(64, 256, P(None, "model")), (256, 64, P("model"))])
def test_a_weight_shared_by_two_matmuls_takes_the_cheaper_total(rows: int, columns: int, spec: Any) -> None:
    """One matmul wants rows, the other columns; memory forbids the whole matrix, so one of them sums partials."""

    def build() -> keras.Model:
        a, b = keras.Input((rows,), name="a"), keras.Input((columns,), name="b")
        return keras.Model([a, b], SharedWeight(rows, columns)([a, b]))

    mesh, budget = {"model": 4}, int(0.6 * F32 * rows * columns)
    plan = plan_of(build, mesh, budget, batch_size=1, mode="predict")
    oracle = brute_force(plan.trail.program)
    assert plan.cost.total_s == pytest.approx(oracle.objective, rel=1e-9)
    assert plan.specs["shared/kernel"] == spec
    matmuls = 2 * 2 * rows * columns / 4 / FLOPS_PER_S
    partial = F32 * min(rows, columns)
    assert plan.cost.total_s == pytest.approx(matmuls + seconds(mesh, "reduce-scatter", partial), rel=1e-4)
    other = P("model") if spec != P("model") else P(None, "model")
    pinned = plan_of(build, mesh, budget, batch_size=1, mode="predict", pins={"kernel": other})
    dearer = matmuls + seconds(mesh, "reduce-scatter", F32 * max(rows, columns))
    assert plan.cost.total_s < pinned.cost.total_s <= dearer * (1 + 1e-4)


# -- several axes, and larger blocks --


def test_the_larger_bytes_go_over_the_faster_axis() -> None:
    mesh = {"dcn": 2, "ici": 8}  # two nodes of eight
    slow_network = {"network_bytes_per_s": 1e10, "hop_seconds": 0.0, "network_hop_seconds": 0.0}
    hardware = dataclasses.replace(load_profile("h100"), name="slow network", **slow_network)
    batch, width, hidden = 2048, 1024, 4096
    model = mlp(width, hidden, 64)
    plan = plan_of(model, mesh, batch_size=batch, hardware=hardware)
    sent = dict.fromkeys(mesh, 0.0)
    for c in plan.collectives:
        for axis in c.mesh_axes:
            sent[axis] = max(sent[axis], c.bytes_per_device)
    assert sent["ici"] > 2 * sent["dcn"] > 0
    weights = F32 * width * hidden
    fast, slow = (seconds(mesh, "all-reduce", weights, [axis], hardware) for axis in ("ici", "dcn"))
    assert fast < slow

    swap = {"dcn": "ici", "ici": "dcn"}
    specs = {p: plan.specs[p] for p in ("up/kernel", "down/kernel", "inputs/x", "targets/down")}
    assert any(specs.values())
    swapped = {p: P(*(swap.get(entry, entry) for entry in spec)) for p, spec in specs.items()}
    other = plan_of(model, mesh, batch_size=batch, hardware=hardware, pins=swapped)
    assert other.cost.total_s > plan.cost.total_s


def transformer(width: int, heads: int, tokens: int) -> Callable[[], keras.Model]:
    """Builder of one pre-norm block without norms, after a first layer, so that its input has a gradient."""

    def build() -> keras.Model:
        inputs = keras.Input((tokens, 16), name="x")
        x = layers.Dense(width, use_bias=False, name="first")(inputs)
        attention = layers.MultiHeadAttention(heads, width // heads, use_bias=False, flash_attention=False, name="mha")
        x = x + attention(x, x)
        h = layers.Dense(4 * width, use_bias=False, activation="relu", name="up")(x)
        x = x + layers.Dense(width, use_bias=False, name="down")(h)
        model = keras.Model(inputs, x)
        model.compile(optimizer="sgd", loss="mse")
        return model

    return build


def test_a_transformer_block_with_large_weights_is_split_by_heads_and_columns() -> None:
    batch, tokens, width, heads, mesh = 4, 4, 256, 8, {"model": 4}
    model = transformer(width, heads, tokens)
    plan = plan_of(model, mesh, batch_size=batch)
    for name in ("query", "key", "value"):
        assert plan.specs[f"mha/{name}/kernel"] == P(None, "model")  # (width, heads, width per head)
    assert plan.specs["mha/attention_output/kernel"] == P("model")  # (heads, width per head, width)
    assert plan.specs["up/kernel"] == P(None, "model")
    assert plan.specs["down/kernel"] == P("model")
    activations = F32 * batch * tokens * width
    forward = [c for c in plan.collectives if c.operation in ("mha/attention_output/dot_general", "down/dot_general")]
    assert [c.kind for c in forward] == ["all-reduce"] * 2
    # Backwards the block's two column-parallel inputs: the MLP's gradient is summed at once; those of query, key and
    # value are summed one by one onto shards, because a sum of partial results is no layout, then gathered once.
    reduce, scatter, gather = (seconds(mesh, k, activations) for k in ("all-reduce", "reduce-scatter", "all-gather"))
    textbook = 4 * reduce
    assert plan.cost.communication_s <= 3 * reduce + 3 * scatter + gather + 1e-9
    assert plan.cost.communication_s >= textbook - 1e-9
    for pins in ({"kernel": ()}, {"query/kernel": ("model",)}, {"inputs/x|targets": "model"}):
        assert plan_of(model, mesh, batch_size=batch, pins=pins).cost.total_s > plan.cost.total_s * (1 + 1e-6)


class Experts(layers.Layer):
    """Top-1 mixture of experts with grouped dispatch, as einsums (GShard, Lepikhin et al. 2020)."""

    def __init__(self, experts: int, capacity: int, hidden: int) -> None:
        super().__init__(name="moe")
        self.experts, self.capacity, self.hidden = experts, capacity, hidden

    def build(self, shape: Any) -> None:
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.up = self.add_weight(shape=(self.experts, width, self.hidden), name="up")
        self.down = self.add_weight(shape=(self.experts, self.hidden, width), name="down")

    def call(self, x: Any) -> Any:  # (groups, tokens, width)
        gates = ops.softmax(ops.matmul(x, self.router))
        chosen = ops.one_hot(ops.argmax(gates, axis=-1), self.experts)
        slot = ops.one_hot(ops.cast(ops.cumsum(chosen, axis=1) * chosen - 1, "int32"), self.capacity)
        dispatch = slot * ops.expand_dims(chosen, -1)  # (groups, tokens, experts, capacity)
        sent = ops.einsum("gsec,gsd->egcd", dispatch, x)
        h = ops.relu(ops.einsum("egcd,edh->egch", sent, self.up))
        back = ops.einsum("egch,ehd->egcd", h, self.down)
        return ops.einsum("gsec,egcd->gsd", dispatch * ops.expand_dims(gates, -1), back)


def mixture(experts: int, groups: int, tokens: int, width: int, hidden: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((tokens, width), name="x")
        x = layers.Dense(width, use_bias=False, name="first")(inputs)
        model = keras.Model(inputs, x + Experts(experts, 2 * tokens // experts, hidden)(x))
        model.compile(optimizer="sgd", loss="mse")
        return model

    return build


def test_many_experts_go_over_the_axis_of_the_tokens_with_all_to_all() -> None:
    groups, tokens, experts, width, hidden, mesh = 16, 64, 16, 64, 512, {"data": 8}
    model = mixture(experts, groups, tokens, width, hidden)
    plan = plan_of(model, mesh, batch_size=groups)
    assert plan.specs["moe/up"] == P("data") and plan.specs["moe/down"] == P("data")
    assert plan.specs["inputs/x"] == P("data")
    moved = tensors_moved(plan)
    assert sum(count for kind, _, count in moved if kind == "all-to-all") >= 2
    experts_bytes = F32 * experts * width * hidden
    sent = max(c.bytes_per_device for c in plan.collectives)
    assert sent < experts_bytes / 8, "no expert travels"
    for pins in ({"moe/(up|down)": ()}, {"moe/up": (None, None, "data"), "moe/down": (None, "data")}, {"inputs/x": ()}):
        assert plan_of(model, mesh, batch_size=groups, pins=pins).cost.total_s >= plan.cost.total_s * (1 - 1e-9)
    replicated = plan_of(model, mesh, batch_size=groups, pins={"moe/(up|down)": ()})
    assert replicated.cost.total_s > plan.cost.total_s
    assert replicated.cost.communication_s >= 2 * seconds(mesh, "reduce-scatter", experts_bytes)


def test_fewer_key_value_heads_than_devices_is_valid_and_priced() -> None:
    mesh = {"model": 4}

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((8, 64), name="x")
        attention = layers.GroupQueryAttention(16, 8, 2, use_bias=False, flash_attention=False, name="gqa")
        x = layers.Dense(64, use_bias=False, name="first")(inputs)
        model = keras.Model(inputs, x + attention(x, x))
        model.compile(optimizer="sgd", loss="mse")
        return model

    pins = {"gqa/query/kernel": (None, "model"), "gqa/.*output/kernel": ("model",)}
    plan = plan_of(build, mesh, batch_size=4, pins=pins)
    assert plan.specs["gqa/query/kernel"] == P(None, "model")
    assert "model" not in plan.specs["gqa/key/kernel"][1:2], "two heads cannot go over four devices"
    assert plan.cost.communication_s > 0
    free = plan_of(build, mesh, batch_size=4)
    assert free.cost.total_s <= plan.cost.total_s

    batch = tuple(np.random.default_rng(i).normal(size=(4, 8, 64)).astype("float32") for i in range(2))
    _, planned = plan.jit()(plan.init_state(), batch)
    _, reference = jax.jit(plan.executable.traced.fn)(jax.device_get(plan.init_state()), batch)
    assert float(planned["loss"]) == pytest.approx(float(reference["loss"]), rel=1e-5)

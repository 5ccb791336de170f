"""What the memory budget decides, seen in the plan and in the compiled program: gathers, and optimizer states."""

from __future__ import annotations

import keras
import pytest
from jax.sharding import PartitionSpec as P
from keras import layers

import autoshard_ilp as autoshard
from compiled import needs_cuda
from profiles_for_tests import toy

MESH = {"data": 8}
WIDTH, DEPTH = 4096, 6  # weights beyond 30 MB, up to which XLA:GPU combines collectives


def deep(optimizer: str = "sgd") -> keras.Model:
    x = inputs = keras.Input((WIDTH,), name="x")
    for i in range(DEPTH):
        x = layers.Dense(WIDTH, use_bias=False, activation="tanh", name=f"dense_{i}")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fsdp(budget: int | None) -> autoshard.Plan:
    """Weights are sharded by a pin, as is the batch: how often they are gathered is left to the program."""
    return autoshard.optimize(
        deep,
        MESH,
        budget,
        hardware=toy(1e13, 1e13),
        pins={"kernel": "data", "inputs|targets": "data"},
        batch_size=16384,
        remat="never",
        progress=False,
    )


def gathered_weights(plan: autoshard.Plan) -> float:
    return sum(c.count for c in plan.collectives if c.kind == "all-gather" and c.tensor.endswith("kernel"))


@pytest.fixture(scope="module")
def once_and_again() -> tuple[autoshard.Plan, autoshard.Plan]:
    loose = fsdp(None)
    weight = WIDTH * WIDTH * 4
    return loose, fsdp(loose.memory.peak_bytes - 3 * weight)


def test_a_tight_budget_gathers_again(once_and_again: tuple[autoshard.Plan, autoshard.Plan]) -> None:
    once, again = once_and_again
    assert gathered_weights(once) == DEPTH, "the loose budget gathers every weight once and holds it"
    assert DEPTH < gathered_weights(again) < 2 * DEPTH, "the tight one gathers some again, and no more than it must"
    assert again.cost.total_s > once.cost.total_s
    assert again.memory.peak_bytes <= again.memory.budget_bytes < once.memory.peak_bytes
    assert again.memory.gathered < once.memory.gathered


@needs_cuda
def test_the_compiler_confirms_it(once_and_again: tuple[autoshard.Plan, autoshard.Plan]) -> None:
    """On GPU: XLA:CPU has no reduce-scatter, and holds whole gradients instead."""
    once, again = (plan.verify("h100:8") for plan in once_and_again)
    budget = once_and_again[1].memory.budget_bytes
    assert budget is not None and once.compiled_peak_bytes is not None and again.compiled_peak_bytes is not None
    # optimize(verify=True) is there to stay below the budget itself.
    assert again.compiled_peak_bytes <= 1.01 * budget < once.compiled_peak_bytes
    saved = once_and_again[0].memory.peak_bytes - once_and_again[1].memory.peak_bytes
    assert once.compiled_peak_bytes - again.compiled_peak_bytes > 0.8 * saved
    counts = [sum(r.compiled_bytes_per_device for r in v.rows_by_collective if r.kind == "all-gather")
              for v in (once, again)]  # fmt: skip
    shard = 7 * WIDTH * WIDTH * 4 // 8  # bytes one device sends in one gather
    assert counts[1] - counts[0] == (gathered_weights(once_and_again[1]) - DEPTH) * shard


# -- optimizer states sharded further than their weight


@pytest.fixture(scope="module")
def zero1() -> autoshard.Plan:
    """Whole weights by a pin; gradients, slots and the update are left to the program."""
    return autoshard.optimize(
        lambda: deep("adam"), MESH, hardware=toy(1e13, 1e11), pins={r"^dense_\d/kernel$": (), "inputs|targets": "data"},
        batch_size=65536, remat="never", progress=False,
    )  # fmt: skip


def test_slots_are_sharded_where_their_weight_is_whole(zero1: autoshard.Plan) -> None:
    weights = [leaf.path for leaf in zero1.arguments if leaf.role == "parameter"]
    slots = [x for x in zero1.arguments if x.role == "optimizer" and x.shape == (WIDTH, WIDTH)]
    assert len(slots) == 2 * DEPTH and len(weights) == DEPTH
    assert all(zero1.specs[path] == P() for path in weights)
    assert all("data" in tuple(zero1.specs[slot.path]) for slot in slots)
    kinds = {c.kind for c in zero1.collectives if c.bytes_per_device > 1e6}
    assert kinds == {"reduce-scatter", "all-gather"}, "gradients are scattered, new weights gathered"


@needs_cuda
def test_the_compiled_update_works_on_shards(zero1: autoshard.Plan) -> None:
    seen = zero1.verify("h100:8")
    kinds = {row.kind for row in seen.rows_by_collective if row.compiled_bytes_per_device > 1e6}
    assert kinds == {"reduce-scatter", "all-gather"}
    weight = WIDTH * WIDTH * 4
    state = DEPTH * (weight + 2 * weight // 8)
    batch = 2 * 65536 * WIDTH * 4 // 8
    assert seen.memory["argument"] == pytest.approx(state + batch, rel=0.01)
    assert seen.unplanned_bytes_per_device < 0.01 * seen.compiled_bytes_per_device

"""Steps that cannot fit are known by their buffers alone, and priced only when someone asks."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp import profile
from autoshard_ilp.costs.least import least_bytes
from autoshard_ilp.search import attempt
from zoo import ZOO

ROOM = autoshard.SolverOptions(time_limit=2)
MESH = {"data": 4}


def without_chip_memory(name: str) -> Any:
    """These models are so small that all of them would be there."""
    return dataclasses.replace(profile(name), vector_memory_bytes=0)


@pytest.mark.parametrize("name", ["resnet", "lstm", *(pytest.param(n, marks=pytest.mark.slow) for n in ZOO)])
def test_no_program_counts_less(name: str) -> None:
    case, inputs = ZOO[name], {}
    if case.needs_inputs:
        inputs = {"inputs": case.make_batch(np.random.default_rng(0))[0]}
    options: dict[str, Any] = {"batch_size": 8, "sequence_length": case.sequence_length, "solver": ROOM, **inputs}
    plan = autoshard.optimize(case.build, MESH, hardware="h100", **options)
    for chip in (profile("h100"), without_chip_memory("tpu-v5e"), without_chip_memory("tpu-v5p"), profile("cpu-host")):
        trail: Any = plan.what_if(hardware=chip).trail
        bound = least_bytes(trail.graph, chip, trail.costs.buffers, 4)
        least = trail.built.program.least_peak()
        assert 0 < bound <= least, chip.name
        if chip.name == "h100" and name in ("resnet", "llama"):  # no loops; TPUs pad tensors as small as these
            assert bound > 0.5 * least, "a bound that says nothing"


def deep() -> keras.Model:
    layers = [keras.layers.Dense(256, activation="gelu") for _ in range(6)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    model.compile(optimizer="sgd", loss="mse")
    return model


def deep_plan(budget: int, **options: Any) -> autoshard.Plan:
    return autoshard.optimize(deep, MESH, budget, batch_size=8192, hardware="h100", **options)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recomputation of the steps that were built."""
    found, build = list[str](), attempt.build

    def noted(step: Any, *args: Any) -> Any:
        found.append(step.remat)
        return build(step, *args)

    monkeypatch.setattr(attempt, "build", noted)
    return found


def test_a_step_that_cannot_fit_is_not_priced(priced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    free = deep_plan(10**9, remat="never")
    budget = int(0.55 * free.memory.peak_bytes)
    priced.clear()
    plan = deep_plan(budget)
    assert plan.remat_policy != "never" and "never" not in priced
    failure = plan.trail.failures[0]  # type: ignore[union-attr]
    assert failure.step.remat == "never" and budget < failure.least_bytes <= free.memory.peak_bytes

    again = plan.what_if(memory_budget=budget + 1)
    assert "never" not in priced, "nor by a question that it cannot answer"
    assert again.cost.total_s <= plan.cost.total_s * (1 + 1e-9)
    roomy = plan.what_if(memory_budget=free.memory.peak_bytes)
    assert "never" in priced and roomy.remat_policy == "never"
    assert roomy.cost.total_s == pytest.approx(free.cost.total_s)

    monkeypatch.setattr(attempt, "needed", lambda *_: 0)  # as if nothing were known before prices
    same = deep_plan(budget)
    assert "never" in priced
    assert (same.cost.total_s, same.remat_policy) == (pytest.approx(plan.cost.total_s), plan.remat_policy)


def test_the_smallest_budget_is_told_all_the_same(priced: list[str]) -> None:
    with pytest.raises(autoshard.InfeasibleError) as caught:
        deep_plan(5_000_000, remat="never", solver=ROOM)
    error = caught.value
    assert priced == ["never"] and error.contributors
    assert deep_plan(error.minimum_budget, remat="never").memory.peak_bytes <= error.minimum_budget
    with pytest.raises(autoshard.InfeasibleError):
        deep_plan(error.minimum_budget_bound - 1, remat="never", solver=ROOM)


def test_what_needs_more_than_another_policy_is_not_asked_for_its_smallest_budget(priced: list[str]) -> None:
    with pytest.raises(autoshard.InfeasibleError) as caught:
        deep_plan(5_000_000, solver=ROOM)
    assert "never" not in priced and caught.value.minimum_budget > 5_000_000

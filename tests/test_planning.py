"""Planning under several rematerialisation policies: what is done once for all, and what is put back afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp import program
from autoshard_ilp.garbage import collector_paused, old_objects_left
from autoshard_ilp.graph import flatten
from autoshard_ilp.planning import LAST_PLAN_PART, PLAN_PART, Expected
from autoshard_ilp.program.kernels import loading
from autoshard_ilp.program.nets import core
from autoshard_ilp.progress import Progress
from autoshard_ilp.search import anyplan, attempt, infeasible
from autoshard_ilp.search.rematsearch import search


def deep(count: int = 8) -> keras.Model:
    layers = [keras.layers.Dense(256, activation="tanh") for _ in range(count)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_the_step_is_flattened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policies differ in what they recompute, not in the step."""
    calls, whole = list[int](), flatten.build_graph

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return whole(*args, **options)

    mesh, options = {"data": 2}, {"batch_size": 4096, "hardware": "h100"}
    model = functools.partial(deep, 5)
    free = autoshard.optimize(model, mesh, remat="never", **options)  # type: ignore[arg-type]
    monkeypatch.setattr(flatten, "build_graph", counted)
    plan = autoshard.optimize(model, mesh, int(0.7 * free.memory.peak_bytes), **options)  # type: ignore[arg-type]
    assert any("recomputation" in note.lower() for note in plan.notes), "more than one policy was tried"
    assert len(calls) == 1


def test_a_policy_that_is_taken_up_again_is_not_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = autoshard.optimize(functools.partial(deep, 2), {"data": 2}, batch_size=64, hardware="h100")
    trail = plan.trail
    assert trail is not None and plan.executable is not None
    expected = Expected(("never", "selective"))
    expected.learn("never", plan)
    assert expected.before("selective") is None and expected.before("never") is plan
    monkeypatch.setattr(attempt, "read", None)
    more: dict[str, Any] = {"mode": plan.mode, "batch_size": plan.batch_size, "before": plan}
    again = attempt.attempt(plan.executable, trail.infos, trail.request, Progress(False), **more)
    assert isinstance(again, autoshard.Plan) and again.cost.total_s == plan.cost.total_s
    assert again.trail is not None and again.trail.costs is trail.costs


def test_compiling_kernels_takes_no_time_from_other_policies() -> None:
    """Once per machine it would: a first plan would be a worse one."""
    limit, asked = 0.8, list[float]()

    def tried(policy: str, seconds: float, cutoff: float, dear: float) -> Any:
        asked.append(seconds)
        loading.load(lambda: time.sleep(0.75 * limit))
        return SimpleNamespace(solution=SimpleNamespace(status="feasible", lower_bound=0.0, choices=None, report={}))

    search(("selective", "full"), tried, lambda failed: 1, limit)
    assert asked[:2] == pytest.approx([limit, limit], rel=0.2)


def test_the_collector_is_as_before() -> None:
    """After a failure too."""
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), old_objects_left():
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 10**6
        raise ZeroDivisionError
    assert gc.get_threshold() == before


def test_what_is_made_while_the_collector_rests_is_old_afterwards() -> None:
    """It is not walked at once; what somebody has frozen stays so."""
    for frozen in (False, True):
        (gc.freeze if frozen else gc.unfreeze)()
        try:
            with collector_paused():
                assert not gc.isenabled()
                made = [[number] for number in range(10)]
            assert gc.isenabled() and bool(gc.get_freeze_count()) == frozen
            old = {id(thing) for thing in gc.get_objects(generation=2)}
            assert all((id(thing) in old) != frozen for thing in made)
        finally:
            gc.freeze()  # as all tests have it


def test_a_plan_is_there_however_little_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a few messages choose or, before there is any, whole tensors; where these do not fit, an error says so."""
    limit = autoshard.SolverOptions(time_limit=1e-6)
    options: dict[str, Any] = {"batch_size": 64, "hardware": "h100", "solver": limit, "remat": "never"}
    plan = autoshard.optimize(deep, {"data": 2, "model": 2}, **options)
    assert plan.status == "feasible" and plan.cost.total_s > 0

    def nothing(self: Any, net: Any, upper: float) -> None:
        return None

    monkeypatch.setattr(core.Descent, "_any_plan", nothing)
    whole = autoshard.optimize(deep, {"data": 2, "model": 2}, **options)
    assert whole.status == "feasible" and not any(any(spec) for spec in whole.specs.values())
    assert whole.cost.communication_s == 0.0 and whole.lower_bound <= whole.cost.total_s
    with pytest.raises(autoshard.InfeasibleError, match="time"):
        autoshard.optimize(deep, {"data": 2, "model": 2}, int(0.9 * whole.memory.peak_bytes), **options)


def test_where_the_solver_finds_nothing_a_plan_by_hand_is_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver is made to end without a plan, unless it starts from one or has little to decide."""
    mesh, shallow = {"data": 2, "model": 2}, functools.partial(deep, 4)
    options: dict[str, Any] = {"batch_size": 256, "hardware": "h100", "remat": "never"}
    by_hand = autoshard.baseline(shallow, mesh, "fsdp", **options)
    enough = int(1.02 * by_hand.memory.peak_bytes)
    solve, restricted = program.solve, []

    def finds_little(problem: Any, options: Any, **keywords: Any) -> Any:
        found = solve(problem, options, **keywords)
        allowed = sum(int(np.isfinite(node.costs).sum()) for node in problem.nodes)
        if keywords.get("hint") is not None or allowed < sum(len(node.costs) for node in problem.nodes):
            restricted.append(allowed)
            return found
        return replace(found, status="feasible", choices=None, objective=math.inf, lower_bound=0.0, report={})

    monkeypatch.setattr(program, "solve", finds_little)
    monkeypatch.setattr(anyplan, "_holding_least", lambda *_: pytest.fail("a plan was there"))
    plan = autoshard.optimize(shallow, mesh, enough, **options)
    assert restricted and plan.memory.peak_bytes <= enough
    assert any("dividing all weights" in note for note in plan.notes)
    assert plan.cost.total_s <= 1.0001 * by_hand.cost.total_s


@pytest.mark.parametrize("remat", [pytest.param("never", marks=pytest.mark.slow), "auto"])
def test_what_fits_is_found_by_its_memory_where_the_solver_finds_nothing(
    remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solver is made to end without a plan, unless it starts from one."""
    mesh, limit, shallow = {"data": 2, "model": 2}, autoshard.SolverOptions(time_limit=2), functools.partial(deep, 4)
    options: dict[str, Any] = {"batch_size": 256, "hardware": "h100", "remat": remat, "solver": limit}
    free = autoshard.optimize(shallow, mesh, **options)
    with pytest.raises(autoshard.InfeasibleError) as error:
        autoshard.optimize(shallow, mesh, 1000, **options)
    assert error.value.minimum_budget is not None
    enough = int(1.2 * error.value.minimum_budget)
    assert enough < free.memory.peak_bytes
    solve = program.solve

    def finds_nothing(problem: Any, options: Any, **keywords: Any) -> Any:
        found = solve(problem, options, **keywords)
        if keywords.get("hint") is not None or found.status == "infeasible":
            return found
        return replace(found, status="feasible", choices=None, objective=math.inf, lower_bound=0.0, report={})

    monkeypatch.setattr(program, "solve", finds_nothing)
    monkeypatch.setattr(anyplan, "_by_hand", lambda *_: None)
    plan = autoshard.optimize(shallow, mesh, enough, **options)
    assert plan.memory.peak_bytes <= enough
    assert any("looked for by its memory" in note for note in plan.notes)
    if remat == "never":
        asked = free.what_if(memory_budget=enough)
        assert asked.memory.peak_bytes <= enough
        assert any("within the time limit" in note for note in asked.notes)
    with pytest.raises(autoshard.InfeasibleError) as error:
        autoshard.optimize(shallow, mesh, enough // 3, **options)
    assert error.value.minimum_budget is not None and error.value.minimum_budget > enough // 3
    monkeypatch.undo()
    asked = plan.what_if(memory_budget=2 * enough)
    assert asked.memory.peak_bytes <= 2 * enough


def test_a_policy_without_a_plan_leaves_time_for_those_that_hold_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the time is that of the policies that follow, or of the search for the least memory."""
    asked, solve = list[float](), program.solve

    def finds_nothing(problem: Any, options: Any, **keywords: Any) -> Any:
        found = solve(problem, options, **keywords)
        if "relaxed" not in keywords or "plan_seconds" not in keywords:
            return found
        asked.append(keywords["plan_seconds"])
        return replace(found, status="feasible", choices=None, objective=math.inf, lower_bound=0.0, report={})

    free = autoshard.optimize(functools.partial(deep, 2), {"data": 2}, batch_size=64, hardware="h100", remat="never")
    monkeypatch.setattr(program, "solve", finds_nothing)
    limit = autoshard.SolverOptions(time_limit=10)
    options: dict[str, Any] = {"batch_size": 64, "hardware": "h100", "solver": limit}
    budget = int(0.99 * free.memory.peak_bytes)
    with contextlib.suppress(autoshard.InfeasibleError):
        autoshard.optimize(functools.partial(deep, 2), {"data": 2}, budget, **options)
    assert 0 < asked[0] <= 0.8 * PLAN_PART * 10
    assert max(asked) <= LAST_PLAN_PART * 10


def test_policies_share_the_time_for_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are told what the first of them needs, so that they end once they are known to need as much."""
    asked, passed, whole = list[dict[str, Any]](), [0.0], program.minimum_capacity

    def all_its_time(*args: Any, **keywords: Any) -> Any:
        asked.append(keywords)
        passed[0] += keywords["seconds"]
        return whole(*args, **keywords)

    monkeypatch.setattr(program, "minimum_capacity", all_its_time)
    monkeypatch.setattr(infeasible, "clock", lambda: passed[0])
    limit = autoshard.SolverOptions(time_limit=3)
    with pytest.raises(autoshard.InfeasibleError) as error:
        autoshard.optimize(functools.partial(deep, 2), {"data": 2}, 1000, batch_size=64, hardware="h100", solver=limit)
    needs = [keywords["beyond"] for keywords in asked]
    assert len(needs) > 1 and needs[0] is None and None not in needs[1:]
    assert all(keywords["seconds"] > 0 for keywords in asked) and passed[0] <= 3 + 1e-9
    assert error.value.minimum_budget <= min(needs[1:])

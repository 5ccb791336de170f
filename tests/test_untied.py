"""The plan against the step whose repeated layers decide for themselves."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from keras import layers
from tests import zoo

import autoshard_ilp as autoshard
from autoshard_ilp import planning
from autoshard_ilp.costs import facts
from autoshard_ilp.costs.apart import apart, parted
from autoshard_ilp.costs.build import build_program
from autoshard_ilp.plan import Plan
from autoshard_ilp.progress import Progress
from autoshard_ilp.search import attempt, halving, untied
from autoshard_ilp.search.attempt import Priced, free_bound
from autoshard_ilp.search.halving import HARDLY

MESH = {"data": 2, "model": 4}
OPTIONS: dict[str, Any] = {"hardware": "h100", "batch_size": 64, "progress": False}


def deep(depth: int = 8, width: int = 2048) -> keras.Model:
    """Blocks of two dense layers around a residual stream."""
    x = inputs = keras.Input((width,), name="x")
    for i in range(depth):
        y = layers.Dense(4 * width, activation="relu", name=f"up_{i}")(x)
        x = layers.Add(name=f"add_{i}")([x, layers.Dense(width, name=f"down_{i}")(y)])
    model = keras.Model(inputs, layers.Dense(64, name="head")(x))
    model.compile(keras.optimizers.Adam(), "mse")
    return model


@pytest.fixture
def tied_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans of shared decisions as the search leaves them."""

    def optimize(*args: Any, **options: Any) -> Plan:
        with monkeypatch.context() as patch:
            patch.setattr(planning, "without_ties", lambda plan, *_: plan)
            return autoshard.optimize(*args, **options)

    return optimize


BINDING: dict[str, Any] = {**OPTIONS, "batch_size": 4096}


@pytest.mark.parametrize("share", [None, pytest.param(0.9, marks=pytest.mark.slow)])
def test_bound_and_plan_are_those_of_the_step_without_ties(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory binds and divided layers decided first, as in a large step."""
    monkeypatch.setattr(facts, "FEW_OPERATIONS", 0)
    model = functools.partial(deep, 4, 256)
    budget = None
    if share is not None:
        loose = autoshard.optimize(model, MESH, remat="never", **BINDING)
        budget = int(share * loose.memory.peak_bytes)
    plan = autoshard.optimize(model, MESH, memory_budget=budget, remat="never", **BINDING)
    solver = autoshard.SolverOptions(fold_layers=False)
    best = autoshard.optimize(model, MESH, memory_budget=budget, remat="never", solver=solver, **BINDING)
    assert plan.status == best.status == "optimal"
    assert plan.lower_bound <= best.cost.total_s * (1 + 1e-9)
    assert plan.gap == pytest.approx(1 - plan.lower_bound / plan.cost.total_s, abs=1e-8)
    assert plan.cost.total_s == pytest.approx(best.cost.total_s, rel=2e-4)
    if budget is not None:
        assert plan.memory.peak_bytes <= budget
    assert any("decide for" in note for note in plan.notes)
    assert not any("plans that do" in note for note in plan.notes)
    assert "proof" in plan.timings


def test_a_program_without_ties_costs_the_same_for_the_same_choices(tied_only: Any) -> None:
    for budget in (None, "600MB"):
        trail = tied_only(deep(4), MESH, memory_budget=budget, remat="never", **OPTIONS).trail
        step = apart(trail.costs, trail.built, "step_time")
        assert trail.costs.tied and step.offset == 0.0
        choices = trail.solution.choices[step.classes]
        assert step.program.cost(choices) == pytest.approx(trail.solution.objective, rel=1e-12)
        assert len(step.op_ids) == sum(len(c.members) for c in trail.costs.classes)


def test_the_bound_without_a_budget_is_of_all_plans(tied_only: Any) -> None:
    """Also of those whose layers decide for themselves; under a budget or not."""
    plan = tied_only(deep(4), MESH, memory_budget="600MB", remat="never", **OPTIONS)
    trail = plan.trail
    problem = Priced(trail.costs, trail.built, None, None, plan.mesh)  # type: ignore[arg-type]
    bound = free_bound(problem, trail.solution.choices, trail.request, 60.0)
    solver = autoshard.SolverOptions(fold_layers=False)
    best = autoshard.optimize(deep(4), MESH, remat="never", solver=solver, **OPTIONS)
    assert best.status == "optimal"
    assert 0.9 * best.cost.total_s < bound <= best.cost.total_s * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.9, 0.98])
def test_a_budget_that_hardly_costs_is_said_to(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little was known of the best plan without a budget, its bound without ties is that of the plan."""
    model = functools.partial(deep, 8, 256)
    loose = autoshard.optimize(model, MESH, remat="never", **BINDING)
    asked: list[float] = []

    def bound(*args: Any) -> float:
        asked.append(free_bound(*args))
        return asked[-1]

    def shortly(self: Any, surely: bool, tied: Any) -> Any:
        found = without_budget(self, surely, tied)
        assert found is None and self.known is not None
        self.known = replace(self.known, without_memory=0.9 * self.known.without_memory)
        return None

    monkeypatch.setattr(facts, "FEW_OPERATIONS", 0)
    without_budget = halving._Divided.without_budget
    monkeypatch.setattr(halving._Divided, "without_budget", shortly)
    monkeypatch.setattr(halving, "HARDLY", 0.05)
    monkeypatch.setattr(halving, "LONG_CELLS", 0)
    monkeypatch.setattr(attempt, "free_bound", bound)
    budget = int(share * loose.memory.peak_bytes)
    plan = autoshard.optimize(model, MESH, budget, remat="never", **BINDING)
    assert asked, "the best plan without a budget costs next to what fits"
    assert plan.lower_bound == pytest.approx(asked[-1])
    assert 0.95 * plan.cost.total_s <= plan.lower_bound <= loose.cost.total_s
    assert plan.gap == pytest.approx(1 - plan.lower_bound / plan.cost.total_s, abs=1e-8)
    assert plan.memory.peak_bytes <= budget
    assert any("may be faster" in note for note in plan.notes)


def test_prices_count_every_byte_of_what_is_held(tied_only: Any) -> None:
    trail = tied_only(deep(4), MESH, memory_budget="600MB", remat="never", **OPTIONS).trail
    choices = trail.solution.choices
    usage = trail.program.usage_over_time(choices)
    times = {int(np.argmax(usage)): 1e-12, len(usage) // 3: 2e-12}
    step = apart(trail.costs, trail.built, "step_time", times)
    priced = step.program.cost(choices[step.classes]) + step.offset
    excess = sum(p * (int(usage[t]) - trail.program.capacity) for t, p in times.items())
    # Copies from one layer to the next are left out, so that it may be less.
    assert priced <= trail.solution.objective + excess + 1e-12
    assert priced >= trail.solution.objective + excess - 1e-12 * 0.02 * trail.program.capacity


def test_classes_are_parted_where_members_choose_differently(tied_only: Any) -> None:
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)
    trail = plan.trail
    step = apart(trail.costs, trail.built, "step_time")
    choices = trail.solution.choices[step.classes]
    rng, parts = np.random.default_rng(0), 0
    for v in rng.permutation(len(choices)):
        for s in range(len(step.program.nodes[v].costs)):
            other = choices.copy()
            other[v] = s
            if (
                s != choices[v]
                and (step.classes == step.classes[v]).sum() > 1
                and np.isfinite(step.program.cost(other))
            ):
                choices, parts = other, parts + 1
                break
        if parts == 5:
            break
    assert parts == 5
    table, chosen = parted(trail.costs, step, choices)
    assert len(table.classes) > len(trail.costs.classes)
    program = build_program(table, {}, capacity=None).program
    assert program.cost(chosen) == pytest.approx(step.program.cost(choices), rel=1e-12)
    for op_id, strategy in zip(step.op_ids.tolist(), choices.tolist(), strict=True):
        assert chosen[table.class_of[op_id]] == strategy


def test_a_faster_plan_without_ties_is_taken(tied_only: Any) -> None:
    """Where layers were held to decisions that are not the best, they get their own."""
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)
    trail = plan.trail
    step = apart(trail.costs, trail.built, "step_time")
    known = trail.solution.choices[step.classes]
    # What the plan decides is forbidden to the classes of most members, so that the tied optimum is dearer.
    costs = [n.costs.copy() for n in trail.program.nodes]
    tried = 0
    for index, cls in enumerate(trail.costs.classes):
        if len(cls.members) > 1 and len(costs[index]) > 2 and tried < 3:
            costs[index][known[step.classes == index][0]] = np.inf
            tried += 1
    program = replace(
        trail.program, nodes=tuple(replace(n, costs=c) for n, c in zip(trail.program.nodes, costs, strict=True))
    )
    assert not np.isfinite(program.cost(trail.solution.choices)), "what is forbidden stays so without ties"
    apart_again = apart(trail.costs, replace(trail.built, program=program), "step_time")
    assert not np.isfinite(apart_again.program.cost(known))
    worse = untied._faster(plan, *parted(trail.costs, step, known), trail.solution, Progress(False))
    assert worse is not None
    assert worse.cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    assert worse.specs == plan.specs


@pytest.mark.parametrize(("added", "shown"), [(0.5, True), (2.0, False)])
def test_a_plan_left_open_has_the_bound_without_a_budget_where_that_is_near(
    added: float, shown: bool, tied_only: Any
) -> None:
    """The bound of all plans without a budget holds under one; the plan stays."""
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)
    solution = plan.trail.solution
    report = {**solution.report, "without_memory": solution.objective * (1 - added * HARDLY)}
    low = 0.9 * solution.objective
    solution = replace(solution, status="feasible", lower_bound=low, report=report)
    left = replace(plan, status="feasible", lower_bound=low, trail=replace(plan.trail, solution=solution))
    told = untied.without_ties(left, Progress(False), 60.0)
    assert (told is left) != shown
    assert told.specs == left.specs and told.status == "feasible"
    if shown:
        true = untied.without_ties(plan, Progress(False), 60.0)
        assert low < told.lower_bound <= true.cost.total_s * (1 + 1e-9)
        assert told.gap == pytest.approx(1 - told.lower_bound / told.cost.total_s, abs=1e-8)


def test_without_time_or_ties_the_plan_stays(tied_only: Any) -> None:
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)
    assert untied.without_ties(plan, Progress(False), 0.0) is plan
    single = autoshard.optimize(zoo.mlp(), {"data": 2}, hardware="h100", batch_size=8, progress=False)
    assert untied.without_ties(single, Progress(False), 60.0) is single or "proof" in single.timings


def test_an_interrupt_keeps_the_plan(tied_only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for place in ("program.repeated.whole.chain_bound", "program.repeated.whole.copies_in", "costs.apart.apart"):
        with monkeypatch.context() as patch:
            patch.setattr(f"autoshard_ilp.{place}", interrupted)
            assert untied.without_ties(plan, Progress(False), 60.0) is plan


def test_too_little_memory_for_the_step_without_ties_keeps_the_plan(
    tied_only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tied_only(deep(4), MESH, remat="never", **OPTIONS)

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("autoshard_ilp.program.repeated.whole.stamped_net", full)
    monkeypatch.setattr("autoshard_ilp.program.repeated.whole.chain_bound", lambda *_, **__: None)
    assert untied.without_ties(plan, Progress(False), 60.0) is plan


def test_a_question_about_a_faster_plan_keeps_its_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "FEW_OPERATIONS", 0)
    model = functools.partial(deep, 4, 256)
    loose = autoshard.optimize(model, MESH, remat="never", **BINDING)
    pins = {"up_1/kernel$": (None, None)}
    solver = autoshard.SolverOptions(time_limit=60)  # else a plan within one percent will do
    asked = loose.what_if(memory_budget=int(0.9 * loose.memory.peak_bytes), solver=solver, progress=False)
    pinned = asked.what_if(pins=pins, solver=solver, progress=False)
    assert pinned.specs["up_1/kernel"] == PartitionSpec()
    assert pinned.memory.peak_bytes <= int(0.9 * loose.memory.peak_bytes)
    again = pinned.what_if(pins={}, solver=solver, progress=False)
    assert again.cost.total_s == pytest.approx(asked.cost.total_s, rel=1e-3)


@pytest.mark.parametrize(("share", "text"), [(0.0123, "1.2%"), (8.4e-5, "0.0084%"), (1.26e-5, "0.0013%")])
def test_small_shares_are_readable(share: float, text: str) -> None:
    assert untied.percent(share) == text

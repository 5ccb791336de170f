"""Answers at once: what a plan's own search has shown, told for another budget or for pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.costs import facts
from autoshard_ilp.explore import soon, whatif
from autoshard_ilp.program import solve
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.nets.flips import Flips
from autoshard_ilp.program.rows.mixing import Mixed
from autoshard_ilp.search.between import best_between
from test_halving import MESH, OPTIONS, stack
from test_mixing import least, program

FULL = autoshard.SolverOptions(time_limit=60)


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """Steps of this file count as large: groups of layers, not single ones, decide apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "FEW_OPERATIONS", 0)
        patch.setattr(whatif, "NODES", 0)  # .. and are not compared with the step without ties
        yield


@pytest.fixture(scope="module")
def tight() -> autoshard.Plan:
    free = autoshard.optimize(stack, MESH, "1GB", **OPTIONS)
    return autoshard.optimize(stack, MESH, 92 * free.memory.peak_bytes // 100, **OPTIONS)


@pytest.mark.parametrize("percent", [pytest.param(97, marks=pytest.mark.slow), 99, 102])
def test_another_budget(tight: autoshard.Plan, percent: int) -> None:
    budget = percent * tight.memory.peak_bytes // 100
    there, searched = (tight.what_if(memory_budget=budget, solver=s, progress=False) for s in (None, FULL))
    assert any(note.startswith("Answered at once") for note in there.notes), there.notes
    assert not any(note.startswith("Answered at once") for note in searched.notes)
    assert there.memory.peak_bytes <= budget and searched.memory.peak_bytes <= budget
    assert there.status == "feasible" and there.gap <= soon.ENOUGH
    assert there.lower_bound <= searched.cost.total_s * (1 + 1e-9), "no plan is faster than the bound"
    assert there.cost.total_s <= searched.cost.total_s / (1 - there.gap) * (1 + 1e-9)
    assert there.cost.total_s == pytest.approx(there.lower_bound / (1 - there.gap), rel=1e-9)


def test_a_pin(tight: autoshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soon, "ENOUGH", 1.0)  # it costs more than is known to be needed
    own = tuple(tight.specs["dense_3/kernel"])
    pins = {r"dense_\d+/kernel$": (None, "data") if own != (None, "data") else ("data",)}
    there, searched = (tight.what_if(pins=pins, solver=s, progress=False) for s in (None, FULL))
    for plan in (there, searched):
        assert tuple(plan.specs["dense_3/kernel"]) == next(iter(pins.values()))
    assert any(note.startswith("Answered at once") for note in there.notes), there.notes
    assert there.lower_bound <= searched.cost.total_s <= there.cost.total_s * (1 + 1e-9)
    assert there.cost.total_s <= searched.cost.total_s * (1 + 5e-3)


def test_what_a_pin_forbade_is_searched_for(tight: autoshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soon, "ENOUGH", 1.0)
    pins, budget = {r"dense_\d+/kernel$": (None, "data")}, 99 * tight.memory.peak_bytes // 100
    pinned = tight.what_if(pins=pins, progress=False)
    less = pinned.what_if(memory_budget=budget, solver=FULL, progress=False)
    for plan in (pinned, less):
        assert tuple(plan.specs["dense_5/kernel"]) == (None, "data")
    free = less.what_if(pins={}, memory_budget=tight.trail.request.capacity, progress=False)  # type: ignore[union-attr]
    assert not any(note.startswith("Answered at once") for note in free.notes), "its bound is of plans with the pin"
    assert free.cost.total_s == pytest.approx(tight.cost.total_s, rel=1e-2)


def test_every_layout_has_a_plan_at_once(tight: autoshard.Plan) -> None:
    there = tight.explain("dense_3/kernel", time_limit=0.0, progress=False)
    searched = tight.explain("dense_3/kernel", progress=False)
    best = {a.layout: a.total_s for a in searched.alternatives if a.proof == "exact"}
    assert len(best) > 1
    for a in there.alternatives:
        assert a.lower_bound_s <= best.get(a.layout, np.inf) * (1 + 1e-9)
        assert a.total_s <= 1.1 * best.get(a.layout, np.inf), f"{a.layout}: no plan without a search"


def test_a_question_about_an_answer(tight: autoshard.Plan) -> None:
    peak = tight.memory.peak_bytes
    less = tight.what_if(memory_budget=98 * peak // 100, progress=False)
    assert any(note.startswith("Answered at once") for note in less.notes)
    back = less.what_if(memory_budget=tight.trail.request.capacity, progress=False)  # type: ignore[union-attr]
    assert back.cost.total_s == pytest.approx(tight.cost.total_s, rel=1e-3)
    assert back.lower_bound == pytest.approx(tight.lower_bound, rel=2e-3), "of all plans, not of tied ones only"


@given(st.integers(0, 10_000), st.floats(0.2, 0.8), st.floats(0.2, 0.8))
@settings(deadline=None, max_examples=15, derandomize=True)
def test_what_was_met_holds_under_any_capacity(seed: int, first: float, second: float) -> None:
    found = program(seed)
    relaxed, bytes_least = least(found)
    room = found.peak(relaxed) - bytes_least
    one, other = (replace(found, capacity=int(bytes_least + share * room)) for share in (first, second))
    shown = solve(one, SolverOptions(), relaxed=relaxed, mixing=True)
    mixed = shown.report.get("mixed")
    if mixed is None or other.capacity >= found.peak(relaxed):
        return
    best = solve(other, SolverOptions())
    told: Mixed = mixed.under(other.capacity)
    for (cost, excess), plan in zip(told.cuts, told.met, strict=True):
        used = found.usage_over_time(plan)[list(told.times)]
        assert cost == found.cost(plan) and np.allclose(used - other.capacity, excess)
    if best.choices is not None:
        for _, bound in told.bounds:
            assert bound <= best.objective * (1 + 1e-9)
    again = solve(other, SolverOptions(), relaxed=relaxed, mixing=mixed)
    anew = solve(other, SolverOptions(), relaxed=relaxed, mixing=True)
    assert again.lower_bound == pytest.approx(anew.lower_bound, rel=2e-3)


@given(st.integers(0, 10_000), st.floats(0.2, 0.9))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_the_best_between_plans(seed: int, tight: float) -> None:
    found = program(seed)
    relaxed, bytes_least = least(found)
    found = replace(found, capacity=int(bytes_least + tight * (found.peak(relaxed) - bytes_least)))
    smallest = np.array([int(n.bytes.argmin()) for n in found.nodes])  # type: ignore[union-attr]

    def solved(problem: Any, start: Any, seconds: float, **keywords: Any) -> Any:
        return solve(problem.program, replace(SolverOptions(), time_limit=seconds), hint=start, **keywords)

    choices, stopped = best_between(found, [relaxed, smallest], solved, smallest, 10.0, {0: 1e-2, 2: 1e-3})
    assert choices is not None and not stopped and found.peak(choices) <= found.capacity
    mixed = min(  # the cheapest of those that change once from one plan to the other
        (
            np.where(np.arange(len(smallest)) < n, a, b)
            for n in range(len(smallest))
            for a, b in ((smallest, relaxed), (relaxed, smallest))
        ),
        key=lambda x: found.cost(x) if found.peak(x) <= found.capacity else np.inf,
    )
    assert found.cost(choices) <= min(found.cost(mixed), found.cost(smallest)) * (1 + 1e-9) or (
        found.peak(mixed) > found.capacity
    )


def priced(found: Program, prices: dict[int, float], plan: np.ndarray) -> float:
    used = found.usage_over_time(plan)
    return found.cost(plan) + sum(price * float(used[time]) for time, price in prices.items())


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_single_changes_cost_what_the_program_says(seed: int) -> None:
    found, rng = program(seed), np.random.default_rng(seed)
    prices = {0: float(rng.uniform(0, 0.1)), 2: float(rng.uniform(0, 0.1))}
    plan = np.array([int(rng.integers(len(n.costs))) for n in found.nodes])
    flips = Flips(found, prices)
    assert flips.total(plan) == pytest.approx(priced(found, prices, plan))
    node = int(rng.integers(len(plan)))
    for strategy, seconds in enumerate(flips.seconds(plan, node)):
        other = np.where(np.arange(len(plan)) == node, strategy, plan)
        change = seconds - flips.seconds(plan, node)[plan[node]]
        assert change == pytest.approx(priced(found, prices, other) - priced(found, prices, plan))
    nodes = list(found.nodes)
    costs = np.where(np.arange(len(nodes[node].costs)) == plan[node], np.inf, nodes[node].costs)
    nodes[node] = replace(nodes[node], costs=costs)
    mended, forbidden = Flips(replace(found, nodes=tuple(nodes)), prices).mended(plan)
    assert forbidden == {node} and mended[node] != plan[node]

"""Starts of the kinds that people write by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.explore.again import problem_of
from autoshard_ilp.pins import boundary_layouts
from autoshard_ilp.program.model import Node, Program
from autoshard_ilp.search import attempt, halving, kinds
from autoshard_ilp.search.kinds import kinds_of, of_coarser_meshes, starts_of_kinds
from autoshard_ilp.search.recipes import RECIPES

MESH = {"data": 2, "model": 2}


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((256,)), layers.Dense(512, activation="relu"), layers.Dense(256)])
    model.compile(optimizer="adam", loss="mse")
    return model


def deep() -> keras.Model:
    x = inputs = keras.Input((256,))
    for i in range(6):
        x = x + layers.Dense(256, name=f"down_{i}")(layers.Dense(512, activation="relu", name=f"up_{i}")(x))
    model = keras.Model(inputs, x)
    model.compile(optimizer="adam", loss="mse")
    return model


def planned(**options: Any) -> Any:
    return autoshard.optimize(dense, MESH, hardware="cpu-host", batch_size=64, progress=False, **options)


def kept_of(plan: Any) -> list[Any]:
    trail = plan.trail
    return list(kinds_of(trail.costs, trail.built.program, trail.infos, plan.mesh))


def test_a_kind_keeps_what_its_recipe_allows() -> None:
    plan = planned()
    found, table = kept_of(plan), plan.trail.costs
    assert len(found) == len(kinds.KINDS)
    for name, kept in zip(kinds.KINDS, found, strict=True):
        allowed = RECIPES[name](plan.trail.infos, plan.mesh).allowed
        pinned = 0
        for op_id in table.graph.arguments:
            index, path = int(table.class_of[op_id]), table.graph.ops[op_id].path
            for keep, layout in zip(kept[index], boundary_layouts(table, index), strict=True):
                assert keep == (layout in allowed[path])
            pinned += not kept[index].all()
        assert pinned
        inside = set(range(len(kept))) - {
            int(table.class_of[i]) for i in (*table.graph.arguments, *table.graph.results)
        }
        assert all(kept[i].all() for i in inside), "what happens inside stays free"


def test_pins_come_first() -> None:
    plan = planned(pins={"dense.*/kernel": (None, "model")})
    table = plan.trail.costs
    for kept in kept_of(plan):
        assert all(mask.any() for mask in kept)
        for op_id in table.graph.arguments:
            if table.graph.ops[op_id].path.endswith("kernel"):
                assert kept[int(table.class_of[op_id])].all()


def test_only_training_steps_have_kinds() -> None:
    assert kept_of(planned(mode="predict")) == []
    plan = autoshard.optimize_fn(lambda w, x: x @ w, (np.ones((8, 8)), np.ones((8, 8))), MESH, hardware="cpu-host")
    assert kept_of(plan) == []


def test_coarser_meshes_come_in_the_order_of_how_much_a_plan_is_like_them() -> None:
    families = [
        [np.array(mask) for mask in family]
        for family in (
            ([True, False], [True, False], [True, True]),
            ([True, True], [False, True], [True, False]),
            ([False, True], [False, True], [False, True]),
        )
    ]
    nodes = tuple(Node(name, np.zeros(2)) for name in "abc")
    program = Program(nodes, (), families=lambda: families)

    def numbers(plan: list[int], least: float = 0.0) -> list[int]:
        known = [id(family) for family in families]
        return [known.index(id(kept)) for kept in of_coarser_meshes(program, np.array(plan), least)]

    assert numbers([1, 1, 1]) == [2, 1, 0]
    assert numbers([0, 0, 0]) == [0, 1, 2]
    assert numbers([0, 1, 1]) == [0, 1, 2], "of equals, the coarsest mesh first"
    assert numbers([1, 1, 1], 2 / 3) == [2, 1] and numbers([1, 1, 1], 1.0) == [2] and numbers([0, 1, 1], 1.0) == []
    assert list(of_coarser_meshes(Program(nodes, ()), np.zeros(3, int))) == []


@pytest.mark.parametrize("asked_again", [False, True])
def test_coarser_meshes_come_before_what_people_write(asked_again: bool) -> None:
    """When planning, and for questions about a plan."""
    trail = planned().trail
    priced = attempt.Priced(trail.costs, trail.built, None, trail.infos, trail.request.mesh)
    problem: Any = problem_of(planned()) if asked_again else priced
    choices, recipes = trail.solution.choices, kept_of(planned())
    every = list(problem.kinds(choices, 0.0))
    assert len(every) == len(trail.program.families()) + len(recipes)
    assert len(list(problem.kinds(None, 0.0))) == len(recipes)
    shares = [np.mean([mask[s] for mask, s in zip(kept, choices, strict=True)]) for kept in every[: -len(recipes)]]
    assert shares == sorted(shares, reverse=True)
    some = list(problem.kinds(choices, shares[1]))
    assert 1 + len(recipes) < len(some)
    for kept, same in zip(some, [every[0], *recipes, *every[1:]], strict=False):
        assert all(map(np.array_equal, kept, same)), (
            "recipes take little time, and come before the second of the others"
        )


@pytest.mark.parametrize("pins", [pytest.param(None, marks=pytest.mark.slow), {"up_1/kernel$": (None, "model")}])
def test_a_question_goes_on_from_plans_of_kinds(pins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prices have shown no plan that is good enough."""
    monkeypatch.setattr(halving, "POOR", -1.0)
    monkeypatch.setattr(halving, "division_of", lambda *_: None)
    looked, start = list[int](), halving.starts_of_kinds

    def spy(*args: Any, **options: Any) -> Any:
        found = start(*args, **options)
        looked.append(len(found[0]))
        return found

    monkeypatch.setattr(halving, "starts_of_kinds", spy)
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 4096, "remat": "never", "progress": False}
    plan = autoshard.optimize(deep, MESH, **options)
    budget = int(0.7 * plan.memory.peak_bytes)
    solver = autoshard.SolverOptions(time_limit=8)  # else a plan within one percent will do
    asked = plan.what_if(memory_budget=budget, pins=pins, solver=solver)
    assert looked and asked.memory.peak_bytes <= budget


class Solver:
    """Answers in turn; every question takes a second."""

    def __init__(self, *answers: tuple[float, list[int] | None]) -> None:
        self.answers, self.asked, self.now = list(answers), list[tuple[float, float]](), 0.0

    def __call__(self, problem: Any, start: Any, seconds: float, *, cutoff: float, relative_gap: float) -> Any:
        self.asked.append((seconds, cutoff))
        self.now += 1.0
        objective, choices = self.answers.pop(0)
        found = None if choices is None else np.array(choices)
        return SimpleNamespace(objective=objective, choices=found, report={"interrupted": objective < 0})


@pytest.fixture
def program() -> Any:
    """Two nodes, of three strategies and of two."""
    return Program((Node("a", np.zeros(3)), Node("b", np.zeros(2))), ())


LAST, FIRST = ([False, True, True], [True, True]), ([True, False, False], [False, True])


def masks(*of_kinds: Any) -> Any:
    return iter([[np.array(mask) for mask in kind] for kind in of_kinds])


def test_plans_are_those_of_the_whole_program_and_get_better(program: Any) -> None:
    solver = Solver((2.0, [1, 0]), (3.0, None), (1.5, [0, 0]))
    plans, stopped = starts_of_kinds(program, masks(LAST, LAST, FIRST), solver, 100.0, lambda: solver.now, 9.0)
    assert [x.tolist() for x in plans] == [[2, 0], [0, 1]] and not stopped
    assert [cutoff for _, cutoff in solver.asked] == [9.0, 2.0, 2.0]
    assert solver.asked[0][0] == pytest.approx(kinds.PART * 100.0)


def test_one_plan_may_be_enough(program: Any) -> None:
    solver = Solver((9.5, None), (2.0, [1, 0]), (1.0, [0, 0]))
    plans, _ = starts_of_kinds(program, masks(LAST, LAST, FIRST), solver, 100.0, lambda: solver.now, 9.0, one=True)
    assert len(plans) == 1 and len(solver.asked) == 2


def test_a_plan_that_is_good_enough_is_the_last(program: Any) -> None:
    solver = Solver((2.0, [1, 0]), (1.0, [0, 0]), (0.5, [0, 0]))
    kept = masks(LAST, FIRST, LAST)
    plans, _ = starts_of_kinds(program, kept, solver, 100.0, lambda: solver.now, 9.0, good=1.0)
    assert [x.tolist() for x in plans] == [[2, 0], [0, 1]] and len(solver.asked) == 2


def test_an_interrupt_ends_it_and_keeps_what_was_found(program: Any) -> None:
    solver = Solver((-1.0, [0, 0]))
    plans, stopped = starts_of_kinds(program, masks(LAST, FIRST), solver, 100.0, lambda: solver.now, 9.0)
    assert stopped and [x.tolist() for x in plans] == [[1, 0]]


def test_little_time_is_not_spent(program: Any) -> None:
    solver = Solver()
    assert starts_of_kinds(program, masks(LAST), solver, kinds.LEAST_SECONDS, lambda: solver.now, 9.0) == ([], False)

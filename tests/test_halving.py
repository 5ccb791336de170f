"""Two decisions for the repeated layers where memory binds."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp import halving
from autoshard_ilp.costs.fold import LEAST_HALVED, halves
from autoshard_ilp.halving import solve_halved, start_of

DEPTH = 16
MESH = {"data": 4}
OPTIONS: dict[str, Any] = {
    "hardware": "cpu-host",
    "batch_size": 1024,
    "progress": False,
    "remat": "never",
    "solver": autoshard.SolverOptions(time_limit=60),
}


def test_forward_members_are_split_by_order_and_backward_ones_from_the_end() -> None:
    #        5 layers forward      5 layers backward     too few
    classes = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    backward = [False] * 5 + [True] * 5 + [False] * 3
    fine = halves(classes, backward)
    assert fine[:5] == [0, 0, 0, 3, 3]  # layers 0 1 2 | 3 4
    assert fine[5:10] == [4, 4, 1, 1, 1]  # layers 4 3 | 2 1 0
    assert fine[10:] == [2, 2, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_halves_refine(members: list[tuple[int, bool]]) -> None:
    classes, backward = [c for c, _ in members], [b for _, b in members]
    fine = halves(classes, backward)
    whole_of: dict[int, int] = {}
    for c, f in zip(classes, fine, strict=True):
        assert whole_of.setdefault(f, c) == c, "a finer class lies within one class"
    for c in set(classes):
        parts = [f for k, f in zip(classes, fine, strict=True) if k == c]
        assert len(set(parts)) == 1 or len(parts) >= LEAST_HALVED
        assert len(set(parts)) <= 2


def stack() -> keras.Model:
    x = inputs = keras.Input((256,), name="x")
    for i in range(DEPTH):
        x = layers.Dense(256, activation="relu", name=f"dense_{i}")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer="adam", loss="mse")
    return model


@pytest.fixture(scope="module")
def loose() -> autoshard.Plan:
    return autoshard.optimize(stack, MESH, "1GB", **OPTIONS)


@pytest.fixture(scope="module")
def tight(loose: autoshard.Plan) -> autoshard.Plan:
    """With two decisions for the repeated layers, whatever they gain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halving, "GAIN", -1.0)
        return autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)


def test_a_mixture_of_layouts_uses_the_memory_that_one_layout_for_all_must_leave(
    loose: autoshard.Plan, tight: autoshard.Plan
) -> None:
    assert tight.memory.peak_bytes <= 95 * loose.memory.peak_bytes // 100
    assert tight.status == "optimal" and tight.lower_bound == pytest.approx(tight.cost.total_s, rel=1e-9)
    assert any("each half" in note and "saves" in note for note in tight.notes), tight.notes
    layouts = {str(spec) for path, spec in tight.specs.items() if path.endswith("/kernel") and "dense" in path}
    assert len(layouts) > 1, "not all layers alike"
    assert not any("Memory binds" in note for note in loose.notes)


def test_what_if_finds_the_same_mixture(loose: autoshard.Plan, tight: autoshard.Plan) -> None:
    asked = loose.what_if(memory_budget=95 * loose.memory.peak_bytes // 100, progress=False)
    assert asked.cost.total_s == pytest.approx(tight.cost.total_s, rel=2e-3)
    back = tight.what_if(memory_budget="1GB", progress=False)
    assert back.cost.total_s == pytest.approx(loose.cost.total_s, rel=1e-6)


def test_a_halved_plan_is_the_same_after_save_and_load(tight: autoshard.Plan, tmp_path: Any) -> None:
    tight.save(tmp_path / "plan.json")
    again = autoshard.load(tmp_path / "plan.json", model=stack)
    assert again.specs == tight.specs and again.cost.total_s == tight.cost.total_s
    same = again.what_if(progress=False)
    assert same.cost.total_s <= tight.cost.total_s * (1 + 1e-9), "the loaded plan is a start"


# -- the order of solving, without a planner


@dataclass
class _Solver:
    """Answers that were written down beforehand; each takes ``takes`` seconds."""

    answers: list[Any]
    takes: float = 1.0
    now: float = 0.0
    asked: list[Any] = field(default_factory=list)

    def __call__(self, problem: Any, start: Any, seconds: float, rows_seconds: float | None) -> Any:
        self.asked.append((problem.name, None if start is None else start.tolist(), seconds, rows_seconds))
        self.now += self.takes
        return self.answers[len(self.asked) - 1]


def problem(name: str, class_of: list[int], capacity: int | None = 1) -> Any:
    members: dict[int, list[int]] = {}
    for op, c in enumerate(class_of):
        members.setdefault(c, []).append(op)
    classes = [SimpleNamespace(members=tuple(members[c])) for c in sorted(members)]
    table = SimpleNamespace(halved=name == "fine", classes=classes, class_of=np.array(class_of))
    return SimpleNamespace(name=name, table=table, program=SimpleNamespace(capacity=capacity))


def solution(objective: float, rows: int = 1, status: str = "optimal", lower: float = 0.0) -> Any:
    choices = None if status in ("infeasible", "none") else np.array([7, 9])
    gap = 0.0 if status == "optimal" else 1 - lower / objective
    return SimpleNamespace(
        status=status, objective=objective, choices=choices, report={"rows": rows}, lower_bound=lower, gap=gap
    )


TIED, FINE = problem("tied", [0, 1, 1, 1, 1]), problem("fine", [0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("answers", "taken", "asked"),
    [
        ([solution(2.0), solution(1.0)], "fine", ["tied", "fine"]),
        ([solution(2.0), solution(2.0, lower=1.9)], "tied", ["tied", "fine"]),
        ([solution(2.0, rows=0)], "tied", ["tied"]),
        ([solution(2.0, status="feasible", lower=1.0), solution(1.5)], "tied", ["tied", "tied"]),
        ([solution(2.0, status="infeasible")], "tied", ["tied"]),
        ([solution(2.0, status="none"), solution(1.5)], "tied", ["tied", "tied"]),
    ],
)
def test_the_larger_program_is_solved_only_where_memory_binds(answers: Any, taken: str, asked: list[str]) -> None:
    solver = _Solver(answers)
    found, _, notes = solve_halved(TIED, solver, lambda: FINE, 100.0, lambda: solver.now)
    assert found.name == taken and [a[0] for a in solver.asked] == asked
    assert bool(notes) == (asked == ["tied", "fine"])
    if taken == "tied" and notes:
        assert "at most 5.00%" in notes[0]


def test_an_interrupt_of_the_second_program_is_told() -> None:
    second = solution(2.0, lower=1.9)
    second.report["interrupted"] = True
    _, found, _ = solve_halved(TIED, _Solver([solution(2.0), second]), lambda: FINE, 100.0, lambda: 0.0)
    assert found.report["interrupted"] and found.objective == 2.0


def test_the_second_program_starts_from_the_first_and_has_the_time_that_is_left() -> None:
    for status, seconds in (("feasible", 97.0), ("optimal", 15.0)):  # after a proof: five times as long as it took
        solver = _Solver([solution(2.0, status=status, lower=1.99), solution(1.0)], takes=3.0)
        solve_halved(TIED, solver, lambda: FINE, 100.0, lambda s=solver: s.now)
        assert solver.asked == [("tied", None, 100.0, 5.0), ("fine", [7, 9, 9], seconds, None)]
    assert start_of(TIED.table, FINE.table, np.array([7, 9])).tolist() == [7, 9, 9]


def test_a_first_program_without_a_better_plan_ends_the_search() -> None:
    first = solution(np.inf, status="none", lower=3.0)
    solver = _Solver([first])
    assert solve_halved(TIED, solver, lambda: FINE, 100.0, lambda: 0.0, cutoff=3.0)[1] is first
    assert len(solver.asked) == 1


@pytest.mark.parametrize("one", [problem("tied", [0, 1, 2]), problem("tied", [0] * 9, None), problem("fine", [0] * 9)])
def test_one_program_alone_has_all_the_time(one: Any) -> None:
    solver = _Solver([solution(2.0)])
    solve_halved(one, solver, lambda: FINE, 100.0, lambda: solver.now)
    assert solver.asked == [(one.name, None, 100.0, None)]

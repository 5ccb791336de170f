"""Two decisions for the repeated layers where memory binds."""

from __future__ import annotations

from collections.abc import Iterator
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
from autoshard_ilp import attempt, halving
from autoshard_ilp.costs import facts
from autoshard_ilp.costs.fold import LEAST_HALVED, halves
from autoshard_ilp.halving import Binds, Left, solve_halved, start_of

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


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """Steps of this file count as large: halves, not single layers, decide apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "FEW_OPERATIONS", 0)
        yield


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
    return autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)


def test_what_is_true_of_the_graph_is_read_once_for_both_programs(
    loose: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, read = list[Any](), attempt.read

    def counted(graph: Any, request: Any) -> Any:
        graphs.append(graph)
        return read(graph, request)

    monkeypatch.setattr(attempt, "read", counted)
    plan = autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)
    assert any("each half" in note for note in plan.notes), plan.notes
    assert len(graphs) == 1


def test_a_mixture_of_layouts_uses_the_memory_that_one_layout_for_all_must_leave(
    loose: autoshard.Plan, tight: autoshard.Plan
) -> None:
    assert tight.memory.peak_bytes <= 95 * loose.memory.peak_bytes // 100
    assert tight.status == "optimal" and tight.lower_bound == pytest.approx(tight.cost.total_s, rel=1e-9)
    assert any("each half" in note for note in tight.notes), tight.notes
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


def test_in_a_small_step_every_layer_decides_for_itself(
    loose: autoshard.Plan, tight: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "FEW_OPERATIONS", len(loose.trail.graph.ops))  # type: ignore[union-attr]
    plan = autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)
    assert halving.APART in plan.notes and plan.status == "optimal"
    assert plan.cost.total_s <= tight.cost.total_s * (1 + 1e-9)
    assert not any("each half" in note for note in plan.notes)


# -- the order of solving, without a planner


@dataclass
class _Solver:
    """Answers that were written down beforehand; each takes ``takes`` seconds."""

    answers: list[Any]
    takes: float = 1.0
    now: float = 0.0
    asked: list[Any] = field(default_factory=list)

    def __call__(self, problem: Any, start: Any, seconds: float, **keywords: Any) -> Any:
        keywords = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in keywords.items()}
        self.asked.append((problem.name, None if start is None else start.tolist(), seconds, keywords))
        self.now += self.takes
        answer = self.answers[len(self.asked) - 1]
        if problem.name == "fine" and "relaxed" in answer.report:
            answer.report["relaxed"] = np.array([7, 8, 8])
        return answer

    def names(self) -> list[str]:
        return [a[0] for a in self.asked]


def problem(name: str, class_of: list[int], capacity: int | None = 1) -> Any:
    members: dict[int, list[int]] = {}
    for op, c in enumerate(class_of):
        members.setdefault(c, []).append(op)
    classes = [SimpleNamespace(members=tuple(members[c])) for c in sorted(members)]
    table = SimpleNamespace(halved=name == "fine", classes=classes, class_of=np.array(class_of))
    return SimpleNamespace(name=name, table=table, program=SimpleNamespace(capacity=capacity, nodes=[]))


TIED, FINE = problem("tied", [0, 1, 1, 1, 1]), problem("fine", [0, 1, 1, 2, 2])


def make(halved: bool) -> Any:
    return FINE if halved else TIED


def solution(
    objective: float = np.inf, status: str = "optimal", lower: float = 0.0, large: bool = False, took: float = 1.0
) -> Any:
    """``large``: the best plan without memory is known, and does not fit."""
    choices = None if np.isinf(objective) else np.array([7, 9])
    report = {"relaxed": np.array([7, 8])} if large else {}
    known = {"status": status, "objective": objective, "choices": choices, "lower_bound": lower, "seconds": took}
    return SimpleNamespace(report=report, **known)


LARGE, NONE = "large", "none"
PERHAPS, LIKELY, SURELY = Binds


def answers(*kinds: Any) -> list[Any]:
    known = {LARGE: {"status": "feasible", "large": True}, NONE: {"status": "feasible"}, "no": {"status": "infeasible"}}
    return [solution(**known[k]) if isinstance(k, str) else solution(k) for k in kinds]


@pytest.mark.parametrize(
    ("binds", "said", "asked"),
    [
        (PERHAPS, [2.0], ["tied"]),  # what fits without looking at memory is the answer
        (PERHAPS, ["no"], ["tied"]),
        (PERHAPS, [LARGE, 2.0], ["tied", "fine"]),
        (PERHAPS, [LARGE, "no"], ["tied", "fine"]),
        (PERHAPS, [LARGE, NONE, 2.0], ["tied", "fine", "tied"]),  # the larger one takes too long
        (LIKELY, [LARGE, 2.0], ["fine", "fine"]),
        (LIKELY, [2.0], ["fine"]),
        (LIKELY, ["no"], ["fine"]),
        (LIKELY, [NONE, 2.0], ["fine", "tied"]),  # not seen to bind in time
        (LIKELY, [NONE, LARGE, 2.0], ["fine", "tied", "fine"]),
        (LIKELY, [LARGE, NONE], ["fine", "fine"]),
        (SURELY, [2.0], ["fine"]),
        (SURELY, [NONE], ["fine"]),
    ],
)
def test_the_larger_program_is_solved_where_memory_binds(binds: Binds, said: list[Any], asked: list[str]) -> None:
    solver = _Solver(answers(*said))
    found, last, notes = solve_halved(make, solver, 100.0, lambda: solver.now, binds=binds)
    assert solver.names() == asked and found.name == asked[-1]
    assert last is solver.answers[len(said) - 1]
    assert bool(notes) == (found.name == "fine" and (len(asked) > 1 or binds is SURELY))


def test_the_larger_program_starts_from_what_is_known() -> None:
    first = solution(2.0, "feasible", 1.9, large=True)
    solver = _Solver([first, solution(1.95)], takes=3.0)
    _, found, _ = solve_halved(make, solver, 100.0, lambda: solver.now)
    known = {"relaxed": [7, 8, 8], "plan_seconds": pytest.approx(0.6 * 97.0), "without_memory": 1.9, "proved": -np.inf}
    assert solver.asked == [("tied", None, 100.0, {"rows": False}), ("fine", [7, 9, 9], 97.0, known)]
    assert found.report["without_memory"] == 1.9
    assert start_of(TIED.table, FINE.table, np.array([7, 9])).tolist() == [7, 9, 9]


@pytest.mark.parametrize("binds", [PERHAPS, LIKELY])
def test_a_first_program_without_a_better_plan_ends_the_search(binds: Binds) -> None:
    first = solution(np.inf, "feasible", lower=3.0, large=True)
    solver = _Solver([first])
    assert solve_halved(make, solver, 100.0, lambda: 0.0, cutoff=3.0, binds=binds)[1] is first
    assert len(solver.asked) == 1


def test_nothing_is_solved_after_an_interrupt_or_the_limit() -> None:
    for interrupted, takes in ((True, 1.0), (False, 200.0)):
        first = solution(2.0, "feasible", large=True)
        first.report["interrupted"] = interrupted
        solver = _Solver([first], takes)
        assert solve_halved(make, solver, 100.0, lambda s=solver: s.now)[1] is first and len(solver.asked) == 1


@pytest.mark.parametrize("one", [problem("tied", [0, 1, 2]), problem("tied", [0] * 9, None)])
@pytest.mark.parametrize("binds", list(Binds))
def test_one_program_alone_has_all_the_time(one: Any, binds: Binds) -> None:
    solver = _Solver([solution(2.0)])
    solve_halved(lambda halved: one, solver, 100.0, lambda: solver.now, binds=binds)
    assert solver.asked == [(one.name, None, 100.0, {})]


def test_a_proof_gets_a_part_of_the_time_as_long_as_memory_does_not_bind() -> None:
    solver = _Solver(answers(LARGE, 2.0), takes=10.0)
    solve_halved(make, solver, 100.0, lambda: solver.now, free_part=0.4)
    assert [(a[0], a[2]) for a in solver.asked] == [("tied", 40.0), ("fine", 90.0)]


@pytest.mark.parametrize(("takes", "asked"), [(6.0, ["fine"]), (7.0, ["tied", "fine"])])
def test_the_larger_program_is_looked_at_first_where_there_is_time(takes: float, asked: list[str]) -> None:
    """A fifth of the time is 20 seconds, which has to be three times what making it takes."""
    solver = _Solver(answers(2.0) if len(asked) == 1 else answers(LARGE, 2.0))

    def slowly(halved: bool) -> Any:
        solver.now += takes
        return make(halved)

    solve_halved(slowly, solver, 100.0, lambda: solver.now, binds=LIKELY)
    assert solver.names() == asked


def test_where_memory_binds_another_part_of_it() -> None:
    solver = _Solver(answers(LARGE, 2.0), takes=20.0)
    solve_halved(make, solver, 100.0, lambda: solver.now, bound_part=0.25)
    assert [(a[0], a[2]) for a in solver.asked] == [("tied", 100.0), ("fine", 40.0)], "if plans get better, half of it"
    assert solver.asked[1][3]["steady_seconds"] == 20.0 and solver.asked[1][3]["plan_seconds"] == pytest.approx(12.0)


def test_a_bound_of_the_smaller_program_is_none_of_the_larger_one() -> None:
    """Two decisions may be cheaper than one for all; the other way round a bound holds."""
    first, second = solution(np.inf, "feasible", 1.9, large=True), solution(np.inf, "feasible", 1.7)
    for binds, wanted in ((PERHAPS, [None, -np.inf, 1.7]), (LIKELY, [None, 1.9])):
        solver = _Solver([replaced(first), replaced(second), solution(1.95)])
        solve_halved(make, solver, 100.0, lambda s=solver: s.now, binds=binds)
        assert [a[3].get("proved") for a in solver.asked] == wanted


def replaced(answer: Any) -> Any:
    """A copy with a report of its own."""
    return SimpleNamespace(**{**vars(answer), "report": dict(answer.report)})


def test_that_part_is_no_less_than_twice_what_the_program_took_without_a_budget() -> None:
    for took, wanted in ((5.0, 20.0), (15.0, 30.0), (21.0, 80.0)):  # seconds; all that is left where half is less
        first = solution(2.0, "feasible", large=True, took=took)
        solver = _Solver([first, solution(2.0)], takes=20.0)
        solve_halved(make, solver, 100.0, lambda s=solver: s.now, bound_part=0.25)
        assert solver.asked[1][3].get("steady_seconds", solver.asked[1][2]) == wanted
        assert ("plan_seconds" in solver.asked[1][3]) == (took < 20.0), (
            "for another program, which there is no time for"
        )


def test_what_was_left_without_proof_goes_on_from_there() -> None:
    first, second = solution(2.0, "feasible", 1.8, large=True), solution(1.95, "feasible", 1.9)
    second.report["rounding_error_seconds"] = 0.01
    solver = _Solver([first, second], takes=3.0)
    _, found, _ = solve_halved(make, solver, 100.0, lambda: solver.now)
    left = Left.of(True, found)
    assert left is not None
    solver = _Solver([solution(1.91)])
    problem, again, notes = solve_halved(make, solver, 50.0, lambda: solver.now, left_before=left)
    known = {"relaxed": [7, 8, 8], "without_memory": 1.8, "proved": pytest.approx(1.89)}
    assert solver.asked == [("fine", [7, 9], 50.0, known)]
    assert problem.name == "fine" and again.objective == 1.91 and notes == (halving.HALVED,)
    assert Left.of(True, solution(2.0)) is None, "proved"
    assert Left.of(False, solution(2.0, "feasible")) is None, "memory did not bind"


def test_also_of_a_program_that_cannot_be_halved() -> None:
    one, first = problem("tied", [0, 1, 2]), solution(2.0, "feasible", 1.9, large=True)
    solver = _Solver([first, solution(1.95)], takes=20.0)
    _, found, notes = solve_halved(lambda halved: one, solver, 100.0, lambda: solver.now, bound_part=0.25)
    known = {"relaxed": [7, 8], "without_memory": 1.9, "proved": 1.9, "steady_seconds": 20.0}
    assert solver.asked == [("tied", None, 100.0, {"rows": False}), ("tied", [7, 9], 40.0, known)]
    assert found.objective == 1.95 and found.report["without_memory"] == 1.9 and not notes
    assert found.report["free_seconds"] == first.seconds
    solver = _Solver([solution(2.0)])  # it does not bind
    solve_halved(lambda halved: one, solver, 100.0, lambda: solver.now, bound_part=0.25)
    assert len(solver.asked) == 1


def test_programs_of_three_axes_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = [SimpleNamespace(table=np.zeros((30, 40))), SimpleNamespace(table=np.zeros((20, 10)))]
    monkeypatch.setattr(halving, "WIDE_CELLS", 1400)
    assert not halving.wide(SimpleNamespace(edges=edges))
    assert halving.wide(SimpleNamespace(edges=[*edges, SimpleNamespace(table=np.zeros((1, 1)))]))

"""Two decisions for the repeated layers where memory binds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.costs import facts
from autoshard_ilp.costs.fold import LEAST_SPLIT, split
from autoshard_ilp.explore import loaded
from autoshard_ilp.explore.again import problem_of, reprice
from autoshard_ilp.program import solve
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program
from autoshard_ilp.progress import Progress
from autoshard_ilp.search import attempt, halving, kinds
from autoshard_ilp.search.division import division_of
from autoshard_ilp.search.halving import Left, Tied, best_of, solve_divided, start_of

DEPTH = 16
IN_TWO = halving.HALVED, halving.DIVIDED.partition("{")[0]
"""How the notes of a plan begin whose repeated layers share two decisions."""

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
    fine = split(classes, backward, 0.5)
    assert fine[:5] == [0, 0, 0, 3, 3]  # layers 0 1 2 | 3 4
    assert fine[5:10] == [4, 4, 1, 1, 1]  # layers 4 3 | 2 1 0
    assert fine[10:] == [2, 2, 2]
    fine = split(classes, backward, 0.8)
    assert fine[:5] == [0, 0, 0, 0, 3] and fine[5:10] == [4, 1, 1, 1, 1]
    for share, first in ((1e-3, 1), (0.2, 1), (0.4, 2), (0.999, 4)):  # some are the first, and some are not
        assert split(classes, backward, share)[:5].count(0) == first


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_division_refines(members: list[tuple[int, bool]], share: float) -> None:
    classes, backward = [c for c, _ in members], [b for _, b in members]
    fine = split(classes, backward, share)
    whole_of: dict[int, int] = {}
    for c, f in zip(classes, fine, strict=True):
        assert whole_of.setdefault(f, c) == c, "a finer class lies within one class"
    for c in set(classes):
        parts = [f for k, f in zip(classes, fine, strict=True) if k == c]
        assert len(set(parts)) == 1 or len(parts) >= LEAST_SPLIT
        assert len(set(parts)) <= 2


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """Steps of this file count as large: groups of layers, not single ones, decide apart."""
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

    def counted(graph: Any, *args: Any, **options: Any) -> Any:
        graphs.append(graph)
        return read(graph, *args, **options)

    monkeypatch.setattr(attempt, "read", counted)
    plan = autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)
    assert any(note.startswith(IN_TWO) for note in plan.notes), plan.notes
    assert len(graphs) == 1


def test_a_mixture_of_layouts_uses_the_memory_that_one_layout_for_all_must_leave(
    loose: autoshard.Plan, tight: autoshard.Plan
) -> None:
    assert tight.memory.peak_bytes <= 95 * loose.memory.peak_bytes // 100
    assert tight.status == "optimal" and tight.lower_bound == pytest.approx(tight.cost.total_s, rel=1e-9)
    assert any(note.startswith(IN_TWO) for note in tight.notes), tight.notes
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


ORIGINS: list[tuple[dict[str, Any], float | None]] = [
    ({}, 0.0),
    ({"halved": True}, 0.5),
    ({"first_share": 0.75}, 0.75),
    ({"first_share": "x"}, None),
    ({"first_share": 1}, None),
]


@pytest.mark.parametrize(("origin", "share"), ORIGINS)
def test_how_a_loaded_plan_divides_its_layers(tight: autoshard.Plan, origin: dict[str, Any], share: Any) -> None:
    plan = replace(tight, origin=origin)
    if share is None:
        with pytest.raises(autoshard.PlanMismatchError, match="first_share"):
            loaded._first_share(plan)
    else:
        assert loaded._first_share(plan) == share


def test_in_a_small_step_every_layer_decides_for_itself(
    loose: autoshard.Plan, tight: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "FEW_OPERATIONS", len(loose.trail.graph.ops))  # type: ignore[union-attr]
    plan = autoshard.optimize(stack, MESH, 95 * loose.memory.peak_bytes // 100, **OPTIONS)
    assert halving.APART in plan.notes and plan.status == "optimal"
    assert plan.cost.total_s <= tight.cost.total_s * (1 + 1e-9)
    assert not any("each half" in note for note in plan.notes)


@pytest.mark.parametrize("hardware", ["h100", "tpu-v5e"])
def test_a_plan_costs_the_same_however_the_layers_are_divided(hardware: str) -> None:
    """On GPUs layers pay different shares of combined collectives: members of a class pay the mean of all layers."""
    plan = autoshard.optimize(stack, {"data": 8}, "1GB", **{**OPTIONS, "hardware": hardware})
    problem = problem_of(plan)
    question = problem.step, problem.infos, problem.request, Progress(False)
    tied = reprice(*question)
    found = solve(tied.program, OPTIONS["solver"])
    for share in (0.25, 0.5, 0.75):
        divided = reprice(*question, share)
        choices = start_of(tied.table, divided.table, found.choices)
        assert len(divided.table.classes) > len(tied.table.classes)
        assert divided.program.cost(choices) == pytest.approx(found.objective, rel=1e-9)
        assert divided.program.peak(choices) == found.peak_bytes


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
        name = getattr(problem, "name", "kind")
        self.asked.append((name, None if start is None else start.tolist(), seconds, keywords))
        self.now += self.takes
        answer = self.answers[len(self.asked) - 1]
        if name == "fine" and "relaxed" in answer.report:
            answer.report["relaxed"] = np.array([7, 8, 8])
        return answer

    def names(self) -> list[str]:
        return ["prices" if a[3].get("mixing") else a[0] for a in self.asked]


def problem(name: str, class_of: list[int], capacity: int | None = 1, share: float = 0.0) -> Any:
    members: dict[int, list[int]] = {}
    for op, c in enumerate(class_of):
        members.setdefault(c, []).append(op)
    classes = [SimpleNamespace(members=tuple(members[c])) for c in sorted(members)]
    layout = {"classes": classes, "class_of": np.array(class_of), "alike": np.array([0, 1, 1, 1, 1][: len(class_of)])}
    graph = SimpleNamespace(ops=[SimpleNamespace(phase="forward") for _ in class_of])
    tied = any(len(c.members) > 1 for c in classes)
    table = SimpleNamespace(first_share=share, graph=graph, tied=tied, **layout)
    nodes = [SimpleNamespace(costs=np.zeros(1)) for _ in classes]
    answers = {"cost": lambda x: float(x[0]), "peak": lambda x: 0}
    program = SimpleNamespace(capacity=capacity, nodes=nodes, edges=[], cells=lambda: 0, **answers)
    return SimpleNamespace(name=name, table=table, program=program, kinds=lambda *_: iter(()))


TIED, FINE = problem("tied", [0, 1, 1, 1, 1]), problem("fine", [0, 1, 1, 2, 2], share=0.5)


def make(first_share: float) -> Any:
    """The division that is asked for lies after the second of four layers, or after the third."""
    return {0.0: TIED, 0.5: FINE, 0.75: problem("fine", [0, 1, 1, 1, 2], share=0.75)}[first_share]


def solution(
    objective: float = np.inf, status: str = "optimal", lower: float = 0.0, large: bool = False, took: float = 1.0
) -> Any:
    """``large``: the best plan without memory is known, and does not fit."""
    choices = None if np.isinf(objective) else np.array([7, 9])
    report = {"relaxed": np.array([7, 8])} if large else {}
    known = {"status": status, "objective": objective, "choices": choices, "lower_bound": lower, "seconds": took}
    known["gap"] = 1 - lower / objective
    return SimpleNamespace(report=report, **known)


LARGE, NONE, MIXED = "large", "none", "mixed"


def answers(*kinds: Any) -> list[Any]:
    known = {LARGE: {"status": "feasible", "large": True}, "no": {"status": "infeasible"}}
    known |= {NONE: {"status": "feasible"}, MIXED: {"status": "feasible"}}
    return [solution(**known[k]) if isinstance(k, str) else solution(k) for k in kinds]


@pytest.mark.parametrize(
    ("surely", "said", "asked"),
    [
        (False, [2.0], ["tied"]),  # what fits without looking at memory is the answer
        (False, ["no"], ["tied"]),
        (False, [LARGE, MIXED, 2.0], ["tied", "prices", "fine"]),
        (False, [LARGE, MIXED, "no"], ["tied", "prices", "fine"]),
        (False, [LARGE, MIXED, NONE, 2.0], ["tied", "prices", "fine", "tied"]),  # the larger one takes too long
        (True, [MIXED, 2.0], ["prices", "fine"]),
        (True, [MIXED, NONE], ["prices", "fine"]),
    ],
)
def test_the_larger_program_is_solved_where_memory_binds(surely: bool, said: list[Any], asked: list[str]) -> None:
    solver = _Solver(answers(*said))
    found, last, notes = solve_divided(make, solver, 100.0, lambda: solver.now, surely=surely)
    assert solver.names() == asked and found.name == asked[-1]
    assert last is solver.answers[len(said) - 1]
    assert bool(notes) == (found.name == "fine")


def test_the_larger_program_starts_from_what_is_known() -> None:
    first, prices = solution(2.0, "feasible", 1.9, large=True), solution()
    prices.report["prices"] = {5: 1e-9}
    solver = _Solver([first, prices, solution(1.95)], takes=3.0)
    _, found, notes = solve_divided(make, solver, 100.0, lambda: solver.now)
    known = {"relaxed": [7, 8, 8], "plan_seconds": pytest.approx(0.6 * 97.0), "without_memory": 1.9, "proved": -np.inf}
    assert solver.asked == [
        ("tied", None, 100.0, {"rows": False}),
        ("tied", None, 97.0 * halving.MIXING_SHARE, {"mixing": True, "relaxed": [7, 8], "without_memory": 1.9}),
        ("fine", [7, 9, 9], 94.0, {**known, "prices": {5: 1e-9}}),
    ]
    assert found.report["without_memory"] == 1.9 and notes == (halving.HALVED,)
    assert start_of(TIED.table, FINE.table, np.array([7, 9])).tolist() == [7, 9, 9]


@pytest.mark.parametrize(
    ("before", "bound", "asked", "hardly"),
    [
        (1.9, 1.999, True, True),  # little was known of the best plan without a budget; it costs next to the same
        (1.9, 1.95, True, False),  # or it might not
        (1.999, 1.999, True, True),  # much was known, with one decision for all repeated layers
        (1.7, 1.999, False, False),  # so little was known that a proof is not in sight
    ],
)
@pytest.mark.parametrize("long", [False, True])
def test_a_budget_that_hardly_costs_needs_no_long_proof(
    before: float, bound: float, asked: bool, hardly: bool, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, met = solution(2.0, "feasible", before, large=True), solution(2.0, "feasible", 1.0)
    solver, bounds = _Solver([first, met, solution(2.0, "feasible", 1.0)]), []

    def free_bound(problem: Any, plan: np.ndarray, seconds: float) -> float:
        bounds.append((problem.name, plan.tolist(), seconds))
        return bound

    for program in (TIED.program, FINE.program):
        monkeypatch.setattr(program, "cost", lambda x: 2.0)
    monkeypatch.setattr(halving, "LONG_CELLS", -1 if long else 0)
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, free_bound=free_bound)
    assert bounds == [("fine", [7, 9, 9], pytest.approx(halving.FREE_SHARE * 98.0))] * asked
    keywords = solver.asked[-1][3]
    assert solver.names() == ["tied", "prices", "fine"]
    assert keywords["without_memory"] == (bound if hardly else before)
    assert keywords["proved"] == (bound if hardly else -np.inf)
    assert keywords.get("relative_gap") == (halving.HARDLY if hardly and long else None)
    assert found.report.get("free_bound") == (bound if hardly else None)


def test_an_interrupt_of_that_proof_ends_the_search_with_its_plan() -> None:
    first, met = solution(2.0, "feasible", 6.9, large=True), solution(7.0, "feasible", 1.0)
    first.report["relaxed"] = np.array([8, 8])
    solver = _Solver([first, met, solution(7.0, "feasible", 1.0)])

    def free_bound(problem: Any, plan: np.ndarray, seconds: float) -> float:
        raise KeyboardInterrupt

    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, free_bound=free_bound)
    assert solver.asked[-1][1:3] == ([7, 9, 9], 0.0) and found.report["interrupted"]


@pytest.fixture
def one_kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program with one decision for all layers has one kind, of the second of ten strategies."""
    kept = [np.arange(10) == 1, np.arange(10) == 1]
    monkeypatch.setattr(TIED, "kinds", lambda *_: iter([kept]))
    monkeypatch.setattr(kinds, "restricted", lambda program, kept: program)
    yield


def of_kind(objective: float) -> Any:
    return replace_in(solution(objective), choices=np.array([0, 0]))


def replace_in(answer: Any, **fields: Any) -> Any:
    return SimpleNamespace(**{**vars(answer), **fields})


def test_a_poor_start_is_compared_with_plans_of_known_kinds(one_kind: None) -> None:
    first, poor = solution(np.inf, "feasible", 1.9, large=True), solution(3.0, "feasible", 2.0)
    solver = _Solver([first, poor, of_kind(2.5), solution(2.2, "feasible", 2.0)])
    _, found, notes = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert solver.names() == ["tied", "prices", "kind", "tied"] and notes == ()
    seconds, keywords = solver.asked[2][2:]
    assert seconds == pytest.approx(kinds.PART * halving.KINDS_SHARE * 98.0)
    assert keywords == {"cutoff": 3.0, "relative_gap": kinds.GAP}
    assert solver.asked[3][1] == [1, 1], "the plan of that kind is the start"
    assert solver.asked[3][3]["proved"] == 2.0, "the program is the one whose bound prices have shown"
    assert found.report["by_kind"]


@pytest.mark.parametrize(("cost", "good"), [(2.015, True), (2.03, False)])
def test_a_good_start_needs_no_kinds(cost: float, good: bool, one_kind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plan that is put together, which may be better than what prices have met."""
    monkeypatch.setattr(FINE.program, "cost", lambda x: cost if x[0] == 7 else 2.01)
    first, met = solution(np.inf, "feasible", 1.9, large=True), solution(2.05, "feasible", 2.0)
    kind = [] if good else [of_kind(2.01)]
    solver = _Solver([first, met, *kind, solution(2.005, "feasible", 2.0)])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert solver.names() == ["tied", "prices", *["kind"] * len(kind), "fine"]
    assert found.report["by_kind"] != good
    assert solver.asked[-1][1] == ([7, 9, 9] if good else [1, 1, 1])
    assert good or solver.asked[2][3]["cutoff"] == cost, "only a better one is of use"


@pytest.mark.parametrize("better", [True, False])
def test_similar_steps_are_looked_at_by_kind_only(better: bool, one_kind: None) -> None:
    kind = of_kind(2.5) if better else solution(status="feasible")
    solver = _Solver([kind, solution(2.5, "feasible", 2.0)])
    found, _, _ = solve_divided(make, solver, 100.0, lambda: solver.now, cutoff=3.0, surely=True, by_kind=True)
    assert solver.names() == ["kind", "tied"] and found is TIED
    assert solver.asked[0][3]["cutoff"] == 3.0
    assert solver.asked[1][2] == (0.0 if better else 99.0), "it is taken up again if it is the best"


def test_an_interrupted_kind_ends_the_search_with_its_plan(one_kind: None) -> None:
    kind = of_kind(2.5)
    kind.report["interrupted"] = True
    first, poor = solution(np.inf, "feasible", 1.9, large=True), solution(3.0, "feasible", 2.0)
    solver = _Solver([first, poor, kind, solution(2.5, "feasible", 2.0)])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert solver.asked[3][1:3] == ([1, 1], 0.0) and found.report["interrupted"]


@pytest.mark.parametrize("inside", [True, False])
def test_the_kind_is_solved_further_where_its_plan_is_taken_up_again(inside: bool, one_kind: None) -> None:
    """Only where the plan is still of that kind; its choices are those of the kind, counted among what is left."""
    choices = np.array([1, 1]) if inside else np.array([1, 2])
    left = Left(0.0, choices, np.array([7, 8]), 1.8, 1.7, 3.0, by_kind=True)
    solver = _Solver([of_kind(2.4)] * inside + [solution(2.3, "feasible", 1.9)])
    solve_divided(make, solver, 100.0, lambda: solver.now, left_before=left)
    assert solver.names() == ["kind"] * inside + ["tied"]
    if inside:
        assert solver.asked[0][1:] == ([0, 0], 50.0, {"relative_gap": kinds.GAP})
    assert solver.asked[-1][1] == list(choices)


def test_one_that_was_only_looked_at_gets_a_bound_where_it_is_taken_up_again(one_kind: None) -> None:
    """What it would cost without a budget, which takes half of the time, and what that shows."""
    left = Left(0.0, np.array([1, 1]), np.array([3, 3]), -np.inf, -np.inf, 0.0, by_kind=True)
    free, kind, last = solution(np.inf, "feasible", 1.8, large=True), of_kind(2.4), solution(2.3, "feasible", 1.9)
    solver = _Solver([free, kind, last])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, left_before=left)
    assert solver.names() == ["tied", "kind", "tied"]
    assert solver.asked[0][1:] == ([1, 1], 50.0, {"rows": False})
    assert solver.asked[2][1] == [1, 1] and solver.asked[2][3]["relaxed"] == [7, 8]
    assert solver.asked[2][3]["proved"] == 1.8 and found.report["without_memory"] == 1.8
    solver = _Solver([replace_in(solution(2.2, "feasible", 1.8), report={"interrupted": True}), last])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, left_before=left)
    assert solver.names() == ["tied", "tied"] and found.report["interrupted"]
    assert solver.asked[1][1:3] == ([7, 9], 0.0), "the better plan, at once"


def test_an_interrupt_while_a_kind_is_taken_up_again_ends_the_search(one_kind: None) -> None:
    left, kind = Left(0.0, np.array([1, 1]), np.array([7, 8]), 1.8, 1.7, 3.0, by_kind=True), of_kind(2.4)
    kind.report["interrupted"] = True
    solver = _Solver([kind, solution(2.4, "feasible", 1.9)])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, left_before=left)
    assert solver.asked[1][1:3] == ([1, 1], 0.0) and found.report["interrupted"]


@pytest.mark.parametrize(
    ("bound_s", "others", "left_early"), [(2.8, True, True), (2.6, True, False), (2.8, False, False)]
)
def test_what_its_budget_makes_far_too_dear_is_left_where_others_may_be_tried(
    bound_s: float, others: bool, left_early: bool
) -> None:
    """Without a budget 1.9 s; with it, 2.8 s at least: 32 % of the step. What is known is enough to go on from."""
    first, shown = solution(np.inf, "feasible", 1.9, large=True), solution(2.9, "feasible", bound_s)
    solver = _Solver([first, shown, solution(2.9, "feasible", bound_s)])
    options = {"bound_part": 0.25} if others else {}
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now, **options)
    assert solver.names() == ["tied", "prices"] + ["fine"] * (not left_early)
    if left_early:
        left = Left.of(0.0, found)
        assert left is not None and left.without_memory == 1.9 and left.lower_bound == bound_s


def test_the_layers_are_divided_as_prices_ask_for() -> None:
    """Three layers are as in the faster plan, which holds more; the start is their mixture."""
    first, prices = solution(np.inf, "feasible", 1.9, large=True), solution(lower=2.01)
    prices.report["mixture"] = [(0.2, 2.1, np.array([1, 4])), (0.8, 2.0, np.array([1, 3]))]
    solver = _Solver([first, prices, solution(1.95)])
    found, _, notes = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert found.table.first_share == 0.75 and notes == (halving.DIVIDED.format(75),)
    assert solver.asked[2][:2] == ("fine", [1, 3, 4])


@pytest.mark.parametrize(
    ("weights", "seconds", "share"),
    [
        ([0.8, 0.2], [2.0, 2.1], 0.75),  # no more layers than fit as in the faster plan
        ([0.7, 0.3], [2.1, 2.0], 0.75),  # and as many as must as in the slower one
        ([0.99, 0.01], [2.0, 2.1], 0.75),  # at least one layer is of either kind
        ([0.505, 0.495], [2.0, 2.1], 0.5),
        ([1.0], [2.0], None),
    ],
)
def test_a_mixture_is_rounded_to_layers(weights: list[float], seconds: list[float], share: float | None) -> None:
    plans = [np.array([0, k]) for k in range(len(weights))]
    division = division_of(TIED.table, list(zip(weights, seconds, plans, strict=True)))
    assert (division and division.first_share) == share
    alike = [(0.5, 2.0, np.array([0, 1])), (0.5, 2.1, np.array([1, 1]))]
    assert division_of(TIED.table, alike) is None, "they differ in what is there once"
    few = problem("tied", [0, 1, 1, 1])
    assert division_of(few.table, [(0.5, 2.0, np.array([0, 1])), (0.5, 2.1, np.array([0, 2]))]) is None, "three layers"


def test_the_best_start_fits_or_nearly_does() -> None:
    peaks = {1: 12, 2: 8, 3: 11, 4: 9}
    program: Any = SimpleNamespace(capacity=10, cost=lambda x: float(x[0]), peak=lambda x: peaks[int(x[0])])
    starts = {k: np.array([k]) for k in peaks}
    assert best_of(program, [starts[1], starts[4], starts[2]]) is starts[2]
    assert best_of(program, [starts[1], starts[3]]) is starts[3]
    assert best_of(program, []) is None and best_of(program, [np.array([np.inf])]) is None


def test_a_first_program_without_a_better_plan_ends_the_search() -> None:
    first = solution(np.inf, "feasible", lower=3.0, large=True)
    solver = _Solver([first])
    assert solve_divided(make, solver, 100.0, lambda: 0.0, cutoff=3.0)[1] is first
    assert len(solver.asked) == 1


def test_nothing_is_solved_after_an_interrupt_or_the_limit() -> None:
    for interrupted, takes in ((True, 1.0), (False, 200.0)):
        first = solution(2.0, "feasible", large=True)
        first.report["interrupted"] = interrupted
        solver = _Solver([first], takes)
        assert solve_divided(make, solver, 100.0, lambda s=solver: s.now)[1] is first and len(solver.asked) == 1


@pytest.mark.parametrize("one", [problem("tied", [0, 1, 2]), problem("tied", [0] * 9, None)])
@pytest.mark.parametrize("surely", [False, True])
def test_one_program_alone_has_all_the_time(one: Any, surely: bool) -> None:
    solver = _Solver([solution(2.0)])
    solve_divided(lambda share: one, solver, 100.0, lambda: solver.now, surely=surely)
    assert solver.asked == [(one.name, None, 100.0, {})]


def test_a_proof_gets_a_part_of_the_time_as_long_as_memory_does_not_bind() -> None:
    solver = _Solver(answers(LARGE, MIXED, 2.0), takes=10.0)
    solve_divided(make, solver, 100.0, lambda: solver.now, free_part=0.4)
    assert [(a[0], a[2]) for a in solver.asked] == [("tied", 40.0), ("tied", 36.0), ("fine", 80.0)]


def test_where_memory_binds_another_part_of_it() -> None:
    solver = _Solver(answers(LARGE, MIXED, 2.0), takes=20.0)
    solve_divided(make, solver, 100.0, lambda: solver.now, bound_part=0.25)
    asked = [(a[0], a[2]) for a in solver.asked]
    assert asked == [("tied", 100.0), ("tied", 16.0), ("fine", 20.0)], "if plans get better, half of it"
    assert solver.asked[2][3]["steady_seconds"] == 20.0 and solver.asked[2][3]["plan_seconds"] == pytest.approx(12.0)


def test_what_shows_nothing_when_cut_off_has_a_multiple_of_what_the_program_took_without_a_budget() -> None:
    """What that is more than its share is added to what follows, as far as there is time."""
    for took, wanted in ((0.5, 8.0), (2.0, 16.0), (9.0, 25.0)):
        now, parts = [0.0], halving._Parts(1.0, 1.0, 1.0)
        search = halving._Divided(make, _Solver([]), 50.0, lambda now=now: now[0], parts, 9.0, False, 0.0, None)
        search.ends = 20.0
        search.known = Left(0.0, None, np.array([7, 8]), -np.inf, 1.9, took)
        assert search._of_what_follows(0.4, 8.0, 0.5) == pytest.approx(wanted)
        now[0] = wanted
        assert search.until_end() == pytest.approx(20.0 - 8.0), "what follows has what it had"


def test_a_bound_of_the_smaller_program_is_none_of_the_larger_one() -> None:
    """Two decisions may be cheaper than one for all; the other way round a bound holds, if it says more than its own,
    without a budget (1.9) or with prices."""
    for prices, fine, proved in ((0.0, 1.92, 1.92), (0.0, 1.7, 1.9), (1.93, 1.7, 1.93)):
        first, second = solution(np.inf, "feasible", 1.9, large=True), solution(np.inf, "feasible", fine)
        solver = _Solver([first, solution(lower=prices), second, solution(1.95)])
        solve_divided(make, solver, 100.0, lambda s=solver: s.now)
        assert [a[3].get("proved") for a in solver.asked] == [None, None, -np.inf, proved]


def test_what_other_budgets_have_shown_does_for_the_smaller_program_too() -> None:
    """It is solved without a budget neither at first nor where the larger one finds no plan."""
    one = problem("tied", [0, 1, 1, 1, 1])
    one.program.peak = lambda choices: 2
    known = Tied(one, np.array([7, 8]), 1.9, 5.0, None)
    solver = _Solver(answers(MIXED, NONE, 2.0), takes=3.0)
    makes = {0.0: one, 0.5: FINE}
    found, last, _ = solve_divided(makes.__getitem__, solver, 100.0, lambda: solver.now, tied=known)
    assert solver.names() == ["prices", "fine", "tied"]
    assert found is one and last is solver.answers[2]
    assert solver.asked[-1][2] == 94.0 and solver.asked[-1][3]["without_memory"] == 1.9


def test_that_part_is_no_less_than_twice_what_the_program_took_without_a_budget() -> None:
    for took, wanted in ((5.0, 20.0), (15.0, 30.0), (21.0, 80.0)):  # seconds; all that is left where half is less
        first = solution(2.0, "feasible", large=True, took=took)
        solver = _Solver([first, solution(), solution(2.0)], takes=20.0)
        solve_divided(make, solver, 100.0, lambda s=solver: s.now, bound_part=0.25)
        prices, fine = solver.asked[1], solver.asked[2]
        assert fine[3].get("steady_seconds", prices[2] / halving.MIXING_MOST) == wanted
        assert ("plan_seconds" in fine[3]) == (took < 20.0), "for another program, which there is no time for"


def test_what_was_left_without_proof_goes_on_from_there() -> None:
    first, second = solution(2.0, "feasible", 1.8, large=True), solution(1.95, "feasible", 1.9)
    second.report |= {"rounding_error_seconds": 0.01, "prices": {5: 1e-9}}
    solver = _Solver([first, solution(), second], takes=3.0)
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now)
    left = Left.of(0.5, found)
    assert left is not None
    solver = _Solver([solution(1.91)])
    problem, again, notes = solve_divided(make, solver, 50.0, lambda: solver.now, left_before=left)
    known = {"relaxed": [7, 8, 8], "without_memory": 1.8, "proved": pytest.approx(1.89), "prices": {5: 1e-9}}
    assert solver.asked == [("fine", [7, 9], 50.0, known)]
    assert problem.name == "fine" and again.objective == 1.91 and notes == (halving.HALVED,)
    assert Left.of(0.5, solution(2.0)) is None, "proved"
    assert Left.of(0.0, solution(2.0, "feasible")) is None, "memory did not bind"


def test_also_of_a_program_that_cannot_be_halved() -> None:
    one, first = problem("tied", [0, 1, 2]), solution(2.0, "feasible", 1.9, large=True)
    solver = _Solver([first, solution(1.95)], takes=20.0)
    _, found, notes = solve_divided(lambda share: one, solver, 100.0, lambda: solver.now, bound_part=0.25)
    known = {"relaxed": [7, 8], "without_memory": 1.9, "proved": 1.9, "steady_seconds": 20.0}
    assert solver.asked == [("tied", None, 100.0, {"rows": False}), ("tied", [7, 9], 40.0, known)]
    assert found.objective == 1.95 and found.report["without_memory"] == 1.9 and not notes
    assert found.report["free_seconds"] == first.seconds
    solver = _Solver([solution(2.0)])  # it does not bind
    solve_divided(lambda share: one, solver, 100.0, lambda: solver.now, bound_part=0.25)
    assert len(solver.asked) == 1


def test_programs_of_three_axes_are_wide_and_halved_without_looking_for_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_tables(*shapes: tuple[int, int]) -> Program:
        """A program of an edge of each shape, every edge between two nodes of its own."""
        sizes = [n for shape in shapes for n in shape]
        nodes = tuple(Node(str(v), np.zeros(n), None) for v, n in enumerate(sizes))
        labels = [np.arange(n) for n in sizes]
        ends = [(2 * e, 2 * e + 1, labels[2 * e], labels[2 * e + 1]) for e in range(len(shapes))]
        edges = tuple(Edge(*end, np.zeros(shape)) for end, shape in zip(ends, shapes, strict=True))
        return Program(nodes, edges, Lifetimes.empty(), None)

    assert of_tables((30, 40), (20, 10)).cells() == 1400
    monkeypatch.setattr(halving, "WIDE_CELLS", 1400)
    assert not halving.wide(of_tables((30, 40), (20, 10)))
    assert halving.wide(of_tables((30, 40), (20, 10), (1, 1)))
    monkeypatch.setattr(halving, "WIDE_CELLS", -1)
    solver, asked = _Solver(answers(LARGE, 2.0)), []
    monkeypatch.setattr(TIED, "kinds", lambda like, least: (asked.append((like.tolist(), least)), iter(()))[1])
    _, _, notes = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert solver.names() == ["tied", "fine"] and notes == (halving.HALVED,)
    assert asked == [([7, 8], 0.0)], "the kinds that the best plan without a budget is like"
    assert solver.asked[-1][3]["relative_gap"] == halving.HARDLY, "a long proof of how much exactly is worth little"


def test_wide_programs_begin_from_the_first_plan_of_a_known_kind(
    one_kind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, "WIDE_CELLS", -1)
    monkeypatch.setattr(TIED, "kinds", lambda *_, kind=TIED.kinds: iter([*kind(), *kind()]))
    solver = _Solver([*answers(LARGE), of_kind(2.5), solution(2.2, "feasible", 2.0)])
    _, found, _ = solve_divided(make, solver, 100.0, lambda: solver.now)
    assert solver.names() == ["tied", "kind", "tied"] and found.report["by_kind"], "one is enough"
    assert solver.asked[2][1] == [1, 1]


@pytest.mark.parametrize("objective", [2.0, np.inf])
def test_a_wide_program_alone_does_so_where_no_plan_is_found(
    objective: float, one_kind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, "WIDE_CELLS", -1)
    one = problem("tied", [0, 1, 2])
    monkeypatch.setattr(one, "kinds", TIED.kinds)
    solver = _Solver([solution(objective, "feasible", 1.9), of_kind(2.5), solution(2.2, "feasible", 2.0)], takes=10.0)
    _, found, notes = solve_divided(lambda share: one, solver, 100.0, lambda: solver.now)
    assert solver.asked[0] == ("tied", None, 100.0, {"plan_seconds": 100.0 * halving.ALONE_SHARE})
    if np.isfinite(objective):
        assert len(solver.asked) == 1 and found.objective == 2.0
    else:
        known = {"relaxed": [0, 0, 0], "without_memory": 1.9, "proved": 1.9}
        assert solver.names() == ["tied", "kind", "tied"] and found.objective == 2.2 and not notes
        assert solver.asked[2][1:] == ([1, 1], 80.0, known)


def test_a_mixture_far_from_the_bound_says_nothing() -> None:
    for bound, share in ((2.01, 0.75), (1.9, 0.5)):
        first, prices = solution(np.inf, "feasible", 1.9, large=True), solution(lower=bound)
        prices.report["mixture"] = [(0.2, 2.1, np.array([1, 4])), (0.8, 2.0, np.array([1, 3]))]
        solver = _Solver([first, prices, solution(1.95)])
        assert solve_divided(make, solver, 100.0, lambda s=solver: s.now)[0].table.first_share == share


def test_where_bytes_cost_nothing_memory_does_not_bind_after_all() -> None:
    for price, asked in ((0.0, ["tied", "prices", "tied"]), (1e-9, ["tied", "prices", "fine"])):
        first, prices = solution(np.inf, "feasible", 1.9, large=True), solution(2.0, "feasible", 1.9999)
        prices.report["prices"] = {5: price}
        solver = _Solver([first, prices, solution(2.0)])
        solve_divided(make, solver, 100.0, lambda s=solver: s.now)
        assert solver.names() == asked
        assert solver.asked[-1][1] == ([7, 9] if price == 0 else [7, 9, 9]), "the plan that fits is a start"


def test_an_interrupt_while_prices_are_looked_for_ends_the_search() -> None:
    first, prices = solution(np.inf, "feasible", 1.9, large=True), solution(2.0, "feasible", 1.9)
    prices.report["interrupted"] = True
    solver = _Solver([first, prices])
    assert solve_divided(make, solver, 100.0, lambda: solver.now)[1] is prices

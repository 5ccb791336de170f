"""Recomputation by layer: the texts of policies, what they save, and how many layers are chosen."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.graph.remat import POLICIES, Policy, parse_policy
from autoshard_ilp.plan import Plan
from autoshard_ilp.search.fewerblocks import GAIN
from autoshard_ilp.search.rematsearch import DEAR_SHARE, PROVE_PART, blocks_of, recomputed_share, search
from profiles_for_tests import toy

MESH = {"data": 8}
DEPTH = 4


@pytest.mark.parametrize("text", ["never", "selective", "full", "full:3", "selective:2", "full:4+selective"])
def test_policies_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize("text", ["", "some", "never:2", "full:", "full:-1", "selective:2+full", "full:1+never", 3])
def test_other_policies_are_refused(text: Any) -> None:
    with pytest.raises(InputShapeError, match="remat is one of"):
        parse_policy(text)


def test_the_first_blocks_follow_the_first_policy() -> None:
    assert [Policy("full", 2, "selective").of(i) for i in range(4)] == ["full", "full", "selective", "selective"]
    assert {Policy("full").of(i) for i in range(9)} == {"full"}


def residual() -> keras.Model:
    x = inputs = keras.Input((128,), name="x")
    for i in range(DEPTH):
        h = layers.Dense(512, activation="gelu", name=f"up_{i}")(layers.LayerNormalization(name=f"norm_{i}")(x))
        x = layers.Add(name=f"add_{i}")([x, layers.Dense(128, name=f"down_{i}")(h)])
    model = keras.Model(inputs, layers.Dense(8, name="head")(x))
    model.compile(optimizer="sgd", loss="mse")
    return model


OPTIONS: dict[str, Any] = {
    "hardware": toy(),
    "batch_size": 4096,
    "progress": False,
    "pins": {"inputs|targets": "data"},
    "solver": autoshard.SolverOptions(time_limit=120, relative_gap=0.01),
}


@pytest.mark.slow
def test_a_model_that_nearly_fits_recomputes_some_layers_and_the_first_ones() -> None:
    kept = autoshard.optimize(residual, MESH, remat="never", **OPTIONS)
    assert kept.remat == () and kept.remat_policy == "never"
    every = autoshard.optimize(residual, MESH, remat="full", **OPTIONS)
    budget = (3 * kept.memory.peak_bytes + every.memory.peak_bytes) // 4
    some = autoshard.optimize(residual, MESH, budget, **OPTIONS)
    assert some.memory.peak_bytes <= budget < kept.memory.peak_bytes
    assert kept.cost.total_s < some.cost.total_s < every.cost.total_s
    assert kept.cost.flops < some.cost.flops <= every.cost.flops or "selective" in some.remat_policy
    numbers = sorted({int(path.rpartition("_")[2]) for path in some.remat if path.startswith("up_")})
    assert numbers and numbers == list(range(len(numbers))) and len(numbers) < DEPTH, some.remat
    assert any("blocks fit, fewer" in note and "do not fit" in note for note in some.notes), some.notes
    assert recomputed_share(kept) == 0.0 < recomputed_share(some) < recomputed_share(every) < 0.5
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.optimize(residual, MESH, budget, remat="never", **OPTIONS)


# -- the search, without a planner


@dataclass(frozen=True)
class _Cost:
    total_s: float


@dataclass
class _Planner:
    """Blocks of one byte each: a policy fits when what it keeps is at most ``room``."""

    n_blocks: int
    room: float
    plan: Plan
    seconds: dict[str, float] = field(default_factory=lambda: {"never": 0.0, "selective": 1.0, "full": 3.0})
    kept: dict[str, float] = field(default_factory=lambda: {"never": 1.0, "selective": 0.5, "full": 0.1})
    asked: list[str] = field(default_factory=list)

    def __call__(self, text: str, seconds: float, worse_than: float, dear: float) -> Any:
        self.asked.append(text)
        policy = parse_policy(text)
        chosen = [policy.of(i) for i in range(self.n_blocks)]
        if sum(self.kept[p] for p in chosen) > self.room:
            return text
        return replace(self.plan, remat_policy=text, cost=_Cost(sum(self.seconds[p] for p in chosen)))


@pytest.fixture(scope="module")
def any_plan() -> Plan:
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(8)])  # noqa: E731
    return autoshard.optimize(build, MESH, hardware=toy(), mode="predict", batch_size=8, progress=False)


@pytest.mark.parametrize(
    ("room", "policy"),
    [
        (16, "never"),
        (15.9, "selective:1"),
        (12, "selective:8"),
        (8, "selective"),
        (7.9, "full:1+selective"),
        (1.7, "full"),
    ],
)
def test_the_fewest_blocks_that_fit_are_recomputed(room: float, policy: str, any_plan: Plan) -> None:
    planner = _Planner(16, room, any_plan)
    found = search(POLICIES, planner, lambda failed: 16, 100.0)
    assert found.plan is not None and found.plan.remat_policy == policy
    assert len(planner.asked) <= 3 + 4, "bisection"


@pytest.mark.parametrize(
    ("dear", "never_s", "policy", "asked"),
    [
        (0.01, 10.0, "never", ["never"]),
        (0.02, 10.0, "never", ["never", "selective", "full"]),  # quick, so it costs little to be sure
        (0.06, 10.0, "never", ["never", "selective", "full"]),  # 16 and 48 seconds
        (0.06, 40.0, "selective", ["never", "selective", "full"]),
        (0.9, 100.0, "selective", ["never", "selective", "full"]),
    ],
)
def test_a_plan_that_its_budget_makes_dear_is_compared_with_recomputation(
    dear: float, never_s: float, policy: str, asked: list[str], any_plan: Plan
) -> None:
    planner = _Planner(16, 16, any_plan, seconds={"never": never_s / 16, "selective": 1.0, "full": 3.0})
    found = search(POLICIES, planner, lambda failed: 16, 100.0, dear=lambda plan: dear)
    assert found.plan is not None and found.plan.remat_policy == policy
    assert [x for x in planner.asked if x in POLICIES] == asked, "and some blocks"
    assert any("recomputation" in note.lower() for note in found.plan.notes) is (len(asked) > 1)
    planner.asked.clear()
    search(POLICIES, planner, lambda failed: 16, 100.0, dear=lambda plan: dear, some=DEAR_SHARE)
    assert ("full" in planner.asked) is (dear > DEAR_SHARE), "a question is to be answered quickly"


def test_plans_that_recompute_share_the_time_that_is_left(any_plan: Plan) -> None:
    now, given = 0.0, dict[str, float]()

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Plan:
        nonlocal now
        given[policy] = seconds
        now += seconds  # each takes all it may
        return replace(any_plan, remat_policy=policy)

    search(POLICIES, tried, lambda failed: 16, 100.0, lambda: now, dear=lambda plan: 0.5)
    assert given == pytest.approx({"never": 80.0, "selective": 10.0, "full": 10.0})


def test_time_that_no_other_policy_needs_goes_to_fewer_blocks(any_plan: Plan) -> None:
    """Recomputing all blocks is good enough that no third policy follows: what that would have had is there."""
    now, given = 0.0, list[tuple[str, float]]()

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
        nonlocal now
        given.append((policy, seconds))
        now += 10.0
        step_s = 1.0 if policy == "selective" else 9.0
        if policy not in POLICIES:  # no faster
            failed = SimpleNamespace(status="feasible", lower_bound=1.0, report={})
            return SimpleNamespace(step=SimpleNamespace(remat=policy), solution=failed)
        return replace(any_plan, remat_policy=policy, cost=_Cost(step_s))

    def dear(plan: Plan) -> float:
        return 0.5 if plan.remat_policy == "never" else 0.0

    found = search(POLICIES, tried, lambda failed: 16, 100.0, lambda: now, dear=dear)
    asked = [policy for policy, _ in given]
    assert asked[:2] == ["never", "selective"] and "full" not in asked
    assert given[1][1] == pytest.approx(45.0) and given[2][1] == pytest.approx(80.0), "all that is left"
    assert found.plan is not None and found.plan.remat_policy == "selective"


def test_what_is_taken_up_again_has_a_part_of_the_time(any_plan: Plan) -> None:
    """A plan that recomputes nothing and is not proved; nothing else is asked once a part is used up."""
    now, given = 0.0, list[tuple[str, float]]()
    assert any_plan.trail is not None
    solution = replace(any_plan.trail.solution, status="feasible", lower_bound=0.1 * any_plan.trail.solution.objective)
    unproved = replace(any_plan, trail=replace(any_plan.trail, solution=solution))

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
        nonlocal now
        given.append((policy, round(seconds, 6)))
        now += seconds
        if policy == "never":
            return replace(unproved, remat_policy=policy)
        failed = SimpleNamespace(status="infeasible", lower_bound=math.inf)
        return SimpleNamespace(step=SimpleNamespace(remat=policy), solution=failed)

    def need(answer: Any) -> float:
        raise AssertionError("to know how many blocks to try takes time too")

    search(POLICIES, tried, lambda failed: 16, 90.0, lambda: now, dear=lambda plan: 0.5, need=need)
    assert given == [("never", 72.0), ("selective", 6.0), ("full", 6.0), ("never", 6.0)]


def test_a_policy_is_not_tried_for_less_than_shows_something(any_plan: Plan) -> None:
    """What a plan that fits took without a budget says how long a policy takes to show anything."""
    assert any_plan.trail is not None
    known = any_plan.trail.solution
    for free_seconds, wanted in ((3.0, ["selective", "full"]), (4.5, ["selective"]), (6.0, [])):
        report = {**known.report, "free_seconds": free_seconds}
        unproved = replace(known, status="feasible", lower_bound=0.1 * known.objective, report=report)
        now, given = 0.0, list[tuple[str, float]]()

        def tried(policy: str, seconds: float, *_: float, solution: Any = unproved, given: Any = given) -> Plan:
            nonlocal now
            given.append((policy, seconds))
            now += seconds
            assert any_plan.trail is not None
            return replace(any_plan, remat_policy=policy, trail=replace(any_plan.trail, solution=solution))

        found = search(POLICIES, tried, lambda failed: 16, 100.0, lambda: now, dear=lambda plan: 0.5)  # noqa: B023
        assert [policy for policy, _ in given] == ["never", *wanted, "never"]
        assert sum(seconds for _, seconds in given) == pytest.approx(100.0)
        assert all(seconds >= 2 * free_seconds for policy, seconds in given if policy != "never")
        assert found.plan is not None
        untried = [policy for policy in ("selective", "full") if policy not in wanted]
        assert ("not tried" in found.plan.notes[-1]) == bool(untried), found.plan.notes
        assert all(policy in found.plan.notes[-1] for policy in untried)


def test_policies_left_as_too_dear_are_taken_up_where_they_may_be_faster(any_plan: Plan) -> None:
    """The best is solved to the end; of the others only those whose bound leaves room are asked again."""
    asked: list[tuple[str, float, float]] = []

    def plan(policy: str, seconds: float, status: str, bound: float) -> Plan:
        assert any_plan.trail is not None
        solution = replace(any_plan.trail.solution, objective=seconds, status=status, lower_bound=bound)
        trail = replace(any_plan.trail, solution=solution)
        return replace(any_plan, remat_policy=policy, cost=_Cost(seconds), lower_bound=bound, trail=trail)

    def left(policy: str, bound: float) -> Any:
        return SimpleNamespace(step=SimpleNamespace(remat=policy), solution=solution_of(bound))

    def solution_of(bound: float) -> Any:
        return SimpleNamespace(status="feasible", lower_bound=bound, report={})

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
        if policy not in POLICIES:
            return left(policy, 30.0)  # some blocks are no faster
        asked.append((policy, worse_than, dear))
        if dear == 1.0:
            return plan("full", 10.0, "optimal", 10.0) if policy == "full" else plan("never", 9.0, "optimal", 9.0)
        return plan("never", 20.0, "feasible", 5.0) if policy == "never" else left("selective", 9.5)

    found = search(POLICIES, tried, lambda failed: 16, 100.0, dear=lambda plan: 0.06)
    below_20, below_10 = pytest.approx(20.0 * (1 - GAIN)), 10.0  # what is quick may be better by however little
    first = [("never", math.inf, DEAR_SHARE), ("selective", below_20, DEAR_SHARE), ("full", below_20, 1.0)]
    assert asked == [*first, ("never", below_10, 1.0)], "9.5 s at least is slower than the 9 s found by then"
    assert found.plan is not None and found.plan.remat_policy == "never" and found.plan.cost.total_s == 9.0
    assert "no faster plan was found" in found.plan.notes[-1]


@pytest.mark.parametrize(("status", "asked"), [("optimal", ["never"]), ("feasible", ["never", "selective", "full"])])
def test_where_a_plan_takes_long_recomputation_is_tried_if_it_is_not_proved(
    status: str, asked: list[str], any_plan: Plan
) -> None:
    """The budget adds four percent; a proof that takes long is believed."""
    now, tries = [0.0], list[str]()

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
        now[0] += 10.0
        tries.append(policy)
        if policy != "never":
            return policy  # none is better
        assert any_plan.trail is not None
        solution = replace(any_plan.trail.solution, objective=20.0, status=status, lower_bound=19.0)
        trail = replace(any_plan.trail, solution=solution)
        return replace(any_plan, remat_policy=policy, cost=_Cost(20.0), trail=trail)

    search(POLICIES, tried, lambda failed: 1, 100.0, clock=lambda: now[0], dear=lambda plan: 0.04)
    assert list(dict.fromkeys(tries)) == asked


@pytest.mark.parametrize(("bound", "status"), [(7.0, "feasible"), (9.995, "optimal"), (12.0, "optimal")])
def test_a_policy_left_open_counts_in_what_is_proved(bound: float, status: str, any_plan: Plan) -> None:
    """The plan of all blocks is proved to be the best that recomputes; without any, one may take ``bound`` seconds."""

    def plan(policy: str, seconds: float, proved: str, lower: float) -> Plan:
        assert any_plan.trail is not None
        solution = replace(any_plan.trail.solution, objective=seconds, status=proved, lower_bound=lower)
        trail = replace(any_plan.trail, solution=solution)
        return replace(any_plan, remat_policy=policy, cost=_Cost(seconds), lower_bound=lower, trail=trail)

    def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
        if policy == "never":
            return plan("never", 20.0, "feasible", bound)
        return plan("full", 10.0, "optimal", 10.0) if policy == "full" else policy

    found = search(POLICIES, tried, lambda failed: 1, 100.0, dear=lambda plan: 0.1)
    assert found.plan is not None and found.plan.remat_policy == "full"
    told = found.proved(found.plan)
    assert told.lower_bound == min(bound, 10.0) and told.status == status
    assert told.gap == pytest.approx(1 - min(bound, 10.0) / 10.0 if bound < 10 else any_plan.gap)
    assert ("it is not proved that there is none" in told.notes[-1]) == (status == "feasible")


def _costing(any_plan: Plan, seconds: float) -> Plan:
    assert any_plan.trail is not None
    solution = replace(any_plan.trail.solution, objective=seconds)
    return replace(any_plan, cost=_Cost(seconds), trail=replace(any_plan.trail, solution=solution))


def test_where_fewer_blocks_cannot_be_faster_more_are_tried(any_plan: Plan) -> None:
    """All 16 blocks in full take 7 seconds; with fewer than 12 nothing is faster, though all would fit."""
    asked: list[tuple[int, float]] = []

    def tried(text: str, seconds: float, worse_than: float, dear: float) -> Any:
        policy = parse_policy(text)
        if text == "never":
            return text
        k = policy.blocks if policy.blocks is not None else 16
        asked.append((k, worse_than))
        took = 7.0 - (16 - k) / 8 if k >= 12 else 9.0
        lower = SimpleNamespace(status="feasible", lower_bound=worse_than)
        return _costing(any_plan, took) if took < worse_than else SimpleNamespace(solution=lower)

    found = search(("never", "selective"), tried, lambda failed: 16, 100.0)
    below_7, below_6_5 = pytest.approx(7.0 * (1 - GAIN)), pytest.approx(6.5 * (1 - GAIN))
    assert asked[:5] == [(16, math.inf), (8, below_7), (12, below_7), (10, below_6_5), (11, below_6_5)]
    assert asked[5:] and all(k < 8 for k, _ in asked[5:]), "what lies below is looked at last"
    assert found.plan is not None and found.plan.cost.total_s == 6.5
    assert "12 of 16 blocks fit, fewer are no faster or do not fit" in found.plan.notes[-1]


def test_the_fastest_may_lie_between_numbers_of_blocks_that_were_tried(any_plan: Plan) -> None:
    """With eight of 22 blocks the step is shortest; halving misses it, as five take less than eleven."""
    seconds = {22: 6.25, 11: 5.91, 8: 5.72, 5: 5.89, 2: 5.87}
    asked: list[int] = []

    def tried(text: str, limit: float, worse_than: float, dear: float) -> Any:
        k = parse_policy(text).blocks if "selective:" in text else 22
        if text == "never":
            return text
        asked.append(k)
        took = seconds.get(k, 9.0)
        lower = SimpleNamespace(status="feasible", lower_bound=worse_than)
        return _costing(any_plan, took) if took < worse_than else SimpleNamespace(solution=lower)

    def dear(plan: Plan) -> float:  # without a budget: 5.15 seconds and 0.05 per block
        k = next(k for k, s in seconds.items() if s == plan.cost.total_s)
        return max(0.0, 1.0 - (5.15 + 0.05 * k) / plan.cost.total_s)

    found = search(("never", "selective"), tried, lambda failed: 22, 100.0, dear=dear)
    assert found.plan is not None and found.plan.cost.total_s == 5.72
    assert asked[:4] == [22, 11, 5, 2]
    assert 8 in asked and 16 not in asked, "half-way between 11 and 22 nothing can be faster"


def test_where_memory_binds_an_eighth_of_the_blocks_less_is_tried_first(any_plan: Plan) -> None:
    planner = _Planner(16, 8, any_plan)  # what every block keeps selectively
    much = {"share": lambda plan: 0.5, "dear": lambda plan: 0.3}  # of the step: recomputation, and what memory adds
    found = search(POLICIES, planner, lambda failed: 16, 100.0, **much)
    assert planner.asked == ["never", "selective", "selective:14"]
    assert found.plan is not None and found.plan.remat_policy == "selective"
    assert "16 of 16 blocks fit, 14 are no faster or do not fit" in found.plan.notes[-1]
    roomy = _Planner(16, 12, any_plan)
    found = search(POLICIES, roomy, lambda failed: 16, 100.0, **much)
    assert roomy.asked[:3] == ["never", "selective", "selective:14"]
    assert found.plan is not None and found.plan.remat_policy == "selective:8"


@pytest.mark.parametrize(("room", "asked"), [(8, ["8", "12", "14"]), (13, ["8", "4", "6"])])
def test_where_recomputation_takes_most_half_of_the_blocks_are_tried_first(
    room: float, asked: list[str], any_plan: Plan
) -> None:
    planner = _Planner(16, room, any_plan)
    search(POLICIES, planner, lambda failed: 16, 100.0, share=lambda plan: 0.5, dear=lambda plan: 0.2)
    assert planner.asked[2:5] == [f"selective:{k}" for k in asked]


@pytest.mark.parametrize(
    ("share", "dear", "asked"), [(0.05, 0.001, ["12"]), (0.2, 0.001, ["14"]), (0.01, 0.001, []), (0.05, 0.04, [])]
)
def test_where_a_plan_takes_long_the_first_step_saves_just_enough(
    share: float, dear: float, asked: list[str], any_plan: Plan
) -> None:
    """A hundredth of the step: four of 16 blocks that take a twentieth; an eighth of them in any case, which alone is
    tried where the budget adds much."""
    planner = _Planner(16, 8, any_plan, seconds={"never": 0.0, "selective": 1.0, "full": 0.0})
    clock = functools.partial(next, itertools.count(0.0, 5.0))
    means = {"share": lambda plan: share, "dear": lambda plan: dear}
    search(("never", "selective"), planner, lambda failed: 16, 1e6, clock, **means)
    assert planner.asked[2:] == [f"selective:{k}" for k in asked]


def test_nothing_fits(any_plan: Plan) -> None:
    found = search(POLICIES, _Planner(4, 0.1, any_plan), lambda failed: 4, 100.0)
    mixed = ["full:2+selective", "full:3+selective", "full:1+selective"]
    assert found.plan is None and found.failures == ["never", "selective", "full", *mixed]
    found = search(POLICIES, _Planner(1, 0.01, any_plan), lambda failed: 1, 100.0)
    assert found.failures == ["never", "selective", "full"], "one block cannot be both"


def test_where_neither_policy_fits_for_all_blocks_they_are_mixed(any_plan: Plan) -> None:
    def tried(text: str, seconds: float, worse_than: float, dear: float) -> Any:
        return replace(_costing(any_plan, 5.0), remat_policy=text) if text == "full:6+selective" else text

    found = search(POLICIES, tried, lambda failed: 8, 100.0)
    assert found.plan is not None and found.plan.remat_policy == "full:6+selective"
    assert found.failures == [*POLICIES, "full:4+selective"]
    assert "neither policy fits for all of the 8 blocks" in found.plan.notes[-1]


def test_one_policy_is_taken_as_it_is(any_plan: Plan) -> None:
    planner = _Planner(4, 100, any_plan)
    found = search(("full",), planner, lambda failed: 4, 100.0)
    assert found.plan is not None and found.plan.remat_policy == "full" and planner.asked == ["full"]


def test_recomputation_that_costs_nothing_is_not_reduced(any_plan: Plan) -> None:
    planner = _Planner(16, 12, any_plan)
    slow = itertools.count(0.0, 20.0)
    found = search(POLICIES, planner, lambda failed: 16, 1e6, lambda: next(slow), share=lambda plan: 0.001)
    assert found.plan is not None and found.plan.remat_policy == "selective"
    assert planner.asked == ["never", "selective"] and "takes 0.1% of the step" in found.plan.notes[-1]
    found = search(POLICIES, planner, lambda failed: 16, 1e6, share=lambda plan: 0.001)
    assert found.plan is not None and found.plan.remat_policy == "selective:8", (
        "quick to plan, so searched all the same"
    )


def test_an_open_gap_larger_than_what_fewer_blocks_save_ends_the_search(any_plan: Plan) -> None:
    for gap, searched in ((0.1, False), (0.01, True)):
        planner = _Planner(16, 12, replace(any_plan, gap=gap))
        slow = itertools.count(0.0, 20.0)
        clock = functools.partial(next, slow)
        search(POLICIES, planner, lambda failed: 16, 1e6, clock, share=lambda plan: 0.05)
        assert (len(planner.asked) > 2) is searched


def test_the_search_ends_with_its_time(any_plan: Plan) -> None:
    ticks = iter(range(100))
    found = search(POLICIES, _Planner(1024, 1000.0, any_plan), lambda failed: 1024, 1.5, lambda: float(next(ticks)))
    assert found.plan is not None and any("was not tried in time" in note for note in found.plan.notes)


@pytest.mark.parametrize("raised", [True, False])
def test_an_interrupt_ends_the_search_with_the_best_plan(raised: bool, any_plan: Plan) -> None:
    """Raised where a policy has no plan yet, or told by a plan that is as good as it had become by then."""
    planner = _Planner(16, 12, any_plan)
    asked: list[str] = []

    def tried(text: str, *rest: Any) -> Any:
        asked.append(text)
        if len(asked) < 4:
            return planner(text, *rest)
        if raised:
            raise KeyboardInterrupt
        plan = planner("selective:8", *rest)
        solution = replace(plan.trail.solution, report={"interrupted": True})
        return replace(plan, trail=replace(plan.trail, solution=solution))

    found = search(POLICIES, tried, lambda failed: 16, 100.0)
    assert len(asked) == 4 and found.plan is not None and "Interrupted" in found.plan.notes[-1]
    assert found.plan.remat_policy == (asked[2] if raised else "selective:8")


def test_an_interrupt_before_any_plan_goes_on(any_plan: Plan) -> None:
    def tried(text: str, *rest: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(POLICIES, tried, lambda failed: 16, 100.0)


@pytest.mark.parametrize(("room", "blocks"), [(350, 500), (375.5, 449), (399, 402), (305, 590)])
def test_what_plans_need_without_a_budget_leads_to_the_blocks(room: float, blocks: int, any_plan: Plan) -> None:
    """Bytes even over 600 blocks: the guess is right, and a step below it confirms that; with other bytes it is wrong,
    and the answer the same."""
    for wrong, most in ((0.0, 6), (0.1, 9)):
        planner = _Planner(600, room, any_plan)

        def need(answer: Any, wrong: float = wrong) -> float:
            return 600 / room * (1 + wrong) if isinstance(answer, str) else 300 / room

        found = search(("never", "selective"), planner, lambda failed: 600, 100.0, need=need)
        assert found.plan is not None and found.plan.remat_policy == f"selective:{blocks}"
        assert len(planner.asked) <= 2 + most, "halving takes ten"


def test_where_a_plan_takes_long_fewer_blocks_have_to_save_much(any_plan: Plan) -> None:
    """A little more than the number at which memory begins to bind is tried, an eighth less is not."""
    planner = _Planner(320, 240, any_plan, seconds={"never": 10.0, "selective": 10.6, "full": 12.0})
    clock = functools.partial(next, itertools.count(0.0, 11.0))

    def need(answer: Any) -> float:
        return 1.5 if isinstance(answer, str) else 0.5

    def share(plan: Plan) -> float:
        blocks = parse_policy(plan.remat_policy).blocks or 320
        return 0.6 * blocks / (10.0 * 320 + 0.6 * blocks)

    found = search(("never", "selective"), planner, lambda failed: 320, 1e6, clock, share=share, need=need)
    assert planner.asked == ["never", "selective", "selective:165"]
    assert found.plan is not None and found.plan.remat_policy == "selective:165"
    assert "125 could save 0.7% of the step at most" in found.plan.notes[-1]


@pytest.mark.parametrize("closes", [True, False])
def test_a_plan_left_unproved_gets_the_time_that_fewer_blocks_leave(closes: bool, any_plan: Plan) -> None:
    """Where nothing faster is found, they are solved to the end."""
    now, asked = 0.0, list[tuple[str, float]]()

    def tried(text: str, seconds: float, worse_than: float, dear: float) -> Any:
        nonlocal now
        asked.append((text, seconds))
        if text != "selective":
            now += 1.0
            return text
        now += 40.0
        first = len(asked) == 2
        plan = _costing(any_plan, 5.0)
        status, bound = ("feasible", 4.9) if first or not closes else ("optimal", 5.0)
        solution = replace(plan.trail.solution, status=status, lower_bound=bound)
        trail = replace(plan.trail, solution=solution)
        return replace(
            plan, remat_policy=text, gap=0.02 if first else 0.0, trail=trail, lower_bound=bound, notes=("n",)
        )

    found = search(("never", "selective"), tried, lambda failed: 8, 100.0, lambda: now, share=lambda plan: 0.1)
    assert [a[0] for a in asked] == ["never", "selective", "selective:4", "selective:6", "selective:7", "selective"]
    assert [a[1] for a in asked if a[0] == "selective"] == pytest.approx([0.9 * 99.0, 100.0 - 1.0 - 40.0 - 3.0])
    assert found.plan is not None and found.plan.gap == (0.0 if closes else 0.02)
    assert found.plan.notes[0] == "n" and "8 of 8 blocks fit" in found.plan.notes[1] and len(found.plan.notes) == 2


@pytest.mark.parametrize(("seconds", "times"), [(40.0, 2), (60.0, 1)])
def test_less_time_than_a_plan_took_proves_no_more_of_it(seconds: float, times: int, any_plan: Plan) -> None:
    now, asked = 0.0, list[str]()

    def tried(text: str, limit: float, worse_than: float, dear: float) -> Any:
        nonlocal now
        asked.append(text)
        now += seconds if text == "selective" else 1.0
        if text != "selective":
            return text
        plan = _costing(any_plan, 5.0)
        solution = replace(plan.trail.solution, status="feasible", lower_bound=4.9)
        return replace(plan, remat_policy=text, trail=replace(plan.trail, solution=solution), lower_bound=4.9)

    found = search(("never", "selective"), tried, lambda failed: 1, 100.0, lambda: now, share=lambda plan: 1e-4)
    assert asked == ["never"] + times * ["selective"]
    assert found.plan is not None and len(found.plan.notes) == len(any_plan.notes) + 1


def test_where_numbers_are_only_looked_at_the_best_is_solved_at_last(any_plan: Plan) -> None:
    """Plans of known kinds say which number of blocks it is; a part of the time is left for that one."""
    now, asked = 0.0, list[tuple[str, float]]()
    costs = {"selective": 5.0, "selective:7": 4.0}

    def tried(text: str, seconds: float, worse_than: float, dear: float) -> Any:
        nonlocal now
        asked.append((text, seconds))
        now += 10.0
        again = sum(a[0] == text for a in asked) == 2
        if text not in costs or costs[text] >= worse_than:
            return text
        plan = _costing(any_plan, 3.5 if again else costs[text])
        report = {"by_kind": True}
        solution = replace(plan.trail.solution, status="feasible", lower_bound=3.0 + again, report=report)
        trail = replace(plan.trail, solution=solution)
        return replace(plan, remat_policy=text, trail=trail, lower_bound=3.0 + again)

    dear = lambda plan: 0.1  # noqa: E731 - memory binds
    found = search(("never", "selective"), tried, lambda failed: 8, 100.0, lambda: now, share=lambda p: 0.1, dear=dear)
    assert found.plan is not None and found.plan.remat_policy == "selective:7" and found.plan.cost.total_s == 3.5
    assert asked[-1][0] == "selective:7" and asked[-1][1] >= PROVE_PART * 80.0 - 10.0
    assert all(seconds <= (1 - PROVE_PART) * 80.0 for text, seconds in asked[2:-1])


def test_all_blocks_without_a_plan_in_time_are_asked_again(any_plan: Plan) -> None:
    asked: list[float] = []

    def tried(text: str, seconds: float, worse_than: float, dear: float) -> Any:
        if text == "never":
            return text
        asked.append(seconds)
        open_ = SimpleNamespace(solution=SimpleNamespace(status="feasible", lower_bound=1.0))
        return open_ if len(asked) == 1 else _costing(any_plan, 5.0)

    found = search(("never", "selective", "full"), tried, lambda failed: 1, 100.0, lambda: 0.0)
    assert asked[:2] == [90.0, 100.0] and found.plan is not None


@pytest.mark.parametrize(
    ("every_s", "fastest_s", "policy"), [(9.5, 7.0, "selective:6"), (11.0, 7.0, "selective:6"), (11.0, 12.0, "never")]
)
def test_some_blocks_between_none_and_all_where_both_fit(
    every_s: float, fastest_s: float, policy: str, any_plan: Plan
) -> None:
    """None take 10 seconds, 6 of them for the budget's sake; six blocks are the best number."""
    asked: list[str] = []

    def tried(text: str, limit: float, worse_than: float, dear: float) -> Any:
        asked.append(text)
        k = parse_policy(text).blocks
        took = {"never": 10.0, "selective": every_s}.get(text, fastest_s + abs((k or 6) - 6) / 8)
        lower = SimpleNamespace(
            status="feasible", lower_bound=worse_than, report={"without_memory": 4.0 + (k or 24) / 24}
        )
        if took >= worse_than:
            return SimpleNamespace(solution=lower, step=SimpleNamespace(remat=text))
        return replace(_costing(any_plan, took), remat_policy=text)

    def dear(plan: Plan) -> float:
        k = {"never": 0, "selective": 24}.get(plan.remat_policy, parse_policy(plan.remat_policy).blocks)
        return max(0.0, 1.0 - (4.0 + k / 24) / plan.cost.total_s)

    found = search(("never", "selective"), tried, lambda answer: 24, 100.0, dear=dear)
    assert found.plan is not None and found.plan.remat_policy == policy
    assert asked[:2] == ["never", "selective"] and "selective:6" in asked
    expected = "although a plan without any fits" if policy != "never" else "no faster plan was found"
    assert expected in found.plan.notes[-1]


@pytest.mark.parametrize(("binding_s", "seconds"), [(0.3, 5.85), (0.7, 5.95)])
def test_below_numbers_that_are_no_faster_others_may_be(binding_s: float, seconds: float, any_plan: Plan) -> None:
    """Memory binds from 18 of 24 blocks on, which costs more than two blocks save, but perhaps less than ten do."""

    def took(k: int) -> float:
        return 5.0 + 0.05 * k + (binding_s if k <= 18 else 0.0)

    asked: list[int] = []

    def tried(text: str, limit: float, worse_than: float, dear: float) -> Any:
        if text == "never":
            return text
        k = parse_policy(text).blocks or 24
        asked.append(k)
        lower = SimpleNamespace(status="feasible", lower_bound=worse_than, report={"without_memory": 5.0 + 0.05 * k})
        fits = k >= 8
        failed = SimpleNamespace(solution=lower) if fits else text
        return _costing(any_plan, took(k)) if fits and took(k) < worse_than else failed

    def dear(plan: Plan) -> float:
        return binding_s / plan.cost.total_s if plan.cost.total_s < took(19) else 0.0

    found = search(("never", "selective"), tried, lambda failed: 24, 100.0, dear=dear)
    assert found.plan is not None and found.plan.cost.total_s <= seconds + 1e-9
    too_few = [k for k in asked if k < 8]
    assert too_few and too_few == sorted(too_few), "below a number that does not fit nothing is tried"


def test_plans_and_failures_know_their_blocks(any_plan: Plan) -> None:
    """Without the devices of the plan's mesh too: a plan's own ``step`` would ask for them."""
    assert any_plan.executable is not None
    assert blocks_of(any_plan) == any_plan.executable.blocks == 1
    assert blocks_of(replace(any_plan, executable=replace(any_plan.executable, blocks=7))) == 7
    assert blocks_of(SimpleNamespace(step=SimpleNamespace(blocks=9))) == 9

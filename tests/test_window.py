"""The best plan within a limit: sparse elimination under several relaxations, and fronts. Oracle: enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.rows import closing
from autoshard_ilp.program.rows.memory import Owners
from autoshard_ilp.program.rows.prices import PricedRows
from autoshard_ilp.program.window import fronts, kernels_fronts, window
from autoshard_ilp.program.window.partial import completed
from autoshard_ilp.program.window.relations import Relations, _codes
from autoshard_ilp.program.window.relaxations import Relaxations
from autoshard_ilp.program.window.tighten import tighten
from program_cases import programs, tight, tight_programs

OPTIONS = SolverOptions(time_limit=60.0)
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def rows_net(program: Program, moments: int = 99) -> Net:
    """The net with the first memory rows."""
    times = range(min(moments, int(np.max(program.lifetimes.end, initial=0))))
    return build_net(program, None, [Owners(program).row(t) for t in times])


def soon() -> float:
    return time.monotonic() + 20


@SETTINGS
@given(
    programs(memory=True),
    st.floats(0.0, 0.9),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0, 3, 20_000]),
    st.sampled_from([(1, 2, 5, 1000), (1, 1000), fronts.SIZES]),
)
def test_the_best_plan_within_any_limit(
    program: Program, part: float, price: float, most: int, sizes: tuple[int, ...]
) -> None:
    """At the optimum it is found, a little below nothing is; buckets of three rows make it tighten and widen.

    Fronts of one partial plan at first, then of few, merge nearly everything.
    """
    program = tight(program, part) or program
    capacity = 2**40 if program.capacity is None else program.capacity
    best = brute_force(dataclasses.replace(program, capacity=capacity))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "SIZES", sizes)
        if most:
            patch.setattr(window, "ROWS", most)
        try:
            net = rows_net(program)
            found = window.Window(net, capacity, [np.full(len(net.base), price)])
        except EmptyNodeError:
            assert best.status == "infeasible"
            return
        if best.status == "infeasible":
            assert found.solve(1e6, soon()).status == "infeasible"
            assert found.solve(math.inf, soon()).status == "infeasible"
            return
        for limit in (best.objective, best.objective + 0.3, math.inf):
            answer = found.solve(limit, soon())
            assert answer.status == "optimal"
            assert answer.choices is not None
            assert program.cost(answer.choices) == pytest.approx(best.objective, rel=1e-12)
            assert (PricedRows(net, capacity).usage(answer.choices) <= capacity).all()
            assert answer.bound == pytest.approx(best.objective, rel=1e-12)
            assert answer.relaxed <= best.objective * (1 + 1e-9)
        below = best.objective - max(1e-3, 1e-3 * best.objective)
        assert found.solve(below, soon()).status == "infeasible"
        assert found.solve(below, soon()).bound == below


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 0.9), st.sampled_from([0.01, 1.0]))
def test_a_window_begins_from_messages_that_are_settled(program: Program, part: float, price: float) -> None:
    """They prove no less than those that it would settle itself, nothing wrong, and the optimum is the same."""
    program = tight(program, part) or program
    capacity = 2**40 if program.capacity is None else program.capacity
    best = brute_force(dataclasses.replace(program, capacity=capacity))
    try:
        net = rows_net(program)
        prices = np.full(len(net.base), price)
        settled = Messages(PricedRows(net, capacity).priced(prices))
        settled.sweep(count=100)
        before = settled.bound
        found = window.Window(net, capacity, [prices], settled=settled)
    except EmptyNodeError:
        assert best.status == "infeasible"
        return
    own = float(prices.sum()) * capacity  # of which float noise is a part
    assert found.relaxed.bounds()[0] - own >= before - 1e-9 * (1 + abs(own))
    assert settled.bound == before
    answer = found.solve(math.inf, soon())
    assert answer.status == best.status
    if best.status == "optimal":
        assert answer.choices is not None
        assert program.cost(answer.choices) == pytest.approx(best.objective, rel=1e-12)
        assert found.bound <= best.objective + 1e-9 * (1 + abs(own))


@pytest.mark.parametrize("shape", ["clique", "random"])
def test_what_stays_wide_is_split(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few rows at most: halves of halves are solved, and the best of all is the optimum."""
    monkeypatch.setattr(window, "ROWS", 6)
    monkeypatch.setattr(window, "MOST_ROWS", 6)
    splits, split = [0], Relations.branches

    def counted(self: Relations) -> list[Relations]:
        splits[0] += 1
        return split(self)

    monkeypatch.setattr(Relations, "branches", counted)
    ended = 0
    for _, program in tight_programs(20, 7, shape, 0.4):
        best, net = brute_force(program), rows_net(program)
        assert program.capacity is not None
        found = window.Window(net, program.capacity, [np.zeros(len(net.base))])
        answer = found.solve(1.5 * best.objective, soon())
        assert answer.bound <= best.objective * (1 + 1e-9)
        if answer.status != "unknown":
            assert answer.status == "optimal"
            assert answer.bound == pytest.approx(best.objective, rel=1e-12)
            ended += 1
        if answer.left is not None:
            assert best.choices is not None
            assert all(best.choices[v] in left for v, left in answer.left.items())
    assert splits[0] > 1
    assert ended > 3


@pytest.mark.parametrize("shape", ["tree", "cycle", "random"])
def test_wide_buckets_are_left_open(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every bucket is too wide the answer is unknown, and its bound below the optimum; never a wrong proof.

    What messages choose of the nodes left is a plan all the same, if it fits.
    """
    monkeypatch.setattr(window, "ROWS", 1)
    monkeypatch.setattr(window, "MOST_ROWS", 2)
    left_open = plans = 0
    for _, program in tight_programs(30, 8, shape, 0.4):
        best, net = brute_force(program), rows_net(program)
        assert program.capacity is not None
        answer = window.Window(net, program.capacity, [np.zeros(len(net.base))]).solve(2 * best.objective, soon())
        left_open += answer.status == "unknown"
        assert answer.bound <= best.objective * (1 + 1e-9)
        if answer.status == "unknown" and answer.choices is not None:
            plans += 1
            assert best.objective <= program.cost(answer.choices) <= 2 * best.objective
            assert program.peak(answer.choices) <= program.capacity
    assert left_open > 3
    assert plans > 0


def test_tightening_keeps_every_wanted_plan() -> None:
    """Plans within the limit are still there, at the same cost, after message passing over what is left.

    What the messages choose is completed with the best of what was eliminated.
    """
    checked = completions = compared = 0
    for _, program in tight_programs(20, 6, "random", 0.5, forbidden=0.1):
        net, capacity = rows_net(program), program.capacity
        assert capacity is not None
        relaxed = Relaxations(net, capacity, [np.full(len(net.base), 0.01)])
        limit = 1.2 * brute_force(program).objective
        limits = relaxed.limits(limit)
        relations = Relations(relaxed, limits - relaxed.bounds())
        for v in relations.live[:2]:
            relations.eliminate(v, 10**6)
        before = relations.count()
        bounds, chosen = tighten(relations, relaxed.bounds(), limits, soon())
        assert (bounds >= relaxed.bounds() - 1e-9).all()
        for choices in itertools.product(*(range(len(n.costs)) for n in program.nodes)):
            x = np.array(choices)
            if program.cost(x) <= limit and program.peak(x) <= capacity:
                for r in relations.relations.values():
                    fits = np.ones(len(r.slack), bool)
                    for v, labels, column in zip(r.scope, r.labels, r.columns, strict=True):
                        fits &= column == labels[x[v]]
                    assert fits.sum() == 1
                checked += 1
        assert relations.count() <= before
        if chosen is not None:
            completions += 1
            plan = completed(relaxed, relations, chosen)
            assert plan is not None
            assert math.isfinite(program.cost(plan))
            rest = [[s] if v in chosen else range(len(program.nodes[v].costs)) for v, s in enumerate(plan)]
            for x in itertools.product(*rest):
                if program.cost(x) <= limit and program.peak(x) <= capacity:
                    assert _value(relaxed, program, plan) <= _value(relaxed, program, x) * (1 + 1e-9)
                    compared += 1
    assert checked > 20
    assert completions > 5
    assert compared > 5


def _value(relaxed: Relaxations, program: Program, choices: Sequence[int] | np.ndarray) -> float:
    """What the first relaxation makes of an assignment."""
    weights, used = relaxed.weights[0], program.usage_over_time(choices)
    return float(weights[0] * program.cost(choices) + weights[1:] @ used[: len(weights) - 1])


def test_the_solver_ends_with_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that presolve leaves open are decided by a window, and no other part runs."""
    monkeypatch.setattr(closing.Closing, "_guess", lambda self, above: pytest.fail("guessed"))
    decided = 0
    for seed, program in tight_programs(60, 8, "random", 0.4):
        best, found = brute_force(program), solve(program, OPTIONS)
        assert found.status == best.status, seed
        assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
        decided += "window" in found.report["seconds"]
    assert decided > 3


def test_one_number_per_tuple_of_labels_however_many() -> None:
    """Twenty columns of a hundred labels: their product is far above 64 bits."""
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 100, (20, 50)), rng.integers(0, 100, (20, 40))
    right[:, :10] = left[:, :10]
    right[-1, 0] = (right[-1, 0] + 1) % 100  # differs in the last column only
    left[0, 11], left[1:, 11] = (left[0, 1] + 1) % 100, left[1:, 1]  # .. in the first only
    mine, its = _codes([100] * 20, [list(left), list(right)])
    same = (left.T[:, None] == right.T[None]).all(axis=-1)
    assert ((mine[:, None] == its[None]) == same).all()
    assert same.sum() == 9
    assert _codes([], [[]], 3)[0].tolist() == [0, 0, 0]


def test_fronts_drop_only_what_another_beats() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        cost, used = rng.integers(0, 9, 60).astype(np.float64), rng.integers(0, 6, (60, 2))
        kept = set(kernels_fronts.undominated(cost, used).tolist())
        points = np.column_stack((cost, used))
        best = {tuple(p) for p in points if not ((points <= p).all(axis=1) & (points < p).any(axis=1)).any()}
        assert {tuple(points[i]) for i in kept} == best
        assert len(kept) == len(best)


@pytest.mark.parametrize("most", [1, 3, 10, 40])
def test_merged_partial_plans_are_as_good_as_any_they_stand_for(most: int) -> None:
    rng = np.random.default_rng(most)
    cost, used, scale = rng.random(40), rng.integers(0, 1000, (40, 3)), np.array([1e-3, 2e-3, 0.0])
    order, begins = kernels_fronts.parts_of(np.column_stack((cost, used * scale)), most)
    assert sorted(order.tolist()) == list(range(40))
    assert len(begins) - 1 == most
    merged_cost, merged_used, stands = kernels_fronts.merged(cost, used, scale, most)
    for part in range(most):
        members = order[begins[part] : begins[part + 1]]
        assert stands[part] in members
        assert merged_cost[part] == cost[members].min()
        assert (merged_used[part] == used[members].min(axis=0)).all()


def test_equal_partial_plans_are_one_part() -> None:
    order, begins = kernels_fronts.parts_of(np.ones((5, 2)), 3)
    assert begins.tolist() == [0, 5]
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]


def test_coarse_fronts_bound_from_below_and_say_what_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts that are never fine enough: a bound at most the optimum, above the relaxations' on most programs."""
    monkeypatch.setattr(fronts, "SIZES", (1,))
    left_open, better = 0, 0
    for _, program in tight_programs(30, 8, "tree", 0.4):
        best, net = brute_force(program), rows_net(program)
        assert program.capacity is not None
        found = window.Window(net, program.capacity, [np.zeros(len(net.base))])
        answer = found.solve(2 * best.objective, soon())
        assert answer.bound <= best.objective * (1 + 1e-9)
        if answer.choices is not None:
            assert program.cost(answer.choices) >= best.objective * (1 - 1e-9)
            assert (PricedRows(net, program.capacity).usage(answer.choices) <= program.capacity).all()
        left_open += answer.status == "unknown"
        better += answer.status == "unknown" and answer.bound > found.bound * (1 + 1e-6)
    assert left_open > 3
    assert better > left_open / 2


def test_a_bucket_may_have_lost_all_its_rows() -> None:
    for children in range(3):
        assert fronts._columns([np.zeros(0, np.int64)] * children, 0).shape == (0, children)

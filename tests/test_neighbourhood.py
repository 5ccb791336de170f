"""Large neighbourhood search: a region is the program it claims to be, and plans get better without losing anything."""

from __future__ import annotations

import functools
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import autoshard_ilp.program
import test_priced
from autoshard_ilp.planning import Expected
from autoshard_ilp.program import brute_force, minimum_capacity, solve
from autoshard_ilp.program.milp import Milp, MilpResult
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.rows import closing, neighbourhood
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.constrained import Constrained
from autoshard_ilp.program.rows.neighbourhood import Neighbourhood
from autoshard_ilp.program.rows.prices import PricedRows
from autoshard_ilp.program.search import Search
from autoshard_ilp.search.attempt import Failure, free_peak_bytes

OPTIONS = SolverOptions(time_limit=60.0)


def around(program: Program, relaxed: np.ndarray, plan: np.ndarray) -> Neighbourhood:
    """The search around a plan, under the rows that an assignment which does not fit asks for."""
    search = Search(program, OPTIONS, time.monotonic(), None)
    room = Room.of(program)
    room.run()
    owner = Constrained(search, relaxed, room)
    owner.rows = [owner.owners.row(t) for t in owner.first_times()]
    assert search.offer(plan)
    return Neighbourhood(owner)


@functools.cache
def cases() -> list[tuple[Program, np.ndarray]]:
    """Programs, and for each an assignment that does not fit."""
    return test_priced.cases()


def smallest(program: Program) -> np.ndarray:
    """A plan of least memory."""
    return np.asarray(minimum_capacity(program, OPTIONS)[2])


@pytest.mark.parametrize("part", [0.3, 0.6, 1.0])
def test_a_region_costs_and_holds_what_the_program_does(part: float) -> None:
    compared = 0
    for number, (program, relaxed) in enumerate(cases()):
        plan, rng = smallest(program), np.random.default_rng(number)
        search = around(program, relaxed, plan)
        search._add_rows(search.owner.rows)
        region = [v for v in range(len(plan)) if rng.random() < part] or [0]
        net = search._net(region, plan)
        rows = PricedRows(net, int(program.capacity or 0))
        began = net.value(plan)
        for _ in range(20):
            other = plan.copy()
            for v in region:
                other[v] = rng.choice(net.alive[v])
            cost = program.cost(other)
            if not math.isfinite(cost):
                assert not net.contains(other)
                continue
            assert net.value(other) - began == pytest.approx(cost - program.cost(plan), rel=1e-9, abs=1e-15)
            used = program.usage_over_time(other)
            assert rows.usage(other).tolist() == [used[row.time] for row in search.rows]
            compared += 1
    assert compared > 100


def test_a_region_of_everything_holds_the_optimum() -> None:
    """Also where the plan is within the first rows but not at all other times: those become rows as they are met."""
    improved, more_rows = 0, 0
    for program, relaxed in cases():
        plan = smallest(program)
        search = around(program, relaxed, plan)
        before = len(search.owner.rows)
        search._add_rows(search.owner.rows)
        search._improve(list(range(len(plan))))
        best = brute_force(program).objective
        assert search.search.upper == pytest.approx(best, rel=2 * neighbourhood.LEAST_GAIN)
        assert program.peak(search.search.best) <= program.capacity
        improved += best < program.cost(plan) * (1 - 1e-6)
        more_rows += len(search.rows) > before
    assert improved > 5 and more_rows > 0


def test_small_regions_make_a_plan_better_and_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhood, "FIRST_NODES", 4)
    monkeypatch.setattr(neighbourhood, "MOST_NODES", 4)
    gained, possible = 0.0, 0.0
    for program, relaxed in cases():
        plan = smallest(program)
        search = around(program, relaxed, plan)
        search._add_rows(search.owner.rows)
        for _ in range(30):
            known, region = search.search.upper, search._region()
            assert len(set(region)) == len(region) <= 4 + neighbourhood.CENTRES
            search._improve(region)
            assert search.search.upper <= known and program.peak(search.search.best) <= program.capacity
        gained += program.cost(plan) - search.search.upper
        possible += program.cost(plan) - brute_force(program).objective
    assert gained > 0.7 * possible > 0


def test_it_ends_where_regions_hold_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhood, "LEAST_RECENT", 0.0)
    monkeypatch.setattr(neighbourhood, "RECENT", 0.0)
    program, relaxed = cases()[0]
    search = around(program, relaxed, np.asarray(brute_force(program).choices))
    asked = 0

    def nothing(region: list[int]) -> None:
        nonlocal asked
        asked += 1

    monkeypatch.setattr(search, "_improve", nothing)
    search.run()
    assert asked == neighbourhood.LEAST_REGIONS


def test_an_interrupt_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a region is being solved ends the whole search, which has the plan that it began with, or better."""
    monkeypatch.setattr(Milp, "solve", lambda *_: MilpResult("unknown", None, 0.0, 0.0, interrupted=True))
    monkeypatch.setattr(neighbourhood, "MOST_RECENT", 0.05)  # where presolve solves all regions
    monkeypatch.setattr(Constrained, "run", lambda owner: bool(neighbourhood.look_around(owner)))
    interrupted = 0
    for program, relaxed in cases():
        plan = smallest(program)
        found = solve(program, OPTIONS, hint=plan, relaxed=relaxed)
        assert found.choices is not None and found.objective <= program.cost(plan)
        interrupted += bool(found.report.get("interrupted"))
    assert interrupted


def test_a_bound_from_before_counts_as_proved() -> None:
    """What was proved under memory is no bound of the optimum without it, which the report gives too."""
    for program, relaxed in cases()[:6]:
        best = brute_force(program).objective
        half = 0.5 * (program.cost(relaxed) + best)
        for known, status in ((best, "optimal"), (half, "feasible")):
            short = SolverOptions(time_limit=0.0)
            found = solve(program, short, hint=brute_force(program).choices, relaxed=relaxed, proved=known)
            assert found.lower_bound == pytest.approx(known, rel=1e-12) and found.objective == pytest.approx(best)
            assert found.status == status or half == best
            assert found.report["without_memory"] <= program.cost(relaxed) * (1 + 1e-9)


def test_the_memory_of_a_free_plan_is_not_looked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that memory binds has found one."""

    def solved(*_: Any, **__: Any) -> Any:
        raise AssertionError("solved again")

    monkeypatch.setattr(autoshard_ilp.program, "solve", solved)
    for program, relaxed in cases()[:3]:
        report = {"relaxed": relaxed, "without_memory": 0.0, "free_seconds": 1.0}
        solution = SimpleNamespace(status="feasible", report=report, lower_bound=0.0, choices=None)
        built, table = SimpleNamespace(program=program), SimpleNamespace(first_share=0.0)
        failure: Any = Failure(None, None, lambda t=table, b=built: SimpleNamespace(table=t, built=b), solution, None)  # type: ignore[misc,arg-type]
        request: Any = SimpleNamespace(solver=OPTIONS)
        assert free_peak_bytes(failure, request) == program.peak(relaxed) > program.capacity


def test_a_policy_asked_again_goes_on_from_where_it_was_left() -> None:
    expected = Expected(("never", "selective"))
    assert expected.of("never")["left_before"] is None
    bounds = {"without_memory": 1.0, "rounding_error_seconds": 0.25}
    report = {"relaxed": np.array([1]), "free_seconds": 3.0, **bounds}
    solution = SimpleNamespace(status="feasible", report=report, lower_bound=2.0, choices=np.array([0]))
    table = SimpleNamespace(first_share=0.5)
    failure: Any = Failure(None, None, lambda: SimpleNamespace(table=table, built=None), solution, None)  # type: ignore[arg-type]
    expected.learn("never", failure)
    left = expected.of("never")["left_before"]
    assert (left.first_share, left.choices.tolist(), left.relaxed.tolist()) == (0.5, [0], [1])
    assert (left.lower_bound, left.without_memory, left.free_seconds) == (1.75, 1.0, 3.0)
    assert expected.of("selective")["left_before"] is None


def test_a_poor_plan_of_many_nodes_is_made_better_before_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the optimum is what it was."""
    monkeypatch.setattr(closing, "MANY_NODES", 0)
    monkeypatch.setattr(closing, "POOR_GAP", 1e-9)
    monkeypatch.setattr(neighbourhood, "MOST_RECENT", 0.05)
    looked, better = list[float](), 0

    def look_around(owner: Constrained) -> None:
        nonlocal better
        known = owner.search.upper
        as_it_was(owner)
        looked.append(known)
        better += owner.search.upper < known

    as_it_was = neighbourhood.look_around
    monkeypatch.setattr(closing, "look_around", look_around)
    for program, relaxed in cases():
        found = solve(program, OPTIONS, hint=smallest(program), relaxed=relaxed)
        assert found.status == "optimal"
        assert found.objective == pytest.approx(brute_force(program).objective, rel=1e-9)
    assert looked and better

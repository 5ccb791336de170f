"""Memory rows in presolve: bytes are carried exactly, and only what cannot fit is removed. Oracle: enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program import brute_force, minimum_capacity, solve
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.nets.presolve import STEPS, Presolve
from autoshard_ilp.program.nets.reduce import compress
from autoshard_ilp.program.rows import dual
from autoshard_ilp.program.rows.capacity import Room, least_over_spans
from autoshard_ilp.program.rows.closing import Closing
from autoshard_ilp.program.rows.constrained import Constrained
from autoshard_ilp.program.rows.memory import Owners
from autoshard_ilp.program.rows.prices import PricedRows
from autoshard_ilp.program.search import Search
from program_cases import programs, random_program
from training_case import training_step

OPTIONS = SolverOptions(time_limit=120.0)
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def assignments(program: Program) -> list[tuple[int, ...]]:
    """Every finite assignment."""
    every = itertools.product(*(range(len(n.costs)) for n in program.nodes))
    return [x for x in every if math.isfinite(program.cost(x))]


def rows_of(program: Program) -> list:
    """A memory row for every time with owners."""
    horizon = int(np.max(program.lifetimes.end))
    return [r for r in (Owners(program).row(t) for t in range(horizon)) if len(r.nodes) or len(r.edges)]


def best_within(program: Program, rows: list, capacity: int) -> float:
    """Least cost of the assignments within the capacity at every row."""
    costs = [math.inf]
    for x in assignments(program):
        used = program.usage_over_time(x)
        if all(used[r.time] <= capacity for r in rows):
            costs.append(program.cost(x))
    return min(costs)


def best_in_net(net: Net, capacity: int) -> float:
    """The same over what is left in a net."""
    priced, best = PricedRows(net, capacity), math.inf
    for picked in itertools.product(*(net.alive[v].tolist() for v in net.live)):
        choices = np.zeros(len(net.cost), np.int64)
        choices[net.live] = picked
        if (priced.usage(choices) <= capacity).all():
            best = min(best, net.value(choices))
    return best


@SETTINGS
@given(programs(memory=True), st.sampled_from(sorted(STEPS)), st.floats(0.2, 1.0), st.booleans())
def test_each_step_keeps_the_optimum_under_rows(program: Program, step: str, part: float, fit: bool) -> None:
    rows, every = rows_of(program), assignments(program)
    if not every:
        return
    capacity = int(part * max(program.peak(x) for x in every))
    net = build_net(program, rows=rows)
    expected = best_within(program, rows, capacity)
    try:
        Presolve(net, steps=frozenset({step}), capacity=capacity if fit else None).run()
    except EmptyNodeError:
        assert expected == math.inf
        return
    assert best_in_net(net, capacity) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@SETTINGS
@given(programs(memory=True), st.integers(0, 10**6))
def test_presolve_keeps_bytes_and_costs_of_what_it_completes(program: Program, seed: int) -> None:
    rows = rows_of(program)
    if not assignments(program):
        return
    net = build_net(program, rows=rows)
    Presolve(net, max_degree=99).run()
    rng = np.random.default_rng(seed)
    choices = np.zeros(len(net.cost), np.int64)
    for v in net.live:
        choices[v] = rng.choice(net.alive[v])
    if not math.isfinite(net.value(choices)):
        return
    full = net.complete(choices)
    used = program.usage_over_time(full)
    assert program.cost(full) == pytest.approx(net.value(choices), rel=1e-9, abs=1e-12)
    assert PricedRows(net, 0).usage(choices).tolist() == [int(used[r.time]) for r in rows]


@SETTINGS
@given(programs(memory=True), st.floats(0.2, 1.0))
def test_what_has_no_room_is_in_no_plan(program: Program, part: float) -> None:
    every = assignments(program)
    if not every:
        return
    capacity = int(part * max(program.peak(x) for x in every))
    fits = [x for x in every if program.peak(x) <= capacity]
    room = Room(dataclasses.replace(program, capacity=capacity), [np.isfinite(n.costs) for n in program.nodes])
    try:
        removed = room.run()
    except EmptyNodeError:
        assert not fits
        return
    assert all(room.allows(np.array(x)) for x in fits)
    assert removed["strategies that cannot fit"] >= 0


def test_room_is_found_through_partners_and_counts() -> None:
    held = np.array([10, 40])
    edge = Edge(0, 1, np.arange(2), np.arange(2), np.array([[0.0, np.inf], [np.inf, 0.0]]))
    nodes = (Node("weight", np.zeros(2), held), Node("copy", np.zeros(2)), Node("fixed", np.zeros(1), np.array([30])))
    twice = Lifetimes(np.zeros(3, bool), np.array([0, 0, 2]), np.array([0, 2, 0]), np.array([4, 4, 4]))
    keep = [np.ones(2, bool), np.ones(2, bool), np.ones(1, bool)]
    # Two of the weight run at once from time 2 on: 2 x 40 + 30 is over 100, although 40 + 30 is not.
    Room(Program(nodes, (edge,), twice, capacity=100), keep).run()
    assert keep[0].tolist() == [True, False] and keep[1].tolist() == [True, False]
    with pytest.raises(EmptyNodeError):
        Room(Program(nodes, (edge,), twice, capacity=49), [np.ones(len(n.costs), bool) for n in nodes]).run()


def test_least_over_spans() -> None:
    values = np.random.default_rng(0).integers(0, 100, 37)
    start, end = np.array([(a, b) for a in range(37) for b in range(a + 1, 38)]).T
    assert least_over_spans(values, start, end).tolist() == [values[a:b].min() for a, b in zip(start, end, strict=True)]


@SETTINGS
@given(programs(), st.integers(0, 10**6))
def test_compiled_messages_only_move_costs(program: Program, seed: int) -> None:
    """Bound plus what is left of every assignment is its cost, before and after sweeps; the bound is a bound."""
    every = assignments(program)
    if not every:
        return
    net = build_net(program)
    try:
        Presolve(net, steps=frozenset({"parallel", "separable"})).run()
    except EmptyNodeError:
        return
    for number in list(net.factors):
        compress(net, number)
    messages = Messages(net)
    least = min(program.cost(x) for x in every)
    for _ in range(4):
        before = messages.bound
        messages.sweep()
        assert before - 1e-12 <= messages.bound <= least * (1 + 1e-9) + 1e-12
    moved = messages.apply()
    for x in every[:: max(1, len(every) // 50)]:
        assert moved.value(np.array(x)) == pytest.approx(program.cost(x), rel=1e-9, abs=1e-12)
    assert math.isfinite(program.cost(net.complete(messages.decode()))) or len(every) < math.prod(
        len(n.costs) for n in program.nodes
    )


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_costs_of_nine_orders_of_magnitude(unit: float) -> None:
    rng = np.random.default_rng(3)
    sizes = [3, 4, 3, 4, 3]
    nodes = tuple(Node(f"n{v}", unit * 10.0 ** rng.uniform(-4.5, 4.5, n)) for v, n in enumerate(sizes))
    edges = tuple(
        Edge(
            u, v, np.arange(sizes[u]), np.arange(sizes[v]), unit * 10.0 ** rng.uniform(-4.5, 4.5, (sizes[u], sizes[v]))
        )
        for u in range(5)
        for v in range(u)
    )
    program = Program(nodes, edges)
    expected, found = brute_force(program), solve(program, OPTIONS)
    assert found.status == "optimal" and found.objective == pytest.approx(expected.objective, rel=1e-9)


def test_a_thousand_strategies_on_one_node_and_parts_that_never_meet() -> None:
    rng = np.random.default_rng(5)
    held = rng.integers(1, 1000, 1000)
    nodes = (
        Node("many", 1.0 / held, held),
        Node("near", rng.random(2)),
        Node("alone", np.array([3.0, 1.0, 1.0]), np.array([0, 7, 5])),
    )
    edge = Edge(0, 1, np.arange(1000) % 10, np.arange(2), rng.random((10, 2)))
    lifetimes = Lifetimes(np.zeros(2, bool), np.array([0, 2]), np.array([0, 0]), np.array([2, 2]))
    for capacity in (8, 300):
        program = Program(nodes, (edge,), lifetimes, capacity)
        expected, found = brute_force(program), solve(program, OPTIONS)
        assert found.status == expected.status == "optimal"
        assert found.objective == pytest.approx(expected.objective, rel=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(programs(memory=True))
def test_a_budget_of_exactly_the_minimum_and_one_byte_less(program: Program) -> None:
    peaks = [program.peak(x) for x in assignments(program)]
    if not peaks:
        return
    least = min(peaks)
    assert 0 <= program.least_peak() <= least
    exact = solve(dataclasses.replace(program, capacity=least), OPTIONS)
    assert exact.status == "optimal" and exact.peak_bytes == least
    if least:
        assert solve(dataclasses.replace(program, capacity=least - 1), OPTIONS).status == "infeasible"
        assert minimum_capacity(program, OPTIONS)[:2] == (least, least)


def test_same_seed_same_plan_under_memory() -> None:
    program = training_step(1, mesh=(4,))
    tight = dataclasses.replace(program, capacity=int(0.8 * solve(program, OPTIONS).peak_bytes))
    first, second = solve(tight, OPTIONS), solve(tight, OPTIONS)
    assert first.status == second.status == "optimal"
    assert first.choices is not None and second.choices is not None
    assert first.choices.tolist() == second.choices.tolist()


def test_a_gap_that_was_asked_for_stays_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT leaves a branch within the gap: what it did not look at there must not count as proved."""
    asked = 0

    def small(net: Net) -> bool:  # the root never, so that it is branched on; its parts always
        nonlocal asked
        asked += 1
        return asked > 1

    monkeypatch.setattr(Constrained, "small", staticmethod(small))
    monkeypatch.setattr(Closing, "run", lambda self: [])
    monkeypatch.setattr(dual, "combine", lambda owner, prices: [])  # or that finds what is good enough
    branched = 0
    for seed in range(16):
        asked = 0
        program = random_program(seed, 9, "random", "plain", forbidden=0.05, memory=True)
        free = solve(dataclasses.replace(program, capacity=None), SolverOptions(time_limit=20))
        if free.choices is None:
            continue
        least = minimum_capacity(program, SolverOptions(time_limit=20))[0]
        if free.peak_bytes <= least:
            continue
        tight = dataclasses.replace(program, capacity=(least + free.peak_bytes) // 2)
        best = brute_force(tight)
        found = solve(tight, SolverOptions(time_limit=20, relative_gap=0.4))
        branched += asked > 1
        assert found.lower_bound <= best.objective * (1 + 1e-9), seed
        assert found.objective <= best.objective * (1 / (1 - 0.4) + 1e-9), seed
        if found.status == "optimal":
            assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
    assert branched, "no case reached the branches"


def test_too_little_time_for_a_first_plan_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    program = training_step(2, capacity=2**50)
    search = Search(program, SolverOptions(time_limit=0.0), time.monotonic(), None)
    room = Room.of(program)
    room.run()

    def too_late(*_: object, **__: object) -> None:
        raise InfeasibleError("No finite assignment was found in time.")

    monkeypatch.setattr("autoshard_ilp.program.rows.under.minimum_capacity", too_late)
    assert Constrained(search, np.zeros(len(program.nodes), np.int64), room).first_plan() == []

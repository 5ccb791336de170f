"""The solver against brute force, each presolve step alone, bounds, determinism, limits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.errors import InfeasibleError, InputShapeError
from autoshard_ilp.program import brute_force, infeasible, minimum_capacity, solve
from autoshard_ilp.program.cpsat import CpOptions, solve_net
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.nets.presolve import STEPS, Presolve
from autoshard_ilp.program.nets.reduce import compress, min_sum_used, substitute
from autoshard_ilp.program.rows import constrained
from autoshard_ilp.program.search import Search
from program_cases import load_in, programs, random_program
from training_case import training_step

OPTIONS = SolverOptions(time_limit=120.0)  # nothing here takes long: a busy machine must not fail a test
QUICK = SolverOptions(time_limit=1.0)
LATE = 4.0  # seconds over a limit that a slow machine may take to notice it
SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)


@pytest.fixture
def compiled_kernels() -> None:
    """Kernels are compiled once per machine: no part of a time limit."""
    program = training_step(4)
    solve(dataclasses.replace(program, capacity=program.peak(np.zeros(len(program.nodes), int)) // 8), QUICK)


def least_peak(program: Program) -> int | None:
    """Smallest peak over all finite assignments, by enumeration."""
    every = itertools.product(*(range(len(n.costs)) for n in program.nodes))
    return min((program.peak(c) for c in every if math.isfinite(program.cost(c))), default=None)


def agree(program: Program) -> None:
    """solve() and brute_force() give the same answer, and every promise of the solution holds."""
    expected, found = brute_force(program), solve(program, OPTIONS)
    assert found.status == expected.status
    if found.choices is None:
        return
    rounding = found.report.get("rounding_error_seconds", 0.0)
    assert abs(found.objective - expected.objective) <= 1e-9 * abs(expected.objective) + rounding
    assert found.objective == pytest.approx(program.cost(found.choices), rel=1e-12)
    assert found.lower_bound <= expected.objective * (1 + 1e-12)
    assert 0.0 <= found.report["seconds"]["presolve"] <= found.seconds
    assert rounding <= 1e-6 * max(expected.objective, 1e-12)
    assert found.peak_bytes == program.peak(found.choices)
    if program.capacity is not None:
        assert found.peak_bytes <= program.capacity


@SETTINGS
@given(programs())
def test_same_optimum_as_brute_force(program: Program) -> None:
    agree(program)


@SETTINGS
@given(programs(memory=True), st.sampled_from([-1, 0, 1, 15]))
def test_same_optimum_under_memory(program: Program, slack: int) -> None:
    lowest = least_peak(program)
    if lowest is not None:
        agree(dataclasses.replace(program, capacity=max(0, lowest + slack)))


@SETTINGS
@given(programs(memory=True))
def test_minimum_capacity_is_the_least_peak(program: Program) -> None:
    lowest = least_peak(program)
    if lowest is None:
        with pytest.raises(InfeasibleError, match="finite"):
            minimum_capacity(program, OPTIONS)
        return
    lower, upper, choices = minimum_capacity(program, OPTIONS)
    assert lower == upper == lowest == program.peak(choices)
    assert math.isfinite(program.cost(choices))


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 1.5))
def test_minimum_capacity_may_end_once_it_is_known_to_be_as_large(program: Program, part: float) -> None:
    lowest = least_peak(program)
    if lowest is None:
        return
    enough = int(part * lowest)
    lower, upper, choices = minimum_capacity(program, OPTIONS, beyond=enough)
    assert lower <= lowest <= upper == program.peak(choices)
    assert lower >= enough or lower == upper


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=programs())
def test_each_presolve_step_keeps_the_optimum(step: str, program: Program) -> None:
    expected = brute_force(program)
    try:
        net = build_net(program)
        Presolve(net, steps=frozenset({step}), max_degree=9).run()
    except EmptyNodeError:
        assert expected.status == "infeasible"
        return
    best, cost = None, math.inf
    for combination in itertools.product(*(net.alive[v] for v in net.live)):
        choices = np.zeros(len(net.cost), np.int64)
        choices[net.live] = combination
        if net.value(choices) < cost:
            best, cost = choices, net.value(choices)
    assert math.isclose(cost, expected.objective, rel_tol=1e-9) or cost == expected.objective
    if best is not None:
        assert math.isclose(program.cost(net.complete(best)), expected.objective, rel_tol=1e-9, abs_tol=1e-300)


@SETTINGS
@given(programs(), st.floats(0.0, 0.5))
def test_messages_bound_and_never_remove_the_optimum(program: Program, slack: float) -> None:
    expected = brute_force(program)
    if expected.choices is None:
        return
    net = build_net(program)
    Presolve(net, steps=frozenset({"parallel"})).run()
    for number in list(net.factors):
        compress(net, number)
    messages = Messages(net)
    upper = expected.objective * (1 + slack)
    for _ in range(6):
        messages.sweep(upper)
        assert messages.bound <= expected.objective * (1 + 1e-9)
    messages.remove_cells(upper)
    assert messages.apply().value(expected.choices) == pytest.approx(expected.objective, rel=1e-9, abs=1e-15)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(programs())
def test_cpsat_alone_is_exact_and_its_bound_valid(program: Program) -> None:
    expected = brute_force(program)
    try:
        net = build_net(program)
        result = solve_net(net, program, (), None, CpOptions(time.monotonic() + 20.0))
    except EmptyNodeError:
        assert expected.status == "infeasible"
        return
    assert (result.choices is None) == (expected.choices is None)
    if result.choices is not None:
        rounding = result.rounding_error_seconds
        assert abs(program.cost(result.choices) - expected.objective) <= rounding + 1e-9 * expected.objective
        assert result.bound <= expected.objective * (1 + 1e-12)


def test_a_training_step_is_solved_to_optimality() -> None:
    program = training_step(3)
    first = solve(program, OPTIONS)
    assert first.status == "optimal" and first.gap == 0.0
    assert len(program.nodes) == 137
    again = solve(program, OPTIONS)
    assert (again.choices == first.choices).all()
    hinted = solve(program, OPTIONS, hint=first.choices)
    assert hinted.objective == pytest.approx(first.objective, rel=1e-9)


def test_a_training_step_under_binding_memory() -> None:
    program = training_step(1, mesh=(8,))
    free = solve(program, OPTIONS)
    lower, upper, _ = minimum_capacity(program, OPTIONS)
    assert lower == upper < free.peak_bytes
    previous = free.objective
    for part in (0.7, 0.3, 0.0):
        capacity = int(upper + part * (free.peak_bytes - upper))
        tight = solve(dataclasses.replace(program, capacity=capacity), OPTIONS)
        assert tight.status == "optimal" and tight.peak_bytes <= capacity
        assert tight.objective >= previous * (1 - 1e-9)
        previous = tight.objective
    assert solve(dataclasses.replace(program, capacity=upper - 1), OPTIONS).status == "infeasible"


@pytest.mark.usefixtures("compiled_kernels")
def test_time_limit_is_respected_and_the_bound_valid() -> None:
    program = training_step(6, mesh=(2, 2, 4))
    began = time.monotonic()
    short = solve(program, SolverOptions(time_limit=0.3))
    assert time.monotonic() - began < 0.3 + LATE
    if short.choices is not None:
        assert short.lower_bound <= short.objective
        assert short.objective == pytest.approx(program.cost(short.choices))


def test_keyboard_interrupt_returns_the_best_found() -> None:
    program = training_step(3)
    seen = []

    def stop(report: dict) -> None:
        seen.append(report)
        raise KeyboardInterrupt

    solution = solve(program, OPTIONS, on_progress=stop)
    assert seen and solution.choices is not None
    assert solution.report["interrupted"] is True
    assert solution.lower_bound <= solution.objective


def test_relative_gap_stops_early_and_says_so() -> None:
    program = training_step(3)
    rough = solve(program, dataclasses.replace(OPTIONS, relative_gap=0.5))
    assert rough.gap <= 0.5
    assert rough.lower_bound <= solve(program, OPTIONS).objective * (1 + 1e-9)


def test_malformed_programs_are_refused_by_name() -> None:
    zero = np.zeros(2)
    with pytest.raises(InputShapeError, match="node 0"):
        solve(Program((Node("a", np.array([np.nan])),), ()), OPTIONS)
    with pytest.raises(InputShapeError, match="edge 0"):
        edge = Edge(0, 1, np.array([0, 5]), np.array([0, 1]), np.zeros((2, 2)))
        solve(Program((Node("a", zero), Node("b", zero)), (edge,)), OPTIONS)
    with pytest.raises(InputShapeError, match="hint"):
        solve(Program((Node("a", zero),), ()), OPTIONS, hint=np.array([2]))
    with pytest.raises(InputShapeError, match="assignments"):
        brute_force(Program(tuple(Node("n", zero) for _ in range(30)), ()))


def test_bytes_beyond_a_gigabyte_stay_exact() -> None:
    big = 10**13
    nodes = (Node("a", np.array([0.0, 1.0]), np.array([big + 1, big])), Node("b", np.array([0.0]), np.array([7])))
    lifetimes = Lifetimes(np.zeros(2, bool), np.array([0, 1]), np.array([0, 0]), np.array([3, 2]))
    program = Program(nodes, (), lifetimes, big + 7)
    assert solve(program, OPTIONS).choices.tolist() == [1, 0]  # type: ignore[union-attr]
    assert solve(dataclasses.replace(program, capacity=big + 8), OPTIONS).objective == 0.0
    assert minimum_capacity(program, OPTIONS)[:2] == (big + 7, big + 7)


def test_a_label_without_strategies_decides_nothing() -> None:
    # Node 0 lost strategy 0; label 0 of the edge still has finite entries and must not be taken for its choice.
    labels = np.arange(2)
    edge = Edge(0, 1, labels, labels, np.array([[0.0, 0.0], [5.0, 7.0]]))
    program = Program((Node("a", np.array([np.inf, 1.0])), Node("b", np.zeros(2))), (edge,))
    net = build_net(program)
    substitute(net, 0, 0)
    assert net.cost[1].tolist() == [6.0, 8.0]
    assert net.complete(np.zeros(2, np.int64)).tolist() == [1, 0]


@pytest.mark.parametrize("size", [1, 10**9])
def test_minimum_capacity_of_any_magnitude(size: int) -> None:
    program = training_step(1, mesh=(8,))
    nodes = tuple(dataclasses.replace(n, bytes=None if n.bytes is None else n.bytes * size) for n in program.nodes)
    edges = tuple(dataclasses.replace(e, bytes=None if e.bytes is None else e.bytes * size) for e in program.edges)
    scaled = Program(nodes, edges, program.lifetimes)
    lower, upper, choices = minimum_capacity(scaled, OPTIONS)
    assert 0 < lower <= upper == scaled.peak(choices)
    assert lower == upper
    assert solve(dataclasses.replace(scaled, capacity=lower - 1), OPTIONS).status == "infeasible"


def test_compiling_kernels_under_memory_is_no_part_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' kernels, which only some programs need, are compiled in the middle of the search."""
    program = training_step(2)
    program = dataclasses.replace(program, capacity=solve(program, OPTIONS).peak_bytes - 1)
    monkeypatch.setattr(constrained, "load_windows", lambda: load_in(1000.0))
    began = time.monotonic()
    found = solve(program, OPTIONS)
    assert found.status == "optimal"
    assert found.seconds == pytest.approx(time.monotonic() - began - 1000.0, abs=5.0)


def test_slow_prices_leave_time_for_the_proof_of_the_least_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    # One of two nodes, alive at different moments, must be large: prices prove half of that, whatever they are.
    size = np.array([0, 10])
    small = Edge(0, 1, np.arange(2), np.arange(2), np.array([[np.inf, 0.0], [0.0, 0.0]]))
    lifetimes = Lifetimes(np.zeros(2, bool), np.array([0, 1]), np.array([0, 1]), np.array([1, 2]))
    program = Program((Node("a", np.zeros(2), size), Node("b", np.zeros(2), size)), (small,), lifetimes)
    steps, priced = list[float](), infeasible.least_cost

    def slow(*args: Any) -> Any:
        steps.append(1.0)
        return priced(*args)

    monkeypatch.setattr(infeasible, "least_cost", slow)
    monkeypatch.setattr(infeasible, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(steps)))
    assert minimum_capacity(program, OPTIONS)[:2] == (10, 10)
    assert len(steps) < infeasible.STEPS


@pytest.mark.usefixtures("compiled_kernels")
def test_time_limit_is_respected_under_memory() -> None:
    program = training_step(4)
    began = time.monotonic()
    short = solve(dataclasses.replace(program, capacity=program.peak(np.zeros(len(program.nodes), int)) // 8), QUICK)
    assert time.monotonic() - began < QUICK.time_limit + LATE
    assert short.status in ("optimal", "feasible", "infeasible")
    assert short.choices is None or short.lower_bound <= short.objective


def test_a_branch_with_no_room_below_the_best_plan_is_closed() -> None:
    program = Program((Node("a", np.array([1.0, 2.0])),), ())
    with pytest.raises(EmptyNodeError):
        solve_net(build_net(program), program, (), None, CpOptions(time.monotonic() + 5.0), upper=0.5)
    exact = solve_net(build_net(program), program, (), None, CpOptions(time.monotonic() + 5.0), upper=1.0)
    assert exact.status == "optimal" and exact.bound <= 1.0 * (1 + 1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 20))
def test_costs_below_zero(program: Program, less: int) -> None:
    lowered = dataclasses.replace(
        program, nodes=tuple(dataclasses.replace(n, costs=n.costs - less) for n in program.nodes)
    )
    expected = brute_force(lowered)
    found = solve(lowered, OPTIONS, hint=expected.choices)
    assert found.status == expected.status
    if expected.choices is None:
        return
    assert found.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-12)
    net = build_net(lowered)
    Presolve(net, steps=frozenset({"parallel"})).run()
    for number in list(net.factors):
        compress(net, number)
    messages = Messages(net)
    for _ in range(3):  # raised "no plan is cheaper" when minima below zero were not yet part of the bound
        messages.sweep(expected.objective + 1e-9 * abs(expected.objective))
        assert messages.bound <= expected.objective + 1e-9 * abs(expected.objective) + 1e-12


def test_empty_and_single_programs() -> None:
    assert solve(Program((), ()), OPTIONS).status == "optimal"
    assert solve(Program((Node("a", np.array([2.0, 1.0])),), ()), OPTIONS).objective == 1.0
    assert solve(Program((Node("a", np.array([np.inf])),), ()), OPTIONS).status == "infeasible"
    assert random_program(0, 3, "tree", "plain").edges[0].u == 0


@given(programs(memory=True), st.sampled_from([0.5, 0.8, 1.0]), st.integers(0, 10**6))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_assignment_may_show_where_memory_binds(program: Program, share: float, seed: int) -> None:
    """What stops where memory binds says so and proves no more than it may; what goes on from there is exact."""
    rng = np.random.default_rng(seed)
    anything = np.array([rng.integers(len(n.costs)) for n in program.nodes])
    program = dataclasses.replace(program, capacity=int(share * program.peak(anything)))
    exact, look = brute_force(program), solve(program, OPTIONS, rows=False)
    assert look.lower_bound <= exact.objective * (1 + 1e-12)
    relaxed = look.report.get("relaxed")
    if relaxed is None:
        assert look.status == exact.status and look.objective == pytest.approx(exact.objective, rel=1e-9)
    else:
        assert program.peak(relaxed) > program.capacity and math.isfinite(program.cost(relaxed))
    for known in (anything, relaxed):
        found = solve(program, OPTIONS, relaxed=known)
        assert found.status == exact.status
        assert found.objective == pytest.approx(exact.objective, rel=1e-9)


def test_a_search_without_a_plan_ends_when_one_should_be_known() -> None:
    program = random_program(0, 6, "clique", "plain", 0.0, True)
    whole = np.zeros(len(program.nodes), int)
    search = Search(program, OPTIONS, 100.0, None, plan_seconds=0.5)
    assert search.deadline == 100.5
    load_in(1000.0)
    assert search.deadline == 1100.5, "compiling is no part of the limit"
    assert search.offer(whole) and search.deadline == 1100.0 + OPTIONS.time_limit
    assert search.finish(False).seconds == pytest.approx(time.monotonic() - 1100.0, abs=5.0)


def test_a_search_goes_on_while_its_plans_get_better_by_much(monkeypatch: pytest.MonkeyPatch) -> None:
    program = random_program(0, 6, "clique", "plain", 0.0, True)
    now, plan = 0.0, np.zeros(len(program.nodes), int)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    costs = iter([100.0, 99.8, 99.6, 99.4, 50.0])
    monkeypatch.setattr(type(program), "cost", lambda self, choices: next(costs))
    search = Search(program, OPTIONS, 0.0, None, steady_seconds=10.0)
    limit = OPTIONS.time_limit
    assert search.deadline == 10.0 and search.last_deadline == limit > 20.0
    deadlines = []
    for now in (6.0, 9.0, 9.5, 12.0, 0.9 * limit):  # noqa: B007  the clock reads it
        assert search.offer(plan)
        deadlines.append(search.deadline)
    assert deadlines == [10.0, 10.0, 10.0, 15.0, limit], "less than half a percent is not much"


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_node_is_eliminated_where_the_cheapest_choice_is_that_of_least_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 4)))
    strategies, rows = int(rng.integers(1, 5)), int(rng.integers(1, 3))

    def dims() -> tuple[int, ...]:
        return tuple(n if rng.random() < 0.6 else 1 for n in shape)

    def table() -> np.ndarray:
        values = rng.integers(0, 3, (strategies, *dims())).astype(float)
        return np.where(rng.random(values.shape) < 0.15, np.inf, values)

    cost = rng.integers(0, 3, strategies).astype(float)
    tables = [table() for _ in range(rng.integers(0, 3))]
    used = [rng.integers(0, 2, (rows, strategies, *dims())) for _ in range(rng.integers(1, 3))]
    total = sum(tables, np.broadcast_to(cost.reshape(-1, *[1] * len(shape)), (strategies, *shape)))
    held = sum(used, np.zeros((rows, strategies, *shape), np.int64))
    expected, least = np.full(shape, np.inf), np.zeros((rows, *shape), np.int64)
    settled = True
    for cell in np.ndindex(*shape):
        at = [s for s in range(strategies) if np.isfinite(total[(s, *cell)])]
        if not at:
            continue
        best = min(at, key=lambda s: (total[(s, *cell)], held[(slice(None), s, *cell)].sum()))
        expected[cell] = total[(best, *cell)]
        least[(slice(None), *cell)] = np.min([held[(slice(None), s, *cell)] for s in at], axis=0)
        settled &= bool((held[(slice(None), best, *cell)] == least[(slice(None), *cell)]).all())
    found = min_sum_used(cost, tables, used, shape)
    assert (found is not None) == settled
    if found is not None:
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[1], least)

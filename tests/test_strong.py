"""Branching on single strategies, where message passing leaves a gap."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.mathopt import solve_mathopt
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.program.nets import strong
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.nets.strong import StrongBranching, trial_cells
from program_cases import programs, random_program


def branch(program: Program, deadline: float = math.inf) -> tuple[float, float, int]:
    """Best cost, lower bound and branches of a search below the whole program, with nothing solved before."""
    costs, bounds = [math.inf], [-math.inf]

    def offer(choices: np.ndarray) -> float:
        costs.append(program.cost(choices))
        return min(costs)

    search = StrongBranching(offer, bounds.append, lambda: False, deadline)
    try:
        search.run(build_net(program), math.inf)
    except EmptyNodeError:
        bounds.append(min(costs))
    return min(costs), max(bounds), search.nodes


def frustrated(seed: int, side: int) -> Program:
    """A torus of nodes with three strategies whose neighbours agree or differ by chance: messages alone leave a gap."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{v}", 0.01 * rng.random(3), None) for v in range(side * side))
    edges = []
    for v in range(side * side):
        row, column = divmod(v, side)
        for w in (row * side + (column + 1) % side, (row + 1) % side * side + column):
            table = rng.choice([-1.0, 1.0]) * np.eye(3) + 0.1 * rng.random((3, 3))
            edges.append(Edge(v, w, np.arange(3), np.arange(3), table - table.min(), None))
    return Program(nodes, tuple(edges), Lifetimes.empty(), None)


def wheel(seed: int, side: int) -> Program:
    """The same torus, each node of which pays by another table what one more node, the hub, chooses."""
    rng, torus = np.random.default_rng(seed), frustrated(seed, side)
    hub = len(torus.nodes)
    spokes = (Edge(v, hub, np.arange(3), np.arange(4), 2.0 * rng.random((3, 4)), None) for v in range(hub))
    nodes = (*torus.nodes, Node("hub", np.zeros(4), None))
    return Program(nodes, (*torus.edges, *spokes), Lifetimes.empty(), None)


def close(a: float, b: float) -> bool:
    return a == b or a == pytest.approx(b, rel=1e-9, abs=1e-15)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(programs())
def test_branching_alone_finds_and_proves_the_optimum(program: Program) -> None:
    best = brute_force(program).objective
    cost, bound, _ = branch(program)
    assert close(cost, best) and close(bound, best)


@pytest.mark.parametrize("seed", range(3))
def test_cycles_that_messages_leave_open_are_closed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = frustrated(seed, 3)
    best = brute_force(program).objective
    monkeypatch.setattr(strong, "CELLS", 1)  # presolve eliminates nothing for it
    cost, bound, nodes = branch(program)
    assert close(cost, best) and close(bound, best) and nodes > 1


def test_hubs_are_tried_first_and_leave_fewer_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    program = wheel(1, 4)
    assert strong.hubs(Messages(build_net(program)))[0] == 16
    monkeypatch.setattr(strong, "CELLS", 1)
    monkeypatch.setattr(strong, "CANDIDATES", 1)
    cost, bound, few = branch(program)
    monkeypatch.setattr(strong, "hubs", lambda messages: [])
    other, proved, many = branch(program)
    assert close(cost, bound) and close(cost, other) and close(cost, proved)
    assert few < many, "without them"


def test_hubs_that_close_little_are_not_tried_below(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def spy(messages: Messages) -> list[int]:
        asked.append(1)
        return messages.nodes[:1]

    monkeypatch.setattr(strong, "CELLS", 1)
    monkeypatch.setattr(strong, "LITTLE", math.inf)
    monkeypatch.setattr(strong, "hubs", spy)
    _, _, nodes = branch(frustrated(0, 4))
    assert nodes > 2 and len(asked) == 1


@settings(deadline=None, max_examples=60, derandomize=True)
@given(programs())
def test_branches_seen_through_as_windows_prove_the_same(program: Program) -> None:
    best = brute_force(program).objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strong, "DEAR", 0.0)
        patch.setattr(strong, "ENOUGH", math.inf)  # whatever trials close
        patch.setattr(strong, "CELLS", 1)
        cost, bound, _ = branch(program)
    assert close(cost, best) and close(bound, best)


def test_a_window_that_is_too_wide_is_not_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    program = frustrated(0, 4)
    best = solve(program, SolverOptions(time_limit=100.0)).objective
    monkeypatch.setattr(strong, "DEAR", 0.0)
    monkeypatch.setattr(strong, "ENOUGH", math.inf)
    monkeypatch.setattr(strong, "CELLS", 1)
    monkeypatch.setattr(strong, "WINDOW_SECONDS", -1.0)  # none proves anything
    cost, bound, nodes = branch(program)
    assert close(cost, best) and close(bound, best) and nodes > 2


@settings(deadline=None, max_examples=40, derandomize=True)
@given(programs())
def test_a_trial_keeps_every_strategy_of_a_cheaper_plan_and_restores_the_rest(program: Program) -> None:
    best = brute_force(program)
    if best.choices is None:
        return
    messages = Messages(build_net(program))
    for v in list(messages.nodes):
        before = messages.state()
        upper = best.objective * (1 + 1e-6) + 1e-12
        found = strong.trial(messages, v, upper, math.inf)
        assert int(best.choices[v]) in found.strategies
        assert (found.bounds <= upper * (1 + 1e-9) + 1e-12).all()
        assert messages.bound == before.bound
        for w in messages.nodes:
            if w != v:
                at = messages.flat.theta_at[messages.nodes.index(w)]
                assert np.array_equal(messages.theta[w], before.theta[at : at + len(messages.theta[w])])


def test_nothing_cheaper_empties_the_node() -> None:
    program = random_program(1, 6, "cycle", "plain", forbidden=0.0)
    best = brute_force(program).objective
    messages = Messages(build_net(program))
    with pytest.raises(EmptyNodeError):
        for _ in range(50):
            for v in messages.nodes:
                strong.trial(messages, v, 0.5 * best, math.inf)


def test_out_of_time_leaves_a_valid_bound() -> None:
    program = random_program(2, 9, "clique", "plain", forbidden=0.0)
    best = brute_force(program).objective
    cost, bound, nodes = branch(program, deadline=time.monotonic() - 1.0)
    assert nodes == 0 and cost == math.inf and -math.inf < bound <= best


def test_a_program_that_rounds_leave_open_is_proved_by_branches() -> None:
    program = frustrated(0, 6)
    solution = solve(program, SolverOptions(time_limit=100.0))
    assert solution.status == "optimal"
    assert solution.report["branches"] > 1
    second = solve_mathopt(program, SolverOptions(time_limit=100.0))
    assert second.lower_bound <= solution.objective * (1 + 1e-6) and solution.objective <= second.objective * (1 + 1e-9)


def test_what_trying_every_strategy_of_a_node_takes() -> None:
    assert trial_cells(build_net(frustrated(0, 3))) == 9 * 2 * 9 * 3, "18 tables of 9 cells, 3 strategies"


def test_branches_left_open_are_taken_up_again() -> None:
    """Where limits are widened in between."""
    program = frustrated(0, 6)
    best = solve(program, SolverOptions(time_limit=100.0)).objective
    costs, bounds = [math.inf], [-math.inf]

    def offer(choices: np.ndarray) -> float:
        costs.append(program.cost(choices))
        return min(costs)

    search = StrongBranching(offer, bounds.append, lambda: len(costs) == 2, math.inf)
    search.run(build_net(program), math.inf)
    assert search.open and search.nodes == 1 and max(bounds) < best
    search.done = lambda: False
    with pytest.raises(EmptyNodeError):
        search.resume()
    assert close(min(costs), best)

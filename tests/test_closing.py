"""Guesses of the optimum under memory rows, and the integer program that decides them. Oracle: enumeration."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.milp import Milp
from autoshard_ilp.program.model import Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.rows import closing
from autoshard_ilp.program.rows.memory import Owners
from autoshard_ilp.program.search import ROUGHLY
from program_cases import programs, tight, tight_programs

OPTIONS = SolverOptions(time_limit=60.0)
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 0.9))
def test_the_integer_program_is_exact(program: Program, part: float) -> None:
    program = tight(program, part) or program
    capacity = 2**40 if program.capacity is None else program.capacity
    times = range(int(np.max(program.lifetimes.end, initial=0)))
    best = brute_force(dataclasses.replace(program, capacity=capacity))
    try:
        net = build_net(program, None, [Owners(program).row(t) for t in times])
        found = Milp(net, capacity).solve(time.monotonic() + 20)
    except EmptyNodeError:
        assert best.status == "infeasible"
        return
    assert (found.status == "infeasible") == (best.status == "infeasible")
    if found.choices is not None:
        assert program.cost(found.choices) == pytest.approx(best.objective, rel=1e-8)
        assert found.bound <= best.objective * (1 + 1e-9) + 1e-15
        assert found.bound >= best.objective * (1 - 1e-6) - found.error_seconds


@pytest.mark.parametrize("cells", [0, 40, 10**6])
@pytest.mark.parametrize("shape", ["tree", "cycle", "random"])
def test_guesses_end_at_the_optimum(shape: str, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever size is allowed: with none, the search goes on without guesses."""
    monkeypatch.setattr(closing, "WINDOW_CELLS", -1)
    monkeypatch.setattr(closing, "MOST_CELLS", cells)
    monkeypatch.setattr(closing, "GUESS_CELLS", cells)
    monkeypatch.setattr(closing, "ENOUGH_CELLS", min(cells, 20))
    tried, decided, learn = 0, list[bool](), closing.Closing._learn

    def learned(self: closing.Closing, *args: Any) -> None:
        learn(self, *args)
        decided.append(self.proved)

    monkeypatch.setattr(closing.Closing, "_learn", learned)
    for seed, program in tight_programs(12, 9, shape, 0.4):
        tried += 1
        best, found = brute_force(program), solve(program, OPTIONS)
        assert found.status == best.status, seed
        assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
        assert found.lower_bound <= best.objective * (1 + 1e-9), seed
    assert tried > 4
    assert cells == 0 or sum(decided) > 0, "no guess decided anything"


def test_a_byte_too_much_is_too_much() -> None:
    """Rows of the integer program are real numbers: the tolerance of 16 GB is many bytes."""
    size = 8 * 10**9
    nodes = tuple(Node(f"n{i}", np.array([0.0, 1.0 + i]), np.array([size + 3 - i, 0])) for i in range(4))
    lifetimes = Lifetimes(np.zeros(4, bool), np.arange(4), np.zeros(4, np.int64), np.ones(4, np.int64))
    for capacity in (2 * size + 1, 2 * size + 2, 2 * size + 3):
        program = Program(nodes, (), lifetimes, capacity)
        best, found = brute_force(program), solve(program, OPTIONS)
        assert found.choices is not None and found.peak_bytes <= capacity
        assert found.status == "optimal" and found.objective == pytest.approx(best.objective, rel=1e-12)


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 0.9), st.sampled_from([0.5, 1.0, 1.0 + 1e-6, 2.0]))
def test_only_what_is_cheaper_than_the_cutoff_is_found(program: Program, part: float, factor: float) -> None:
    program = tight(program, part) or program
    best = brute_force(program)
    cutoff = factor * best.objective if math.isfinite(best.objective) else 1.0
    found = solve(program, OPTIONS, cutoff=cutoff)
    if best.objective < cutoff * (1 - 1e-9):
        assert found.status == "optimal" and found.objective == pytest.approx(best.objective, rel=1e-9)
    else:
        assert found.choices is None
        assert found.status == "infeasible" or found.lower_bound >= cutoff * (1 - 1e-9)
        assert best.status == "infeasible" or found.status != "infeasible"


def test_what_a_known_plan_rules_out_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good plan leaves little of a net, often nothing; the answer is the same."""
    asked, left = [], []
    asks, shrink = closing.Closing._rules_out_most, closing.Closing._shrink
    monkeypatch.setattr(closing.Closing, "_rules_out_most", lambda self: asked.append(asks(self)) or asked[-1])
    monkeypatch.setattr(closing.Closing, "_shrink", lambda self: shrink(self) or left.append(len(self.net.live)))
    for seed, program in tight_programs(20, 9, "random", 0.2):
        best = brute_force(program)
        found = solve(program, OPTIONS, hint=best.choices)
        assert found.status == "optimal", seed
        assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
    assert sum(asked) > 0 and 0 in left


def test_a_search_ends_once_memory_is_proved_to_be_dear() -> None:
    """Bound and plan are true, the plan fits, and memory adds what is said."""
    ended = 0
    for _, program in tight_programs(30, 9, "random", 0.2):
        free = brute_force(dataclasses.replace(program, capacity=None)).objective
        best, found = brute_force(program), solve(program, OPTIONS, dear=0.02)
        assert found.lower_bound <= best.objective * (1 + 1e-9)
        assert found.choices is not None and program.peak(found.choices) <= program.capacity
        if found.status != "optimal":
            assert found.report["too_dear"] and best.objective * 0.98 >= free
            assert found.objective <= found.lower_bound / (1 - ROUGHLY)  # any plan would do no good
            ended += 1
        else:
            assert found.objective == pytest.approx(best.objective, rel=1e-9)
        cutoff = best.objective * 1.5
        beaten = solve(program, OPTIONS, dear=0.02, cutoff=cutoff)
        assert beaten.lower_bound <= best.objective * (1 + 1e-9)
        assert beaten.choices is not None or beaten.report["too_dear"]
        assert beaten.choices is not None or beaten.lower_bound >= cutoff * (1 - ROUGHLY)
    assert ended > 0


def test_any_assignment_may_show_where_memory_binds() -> None:
    """Each node's cheapest strategy by itself, which may be impossible: the answer is the same."""
    impossible = 0
    for _, program in tight_programs(20, 9, "random", 0.2):
        alone = np.array([int(np.argmin(node.costs)) for node in program.nodes], np.int64)
        impossible += math.isinf(program.cost(alone))
        found = solve(program, OPTIONS, relaxed=alone)
        assert found.status == "optimal"
        assert found.objective == pytest.approx(brute_force(program).objective, rel=1e-9)
    assert impossible > 0

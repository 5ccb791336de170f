"""The local search that gives a stuck descent a better plan."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard_ilp.program import brute_force
from autoshard_ilp.program.capacity import Room
from autoshard_ilp.program.core import ASK_AFTER, ROUNDS, Descent
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.net import EmptyNodeError, build_net
from autoshard_ilp.program.start import SHARE, local_start, without_memory
from program_cases import programs, random_program


@settings(deadline=None, max_examples=25, derandomize=True)
@given(programs(memory=True))
def test_the_program_without_memory_costs_the_same_and_keeps_what_has_room(program: Program) -> None:
    free = without_memory(program, None)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        choices = np.array([rng.integers(len(n.costs)) for n in program.nodes])
        assert free.cost(choices) == program.cost(choices)
        assert free.peak(choices) == 0
    tight = dataclasses.replace(program, capacity=30)
    room = Room.of(tight)
    try:
        room.run()
    except EmptyNodeError:
        return
    for n, k in zip(without_memory(tight, room).nodes, room.keep, strict=True):
        assert np.isinf(n.costs[~k]).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_local_start_is_a_plan_and_often_the_best(seed: int) -> None:
    program = random_program(seed, 9, "random", "plain", forbidden=0.05)
    best = brute_force(program)
    if best.choices is None:
        return
    found = local_start(program, None, SolverOptions(), None, time.monotonic() + 2.0 / SHARE)
    assert found is not None and program.cost(found) == pytest.approx(best.objective, rel=1e-9)


def test_an_open_descent_asks_once_and_takes_the_plan() -> None:
    program = random_program(3, 60, "random", "plain", forbidden=0.0, most=6)
    offered: list[float] = []
    asked: list[int] = []
    plan = np.zeros(60, np.int64)

    def offer(choices: np.ndarray) -> float:
        offered.append(program.cost(choices))
        return min(offered)

    def ask() -> np.ndarray:
        asked.append(len(offered))
        return plan

    rounds = ((1, 2),) * len(ROUNDS)  # nothing is eliminated, so it stays open
    Descent(offer, lambda bound: None, lambda: False, math.inf, rounds=rounds, ask=ask).run(
        build_net(program), math.inf
    )
    assert len(asked) == 1 and offered[asked[0]] == program.cost(plan)
    assert len(ROUNDS) > ASK_AFTER


def test_no_time_no_start() -> None:
    program = random_program(0, 5, "tree", "plain")
    assert local_start(program, None, SolverOptions(), None, time.monotonic() - 1.0) is None

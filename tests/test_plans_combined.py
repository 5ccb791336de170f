"""The best plan within the strategies of a few plans, against enumeration; and that searches go on from a poor plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest

from autoshard_ilp.program import minimum_capacity, solve
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.rows import combining
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.combining import combine
from autoshard_ilp.program.rows.constrained import Constrained
from autoshard_ilp.program.search import Search
from program_cases import random_program

OPTIONS = SolverOptions(time_limit=30.0)


def within(program: Program, pool: list[np.ndarray]) -> float:
    """Least seconds of all assignments that fit and whose every choice is one of a pool's plans."""
    assert program.capacity is not None
    best = math.inf
    for choices in itertools.product(*[sorted({int(x[v]) for x in pool}) for v in range(len(program.nodes))]):
        found = np.array(choices, np.int64)
        if program.cost(found) < best and program.peak(found) <= program.capacity:
            best = program.cost(found)
    return best


def searched(program: Program, relaxed: np.ndarray) -> Constrained:
    """The search under the first rows of a plan that does not fit."""
    room = Room.of(program)
    room.run()
    owner = Constrained(Search(program, OPTIONS, time.monotonic(), None), relaxed, room)
    owner.rows = [owner.owners.row(t) for t in owner.first_times()]
    return owner


@pytest.mark.parametrize("cells", [1, 5_000])
def test_the_best_combination_that_fits_at_all_times_is_found(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fastest plan, which does not fit, the one of least memory and some of neither kind; by windows (where
    presolve may make no tables), or by presolve alone."""
    monkeypatch.setattr(combining, "CELLS", cells)
    rng, tried, later = np.random.default_rng(0), 0, 0
    for seed, shape in itertools.product(range(20), ("cycle", "random")):
        program = random_program(seed, 8, shape, "plain", forbidden=0.05, memory=True)
        free = solve(dataclasses.replace(program, capacity=None), OPTIONS)
        if free.choices is None:
            continue
        least, _, smallest = minimum_capacity(program, OPTIONS)
        if not least < free.peak_bytes or not math.isfinite(program.cost(smallest)):
            continue
        program = dataclasses.replace(program, capacity=least + int(0.3 * (free.peak_bytes - least)))
        owner = searched(program, free.choices)
        sizes = [len(n.costs) for n in program.nodes]
        pool = [free.choices, smallest, *(np.array([rng.integers(n) for n in sizes]) for _ in range(2))]
        owner.seen = pool
        times = len(owner.rows)
        assert combine(owner, np.zeros(times)) == []
        expected = within(program, pool)
        assert owner.search.upper == pytest.approx(expected, rel=1e-9)
        assert owner.search.best is None or program.peak(owner.search.best) <= program.capacity
        tried += 1
        later += times < len(np.flatnonzero(program.usage_over_time(free.choices) > program.capacity))
    assert tried > 15 and later > 5, "cases with moments beside the first rows"


def test_what_is_no_plan_of_the_pool_is_not_found() -> None:
    """Plans that do not fit, nor any combination: nothing is offered, and no time is lost."""
    program = random_program(3, 8, "cycle", "plain", forbidden=0.0, memory=True)
    free = solve(dataclasses.replace(program, capacity=None), OPTIONS)
    assert free.choices is not None
    program = dataclasses.replace(program, capacity=minimum_capacity(program, OPTIONS)[0])
    owner = searched(program, free.choices)
    owner.seen = [free.choices]
    combine(owner, np.zeros(len(owner.rows)))
    assert owner.search.best is None


def test_a_large_combination_is_left_alone_unless_the_best_plan_is_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan near the bound, what more than so many cells hold takes longer than it is worth."""
    monkeypatch.setattr(combining, "POOL_CELLS", -1)
    monkeypatch.setattr(combining, "CELLS", 1)
    rng = np.random.default_rng(1)
    for poor in (False, True):
        program = random_program(5, 9, "clique", "plain", forbidden=0.0, memory=True)
        free = solve(dataclasses.replace(program, capacity=None), OPTIONS)
        least, _, smallest = minimum_capacity(program, OPTIONS)
        assert free.choices is not None and least < free.peak_bytes
        program = dataclasses.replace(program, capacity=least + int(0.5 * (free.peak_bytes - least)))
        owner = searched(program, free.choices)
        others = [np.array([rng.integers(len(n.costs)) for n in program.nodes]) for _ in range(6)]
        owner.seen = [*others, free.choices, smallest]
        owner.search.offer(smallest)
        known = owner.search.upper
        owner.search.lower = known * (0.5 if poor else 0.95)
        combine(owner, np.zeros(len(owner.rows)))
        assert (owner.search.upper < known) == poor

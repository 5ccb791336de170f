"""Families of strategies: those of coarser meshes, and the best plan of each."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.costs.coarse import coarser
from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.model import Lifetimes, Program, Solution, SolverOptions
from autoshard_ilp.program.nets import core
from autoshard_ilp.program.rows import closing, priced
from autoshard_ilp.program.rows.families import ALL, FREE, NEAREST, Families, restricted
from autoshard_ilp.program.search import Search
from autoshard_ilp.strategies import Strategy
from program_cases import programs, tight_programs
from test_strong import frustrated

OPTIONS = SolverOptions(time_limit=30.0)


def one(*layouts: tuple[int, ...]) -> list[Strategy]:
    return [Strategy((), (layout,)) for layout in layouts]


def test_on_two_axes_they_go_together_or_one_is_left_alone() -> None:
    nodes = [one((-1, -1), (0, 0), (0, -1), (1, 0)), one((-1, -1), (-1, 1))]
    together, second_alone, first_alone = coarser(nodes, (2, 4))
    assert [k.tolist() for k in together] == [[True, True, False, False], [True, False]]
    assert [k.tolist() for k in second_alone] == [[True, False, False, False], [True, True]]
    assert [k.tolist() for k in first_alone] == [[True, False, True, False], [True, False]]


def test_axes_of_one_device_count_for_nothing() -> None:
    nodes = [one((-1, 0, -1), (0, -1, 0), (0, 1, 1))]
    assert [f[0].tolist() for f in coarser(nodes, (2, 1, 2))] == [[True, True, False], *2 * [[True, False, False]]]
    assert coarser(nodes, (1, 8, 1)) == []


def test_three_axes_have_ten_families_the_coarsest_first() -> None:
    nodes = [one((-1, -1, -1), (0, 0, 0), (0, 0, -1), (0, -1, -1), (0, 1, -1))]
    found = coarser(nodes, (2, 2, 2))
    sizes = [int(family[0].sum()) for family in found]
    assert len(found) == 10 and sizes[:4] == [2, 2, 1, 1] and sizes[4:7] == [3, 2, 3]


def test_partial_sums_and_what_is_not_read_count_too() -> None:
    layouts = ((0, 0), None)
    nodes = [[Strategy(layouts, ((0, 0),), (0, -2)), Strategy(layouts, ((0, 0),), (-2, -2)), *one((-1, -1))]]
    assert coarser(nodes, (2, 2))[0][0].tolist() == [False, True, True]


@given(program=programs(memory=True), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_restricted_program_has_the_costs_and_bytes_of_the_whole(program: Program, data: Any) -> None:
    kept = []
    for node in program.nodes:
        chosen = data.draw(st.lists(st.booleans(), min_size=len(node.costs), max_size=len(node.costs)))
        kept.append(np.array(chosen) | (np.arange(len(node.costs)) == len(node.costs) - 1))
    small = restricted(program, kept)
    choices = [data.draw(st.integers(0, int(k.sum()) - 1)) for k in kept]
    whole = [int(np.flatnonzero(k)[s]) for k, s in zip(kept, choices, strict=True)]
    np.testing.assert_allclose(small.cost(choices), program.cost(whole))
    np.testing.assert_array_equal(small.usage_over_time(choices), program.usage_over_time(whole))


def halves(program: Program) -> list[list[np.ndarray]]:
    """The lower and the upper half of every node's strategies."""
    return [[(np.arange(len(n.costs)) < (len(n.costs) + 1) // 2) == first for n in program.nodes] for first in (1, 0)]


def test_the_best_plan_of_every_family_is_offered() -> None:
    found = 0
    for _, program in (*tight_programs(20, 6, "cycle", 0.5), *tight_programs(20, 6, "random", 0.2)):
        families = [f for f in halves(program) if all(k.any() for k in f)]
        program = dataclasses.replace(program, families=lambda families=families: families)
        search = Search(program, OPTIONS, time.monotonic(), None)
        search.solver = solve
        all_of_them = Families(search)
        assert all_of_them.affordable()
        plans = all_of_them.look()
        least = min((brute_force(restricted(program, f)).objective for f in families), default=math.inf)
        if math.isinf(least):
            assert search.best is None and not plans
            continue
        np.testing.assert_allclose(search.upper, least, rtol=1e-8)
        assert search.best is not None and program.capacity is not None
        assert program.peak(search.best) <= program.capacity
        assert any(np.array_equal(search.best, plan) for plan in plans)
        found += 1
    assert found >= 10


def deep(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    return jax.value_and_grad(loss)(weights)


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_search_whose_windows_take_long_looks_into_families(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LONG_SECONDS", seconds)
    monkeypatch.setattr(closing, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(closing, "POOR_GAP", 0.0)
    args = [np.ones((64, 64), "float32")] * 3, np.ones((256, 64), "float32")
    free = autoshard.optimize_fn(deep, args, {"a": 2, "b": 2}, hardware="h100", progress=False)
    program = dataclasses.replace(free.trail.program, capacity=int(0.6 * free.memory.peak_bytes))
    found, alone = (solve(p, OPTIONS) for p in (program, dataclasses.replace(program, families=None)))
    assert found.status == alone.status == "optimal"
    np.testing.assert_allclose(found.objective, alone.objective, rtol=1e-6)
    assert ("families" in found.report["seconds"]) == (seconds == 0.0)
    assert "families" not in alone.report["seconds"]


@pytest.mark.parametrize("wide", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_wide_net_looks_into_families_whose_plans_are_most_like_the_best(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priced, "WIDE_CELLS", 0 if wide else math.inf)
    monkeypatch.setattr(closing, "WINDOW_CELLS", 0)  # no window before
    monkeypatch.setattr(closing, "NEAR", -1.0)
    args = [np.ones((64, 64), "float32")] * 3, np.ones((256, 64), "float32")
    free = autoshard.optimize_fn(deep, args, {"a": 2, "b": 2}, hardware="h100", progress=False)
    program = dataclasses.replace(free.trail.program, capacity=int(0.6 * free.memory.peak_bytes))
    found = solve(program, OPTIONS)
    assert ("families" in found.report["seconds"]) == wide
    assert found.choices is not None and program.peak(found.choices) <= program.capacity


@pytest.mark.parametrize("far", [True, False])
def test_without_memory_families_are_looked_into_where_the_plan_is_far_from_the_bound(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "DEAR", 0.0)
    monkeypatch.setattr(core, "FAR", 0.0 if far else 1.0)
    program = frustrated(0, 6)
    optimum = solve(program, OPTIONS)
    best, plan = optimum.objective, optimum.choices
    assert plan is not None
    # Of every node all strategies but one: the family that holds the optimum, and one that does not.
    kept = [np.arange(len(n.costs)) != (s + 1) % len(n.costs) for n, s in zip(program.nodes, plan, strict=True)]
    other = [np.arange(len(n.costs)) != s for n, s in zip(program.nodes, plan, strict=True)]
    found = solve(dataclasses.replace(program, families=lambda: [other, kept]), OPTIONS)
    assert found.status == "optimal" and math.isclose(found.objective, best, rel_tol=1e-8)
    assert ("families" in found.report["seconds"]) == far


@pytest.mark.parametrize("fits", [True, False])
def test_families_are_left_to_prices_where_the_best_plan_does_not_fit(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "DEAR", 0.0)
    monkeypatch.setattr(core, "FAR", 0.0)
    program = frustrated(0, 6)
    plan = solve(program, OPTIONS).choices
    assert plan is not None
    held = [10 * (np.arange(len(n.costs)) == s) for n, s in zip(program.nodes, plan, strict=True)]
    nodes = tuple(dataclasses.replace(n, bytes=b) for n, b in zip(program.nodes, held, strict=True))
    size = len(nodes)
    alive = Lifetimes(np.zeros(size, bool), np.arange(size), np.zeros(size, np.int64), np.ones(size, np.int64))
    capacity = 10 * size if fits else 20
    program = dataclasses.replace(program, nodes=nodes, lifetimes=alive, capacity=capacity)
    every = [np.ones(len(n.costs), bool) for n in nodes]
    found = solve(dataclasses.replace(program, families=lambda: [every]), OPTIONS, rows=False)
    assert ("families" in found.report["seconds"]) == fits


def test_without_memory_plans_need_not_fit_and_are_handed_to_who_asked() -> None:
    for _, program in tight_programs(10, 6, "cycle", 0.5):
        families = [f for f in halves(program) if all(k.any() for k in f)]
        program = dataclasses.replace(program, families=lambda families=families: families)
        search, met = Search(program, OPTIONS, time.monotonic(), None), list[np.ndarray]()
        search.solver = solve
        cost = program.cost
        free = Families(
            search, lambda met=met, cost=cost: (None, min(map(cost, met), default=math.inf)), met.append, memory=False
        )
        assert free.affordable(FREE)
        plans = free.look(FREE)
        small = [dataclasses.replace(restricted(program, f), capacity=None) for f in families]
        least = min((brute_force(p).objective for p in small), default=math.inf)
        assert search.best is None and all(a is b for a, b in zip(plans, met, strict=True))
        costs = [program.cost(plan) for plan in met]
        assert costs == sorted(costs, reverse=True), "each is cheaper than those before"
        np.testing.assert_allclose(min(costs, default=math.inf), least, rtol=1e-8)


def test_the_family_that_the_plan_is_most_like_comes_first() -> None:
    program = frustrated(0, 4)
    size = len(program.nodes)
    plan = np.zeros(size, np.int64)
    none = [np.arange(len(n.costs)) > 0 for n in program.nodes]
    half = [k if v % 2 else ~k for v, k in enumerate(none)]
    search = Search(dataclasses.replace(program, families=lambda: [none, half]), OPTIONS, time.monotonic(), None)
    search.solver = solve
    for known, first in ((plan, half), (None, none)):
        families = Families(search, lambda known=known: (known, math.inf))
        assert families.affordable()
        assert families.sorted()[0][1] is first


def test_time_is_enough_for_all_families_or_for_the_first() -> None:
    seconds = 10.0
    all_of_them = int(ALL.rate * ALL.share * seconds)
    assert ALL.enough(seconds, [all_of_them // 2] * 2) and not ALL.enough(seconds, [all_of_them // 2] * 3)
    for pace in (FREE, NEAREST):
        first = int(pace.rate * pace.share * pace.first * seconds)
        assert pace.enough(seconds, [first, 10 * first]) and not pace.enough(seconds, [first + 1])
        assert not pace.enough(seconds, [])


def test_families_alike_are_looked_into_once_and_none_where_time_is_short() -> None:
    asked = list[int]()

    def solver(small: Program, options: SolverOptions, cutoff: float) -> Solution:
        asked.append(len(small.nodes[0].costs))
        return solve(small, options, cutoff=cutoff)

    plan = autoshard.optimize_fn(
        lambda x, w: x @ w, (np.ones((8, 8)), np.ones((8, 8))), {"a": 2, "b": 2}, hardware="h100", progress=False
    )
    program = dataclasses.replace(plan.trail.program, capacity=None)
    assert program.families is not None and len(program.families()) == 3
    for seconds, count in ((30.0, 2), (1e-3, 0)):  # over a or over b alone is the same
        asked.clear()
        search = Search(program, SolverOptions(time_limit=seconds), time.monotonic(), None)
        search.solver = solver
        families = Families(search)
        assert families.affordable() == bool(count)
        if count:
            families.look()
            assert not families.affordable()
        assert len(asked) == count


def test_families_that_give_nothing_better_are_left_after_a_few() -> None:
    asked = list[Program]()

    def solver(small: Program, options: SolverOptions, cutoff: float) -> Solution:
        asked.append(small)
        return solve(small, options, cutoff=cutoff)

    program = frustrated(0, 3)
    kept = [[np.arange(3) != (v + i) % 3 for v in range(9)] for i in range(3)]
    program = dataclasses.replace(
        program, families=lambda: [*kept, *([~np.eye(3, dtype=bool)[i]] * 9 for i in range(3))]
    )
    for pace, most in ((FREE, FREE.misses), (dataclasses.replace(FREE, misses=99), 6)):
        asked.clear()
        search = Search(program, OPTIONS, time.monotonic(), None)
        search.offer(solve(program, OPTIONS).choices)
        search.solver = solver
        families = Families(search, memory=False)
        assert families.affordable(pace)
        families.look(pace)
        assert len(asked) == most, "none is better than the best"


def test_an_interrupt_keeps_the_plan_of_a_family() -> None:
    plan = autoshard.optimize_fn(lambda x: x * 2, (np.ones((8, 8)),), {"a": 2, "b": 2}, hardware="h100", progress=False)

    def interrupted(small: Program, options: SolverOptions, cutoff: float) -> Solution:
        found = solve(small, options, cutoff=cutoff)
        return dataclasses.replace(found, report={"interrupted": True})

    search = Search(plan.trail.program, OPTIONS, time.monotonic(), None)
    search.solver = interrupted
    all_of_them = Families(search)
    assert all_of_them.affordable()
    with pytest.raises(KeyboardInterrupt):
        all_of_them.look()
    assert search.best is not None

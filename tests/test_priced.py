"""Prices on memory rows: what they prove is true, and relaxations of a few strategies per node find better ones."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest

from autoshard_ilp.program import brute_force, minimum_capacity, solve
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.rows import priced
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.constrained import Constrained
from autoshard_ilp.program.rows.priced import PricedNet
from autoshard_ilp.program.search import Search
from program_cases import random_program

OPTIONS = SolverOptions(time_limit=60.0)


def cases() -> list[tuple[Program, np.ndarray]]:
    """Programs whose cheapest assignment (the second of each pair) does not fit."""
    found = []
    for seed in range(14):
        for shape in ("cycle", "random"):
            program = random_program(seed, 9, shape, "plain", forbidden=0.05, memory=True)
            free = solve(dataclasses.replace(program, capacity=None), OPTIONS)
            least = math.inf if free.choices is None else minimum_capacity(program, OPTIONS)[0]
            if free.choices is not None and free.peak_bytes > least:
                capacity = least + int(0.4 * (free.peak_bytes - least))
                found.append((dataclasses.replace(program, capacity=capacity), free.choices))
    return found


def priced_net(program: Program, relaxed: np.ndarray) -> PricedNet:
    """The whole program under its first rows, with no prices yet."""
    search = Search(program, OPTIONS, time.monotonic(), None)
    room = Room.of(program)
    room.run()
    owner = Constrained(search, relaxed, room)
    owner.rows = [owner.owners.row(t) for t in owner.first_times()]
    return PricedNet(owner, build_net(program, owner.keep, owner.rows, room.cells), np.zeros(len(owner.rows)))


def bound_of(program: Program, relaxed: np.ndarray) -> float:
    """Seconds that the prices of the first rows prove."""
    net = priced_net(program, relaxed)
    net.improve_prices()
    return net.bound


@pytest.mark.parametrize(("way", "values", "gain"), [("ROUNDS", (0, 3), 0.01), ("SCALES", (1, 10), 0.1)])
def test_prices_prove_what_is_true(
    way: str, values: tuple[int, int], gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With relaxations, or with several scales, the bound is never above the optimum, and on the whole closer to it."""
    closer = 0.0
    monkeypatch.setattr(priced, "ROUNDS", 0)
    monkeypatch.setattr(priced, "SCALES", 1)
    for program, relaxed in cases():
        best = brute_force(program).objective
        bounds = []
        for value in values:
            monkeypatch.setattr(priced, way, value)
            try:
                bounds.append(bound_of(program, relaxed))
            except EmptyNodeError:  # nothing is left beside a plan found on the way
                bounds.append(best)
        assert max(bounds) <= best * (1 + 1e-9)
        assert math.isfinite(bounds[1])
        if way == "ROUNDS":  # relaxations only add; with more scales, what follows begins elsewhere
            assert bounds[1] >= bounds[0] * (1 - 1e-12)
        closer += (bounds[1] - bounds[0]) / best
    assert closer > gain, "no better prices were found"


def test_relaxations_are_left_out_where_they_show_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before priced optima, where messages prove less than is known; in wide nets, where the gap is nearly as asked."""
    gaps: list[float] = []

    def price_few(self: PricedNet) -> bool:
        gaps.append(self.gap() / abs(self.search.upper))
        return False

    def asked(case: tuple[Program, np.ndarray], exact: bool, without_memory: float, gap: float, cells: int) -> bool:
        gaps.clear()
        net, best = priced_net(*case), brute_force(case[0])
        assert best.choices is not None
        net.search.offer(best.choices)
        net.search.without_memory = without_memory
        net.search.options = SolverOptions(time_limit=60.0, relative_gap=gap)
        monkeypatch.setattr(priced, "WIDE_CELLS", cells)
        net.improve_prices(exact=exact)
        return bool(gaps)

    monkeypatch.setattr(PricedNet, "_price_few", price_few)
    monkeypatch.setattr(priced, "WIDE_STEPS", priced.STEPS)
    some = [case for case in cases() if asked(case, False, -math.inf, 0.0, 10**9)]
    assert some
    for case in some:
        assert asked(case, True, -math.inf, 0.0, 10**9) and asked(case, False, math.inf, 0.0, 10**9)
        assert not asked(case, True, math.inf, 0.0, 10**9)
        assert asked(case, False, -math.inf, 0.0, -1)
        gap = 0.7 * gaps[0]
        assert asked(case, False, -math.inf, gap, 10**9) and not asked(case, False, -math.inf, gap, -1)


def test_few_strategies_that_hold_no_plan_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One strategy per node, at the least capacity with a plan: often none of those fits together, and others do."""
    monkeypatch.setattr(priced, "FEW", (1,))
    monkeypatch.setattr(priced, "PLANS", 0)
    without = 0
    for program, relaxed in cases():
        tight = dataclasses.replace(program, capacity=minimum_capacity(program, OPTIONS)[0])
        without += priced_net(tight, relaxed).few(10**9) is None
        assert solve(tight, OPTIONS).objective == pytest.approx(brute_force(tight).objective, rel=1e-9)
    assert without > 0


def test_plans_that_hold_too_much_are_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any plan of its own, the search gets most of them from what holds too much; none is below the optimum."""
    monkeypatch.setattr(priced, "ROUNDS", 0)
    monkeypatch.setattr(priced, "SCALES", 1)
    monkeypatch.setattr(priced, "PLAN_SCALES", 0)
    found, asked = 0, 0
    for program, relaxed in cases():
        net = priced_net(program, relaxed)
        net.improve_prices()
        if net.search.best is not None:
            continue
        asked += 1
        net.owner.remember(relaxed)
        net.repair()
        if net.search.best is not None:
            found += 1
            assert program.peak(net.search.best) <= program.capacity
            assert net.search.upper >= brute_force(program).objective * (1 - 1e-9)
    assert found > 0.3 * asked > 0

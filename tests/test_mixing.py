"""Prices of bytes, and the mixture of assignments that would fit and cost least."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import solve
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.program.rows.prices import mixture


def program(seed: int, nodes: int = 6) -> Program:
    """A chain whose nodes cost more the less they hold, all alive at once and half of them at a second moment."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(2, 5)) for _ in range(nodes)]
    made = [
        Node(f"n{v}", np.sort(rng.uniform(1, 9, n)), np.sort(rng.integers(1, 100, n))[::-1].copy())
        for v, n in enumerate(sizes)
    ]
    labels = [np.arange(n) for n in sizes]
    edges = [
        Edge(v, v + 1, labels[v], labels[v + 1], rng.uniform(0, 2, (sizes[v], sizes[v + 1]))) for v in range(nodes - 1)
    ]
    owners = np.concatenate([np.arange(nodes), np.arange(0, nodes, 2)])
    start = np.concatenate([np.zeros(nodes, np.int64), np.full(len(owners) - nodes, 2)])
    lifetimes = Lifetimes(np.zeros(len(owners), bool), owners, start, start + 1)
    return Program(tuple(made), tuple(edges), lifetimes)


def least(found: Program) -> tuple[np.ndarray, int]:
    """The best assignment without a capacity, and the least bytes that some assignment holds at the first moment."""
    free = solve(found, SolverOptions())
    return free.choices, sum(int(n.bytes.min()) for n in found.nodes)  # type: ignore[return-value,union-attr]


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_mixture_lies_between_the_bound_and_every_plan(seed: int, tight: float) -> None:
    found = program(seed)
    relaxed, bytes_least = least(found)
    capacity = int(bytes_least + tight * (found.peak(relaxed) - bytes_least))
    if capacity >= found.peak(relaxed):
        return
    found = replace(found, capacity=capacity)
    best = solve(found, SolverOptions())
    shown = solve(found, SolverOptions(), relaxed=relaxed, mixing=True)
    mixed = shown.report["mixture"]
    seconds = sum(weight * cost for weight, cost, _ in mixed)
    assert sum(weight for weight, _, _ in mixed) == pytest.approx(1.0)
    assert all(cost == found.cost(choices) for _, cost, choices in mixed)
    assert shown.lower_bound <= seconds * (1 + 1e-6), "the bound is that of the best mixture, at most"
    assert shown.lower_bound <= best.objective * (1 + 1e-9)
    assert seconds - shown.lower_bound <= 2e-3 * seconds, "the mixture is the best one, nearly"
    for t in shown.report["prices"]:
        used = sum(weight * float(found.usage_over_time(choices)[t]) for weight, _, choices in mixed)
        assert used <= capacity * (1 + 1e-6), "the mixture fits where bytes have a price"
    assert shown.choices is None or found.peak(shown.choices) <= capacity


def test_weights_of_a_mixture() -> None:
    def over(*rows: float) -> np.ndarray:
        return np.array(rows)

    half = mixture([(1.0, over(10.0)), (2.0, over(-10.0)), (5.0, over(-20.0))], 100)
    assert half is not None and half.tolist() == pytest.approx([0.5, 0.5, 0.0])
    alone = mixture([(1.0, over(-1.0)), (2.0, over(-10.0))], 100)
    assert alone is not None and alone.tolist() == pytest.approx([1.0, 0.0])
    two = mixture([(1.0, over(10.0, -5.0)), (1.1, over(-10.0, 10.0)), (9.0, over(-10.0, -10.0))], 100)
    assert two is not None and float(two @ np.array([10.0, -10.0, -10.0])) <= 1e-9
    assert float(two @ np.array([-5.0, 10.0, -10.0])) <= 1e-9
    assert mixture([(1.0, over(10.0))], 100) is None and mixture([], 100) is None


def test_prices_known_before_are_a_start() -> None:
    found = program(3)
    relaxed, bytes_least = least(found)
    found = replace(found, capacity=(bytes_least + found.peak(relaxed)) // 2)
    plain: Any = solve(found, SolverOptions())
    for prices in ({0: 1e-3}, {0: 0.1, 2: 0.1}, {0: 0.0}):
        again = solve(found, SolverOptions(), prices=prices)
        assert again.status == "optimal" and math.isclose(again.objective, plain.objective, rel_tol=1e-9)

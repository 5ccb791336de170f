"""The minimum of a net, part by part."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import brute_force
from autoshard_ilp.program.model import Program
from autoshard_ilp.program.nets import minimum
from autoshard_ilp.program.nets.minimum import minimum as least
from autoshard_ilp.program.nets.minimum import parts_of
from autoshard_ilp.program.nets.net import build_net
from program_cases import random_program


def beside(first: Program, second: Program) -> Program:
    """Two programs that nothing connects, as one."""
    n = len(first.nodes)
    moved = [dataclasses.replace(edge, u=edge.u + n, v=edge.v + n) for edge in second.edges]
    return Program((*first.nodes, *second.nodes), (*first.edges, *moved))


@given(st.integers(0, 10_000), st.sampled_from(["tree", "cycle", "clique"]), st.sampled_from(["uniform", "ties"]))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_parts_have_the_minimum_of_the_whole(seed: int, shape: str, style: str) -> None:
    parts = [random_program(seed + i, 4, shape, style, forbidden=0.05) for i in range(2)]
    whole = beside(*parts)
    best = [brute_force(part) for part in parts]
    if any(b.choices is None for b in best):
        return
    known = np.concatenate([b.choices for b in best if b.choices is not None])
    objective = math.fsum(b.objective for b in best)
    for start in (known, np.roll(known, 1) % [len(node.costs) for node in whole.nodes]):
        if not math.isfinite(whole.cost(start)):
            continue
        bound, choices = least(build_net(whole), start, math.inf, 0.0)
        assert bound == pytest.approx(objective) and whole.cost(choices) == pytest.approx(objective)


def test_every_part_is_by_itself_and_the_largest_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = random_program(1, 5, "clique", "uniform", 0.0), random_program(2, 9, "clique", "uniform", 0.0)
    whole = beside(large, small)
    net = build_net(whole)
    parts = parts_of(net)
    assert [part.live for part in parts] == [list(range(9, 14)), list(range(9))]
    assert sum(len(part.factors) for part in parts) == len(net.factors)
    choices = np.zeros(14, np.int64)
    assert math.fsum(part.value(choices) for part in parts) == pytest.approx(whole.cost(choices))
    met: list[list[int]] = []
    monkeypatch.setattr(minimum, "Presolve", lambda net, **options: SimpleNamespace(run=lambda: net))
    one = minimum._least
    monkeypatch.setattr(minimum, "_least", lambda net, *rest: (met.append(net.live), one(net, *rest))[1])
    bound, found = least(build_net(whole), choices, math.inf, 0.0)
    assert [len(nodes) for nodes in met] == [5, 9]
    assert bound == pytest.approx(brute_force(small).objective + brute_force(large).objective)
    assert whole.cost(found) == pytest.approx(bound)


def test_without_time_the_known_assignment_stays_and_the_bound_holds() -> None:
    whole = beside(random_program(3, 6, "clique", "uniform", 0.0), random_program(4, 6, "clique", "uniform", 0.0))
    known = np.zeros(12, np.int64)
    bound, found = least(build_net(whole), known, -math.inf, 0.0)
    best = brute_force(whole).objective
    assert bound <= best * (1 + 1e-12) and whole.cost(found) <= whole.cost(known)

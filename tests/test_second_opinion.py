"""Another solver of OR-Tools, from another statement of the same program, finds the same optimum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.mathopt import SOLVERS, maximal_times, solve_mathopt
from autoshard_ilp.program.model import Lifetimes, Program, SolverOptions
from program_cases import random_program
from training_case import training_step

OPTIONS = SolverOptions(time_limit=120.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(solver: str, seed: int) -> None:
    program = random_program(seed, 5, ["clique", "random", "parallel"][seed % 3], "plain", 0.1, memory=True)
    for part in (1.0, 0.7, 0.3):
        peak = max((program.peak(np.zeros(len(program.nodes), int)), 50))
        tight = dataclasses.replace(program, capacity=int(part * peak))
        expected, found = brute_force(tight), solve_mathopt(tight, OPTIONS, solver)
        assert found.status == expected.status
        if expected.choices is not None:
            assert found.objective == pytest.approx(expected.objective, rel=1e-7)
            assert found.lower_bound <= expected.objective * (1 + 1e-7)
            assert found.peak_bytes <= int(part * peak)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_training_step(solver: str) -> None:
    program = training_step(1, mesh=(4,))
    free = solve(program, OPTIONS)
    tight = dataclasses.replace(program, capacity=int(0.8 * free.peak_bytes))
    ours, theirs = solve(tight, OPTIONS), solve_mathopt(tight, OPTIONS, solver)
    assert ours.status == theirs.status == "optimal"
    assert theirs.objective == pytest.approx(ours.objective, rel=1e-7)


def test_times_that_suffice() -> None:
    lifetimes = Lifetimes(np.zeros(3, bool), np.arange(3), np.array([0, 2, 5]), np.array([4, 6, 9]))
    program = Program(random_program(0, 3, "tree", "plain").nodes, (), lifetimes)
    assert maximal_times(program) == [3, 5]
    assert maximal_times(Program(program.nodes, ())) == []


def test_unknown_solver() -> None:
    with pytest.raises(InputShapeError, match="second solver"):
        solve_mathopt(Program((), ()), OPTIONS, "cplex")

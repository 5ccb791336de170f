"""Memory on the chip: the first instants of a program may hold V more bytes than its capacity C.

The solvers know one capacity for all instants. For them the later instants hold V more and the capacity is C + V
(:func:`shifted`); what they tell of peaks is V too much (:func:`told`). There is one later instant at least, and it
holds no fewer bytes than zero, so that peaks are the same but for V. :func:`chip_aside` does both around a solver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec

import numpy as np

from autoshard_ilp.program.model import Edge, Program, Solution

P = ParamSpec("P")
Solver = Callable[Concatenate[Program, P], Solution]


def chip_aside(solver: Solver[P]) -> Solver[P]:
    """The solver, for programs with memory on the chip too; it sees none itself."""

    @functools.wraps(solver)
    def solve(program: Program, *args: P.args, **kwargs: P.kwargs) -> Solution:
        if not program.on_chip_bytes:
            return solver(program, *args, **kwargs)
        return told(solver(shifted(program), *args, **kwargs), program)

    return solve


def shifted(program: Program) -> Program:
    """The same problem without memory on the chip; capacity and peaks are ``program.on_chip_bytes`` larger.

    Args:
        program: of two nodes at least.
    """
    size, lt = program.on_chip_bytes, program.lifetimes
    first, second = (np.zeros(len(node.costs), np.int64) for node in program.nodes[:2])
    edge = Edge(0, 1, first, second, np.zeros((1, 1)), np.array([[size]], np.int64))
    one = (np.array([x]) for x in (True, len(program.edges), program.on_chip_instants, int(lt.end.max())))
    lifetimes = lt.followed_by(*one)
    capacity = None if program.capacity is None else program.capacity + size
    edges = (*program.edges, edge)
    return replace(program, edges=edges, lifetimes=lifetimes, capacity=capacity, on_chip_bytes=0, on_chip_instants=0)


def told(solution: Solution, program: Program) -> Solution:
    """The answer to a shifted program as one to ``program``."""
    report = dict(solution.report)
    if "minimum_capacity_bound" in report:
        report["minimum_capacity_bound"] = max(0, report["minimum_capacity_bound"] - program.on_chip_bytes)
    peak = 0 if solution.choices is None else program.peak(solution.choices)
    return replace(solution, peak_bytes=peak, report=report)

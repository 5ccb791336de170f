"""The oracle of the tests: try every assignment of a tiny program."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.program.model import Program, Solution

MAX_ASSIGNMENTS = 2_000_000


def brute_force(program: Program) -> Solution:
    """Solve by enumeration (the first optimum in lexicographic order).

    Args:
        program: at most two million assignments.

    Returns:
        A solution with status "optimal" or "infeasible".

    Raises:
        InputShapeError: too many assignments.
    """
    began = time.monotonic()
    sizes = [len(n.costs) for n in program.nodes]
    if math.prod(sizes) > MAX_ASSIGNMENTS:
        raise InputShapeError(
            f"brute_force enumerates at most {MAX_ASSIGNMENTS} assignments. Received: {math.prod(sizes)}. Use solve()."
        )
    best, best_cost = None, math.inf
    for choices in itertools.product(*(range(n) for n in sizes)):
        cost = program.cost(choices)
        if cost < best_cost and (program.capacity is None or program.peak(choices) <= program.capacity):
            best, best_cost = choices, cost
    seconds = time.monotonic() - began
    if best is None:
        return Solution("infeasible", None, math.inf, math.inf, 0, seconds)
    array = np.array(best, np.int64)
    return Solution("optimal", array, best_cost, best_cost, program.peak(array), seconds)

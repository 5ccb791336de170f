"""Solving a program, memory on the chip included (:mod:`autoshard_ilp.program.onchip`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.onchip import shifted, told
from autoshard_ilp.program.solve import solve as solve_plain


def solve(
    program: Program,
    options: SolverOptions,
    *,
    hint: np.ndarray | None = None,
    rows_seconds: float | None = None,
    on_progress: Callable[[dict], None] | None = None,
) -> Solution:
    """Find the cheapest assignment within the memory capacity, with proof.

    Arguments, result and errors are those of :func:`autoshard_ilp.program.solve.solve`.
    """
    plain = shifted(program) if program.on_chip_bytes else program
    answer = solve_plain(plain, options, hint=hint, rows_seconds=rows_seconds, on_progress=on_progress)
    return told(answer, program) if program.on_chip_bytes else answer

"""Two decisions for the repeated layers where one is too coarse: where memory binds.

A decision that all layers share moves the memory of all of them at once, so a plan may have to leave gigabytes unused.
With one decision for the first half of the layers and one for the second, a mixture fits. It is a second, larger
program, which the answer of the first one starts; where memory does not bind, the first one's answer stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from autoshard_ilp.costs.fold import LEAST_HALVED

ROWS_SHARE = 0.05
"""Of the time limit: what the tied program may take for the search under memory rows, when halves come after it."""

QUICK_SECONDS, QUICK_FACTOR = 5.0, 5.0
"""Once the tied program is proved, the larger one has this long, or this many times as long as the proof took."""

GAIN = 1e-3
"""Relative gain from which a plan with two decisions is taken instead of a proved plan with one."""


class Priced(Protocol):
    """What is solved."""

    @property
    def table(self) -> Any:
        """A :class:`~autoshard_ilp.costs.table.CostTable`."""

    @property
    def program(self) -> Any:
        """The :class:`~autoshard_ilp.program.model.Program` built from it."""


P = TypeVar("P", bound=Priced)


def solve_halved(
    tied: P,
    solve: Callable[[P, np.ndarray | None, float, float | None], Any],
    halve: Callable[[], P],
    time_limit: float,
    clock: Callable[[], float] = time.monotonic,
    cutoff: float = math.inf,
) -> tuple[P, Any, tuple[str, ...]]:
    """Solves a program and, where memory binds, the one with two decisions per repeated layer.

    Args:
        tied: the program with one decision for all layers.
        solve: (problem, start, seconds, seconds under memory rows or None) -> solution.
        halve: makes the larger one; called at most once.
        time_limit: seconds for everything.
        clock: seconds that only grow.
        cutoff: objective, in seconds, that ``solve`` only wants a better plan for.

    Returns:
        The problem whose plan is taken (or that has none), its solution, and notes for the user.
    """
    from autoshard_ilp.program.search import WIDE_GAP  # of the tied program: the larger one is harder still

    began = clock()

    def left() -> float:
        return max(0.0, time_limit - (clock() - began))

    splittable = not tied.table.halved and any(len(c.members) >= LEAST_HALVED for c in tied.table.classes)
    if not splittable or tied.program.capacity is None:
        return tied, solve(tied, None, time_limit, None), ()
    first = solve(tied, None, time_limit, ROWS_SHARE * time_limit)
    if first.status == "infeasible" or first.report.get("interrupted") or first.lower_bound >= cutoff:
        return tied, first, ()
    if first.choices is None:  # more time for any plan at all
        return tied, solve(tied, None, left(), None) if left() > 0 else first, ()
    if not first.report.get("rows") or left() <= 0:
        return tied, first, ()
    proved = first.status == "optimal"
    if not proved and first.gap > WIDE_GAP:
        return tied, solve(tied, first.choices, left(), None), ()
    seconds = max(QUICK_SECONDS, QUICK_FACTOR * (clock() - began)) if proved else math.inf
    fine = halve()
    start = start_of(tied.table, fine.table, first.choices)
    second = solve(fine, start, min(seconds, left()), None)
    if second.choices is not None and second.objective < first.objective * (1 - GAIN * proved):
        gain = 1 - second.objective / first.objective
        note = f"Memory binds: each half of the repeated layers decides for itself, which saves {gain:.2%} of the step."
        return fine, second, (note,)
    could = max(0.0, 1 - second.lower_bound / first.objective)
    note = f"Memory binds: deciding each half of the repeated layers by itself could save at most {could:.2%}."
    if second.report.get("interrupted"):
        first.report["interrupted"] = True
    return tied, first, (note,)


def start_of(tied: Any, fine: Any, choices: np.ndarray) -> np.ndarray:
    """Choices for the classes of the table ``fine`` that mean the same as ``choices`` for those of ``tied``."""
    return np.array([choices[tied.class_of[c.members[0]]] for c in fine.classes], np.int64)


def within(options: Any, seconds: float) -> Any:
    """Solver options with less time."""
    return replace(options, time_limit=min(options.time_limit, seconds))

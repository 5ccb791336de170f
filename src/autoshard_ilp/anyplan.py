"""Some plan that fits, where the time limit ended before any was found.

The search for the smallest budget looks for nothing else than plans that hold little, and soon finds one where a budget
leaves few others. From that plan on the solver looks for cheaper ones for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.attempt import Failure
from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.halving import cheapest, within
from autoshard_ilp.infeasible import infeasible
from autoshard_ilp.plan import Plan
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request

LEAST_PART = 0.2
"""Of the time limit, beyond it where less is left: what the plan that holds least may take, of every open policy ..."""

BETTER_PART = 0.2
"""... and what cheaper ones may take after that."""

NOTE = "No plan was found within the time limit; this one was looked for by its memory first. More time may save much."


def any_plan(
    failures: Sequence[Failure],
    request: Request,
    progress: Progress,
    make: Callable[[Any, Any], Plan],
    left: float = 0.0,
) -> tuple[Plan, list[Failure]]:
    """Some plan that fits, and the failures that stay failures.

    Args:
        failures: of the policies tried, in the order in which they hold less and less.
        request: with the budget and the time limit.
        progress: told about the solver's stages.
        make: the plan of a failure for which there is a solution after all, and of that solution.
        left: seconds of the time limit that are left for it.

    Raises:
        InfeasibleError: nothing fits, or nothing was found.
    """
    smallest = list[int]()
    for failure in reversed([f for f in failures if f.solution.status != "infeasible" and f.built is not None]):
        began = time.monotonic()
        solution, peak = _solution(failure, request, progress, left)
        left -= time.monotonic() - began
        if solution is not None:
            plan = make(failure, solution)
            return replace(plan, notes=(*plan.notes, NOTE)), [f for f in failures if f is not failure]
        smallest += [] if peak is None else [peak]
    raise infeasible(failures, request, min(smallest, default=None))


def _solution(failure: Failure, request: Request, progress: Progress, left: float) -> tuple[Any | None, int | None]:
    """Of the program that was left without a plan, None where none is found that fits; and bytes that a plan needs."""
    from autoshard_ilp.program import minimum_capacity, solve

    program, limit = failure.built.program, request.solver.time_limit
    if program.capacity is None:
        return None, None
    try:
        least = within(request.solver, max(left, LEAST_PART * limit))
        _, peak, choices = minimum_capacity(program, least, enough=program.capacity)
    except InfeasibleError:
        return None, None
    if peak > program.capacity:
        return None, peak
    with progress.stage("solve"):
        options = within(request.solver, BETTER_PART * limit)
        found = solve(program, options, hint=choices, relaxed=cheapest(program), on_progress=progress.tell)
    known = [b for b in (failure.solution.lower_bound, found.lower_bound) if math.isfinite(b)]
    return replace(found, lower_bound=min(found.objective, max(known, default=-math.inf))), peak

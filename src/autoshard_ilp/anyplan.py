"""Some plan that fits, where the time limit ended before any was found.

The search for the smallest budget looks for nothing else than plans that hold little, and soon finds one where a budget
leaves few others. From that plan on the solver looks for cheaper ones for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.attempt import Failure
from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.halving import within
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request

LEAST_PART = 0.2
"""Of the time limit, beyond it: what the plan that holds least may take, of every policy that is open .."""

BETTER_PART = 0.2
""".. and what cheaper ones may take after that."""

NOTE = "No plan was found within the time limit; this one was looked for by its memory first. More time may save much."


def any_plan(failures: Sequence[Failure], request: Request, progress: Progress) -> tuple[Failure, Any] | None:
    """The failure for which a plan fits after all, and its solution; None where none is found, or all are proved.

    Args:
        failures: of the policies tried, in the order in which they hold less and less.
        request: with the budget and the time limit.
        progress: told about the solver's stages.
    """
    from autoshard_ilp.program import minimum_capacity, solve

    if request.capacity is None:
        return None
    limit = request.solver.time_limit
    for failure in reversed([f for f in failures if f.solution.status != "infeasible" and f.built is not None]):
        program = replace(failure.built.program, capacity=request.capacity)
        try:
            least = within(request.solver, LEAST_PART * limit)
            _, peak, choices = minimum_capacity(program, least, enough=request.capacity)
        except InfeasibleError:
            continue
        if peak > request.capacity:
            continue
        with progress.stage("solve"):
            options = within(request.solver, BETTER_PART * limit)
            found = solve(program, options, hint=choices, on_progress=progress.tell)
        known = [b for b in (failure.solution.lower_bound, found.lower_bound) if math.isfinite(b)]
        return failure, replace(found, lower_bound=min(found.objective, max(known, default=-math.inf)))
    return None

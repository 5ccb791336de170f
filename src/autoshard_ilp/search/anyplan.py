"""Some plan that fits, where the time limit ended before any was found.

What people do by hand is known to be no bad plan, and leaves so little to decide that it is soon found: weights and
slots over all mesh axes, the batch too (a U-Net on 8 H100s in 15 s: 15 ms a step, of 84 for the plan that holds least).
Where that does not fit, the search for the smallest budget looks for nothing else than plans that hold little, and soon
finds one where a budget leaves few others. From that plan on the solver looks for cheaper ones for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.pins import class_masks, masked, path_shapes
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request
from autoshard_ilp.search.attempt import Failure
from autoshard_ilp.search.halving import cheapest, within
from autoshard_ilp.search.infeasible import infeasible
from autoshard_ilp.search.recipes import fsdp

HAND_PART = 0.2
"""Of the time limit, beyond it where less is left: what plans by hand may take, of all open policies together, ..."""

LEAST_PART = 0.2
"""... what the plan that holds least may take after that, of every open policy ..."""

BETTER_PART = 0.2
"""... and what cheaper ones may take after that."""

NOTE = "No plan was found within the time limit; this one was looked for by {} first. More time may save much."


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
    opened = [f for f in failures if f.solution.status != "infeasible" and f.built is not None]
    began = clock()

    def found(failure: Failure, choices: Any, by: str) -> tuple[Plan, list[Failure]]:
        plan = make(failure, _improved(failure, request, progress, choices))
        return replace(plan, notes=(*plan.notes, NOTE.format(by))), [f for f in failures if f is not failure]

    for failure in opened:
        choices = _by_hand(failure, request, progress, HAND_PART * request.solver.time_limit / len(opened))
        if choices is not None:
            return found(failure, choices, "dividing all weights among all devices")
    for failure in reversed(opened):
        choices, peak = _holding_least(failure, request, left - (clock() - began))
        if choices is not None:
            return found(failure, choices, "its memory")
        smallest += [] if peak is None else [peak]
    raise infeasible(failures, request, min(smallest, default=None))


def _by_hand(failure: Failure, request: Request, progress: Progress, seconds: float) -> Any | None:
    """Strategies of a plan with weights, slots and the batch over all mesh axes; None where none is found that fits."""
    from autoshard_ilp.program import solve

    if failure.step.traced is None:
        return None  # a plain function tells neither
    program = failure.built.program
    own = fsdp(failure.infos, request.mesh).of_paths(path_shapes(failure.step.graph))
    pinned = failure.pinned.allowed
    masks = class_masks(failure.table, {**own, **pinned})
    if masks is None:  # pins tell arrays apart that decide together
        return None
    restricted = masked(program, masks)
    if not all(np.isfinite(node.costs).any() for node in restricted.nodes):
        return None
    with progress.stage("solve"):
        return solve(restricted, within(request.solver, seconds), on_progress=progress.tell).choices


def _holding_least(failure: Failure, request: Request, left: float) -> tuple[Any | None, int | None]:
    """Strategies of a plan that fits, None where none is found; and bytes that a plan needs."""
    from autoshard_ilp.program import minimum_capacity

    program = failure.built.program
    if program.capacity is None:
        return None, None
    try:
        least = within(request.solver, max(left, LEAST_PART * request.solver.time_limit))
        _, peak, choices = minimum_capacity(program, least, enough=program.capacity)
    except InfeasibleError:
        return None, None
    return (None if peak > program.capacity else choices), peak


def _improved(failure: Failure, request: Request, progress: Progress, choices: Any) -> Any:
    """The solution that the solver makes of these strategies in a while."""
    from autoshard_ilp.program import solve

    program = failure.built.program
    with progress.stage("solve"):
        options = within(request.solver, BETTER_PART * request.solver.time_limit)
        found = solve(program, options, hint=choices, relaxed=cheapest(program), on_progress=progress.tell)
    known = [b for b in (failure.solution.lower_bound, found.lower_bound) if math.isfinite(b)]
    return replace(found, lower_bound=min(found.objective, max(known, default=-math.inf)))

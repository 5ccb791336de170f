"""Why nothing fits: the smallest budget, what fills it, and the pins in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.request import Request
from autoshard_ilp.search.attempt import Failure, build, price, read
from autoshard_ilp.search.axes import joined_names
from autoshard_ilp.units import format_bytes

FIRST_PART = 0.8
"""Of the time left, what the smallest budget of a policy may take where others follow."""


def infeasible(failures: Sequence[Failure], request: Request, found: int | None = None) -> InfeasibleError:
    """The error of a step that fits under no rematerialisation policy; the smallest budget is that of the best one.

    ``found`` are bytes that some plan needs, where it is not proved that nothing fits.
    """
    from autoshard_ilp.report import alike, peak_memory

    pins = list(dict.fromkeys(text for texts in failures[0].pinned.sources.values() for text in texts))
    if any(f.solution.status != "infeasible" for f in failures):
        known = "" if found is None else f" The smallest budget found that fits is {format_bytes(found)}."
        return InfeasibleError(
            f"No plan was found within the time limit of {request.solver.time_limit:g} s. Received: a budget of "
            f"{format_bytes(request.capacity)}.{known} Raise SolverOptions(time_limit=...) or the budget.",
            minimum_budget=found,
            minimum_budget_bound=None if found is None else 0,
            conflicts=pins,
        )
    try:
        built, lower, upper, choices, joined = _smallest_budget(failures, request)
    except InfeasibleError:
        return InfeasibleError(
            f"The pins must leave a layout for every tensor at some budget. Received: {', '.join(pins)}, which leave "
            "none. Drop or widen one of them.",
            conflicts=pins,
        )
    memory = peak_memory(built, choices, request.capacity)
    largest = "; ".join(f"{label} {format_bytes(size)}" for label, size in alike(memory.contributors)[:5])
    smallest = "smallest budget that fits" if lower == upper else "smallest budget found that fits"
    proved = f" (proved: not below {format_bytes(lower)})" if 0 < lower < upper else ""
    pins = _pins_at_fault(failures, request, pins)
    named = f" It fits without the pins {', '.join(pins)}." if pins else ""
    return InfeasibleError(
        f"No plan fits the memory budget. Received: {format_bytes(request.capacity)} per device on a mesh of "
        f"{request.mesh}. The {smallest} is {format_bytes(upper)}, exactly {upper} bytes{proved}; at its peak: "
        f"{largest}.{named}{joined} Raise memory_budget, use more devices, or a smaller batch.",
        minimum_budget=upper,
        minimum_budget_bound=lower,
        contributors=memory.contributors,
        conflicts=pins,
    )


def _smallest_budget(failures: Sequence[Failure], request: Request) -> tuple[Any, int, int, Any, str]:
    """The program that fits the least budget, a proved bound of that budget, the budget (bytes), its choices, and what
    is not known where mesh axes go together.

    All policies share the time of one. The last one tried, which recomputes the most, comes first; another is left as
    soon as it is known to need as much as one before it.

    Raises:
        InfeasibleError: there is no plan at any budget.
    """
    from autoshard_ilp.program import minimum_capacity
    from autoshard_ilp.program.infeasible import SECONDS

    likely = failures[::-1]
    deadline = clock() + min(SECONDS, request.solver.time_limit)
    found, joined = list[tuple[Any, int, int, Any]](), ""
    for failure in likely:
        left = max(0.0, deadline - clock())
        seconds = left if failure is likely[-1] else FIRST_PART * left
        beyond = min((upper for _, _, upper, _ in found), default=None)
        if beyond is not None and failure.least_bytes >= beyond:
            continue
        answer = minimum_capacity(failure.built.program, request.solver, beyond=beyond, seconds=seconds)
        if failure.table.together:
            answer = (failure.least_bytes, *answer[1:])  # plans whose mesh axes do not go together may need less
            names = joined_names(failure.table)
            joined = f" In it the mesh axes {names} split the same dimensions; no other plans were looked at."
        found.append((failure.built, *answer))
    built, _, upper, choices = min(found, key=lambda item: item[2])
    lower = min(lower for _, lower, _, _ in found)
    if not joined:
        lower = max(lower, request.capacity + 1)  # nothing fits the budget itself
    return built, min(upper, lower), upper, choices, joined


def _pins_at_fault(failures: Sequence[Failure], request: Request, pins: list[str]) -> list[str]:
    """The pins, when the budget would do without them; none, when it is too small all the same."""
    from autoshard_ilp.program import minimum_capacity

    free = replace(request, pins=None)
    for failure in failures if pins else ():
        table = price(*read(failure.step.graph, free), free)
        program = build(failure.step, failure.infos, table, free).program
        _, upper, _ = minimum_capacity(program, request.solver, enough=request.capacity)
        if upper <= request.capacity:
            return pins
    return []

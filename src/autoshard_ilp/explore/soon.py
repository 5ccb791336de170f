"""An answer in about two seconds, where a plan's own search under a budget that binds has shown enough for it.

That search has left three things that hold under other budgets and pins as well:

- prices per byte, with what they prove of *all* plans: under another budget each byte is worth its price;
- the program with one decision for all repeated layers, and plans of it that cost next to nothing more at these prices;
- the plan itself, and the table that its layers are divided in.

What can be put together from these plans (:mod:`.search.between`) is a plan, and the prices say how far it is
from the best one at most. Where that is little, it is an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard_ilp.explore.again import (
    Known,
    Problem,
    adapted,
    best_known,
    narrower,
    plan_of,
    problem_of,
    reprice,
    solved,
)
from autoshard_ilp.garbage import collector_paused
from autoshard_ilp.pins import class_masks, masked
from autoshard_ilp.plan import Plan
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.between import best_between
from autoshard_ilp.search.division import division_of
from autoshard_ilp.search.halving import FEW_PLANS, Tied, start_of
from autoshard_ilp.search.untied import PricedBound, percent

ENOUGH = 0.01
"""Relative gap of a plan that is an answer."""

NEAR = 0.1
"""Relative distance of a budget within which as many blocks recompute."""

SECONDS = 2.0
"""What looking for one plan may take."""


@collector_paused()
def soon(plan: Plan, request: Any, progress: Progress, others_fit: Callable[[], bool]) -> Plan | None:
    """The answer; None where what is known does not do.

    Args:
        plan: whose search has been; the step, its mesh, hardware and objective are those of the question.
        request: other pins, or another budget.
        progress: shows the stages.
        others_fit: whether policies that did not fit before may do so now.
    """
    trail = plan.trail
    assert trail is not None
    known: PricedBound | None = trail.solution.report.get("priced_bound")
    if known is None or abs(request.capacity / known.capacity - 1) > NEAR:
        return None
    own, began = problem_of(plan), time.monotonic()
    problem = adapted(own, request, progress)
    if problem.table is not own.table or not narrower(problem.allowed, own.allowed) or others_fit():
        return None  # of plans that were not allowed before, nothing is known
    bound = known.under(request.capacity)
    for chance, plans in _chances(problem, trail.solution, progress):
        best, stopped = put_together(chance, plans, bound.prices, progress)
        if best is not None:
            cost = chance.program.cost(best)
            if stopped or cost - bound.seconds <= ENOUGH * abs(cost):
                return _answer(plan, chance, best, bound, progress, time.monotonic() - began)
    return None


def put_together(
    problem: Problem, plans: Sequence[np.ndarray], prices: Mapping[int, float], progress: Progress
) -> tuple[np.ndarray | None, bool]:
    """The best plan of a problem that is much like some others, and whether an interrupt has ended the search for it.

    Args:
        plans: assignments, the first of which holds most.
        prices: time -> seconds per byte in use then.

    Returns:
        None where no such plan fits.

    Raises:
        KeyboardInterrupt: and there is no plan to keep.
    """
    program = problem.program

    def solve(part: Any, start: np.ndarray | None, seconds: float, **keywords: Any) -> Any:
        return solved(problem.asked(part), progress, Known(() if start is None else (start,)), seconds, **keywords)

    best, stopped = best_between(program, plans, solve, best_known(program, plans), SECONDS, prices)
    if best is not None and program.peak(best) > program.capacity:
        best = None
    if stopped and best is None:
        raise KeyboardInterrupt
    return best, stopped


def _chances(problem: Problem, solution: Any, progress: Progress) -> Iterator[tuple[Problem, list[np.ndarray]]]:
    """Problems that a plan may be found for, and plans of each, the first of which holds most."""
    tied: Tied | None = solution.report.get("tied")
    relaxed: np.ndarray | None = solution.report.get("relaxed")
    if tied is None or relaxed is None:
        return
    one = of_tied(problem, tied)
    if one is None or one.program.peak(tied.relaxed) <= one.program.capacity:
        return  # the budget does not bind
    table = problem.table
    mixed = tied.mixed.under(problem.request.capacity)
    met = [start_of(one.table, table, plan) for plan in mixed.nearest(FEW_PLANS)]
    yield problem, [relaxed, solution.choices, *met]
    if not problem.as_priced:
        return  # a table priced under other pins has other strategies
    shown = solved(one, progress, Known(), SECONDS, mixing=tied.mixed, relaxed=tied.relaxed)
    division = division_of(one.table, shown.report.get("mixture", ()))
    if division is None:
        return
    share, facts = division.first_share, table.facts
    fine = reprice(problem.step, problem.infos, problem.request, progress, share, facts)
    plans = [tied.relaxed, *shown.report["mixed"].nearest(FEW_PLANS)]
    starts = [start_of(one.table, fine.table, plan) for plan in plans]
    yield fine, [*starts, division.start(one.table, fine.table), start_of(table, fine.table, solution.choices)]


def of_tied(problem: Problem, tied: Tied) -> Problem | None:
    """The problem with one decision for all repeated layers; None where pins treat some of them differently.

    ``tied`` is of the same step under pins that allow no less.
    """
    own, masks = tied.problem, class_masks(tied.problem.table, problem.allowed)
    if masks is None:
        return None
    program = replace(masked(own.program, masks), capacity=problem.request.capacity)
    return replace(problem, table=own.table, built=own.built, program=program)


def _answer(
    plan: Plan, problem: Problem, choices: np.ndarray, known: PricedBound, progress: Progress, seconds: float
) -> Plan:
    from autoshard_ilp.program.model import Solution

    trail, program = plan.trail, problem.program
    assert trail is not None
    cost = program.cost(choices)
    bound = min(known.seconds, cost)
    kept = ("tied", "relaxed", "prices", "priced_bound", "without_memory", "free_seconds")
    report: Mapping[str, Any] = {k: v for k, v in trail.solution.report.items() if k in kept}
    report = {**report, "rows": len(known.prices)}
    if problem.table is not trail.costs:
        report["relaxed"] = start_of(trail.costs, problem.table, trail.solution.report["relaxed"])
    solution = Solution("feasible", choices, cost, bound, program.peak(choices), seconds, report)
    made = plan_of(problem, solution, progress, plan)
    note = (
        "Answered at once from what the plan's own search has shown: a plan that recomputes as many blocks may be "
        f"faster, by {percent(made.gap)} of the step at most. With solver=SolverOptions(...), the search goes on."
    )
    return replace(made, notes=(note, *made.notes))

"""Whether one decision for all repeated layers costs anything: the plan against the step without ties.

Tied layers make a small program, and its optimum is a plan. That no plan is faster in which every layer decides for
itself is another matter. It is proved here, or such a plan is found; else the bound says how much faster it might be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.garbage import collector_paused
from autoshard_ilp.plan import Plan, Trail
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.attempt import assemble, build, shared, tied_note
from autoshard_ilp.search.early import EarlyProofs
from autoshard_ilp.search.halving import within
from autoshard_ilp.search.rematsearch import hardly_dear

LEAST_SECONDS = 1.0
"""In less time nothing is shown ..."""

TIMES = 2.0
"""... nor in less than so many times what pricing the step took."""

CLOSE = 1e-4
"""Relative gap that memory's prices may leave, where the step without ties is small enough to be solved ..."""

NODES = 6000
"""... which is, of so many operations at most ..."""

PART = 0.5
"""... in this part of the time left."""

SAME = 1e-9
"""Relative: a plan that is faster by less is as fast."""

OF_TIES = ("tied", "priced_bound", "free_bound")
"""What is reported of a program whose layers share decisions, and does not hold for another."""


@dataclass(frozen=True)
class PricedBound:
    """What prices prove of all plans of a step, tied or not.

    Attributes:
        prices: time -> seconds per byte in use then.
        seconds: lower bound under ``capacity``.
        capacity: bytes.
    """

    prices: Mapping[int, float]
    seconds: float
    capacity: int

    def under(self, capacity: int) -> PricedBound:
        """The same under another capacity: each byte is worth its price (Lagrangian relaxation)."""
        more = capacity - self.capacity
        return PricedBound(self.prices, self.seconds - more * sum(self.prices.values()), capacity)


def without_ties(plan: Plan, progress: Progress, seconds: float, early: EarlyProofs | None = None) -> Plan:
    """The plan with the bound of the step whose repeated layers decide for themselves, or a faster plan of that step.

    The plan's status stays what it is, that of the program with shared decisions; bound and gap are those of all plans.

    Args:
        plan: with its trail. Where nothing is tied, or the tied plan is not proved and clearly slower than without a
            budget, or no time or memory is left, it is returned as it is; so it is after an interrupt.
        progress: shows the stage.
        seconds: that the solver may take.
        early: proofs that were begun before the plan was there.
    """
    try:
        return _shown(plan, progress, seconds, early)
    except (KeyboardInterrupt, MemoryError):  # the plan is there, and says what is proved of it
        return plan


def _shown(plan: Plan, progress: Progress, seconds: float, early: EarlyProofs | None) -> Plan:
    from autoshard_ilp.costs.apart import apart, parted
    from autoshard_ilp.program.repeated.whole import CELLS, solve_repeated

    trail = plan.trail
    if trail is None or not trail.costs.tied or not (trail.solution.status == "optimal" or hardly_dear(plan)):
        return plan  # a plan that is not proved among fewer plans has a bound that says more than this one would
    if "free_bound" in trail.solution.report:
        return _told(plan, trail.costs)  # that bound is of all plans, and its own
    pricing = plan.timings.get("strategies", 0.0) + plan.timings.get("costs", 0.0)
    if seconds < max(LEAST_SECONDS, TIMES * pricing):
        return plan
    began, start = time.monotonic(), clock()
    solution, binds = trail.solution, bool(trail.solution.report.get("rows"))
    with progress.stage("proof"), collector_paused():
        built = replace(trail.built, program=trail.program)
        open_ = solution.status != "optimal"  # then the bound without memory is the better one
        prices = dict(solution.report.get("prices") or {}) if binds and not open_ else {}
        begun = None if early is None else early.of(trail.costs, prices)
        if begun is None:
            step, chain = apart(trail.costs, built, plan.objective, prices), None
        else:
            step, prices = begun.step, dict(begun.prices)
            chain = begun.job.answer(seconds - (clock() - start))
        known = solution.choices[trail.costs.class_of[step.op_ids]]
        options = within(trail.request.solver, seconds - (clock() - start))
        most_cells = 0 if binds or open_ else CELLS  # prices give a bound, no plan
        more: dict[str, Any] = {"most_cells": most_cells, "chain": chain, "on_progress": progress.tell}
        found: Any = solve_repeated(step.program, step.alike, known, options, **more)
        if found.report.get("interrupted") or not {"chain", "descent"} & set(found.report):
            return plan  # nothing is known but what was known before
        bound = min(found.lower_bound + step.offset, solution.objective if open_ else plan.lower_bound)
        if open_:
            timings = {**plan.timings, "proof": time.monotonic() - began}
            better = bound > plan.lower_bound
            return _told(replace(plan, lower_bound=bound, timings=timings), trail.costs) if better else plan
        if binds:
            solution.report["priced_bound"] = PricedBound(prices, bound, trail.request.capacity)
        open_gap = solution.objective - bound > CLOSE * solution.objective
        if binds and open_gap and len(step.op_ids) <= NODES:
            if begun is not None and begun.table is not trail.costs:
                # Of its own table, or equal costs would be told apart otherwise.
                step = apart(trail.costs, built, plan.objective, prices)
                known = solution.choices[step.classes]
            left = PART * (seconds - (clock() - start))
            found = _with_memory(plan, step, known, bound, left, progress)
            bound = max(bound, min(found.lower_bound, plan.lower_bound))
        elif binds:
            found = None  # its choices are those of prices
        if found is not None and found.choices is not None and found.objective < (1 - SAME) * solution.objective:
            table, choices = parted(trail.costs, step, found.choices)
            faster = _faster(plan, table, choices, found, progress)
            if faster is not None:
                return replace(faster, timings={**faster.timings, "proof": time.monotonic() - began})
    timings = {**plan.timings, "proof": time.monotonic() - began}
    return _told(replace(plan, lower_bound=bound, timings=timings), trail.costs)


def _with_memory(plan: Plan, step: Any, known: Any, bound: float, seconds: float, progress: Progress) -> Any:
    """The step without ties, solved under its memory budget: its solution, a strategy per operation."""
    from autoshard_ilp.costs.apart import parted
    from autoshard_ilp.program import solve

    trail = plan.trail
    assert trail is not None
    table, numbers = parted(trail.costs, step, np.arange(len(known)))  # every operation chooses differently
    built = build(plan.executable, trail.infos, table, trail.request)  # type: ignore[arg-type]
    program, options = _as_allowed(built.program, table, trail), within(trail.request.solver, seconds)
    found = solve(program, options, hint=known[numbers], proved=bound, on_progress=progress.tell)
    if found.choices is None:
        return found
    choices = np.empty(len(known), np.int64)
    choices[numbers] = found.choices
    return replace(found, choices=choices)


def _as_allowed(program: Any, table: Any, trail: Trail) -> Any:
    """The program of a parted table with what the plan's own program forbids."""
    nodes = []
    for node, cls in zip(program.nodes, table.classes, strict=True):
        tied = trail.program.nodes[int(trail.costs.class_of[cls.members[0]])]
        nodes.append(replace(node, costs=np.where(np.isinf(tied.costs), np.inf, node.costs)))
    return replace(program, nodes=tuple(nodes))


def _faster(plan: Plan, table: Any, choices: Any, found: Any, progress: Progress) -> Plan | None:
    """The plan of the step without ties; None where it does not fit."""
    from autoshard_ilp.program.model import Solution

    trail = plan.trail
    assert trail is not None and plan.executable is not None
    request = trail.request
    built = build(plan.executable, trail.infos, table, request)
    peak, objective = built.program.peak(choices), built.program.cost(choices)
    if request.capacity is not None and peak > request.capacity:
        return None
    bound = min(found.lower_bound, objective)
    report = {k: v for k, v in trail.solution.report.items() if k not in OF_TIES}
    solution = Solution(found.status, choices, objective, bound, peak, found.seconds, report)
    what = (table, built, solution, plan.mode, plan.batch_size, dict(plan.origin))
    made = assemble(plan.executable, trail.infos, request, progress, *what)
    gained = 1.0 - objective / trail.solution.objective
    note = f"Repeated layers decide for themselves where that is faster: by {percent(gained)} of the step."
    own = tuple(n for n in plan.notes if n not in made.notes and n != tied_note(trail.costs))
    kept = tuple(n for n in made.notes if n != tied_note(table))
    kind = {"priced": trail.priced, "policies": trail.policies, "failures": trail.failures}
    history = replace(made.trail, program=_as_allowed(built.program, table, trail), **kind)  # type: ignore[type-var]
    return replace(made, notes=(note, *kept, *own), timings={**plan.timings, **made.timings}, trail=history)


def _told(plan: Plan, table: Any) -> Plan:
    """Gap and notes that agree with the bound."""
    assert plan.trail is not None
    total = plan.trail.solution.objective
    gap = max(0.0, (total - plan.lower_bound) / total) if total > 0 else 0.0
    proved = gap <= SAME
    what = "no plan is faster" if proved else f"a plan may be faster, by {percent(gap)} of the step at most"
    note = f"Repeated layers {shared(table)}; were each to decide for itself, {what}."
    notes = tuple(note if n == tied_note(table) else n for n in plan.notes)
    return replace(plan, gap=0.0 if proved else gap, notes=notes)


def percent(share: float) -> str:
    """A share as text, however small."""
    return f"{100 * share:.2g}%"

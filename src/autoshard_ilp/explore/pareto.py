"""``autoshard.pareto``: the least step time against the memory budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard_ilp.arguments import integer, number
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.frontier import INTERRUPTED, SAME, Frontier, Policy, Probe
from autoshard_ilp.explore.source import Source
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.units import format_bytes, parse_bytes


@dataclass(frozen=True, eq=False)
class Point:
    """One step of the frontier.

    Attributes:
        budget_bytes: the smallest budget per device that this plan fits (its peak); with explicit budgets, the budget.
        up_to_bytes: it stays the best plan up to this budget; None: for every larger one.
        total_s, compute_s, communication_s, lower_bound_s: seconds per step.
        status: "optimal", "feasible", "infeasible" (explicit budgets only) or "unknown" (no plan in time).
        peak_bytes: per device.
        remat: rematerialisation policy.
        minimum_bytes: of an infeasible budget, the smallest budget that has a plan.
    """

    budget_bytes: int
    up_to_bytes: int | None
    total_s: float
    compute_s: float
    communication_s: float
    lower_bound_s: float
    status: str
    peak_bytes: int
    remat: str
    minimum_bytes: int | None = None
    probe: Probe | None = field(default=None, repr=False)
    source: Source | None = field(default=None, repr=False)

    @property
    def gap(self) -> float:
        """(total - bound) / total."""
        if self.status == "optimal" or not math.isfinite(self.total_s) or self.total_s <= 0:
            return 0.0
        return max(0.0, (self.total_s - self.lower_bound_s) / self.total_s)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of this point; None where there is none."""
        from autoshard_ilp.explore.again import plan_of

        if self.probe is None or self.source is None:
            return None
        problem = self.probe.problem
        request = replace(problem.request, capacity=self.probe.budget or self.peak_bytes)
        problem = replace(problem, request=request, program=replace(problem.program, capacity=request.capacity))
        solution = replace(
            self.probe.solution,
            status="optimal" if self.probe.proved else "feasible",
            lower_bound=self.probe.lower_bound,
        )
        return plan_of(problem, solution, Progress(False), self.source)


@dataclass(frozen=True, eq=False)
class Pareto:
    """Step time against memory budget.

    Attributes:
        points: the smallest budget first.
        complete: every breakpoint was found and every point proved (always False for explicit budgets).
        status: why not, where not.
        minimum_bytes: smallest budget that has a plan; ``minimum_bound_bytes`` is proved: none fits below it.
        hardware, mesh: of the plans; ``usable_bytes``: what the hardware has.
        interrupted: Ctrl-C came before it was done.
    """

    points: tuple[Point, ...]
    complete: bool
    status: str
    minimum_bytes: int | None
    minimum_bound_bytes: int | None
    hardware: str
    mesh: str
    usable_bytes: int
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Any:
        return iter(self.points)

    def rows(self) -> list[dict[str, Any]]:
        """One record per point; times in seconds, sizes in bytes per device."""
        names = ("budget_bytes", "up_to_bytes", "total_s", "compute_s", "communication_s", "lower_bound_s")
        more = ("gap", "status", "peak_bytes", "remat", "minimum_bytes")
        return [{name: getattr(p, name) for name in (*names, *more)} for p in self.points]

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        return show.dataframe(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{k: show.finite(v) if isinstance(v, float) else v for k, v in r.items()} for r in self.rows()]
        names = ("complete", "status", "minimum_bytes", "minimum_bound_bytes", "hardware", "mesh", "usable_bytes")
        return {**{n: getattr(self, n) for n in (*names, "interrupted")}, "points": rows}

    def plot(self, ax: Any = None) -> Any:
        """Step time against memory budget as a ``matplotlib`` figure; ``ax`` to draw into one."""
        from autoshard_ilp.explore.figures import pareto_figure

        return pareto_figure(self, ax)

    def text(self, width: int | None = None, *, only_ascii: bool = False) -> str:
        """The frontier as a table."""
        from autoshard_ilp.display.render import distinct_sizes, rendered, room, size, table

        lines = []
        budgets = distinct_sizes([p.budget_bytes for p in self.points]) if self.points else []
        for p, budget in zip(self.points, budgets, strict=True):
            if not math.isfinite(p.total_s):
                needs = f"needs {size(p.minimum_bytes)}" if p.minimum_bytes else ""
                lines.append([budget, p.status, "", "", needs, ""])
                continue
            sure = "proved" if p.status == "optimal" else f"gap {p.gap:.2%}"
            times = [show.seconds(p.total_s), show.seconds(p.compute_s), show.seconds(p.communication_s)]
            lines.append([budget, *times, p.remat, sure])
        columns = ["budget", "step", "compute", "communication", "recompute", "proof"]
        if lines and room(width or 100, columns, lines) < max(len(x[0]) for x in lines):
            columns, lines = [*columns[:2], columns[5]], [[*x[:2], x[5] or x[4]] for x in lines]
        least = ""
        if self.minimum_bytes:
            sure = "proved" if self.minimum_bytes == self.minimum_bound_bytes else "the smallest found"
            least = f"smallest budget: {format_bytes(self.minimum_bytes)} ({sure})"
        head = f"{self.mesh} of {self.hardware}, {format_bytes(self.usable_bytes)} usable per device"
        made = table("Step time against memory budget per device", columns, lines)
        return rendered([x for x in (head, made, least, self.status) if x], width or 100, only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(110))


def pareto(
    model: Any,
    mesh: Any = None,
    *,
    budgets: Sequence[str | int] | None = None,
    max_points: int = 40,
    time_limit: float | None = None,
    hardware: Any = None,
    batch_size: int | None = None,
    inputs: Any = None,
    targets: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    mode: str | None = None,
    pins: Mapping[str, Any] | None = None,
    objective: str | None = None,
    solver: Any = None,
    remat: str | None = None,
    progress: Any = None,
) -> Pareto:
    """Step time against memory budget: every breakpoint, each point a proved plan.

    Without ``budgets`` the search starts at the fastest plan of all and goes down to the smallest budget that has a
    plan at all. ``Pareto.complete`` says whether every breakpoint in between was found and proved; where it is not,
    ``Pareto.status`` says why.

    Args:
        model: as for :func:`autoshard_ilp.optimize`; or a plan, whose model, batch and mode are then used, and whose
            mesh, hardware, pins, objective, solver and policies where none are given.
        mesh: as for ``optimize``; None with a plan: the plan's own.
        budgets: sizes per device, such as "16GB"; the best plan within each. None: find the breakpoints.
        max_points: most plans looked for.
        time_limit: seconds for everything after the trace; None: no limit besides that of the solver per plan.
        hardware, batch_size, inputs, targets, sample_weight, sequence_length, mode, pins, objective, solver, progress:
            as for ``optimize``; what describes the batch is not taken with a plan.
        remat: as for ``optimize``, but "auto" takes the best of the policies at every budget: no recomputation, all
            blocks, and where there are many blocks a quarter, half and three quarters of them.

    Raises:
        InputShapeError, UnsupportedModelError, ProfileError: as ``optimize``.
        InfeasibleError: the pins leave no plan at any budget.
    """
    if isinstance(budgets, str | bytes) or not (budgets is None or hasattr(budgets, "__iter__")):
        raise InputShapeError(f'budgets is a list of sizes such as ["8GB", "16GB"]. Received: {budgets!r}.')
    sizes = None if budgets is None else sorted({parse_bytes(b) for b in budgets})
    if sizes == [] or (integer(max_points) or 0) < 2:
        raise InputShapeError(
            f"A frontier needs at least one budget, or max_points of at least 2. Received: budgets={budgets!r}, "
            f"max_points={max_points!r}."
        )
    if time_limit is not None:
        number("time_limit", time_limit, 0.0, math.inf)
    with Progress(progress).running() as shown:
        names = {"batch_size": batch_size, "inputs": inputs, "targets": targets, "sample_weight": sample_weight}
        options = {**names, "sequence_length": sequence_length, "mode": mode}
        if isinstance(model, Plan):
            source, request, policies = _of_plan(model, mesh, options, hardware, pins, objective, solver, remat)
        else:
            options["mode"] = "train" if mode is None else mode
            aim, chosen = "step_time" if objective is None else objective, "auto" if remat is None else remat
            source, request, policies = _of_model(model, mesh, options, hardware, pins, aim, solver, chosen, shown)
        deadline = clock() + (math.inf if time_limit is None else time_limit)
        different = source.different(policies, request.profile, shown, between=True)
        problems = [Policy(source.problem(p, request, shown)) for p in different]
        search = Frontier(problems, max_points, deadline, shown)
        return _at_budgets(search, sizes, source, request) if sizes else _breakpoints(search, source, request)


def _of_plan(
    plan: Plan,
    mesh: Any,
    options: dict[str, Any],
    hardware: Any,
    pins: Any,
    objective: str | None,
    solver: Any,
    remat: str | None,
) -> tuple[Source, Any, tuple[str, ...]]:
    from autoshard_ilp.explore.whatif import changed_request, with_trail
    from autoshard_ilp.request import remat_policies

    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputShapeError(
            f"The frontier of a plan is that of its own step. Received: a plan, and {', '.join(given)}. Leave them "
            "out, or pass the model."
        )
    plan = with_trail(plan)
    assert plan.trail is not None
    request = changed_request(plan.trail.request, pins, None, objective, mesh, hardware, solver)
    policies = remat_policies(remat, plan.mode) if remat is not None else plan.trail.policies
    return Source.of_plan(plan), request, policies or (plan.remat_policy,)


def _of_model(
    model: Any,
    mesh: Any,
    options: dict[str, Any],
    hardware: Any,
    pins: Any,
    objective: str,
    solver: Any,
    remat: str,
    progress: Any,
) -> tuple[Source, Any, tuple[str, ...]]:
    from autoshard_ilp.request import check_request, remat_policies

    request = check_request(mesh, None, hardware, pins, objective, solver)
    policies = remat_policies(remat, options["mode"])
    return Source.of_model(model, request.mesh, progress, **options), request, policies


def _nothing_fits(request: Any) -> Exception:
    from autoshard_ilp.errors import InfeasibleError

    pins = list(request.pins or {})
    return InfeasibleError(
        f"The pins must leave a layout for every tensor at some budget. Received: {', '.join(pins) or 'no pins'}, and "
        "no plan at any budget within the time limit. Drop or widen a pin, or raise the time limit.",
        conflicts=pins,
    )


def _breakpoints(search: Frontier, source: Source, request: Any) -> Pareto:
    search.run()
    if not search.probes:
        raise _nothing_fits(request)
    steps = _steps(search.probes)
    points = [_point(p, source, p.peak, up_to) for p, up_to in steps]
    proved = all(p.status == "optimal" for p in points)
    lower, upper = search.minimum
    complete = not search.stopped and proved and lower == upper
    if complete:
        status = "Every breakpoint is found, every point is proved."
        if len(search.policies) > 1:
            named = ", ".join(p.problem.step.remat for p in search.policies)
            status = f"{status[:-1]}, over these ways to recompute: {named}."
    else:
        why = [search.stopped] if search.stopped else []
        why += [] if proved else ["some points are not proved"]
        if lower != upper:
            why.append(f"the smallest budget is not proved ({format_bytes(upper - lower)} less may do)")
        status = f"Not every breakpoint may be here: {'; '.join(why)}."
    found = _result(points, complete, status, (upper or None, lower or None), request)
    return replace(found, interrupted=search.stopped == INTERRUPTED)


def _steps(probes: Sequence[Probe]) -> list[tuple[Probe, int | None]]:
    """Plans on the frontier, the smallest budget first, with the largest budget up to which each is the best known."""
    ordered = sorted(probes, key=lambda p: (p.peak, p.cost))
    kept: list[Probe] = []
    for p in ordered:
        if not kept or p.cost < kept[-1].cost * (1 - SAME):
            kept.append(p)
    ends = [*(following.peak - 1 for following in kept[1:]), None]
    return list(zip(kept, ends, strict=False))


def _at_budgets(search: Frontier, sizes: Sequence[int], source: Source, request: Any) -> Pareto:
    points = []
    for budget in reversed(sizes):
        found = search.at(budget)
        if found is not None:
            points.append(_point(found, source, budget, None))
            continue
        impossible = all(p.impossible >= budget for p in search.policies)
        status = "infeasible" if impossible else "unknown"
        bound = math.inf if impossible else max(p.bound(budget) for p in search.policies)
        points.append(Point(budget, None, math.inf, math.nan, math.nan, bound, status, 0, ""))
    if any(p.status == "infeasible" for p in points) and search.left():
        search.least()
        points = [replace(p, minimum_bytes=search.minimum[1]) if p.status == "infeasible" else p for p in points]
    minimum = (search.minimum[1] or None, search.minimum[0] or None)
    answer = _result(list(reversed(points)), False, search.stopped, minimum, request)
    return replace(answer, interrupted=search.stopped == INTERRUPTED)


def _point(probe: Probe, source: Source, budget: int, up_to: int | None) -> Point:
    from autoshard_ilp.report import planned_collectives, total_cost

    table, choices = probe.problem.table, probe.solution.choices
    cost = total_cost(table, choices, planned_collectives(table, choices))
    status = "optimal" if probe.proved else "feasible"
    policy = probe.problem.step.remat
    times = (cost.total_s, cost.compute_s, cost.communication_s, probe.lower_bound)
    return Point(budget, up_to, *times, status, probe.peak, policy, None, probe, source)


def _result(points: list[Point], complete: bool, status: str, minimum: Any, request: Any) -> Pareto:
    profile = request.profile
    least, bound = minimum
    usable = profile.usable_memory_bytes
    return Pareto(tuple(points), complete, status, least, bound, profile.name, str(request.mesh), usable)

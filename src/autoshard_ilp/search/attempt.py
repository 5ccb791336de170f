"""One attempt: a step's graph, priced, solved and made a plan, or a failure with what explains it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from autoshard_ilp.costs.overlap import overlap_notes
from autoshard_ilp.errors import UnsupportedModelError
from autoshard_ilp.garbage import collector_paused
from autoshard_ilp.graph.step import Step, loop_notes
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.pins import Pinned, path_shapes, resolve_pins, whole_seeds
from autoshard_ilp.plan import Plan, Trail, leaves
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request, recipe
from autoshard_ilp.search.division import HALF
from autoshard_ilp.search.early import EarlyProofs
from autoshard_ilp.search.halving import Left, for_any_plan, solve_divided, within
from autoshard_ilp.search.kinds import Kept, kinds_like
from autoshard_ilp.sharding import WHOLE

ROLES = {
    "parameter": "parameters",
    "optimizer": "optimizer",
    "non_trainable": "state",
    "metric": "state",
    "seed": "state",
    "state": "state",
}
"""Memory category of an argument's role; everything else counts as inputs."""


class Tables(Protocol):
    """A cost table, and the program built from it."""

    @property
    def table(self) -> Any:
        """A :class:`~autoshard_ilp.costs.table.CostTable`."""

    @property
    def built(self) -> Any:
        """A :class:`~autoshard_ilp.costs.build.Built`."""


@dataclass(frozen=True, eq=False)
class Failure:
    """A step for which no plan was found, with what explains it.

    Attributes:
        tables: gives its table and program, which are made only now where nothing was to be solved; None: let go.
        least_bytes: per device, that the step is known to need whatever is decided (:mod:`autoshard_ilp.costs.least`).
    """

    step: Step
    infos: Any
    tables: Callable[[], Tables] | None
    solution: Any
    pinned: Pinned
    least_bytes: int = 0

    @property
    def table(self) -> Any:
        """The cost table, if it is kept."""
        return None if self.tables is None else self.tables().table

    @property
    def built(self) -> Any:
        """The program with what its lifetimes stand for, if it is kept."""
        return None if self.tables is None else self.tables().built

    def without_tables(self) -> Failure:
        """Only that it failed: between policies that is all that matters, and the tables hold much memory."""
        return replace(self, tables=None)


def left_of(answer: Plan | Failure) -> Left | None:
    """Where an attempt ended without proof; None where there is nothing to go on from."""
    if isinstance(answer, Failure):
        gone = answer.tables is None or answer.solution.status == "infeasible"
        return None if gone else Left.of(answer.table.first_share, answer.solution)
    return None if answer.trail is None else Left.of(answer.trail.costs.first_share, answer.trail.solution)


def report_of(answer: Plan | Failure) -> Mapping[str, Any]:
    """What the solver reported of the program that an answer comes from."""
    if isinstance(answer, Failure):
        return {} if answer.solution is None else answer.solution.report
    return {} if answer.trail is None else answer.trail.solution.report


NEARLY_GAP = 0.05
"""Relative gap of a plan that only has to show how much memory fast plans take."""

NEARLY_PART = 0.1
"""Of the time limit: what finding it may take."""


def free_peak_bytes(answer: Plan | Failure, request: Request) -> float:
    """Bytes per device at the peak of the fastest plan if there were no budget, nearly; NaN where none was found."""
    from autoshard_ilp.program import solve

    built = answer.built if isinstance(answer, Failure) else None if answer.trail is None else answer.trail.built
    if built is None:
        return math.nan
    program = replace(built.program, capacity=None)
    left = left_of(answer)
    if left is not None and math.isfinite(program.cost(left.relaxed)):
        return float(program.peak(left.relaxed))
    options = replace(request.solver, relative_gap=max(NEARLY_GAP, request.solver.relative_gap))
    found = solve(program, within(options, NEARLY_PART * request.solver.time_limit))
    if found.report.get("interrupted"):
        raise KeyboardInterrupt
    return math.nan if found.choices is None else float(program.peak(found.choices))


@dataclass(frozen=True, eq=False)
class Priced:
    """A cost table and the program built from it."""

    table: Any
    built: Any
    pinned: Pinned
    infos: Any
    mesh: MeshSpec

    @property
    def program(self) -> Any:
        """The program, as :func:`autoshard_ilp.search.halving.solve_divided` wants it."""
        return self.built.program

    def kinds(self, like: np.ndarray | None, least: float) -> Iterator[Kept]:
        """What plans of a known kind each may use (:func:`autoshard_ilp.search.kinds.kinds_like`)."""
        return kinds_like(self.table, self.program, self.infos, self.mesh, like, least)


def attempt(
    step: Step,
    infos: Any,
    request: Request,
    progress: Progress,
    *,
    mode: str,
    batch_size: int,
    origin: Any = None,
    seconds: float = math.inf,
    cutoff: float = math.inf,
    surely: bool = False,
    dear: float = 1.0,
    free_part: float = 1.0,
    bound_part: float = 1.0,
    divided_part: float = 1.0,
    left_before: Left | None = None,
    by_kind: bool = False,
    plan_part: float = 1.0,
    before: Plan | None = None,
    early: EarlyProofs | None = None,
    tight: bool = False,
) -> Plan | Failure:
    """Plans a graph: strategies and costs, program, solution, plan. ``infos`` has ``arguments`` and ``results``.

    ``before`` is a plan of the same ``step`` under the same ``request``, whose prices need not be found again.
    ``early`` begins the proof that follows; it waits for prices of bytes where a step is ``tight``: memory may bind.

    ``seconds`` shortens the solver's time limit; the plan's own options keep it, for questions that follow. Only a plan
    whose objective is below ``cutoff`` (seconds) is wanted, and where none is known after ``plan_part`` of the time,
    none is looked for. ``surely``, ``by_kind`` and other parts of the time are as in :func:`solve_divided`, and
    ``dear`` is as in :func:`autoshard_ilp.program.solve`.
    """
    from autoshard_ilp.program import solve

    with progress.stage("strategies"):
        buffers = None if before is not None else buffers_of(step.graph, request)
        least = 0 if buffers is None else needed(step.graph, request, buffers)
    if least > request.capacity:
        return hopeless(step, infos, request, buffers, least)
    facts = functools.cache(lambda: read(step.graph, request, buffers=buffers))

    def priced(first_share: float) -> Priced:
        if before is not None and before.trail is not None and before.trail.costs.first_share == first_share:
            trail = before.trail
            return Priced(trail.costs, trail.built, honoured(step.graph, request), infos, request.mesh)
        with progress.stage("strategies"):
            known, pinned = facts()
            table = price(known, pinned, request, first_share)
        with progress.stage("costs"):
            return Priced(table, build(step, infos, table, request), pinned, infos, request.mesh)

    def solved(problem: Any, start: Any, seconds: float, relative_gap: float = 0.0, **keywords: Any) -> Any:
        keywords = {"cutoff": cutoff, "dear": dear, **for_any_plan(keywords, began + plan_part * limit)}
        keywords |= {"hint": start, "on_progress": progress.tell}
        options = replace(request.solver, relative_gap=max(relative_gap, request.solver.relative_gap))
        begin_proof(problem, keywords.get("prices"), start, keywords.get("rows") is False)
        with progress.stage("solve"):
            found = solve(problem.program, within(options, seconds), **keywords)
        if keywords.get("mixing"):
            begin_proof(problem, found.report.get("prices"), found.choices)
        return found

    def begin_proof(problem: Any, prices: Any, plan: Any, free: bool = False) -> None:
        wanted = any((prices or {}).values()) or ((free or request.capacity is None) and not tight)
        if early is not None and wanted and isinstance(problem, Priced):
            with progress.stage("proof"):
                early.begin(problem, prices or {}, plan, began + limit - clock())

    def without_budget(problem: Priced, plan: np.ndarray, seconds: float) -> float:
        with progress.stage("proof"):
            return free_bound(problem, plan, request, seconds)

    limit, began = min(seconds, request.solver.time_limit), clock()
    parts: dict[str, Any] = {"free_part": free_part, "bound_part": bound_part, "left_before": left_before}
    parts |= {"divided_part": divided_part, "by_kind": by_kind, "free_bound": without_budget}
    found, solution, notes = solve_divided(priced, solved, limit, cutoff=cutoff, surely=surely, **parts)
    table, built = found.table, found.built
    if solution.choices is None and solution.report.get("interrupted"):
        raise KeyboardInterrupt  # there is no plan to keep, and nothing else shall be tried
    if solution.status == "feasible" and solution.choices is None and math.isinf(cutoff):
        solution = with_whole_tensors(found, solution)
    if solution.status == "infeasible" or solution.choices is None:
        return Failure(step, infos, lambda: found, solution, found.pinned)
    plan = assemble(step, infos, request, progress, table, built, solution, mode, batch_size, dict(origin or {}))
    return replace(plan, notes=(*plan.notes, *notes))


def buffers_of(graph: Any, request: Request) -> Any:
    """When the buffers of a graph are held."""
    from autoshard_ilp.costs.facts import buffers_under

    return buffers_under(graph, request.profile, request.mesh.size)


def needed(graph: Any, request: Request, buffers: Any) -> int:
    """Bytes per device that a step holds whatever is decided, where that is more than its budget; else 0."""
    from autoshard_ilp.costs.least import least_bytes

    return least_bytes(graph, request.profile, buffers, request.mesh.size, request.capacity)


def hopeless(step: Step, infos: Any, request: Request, buffers: Any, least: int) -> Failure:
    """The failure of a step that needs more than there is whatever is decided; it is priced when someone asks."""
    from autoshard_ilp.program.model import Solution

    @functools.cache
    def tables() -> Priced:
        facts, pinned = read(step.graph, request, buffers=buffers)
        table = price(facts, pinned, request)
        return Priced(table, build(step, infos, table, request), pinned, infos, request.mesh)

    solution = Solution("infeasible", None, math.inf, math.inf, 0, 0.0, {"minimum_capacity_bound": least})
    return Failure(step, infos, tables, solution, honoured(step.graph, request), least)


def free_bound(problem: Priced, plan: np.ndarray, request: Request, seconds: float) -> float:
    """Seconds that no plan of a step falls short of without a budget, were each repeated layer to decide for itself.

    Args:
        problem: of the step, tied or not.
        plan: of it, a strategy per class.
        request: objective and solver options.
        seconds: most of them that it may take.

    Raises:
        KeyboardInterrupt: interrupted.
    """
    from autoshard_ilp.costs.apart import apart
    from autoshard_ilp.program.repeated.whole import solve_repeated

    step = apart(problem.table, problem.built, request.objective)
    options = within(request.solver, seconds)
    found = solve_repeated(step.program, step.alike, plan[step.classes], options, most_cells=0)
    if found.report.get("interrupted"):
        raise KeyboardInterrupt
    return float(found.lower_bound) + step.offset


def with_whole_tensors(problem: Priced, solution: Any) -> Any:
    """A solution that ran out of time before any plan: with everything whole on every device, where that fits."""
    choices = np.zeros(len(problem.table.classes), np.int64)
    for number, cls in enumerate(problem.table.classes):
        for at, strategy in enumerate(cls.strategies):
            if all(x is not None and set(x) <= {WHOLE} for x in (*strategy.operands, *strategy.results)):
                choices[number] = at
                break
    program = problem.program
    objective, peak = program.cost(choices), program.peak(choices)
    if not math.isfinite(objective) or (program.capacity is not None and peak > program.capacity):
        return solution
    return replace(solution, choices=choices, objective=objective, peak_bytes=peak)


@collector_paused()
def read(graph: Any, request: Request, known: Any = None, buffers: Any = None) -> tuple[Any, Pinned]:
    """The facts of a graph that its prices depend on, and the pins that it honours.

    ``known`` are facts of this graph, under other options as it may be; ``buffers`` are its own, where they are known.
    """
    from autoshard_ilp.costs.facts import Facts
    from autoshard_ilp.rules import rule_for

    mesh, pinned = request.mesh, honoured(graph, request)
    asked = (graph, request.profile, mesh.size)
    if known is not None and (known.graph, known.profile, known.devices) == asked:
        facts = known.told_apart(pinned.key, request.solver.fold_layers)
    else:
        fold = request.solver.fold_layers
        facts = Facts.of(graph, rule_for, request.profile, pinned.key, fold, mesh.size, buffers)
    if facts.unknown and request.solver.strict:
        raise UnsupportedModelError(
            "Under strict=True every primitive needs a sharding rule. Received: "
            + "; ".join(facts.unknown[:5])
            + ". Add a rule (src/autoshard_ilp/rules/README.md), or plan without strict to keep these whole."
        )
    return facts, pinned


def honoured(graph: Any, request: Request) -> Pinned:
    """The layouts that pins, and a restriction, leave of a graph's arguments and results."""
    names, shapes = request.mesh.axis_names, path_shapes(graph)
    pinned = resolve_pins(request.pins, shapes, names, request.mesh.axis_sizes)
    if request.restriction is not None:
        pinned = Pinned({**request.restriction(shapes), **pinned.allowed}, pinned.sources)
    return Pinned({**whole_seeds(graph, len(names)), **pinned.allowed}, pinned.sources)


@collector_paused()
def price(facts: Any, pinned: Pinned, request: Request, first_share: float = 0.0) -> Any:
    """The cost table of a graph (:func:`read`); ``first_share`` as in :func:`build_table`."""
    from autoshard_ilp.costs.collectives import CollectiveCosts
    from autoshard_ilp.costs.prices import Prices, once
    from autoshard_ilp.costs.table import build_table
    from autoshard_ilp.costs.together import axes_together
    from autoshard_ilp.costs.topology import MeshLinks

    mesh = request.mesh
    links = MeshLinks.create(request.profile, mesh.axis_names, mesh.axis_sizes, request.physical_shape)
    collectives = CollectiveCosts(links)
    key = (mesh.axis_names, mesh.axis_sizes, request.physical_shape, id(request.profile))
    _, prices = once(request.known, key, lambda: (request.profile, Prices.of(mesh.axis_sizes, collectives)))
    return build_table(
        facts,
        mesh.axis_names,
        mesh.axis_sizes,
        collectives,
        prices=prices,
        restriction=pinned.restrict,
        first_share=first_share,
        together=axes_together(facts.choices_per_axis, mesh.axis_sizes, collectives, pinned.allowed.values()),
    )


@collector_paused()
def build(step: Step, infos: Any, table: Any, request: Request) -> Any:
    """The integer program of a cost table."""
    from autoshard_ilp.costs.build import build_program

    roles = {op: ROLES.get(infos.arguments[i].role, "inputs") for i, op in enumerate(step.graph.arguments)}
    return build_program(table, roles, capacity=request.capacity, objective=request.objective)


def tied_note(table: Any) -> str:
    """What a plan says of the decisions that repeated layers share, as long as no more is known."""
    return f"Repeated layers {shared(table)}; bound and gap are those of plans that do."


def shared(table: Any) -> str:
    """Which decisions repeated layers share."""
    if not table.first_share:
        return "share one decision"
    if table.first_share == HALF:
        return "share two decisions, one for each half of them"
    return f"share two decisions, one for the first {100 * table.first_share:.2g}% of them"


def assemble(
    step: Step,
    infos: Any,
    request: Request,
    progress: Progress,
    table: Any,
    built: Any,
    solution: Any,
    mode: str,
    batch_size: int,
    origin: dict[str, Any],
) -> Plan:
    """The plan of a solution: layouts, cost, memory, proof."""
    from autoshard_ilp.course import course_of
    from autoshard_ilp.graph.remat import recomputed_layers
    from autoshard_ilp.placement import place
    from autoshard_ilp.report import peak_memory, planned_collectives, total_cost
    from autoshard_ilp.saved.signature import signature_of

    graph, choices = step.graph, solution.choices
    placement = place(table, choices)
    collectives = planned_collectives(table, choices)
    cost = total_cost(table, choices, collectives)
    timings = dict(progress.seconds)
    inside = solution.report.get("seconds", {})
    timings["presolve"] = float(inside.get("presolve", 0.0))
    timings["solve"] = max(0.0, timings.get("solve", 0.0) - timings["presolve"])
    notes: tuple[str, ...] = ()
    if table.tied:
        notes = (tied_note(table),)
    notes = (*notes, *loop_notes(graph), *overlap_notes(cost.compute_s, cost.hidden_s, request.profile))
    return Plan(
        mesh=request.mesh,
        hardware=request.profile.name,
        mode=mode,
        batch_size=batch_size,
        objective=request.objective,
        arguments=leaves(infos.arguments, [placement.of(i)[1][0] for i in graph.arguments]),
        results=leaves(infos.results, [placement.of(i)[0][0] for i in graph.results]),
        cost=cost,
        collectives=tuple(collectives),
        memory=peak_memory(built, choices, request.capacity),
        status=solution.status,
        lower_bound=float(solution.lower_bound),
        gap=float(solution.gap),
        timings=timings,
        placement=placement,
        unknown=table.unknown,
        notes=notes,
        course=course_of(built, table, choices),
        origin={**recipe(request), **({"first_share": table.first_share} if table.first_share else {}), **origin},
        signature=signature_of(step),
        remat_policy=step.remat,
        remat=recomputed_layers(graph),
        executable=step,
        trail=Trail(
            getattr(infos, "closed_jaxpr", None), graph, table, built.program, built, solution, infos, request, request
        ),
    )

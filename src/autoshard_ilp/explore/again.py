"""Solve a plan's problem again under other options, without tracing again and with as much of its table as holds.

Pins and budgets only narrow or widen what the integer program allows, so most questions are the same program with some
strategies forbidden (cost ``inf``) or another capacity. What was proved before is used again:

    narrower problem (fewer layouts, less memory):  the old lower bound holds, and the old optimum stays the optimum
                                                    as long as it is still allowed
    wider problem:                                  the old plan is a start
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard_ilp.errors import InputShapeError, UnsupportedModelError
from autoshard_ilp.pins import Allowed, class_masks, masked, path_shapes, resolve_pins
from autoshard_ilp.search.attempt import Failure
from autoshard_ilp.search.halving import Priced, within
from autoshard_ilp.search.kinds import Kept, Kind, kinds_like


@dataclass(frozen=True, eq=False)
class Problem:
    """One step priced for one mesh, and the program that the options make of it.

    Attributes:
        step: the graph, with its rematerialisation policy.
        infos: the trace (``arguments`` and ``results``).
        table, built: cost table and the program built from it, under the options ``priced``.
        request, priced: the options of the question, and those that ``table`` was built under.
        program: ``built.program`` with what ``request`` forbids, its objective and its capacity.
    """

    step: Any
    infos: Any
    table: Any
    built: Any
    request: Any
    priced: Any
    program: Any

    @cached_property
    def allowed(self) -> Allowed:
        """Layouts that pins and baselines leave, per path; absent paths are free."""
        return allowed_layouts(self.request, path_shapes(self.step.graph))

    @cached_property
    def as_priced(self) -> bool:
        """Whether the table was priced under the question's own pins: others leave it other strategies."""
        return self.allowed == allowed_layouts(self.priced, path_shapes(self.step.graph))

    def asked(self, part: Any) -> Problem:
        """A part of this problem (:class:`~.search.kinds.Kind`) as one of its own; a problem is left as it is."""
        return replace(self, program=part.program) if isinstance(part, Kind) else part

    def kinds(self, like: np.ndarray | None, least: float) -> Iterator[Kept]:
        """What plans of a known kind each may use (:func:`autoshard_ilp.search.kinds.kinds_like`)."""
        return kinds_like(self.table, self.program, self.infos, self.request.mesh, like, least)


_searched_as_plans_are: type[Priced] = Problem
"""For the type checker, which does not look at the bound of a type variable where the result is anything."""


def problem_of(plan: Any) -> Problem:
    """The problem that a plan solves.

    Raises:
        UnsupportedModelError: the plan came from a file and is not bound to its model.
    """
    if plan.executable is None:
        raise UnsupportedModelError(
            "Questions about a plan need the step that it was made for. Received: a plan loaded from a file without "
            'its model. Load it with autoshard.load("plan.json", model=model_or_builder), or call plan.bind(...).'
        )
    t = plan.trail
    return Problem(plan.executable, t.infos, t.costs, t.built, t.request, t.priced, t.program)


def allowed_layouts(request: Any, shapes: Mapping[str, tuple[int, ...]]) -> Allowed:
    """Layouts that pins and baselines leave, per path; absent paths are free."""
    pinned = resolve_pins(request.pins, shapes, request.mesh.axis_names, request.mesh.axis_sizes)
    restricted = request.restriction(shapes) if request.restriction is not None else {}
    return {**restricted, **pinned.allowed}


def narrower(a: Allowed, b: Allowed) -> bool:
    """Whether everything that ``a`` allows, ``b`` allows too."""
    return all(path in a and a[path] <= layouts for path, layouts in b.items())


def reprice(step: Any, infos: Any, request: Any, progress: Any, first_share: float = 0.0, facts: Any = None) -> Problem:
    """Prices a step from scratch; trace, rules and the ``facts`` of another table of this step are kept."""
    from autoshard_ilp.search.attempt import build, price, read

    with progress.stage("strategies"):
        table = price(*read(step.graph, request, facts), request, first_share)
    with progress.stage("costs"):
        built = build(step, infos, table, request)
    return Problem(step, infos, table, built, request, request, built.program)


def adapted(problem: Problem, request: Any, progress: Any) -> Problem:
    """The same step under other options, from the same cost table where that still holds."""
    old = problem.priced

    def anew() -> Problem:
        table = problem.table
        return reprice(problem.step, problem.infos, request, progress, table.first_share, table.facts)

    same_prices = (old.mesh, old.profile, old.physical_shape) == (request.mesh, request.profile, request.physical_shape)
    folded = old.solver.fold_layers == request.solver.fold_layers
    if not (same_prices and folded):
        return anew()
    shapes = path_shapes(problem.step.graph)
    wanted = allowed_layouts(request, shapes)
    if not narrower(wanted, allowed_layouts(old, shapes)):
        return anew()
    with progress.stage("costs"):
        masks = class_masks(problem.table, wanted)
        if masks is None:  # some of the tensors that share a decision are pinned, others are not
            return anew()
        if problem.table.together and not all(mask.any() for mask in masks.values()):
            return anew()  # other mesh axes may go together
        program = replace(masked(weighted(problem, request.objective), masks), capacity=request.capacity)
    return replace(problem, request=request, program=program)


def weighted(problem: Problem, objective: str) -> Any:
    """The built program under another objective: only the weight of compute differs."""
    from autoshard_ilp.costs.build import TIE_BREAK

    weights = {"step_time": 1.0, "communication": TIE_BREAK}
    before, after = weights[problem.priced.objective], weights[objective]
    program = problem.built.program
    if before == after:
        return program
    nodes = tuple(
        replace(n, costs=n.costs + (after - before) * c.count * c.compute_seconds)
        for n, c in zip(program.nodes, problem.table.classes, strict=True)
    )
    return replace(program, nodes=nodes)


@dataclass(frozen=True)
class Known:
    """What holds for a problem before it is solved.

    Attributes:
        plans: assignments (one strategy per class) to start from; what is not allowed is left out.
        lower_bound: seconds, valid.
        slack: seconds by which a plan may exceed the bound and still count as proved (rounding of integer costs).
        with_rows: memory rows that the bound took for granted.
        without_memory: seconds, a lower bound of the best plan without a capacity.
    """

    plans: tuple[Any, ...] = ()
    lower_bound: float = -math.inf
    slack: float = 0.0
    with_rows: int = 0
    without_memory: float = -math.inf


def known_from(solution: Any, old: Problem, new: Problem) -> Known:
    """What the solution of one problem says about another with the same table."""
    if solution is None or solution.choices is None:
        return Known()
    rounding = float(solution.report.get("rounding_error_seconds", 0.0))
    looked = solution.report.get("rows") or any(solution.report.get("room", {}).values())
    unlimited = not looked  # proved without looking at memory: holds for any capacity
    holds = narrower(new.allowed, old.allowed) and new.request.objective == old.request.objective
    holds = holds and (unlimited or new.request.capacity <= old.request.capacity)
    rows = int(solution.report.get("rows", 0))
    if not holds:
        return Known((solution.choices,), -math.inf, rounding, rows)
    return Known(
        (solution.choices,), solution.lower_bound, rounding, rows, solution.report.get("without_memory", -math.inf)
    )


def solved(
    problem: Problem,
    progress: Any,
    known: Known | None = None,
    seconds: float = math.inf,
    relative_gap: float = 0.0,
    **keywords: Any,
) -> Any:
    """Solves a problem from what is known; ``progress`` is an :class:`autoshard_ilp.progress.Progress`.

    ``seconds`` shortens the time limit, ``relative_gap`` is one that will do; further keywords are those of
    :func:`autoshard_ilp.program.solve`.
    """
    from autoshard_ilp.program import solve
    from autoshard_ilp.program.search import PROOF

    known = known or Known()
    program = problem.program
    hint = best_known(program, known.plans)

    def proved(cost: float) -> bool:
        return cost - known.lower_bound <= PROOF * abs(cost) + known.slack

    if hint is not None and proved(program.cost(hint)):
        return _proved(program, hint, known)
    with progress.stage("solve"):
        options = within(problem.request.solver, seconds)
        options = replace(options, relative_gap=max(relative_gap, options.relative_gap))
        solution = solve(program, options, hint=hint, on_progress=progress.tell, **keywords)
    if solution.choices is None or solution.lower_bound >= known.lower_bound:
        return solution
    status = "optimal" if proved(solution.objective) else solution.status
    report = {**solution.report, "rows": max(known.with_rows, solution.report.get("rows", 0))}
    return replace(solution, lower_bound=min(known.lower_bound, solution.objective), status=status, report=report)


def best_known(program: Any, known: Sequence[Any]) -> np.ndarray | None:
    """The cheapest of some assignments that the program allows, memory included; None when there is none."""
    sizes = [len(n.costs) for n in program.nodes]
    found: list[tuple[float, int, np.ndarray]] = []
    for position, choices in enumerate(known):
        x = np.asarray(choices, np.int64)
        if x.shape != (len(sizes),) or np.any(x >= np.array(sizes)):
            continue
        cost = program.cost(x)
        if math.isfinite(cost) and (program.capacity is None or program.peak(x) <= program.capacity):
            found.append((cost, position, x))
    return min(found)[2] if found else None


def _proved(program: Any, choices: np.ndarray, known: Known) -> Any:
    from autoshard_ilp.program.model import Solution

    cost = program.cost(choices)
    report = {"reused": "a proved plan that is allowed here too", "rounding_error_seconds": known.slack}
    if known.with_rows:
        report["rows"] = known.with_rows
    if math.isfinite(known.without_memory):
        report["without_memory"] = known.without_memory
    return Solution("optimal", choices, cost, min(known.lower_bound, cost), program.peak(choices), 0.0, report)


def plan_of(problem: Problem, solution: Any, progress: Any, like: Any) -> Any:
    """The plan of a solution; mode, batch size and origin are those of the plan ``like``."""
    from autoshard_ilp.search.attempt import assemble

    kept = {k: v for k, v in like.origin.items() if k not in ("hardware", "pins", "first_share", "halved")}
    plan = assemble(
        problem.step,
        problem.infos,
        problem.request,
        progress,
        problem.table,
        problem.built,
        solution,
        like.mode,
        like.batch_size,
        kept,
    )
    assert plan.trail is not None
    trail = replace(plan.trail, program=problem.program, priced=problem.priced)
    own = tuple(n for n in like.notes if n.startswith(("Restricted to", "Donated", "No argument"))) + plan.notes
    return replace(plan, trail=trail, notes=tuple(dict.fromkeys(own)))


@dataclass(frozen=True, eq=False)
class FailedProblem(Failure):
    """A failure that remembers its problem, for the next question."""

    problem: Problem | None = None

    def without_tables(self) -> FailedProblem:
        return replace(self, tables=None, problem=None)


def failure_of(problem: Problem, solution: Any) -> FailedProblem:
    """A problem without a solution, as :func:`autoshard_ilp.search.infeasible.infeasible` explains it."""
    request = problem.request
    shapes = path_shapes(problem.step.graph)
    pinned = resolve_pins(request.pins, shapes, request.mesh.axis_names, request.mesh.axis_sizes)
    own = replace(problem, built=replace(problem.built, program=problem.program))
    return FailedProblem(problem.step, problem.infos, lambda: own, solution, pinned, problem=problem)


def need_paths(text: str, paths: Sequence[str]) -> InputShapeError:
    """The error for a path that names nothing."""
    import difflib

    near = difflib.get_close_matches(text, paths, n=3, cutoff=0.4) or sorted(paths)[:3]
    return InputShapeError(
        f"A path is that of a variable, an input or an output, or a regular expression that finds some. Received: "
        f"{text!r}, which finds none of {len(paths)}. Did you mean {', '.join(near)}? plan.specs lists all of them."
    )

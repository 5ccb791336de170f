"""``plan.what_if``: the same step under other options, without tracing it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp.explore.again import (
    FailedProblem,
    Known,
    Problem,
    adapted,
    failure_of,
    known_from,
    narrower,
    plan_of,
    problem_of,
    reprice,
    solved,
)
from autoshard_ilp.explore.soon import ENOUGH, of_tied, soon
from autoshard_ilp.garbage import old_objects_left
from autoshard_ilp.graph.equal import has_one_copy
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.attempt import Failure
from autoshard_ilp.search.fewerblocks import is_infeasible
from autoshard_ilp.search.halving import Left, cheapest, for_any_plan, solve_divided
from autoshard_ilp.search.untied import NODES, without_ties

SOON_SECONDS = 0.5
"""What showing that a policy still does not fit may take."""


def what_if(
    plan: Plan,
    *,
    pins: Mapping[str, Any] | None = None,
    memory_budget: str | int | None = None,
    objective: str | None = None,
    mesh: Any = None,
    hardware: Any = None,
    remat: str | None = None,
    solver: Any = None,
    progress: Any = None,
) -> Plan:
    """What the plan would be if some options were different. The model is not traced again.

    Every argument that is given *replaces* that option of the plan; the others stay as they were. The answer is that
    of :func:`autoshard_ilp.optimize` with these options, with two exceptions. A large step is not compared with the one
    without ties (its notes say so). And without ``solver``, where the budget binds, a plan of a large step will do if
    none that recomputes as many blocks can be faster by more than one percent; ``gap`` says how much faster. Where the
    budget differs by a tenth at most, what the plan's own search has shown may be such an answer at once (its notes say
    so).

    Other pins, budgets and objectives use the plan's cost table again, and its proof where the question is a narrower
    one: a proved plan that it still allows is its answer. Another mesh or other hardware prices the step anew.

    Args:
        plan: made by this process, or bound to its model.
        pins: ``{regex on a path: PartitionSpec or tuple}`` instead of the plan's own; ``{}`` frees everything.
        memory_budget: per device, "16GB", "16GiB" or bytes.
        objective: "step_time" or "communication".
        mesh, hardware: as for ``optimize``; a new hardware comes with its own usable memory as the budget, unless
            ``memory_budget`` is given.
        remat: rematerialisation policy, or "auto".
        solver: an :class:`autoshard_ilp.SolverOptions`; the question is then searched as ``optimize`` would.
        progress: as for ``optimize``.

    Returns:
        The plan under the new options. It can be asked again.

    Raises:
        InputShapeError, ProfileError: options that make no sense.
        UnsupportedModelError: the plan came from a file and is not bound to its model.
        InfeasibleError: no plan fits; carries the smallest budget that does, and the pins at fault.
    """
    from autoshard_ilp.request import remat_policies

    plan = with_trail(plan)
    old = problem_of(plan).request
    request = changed_request(old, pins, memory_budget, objective, mesh, hardware, solver)
    policies = plan.trail.policies if remat is None else remat_policies(remat, plan.mode)  # type: ignore[union-attr]
    with Progress(progress).running() as shown:
        return planned(plan, request, policies or (plan.remat_policy,), shown, quickly=solver is None)


def with_trail(plan: Plan) -> Plan:
    """The plan with its trail, priced again where it came from a file."""
    if plan.trail is not None and plan.trail.request is not None:
        return plan
    from autoshard_ilp.explore.loaded import priced_again

    return priced_again(plan)


def changed_request(
    old: Any, pins: Any, memory_budget: Any, objective: str | None, mesh: Any, hardware: Any, solver: Any
) -> Any:
    """The options of a question, checked; None keeps the old one."""
    from autoshard_ilp.request import check_request

    where = old.mesh if mesh is None else mesh
    chip: Any = old.profile if hardware is None else hardware
    budget = memory_budget if memory_budget is not None else (old.capacity if hardware is None else None)
    named = old.pins if pins is None else pins
    aim = old.objective if objective is None else objective
    request = check_request(where, budget, chip, named, aim, old.solver if solver is None else solver)
    if mesh is None and hardware is None:
        request = replace(request, physical_shape=old.physical_shape, mesh=old.mesh, profile=old.profile)
    return replace(request, restriction=old.restriction, solver=replace(request.solver, strict=old.solver.strict))


@dataclass(frozen=True, eq=False)
class _Attempt:
    """What is known of one rematerialisation policy: a problem and its solution."""

    problem: Problem
    solution: Any


@old_objects_left()
def planned(plan: Plan, request: Any, policies: tuple[str, ...], progress: Progress, *, quickly: bool = False) -> Plan:
    """The plan under new options, with as little rematerialisation as fits; ``quickly``: one that is near to the best
    will do, where there is one at once."""
    from autoshard_ilp.planning import Expected, needed_share, with_history
    from autoshard_ilp.search.anyplan import any_plan
    from autoshard_ilp.search.attempt import tied_note
    from autoshard_ilp.search.axes import of_all_axes
    from autoshard_ilp.search.rematsearch import (
        DEAR_SHARE,
        SOME_SHARE,
        blocks_of,
        memory_share,
        recomputed_share,
        search,
    )

    known = _attempts(plan, request)
    if _still_best(plan, request, policies):
        assert plan.trail is not None
        own = problem_of(plan)
        program = replace(own.program, capacity=request.capacity)
        made = plan_of(replace(own, request=request, program=program), plan.trail.solution, progress, plan)
        said = (*plan.notes, *(n for n in made.notes if n != tied_note(own.table)))  # what was proved holds here too
        made = replace(made, lower_bound=plan.lower_bound, gap=plan.gap, notes=tuple(dict.fromkeys(said)))
        return with_history(made, policies, plan.trail.failures)

    if quickly and _alike(plan, request, policies):
        at_once = soon(plan, request, progress, lambda: _others_fit(plan, known, request, progress))
        if at_once is not None:
            assert plan.trail is not None
            return of_all_axes(with_history(at_once, policies, plan.trail.failures))

    expected = Expected(policies)

    def tried(policy: str, seconds: float, cutoff: float, dear: float) -> Any:
        limits = {"seconds": seconds, "cutoff": cutoff, "dear": dear, **expected.of(policy)}
        limits["enough"] = ENOUGH if quickly else 0.0
        return expected.learn(policy, _again(plan, known.get(policy), policy, request, progress, **limits))

    need, limit, began = needed_share(request), request.solver.time_limit, clock()
    some = DEAR_SHARE if quickly else SOME_SHARE  # every other policy is to be priced
    found = search(policies, tried, blocks_of, limit, share=recomputed_share, dear=memory_share, need=need, some=some)
    if found.plan is None:

        def make(failure: Any, solution: Any) -> Plan:
            return plan_of(failure.problem, solution, progress, plan)

        made, failures = any_plan(found.failures, request, progress, make, limit - (clock() - began))
        return of_all_axes(with_history(made, policies, failures))
    made = with_history(found.plan, policies, found.failures)
    if made.trail is not None and len(made.trail.graph.ops) <= NODES:
        made = without_ties(made, progress, limit - (clock() - began))
    return of_all_axes(found.proved(made))


def _still_best(plan: Plan, request: Any, policies: tuple[str, ...]) -> bool:
    """Whether a proved plan answers a question too: one that allows less, but nothing less that the plan uses."""
    trail, problem = plan.trail, problem_of(plan)
    assert trail is not None
    old = problem.request
    if plan.status != "optimal" or not _alike(plan, request, policies):
        return False
    allowed = replace(problem, request=request).allowed
    if not narrower(allowed, problem.allowed) or not plan.memory.peak_bytes <= request.capacity <= old.capacity:
        return False
    return all(leaf.layout in allowed.get(leaf.path, (leaf.layout,)) for leaf in (*plan.arguments, *plan.results))


def _alike(plan: Plan, request: Any, policies: tuple[str, ...]) -> bool:
    """Whether a question differs from that of a plan in budget and pins at most."""
    assert plan.trail is not None
    old = plan.trail.request
    same = (old.mesh, old.profile, old.physical_shape, old.objective) == (
        request.mesh,
        request.profile,
        request.physical_shape,
        request.objective,
    )
    return same and policies == plan.trail.policies and request.solver.strict == old.solver.strict


def _others_fit(plan: Plan, known: Mapping[str, _Attempt | Failure], request: Any, progress: Progress) -> bool:
    """Whether other policies, which did not fit, may do so now."""
    assert plan.trail is not None
    failed = [f.step.remat for f in plan.trail.failures]
    answers = (_again(plan, known[p], p, request, progress, SOON_SECONDS, math.inf, 1.0) for p in failed)
    return any(isinstance(answer, Plan) or not is_infeasible(answer) for answer in answers)


def _attempts(plan: Plan, request: Any) -> dict[str, _Attempt | Failure]:
    """Problems of this step that are priced already, by rematerialisation policy; none where its graph is another.

    Of what does not fit however it is divided, only that."""
    trail, step = plan.trail, plan.executable
    assert trail is not None and step is not None
    if step.traced is not None and step.one_copy != has_one_copy(request.profile):
        return {}
    old = trail.request
    found: dict[str, _Attempt | Failure] = {plan.remat_policy: _Attempt(problem_of(plan), trail.solution)}
    for f in trail.failures:
        if f.least_bytes > request.capacity and (request.mesh, request.profile) == (old.mesh, old.profile):
            found[f.step.remat] = f
            continue
        own = f.problem if isinstance(f, FailedProblem) else None
        first = Problem(f.step, f.infos, f.table, f.built, trail.request, trail.request, f.built.program)
        found[f.step.remat] = _Attempt(own or first, f.solution)
    return found


def _again(
    plan: Plan,
    known: _Attempt | Failure | None,
    policy: str,
    request: Any,
    progress: Progress,
    seconds: float,
    cutoff: float,
    dear: float,
    plan_part: float = 1.0,
    **expected: Any,
) -> Any:
    """The plan under one policy, or the failure; ``cutoff`` and ``dear`` as in :func:`autoshard_ilp.program.solve`,
    ``plan_part`` as in :func:`autoshard_ilp.search.attempt.attempt`, the rest as in
    :func:`autoshard_ilp.search.halving.solve_divided`."""
    from autoshard_ilp.graph.step import graph_of

    if isinstance(known, Failure):
        return known
    facts = Known()
    if known is None:
        assert plan.executable is not None
        traced = plan.executable.traced
        with progress.stage("graph"):
            step = graph_of(traced, policy, plan.executable.while_trip_count, one_copy=has_one_copy(request.profile))
        first = reprice(step, traced, request, progress)
    else:
        first = adapted(known.problem, request, progress)
        if first.table is known.problem.table:
            if (failed := _still_infeasible(first, known)) is not None:
                return failure_of(first, failed)
            facts = known_from(known.solution, known.problem, first)

    limit, began = min(seconds, request.solver.time_limit), clock()

    def solve(problem: Any, start: Any, seconds: float, **keywords: Any) -> Any:
        own = facts if problem is first else Known(() if start is None else (start,))
        keywords = for_any_plan(keywords, began + plan_part * limit)
        return solved(first.asked(problem), progress, own, seconds, **{"cutoff": cutoff, "dear": dear, **keywords})

    tied = None
    if known is not None and first.table is known.problem.table and _same_program(known.problem, first):
        tied = known.solution.report.get("tied")

    def make(first_share: float) -> Problem:
        if first_share == first.table.first_share:
            return first
        if tied is not None and first_share == 0.0:
            one = of_tied(first, tied)
            if one is not None:
                return one
        if first.as_priced:
            return reprice(first.step, first.infos, request, progress, first_share, first.table.facts)
        # Priced under the question's pins, classes would have other strategies than those of the first problem.
        whole = reprice(first.step, first.infos, first.priced, progress, first_share, first.table.facts)
        return adapted(whole, request, progress)

    share = first.table.first_share
    if known is not None and share and request.capacity == known.problem.request.capacity:
        # Under the same budget the layers are best divided as they are, or nearly so.
        prices = known.solution.report.get("prices")
        expected["left_before"] = Left(share, None, cheapest(first.program), -math.inf, -math.inf, 0.0, prices)
    found, solution, notes = solve_divided(make, solve, limit, cutoff=cutoff, tied=tied, **expected)
    if solution.status == "infeasible" or solution.choices is None:
        return failure_of(found, solution)
    made = plan_of(found, solution, progress, plan)
    return replace(made, notes=(*made.notes, *notes))


def _same_program(one: Problem, other: Problem) -> bool:
    """Whether two problems with one table have the same program, capacity aside, and tables priced anew have the same
    strategies."""
    same = one.request.objective == other.request.objective and one.allowed == other.allowed
    return same and other.as_priced


def _still_infeasible(problem: Problem, known: _Attempt) -> Any:
    """The old proof that nothing fits, where it holds for this problem as well; else None."""
    from autoshard_ilp.program.model import Solution

    if known.solution.status != "infeasible" or not narrower(problem.allowed, known.problem.allowed):
        return None
    least = known.solution.report.get("minimum_capacity_bound", 0)
    if problem.request.capacity > max(known.problem.request.capacity, least - 1):
        return None
    report = {"minimum_capacity_bound": least}
    return Solution("infeasible", None, math.inf, math.inf, 0, 0.0, report)

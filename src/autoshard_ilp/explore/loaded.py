"""Questions about a plan that came from a file: its step is priced again, its layouts become a solution again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from autoshard_ilp.errors import PlanMismatchError, ProfileError
from autoshard_ilp.explore.again import Known, Problem, problem_of, reprice, solved
from autoshard_ilp.plan import Plan, Trail
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.division import HALF


def priced_again(plan: Plan, progress: Any = None) -> Plan:
    """A bound plan with the trail that :func:`autoshard_ilp.optimize` would have given it.

    Args:
        plan: loaded from a file and bound to its model.
        progress: as for ``optimize``.

    Raises:
        UnsupportedModelError: the plan is not bound to its model.
        ProfileError: the hardware profile that it names is not one of the packaged ones.
    """
    if plan.executable is None:
        problem_of(plan)  # raises
    request = _request(plan)
    infos = plan.executable.traced or _Infos(plan)  # type: ignore[union-attr]
    with Progress(progress).running() as shown:
        problem = reprice(plan.executable, infos, request, shown, _first_share(plan))
        found = _as_planned(problem, plan)
        known = Known()
        if found is not None:
            problem, choices = found
            known = Known((choices,), _bound(problem, choices, plan))
        solution = solved(problem, shown, known)
    trail = Trail(
        getattr(infos, "closed_jaxpr", None), problem.step.graph, problem.table, problem.program, problem.built,
        solution, infos, request, request, (plan.remat_policy,),
    )  # fmt: skip
    return replace(plan, trail=trail)


def _first_share(plan: Plan) -> float:
    """Of the repeated layers, those that decided apart from the others; files of earlier versions know halves only."""
    found = plan.origin.get("first_share", HALF if plan.origin.get("halved") else 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1:
        raise PlanMismatchError(
            f"origin.first_share of a plan file is the share of the repeated layers that decide apart from the others, "
            f"from 0 to less than 1. Received: {found!r}. Save the plan again."
        )
    return float(found)


class _Infos:
    """Arguments and results of a plain function's plan."""

    def __init__(self, plan: Plan) -> None:
        self.arguments, self.results = plan.arguments, plan.results


def _request(plan: Plan) -> Any:
    from autoshard_ilp.baselines import BASELINES
    from autoshard_ilp.costs.profile import load_profile
    from autoshard_ilp.request import check_request

    hardware = str(plan.origin.get("hardware") or plan.hardware)
    name = hardware.partition(":")[0]
    try:
        load_profile(name)
    except ProfileError as error:
        raise ProfileError(
            f"A question about a loaded plan prices its step again. Received: a plan for the hardware {hardware!r}, "
            "which is no packaged profile. Plan again with hardware= your profile, and ask that plan."
        ) from error
    pins = {text: tuple(tuple(e) if isinstance(e, list) else e for e in spec) for text, spec in _pins(plan).items()}
    request = check_request(plan.mesh, plan.memory.budget_bytes, hardware, pins or None, plan.objective, None)
    baseline = str(plan.origin.get("baseline"))
    if baseline in BASELINES and plan.executable is not None:
        request = replace(request, restriction=BASELINES[baseline](plan.executable.traced, request.mesh).of_paths)
    return request


def _pins(plan: Plan) -> dict[str, Any]:
    found = plan.origin.get("pins") or {}
    if not isinstance(found, dict):
        raise PlanMismatchError(f"A plan's pins are a table. Received: {found!r}. Save the plan again.")
    return found


def _as_planned(problem: Problem, plan: Plan) -> tuple[Problem, np.ndarray] | None:
    """The strategy of every class that the plan's layouts stand for; None where the cost model has changed.

    Classes whose members the plan lays out differently are parted.
    """
    from autoshard_ilp.costs.apart import apart, parted
    from autoshard_ilp.search.attempt import build

    step = apart(problem.table, problem.built, plan.objective)
    chosen = []
    numbers: dict[int, dict[Any, int]] = {}
    for index, op_id in zip(step.classes.tolist(), step.op_ids.tolist(), strict=True):
        if index not in numbers:
            strategies = problem.table.classes[index].strategies
            numbers[index] = {(s.operands, s.results): i for i, s in enumerate(strategies)}
        wanted = plan.placement.of(op_id)
        if wanted not in numbers[index]:
            return None
        chosen.append(numbers[index][wanted])
    table, choices = parted(problem.table, step, np.array(chosen, np.int64))
    if len(table.classes) == len(problem.table.classes):
        return problem, choices
    built = build(problem.step, problem.infos, table, problem.request)
    return replace(problem, table=table, built=built, program=built.program), choices


def _bound(problem: Any, choices: np.ndarray, plan: Plan) -> float:
    """What the plan proves of its program, where its cost is still what it was: an optimal one is its own bound."""
    cost = problem.program.cost(choices)
    if abs(cost - plan.cost.total_s) > 1e-6 * plan.cost.total_s or plan.objective != "step_time":
        return -np.inf
    return cost if plan.status == "optimal" else plan.lower_bound

"""From a traced step to its plan: the rematerialisation policies in turn, and one process for all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.agreement import facts_of_step, planned_once
from autoshard_ilp.garbage import old_objects_left
from autoshard_ilp.graph.equal import has_one_copy
from autoshard_ilp.graph.step import Step, graph_of, whole_graph
from autoshard_ilp.plan import Plan
from autoshard_ilp.processes import together
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request
from autoshard_ilp.search.anyplan import any_plan
from autoshard_ilp.search.attempt import Failure, assemble, attempt, free_peak_bytes, left_of, report_of
from autoshard_ilp.search.axes import of_all_axes
from autoshard_ilp.search.early import EarlyProofs
from autoshard_ilp.search.halving import Left
from autoshard_ilp.search.rematsearch import blocks_of, memory_share, recomputed_share, search
from autoshard_ilp.search.untied import without_ties

FREE_PART = 0.4
"""Of the time left: what proving a plan that recomputes all blocks may take, at first, where memory does not bind."""

BOUND_PART = 0.25
"""Of the time left: what a plan without recomputation may take, at first, where memory binds and others are allowed."""


PLAN_PART = 0.6
"""Of a policy's time: after this it is left if there is no plan, for the policies that hold less ..."""

LAST_PLAN_PART = 0.7
"""... and the last one for :mod:`autoshard_ilp.search.anyplan`."""

ALL_PART = 0.4
"""The same for a plan that recomputes all blocks where memory binds nevertheless: fewer of them may be faster."""


@old_objects_left()
def plan_traced(
    traced: Any, request: Request, progress: Progress, policies: Sequence[str], while_trip_count: int | None = None
) -> Plan:
    """Plans a Keras step; where several rematerialisation policies may be tried, with as little of it as fits.

    Of the processes of a ``jax.distributed`` job the first one plans, and the others receive its plan.

    Raises:
        InfeasibleError: none of them fits.
        PlanMismatchError: the processes of a job are about to plan different things.
    """

    one_copy = has_one_copy(request.profile)
    whole = functools.cache(lambda: whole_graph(traced, while_trip_count, one_copy=one_copy))

    def step(policy: str) -> Step:
        return graph_of(traced, policy, while_trip_count, whole(), one_copy=one_copy)

    with together("planning") as meeting:
        return planned_once(
            meeting,
            lambda: facts_of_step(step(policies[0]), traced, request, traced.mode),
            lambda: _search(traced, request, progress, policies, step),
            step,
        )


def _search(
    traced: Any, request: Request, progress: Progress, policies: Sequence[str], step: Callable[[str], Step]
) -> Plan:
    expected = Expected(policies)

    def tried(policy: str, seconds: float, cutoff: float, dear: float) -> Plan | Failure:
        before = expected.before(policy)
        with progress.stage("graph"):
            graph = step(policy) if before is None or before.executable is None else before.executable
        early.expect(graph.graph)
        known: dict[str, Any] = {"mode": traced.mode, "batch_size": traced.batch_size, **expected.of(policy)}
        known |= {"seconds": seconds, "cutoff": cutoff, "dear": dear, "before": before}
        known |= {"early": early if policy in policies else None, "tight": expected.tight}
        return expected.learn(policy, attempt(graph, traced, request, progress, **known))

    need, limit = needed_share(request), request.solver.time_limit
    began = clock()
    with EarlyProofs(request.objective) as early:
        found = search(policies, tried, blocks_of, limit, share=recomputed_share, dear=memory_share, need=need)
        if found.plan is None:
            make = _maker(request, progress, mode=traced.mode, batch_size=traced.batch_size)
            left = limit - (clock() - began)
            plan, failures = any_plan(found.failures, request, progress, make, left)
            return of_all_axes(with_history(plan, policies, failures))
        left = limit - (clock() - began)
        plan = without_ties(with_history(found.plan, policies, found.failures), progress, left, early)
        return of_all_axes(found.proved(plan))


def _maker(
    request: Request, progress: Progress, *, mode: str, batch_size: int, origin: Any = None, **_: Any
) -> Callable[[Failure, Any], Plan]:
    """Failure, its solution after all -> plan, as :func:`any_plan` wants it; some options are those of an attempt."""

    def make(failure: Failure, solution: Any) -> Plan:
        own = failure.step, failure.infos, request, progress, failure.table, failure.built, solution
        return assemble(*own, mode, batch_size, dict(origin or {}))

    return make


class Expected:
    """What attempts under one policy after the other have shown of the next one.

    Attributes:
        tight: something did not fit, or memory bound although all blocks recompute.
        bound: the last policy for all blocks recomputes, and memory binds nevertheless.
        asked: policies so far.
        left: where the last attempt under each of them ended.
        by_kind: plans of known kinds were better starts than prices.
        best: the fastest plan, if there is one.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self.policies = policies
        self.tight = self.bound = self.by_kind = False
        self.best: Plan | None = None
        self.asked: set[str] = set()
        self.left: dict[str, Left | None] = {}

    def of(self, policy: str) -> dict[str, Any]:
        """Whether memory binds, as far as is known, and how much of the time that may take (:func:`solve_divided`)."""
        if policy not in self.policies:  # some blocks: surely where it binds with all of them, else from some number on
            return {"surely": self.bound, "left_before": self.left.get(policy), "by_kind": self.by_kind}
        first, others = policy not in self.asked, len(self.policies) > 1
        share = first and others and self.policies[0] == "never"
        return {
            # Where all blocks recompute and it does not bind, fewer are worth more than the last of the proof.
            "free_part": FREE_PART if first and self.tight else 1.0,
            # Where it binds, more recomputation, or less of it, may be faster.
            "bound_part": BOUND_PART if share and policy == "never" else 1.0,
            "divided_part": ALL_PART if share and policy != "never" else 1.0,
            "left_before": self.left.get(policy),
            "plan_part": LAST_PLAN_PART if policy == self.policies[-1] else PLAN_PART,
        }

    def before(self, policy: str) -> Plan | None:
        """The fastest plan, if it is of this policy: what was read and priced for it holds."""
        return self.best if self.best is not None and self.best.remat_policy == policy else None

    def learn(self, policy: str, answer: Plan | Failure) -> Plan | Failure:
        """Notes what a policy gave, a plan or a failure, and returns what of it matters."""
        self.asked.add(policy)
        self.left[policy] = left_of(answer)
        self.by_kind = self.by_kind or bool(report_of(answer).get("by_kind"))
        if isinstance(answer, Plan) and (self.best is None or answer.cost.total_s < self.best.cost.total_s):
            self.best = answer
        if policy not in self.policies:
            return answer.without_tables() if isinstance(answer, Failure) and self.best is not None else answer
        self.bound = policy != "never" and isinstance(answer, Plan) and memory_share(answer) > 0
        self.tight = self.tight or self.bound or isinstance(answer, Failure)
        return answer


def needed_share(request: Request) -> Callable[[Plan | Failure], float]:
    """Answer -> share of the budget that the fastest plan without a budget would take, as a search wants it."""

    def share(answer: Plan | Failure) -> float:
        if request.capacity is None:
            return math.nan
        if isinstance(answer, Plan) and memory_share(answer) == 0:
            return answer.memory.peak_bytes / request.capacity
        return free_peak_bytes(answer, request) / request.capacity

    return share


def plan_step(step: Step, infos: Any, request: Request, progress: Progress, **options: Any) -> Plan:
    """:func:`attempt`; raises InfeasibleError when nothing fits."""
    began = clock()
    with EarlyProofs(request.objective) as early:
        early.expect(step.graph)
        found = attempt(step, infos, request, progress, early=early, **options)
        if isinstance(found, Failure):
            return of_all_axes(any_plan([found], request, progress, _maker(request, progress, **options))[0])
        return of_all_axes(without_ties(found, progress, request.solver.time_limit - (clock() - began), early))


def with_history(plan: Plan, policies: Sequence[str], failures: Sequence[Failure]) -> Plan:
    """The plan with what another question about it needs: policies to try, and those that did not fit."""
    assert plan.trail is not None
    kept = tuple(f for f in failures if f.step.remat in policies)  # those of a search between them hold much memory
    return replace(plan, trail=replace(plan.trail, policies=tuple(policies), failures=kept))

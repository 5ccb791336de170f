"""One traced step, priced for meshes and policies as they are asked for: what pareto, mesh search and sizing share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard_ilp.explore.again import Problem, problem_of, reprice
from autoshard_ilp.graph.equal import has_one_copy
from autoshard_ilp.plan import Plan

TRACE_OPTIONS = ("batch_size", "inputs", "targets", "sample_weight", "sequence_length", "mode")


@dataclass(eq=False)
class Source:
    """A step traced once.

    Attributes:
        infos: the trace.
        mode, batch_size, origin, notes: of the plans made from it.
        steps: graphs by rematerialisation policy and by whether equal casts are one copy, built when asked for.
        while_trip_count: as for ``optimize``.
        wholes: graphs before rematerialisation, by whether equal casts are one copy.
    """

    infos: Any
    mode: str
    batch_size: int
    origin: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    steps: dict[tuple[str, bool], Any] = field(default_factory=dict)
    while_trip_count: int | None = None
    wholes: dict[bool, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of_model(model: Any, mesh: Any, progress: Any, **options: Any) -> Source:
        """Traces a Keras model's step.

        Args:
            model: as for ``optimize``.
            mesh: a :class:`~autoshard_ilp.mesh.MeshSpec`; only its number of devices matters.
            options: of :data:`TRACE_OPTIONS`.
        """
        from autoshard_ilp.graph.step import trace

        with progress.stage("trace"):
            traced = trace(model, mesh, **{"mode": "train", **options})
        return Source(traced, traced.mode, traced.batch_size)

    @staticmethod
    def of_plan(plan: Plan) -> Source:
        """The step of a plan."""
        from autoshard_ilp.explore.whatif import with_trail

        plan = with_trail(plan)
        problem = problem_of(plan)
        steps = {(plan.remat_policy, problem.step.one_copy): problem.step}
        what = problem.infos, plan.mode, plan.batch_size, plan.origin, plan.notes, steps
        return Source(*what, problem.step.while_trip_count)

    def problem(self, policy: str, request: Any, progress: Any) -> Problem:
        """The step under a rematerialisation policy, priced for a mesh."""
        return reprice(self.step(policy, request.profile, progress), self.infos, request, progress)

    def different(
        self, policies: tuple[str, ...], profile: Any, progress: Any, between: bool = False
    ) -> tuple[str, ...]:
        """The policies without those that change nothing, or nothing that another one does not.

        Args:
            policies: in order.
            profile: of the hardware, or of one of them.
            progress: an :class:`autoshard_ilp.progress.Progress`.
            between: with several policies, also some that recompute only the first blocks.
        """
        from autoshard_ilp.graph.remat import Policy, recomputed_layers
        from autoshard_ilp.placement import fingerprint

        if len(policies) < 2:
            return policies
        kept = [policies[0]]
        seen = {fingerprint(self.step(policies[0], profile, progress).graph)}
        for policy in policies[1:]:
            step = self.step(policy, profile, progress)
            if not recomputed_layers(step.graph):
                continue
            rest = kept[-1].partition(":")[0]
            fewer = [str(Policy(policy, k, rest)) for k in blocks_between(step.blocks)] if between else []
            for one in (*fewer, policy):
                graph = fingerprint(self.step(one, profile, progress).graph)
                if graph not in seen:
                    kept.append(one)
                    seen.add(graph)
        return tuple(kept)

    def step(self, policy: str, profile: Any, progress: Any) -> Any:
        """The graph under a rematerialisation policy, as it is for hardware of a profile."""
        from autoshard_ilp.graph.step import graph_of, whole_graph

        if self.mode == "function":  # its plan's, which has the only policy
            return next(iter(self.steps.values()))
        one = has_one_copy(profile)
        if (policy, one) not in self.steps:
            with progress.stage("graph"):
                if one not in self.wholes:
                    self.wholes[one] = whole_graph(self.infos, self.while_trip_count, one_copy=one)
                own = (self.infos, policy, self.while_trip_count, self.wholes[one])
                self.steps[policy, one] = graph_of(*own, one_copy=one)
        return self.steps[policy, one]


def blocks_between(blocks: int) -> list[int]:
    """Numbers of recomputed blocks to look at: all but none and all where there are few, else the quarters."""
    return list(range(1, blocks)) if blocks <= 4 else sorted({blocks // 4, blocks // 2, 3 * blocks // 4})

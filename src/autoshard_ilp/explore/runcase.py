"""Plans one case of a sweep; whatever goes wrong becomes part of its row."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from autoshard_ilp import __version__
from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.explore.cases import OPTIMAL, Case
from autoshard_ilp.mesh import parse_mesh
from autoshard_ilp.progress import Progress

Row = dict[str, Any]


@cache
def versions() -> dict[str, str]:
    """Versions of everything that decides a result."""
    found = {p: importlib.metadata.version(p) for p in ("jax", "keras", "ortools")}
    return {"autoshard_ilp": __version__, **found, "python": platform.python_version()}


def empty_row(case: Case) -> Row:
    """What is known of a case before it is planned."""
    own = {k: v for k, v in case.__dict__.items() if k != "solver_workers"}
    return {"case": case.key, **own, "devices": parse_mesh(case.mesh).size, **versions()}


def failed_row(case: Case, kind: str, message: str, wall_s: float | None = None) -> Row:
    """A case that gave no answer."""
    return {**empty_row(case), "status": "failed", "error_type": kind, "error": message, "wall_s": wall_s, **_now()}


def _now() -> Row:
    return {"finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


class Planner:
    """Plans cases one after another; the last trace is kept for the next case.

    Args:
        models: name -> text ("hub:...", "module:factory"), builder or ``keras.Model``.
        profiles: hardware objects by name.
    """

    def __init__(self, models: Mapping[str, Any], profiles: Mapping[str, Any] | None = None) -> None:
        self.models, self.profiles = models, profiles or {}
        self._last: tuple[Any, Any] | None = None

    def __call__(self, case: Case) -> Row:
        """The finished row. KeyboardInterrupt passes through: the case is then not finished."""
        began = time.perf_counter()
        try:
            plan, seconds = self._plan(case)
        except InfeasibleError as error:
            row: Row = {"status": "infeasible", "error_type": "InfeasibleError", "error": str(error)}
            row["minimum_budget_bytes"] = error.minimum_budget
        except (MemoryError, Exception) as error:
            row = {"status": "failed", "error_type": type(error).__name__, "error": str(error)}
        else:
            row = {**_of_plan(plan), **seconds}
        return {**empty_row(case), **row, "wall_s": time.perf_counter() - began, **_now()}

    def _plan(self, case: Case) -> tuple[Any, Row]:
        from autoshard_ilp.baselines import plan_baseline
        from autoshard_ilp.planning import plan_traced
        from autoshard_ilp.program.model import SolverOptions
        from autoshard_ilp.request import check_request, remat_policies

        solver = SolverOptions(
            time_limit=case.time_limit_s,
            relative_gap=case.relative_gap,
            seed=case.seed,
            workers=case.solver_workers,
        )
        chip = self.profiles.get(case.hardware, case.hardware)
        request = check_request(parse_mesh(case.mesh), case.budget, chip, None, case.objective, solver)
        policies = remat_policies(case.remat, case.mode)
        progress = Progress(False)
        traced = self._traced(case, request.mesh, progress)
        if case.strategy == OPTIMAL:
            plan = plan_traced(traced, request, progress, policies)
        else:
            plan = plan_baseline(traced, request, case.strategy, progress, policies)
        if plan.trail is not None and plan.trail.solution.report.get("interrupted"):
            raise KeyboardInterrupt
        timings = plan.timings
        build = sum(timings.get(s, 0.0) for s in ("graph", "strategies", "costs"))
        solve = timings.get("solve", 0.0) + timings.get("presolve", 0.0)
        return plan, {"trace_s": timings.get("trace", 0.0), "build_s": build, "solve_s": solve}

    def _traced(self, case: Case, mesh: Any, progress: Progress) -> Any:
        from autoshard_ilp.graph.step import trace
        from autoshard_ilp.models import load_model_factory

        if self._last is not None and self._last[0] == case.trace_key:
            _check_batch(self._last[1].batch_size, mesh)
            return self._last[1]
        self._last = None
        model = self.models[case.model]
        if isinstance(model, str):
            model = load_model_factory(model, sequence_length=case.sequence_length)
        options = {"batch_size": case.batch_size, "sequence_length": case.sequence_length, "mode": case.mode}
        with progress.stage("trace"):
            traced = trace(model, mesh, **options)
        self._last = (case.trace_key, traced)
        return traced


def _check_batch(batch_size: int, mesh: Any) -> None:
    from autoshard_ilp.errors import InputShapeError
    from autoshard_ilp.explore.meshes import _batch_fits

    if reason := _batch_fits(batch_size, mesh):
        raise InputShapeError(f"The global batch must divide by at least one mesh axis. Received: {mesh}: {reason}.")


def _of_plan(plan: Any) -> Row:
    memory, cost = plan.memory, plan.cost
    parts = memory.parts
    return {
        "status": plan.status,
        "total_s": cost.total_s,
        "compute_s": cost.compute_s,
        "communication_s": cost.communication_s,
        "lower_bound_s": plan.lower_bound,
        "gap": plan.gap,
        "planned_batch_size": plan.batch_size,
        "budget_bytes": memory.budget_bytes,
        "peak_bytes": memory.peak_bytes,
        **{f"{name}_bytes": parts.get(name, 0) for name in ("parameters", "optimizer", "gradients", "activations")},
        "gathered_bytes": parts.get("gathered", 0),
        "recomputation": plan.remat_policy,
        "collectives": sum(c.count for c in plan.collectives),
        "sent_bytes": sum(c.count * c.bytes_per_device for c in plan.collectives),
        "program_hash": plan.placement.fingerprint[:16],
    }

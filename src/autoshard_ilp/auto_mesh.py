"""No mesh given: all devices that are attached, in the shape whose best plan is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.errors import InfeasibleError, InputShapeError
from autoshard_ilp.plan import Plan


def mesh_shapes(device_count: int) -> list[dict[str, int]]:
    """Every mesh of one or two axes, ``data`` (major) and ``model``, over so many devices."""
    pairs = [(a, device_count // a) for a in range(2, device_count) if device_count % a == 0]
    return [{"data": device_count}, *({"data": a, "model": b} for a, b in pairs)]


def attached_mesh(shape: dict[str, int]) -> Any:
    """``jax.sharding.Mesh`` of all attached devices, neighbours along an axis close to each other."""
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    devices = mesh_utils.create_device_mesh(tuple(shape.values()), jax.devices(), allow_split_physical_axes=True)
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def plan_without_mesh(
    model: Any, check: Any, policies: Sequence[str], progress: Any, while_trip_count: int | None = None, **options: Any
) -> tuple[Any, Any, Plan]:
    """Plans one traced step on every mesh shape of the attached devices.

    Returns:
        The traced step, the request of the best mesh, and the fastest plan, with a note of the others.

    Args:
        model: see :func:`autoshard_ilp.optimize`.
        check: mesh -> the checked request (:class:`autoshard_ilp.request.Request`).
        policies: rematerialisation policies to try.
        progress: :class:`autoshard_ilp.progress.Progress`, running.
        while_trip_count: iterations that a loop of unknown length is priced at.
        options: of the trace.

    Raises:
        InfeasibleError: no shape has a plan that fits; the error of the shape that needs least.
        InputShapeError: the batch divides by no axis of any shape.
    """
    import jax

    from autoshard_ilp.keras_integration import ensure_jax_backend
    from autoshard_ilp.planning import plan_traced
    from autoshard_ilp.trace import trace_model

    ensure_jax_backend()
    requests = [check(attached_mesh(shape)) for shape in mesh_shapes(jax.device_count())]
    plans: list[tuple[Any, Plan]] = []
    failures: list[InfeasibleError] = []
    with progress.stage("trace"):
        traced = trace_model(model, device_count=jax.device_count(), **options)
    for request in requests:
        if traced.batch_size > 1 and all(traced.batch_size % s for s in request.mesh.axis_sizes if s > 1):
            continue
        try:
            plans.append((request, plan_traced(traced, request, progress, policies, while_trip_count)))
        except InfeasibleError as error:
            failures.append(error)
    if not plans and not failures:
        raise InputShapeError(
            f"The global batch must divide by at least one mesh axis. Received: batch_size={traced.batch_size} and "
            f"{jax.device_count()} devices. Use a multiple of 2, or give a mesh."
        )
    if not plans:
        raise min(failures, key=lambda e: e.minimum_budget or float("inf"))
    request, best = min(plans, key=lambda found: (found[1].cost.total_s, len(found[1].mesh.axis_names)))
    seconds = ", ".join(f"{p.mesh}: {p.cost.total_s * 1e3:.3f} ms" for _, p in plans)
    note = f"Mesh chosen by step time among {seconds}."
    return traced, request, replace(best, notes=(*best.notes, note))

"""The main job: from a model and a mesh to a proved plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard_ilp.arguments import flag
from autoshard_ilp.auto_mesh import plan_without_mesh
from autoshard_ilp.graph.step import check_trip_count, trace
from autoshard_ilp.plan import Plan
from autoshard_ilp.planning import plan_traced
from autoshard_ilp.processes import announced
from autoshard_ilp.program.kernels.ahead import compile_ahead
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request, check_request, remat_policies
from autoshard_ilp.verified import target_of, until_it_fits


@announced
def optimize(
    model: Any,
    mesh: Any = None,
    memory_budget: str | int | None = None,
    *,
    hardware: Any = None,
    batch_size: int | None = None,
    inputs: Any = None,
    targets: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    mode: str = "train",
    pins: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    solver: SolverOptions | None = None,
    remat: str = "auto",
    strict: bool = False,
    while_trip_count: int | None = None,
    verify: bool = False,
    target: str | None = None,
    progress: Any = None,
) -> Plan:
    """Finds the fastest layout of every tensor of a Keras model's step within a memory budget, and proves it.

    Args:
        model: a ``keras.Model``, or a callable without arguments that builds (and compiles) one; it is built
            abstractly, nothing is allocated.
        mesh: ``jax.sharding.Mesh``, ``AbstractMesh``, ``keras.distribution.DeviceMesh`` or ``{"data": 2, "model": 4}``;
            None: all attached devices, in the shape of one or two axes whose plan is fastest.
        memory_budget: per device: "16GB" (10**9), "16GiB" (2**30) or bytes; None: the profile's usable memory.
        hardware: profile name ("tpu-v5e", or with the slice's shape "tpu-v5e:4x4"), ``HardwareProfile``, or path of a
            TOML; None: from the mesh's devices, else "cpu-host".
        batch_size: global batch; None: from ``inputs``, else 32 rounded up to a multiple of the device count.
        inputs, targets, sample_weight: pytrees of arrays, ``ShapeDtypeStruct`` or ``KerasTensor`` of one global batch.
        sequence_length: size of unknown dimensions such as that of token ids.
        mode: "train" (the whole step) or "predict" (forward only).
        pins: ``{regex on a path: PartitionSpec or tuple}``, always honoured or named as the conflict.
        objective: "step_time" or "communication".
        solver: time limit, gap, seed, ...
        remat: "auto": as many layers as the budget asks for recompute their activations, ``plan.remat`` names them
            (:mod:`.search.rematsearch`); "never"; or "selective", "full", "full:6" (:mod:`.remat`).
        strict: an unknown primitive is an error instead of being kept whole.
        while_trip_count: iterations that each while loop is priced at; None: what its own constants say, else one.
        verify: compile the plan, and plan again with the measured correction while the compiled peak memory exceeds
            the budget (:mod:`autoshard_ilp.verified`); ``plan.notes`` has the outcome.
        target: what ``verify`` compiles for, such as "tpu-v5e:4x4"; None: the mesh's devices, or the hardware's name.
        progress: None: shown on a terminal or in a notebook; True, False, or a callable that receives dictionaries.

    Returns:
        The plan, with its lower bound and gap.

    Raises:
        InputShapeError: mesh, batch, budget, pins or inputs that make no sense.
        UnsupportedModelError: not a Keras model on JAX that can be traced.
        ProfileError: unknown or unsuitable hardware.
        InfeasibleError: no plan fits the budget and the pins; carries the smallest budget that does.
    """
    policies = remat_policies(remat, mode)
    check_trip_count(while_trip_count)
    flag("verify", verify)
    if target is not None:
        from autoshard_ilp.verify.targets import parse_target

        parse_target(target)
    options = {
        "batch_size": batch_size,
        "inputs": inputs,
        "targets": targets,
        "sample_weight": sample_weight,
        "sequence_length": sequence_length,
        "mode": mode,
    }

    def check(shape: Any) -> Request:
        return check_request(shape, memory_budget, hardware, pins, objective, solver, strict)

    request = None if mesh is None else check(mesh)
    with Progress(progress).running() as shown:
        compile_ahead()
        if request is None:
            traced, request, plan = plan_without_mesh(model, check, policies, shown, while_trip_count, **options)
        else:
            with shown.stage("trace"):
                traced = trace(model, request.mesh, **options)
            plan = plan_traced(traced, request, shown, policies, while_trip_count)
        if not verify and target is None:
            return plan
        return until_it_fits(
            plan,
            request.capacity,
            lambda c: plan_traced(traced, replace(request, capacity=c), shown, policies, while_trip_count),
            lambda: target or target_of(request.mesh, request.profile, request.physical_shape),
            shown,
        )


def load(path: Any, model: Any = None, **inputs: Any) -> Plan:
    """Reads a plan file; with ``model`` the plan can run again.

    Args:
        path: of the file.
        model: a Keras model or builder; for a plan of :func:`autoshard_ilp.optimize_fn`, the function.
        inputs: see :meth:`autoshard_ilp.plan.Plan.bind`.

    Raises:
        PlanFileError: the file is missing, damaged, foreign or newer.
        PlanMismatchError: the plan was made for another model or function; says what differs.
    """
    from autoshard_ilp.saved.planfile import load as read

    plan = read(path)
    return plan if model is None else plan.bind(model, **inputs)

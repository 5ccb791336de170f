"""The main job: from a model and a mesh to a proved plan. Each function here reads as the chain of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp.agreement import facts_of_step, planned_once
from autoshard_ilp.arguments import flag, mapping
from autoshard_ilp.costs.overlap import overlap_notes
from autoshard_ilp.errors import InfeasibleError, InputShapeError, ProfileError, UnsupportedModelError
from autoshard_ilp.garbage import collector_paused
from autoshard_ilp.halving import solve_halved, within
from autoshard_ilp.mesh import MeshSpec, as_mesh
from autoshard_ilp.pins import Allowed, Pinned, path_shapes, resolve_pins, whole_seeds
from autoshard_ilp.plan import Plan, Trail, leaves
from autoshard_ilp.processes import announced, together
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.progress import Progress
from autoshard_ilp.rematsearch import recomputed_share, search
from autoshard_ilp.step import Step, check_trip_count, graph_of, loop_notes, trace
from autoshard_ilp.units import format_bytes, parse_bytes
from autoshard_ilp.verified import target_of, until_it_fits

ROLES = {
    "parameter": "parameters",
    "optimizer": "optimizer",
    "non_trainable": "state",
    "metric": "state",
    "seed": "state",
    "state": "state",
}
"""Memory category of an argument's role; everything else counts as inputs."""


MOST_BYTES = 2**62
"""Budgets above this are no constraint, and 64-bit integers end not far from it."""


@dataclass(frozen=True)
class Request:
    """Options of one planning run, checked."""

    mesh: MeshSpec
    profile: Any
    physical_shape: str | None
    capacity: int
    pins: Mapping[str, Any] | None
    objective: str
    solver: SolverOptions
    restriction: Callable[[Mapping[str, tuple[int, ...]]], Allowed] | None = None


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
            (:mod:`autoshard_ilp.rematsearch`); "never"; or "selective", "full", "full:6" (:mod:`autoshard_ilp.remat`).
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
        if request is None:
            from autoshard_ilp.auto_mesh import plan_without_mesh

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


def plan_traced(
    traced: Any, request: Request, progress: Progress, policies: Sequence[str], while_trip_count: int | None = None
) -> Plan:
    """Plans a Keras step; where several rematerialisation policies may be tried, with as little of it as fits.

    Of the processes of a ``jax.distributed`` job the first one plans, and the others receive its plan.

    Raises:
        InfeasibleError: none of them fits.
        PlanMismatchError: the processes of a job are about to plan different things.
    """

    def step(policy: str) -> Step:
        return graph_of(traced, policy, while_trip_count)

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
    def tried(policy: str, seconds: float) -> Plan | Failure:
        with progress.stage("graph"):
            graph = step(policy)
        known = {"mode": traced.mode, "batch_size": traced.batch_size, "seconds": seconds}
        answer = attempt(graph, traced, request, progress, **known)
        return answer if policy in policies else without_tables(answer)

    blocks, limit = (lambda failed: failed.step.blocks), request.solver.time_limit
    found = search(policies, tried, blocks, limit, share=recomputed_share)
    if found.plan is None:
        raise infeasible(found.failures, request)
    return with_history(found.plan, policies, found.failures)


def without_tables(answer: Plan | Failure) -> Plan | Failure:
    """A failure of the search between policies says only that it failed: its tables would hold much memory."""
    return answer if isinstance(answer, Plan) else replace(answer, table=None, built=None)


def with_history(plan: Plan, policies: Sequence[str], failures: Sequence[Failure]) -> Plan:
    """The plan with what another question about it needs: policies to try, and those that did not fit."""
    assert plan.trail is not None
    kept = tuple(f for f in failures if f.step.remat in policies)  # those of a search between them hold much memory
    return replace(plan, trail=replace(plan.trail, policies=tuple(policies), failures=kept))


def check_request(
    mesh: Any,
    memory_budget: str | int | None,
    hardware: Any,
    pins: Mapping[str, Any] | None,
    objective: str,
    solver: SolverOptions | None,
    strict: bool = False,
    restriction: Any = None,
) -> Request:
    """Checks everything that can be checked before the model is looked at."""
    from autoshard_ilp.costs.build import OBJECTIVES

    mapping("pins", pins, '{"query/kernel": PartitionSpec(None, "model")}')
    flag("strict", strict)
    where = as_mesh(mesh)
    profile, shape = _profile(hardware, where)
    if objective not in OBJECTIVES:
        raise InputShapeError(f"objective is one of {OBJECTIVES}. Received: {objective!r}.")
    options = SolverOptions() if solver is None else solver
    if not isinstance(options, SolverOptions):
        raise InputShapeError(f"solver is an autoshard_ilp.SolverOptions. Received: {options!r}.")
    capacity = profile.usable_memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    capacity = min(capacity, MOST_BYTES)
    if strict:
        options = replace(options, strict=True)
    return Request(where, profile, shape, capacity, pins, objective, options, restriction)


def remat_policies(remat: str, mode: str) -> tuple[str, ...]:
    """Rematerialisation policies to try, in order."""
    from autoshard_ilp.remat import POLICIES, parse_policy

    policies = POLICIES if remat == "auto" else (str(parse_policy(remat)),)
    return policies if mode == "train" else ("never",)


def _profile(hardware: Any, mesh: MeshSpec) -> tuple[Any, str | None]:
    """The profile, and the slice's physical shape where ``hardware`` names one ("tpu-v5e:4x4")."""
    from autoshard_ilp.costs.profile import load_profile, profile_for_device_kind

    found = profile_for_device_kind(mesh.device_kind) if mesh.device_kind else None
    if hardware is None:
        if mesh.device_kind and found is None:
            raise ProfileError(
                f"A mesh's devices need a hardware profile. Received: devices of kind {mesh.device_kind!r}, which no "
                "profile names. Pass hardware= a profile name, or the path of a TOML for these devices."
            )
        return load_profile(found or "cpu-host"), None
    shape = None
    if isinstance(hardware, str) and ":" in hardware and not hardware.endswith(".toml"):
        hardware, _, shape = hardware.partition(":")
    profile = load_profile(hardware)
    if shape is not None and profile.torus is None and not shape.isdecimal():
        raise ProfileError(
            f"What follows the name of {profile.name!r} is a number of devices. Received: {shape!r}. Drop it, or write "
            f'"{profile.name}:{mesh.size}".'
        )
    shape = shape if profile.torus is not None else None  # "h100:8" says how many, which the mesh says already
    if found is not None and found != "cpu-host" and load_profile(found).family != profile.family:
        raise ProfileError(
            f"The profile must be for the mesh's own devices (CPU devices may stand in for any). Received: "
            f"hardware={profile.name!r} for devices of kind {mesh.device_kind!r}. Drop hardware=, or pass {found!r}."
        )
    return profile, shape


@dataclass(frozen=True, eq=False)
class Failure:
    """A step for which no plan was found, with what explains it."""

    step: Step
    infos: Any
    table: Any
    built: Any
    solution: Any
    pinned: Pinned


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
) -> Plan | Failure:
    """Plans a graph: strategies and costs, program, solution, plan. ``infos`` has ``arguments`` and ``results``.

    ``seconds`` shortens the solver's time limit; the plan's own options keep it, for questions that follow.
    """
    from autoshard_ilp.program import solve

    def priced(halved: bool) -> _Priced:
        with progress.stage("strategies"):
            table, pinned = price(step.graph, request, halved)
        with progress.stage("costs"):
            return _Priced(table, build(step, infos, table, request), pinned)

    def solved(problem: _Priced, hint: Any, seconds: float, rows_seconds: float | None) -> Any:
        options = within(request.solver, seconds)
        with progress.stage("solve"):
            return solve(problem.program, options, hint=hint, rows_seconds=rows_seconds, on_progress=progress.tell)

    limit = min(seconds, request.solver.time_limit)
    found, solution, notes = solve_halved(priced(False), solved, lambda: priced(True), limit)
    table, built = found.table, found.built
    if solution.status == "infeasible" or solution.choices is None:
        return Failure(step, infos, table, built, solution, found.pinned)
    plan = assemble(step, infos, request, progress, table, built, solution, mode, batch_size, dict(origin or {}))
    return replace(plan, notes=(*plan.notes, *notes))


@dataclass(frozen=True, eq=False)
class _Priced:
    """A cost table and the program built from it."""

    table: Any
    built: Any
    pinned: Pinned

    @property
    def program(self) -> Any:
        """The program, as :func:`autoshard_ilp.halving.solve_halved` wants it."""
        return self.built.program


@collector_paused()
def build(step: Step, infos: Any, table: Any, request: Request) -> Any:
    """The integer program of a cost table."""
    from autoshard_ilp.costs.build import build_program

    roles = {op: ROLES.get(infos.arguments[i].role, "inputs") for i, op in enumerate(step.graph.arguments)}
    return build_program(table, roles, capacity=request.capacity, objective=request.objective)


def plan_step(step: Step, infos: Any, request: Request, progress: Progress, **options: Any) -> Plan:
    """:func:`attempt`; raises InfeasibleError when nothing fits."""
    found = attempt(step, infos, request, progress, **options)
    if isinstance(found, Failure):
        raise infeasible([found], request)
    return found


@collector_paused()
def price(graph: Any, request: Request, halved: bool = False) -> tuple[Any, Pinned]:
    """The cost table of a graph, and the pins it honours; ``halved`` as in :func:`build_table`."""
    from autoshard_ilp.costs.collectives import CollectiveCosts
    from autoshard_ilp.costs.table import build_table
    from autoshard_ilp.costs.topology import MeshLinks
    from autoshard_ilp.rules import rule_for

    mesh = request.mesh
    shapes = path_shapes(graph)
    pinned = resolve_pins(request.pins, shapes, mesh.axis_names, mesh.axis_sizes)
    if request.restriction is not None:
        pinned = Pinned({**request.restriction(shapes), **pinned.allowed}, pinned.sources)
    pinned = Pinned({**whole_seeds(graph, len(mesh.axis_names)), **pinned.allowed}, pinned.sources)
    links = MeshLinks.create(request.profile, mesh.axis_names, mesh.axis_sizes, request.physical_shape)
    table = build_table(
        graph,
        rule_for,
        mesh.axis_names,
        mesh.axis_sizes,
        request.profile,
        CollectiveCosts(links),
        restriction=pinned.restrict,
        restriction_key=pinned.key,
        fold_layers=request.solver.fold_layers,
        halved=halved,
    )
    if table.unknown and request.solver.strict:
        raise UnsupportedModelError(
            "Under strict=True every primitive needs a sharding rule. Received: "
            + "; ".join(table.unknown[:5])
            + ". Add a rule (src/autoshard_ilp/rules/README.md), or plan without strict to keep these whole."
        )
    return table, pinned


def infeasible(failures: Sequence[Failure], request: Request) -> InfeasibleError:
    """The error of a step that fits under no rematerialisation policy; the smallest budget is that of the best one."""
    from autoshard_ilp.program import minimum_capacity
    from autoshard_ilp.report import peak_memory

    pins = list(dict.fromkeys(text for texts in failures[0].pinned.sources.values() for text in texts))
    if any(f.solution.status != "infeasible" for f in failures):
        return InfeasibleError(
            f"No plan was found within the time limit of {request.solver.time_limit:g} s. Received: a budget of "
            f"{format_bytes(request.capacity)}. Raise SolverOptions(time_limit=...) or the budget.",
            conflicts=pins,
        )
    try:
        found = [(f.built, *minimum_capacity(f.built.program, request.solver)) for f in failures]
    except InfeasibleError:
        return InfeasibleError(
            f"The pins must leave a layout for every tensor at some budget. Received: {', '.join(pins)}, which leave "
            "none. Drop or widen one of them.",
            conflicts=pins,
        )
    built, _, upper, choices = min(found, key=lambda item: item[2])
    lower = min(item[1] for item in found)
    memory = peak_memory(built, choices, request.capacity)
    largest = "; ".join(f"{label} {format_bytes(size)}" for label, size in memory.contributors[:5])
    proved = "" if lower == upper else f" (proved: not below {format_bytes(lower)})"
    pins = _pins_at_fault(failures, request, pins)
    named = f" It fits without the pins {', '.join(pins)}." if pins else ""
    return InfeasibleError(
        f"No plan fits the memory budget. Received: {format_bytes(request.capacity)} per device on a mesh of "
        f"{request.mesh}. The smallest budget that fits is {format_bytes(upper)}{proved}; at its peak: {largest}."
        f"{named} Raise memory_budget, use more devices, or a smaller batch.",
        minimum_budget=upper,
        minimum_budget_bound=lower,
        contributors=memory.contributors,
        conflicts=pins,
    )


def _pins_at_fault(failures: Sequence[Failure], request: Request, pins: list[str]) -> list[str]:
    """The pins, when the budget would do without them; none, when it is too small all the same."""
    from autoshard_ilp.program import minimum_capacity

    free = replace(request, pins=None)
    for failure in failures if pins else ():
        table, _ = price(failure.step.graph, free)
        program = build(failure.step, failure.infos, table, free).program
        _, upper, _ = minimum_capacity(program, request.solver, enough=request.capacity)
        if upper <= request.capacity:
            return pins
    return []


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
    from autoshard_ilp.binding import signature_of
    from autoshard_ilp.course import course_of
    from autoshard_ilp.placement import place
    from autoshard_ilp.remat import recomputed_layers
    from autoshard_ilp.report import peak_memory, planned_collectives, total_cost

    graph, choices = step.graph, solution.choices
    placement = place(table, choices)
    collectives = planned_collectives(table, choices)
    cost = total_cost(table, choices, collectives)
    timings = dict(progress.seconds)
    inside = solution.report.get("seconds", {})
    timings["presolve"] = float(inside.get("presolve", 0.0))
    timings["solve"] = max(0.0, timings.get("solve", 0.0) - timings["presolve"])
    notes: tuple[str, ...] = ()
    if any(len(c.members) > 1 for c in table.classes):
        shared = "share two decisions, one for each half of them" if table.halved else "share one decision"
        notes = (f"Repeated layers {shared}; optimality is proved for that problem.",)
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
        origin={**_recipe(request), **({"halved": True} if table.halved else {}), **origin},
        signature=signature_of(step),
        remat_policy=step.remat,
        remat=recomputed_layers(graph),
        executable=step,
        trail=Trail(
            getattr(infos, "closed_jaxpr", None), graph, table, built.program, built, solution, infos, request, request
        ),
    )


def _recipe(request: Request) -> dict[str, Any]:
    """The options that a plan file keeps, so that questions about a loaded plan mean the same problem."""
    hardware = request.profile.name + (f":{request.physical_shape}" if request.physical_shape else "")
    pins = {
        text: [spec]
        if spec is None or isinstance(spec, str)
        else [list(e) if isinstance(e, tuple) else e for e in spec]
        for text, spec in (request.pins or {}).items()
    }
    return {"hardware": hardware, "pins": pins} if pins else {"hardware": hardware}


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
    from autoshard_ilp.planfile import load as read

    plan = read(path)
    return plan if model is None else plan.bind(model, **inputs)

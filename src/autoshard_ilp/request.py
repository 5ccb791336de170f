"""Options of one planning run, checked before the model is looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard_ilp.arguments import flag, is_one_of, mapping
from autoshard_ilp.errors import InputShapeError, ProfileError
from autoshard_ilp.mesh import MeshSpec, as_mesh
from autoshard_ilp.pins import Allowed
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.units import parse_bytes

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
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Prices of a mesh, for all steps that this request compares (:mod:`~autoshard_ilp.costs.prices`)."""


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
    if not is_one_of(objective, OBJECTIVES):
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
    from autoshard_ilp.graph.remat import POLICIES, parse_policy

    policies = POLICIES if is_one_of(remat, ("auto",)) else (str(parse_policy(remat)),)
    return policies if is_one_of(mode, ("train",)) else ("never",)


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
    if shape is not None and profile.torus is None:  # "h100:8" says how many, which the mesh says already
        if int(shape) != mesh.size:
            raise ProfileError(
                f"The number after the name of {profile.name!r} is that of the mesh's devices. Received: {shape} and a "
                f"mesh of {mesh.size} ({mesh}). Drop it, or change the mesh."
            )
        shape = None
    if found is not None and found != "cpu-host" and load_profile(found).family != profile.family:
        raise ProfileError(
            f"The profile must be for the mesh's own devices (CPU devices may stand in for any). Received: "
            f"hardware={profile.name!r} for devices of kind {mesh.device_kind!r}. Drop hardware=, or pass {found!r}."
        )
    return profile, shape


def recipe(request: Request) -> dict[str, Any]:
    """The options that a plan file keeps, so that questions about a loaded plan mean the same problem."""
    hardware = request.profile.name + (f":{request.physical_shape}" if request.physical_shape else "")
    pins = {
        text: [spec]
        if spec is None or isinstance(spec, str)
        else [list(e) if isinstance(e, tuple) else e for e in spec]
        for text, spec in (request.pins or {}).items()
    }
    return {"hardware": hardware, "pins": pins} if pins else {"hardware": hardware}

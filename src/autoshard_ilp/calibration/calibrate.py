"""``autoshard.calibrate``: a hardware profile of the attached devices, measured."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard_ilp.arguments import file_path, whole_number
from autoshard_ilp.calibration.fit import Residual, fit
from autoshard_ilp.costs.profile import HardwareProfile, load_profile, profile_for_device_kind
from autoshard_ilp.costs.profile_file import to_toml
from autoshard_ilp.errors import InputShapeError, ProfileError
from autoshard_ilp.files import write_whole
from autoshard_ilp.mesh import MeshSpec, as_mesh


def calibrate(
    mesh: Any = None,
    *,
    output: str | os.PathLike[str] | None = None,
    hardware: Any = None,
    name: str | None = None,
    payload_bytes: Sequence[int] | None = None,
    matmul_sizes: Sequence[int] | None = None,
    repeats: int = 5,
    target_seconds: float = 0.05,
    time_limit: float = 120.0,
    progress: Any = None,
) -> HardwareProfile:
    """Measures collectives, matrix products and passes over memory on a mesh's devices and fits a hardware profile.

    One device is enough for the compute side; the links then stay those of the base profile.

    Args:
        mesh: as for ``optimize``, with attached devices; None: all attached devices on one axis.
        output: path of the TOML to write, with the residuals; None: nothing is written.
        hardware: profile to correct (structure of the links, nominal peaks); None: that of the devices' kind, else
            "cpu-host".
        name: of the new profile; None: the old name with "-measured".
        payload_bytes: sizes of the collectives; None: 1 KiB to 64 MiB.
        matmul_sizes: sides of the square matrices; None: 256 to 2048, on GPUs to 8192, and narrow ones.
        repeats: runs per measurement; the fastest counts.
        target_seconds: length of one run.
        time_limit: seconds after which no further measurement begins (one takes from tenths of a second to a few
            seconds, its compilation included). Every kind is measured at its smallest and largest size first.
        progress: as for ``optimize``; a callable is told ``{"stage", "done", "total"}``.

    Returns:
        The profile; ``.residuals`` says per kind how far it is from what was measured.

    Raises:
        InputShapeError: sizes or repeats that make no sense.
        PlanMismatchError: fewer devices are attached than the mesh has.
        ProfileError: the devices' kind has no profile to start from, or the output cannot be written.
    """
    from autoshard_ilp.calibration import timing
    from autoshard_ilp.progress import Progress

    where = _mesh(mesh)
    devices = where.concrete()
    base = _base(hardware, devices)
    sizes = _sizes("payload_bytes", payload_bytes, timing.PAYLOAD_BYTES)
    sides = None if matmul_sizes is None else _sizes("matmul_sizes", matmul_sizes, ())
    whole_number("repeats", repeats)
    _positive("target_seconds", target_seconds)
    _positive("time_limit", time_limit)
    _check_name(name)
    target = _writable(output)
    total = len(timing.grid(devices, sizes, sides))
    shown = Progress(progress)
    with shown.running(), shown.stage("measure"):

        def told(done: int, total: int, what: str) -> None:
            shown.tell({"stage": f"measure {what} ({done + 1} of {total})", "done": done, "total": total})

        samples = list(
            timing.measure(
                devices,
                payload_bytes=sizes,
                matmul_sizes=sides,
                repeats=repeats,
                target_seconds=target_seconds,
                time_limit=time_limit,
                told=told,
            )
        )
    if len(samples) < total:
        warnings.warn(
            f"The time limit of {time_limit:g} s ended the calibration after {len(samples)} of {total} measurements. "
            "What was not measured is interpolated, or stays as in the base profile. Raise time_limit for more.",
            stacklevel=2,
        )
    fitted, residuals = fit(base, where, samples)
    label = name or f"{base.name.removesuffix('-measured')}-measured"
    profile = _labelled(_with_memory(fitted, devices), base, label, where, residuals)
    if target is not None:
        try:
            write_whole(target, to_toml(profile).encode())
        except OSError as error:
            raise ProfileError(f"output is a file that can be written. Received: {target} ({error}).") from error
    return profile


def _mesh(mesh: Any) -> MeshSpec:
    if mesh is not None:
        return as_mesh(mesh)
    import jax

    return as_mesh({"devices": jax.device_count()})


def _base(hardware: Any, devices: Any) -> HardwareProfile:
    if hardware is not None:
        return load_profile(hardware)
    kind = devices.devices.flat[0].device_kind
    found = profile_for_device_kind(kind)
    if found is None:
        raise ProfileError(
            f"Calibration corrects a profile of the same kind of machine. Received: devices of kind {kind!r}, which no "
            "profile names. Pass hardware= the profile that comes nearest."
        )
    return load_profile(found)


def _sizes(what: str, given: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    sizes = tuple(default if given is None else given if several else ())
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise InputShapeError(f"{what} are positive whole numbers such as [1024, 4096]. Received: {given!r}.")
    return sizes


def _positive(what: str, seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InputShapeError(f"{what} is a positive number of seconds. Received: {seconds!r}.")


def _check_name(name: Any) -> None:
    fine = isinstance(name, str) and name.strip() and name.isprintable() and not set(name) & set("/\\:")
    if name is not None and not fine:
        raise InputShapeError(
            f"name is a text of printable characters, without a slash, backslash or colon. Received: {name!r}. Pass "
            "another, or None for the old name with -measured."
        )


def _writable(output: str | os.PathLike[str] | None) -> Path | None:
    """The output's path, checked before minutes are spent on measuring."""
    if output is None:
        return None
    path = file_path(output)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise ProfileError(f"output is a path ending in .toml in an existing folder. Received: {str(output)!r}.")
    return path


def _with_memory(profile: HardwareProfile, devices: Any) -> HardwareProfile:
    """Memory as the runtime reports it; on a host its own memory, shared by the devices."""
    first = devices.devices.flat[0]
    stats = first.memory_stats() or {}
    if "bytes_limit" in stats:
        usable = int(stats["bytes_limit"])
        return replace(profile, usable_memory_bytes=usable, memory_bytes=max(usable, profile.memory_bytes))
    if profile.family != "cpu" or not hasattr(os, "sysconf"):
        return profile
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices.size
    return replace(profile, memory_bytes=share, usable_memory_bytes=share)


def _labelled(
    profile: HardwareProfile, base: HardwareProfile, name: str, mesh: MeshSpec, residuals: Mapping[str, Residual]
) -> HardwareProfile:
    """Sources: what changed was measured, the rest is as the base says."""
    import jax

    today = datetime.date.today().isoformat()
    kind = jax.devices()[0].device_kind
    measured = f"measured: autoshard.calibrate on {mesh.size} x {kind} ({mesh}), jax {jax.__version__}, {today}"
    sources = {}
    for key, value in profile.figures().items():
        kept = base.figures().get(key) == value and key in base.figure_sources
        sources[key] = base.figure_sources[key] if kept else measured
    errors = {k: {"median": r.median, "worst": r.worst, "samples": r.samples} for k, r in residuals.items()}
    description = f"{base.description.split('; calibrate')[0]}; measured {today}"
    return replace(profile, name=name, description=description, figure_sources=sources, residuals=errors)

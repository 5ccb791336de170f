"""``optimize(..., verify=True)``: the compiler has the last word on whether a plan fits.

A plan's peak memory is a prediction. The loop here compiles the plan for its target; when the compiled peak exceeds the
budget, the step is planned again for a smaller capacity, by as much as the compiler exceeded the last prediction, until
the compiled program fits or nothing smaller can be planned. Where nothing that small can be planned, the smallest plan
is compiled, too: other layouts, other errors. ``plan.notes`` says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoshard_ilp.errors import InfeasibleError, TargetError
from autoshard_ilp.plan import Plan
from autoshard_ilp.progress import Progress
from autoshard_ilp.units import format_bytes

MAX_COMPILES = 5
"""Compilations at most: each takes seconds (GPU) to minutes (TPU)."""

LEAST_STEP = 0.01
"""A new capacity is smaller than the last by at least this share, so that rounds are not lost to crumbs."""

_OUT_OF_MEMORY = ("resource_exhausted", "out of memory", "ran out of memory", "exceeded hbm", "exceeds the memory")
_USED = re.compile(r"[Uu]sed\s+([\d.]+)\s*([KMGT]?)i?B?\s+of\s+[\d.]+\s*[KMGT]?i?B?", re.ASCII)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def target_of(mesh: Any, profile: Any, physical_shape: str | None) -> str | None:
    """The compiler of a plan's own hardware: None for real devices of the mesh, else a target's name.

    Args:
        mesh: :class:`~autoshard_ilp.mesh.MeshSpec`.
        profile: :class:`~autoshard_ilp.costs.profile.HardwareProfile`.
        physical_shape: the slice's shape, where the user named one.

    Raises:
        TargetError: no compiler makes programs for this profile.
    """
    from autoshard_ilp.verify.targets import parse_target

    if mesh.device_kind:
        return None
    name = profile.name if physical_shape is None else f"{profile.name}:{physical_shape}"
    if profile.family == "cpu":
        return "cpu"
    return str(parse_target(name))


def until_it_fits(
    plan: Plan,
    budget_bytes: int,
    again: Callable[[int], Plan],
    target: Callable[[], str | None],
    progress: Progress,
    peak_of: Callable[[Plan, str | None], int] | None = None,
) -> Plan:
    """Plans again until the compiled program fits the budget.

    Args:
        plan: the plan to begin with.
        budget_bytes: per device.
        again: capacity in bytes -> a plan; raises InfeasibleError.
        target: gives the target to compile for; may raise TargetError.
        progress: shows each compilation.
        peak_of: (plan, target) -> compiled peak bytes per device.

    Returns:
        The first plan that fits, else the one that exceeds the budget least; ``notes`` say which.
    """
    try:
        where = target()
        return _until_it_fits(plan, budget_bytes, again, where, progress, peak_of or compiled_peak)
    except TargetError as error:
        return _noted(plan, budget_bytes, f"Not verified: {error}")


def _until_it_fits(
    plan: Plan, budget: int, again: Callable[[int], Plan], target: str | None, progress: Progress, peak_of: Any
) -> Plan:
    best, least, capacity, course = plan, None, budget, []
    reason = f"{MAX_COMPILES} compilations did not find a plan that does"
    for _ in range(MAX_COMPILES):
        with progress.stage("verify"):
            peak = peak_of(plan, target)
        progress.tell({"stage": "verify", "compiled_peak_bytes": float(peak), "budget_bytes": float(budget)})
        course.append(f"{format_bytes(plan.memory.peak_bytes)} predicted, {format_bytes(peak)} compiled")
        if least is None or peak < least:
            best, least = plan, peak
        if peak <= budget or len(course) == MAX_COMPILES:
            break
        predicted = plan.memory.peak_bytes
        corrected = (predicted - (peak - budget), predicted * budget // peak)  # the excess is an offset, or a factor
        capacity = min(max(corrected) if len(course) == 1 else min(corrected), int(capacity * (1 - LEAST_STEP)))
        capacity = max(capacity, 1)
        try:
            plan, capacity = _smaller(again, capacity, predicted)
        except InfeasibleError as error:
            reason = f"no plan of {format_bytes(capacity)} or less, as the excess asks for: {error}"
            break
    fits = least is not None and least <= budget
    verdict = "fits" if fits else "DOES NOT FIT"
    where = target or "the mesh's own devices"
    note = f"Compiled for {where}, the plan {verdict} the budget of {format_bytes(budget)} ({'; then '.join(course)})"
    return _noted(best, budget, f"{note}." if fits else f"{note}: {reason}")


def _smaller(again: Callable[[int], Plan], capacity: int, predicted: int) -> tuple[Plan, int]:
    """A plan of a capacity, or else the smallest one, where that is smaller than what was predicted last.

    Returns:
        The plan, and the capacity that it was made for.

    Raises:
        InfeasibleError: neither can be planned.
    """
    try:
        return again(capacity), capacity
    except InfeasibleError as error:
        most = int(predicted * (1 - LEAST_STEP))
        least = error.minimum_budget
        if least is None or least > most:
            least = (capacity + predicted) // 2  # nothing was found in time: halfway there may be more to be found
        if not max(capacity, (error.minimum_budget_bound or 0) - 1) < least <= most:
            raise
        try:
            return again(least), least
        except InfeasibleError:
            raise error from None


def _noted(plan: Plan, budget: int, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note), memory=replace(plan.memory, budget_bytes=budget))


def compiled_peak(plan: Plan, target: str | None) -> int:
    """Peak bytes per device of the compiled plan, also where the compiler gives up because it is too much.

    Raises:
        TargetError: there is no such target, or its compiler is not installed, or reports no memory.
    """
    try:
        peak = plan.verify(target).compiled_peak_bytes
    except TargetError:
        raise
    except Exception as error:
        used = getattr(error, "needed_bytes", None) or peak_in_message(str(error))
        if used is None:
            raise
        return used
    if peak is None:
        raise TargetError(f"The compiler must report memory. Received: nothing from that of {target}.")
    return int(peak)


def peak_in_message(message: str) -> int | None:
    """Bytes that a compiler says a program needs when it refuses it: ``"Used 18.31G of 15.75G hbm"``.

    Returns:
        The bytes; None when the message is about something else than memory.
    """
    if not any(word in message.lower() for word in _OUT_OF_MEMORY):
        return None
    match = _USED.search(message)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None

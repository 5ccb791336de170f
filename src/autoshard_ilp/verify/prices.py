"""What a compiled collective takes under the cost model that a plan was made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard_ilp.costs.collectives import CollectiveCosts
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS, load_profile
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.errors import AutoshardError
from autoshard_ilp.mesh import as_mesh

SecondsOf = Callable[[str, tuple[str, ...], int], float | None]
"""``seconds(kind, mesh_axes, payload_bytes)``: time of one collective, None: unknown; the payload is ``S`` of
:mod:`autoshard_ilp.verify.hlo`."""


def plan_seconds(plan: Any) -> SecondsOf | None:
    """The cost model that a plan was made with; for a loaded one, that of the hardware which it names.

    Returns:
        None where the plan has no trail and names no packaged profile.
    """
    mesh = as_mesh(plan.mesh)
    model = getattr(getattr(getattr(plan, "trail", None), "costs", None), "collectives", None) or _named(plan, mesh)
    if model is None:
        return None

    def seconds(kind: str, axes: tuple[str, ...], payload_bytes: int) -> float | None:
        if kind not in COLLECTIVE_KINDS:  # such as a broadcast: no plan has any
            return None
        return float(model.seconds(kind, tuple(mesh.axis_names.index(axis) for axis in axes), payload_bytes))

    return seconds


def _named(plan: Any, mesh: Any) -> CollectiveCosts | None:
    name = getattr(plan, "origin", {}).get("hardware") or getattr(plan, "hardware", None)
    chip, _, shape = str(name).partition(":")
    try:
        profile = load_profile(chip)
    except AutoshardError:
        return None
    return CollectiveCosts(MeshLinks.create(profile, mesh.axis_names, mesh.axis_sizes, shape or None))

"""Device meshes: every accepted form becomes one frozen :class:`MeshSpec`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard_ilp.errors import InputShapeError, PlanMismatchError

MOST_DEVICES = 2**20
"""More than any machine has; a batch that divides by far more would not be counted by 32-bit integers."""


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh axes, and the user's own mesh object where it has devices.

    Attributes:
        axis_names: one name per axis, major to minor.
        axis_sizes: devices along each axis.
        device_kind: ``device.device_kind`` of the mesh's devices, or None when it has none.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_kind: str | None = None
    jax_mesh: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.axis_sizes, strict=True))

    def abstract(self) -> Any:
        """``jax.sharding.AbstractMesh`` with automatic axes."""
        from jax.sharding import AbstractMesh

        return AbstractMesh(self.axis_sizes, self.axis_names)

    def concrete(self) -> Any:
        """``jax.sharding.Mesh`` over the mesh's own devices, or over this process's devices when it has none.

        Raises:
            PlanMismatchError: fewer devices are attached than the mesh has.
        """
        import jax
        from jax.sharding import AxisType, Mesh

        if self.jax_mesh is not None:
            devices = self.jax_mesh.devices
        else:
            attached = jax.devices()
            if len(attached) < self.size:
                raise PlanMismatchError(
                    f"A plan runs on as many devices as its mesh has. Received: a mesh of {self.size} devices "
                    f"({self}) and {len(attached)} attached {attached[0].platform} device(s). Attach the devices, pass "
                    "plan.jit(mesh) a jax.sharding.Mesh, or for a trial on the CPU call "
                    f'jax.config.update("jax_num_cpu_devices", {self.size}) before anything else uses JAX.'
                )
            import numpy as np

            devices = np.array(attached[: self.size]).reshape(self.axis_sizes)
        return Mesh(devices, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))


def as_mesh(mesh: Any) -> MeshSpec:
    """Reads a mesh given as ``jax.sharding.Mesh``, ``AbstractMesh``, ``keras.distribution.DeviceMesh`` or a mapping.

    Raises:
        InputShapeError: no axes, duplicate names, or a size that is not a positive integer.
    """
    if isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, Mapping):
        return _checked(list(mesh), list(mesh.values()))
    if hasattr(mesh, "axis_names") and hasattr(mesh, "axis_sizes"):
        devices = getattr(mesh, "devices", None) if type(mesh).__name__ == "Mesh" else None
        kind = None if devices is None or not devices.size else devices.flat[0].device_kind
        return _checked(mesh.axis_names, mesh.axis_sizes, kind, mesh if devices is not None else None)
    if type(mesh).__name__ == "DeviceMesh" and hasattr(mesh, "axis_names") and hasattr(mesh, "shape"):
        backend = mesh.backend_mesh
        return _checked(mesh.axis_names, mesh.shape, backend.devices.flat[0].device_kind, backend)
    if isinstance(mesh, Sequence) and mesh and all(isinstance(x, tuple) and len(x) == 2 for x in mesh):
        return _checked([x[0] for x in mesh], [x[1] for x in mesh])
    raise InputShapeError(
        "A mesh is a jax.sharding.Mesh or AbstractMesh, a keras.distribution.DeviceMesh, or a mapping of axis names to "
        f'sizes such as {{"data": 2, "model": 4}}. Received: {mesh!r} of type {type(mesh).__name__}.'
    )


def parse_mesh(text: str) -> MeshSpec:
    """Reads the command line's form, ``"data=2,model=4"``."""
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not re.fullmatch("[0-9]{1,18}", size.strip()):
            raise InputShapeError(f'A mesh is written as "data=2,model=4". Received: {text!r}.')
        names.append(name.strip())
        sizes.append(int(size))
    return _checked(names, sizes)


def _checked(names: Sequence[Any], sizes: Sequence[Any], kind: str | None = None, jax_mesh: Any = None) -> MeshSpec:
    names, sizes = tuple(names), tuple(sizes)
    if not names:
        raise InputShapeError("A mesh needs at least one axis. Received: a mesh without axes.")
    if len(set(names)) != len(names):
        raise InputShapeError(f"Mesh axis names are unique. Received: {names}. Rename one of the axes.")
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(name, str) or not name:
            raise InputShapeError(f"A mesh axis name is a non-empty string. Received: {name!r}.")
        if not name.isascii() or "\\" in name:  # XLA ends the process on them when it reads a sharding
            raise InputShapeError(
                f"A mesh axis name is of ASCII characters other than the backslash: XLA takes no others. Received: "
                f"{name!r}. Rename the axis."
            )
        if isinstance(size, bool) or not hasattr(size, "__index__") or int(size) < 1:
            raise InputShapeError(f"A mesh axis has a size of at least 1. Received: {name!r} = {size!r}.")
    if math.prod(int(s) for s in sizes) > MOST_DEVICES:
        raise InputShapeError(
            f"A mesh has at most {MOST_DEVICES} devices. Received: {dict(zip(names, sizes, strict=True))}."
        )
    return MeshSpec(names, tuple(int(s) for s in sizes), kind, jax_mesh)

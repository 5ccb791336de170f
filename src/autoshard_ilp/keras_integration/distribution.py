"""Keras's own distribution objects, filled in from a plan. Imported only when asked for: it needs Keras.

Read against keras 3.15 (``distribution/distribution_lib.py``), which does not export the base class ``Distribution``.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras.distribution import DeviceMesh, LayoutMap, TensorLayout
from keras.src.distribution.distribution_lib import Distribution

from autoshard_ilp.errors import PlanMismatchError

Axes = tuple[Any, ...]
"""Per dimension of a tensor: ``None``, a mesh axis, or a tuple of mesh axes."""

_SMALL = 2  # elements; seeds and scalars are replicated without a word


class ExactLayout(TensorLayout):
    """A ``TensorLayout`` that may shard one dimension over several mesh axes, as a ``PartitionSpec`` may."""

    def _validate_axes(self) -> None:
        if self._device_mesh is None:
            return
        flat = {n for entry in self._axes for n in (entry if isinstance(entry, tuple) else (entry,)) if n is not None}
        unknown = flat - set(self._device_mesh.axis_names)
        if unknown:
            raise PlanMismatchError(
                f"A layout names axes of its mesh. Received: {sorted(unknown)} on a mesh of "
                f"{tuple(self._device_mesh.axis_names)}."
            )


def device_mesh(mesh: Any) -> DeviceMesh:
    """``keras.distribution.DeviceMesh`` over the devices of a ``jax.sharding.Mesh``."""
    names = [f"{d.platform}:{d.id}" for d in mesh.devices.flat]
    return DeviceMesh(tuple(mesh.devices.shape), list(mesh.axis_names), names)


def layout(axes: Axes, mesh: DeviceMesh) -> TensorLayout:
    """A ``TensorLayout``; one of Keras's own wherever that can express it."""
    kind = ExactLayout if any(isinstance(entry, tuple) for entry in axes) else TensorLayout
    return kind(axes, mesh)


class PathMatch:
    """Finds the planned variable behind a new one, although Keras numbers equal layers anew in every model.

    Args:
        layouts: path -> axes, in the order in which the variables are created.
    """

    def __init__(self, layouts: Mapping[str, Axes]) -> None:
        self.layouts = dict(layouts)
        self._known: dict[str, str | None] = {}
        self._waiting: dict[str, list[str]] = {}
        for path in self.layouts:
            self._waiting.setdefault(_plain(path), []).append(path)

    def __call__(self, path: str, fits: Callable[[str], bool] = lambda path: True) -> str | None:
        """The planned path: the same one, else the next one that is the same but for numbers."""
        if path in self.layouts and fits(path):
            return path
        if path not in self._known:
            waiting = self._waiting.get(_plain(path), [])
            found = self._known[path] = next((p for p in waiting if fits(p)), None)
            if found is not None:
                waiting.remove(found)
        return self._known[path]


def _plain(path: str) -> str:
    return re.sub(r"_\d+(?=/|_|$)", "", path)


def _warn_unknown(path: str, shape: Sequence[int] | None) -> None:
    what = f"{path!r}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    warnings.warn(
        f"The plan has no layout for the variable {what}, so it is replicated. Build the model that was planned, the "
        "same way; keras.utils.clear_session() beforehand makes Keras number its layers from the start.",
        stacklevel=6,
    )


class PlannedLayoutMap(LayoutMap):
    """A ``LayoutMap`` with every variable of a plan by its full path; a variable it does not know is not passed over
    in silence.

    Attributes:
        lost: what a ``LayoutMap`` under ``ModelParallel`` cannot express of the plan, one sentence each.
    """

    def __init__(self, mesh: DeviceMesh, layouts: Mapping[str, Axes], lost: Sequence[str] = ()) -> None:
        super().__init__(mesh)
        self.lost = tuple(lost)
        for path, axes in layouts.items():
            self[path] = layout(axes, mesh)
        self._match = PathMatch(layouts)

    def __getitem__(self, key: str) -> TensorLayout | None:
        path = self._match(key)
        if path is not None:
            return self._layout_map[path]
        if not key.endswith("/output"):  # Keras asks for the outputs of layers, too
            _warn_unknown(key, None)
        return None


class PlannedDistribution(Distribution):
    """The plan's layouts of variables and data for ``keras.distribution.set_distribution``.

    Args:
        mesh: where the plan runs.
        layouts: path -> axes of every variable, in order.
        shapes: path -> shape of every variable.
        creation: paths in the order in which a builder creates the variables; empty where it is not known.
        data: ``(shape, axes)`` of every input, target and sample weight.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        layouts: Mapping[str, Axes],
        shapes: Mapping[str, tuple[int, ...]],
        creation: Sequence[str | None],
        data: Sequence[tuple[tuple[int, ...], Axes]],
    ) -> None:
        self._layouts, self._shapes, self._creation, self._data = (
            dict(layouts),
            dict(shapes),
            list(creation),
            list(data),
        )
        self._match = PathMatch(layouts)
        self._created = itertools.count()
        entry = next((axes[0] for _, axes in self._data if axes and axes[0] is not None), None)
        self._batch_axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        super().__init__(mesh, self._batch_axes[0] if self._batch_axes else mesh.axis_names[0])

    @property
    def num_model_replicas(self) -> int:
        """Over how many groups of devices the batch is split."""
        sizes = dict(zip(self.device_mesh.axis_names, self.device_mesh.shape, strict=True))
        return math.prod(sizes[a] for a in self._batch_axes)

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        """Layout of a variable by its path, or by its place in the order of creation where the paths are new."""
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        shape, position = tuple(variable.shape), next(self._created)
        expected = self._creation[position] if position < len(self._creation) else None
        exact = self._shapes.get(variable.path) == shape
        if not exact and expected is not None and _plain(expected) == _plain(variable.path):
            path: str | None = expected if self._shapes[expected] == shape else None
        else:
            path = self._match(variable.path, lambda p: self._shapes[p] == shape)
        if path is not None:
            return layout(self._layouts[path], self.device_mesh)
        if math.prod(shape) > _SMALL:
            _warn_unknown(variable.path, shape)
        return TensorLayout([None] * len(shape), self.device_mesh)

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Layout of a batch: that of the planned input of its shape, else over the plan's batch axes if it divides."""
        shape = tuple(data_shape)
        for planned, axes in self._data:
            if planned == shape:
                return layout(axes, self.device_mesh)
        split = shape and shape[0] % max(self.num_model_replicas, 1) == 0 and self._batch_axes
        first = None if not split else self._batch_axes if len(self._batch_axes) > 1 else self._batch_axes[0]
        return layout((first, *[None] * (len(shape) - 1)) if shape else (), self.device_mesh)

    def get_tensor_layout(self, path: str) -> None:
        """Interior layouts are not Keras's to set: they depend on the operation, not on the layer."""
        return None

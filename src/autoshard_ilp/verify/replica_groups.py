"""Which devices take part in a collective, read from the three notations of compiled XLA text.

XLA prints the groups of a collective as

* an explicit list, ``{{0,1},{2,3}}`` (``{}`` means: one group of every device);
* an iota, ``[4,2]<=[8]`` or ``[4,2]<=[2,4]T(1,0)``: number 0, 1, 2, ... laid out in the shape on the right, transposed,
  flattened, and cut into the groups on the left;
* a mesh, ``mesh['a'=2,'b'=4] {'a'}``: the groups vary along the axes in braces. ``device_ids=(...)`` gives the numbers
  in the mesh, itself a list or an iota; ``'a':(2)4`` is the part of axis ``a`` of size 4 with 2 more major blocks.

The numbers are partition numbers: positions in ``mesh.devices.flat`` of the jax mesh that was compiled for, whatever
the ids of those devices are. The notations are described in XLA's ``xla/hlo/ir/collective_device_list.h``,
``tile_assignment.h`` and ``mesh_and_axis.h``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]
IRREGULAR = ("irregular",)

_INNER_LIST = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,\s]+)\](?:<=\[([\d,\s]+)\])?(?:T\(([\d,\s]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:\s*,?\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"['\"]?([^'\"=,\s]+)['\"]?\s*=\s*(\d+)")
_AXIS_REF = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(token) for token in re.findall(r"\d+", text or ""))


def _iota(shape: Sequence[int], transpose: Sequence[int]) -> np.ndarray:
    """Numbers 0, 1, ... in ``shape``, transposed by ``transpose`` (nothing when empty), flattened."""
    numbers = np.arange(math.prod(shape)).reshape(tuple(shape))
    return (numbers.transpose(tuple(transpose)) if transpose else numbers).ravel()


def _device_ids(text: str | None, n_devices: int) -> np.ndarray:
    """Numbers of the devices in a mesh, in the mesh's row-major order."""
    if not text:
        return np.arange(n_devices)
    if text.lstrip().startswith("["):
        match = _IOTA.search(text)
        assert match is not None
        reshape = _ints(match[2]) or _ints(match[1])
        return _iota(reshape, _ints(match[3]))
    return np.array(_ints(text))


def _mesh_groups(match: re.Match[str]) -> Groups:
    """Groups of ``mesh['a'=2,'b'=4], device_ids=(..) {'a', 'b':(1)2}``."""
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(match[1])]
    # Every axis is cut where a sub-axis begins or ends, so that each reference is a set of whole dimensions.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in axes}
    references: list[tuple[str, int, int]] = []
    sizes = dict(axes)
    for name, pre, size in _AXIS_REF.findall(match[3]):
        major, length = (int(pre), int(size)) if size else (1, sizes[name])
        references.append((name, major, length))
        cuts[name] |= {major, major * length}
    shape: list[int] = []
    blocks: list[tuple[str, int]] = []  # (axis, product of the major blocks before this one)
    for name, _ in axes:
        edges = sorted(cuts[name])
        for low, high in itertools.pairwise(edges):
            shape.append(high // low)
            blocks.append((name, low))
    moving: list[int] = []
    for name, major, length in references:  # in the order written, which is the order inside a group
        moving += [d for d, (axis, low) in enumerate(blocks) if axis == name and major <= low < major * length]
    still = [d for d in range(len(shape)) if d not in moving]
    numbers = _device_ids(match[2], math.prod(shape)).reshape(shape or [1])
    if shape:
        numbers = numbers.transpose(still + moving)
    width = math.prod(shape[d] for d in moving)
    return tuple(tuple(row) for row in numbers.reshape(-1, width).tolist())


@lru_cache(maxsize=4096)
def parse_groups(text: str, n_devices: int) -> Groups:
    """Groups of partition numbers in the value of ``replica_groups=``.

    Args:
        text: the attribute's value, in any of the three notations.
        n_devices: number of partitions of the module; an empty list means one group of all of them.

    Raises:
        ValueError: the text is in none of the notations.
    """
    text = text.strip()
    if text.startswith("mesh"):
        match = _MESH.match(text)
        if match is None:
            raise ValueError(f"cannot read the replica groups {text!r}")
        return _mesh_groups(match)
    if text.startswith("["):
        match = _IOTA.match(text)
        if match is None or not match[2]:
            raise ValueError(f"cannot read the replica groups {text!r}")
        dims = _ints(match[1])
        rows = _iota(_ints(match[2]), _ints(match[3])).reshape(-1, dims[-1])
        return tuple(tuple(row) for row in rows.tolist())
    if text.startswith("{"):
        groups = tuple(g for g in (_ints(inner) for inner in _INNER_LIST.findall(text[1:-1])) if g)
        return groups or (tuple(range(n_devices)),)
    raise ValueError(f"cannot read the replica groups {text!r}")


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """``{{0,1},{1,0}}``, the value of ``source_target_pairs=``, as ``(source, target)`` pairs."""
    numbers = _ints(text)
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def connected(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Sets of devices that a permutation connects, each sorted; a device that sends to itself only is left out."""
    leader: dict[int, int] = {}

    def find(device: int) -> int:
        leader.setdefault(device, device)
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    for source, target in pairs:
        if source != target:
            leader[find(source)] = find(target)
    members: dict[int, list[int]] = {}
    for device in leader:
        members.setdefault(find(device), []).append(device)
    return tuple(sorted(tuple(sorted(group)) for group in members.values()))


def _coordinates(devices: Iterable[int], shape: Sequence[int], position: Mapping[int, int] | None) -> np.ndarray:
    flat = [device if position is None else position[device] for device in devices]
    return np.array(np.unravel_index(flat, tuple(shape))).T


def mesh_axes_of(
    groups: Groups,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    position: Mapping[int, int] | None = None,
) -> tuple[str, ...]:
    """Mesh axes that groups of devices span.

    Args:
        groups: partition numbers, as :func:`parse_groups` gives them.
        mesh_shape: size of each mesh axis.
        axis_names: name of each mesh axis.
        position: where each number stands in ``mesh.devices.flat``; None: the number itself.

    Returns:
        Names in mesh order. Empty when no group has two members. :data:`IRREGULAR` when some group is not the full
        extent of the same axes as the others (part of an axis, or devices outside the mesh).
    """
    shape = tuple(mesh_shape)
    total = math.prod(shape)
    if all(len(group) <= 1 for group in groups):
        return ()
    spanned: tuple[int, ...] | None = None
    for group in groups:
        if position is None and max(group) >= total:
            return IRREGULAR
        where = _coordinates(group, shape, position)
        moving = tuple(axis for axis in range(len(shape)) if len(set(where[:, axis])) > 1)
        full = math.prod(shape[axis] for axis in moving)
        if full != len(set(group)) or (spanned is not None and moving != spanned):
            return IRREGULAR
        spanned = moving
    return tuple(axis_names[axis] for axis in spanned or ())


def within_one_axis(groups: Groups, mesh_shape: Sequence[int], axis_names: Sequence[str]) -> tuple[str, ...]:
    """The mesh axis along which every group lies, each on a part of it; :data:`IRREGULAR` where there is none.

    A reduce-scatter over an axis that spans a TPU slice runs in two stages, over parts of the axis
    (:mod:`autoshard_ilp.costs.scatter`).
    """
    shape, along = tuple(mesh_shape), set()
    for group in groups:
        if max(group) >= math.prod(shape):
            return IRREGULAR
        where = _coordinates(group, shape, None)
        along |= {axis for axis in range(len(shape)) if len(set(where[:, axis])) > 1}
    return tuple(axis_names[axis] for axis in along) if len(along) == 1 else IRREGULAR


def mesh_axes_of_pairs(
    pairs: Iterable[tuple[int, int]],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    position: Mapping[int, int] | None = None,
) -> tuple[str, ...]:
    """Mesh axes along which a permutation moves data: those where some source and its target differ.

    A device that sends to itself moves nothing. Arguments as in :func:`mesh_axes_of`.
    """
    moved = [(source, target) for source, target in pairs if source != target]
    if not moved:
        return ()
    shape = tuple(mesh_shape)
    if position is None and max(max(pair) for pair in moved) >= math.prod(shape):
        return IRREGULAR
    sources = _coordinates((source for source, _ in moved), shape, position)
    targets = _coordinates((target for _, target in moved), shape, position)
    differs = (sources != targets).any(axis=0)
    return tuple(name for name, moves in zip(axis_names, differs, strict=True) if moves)

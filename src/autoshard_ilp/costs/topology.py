"""Where mesh axes lie on physical links.

On a TPU slice the devices form a torus (or an open grid). Mesh axes are laid on its physical axes the way JAX's
``mesh_utils.create_device_mesh`` does it (jax/_src/mesh_utils.py), splitting physical axes where needed: the last
mesh axis communicates most and chooses first. On GPUs and CPUs devices are numbered row-major, so the last mesh axes
lie inside a node and the first ones span nodes. Devices beyond one pod or node talk over the network.

:class:`MeshLinks` answers one question, :meth:`MeshLinks.group`: which links does a collective over these mesh axes
use? The formulas that turn links into seconds are in ``collectives``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.costs.profile import HardwareProfile, Torus
from autoshard_ilp.errors import InputShapeError


@dataclass(frozen=True)
class Segment:
    """The part of one physical torus axis that a group uses.

    Attributes:
        size: members of the group along this axis.
        wraps: the members close a ring.
        stride: physical links between neighbours; that many interleaved groups share each link.
    """

    size: int
    wraps: bool
    stride: float = 1.0

    @property
    def width(self) -> float:
        """Links' worth of bandwidth: 2 for a ring, 1 for an open line (its end has one link), shared by ``stride``."""
        return (2.0 if self.wraps else 1.0) / self.stride

    @property
    def hops(self) -> float:
        """Link-hops from a member to the farthest one."""
        return (self.size // 2 if self.wraps else self.size - 1) * self.stride


@dataclass(frozen=True)
class Group:
    """The devices that run one collective together, seen from the links.

    Attributes:
        size: devices in the group.
        domains: pods or nodes that the worst-placed such group spans.
        inner_size: most members in one domain.
        outer_share: fewest members in one domain of a group that spans several: they carry its network traffic.
        segments: torus axes inside a pod (empty on switches), one per physical axis in use.
        closed_ring: the devices are ordered as one closed ring through the whole slice.
        cores: members on one chip.
        chip_cores: devices of the mesh on one chip; they share its links.
    """

    size: int
    domains: int
    inner_size: int
    outer_share: int
    segments: tuple[Segment, ...] = ()
    closed_ring: bool = False
    cores: int = 1
    chip_cores: int = 1


@dataclass(frozen=True)
class MeshLinks:
    """A logical mesh on the links of a profile. Build with :meth:`create`.

    Attributes:
        axis_names, axis_sizes: the logical mesh.
        slice_shape: chips per physical torus axis of one slice (empty off TPU).
        slices: pods or slices joined by the network (torus only).
        placement: per mesh axis, the factor it takes of every physical axis (the last one counts cores per chip).
        slices_per_axis: per mesh axis, the factor that lies across slices (always its outer part).
    """

    profile: HardwareProfile
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    slice_shape: tuple[int, ...] = ()
    slices: int = 1
    placement: tuple[tuple[int, ...], ...] = ()
    slices_per_axis: tuple[int, ...] = ()

    @staticmethod
    def create(
        profile: HardwareProfile,
        axis_names: Sequence[str],
        axis_sizes: Sequence[int],
        physical_shape: str | Sequence[int] | None = None,
    ) -> MeshLinks:
        """Lay a mesh on the hardware.

        Args:
            profile: the hardware.
            axis_names, axis_sizes: the logical mesh, any number of axes of any size.
            physical_shape: chips per physical axis of the slice, such as ``"4x4"``; None: the profile's slice for
                this number of devices. Only for torus hardware.

        Raises:
            InputShapeError: sizes that are not positive, or a physical shape that does not hold the mesh.
        """
        names, sizes = tuple(axis_names), tuple(int(size) for size in axis_sizes)
        if len(names) != len(sizes) or len(set(names)) != len(names) or any(size < 1 for size in sizes):
            raise InputShapeError(
                "A mesh needs one distinct name and one positive size per axis. "
                f"Received: names {names}, sizes {tuple(axis_sizes)}."
            )
        if profile.torus is None:
            if physical_shape is not None:
                raise InputShapeError(
                    f"physical_shape is for torus interconnects; {profile.name} has {profile.link_kind} links. "
                    f"Received: {physical_shape!r}."
                )
            return MeshLinks(profile, names, sizes)
        shape, cores, slices = _slice_of(profile, math.prod(sizes), physical_shape)
        outer, left = [], slices
        for size in sizes:  # the network is always the outer part, taken by the first (least busy) axes
            outer.append(math.gcd(left, size))
            left //= outer[-1]
        inner = tuple(size // slow for size, slow in zip(sizes, outer, strict=True))
        return MeshLinks(profile, names, sizes, shape, slices, assign_axes((*shape, cores), inner), tuple(outer))

    @property
    def n_devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.axis_sizes)

    @property
    def whole_slice(self) -> tuple[int, ...]:
        """Chips along each axis of the one slice that the mesh is, with one device each; else empty."""
        chips = math.prod(self.slice_shape) if self.slice_shape else 0
        return self.slice_shape if self.profile.family == "tpu" and chips == self.n_devices else ()

    @property
    def devices_per_domain(self) -> int:
        """Devices of this mesh in one slice, node or NVLink domain (the last one may hold fewer).

        Whole hosts are rented, and of a domain with several hosts the same number in every domain: 128 GPUs in
        domains of 72 with hosts of 4 are 64 + 64, but 12 GPUs in nodes of 8 are 8 + 4.
        """
        if self.profile.torus is not None:
            return self.n_devices // self.slices
        domain, host = self.profile.domain_devices, self.profile.host_devices or self.profile.domain_devices
        if self.profile.network_bytes_per_s is None or self.n_devices <= domain:
            return self.n_devices
        even = (n for n in range(domain - domain % host, 0, -host) if self.n_devices % n == 0)
        return next(even, domain)

    def group(self, axes: Sequence[int]) -> Group:
        """Links of the groups that vary over the mesh axes with these indices.

        Raises:
            InputShapeError: an index that is repeated or not an axis of the mesh.
        """
        chosen = tuple(sorted(axes))
        if len(set(chosen)) != len(chosen) or any(not 0 <= axis < len(self.axis_sizes) for axis in chosen):
            raise InputShapeError(
                f"Axes of a collective are distinct indices below {len(self.axis_sizes)}. Received: {tuple(axes)}."
            )
        return self._switched_group(chosen) if self.profile.torus is None else self._torus_group(chosen)

    def _switched_group(self, axes: tuple[int, ...]) -> Group:
        """Count members per node in every group, row-major numbering; the worst group decides."""
        size = math.prod(self.axis_sizes[axis] for axis in axes)
        domain = self.devices_per_domain
        nodes = -(-self.n_devices // domain)
        if nodes == 1 or size == 1:
            return Group(size, 1, size, size)
        ids = np.arange(self.n_devices).reshape(self.axis_sizes)
        groups = np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, size)
        keys = groups // domain + nodes * np.arange(len(groups))[:, None]
        present, members = np.unique(keys, return_counts=True)
        spans = np.bincount(present // nodes)[present // nodes]
        domains = int(spans.max())
        share = int(members[spans > 1].min()) if domains > 1 else size
        return Group(size, domains, int(members.max()), share)

    def _torus_group(self, axes: tuple[int, ...]) -> Group:
        assert self.profile.torus is not None
        wraps = axis_wraps(self.profile.torus, self.slice_shape)
        segments = []
        for physical, length in enumerate(self.slice_shape):
            segment = _segment([row[physical] for row in self.placement], axes, length, wraps[physical])
            if segment.size > 1:
                segments.append(segment)
        size = math.prod(self.axis_sizes[axis] for axis in axes)
        domains = math.prod(self.slices_per_axis[axis] for axis in axes)
        # JAX orders devices as a ring only for a mesh with a single axis (of more than one device).
        whole = max(self.axis_sizes) == self.n_devices == size and self.slices == 1
        ring = whole and self.slice_shape in self.profile.torus.ring_shapes
        cores = math.prod(self.placement[axis][-1] for axis in axes)
        chip_cores = math.prod(row[-1] for row in self.placement)
        return Group(size, domains, size // domains, size // domains, tuple(segments), ring, cores, chip_cores)


def axis_wraps(torus: Torus, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which physical axes of a slice have wraparound links."""
    if torus.wrap_rule == "axis-equals":
        wraps = [size == torus.wrap_size for size in shape]
    else:
        wraps = [all(size % torus.wrap_size == 0 for size in shape)] * len(shape)
    # With two members both neighbours are the same chip: no second path.
    return tuple(wrap and size > 2 for wrap, size in zip(wraps, shape, strict=True))


def parse_shape(shape: str | Sequence[int]) -> tuple[int, ...]:
    """``"4x4"`` or ``(4, 4)`` as a tuple of positive sizes.

    Raises:
        InputShapeError: anything else.
    """
    try:
        sizes = tuple(int(size) for size in (shape.split("x") if isinstance(shape, str) else shape))
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputShapeError(f"A physical shape is positive sizes such as '4x4' or (4, 4). Received: {shape!r}.")
    return sizes


def _slice_of(
    profile: HardwareProfile, devices: int, physical_shape: str | Sequence[int] | None
) -> tuple[tuple[int, ...], int, int]:
    """(chips per physical axis, devices per chip in use, slices) that hold ``devices``."""
    torus = profile.torus
    assert torus is not None
    if physical_shape is not None:
        shape = parse_shape(physical_shape)
        padded = shape + (1,) * (torus.dims - len(shape))
        per_slice = math.prod(padded) * torus.cores_per_chip
        if len(padded) != torus.dims or devices % per_slice:
            raise InputShapeError(
                f"A {profile.name} slice has {torus.dims} physical axes and {torus.cores_per_chip} device(s) per chip, "
                f"and the mesh must fill whole slices. Received: slice {physical_shape!r} and {devices} devices."
            )
        return padded, torus.cores_per_chip, devices // per_slice
    slices = next(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= profile.domain_devices)
    per_slice = devices // slices
    cores = math.gcd(torus.cores_per_chip, per_slice)
    return _slice_shape(torus, per_slice // cores), cores, slices


def _slice_shape(torus: Torus, chips: int) -> tuple[int, ...]:
    """A shape that can be rented, else the most cube-like one (every mesh must get a cost)."""
    listed = [shape for shape in torus.slice_shapes if math.prod(shape) == chips]
    candidates = listed or [tuple(sorted(shape)) for shape in _factorisations(chips, torus.dims)]
    return min(candidates, key=lambda shape: (max(shape), sum(shape)))


def _factorisations(n: int, parts: int) -> list[tuple[int, ...]]:
    """Every ordered way to write ``n`` as a product of ``parts`` factors."""
    if parts == 1:
        return [(n,)]
    return [(d, *rest) for d in _divisors(n) for rest in _factorisations(n // d, parts - 1)]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def assign_axes(physical: Sequence[int], logical: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """How many devices of every physical axis each logical axis takes.

    The preferences are those of JAX's mesh_utils: the last logical axis chooses first; it takes most devices from
    whole physical axes, then most whole axes (each adds bandwidth), then axes already in use, then larger factors
    on earlier axes.

    Args:
        physical: sizes of the physical axes.
        logical: sizes of the logical axes, with the same product.

    Returns:
        One row per logical axis, one factor per physical axis.
    """
    free = list(physical)
    rows = []
    for size in reversed(logical):
        row = max(_placements(free, size), key=lambda row: _preference(row, physical, free))
        free = [left // taken for left, taken in zip(free, row, strict=True)]
        rows.append(row)
    return tuple(reversed(rows))


def _placements(free: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Every row of factors that divide what is free, with product ``size``."""
    if len(free) == 1:
        return [(size,)] if free[0] % size == 0 else []
    first = _divisors(math.gcd(free[0], size))
    return [(taken, *rest) for taken in first for rest in _placements(free[1:], size // taken)]


def _preference(row: tuple[int, ...], physical: Sequence[int], free: Sequence[int]) -> tuple[int, int, int, tuple]:
    whole = [taken for taken, length in zip(row, physical, strict=True) if taken == length]
    in_use = [taken for taken, length, left in zip(row, physical, free, strict=True) if left < length]
    return math.prod(whole), sum(taken > 1 for taken in whole), math.prod(in_use), row


def _segment(factors: Sequence[int], axes: Sequence[int], length: int, wraps: bool) -> Segment:
    """One physical axis split into ``factors`` (later mesh axes are the contiguous, minor part), seen by a group.

    A block that does not reach around stays open; a strided part that does reach around closes a ring of its own,
    which shares the links with the rings interleaved with it.
    """
    size = math.prod(factors[axis] for axis in axes)
    if size == 1:
        return Segment(1, False)
    used = [axis for axis in axes if factors[axis] > 1]
    # Distance between members: everything that lies inside the outermost chosen part but outside the group.
    span = math.prod(factors[used[0] :])
    return Segment(size, wraps and span == length, span / size)

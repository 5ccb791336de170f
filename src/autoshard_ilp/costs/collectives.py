"""Seconds of collectives: alpha-beta models over the links of a mesh.

    seconds = T0 + steps * hop + bytes * (the slowest level's seconds per byte)

with bytes as ``payload_bytes`` of one device: the gathered result (all-gather), the unreduced input
(reduce-scatter), the buffer (all-reduce), what it holds (all-to-all), what it sends (collective-permute). For a group
of n devices, one-way link bandwidth W, m members per domain, r of them carrying the traffic of a group over k domains:

    ring or line     all-gather, reduce-scatter  (n-1)/n * V / (c W),  c = 2 around a ring, 1 on an open line
    torus            the widths c of all axes in use add up, but no axis of size s is faster than (s-1)/n * V / (c W)
    torus            all-to-all  max over axes  S * size / (4 c W):  the cut through the middle of that axis
    switch           (m-1)/m * V / W, W the egress of one device; all-reduce also inside the switch
    between domains  (1 - r/n) * V / (r W_network);  all-to-all (1 - r/n) * S / W_network
    all-reduce       twice all-gather, in time and in steps

Sources: J. Austin et al., "How to Scale Your Model" (jax-ml.github.io/scaling-book, chapters sharding and gpus);
R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
NVIDIA NCCL, src/graph/tuning.cc, for steps; nccl-tests doc/PERFORMANCE.md for bus bandwidth.

Time never falls when bytes grow. It never falls when a group grows over links of the same kind (a longer line, a
longer ring, more members of a switch, more nodes). It may fall when a group gains links: two torus axes gather a
given result faster than one. Sending the same shard to more devices is never faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.costs import scatter
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS
from autoshard_ilp.costs.topology import Group, MeshLinks, Segment
from autoshard_ilp.errors import InputShapeError


def ring_bytes_per_device(kind: str, group_size: int, payload_bytes: float) -> float:
    """Bytes that one device sends in a ring algorithm.

    Args:
        kind: one of ``COLLECTIVE_KINDS``.
        group_size: devices n in the group.
        payload_bytes: bytes, in the convention of this module.

    Returns:
        2(n-1)/n V for all-reduce, (n-1)/n V for all-gather, reduce-scatter and all-to-all, V for a permute; 0 if n=1.

    Raises:
        InputShapeError: unknown kind.
    """
    _check_kind(kind)
    if group_size <= 1:
        return 0.0
    if kind == "collective-permute":
        return float(payload_bytes)
    return (2.0 if kind == "all-reduce" else 1.0) * (group_size - 1) / group_size * payload_bytes


def _check_kind(kind: str) -> None:
    if kind not in COLLECTIVE_KINDS:
        raise InputShapeError(f"A collective is one of {', '.join(COLLECTIVE_KINDS)}. Received: {kind!r}.")


@dataclass(frozen=True)
class CollectiveCosts:
    """Seconds of collectives on one mesh; cheap to ask many times."""

    links: MeshLinks
    _lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, kind: str, axes: tuple[int, ...], payload_bytes: float) -> float:
        """Seconds of one collective; the share that the profile declares as hidden behind compute is left out.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            axes: indices of the mesh axes that the group spans; sizes of 1 cost nothing.
            payload_bytes: bytes on one device, in the convention of this module; 0 costs nothing.

        Raises:
            InputShapeError: unknown kind or axis.
        """
        alpha, beta = self._lines.get((kind, axes)) or self.alpha_beta(kind, axes)
        return alpha + beta * payload_bytes if payload_bytes > 0 else 0.0

    def seconds_array(self, kind: str, axes: tuple[int, ...], payload_bytes: np.ndarray) -> np.ndarray:
        """:meth:`seconds` of every entry of an array of bytes (any shape), as float64."""
        alpha, beta = self.alpha_beta(kind, axes)
        sizes = np.asarray(payload_bytes, np.float64)
        return np.where(sizes > 0, alpha + beta * sizes, 0.0)

    def scatter_stages(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Mesh axes of each of the reduce-scatters that scatter over ``axes`` (:mod:`autoshard_ilp.costs.scatter`)."""
        return scatter.stages(axes, self.links.axis_sizes, self.links.whole_slice)

    def _spans_slice(self, axes: tuple[int, ...]) -> bool:
        return scatter.spans_slice(axes, self.links.axis_sizes, self.links.whole_slice)

    def alpha_beta(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """(seconds per call, seconds per payload byte) of a collective over these mesh axes; (0, 0) alone."""
        key = (kind, tuple(axes))
        if key not in self._lines:
            _check_kind(kind)
            group = self.links.group(axes)
            exposed = 1.0 - self.links.profile.overlap_by_kind.get(kind, 0.0)
            reached = self.links.profile.efficiency_by_kind.get(kind, 1.0)
            line = (0.0, 0.0)
            if group.size > 1:
                # A reduce-scatter over one axis that spans the slice takes two stages, and as long as an all-reduce.
                split = kind == "reduce-scatter" and self._spans_slice(key[1])
                sent_as = "all-reduce" if split else kind
                alpha = _alpha(sent_as, group, self.links)
                line = (exposed * alpha, exposed * _beta(sent_as, group, self.links) / reached)
            self._lines[key] = line
        return self._lines[key]


def _alpha(kind: str, group: Group, links: MeshLinks) -> float:
    """Seconds of a call with next to no data.

    Inside a node of GPUs an all-reduce never takes less than a reduce-scatter, its first half, even where a profile's
    two figures, from different measurements, say so: XLA makes a reduce-scatter of an all-reduce whose result is only
    read cut, whichever is faster, so plans must not count on the difference.
    """
    profile = links.profile
    calls, hop = profile.call_seconds_by_kind, profile.hop_seconds
    steps = _torus_steps(kind, group) if profile.torus else _switch_steps(kind, group)
    inside = calls[kind] + steps * hop
    if kind == "all-reduce" and profile.family == "gpu":
        inside = max(inside, calls["reduce-scatter"] + (group.inner_size - 1) * hop)
    return inside + _network_steps(kind, group) * profile.network_hop_seconds


def _network_steps(kind: str, group: Group) -> float:
    """Steps between domains, one after the other: a ring for gathers, a tree for all-reduce."""
    k = group.domains
    if kind in ("all-gather", "reduce-scatter"):
        return k - 1
    levels = math.ceil(math.log2(k))
    return {"all-reduce": 2 * levels, "all-to-all": levels, "collective-permute": min(levels, 1)}[kind]


def _switch_steps(kind: str, group: Group) -> float:
    """Steps inside nodes: gathers run one flat ring through all nodes, all-reduce a chain in each node."""
    if kind in ("all-gather", "reduce-scatter"):
        return group.size - group.domains
    return 2 * (group.inner_size - 1) if kind == "all-reduce" else 1


def _torus_steps(kind: str, group: Group) -> float:
    """Link-hops inside a slice. A permute shifts by one; on an open line one message goes all the way back."""
    if group.closed_ring:
        hops, back = float(group.size // 2), 1.0
    else:
        hops = sum(segment.hops for segment in group.segments)
        back = max((s.stride if s.wraps else s.hops for s in group.segments), default=0.0)
    return {"all-reduce": 2 * hops, "collective-permute": back}.get(kind, hops)


def _beta(kind: str, group: Group, links: MeshLinks) -> float:
    """Seconds per payload byte: the slowest level, because large transfers pipeline through all of them."""
    inner = _torus_beta(kind, group, links) if links.profile.torus else _switch_beta(kind, group, links)
    return max(inner, _network_beta(kind, group, links))


def _network_beta(kind: str, group: Group, links: MeshLinks) -> float:
    """Between domains, where the members of one domain share a group's traffic over their own network links."""
    profile = links.profile
    if group.domains == 1 or profile.network_bytes_per_s is None:
        return 0.0
    bandwidth = profile.network_bytes_per_s * profile.network_efficiency
    foreign = 1.0 - group.outer_share / group.size
    per_kind = {"collective-permute": 1.0, "all-to-all": foreign}
    return per_kind.get(kind, _passes(kind) * foreign / group.outer_share) / bandwidth


def _passes(kind: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if kind == "all-reduce" else 1


def _switch_beta(kind: str, group: Group, links: MeshLinks) -> float:
    """Inside a node: every device sends at its full egress, or at its share of the common bus."""
    profile, m = links.profile, group.inner_size
    efficiency = profile.link_efficiency
    if kind == "all-to-all" and profile.all_to_all_efficiency is not None:
        efficiency = profile.all_to_all_efficiency
    bandwidth = profile.link_bytes_per_s * efficiency
    if profile.shared_bus_bytes_per_s is not None:
        bandwidth = min(bandwidth, profile.shared_bus_bytes_per_s / links.devices_per_domain)
    if kind == "collective-permute":
        return 1.0 / bandwidth
    if kind == "all-reduce" and profile.in_switch_bytes_per_s is not None:
        return _in_switch_beta(m, bandwidth, profile.in_switch_bytes_per_s, links)
    return _passes(kind) * (m - 1) / m / bandwidth


def _in_switch_beta(m: int, ring: float, in_switch: float, links: MeshLinks) -> float:
    """All-reduce per byte when the switch can reduce for groups of at least ``in_switch_min_group``.

    Measured time falls slightly where the switch takes over. A model that falls with group size would make plans
    flip, so both sides meet at the geometric mean of the last ring and the full domain (a few per cent from either).
    """
    profile = links.profile

    def per_byte(members: int, bus_bandwidth: float) -> float:
        return 2 * (members - 1) / members / bus_bandwidth

    first = profile.in_switch_min_group
    plateau = math.sqrt(per_byte(first - 1, ring) * per_byte(max(profile.domain_devices, first), in_switch))
    return min(per_byte(m, ring), plateau) if m < first else max(per_byte(m, in_switch), plateau)


def _torus_beta(kind: str, group: Group, links: MeshLinks) -> float:
    """Inside a slice. Devices of one chip share its links; members on one chip also share what they receive."""
    profile = links.profile
    assert profile.torus is not None
    link, between_cores = profile.link_bytes_per_s * profile.link_efficiency, profile.torus.core_bytes_per_s
    on_chip = (group.cores - 1) / group.cores / between_cores
    if kind == "collective-permute":
        if not group.segments:
            return 1.0 / between_cores if group.cores > 1 else 0.0
        stride = 1.0 if group.closed_ring else max(segment.stride for segment in group.segments)
        return max(stride * group.chip_cores / link, on_chip)
    if not group.segments:
        return _passes(kind) * on_chip
    if kind == "all-to-all":
        efficiency = profile.all_to_all_efficiency
        link = link if efficiency is None else profile.link_bytes_per_s * efficiency
        return max(on_chip, *(group.chip_cores * _cut(segment) / link for segment in group.segments))
    gather = _gather_links(group) / (link * group.cores / group.chip_cores)
    return _passes(kind) * max(gather, on_chip)


def _gather_links(group: Group) -> float:
    """Link-times per byte of a gathered result: what a corner receives over all its links, or, where widths differ,
    what the end of one axis (every member with that coordinate, sharing what it receives) gets over that axis alone.
    """
    chips = math.prod(segment.size for segment in group.segments)
    if group.closed_ring:
        return (chips - 1) / chips / 2.0
    corner = (chips - 1) / chips / sum(segment.width for segment in group.segments)
    return max(corner, *((segment.size - 1) / chips / segment.width for segment in group.segments))


def _cut(segment: Segment) -> float:
    """Link-times that one byte per member costs in the cut through the middle of an axis."""
    odd = 1.0 - 1.0 / segment.size**2 if segment.size % 2 else 1.0
    return segment.size * odd / (4.0 * segment.width)

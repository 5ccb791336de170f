"""Roofline compute: seconds one device spends on its share of an operation.

``max(flops / peak, bytes / bandwidth)`` over the local shard (Williams, Waterman and Patterson, "Roofline", CACM 2009),
with the profile's measured efficiencies inside peak and bandwidth. Only buffers that are really read or written count,
so a fused elementwise operation costs little beyond the buffers at the ends of its fusion. Little, but not nothing:
whether every device computes a mask of the size of the logits in full must not be a matter of taste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.rules.rule import Rule
from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.strategies import Strategy

FUSED_SHARE = 1 / 16
"""A result that stays inside a fusion counts as this share of the bytes it would have in memory. Assumption: registers
and vector memory move at least sixteen times what device memory does (TPU v5e: some 3e12 vector operations per second
on 4 bytes against 8.2e11 bytes per second; NVIDIA's GPUs have more)."""


@dataclass(frozen=True)
class Traffic:
    """What an operation reads and writes: (position, shape, itemsize in bytes) of operands and results.

    ``fused`` are results that are computed inside a fusion and never written.
    """

    reads: tuple[tuple[int, tuple[int, ...], float], ...]
    writes: tuple[tuple[int, tuple[int, ...], float], ...]
    dtype: str
    fused: tuple[tuple[int, tuple[int, ...], float], ...] = ()


def seconds(rule: Rule, traffic: Traffic, strategy: Strategy, axis_sizes: Sequence[int], profile: Any) -> float:
    """Seconds of one execution on one device (partial results are written in full before they are combined)."""
    flops = rule.flops * strategy.fraction
    moved = 0.0
    for i, shape, itemsize in traffic.reads:
        layout = strategy.operands[i]
        if layout is not None:
            moved += local_bytes(shape, itemsize, layout, axis_sizes)
    for j, shape, itemsize in traffic.writes:
        layout = strategy.partial if j == 0 and strategy.partial is not None else strategy.results[j]
        moved += local_bytes(shape, itemsize, layout, axis_sizes)
    for j, shape, itemsize in traffic.fused:
        moved += local_bytes(shape, itemsize, strategy.results[j], axis_sizes) * FUSED_SHARE
    return profile.roofline_seconds(flops, moved, traffic.dtype)

"""Roofline compute: seconds one device spends on its share of an operation.

``max(flops / peak, bytes / bandwidth)`` over the local shard (Williams, Waterman and Patterson, "Roofline", CACM 2009),
with the profile's measured efficiencies inside peak and bandwidth. Only buffers that are really read or written count,
so a fused elementwise operation costs nothing beyond the buffers at the ends of its fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.rules.rule import Rule
from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.strategies import Strategy


@dataclass(frozen=True)
class Traffic:
    """What an operation reads and writes: (position, shape, itemsize in bytes) of operands and results."""

    reads: tuple[tuple[int, tuple[int, ...], float], ...]
    writes: tuple[tuple[int, tuple[int, ...], float], ...]
    dtype: str


def seconds(rule: Rule, traffic: Traffic, strategy: Strategy, axis_sizes: Sequence[int], profile: Any) -> float:
    """Seconds of one execution on one device (partial results are written in full before they are combined)."""
    flops = rule.flops * strategy.fraction
    moved = 0
    for i, shape, itemsize in traffic.reads:
        layout = strategy.operands[i]
        if layout is not None:
            moved += local_bytes(shape, itemsize, layout, axis_sizes)
    for j, shape, itemsize in traffic.writes:
        layout = strategy.partial if j == 0 and strategy.partial is not None else strategy.results[j]
        moved += local_bytes(shape, itemsize, layout, axis_sizes)
    return profile.roofline_seconds(flops, moved, traffic.dtype)

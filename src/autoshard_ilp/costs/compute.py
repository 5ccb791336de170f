"""Roofline compute: seconds one device spends on its share of an operation.

``max(flops / peak, bytes / bandwidth)`` over the local shard (Williams, Waterman and Patterson, "Roofline", CACM 2009),
with the profile's measured efficiencies inside peak and bandwidth. Only buffers that are really read or written count,
so a fused elementwise operation costs little beyond the buffers at the ends of its fusion. Little, but not nothing:
whether every device computes a mask of the size of the logits in full must not be a matter of taste.

On GPUs, measured (``benchmarks/results/measured_single_device-*``), four things more take time: every kernel a fixed
one; products whose results have too few tiles for all processors, or rows that are not aligned; random bits, which are
arithmetic that the roofline of products does not know; and copies of what a batched product reads or writes in another
order of dimensions (:mod:`autoshard_ilp.costs.kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.rules.rule import Rule
from autoshard_ilp.sharding import local_bytes, local_shape
from autoshard_ilp.strategies import Strategy

FUSED_SHARE = 1 / 16
"""A result that stays inside a fusion counts as this share of the bytes it would have in memory. Assumption: registers
and vector memory move at least sixteen times what device memory does (TPU v5e: some 3e12 vector operations per second
on 4 bytes against 8.2e11 bytes per second; NVIDIA's GPUs have more)."""


@dataclass(frozen=True)
class Traffic:
    """What an operation reads and writes: (position, shape, itemsize in bytes) of operands and results.

    ``fused`` are results that are computed inside a fusion and never written.

    Attributes:
        kernels: whose fixed time counts.
        random_words: 32-bit words of random bits that one whole execution draws.
        product: dimensions of a matrix product, where its shape tells its rate.
        share: of the rate of products that this one reaches whatever its layout.
    """

    reads: tuple[tuple[int, tuple[int, ...], float], ...]
    writes: tuple[tuple[int, tuple[int, ...], float], ...]
    dtype: str
    fused: tuple[tuple[int, tuple[int, ...], float], ...] = ()
    kernels: int = 0
    random_words: float = 0.0
    product: ProductDims | None = None
    share: float = 1.0


@dataclass(frozen=True)
class ProductDims:
    """How the result's dimensions divide into those of a batch, of the left and of the right operand, in this order."""

    batch: int
    left: int
    shape: tuple[int, ...]


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
    if not traffic.kernels and not traffic.random_words:
        return profile.roofline_seconds(flops, moved, traffic.dtype)
    taken = profile.roofline_seconds(flops / traffic.share, moved, traffic.dtype)
    if traffic.product is not None:
        taken = max(taken, _product_seconds(flops / traffic.share, traffic, strategy, axis_sizes, profile))
    if traffic.random_words:
        taken = max(taken, traffic.random_words * strategy.fraction / profile.random_words_per_s)
    return taken + traffic.kernels * profile.kernel_launch_seconds


def _product_seconds(
    flops: float, traffic: Traffic, strategy: Strategy, axis_sizes: Sequence[int], profile: Any
) -> float:
    """Arithmetic of one device's share of a product, whose contracted length follows from its operations."""
    dims = traffic.product
    layout = strategy.partial if strategy.partial is not None else strategy.results[0]
    if dims is None or not flops:
        return 0.0
    local = local_shape(dims.shape, layout, axis_sizes)
    count, m, n = (math.prod(part) for part in split(local, dims.batch, dims.left))
    return profile.product_seconds(m, flops / (2.0 * count * m * n), n, count=count, dtype=traffic.dtype)


def split(shape: Sequence[int], *lengths: int) -> list[Sequence[int]]:
    """Consecutive parts of these lengths, and what is left."""
    parts = []
    for length in lengths:
        parts.append(shape[:length])
        shape = shape[length:]
    return [*parts, shape]

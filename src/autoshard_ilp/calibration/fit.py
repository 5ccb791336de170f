"""From measured seconds to the figures of a profile.

Collectives: seconds = call_k + steps x hop + network + slope_k x (nominal seconds of the bytes), where steps and
nominal seconds are those of ``costs.collectives`` for the same mesh on the profile to be corrected. All of ``call_k``,
``hop`` and ``slope_k`` are fitted at once, none negative, to the logarithms of the seconds: 1 KiB counts as much as
64 MiB, and twice too slow as much as twice too fast. A robust loss keeps disturbed measurements from bending the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.calibration.timing import Sample
from autoshard_ilp.costs.collectives import CollectiveCosts
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS, HardwareProfile
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.mesh import MeshSpec

SLOWEST, FASTEST = 1e-6, 1e6
TURNS = 5
PRODUCTS = ("matmul", "unaligned", "convolution")


@dataclass(frozen=True)
class Residual:
    """How far the fitted figures are from what was measured: |predicted - measured| / measured."""

    median: float
    worst: float
    samples: int


def fit(
    base: HardwareProfile, mesh: MeshSpec, samples: Sequence[Sample]
) -> tuple[HardwareProfile, dict[str, Residual]]:
    """The profile with every measured figure in place of the nominal one, and the residuals by kind.

    Args:
        base: gives the structure (link kind, torus, domains) and every figure that was not measured.
        mesh: the mesh that the samples were taken on.
    """
    fitted = _fit_compute(_fit_memory(_fit_kernels(base, samples), samples), samples)
    fitted = _fit_shares(fitted, samples)
    collectives = [s for s in samples if s.kind in COLLECTIVE_KINDS]
    if collectives:
        fitted = _fit_collectives(fitted, mesh, collectives)
    residuals = {}
    for kind in dict.fromkeys(s.kind for s in samples if s.kind != "kernel"):
        errors = [abs(predict(fitted, mesh, s) / s.seconds - 1.0) for s in samples if s.kind == kind]
        residuals[kind] = Residual(statistics.median(errors), max(errors), len(errors))
    return fitted, residuals


def predict(profile: HardwareProfile, mesh: MeshSpec, sample: Sample) -> float:
    """Seconds that a profile gives for what a sample measured."""
    if sample.kind in ("memory", "reduction"):
        return profile.kernel_launch_seconds + profile.roofline_seconds(0.0, sample.size)
    if sample.kind == "random":
        words_per_s = profile.random_words_per_s
        return profile.kernel_launch_seconds + (sample.size / words_per_s if words_per_s else 0.0)
    if sample.kind in PRODUCTS:
        return profile.kernel_launch_seconds + _product(profile, sample)
    links = MeshLinks.create(profile, mesh.axis_names, mesh.axis_sizes)
    return CollectiveCosts(links).seconds(sample.kind, sample.axes, sample.size)


def _product(profile: HardwareProfile, sample: Sample) -> float:
    """Seconds of a sample's product or convolution; a pair of products that undo each other counts as one."""
    m, k, n = sample.product
    itemsize = 2 if sample.dtype == "bfloat16" else 4
    if sample.kind == "convolution":
        moved = float(itemsize * (2 * m * n + k * n))
        arithmetic = 2.0 * m * k * n / (profile.peak_flops_per_s(sample.dtype) * profile.convolution_efficiency)
        return max(arithmetic, profile.roofline_seconds(0.0, moved))
    moved = float(itemsize * (m * k + k * n + m * n))
    aligned = sample.kind == "matmul"
    both = [
        max(profile.product_seconds(m, a, b, dtype=sample.dtype, aligned=aligned), profile.roofline_seconds(0.0, moved))
        for a, b in ((k, n), (n, k))
    ]
    return statistics.mean(both)


def _fit_shares(fitted: HardwareProfile, samples: Sequence[Sample]) -> HardwareProfile:
    """What products of odd sizes and convolutions reach of the rate of products, and the rate of random bits."""
    found: dict[str, Any] = {}
    for kind, key in (("unaligned", "unaligned_efficiency"), ("convolution", "convolution_efficiency")):
        whole: dict[str, Any] = {key: 1.0}
        shares = [
            _product(replace(fitted, **whole), s) / max(s.seconds - fitted.kernel_launch_seconds, s.seconds / 2)
            for s in samples
            if s.kind == kind
        ]
        if shares:
            found[key] = min(1.0, statistics.median(shares))
    rates = [s.size / s.seconds for s in samples if s.kind == "random"]
    if rates:
        found["random_words_per_s"] = max(rates)
    return replace(fitted, **found)


def _fit_compute(base: HardwareProfile, samples: Sequence[Sample]) -> HardwareProfile:
    """Peaks: the best rate that any shape reached; on CPUs, where no peak is known, the median of all shapes.

    A known nominal peak stays, with the share of it that is reached; where types reach different shares, the peak of
    those that reach less is put so much lower.
    """
    rates: dict[str, list[float]] = {}
    for s in samples:
        if s.kind == "matmul":
            rate = 2.0 * math.prod(s.product) / max(s.seconds - base.kernel_launch_seconds, s.seconds / 2)
            rates.setdefault(s.dtype, []).append(rate)
    if not rates:
        return base
    typical = statistics.median if base.family == "cpu" else max
    reached = {dtype: typical(found) for dtype, found in rates.items()}
    nominal = dict(base.peak_flops_per_s_by_dtype)
    if base.family == "cpu":  # nothing is nominal about a host: its figures are assumptions
        scale = reached["float32"] / (nominal["float32"] * base.matmul_efficiency)
        peaks = {dtype: peak * base.matmul_efficiency * scale for dtype, peak in nominal.items()} | reached
        return replace(base, peak_flops_per_s_by_dtype=peaks, matmul_efficiency=1.0)
    shares = {dtype: rate / (base.peak_flops_per_s(dtype) / base.matmul_efficiency) for dtype, rate in reached.items()}
    most = max(shares.values())
    for dtype, share in shares.items():
        runs_as = base.float32_runs_as if dtype == "float32" else dtype
        if share < most and runs_as in nominal:
            nominal[runs_as] *= share / most
    return replace(base, peak_flops_per_s_by_dtype=nominal, matmul_efficiency=min(1.0, most))


def _fit_kernels(base: HardwareProfile, samples: Sequence[Sample]) -> HardwareProfile:
    """Fixed time: that of a product of almost nothing."""
    kernel = [s.seconds for s in samples if s.kind == "kernel"]
    return replace(base, kernel_launch_seconds=min(kernel)) if kernel else base


def _fit_memory(base: HardwareProfile, samples: Sequence[Sample]) -> HardwareProfile:
    """Bandwidth of the largest pass: smaller ones may stay in a cache."""
    passes = [s for s in samples if s.kind == "memory"]
    if not passes:
        return base
    largest = max(passes, key=lambda s: s.size)
    rate = largest.size / max(largest.seconds - base.kernel_launch_seconds, largest.seconds / 2)
    if base.family == "cpu":
        return replace(base, memory_bytes_per_s=rate, memory_efficiency=1.0)
    return replace(base, memory_efficiency=min(1.0, rate / base.memory_bytes_per_s))


def _fit_collectives(base: HardwareProfile, mesh: MeshSpec, samples: Sequence[Sample]) -> HardwareProfile:
    kinds = [k for k in COLLECTIVE_KINDS if any(s.kind == k for s in samples)]
    nothing: Mapping[str, float] = dict.fromkeys(COLLECTIVE_KINDS, 0.0)
    bare = replace(base, overlap_by_kind=nothing, efficiency_by_kind={}, call_seconds_by_kind=nothing)
    by_hop = _costs(replace(bare, hop_seconds=1.0, network_hop_seconds=0.0), mesh)
    by_byte = _costs(replace(bare, hop_seconds=0.0), mesh)
    rows = np.zeros((len(samples), 2 * len(kinds) + 1))
    network = np.zeros(len(samples))
    inner = np.zeros(len(samples))  # steps of a reduce-scatter inside a node
    for i, s in enumerate(samples):
        k = kinds.index(s.kind)
        network[i], slope = by_byte.alpha_beta(s.kind, s.axes)
        rows[i, k] = 1.0
        rows[i, len(kinds) + k] = slope * s.size
        rows[i, -1] = by_hop.alpha_beta(s.kind, s.axes)[0]
        inner[i] = by_hop.links.group(s.axes).inner_size - 1
    seconds = np.array([s.seconds for s in samples])
    found = _non_negative_fit(rows, network, seconds)
    if base.family == "gpu" and {"all-reduce", "reduce-scatter"} <= set(kinds):
        found = _with_short_all_reduces(rows, network, seconds, found, kinds, inner)
    call = {**base.call_seconds_by_kind, **{k: float(found[i]) for i, k in enumerate(kinds)}}
    slopes = {k: float(np.clip(found[len(kinds) + i], 1 / FASTEST, 1 / SLOWEST)) for i, k in enumerate(kinds)}
    efficiency = {**base.efficiency_by_kind, **{k: 1.0 / slope for k, slope in slopes.items()}}
    return replace(base, call_seconds_by_kind=call, hop_seconds=float(found[-1]), efficiency_by_kind=efficiency)


def _with_short_all_reduces(
    rows: np.ndarray, network: np.ndarray, seconds: np.ndarray, found: np.ndarray, kinds: list[str], inner: np.ndarray
) -> np.ndarray:
    """Fit again where ``costs.collectives`` gives an all-reduce the fixed seconds of a reduce-scatter.

    Which ones these are depends on the figures, so the two are found in turn.
    """
    whole, half = kinds.index("all-reduce"), kinds.index("reduce-scatter")
    reduced = rows[:, whole] > 0
    before = np.zeros(len(rows), bool)
    for _ in range(TURNS):
        short = reduced & (found[whole] + rows[:, -1] * found[-1] < found[half] + inner * found[-1])
        if (short == before).all():
            break
        own = rows.copy()
        own[short, whole], own[short, half], own[short, -1] = 0.0, 1.0, inner[short]
        found, before = _non_negative_fit(own, network, seconds), short
    return found


def _non_negative_fit(rows: np.ndarray, fixed: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """x >= 0 for which ``rows @ x + fixed`` comes near ``seconds``, in ratio.

    Starts from non-negative least squares in relative errors (C. L. Lawson, R. J. Hanson, "Solving Least Squares
    Problems", 1974, chapter 23), which alone leans towards figures that are too fast: no error there exceeds 100 %.
    """
    from scipy.optimize import least_squares, nnls

    weighted = rows / seconds[:, None]
    scale = np.where(weighted.max(0) > 0, weighted.max(0), 1.0)
    start = np.maximum(nnls(weighted / scale, np.maximum(1.0 - fixed / seconds, 0.0))[0], 1e-6)

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log((weighted / scale) @ x + fixed / seconds)

    return least_squares(errors, start, bounds=(1e-9, np.inf), loss="soft_l1", f_scale=0.2).x / scale


def _costs(profile: HardwareProfile, mesh: MeshSpec) -> CollectiveCosts:
    return CollectiveCosts(MeshLinks.create(profile, mesh.axis_names, mesh.axis_sizes))

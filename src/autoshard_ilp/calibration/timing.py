"""Seconds of one iteration of a timed loop, and the grid of what is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.costs.profile import COLLECTIVE_KINDS

PAYLOAD_BYTES = tuple(1 << exponent for exponent in range(10, 27, 2))
"""1 KiB to 64 MiB."""
MATMUL_SIZES = (256, 512, 1024, 2048)
MATMUL_DTYPES = ("float32", "bfloat16")
MEMORY_BYTES = (1 << 22, 1 << 24, 1 << 26)
LONG = 4.0
"""A run of so many times its target length is repeated less often."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        kind: a collective's kind, "matmul", "memory" or "kernel".
        axes: indices of the mesh axes of a collective's group.
        size: payload bytes of a collective, side of a matrix, bytes of a pass over memory (half read, half written).
        dtype: of a matmul.
        seconds: of one execution, the fastest of the repeats: whatever else ran only adds to it.
        spread: (slowest - fastest) / fastest of the repeats.
    """

    kind: str
    axes: tuple[int, ...]
    size: int
    dtype: str
    seconds: float
    spread: float


def seconds_of(
    loop: tuple[Callable[[Any, Any], Any], Any], *, target_seconds: float, repeats: int
) -> tuple[float, float]:
    """Seconds of one iteration: (fastest, spread) of ``repeats`` runs of about ``target_seconds`` each.

    Where one iteration takes longer than a run should, there are fewer runs, at least one.
    """
    program, operand = loop

    def run(count: int) -> float:
        began = time.perf_counter()
        program(operand, np.int32(count)).block_until_ready()
        return time.perf_counter() - began

    run(0)  # compiles
    empty = min(run(0) for _ in range(3))
    count = 1
    while (elapsed := run(count)) < target_seconds / 4 and count < 1 << 20:
        count *= 2 if elapsed > target_seconds / 64 else 8
    timed = [elapsed] if elapsed > LONG * target_seconds else []
    while len(timed) < repeats and sum(timed) < LONG * target_seconds * repeats:
        timed.append(run(count))
    runs = [max(seconds - empty, 1e-9) / count for seconds in timed]
    return min(runs), (max(runs) - min(runs)) / min(runs)


def measure(
    mesh: Any,
    *,
    payload_bytes: Sequence[int] = PAYLOAD_BYTES,
    matmul_sizes: Sequence[int] = MATMUL_SIZES,
    memory_bytes: Sequence[int] = MEMORY_BYTES,
    target_seconds: float = 0.05,
    repeats: int = 5,
    time_limit: float = math.inf,
    told: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Iterator[Sample]:
    """Times matmuls, memory and every collective over every single axis and over the whole mesh.

    Args:
        mesh: ``jax.sharding.Mesh`` of attached devices.
        time_limit: seconds after which no further measurement begins. The first ones cover every kind: of each the
            smallest and the largest size, then sizes between those that were measured. Matrices whose product would
            take more than a twentieth of the limit are left out.
        told: called with (measurements done, of how many, what is next).
    """
    from autoshard_ilp.calibration import programs

    jobs = grid(mesh, payload_bytes, matmul_sizes, memory_bytes)
    ends = time.perf_counter() + time_limit
    products: dict[str, float] = {}  # dtype -> seconds of a product of matrices of side one
    for done, (kind, group, size, dtype) in enumerate(jobs):
        if time.perf_counter() >= ends:
            return
        if kind == "matmul" and products.get(dtype, 0.0) * size**3 > time_limit / 20:
            continue
        told(done, len(jobs), kind)
        moved = size
        if kind in ("matmul", "kernel"):
            loop = programs.matmul_loop(mesh, size, np.dtype(_numpy_dtype(dtype)))
        elif kind == "memory":
            loop, moved = programs.memory_loop(mesh, size), 2 * size
        else:
            names = tuple(mesh.axis_names[i] for i in group)
            loop, moved = programs.collective_loop(mesh, kind, names, size)
        seconds, spread = seconds_of(loop, target_seconds=target_seconds, repeats=repeats)
        if kind == "matmul":
            products[dtype] = seconds / size**3
        yield Sample(kind, group, moved, dtype, seconds, spread)


def grid(
    mesh: Any,
    payload_bytes: Sequence[int] = PAYLOAD_BYTES,
    matmul_sizes: Sequence[int] = MATMUL_SIZES,
    memory_bytes: Sequence[int] = MEMORY_BYTES,
) -> list[tuple[str, tuple[int, ...], int, str]]:
    """All that is measured as (kind, axes, size, dtype), what a profile needs most coming first."""
    groups = axis_groups(tuple(mesh.shape[a] for a in mesh.axis_names))
    ranked: list[tuple[int, tuple[str, tuple[int, ...], int, str]]] = [(0, ("kernel", (), 8, "float32"))]
    ranked += [(i, ("matmul", (), n, d)) for i, n in enumerate(ends_first(matmul_sizes)) for d in MATMUL_DTYPES]
    ranked += [(i, ("memory", (), size, "float32")) for i, size in enumerate(ends_first(memory_bytes))]
    for i, size in enumerate(ends_first(payload_bytes)):
        ranked += [(i, (kind, g, size, "float32")) for g in groups for kind in COLLECTIVE_KINDS]
    return [job for _, job in sorted(ranked, key=lambda x: x[0])]


def ends_first(sizes: Sequence[int]) -> list[int]:
    """The smallest, the largest, then always the one furthest, in ratio, from those before it."""
    left = sorted(set(sizes))
    chosen = [left.pop(0)]
    while left:
        chosen.append(max(left, key=lambda n: min(abs(math.log(n / c)) for c in chosen)))
        left.remove(chosen[-1])
    return chosen


def axis_groups(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Each axis of several devices alone, and all of them together."""
    several = tuple(i for i, size in enumerate(sizes) if size > 1)
    return [(i,) for i in several] + ([several] if len(several) > 1 else [])


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name

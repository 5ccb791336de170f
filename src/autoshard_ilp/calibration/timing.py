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
GPU_MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
GPU_MATMUL_SHAPES = (
    (64, 4096, 4096),
    (128, 1024, 4096),
    (1024, 1024, 4096),
    (8192, 768, 768),
    (8192, 768, 3072),
    (16384, 64, 256),
    (8192, 4096, 16384),
)
"""Few rows, few columns, and what the layers of small and large transformers multiply."""
MATMUL_DTYPES = ("float32", "bfloat16")
CPU_MATMUL_SHAPES = ((1024, 256, 1024), (64, 2048, 512), (512, 256, 512))
"""What a layer of a small model multiplies on one of several virtual devices."""
CPU_CONVOLUTIONS = ((16, 16, 64), (16, 8, 128))
CPU_RANDOM_WORDS = (1 << 16, 1 << 20)
MEMORY_BYTES = (1 << 22, 1 << 24, 1 << 26)
GPU_UNALIGNED_SHAPES = ((8192, 1024, 16385), (4096, 2048, 32769))
"""Rows that begin at any byte: vocabularies that nobody rounded up."""
GPU_CONVOLUTIONS = ((128, 56, 64), (128, 28, 128), (128, 14, 256), (128, 7, 512))
"""Images, their side, channels: those of a residual network."""
GPU_RANDOM_WORDS = (1 << 22, 1 << 26)
GPU_MEMORY_BYTES = (1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)
"""Caches hold up to 60 MiB."""
KERNEL_SIZE = {"gpu": 64}
"""Side of the product that stands for a kernel's fixed time, 8 but for GPUs, where the compiler makes sums of those."""
LONG = 4.0
"""A run of so many times its target length is repeated less often."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        kind: a collective's kind, "matmul", "unaligned", "convolution", "memory" (half read, half written;
            on CPUs four sevenths read), "reduction" (read), "random" or "kernel".
        axes: indices of the mesh axes of a collective's group.
        size: payload bytes of a collective, side of square matrices, bytes of a pass over memory,
            random words.
        dtype: of a matmul.
        seconds: of one execution, the fastest of the repeats: whatever else ran only adds to it.
        spread: (slowest - fastest) / fastest of the repeats.
        shape: of a product (m, k, n) that is not square; of a convolution (images, side, channels).
    """

    kind: str
    axes: tuple[int, ...]
    size: int
    dtype: str
    seconds: float
    spread: float
    shape: tuple[int, int, int] | None = None

    @property
    def product(self) -> tuple[int, int, int]:
        """(m, k, n) of a product, or of the one that a convolution is."""
        if self.kind == "convolution" and self.shape:
            images, side, channels = self.shape
            return images * side * side, 9 * channels, channels
        return self.shape or (self.size, self.size, self.size)


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
    run(1)  # touches memory for the first time, which may take many times what it takes afterwards
    empty = min(run(0) for _ in range(3))
    count = 1
    # What a run of no iterations takes, copies of a large operand, must not hide what the iterations do.
    while (elapsed := run(count)) - empty < max(target_seconds / 4, empty) and count < 1 << 20:
        count *= 2 if elapsed - empty > target_seconds / 64 else 8
    timed = [elapsed] if elapsed > LONG * target_seconds else []
    while len(timed) < repeats and sum(timed) < LONG * target_seconds * repeats:
        timed.append(run(count))
    runs = [max(seconds - empty, 1e-9) / count for seconds in timed]
    return min(runs), (max(runs) - min(runs)) / min(runs)


def measure(
    mesh: Any,
    *,
    payload_bytes: Sequence[int] = PAYLOAD_BYTES,
    matmul_sizes: Sequence[int] | None = None,
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

    jobs = grid(mesh, payload_bytes, matmul_sizes)
    ends = time.perf_counter() + time_limit
    products: dict[str, float] = {}  # dtype -> seconds of a product of matrices of side one
    for done, (kind, group, what, dtype) in enumerate(jobs):
        if time.perf_counter() >= ends:
            return
        size = what if isinstance(what, int) else max(what)
        shape = (what, what, what) if isinstance(what, int) else what
        if kind == "matmul" and products.get(dtype, 0.0) * math.prod(shape) > time_limit / 20:
            continue
        told(done, len(jobs), kind)
        moved, times = size, programs.repeats(mesh)
        if kind in ("matmul", "unaligned", "kernel"):
            loop = programs.matmul_loop(mesh, shape, np.dtype(_numpy_dtype(dtype)))
            times = programs.products(mesh, shape)
        elif kind == "memory" and mesh.devices.flat[0].platform == "cpu":
            loop, moved = programs.update_calls(mesh, size)
        elif kind == "memory":
            loop, moved = programs.memory_loop(mesh, size), 2 * size
        elif kind == "reduction":
            loop = programs.reduction_loop(mesh, size)
        elif kind == "random":
            loop = programs.random_loop(mesh, size)
        elif kind == "convolution":
            loop = programs.convolution_loop(mesh, shape, np.dtype(_numpy_dtype(dtype)))
            times = max(times, programs.WRITTEN_OUT)
        else:
            names = tuple(mesh.axis_names[i] for i in group)
            loop, moved = programs.collective_loop(mesh, kind, names, size)
        seconds, spread = seconds_of(loop, target_seconds=target_seconds, repeats=repeats)
        seconds /= times
        if kind == "matmul":
            products[dtype] = seconds / math.prod(shape)
        yield Sample(kind, group, moved, dtype, seconds, spread, None if isinstance(what, int) else what)


def grid(
    mesh: Any, payload_bytes: Sequence[int] = PAYLOAD_BYTES, matmul_sizes: Sequence[int] | None = None
) -> list[tuple[str, tuple[int, ...], Any, str]]:
    """All that is measured as (kind, axes, size or shape, dtype), what a profile needs most coming first.

    Args:
        matmul_sizes: sides of square matrices; None: what suits the platform, on GPUs others as well.
    """
    platform = mesh.devices.flat[0].platform
    gpu = platform == "gpu"
    sides = (GPU_MATMUL_SIZES if gpu else MATMUL_SIZES) if matmul_sizes is None else matmul_sizes
    shapes = {"gpu": GPU_MATMUL_SHAPES, "cpu": CPU_MATMUL_SHAPES}.get(platform, ()) if matmul_sizes is None else ()
    passes = ends_first(GPU_MEMORY_BYTES if gpu else MEMORY_BYTES)
    groups = axis_groups(tuple(mesh.shape[a] for a in mesh.axis_names))
    ranked: list[tuple[int, tuple[str, tuple[int, ...], Any, str]]]
    ranked = [(0, ("kernel", (), KERNEL_SIZE.get(platform, 8), "float32"))]
    ranked += [(i, ("matmul", (), n, d)) for i, n in enumerate(ends_first(sides)) for d in MATMUL_DTYPES]
    ranked += [(i + 2, ("matmul", (), shape, d)) for i, shape in enumerate(shapes) for d in MATMUL_DTYPES]
    ranked += [(i, ("memory", (), size, "float32")) for i, size in enumerate(passes)]
    ranked += [(i, ("reduction", (), size, "float32")) for i, size in enumerate(passes)]
    if gpu and matmul_sizes is None:
        ranked += [(i + 1, ("unaligned", (), n, d)) for i, n in enumerate(GPU_UNALIGNED_SHAPES) for d in MATMUL_DTYPES]
        ranked += [(i + 1, ("convolution", (), n, d)) for i, n in enumerate(GPU_CONVOLUTIONS) for d in MATMUL_DTYPES]
        ranked += [(i + 1, ("random", (), n, "uint32")) for i, n in enumerate(GPU_RANDOM_WORDS)]
    if platform == "cpu" and matmul_sizes is None:
        ranked += [(i + 1, ("convolution", (), n, "float32")) for i, n in enumerate(CPU_CONVOLUTIONS)]
        ranked += [(i + 1, ("random", (), n, "uint32")) for i, n in enumerate(CPU_RANDOM_WORDS)]
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

"""What a step holds at least, whatever is decided: every buffer divided among all devices.

Most steps of large models fit only with recomputation, and those without are far from it. That is told here from the
graph alone, before anything is priced: the program (:mod:`autoshard_ilp.costs.build`) would only prove the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autoshard_ilp.costs.account import MERGED
from autoshard_ilp.costs.alike import computed_alike
from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.table import SMALL_BYTES
from autoshard_ilp.costs.tpu.heap import REPORTED
from autoshard_ilp.costs.tpu.onchip import vector_bytes
from autoshard_ilp.graph import Graph


def least_bytes(graph: Graph, profile: Any, buffers: Buffers, devices: int, capacity: float = 0) -> int:
    """Bytes per device that no plan of a step falls short of: a bound of the program's ``peak``, whatever is chosen.

    At every instant, of each buffer in use an even part; the largest sum is the answer. Left out is what programs may
    count as less: buffers of loops and branches, small tensors, masks (TPUs pack them), what several layers compute
    alike (GPUs hold it once), and as much as a TPU keeps on its chip.

    Args:
        graph, buffers: of the step.
        profile: of the hardware.
        devices: of the mesh.
        capacity: bytes; where the answer would be no more than this, it may be 0, which is found sooner.
    """
    holes = 1.0 + REPORTED * getattr(profile, "heap_loss_share", 0.0)
    less = math.ceil(holes * vector_bytes(profile, graph.has_backward())) + 1
    most = _most(graph, buffers, range(len(graph.tensors))) // devices - less
    if most > capacity and getattr(profile, "family", "") in MERGED:
        most = _most(graph, buffers, computed_alike(graph)) // devices - less
    return max(0, int(most)) if most > capacity else 0


def _most(graph: Graph, buffers: Buffers, alike: Sequence[object]) -> float:
    """Bytes in use at once, all devices together; of what is ``alike``, one tensor counts."""
    change, seen = np.zeros(buffers.horizon + 1), set[object]()
    for t, size in _held(graph, buffers):
        if alike[t] in seen:
            continue
        seen.add(alike[t])
        start = int(buffers.start[t])
        change[start] += size
        change[max(int(buffers.end[t]), start + 1)] -= size
    return float(np.cumsum(change).max(initial=0.0))


def _held(graph: Graph, buffers: Buffers) -> Iterator[tuple[int, float]]:
    """Buffers outside loops that hold numbers, with the bytes of the whole tensor; none is held in fewer."""
    for op in graph.ops:
        for t in op.outputs:
            tensor = graph.tensors[t]
            if not buffers.stored[t] or tensor.itemsize <= 1 or tensor.bytes < SMALL_BYTES:
                continue
            if not op.region and not any(graph.ops[reader].region for reader, _ in tensor.consumers):
                yield t, float(math.prod(tensor.shape)) * tensor.itemsize

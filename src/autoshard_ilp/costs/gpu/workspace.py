"""When the place of cuBLAS's workspace is taken.

Every call has a workspace of its own, but XLA:GPU gives all of them one place: they are large, so they are placed
first. What lives while some product runs cannot lie there, and that is nearly everything. Only what is written and read
between two products can, such as what a softmax computes on the way.
"""

from __future__ import annotations

import numpy as np

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.padding import WORKSPACE_BYTES
from autoshard_ilp.graph import BOUNDARY, Graph

USED_SHARE = 0.5
"""Of the workspace: if what lives between two products takes more than this, the place counts as used for it."""


def workspace_spans(graph: Graph, buffers: Buffers, n_devices: int) -> list[tuple[int, int]]:
    """Half-open spans of time from the first product to the last in which the place holds nothing else.

    Args:
        graph: of a step whose products cuBLAS computes (:func:`autoshard_ilp.costs.gpu.triton.leaves_triton`).
        buffers: of that graph.
        n_devices: among which a buffer is divided at most.
    """
    calls = np.array(sorted(int(buffers.time[op.id]) for op in graph.ops if op.primitive == "dot_general"), np.int64)
    if not len(calls):
        return []
    used = np.zeros(buffers.horizon + 1)
    for t in graph.tensors:
        if t.producer is None or not buffers.stored[t.id] or graph.ops[t.producer].primitive in BOUNDARY:
            continue
        start, end = int(buffers.start[t.id]), int(buffers.end[t.id])
        if np.searchsorted(calls, start) == np.searchsorted(calls, end):  # no call while it lives
            used[start] += t.bytes / n_devices
            used[end] -= t.bytes / n_devices
    free = np.cumsum(used) < USED_SHARE * WORKSPACE_BYTES
    free[: calls[0]] = free[calls[-1] + 1 :] = False
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

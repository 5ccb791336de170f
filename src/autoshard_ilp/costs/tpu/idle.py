"""How long a buffer lies idle between two reads, and until when it is therefore in a TPU's device memory.

XLA's memory space assignment keeps a buffer in vector memory between two of its uses only if less time passes than 8
copies of the whole vector memory would take (``xla_msa_max_overlap_to_mem_size_async_copy_ratio``, and
``CanAllocateInAlternateMemoryNoCopy`` of XLA's ``memory_space_assignment``): 1.3 ms on TPU v5e. What waits longer is
copied to device memory as soon as it is made, and back before it is read again. So while logits over a vocabulary are
computed, no activation of the layers before is on the chip. (Compiled for v5e, two layers of GPT-2: 45 of the 117 MB of
vector memory are in use then, all of them by what the product itself reads and writes.)

The seconds that pass are XLA's own estimates, which grow from chip to chip in another way than a profile's: about 1.7
times these on v5e, 3.4 times on v6e. A profile therefore says how many copies it is in its own seconds
(``memory.vector_idle_copies``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.graph import Graph, Op

Busy = frozenset[tuple[int, int]]
"""Times, first and last, at which something is read: one operation, or a whole loop."""


class Idleness:
    """Who reads what when, and how much time passes in between.

    Args:
        graph: of the step.
        buffers: of the graph.
        classes: of the cost table; the fastest strategy of each counts, so that no plan is expected to take longer
            than it does.
        limit_seconds: idle time from which on a buffer leaves the chip.
    """

    def __init__(self, graph: Graph, buffers: Buffers, classes: Sequence[Any], limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.reads = _reads(graph, buffers)
        self.began = _elapsed(graph, buffers, classes)

    def in_memory_until(self, start: int, end: int, tensors: Iterable[int]) -> int | None:
        """Until when a buffer is in device memory: to the end of its last long wait; None: it has none.

        Args:
            start, end: when it is held (half-open).
            tensors: which are read of it.
        """
        if self.began[min(end, len(self.began) - 1)] - self.began[start] <= self.limit_seconds:
            return None
        busy = sorted({(a, b) for t in tensors for a, b in self.reads[t] if start <= b and a < end})
        until, last = None, start
        for a, b in busy:
            if a > last and self.began[a] - self.began[last + 1] > self.limit_seconds:
                until = a
            last = max(last, b)
        return until


def _reads(graph: Graph, buffers: Buffers) -> list[Busy]:
    """When each tensor is read, looking through views and fused operations; or written by a loop, a piece at a time."""
    found: list[Busy] = [frozenset()] * len(graph.tensors)
    spans = _region_spans(graph, buffers)
    for op in reversed(graph.ops):
        when: Busy = frozenset([(int(buffers.time[op.id]),) * 2])
        inside = op.primitive in VIEWS or (fusible(op) and not any(buffers.stored[t] for t in op.outputs))
        if inside and op.outputs:
            when = frozenset().union(*(found[t] for t in op.outputs))
        if op.primitive == "loop_stack":
            found[op.outputs[0]] |= frozenset([spans[op.region]])
        for t in op.inputs:
            entered = _entered(graph, op, t)
            found[t] |= frozenset([spans[entered]]) if entered else when
    for t in reversed(range(len(found))):
        root = int(buffers.root[t])
        if root != t:
            found[root] |= found[t]
    return found


def _entered(graph: Graph, op: Op, tensor: int) -> int:
    """The outermost loop or branch around an operation that a tensor is made outside of; 0: none."""
    producer = graph.tensors[tensor].producer
    made_in = 0 if producer is None else graph.ops[producer].region
    region = 0 if op.region == made_in else op.region
    while region and graph.regions[region].parent not in (0, made_in):
        region = graph.regions[region].parent
    return region


def _region_spans(graph: Graph, buffers: Buffers) -> dict[int, tuple[int, int]]:
    """First and last time of each loop and branch, what is inside them included."""
    spans: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        region, time = op.region, int(buffers.time[op.id])
        while region:
            first, last = spans.get(region, (time, time))
            spans[region] = min(first, time), max(last, time)
            region = graph.regions[region].parent
    return spans


def _elapsed(graph: Graph, buffers: Buffers, classes: Sequence[Any]) -> np.ndarray:
    """Seconds of computation before each time of the step."""
    seconds = np.zeros(buffers.horizon + 1)
    for cls in classes:
        finite = cls.compute_seconds[np.isfinite(cls.compute_seconds)]
        if len(finite):
            np.add.at(seconds, buffers.time[list(cls.members)] + 1, float(finite.min()) * cls.count / len(cls.members))
    return np.cumsum(seconds)

"""What waits because XLA:GPU combines small collectives into one.

All-gathers of several tensors that do not depend on one another become one instruction, up to a threshold of
:data:`THRESHOLD_BYTES` of results; so do all-reduces and reduce-scatters (flags of ``xla/debug_options_flags.cc`` like
``xla_gpu_all_gather_combine_threshold_bytes``; passes like ``all_gather_combiner``). A combined gather runs where the
first of its members is needed and holds all of them from there; a combined reduction runs where the last of its
operands is known and holds the unreduced ones until then.

Which tensors are combined depends on the layouts chosen, that is, on the solution. Here the groups are those of a plan
that communicates every weight and every gradient: program order, greedily filled. A group never holds more than the
threshold, so the error is bounded by it, and large models, whose weights exceed it one by one, have no groups at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard_ilp.costs.fusion import VIEWS, fusible
from autoshard_ilp.costs.memory import Buffers
from autoshard_ilp.graph import Graph

THRESHOLD_BYTES = 30 * 2**20
"""Default of XLA:GPU's three thresholds (30 MiB and 7 bytes)."""


def gathered_together(graph: Graph, buffers: Buffers, family: str) -> dict[int, int]:
    """Tensor that is known from the step's start (a weight, a cast of it) -> time at which a combined gather makes it.

    Args:
        graph: with hubs.
        buffers: of the graph.
        family: of the hardware; only XLA:GPU combines so.
    """
    if family != "gpu":
        return {}
    known = known_from_the_start(graph)
    first: dict[int, int] = {}  # tensor -> first time that the forward pass reads it
    for op in graph.ops:
        if op.phase == "forward" and op.primitive != "result" and not op.region:
            for t in op.inputs:
                if known[t]:
                    first.setdefault(t, int(buffers.time[op.id]))
    order = sorted(first, key=lambda t: (first[t], t))
    return {t: first[group[0]] for group in _groups(graph, order) for t in group}


def known_from_the_start(graph: Graph) -> list[bool]:
    """Per tensor, whether it is an argument of the step, or computed element by element from such."""
    known = [False] * len(graph.tensors)
    for op in graph.ops:
        ready = op.primitive == "argument" or (op.inputs and all(known[t] for t in op.inputs) and fusible(op))
        for t in op.outputs:
            known[t] = bool(ready) and not op.region
    return known


def reduced_together(graph: Graph, buffers: Buffers, family: str) -> dict[int, int]:
    """Gradient that only updates read -> time at which a combined reduction has all its operands."""
    if family != "gpu":
        return {}
    only = only_updates_read(graph)
    made = [
        op.outputs[0]
        for op in graph.ops
        if op.phase == "backward" and op.outputs and not op.region and only[op.outputs[0]] and not fusible(op)
    ]
    order = sorted(made, key=lambda t: (int(buffers.start[t]), t))
    return {t: int(buffers.start[group[-1]]) for group in _groups(graph, order) for t in group}


def only_updates_read(graph: Graph) -> list[bool]:
    """Per tensor, whether nothing but updates and results read it, directly or through views and elementwise work."""
    only = [False] * len(graph.tensors)
    for op in reversed(graph.ops):
        ends = op.phase == "update" or op.primitive == "result"
        passes = (op.primitive in VIEWS or fusible(op)) and bool(op.outputs) and all(only[t] for t in op.outputs)
        for t in op.inputs:
            others = graph.tensors[t].consumers
            last = others[-1][0] == op.id  # reversed order: seen first
            only[t] = (ends or passes) and (last or only[t])
    return only


def _groups(graph: Graph, order: Iterable[int]) -> list[list[int]]:
    """Consecutive tensors that fit under the threshold together; larger ones are left alone."""
    groups: list[list[int]] = []
    filled = THRESHOLD_BYTES + 1
    for t in order:
        size = graph.tensors[t].bytes
        if size > THRESHOLD_BYTES:
            continue
        if filled + size > THRESHOLD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(t)
        filled += size
    return groups

"""Which gathers of the forward pass wait for their reader, and which may begin with the step.

Schedulers begin what depends on nothing, such as the gather of a weight, as early as they can, and copies made before
their time may not fit. So under a budget a gather waits for the other operand of its reader, unless the copy is small,
or the budget leaves room for it above the plan's peak.

XLA:GPU makes one instruction of several small gathers that wait for nothing (:mod:`autoshard_ilp.costs.gpu.combining`),
which costs one fixed time instead of many. Early in the step there is room: activations are yet to come. So there only
those wait for whose copies the memory has no room from the start of the step until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard_ilp.course import layers_of
from autoshard_ilp.enforce.latesums import Room
from autoshard_ilp.enforce.ties import MIN_COPY_BYTES
from autoshard_ilp.graph import Graph
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, local_bytes

COMBINED = frozenset({"gpu"})
"""Platforms whose compilers combine gathers."""

MARGIN = 1 / 8
"""Share of the budget that stays free meanwhile: a compiled step's memory follows the predicted one only roughly, and
copies freed late meet the peak (two layers of BERT under a tight budget: 1.03 of it without, 1.02 as if all waited)."""

Layouts = Mapping[tuple[int, int], Layout]
Gather = tuple[int, int, int]
"""Bytes of the copy on a device, op id, operand index."""


def gathers_that_wait(
    graph: Graph, operands: Layouts, results: Layouts, room: Room, axis_sizes: Sequence[int]
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    """(op id, operand index) of gathers in the forward pass that wait; and those of them that need not on GPUs.

    Args:
        graph: of the step.
        operands, results: layouts per (op id, position).
        room: for copies; without a budget nothing waits.
        axis_sizes: devices along each mesh axis.
    """
    if room.budget_bytes is None:
        return frozenset(), frozenset()
    gathers, early = sorted(_gathers(graph, operands, results, axis_sizes)), 0
    waiting: list[Gather] = []
    for gather in gathers:
        early += gather[0]
        if early > room.budget_bytes - room.peak_bytes and gather[0] >= MIN_COPY_BYTES:
            waiting.append(gather)
    fit = frozenset(_that_fit(graph, gathers, waiting, room))
    return frozenset((op_id, i) for _, op_id, i in waiting), fit


def _gathers(graph: Graph, operands: Layouts, results: Layouts, axis_sizes: Sequence[int]) -> Iterator[Gather]:
    for (op_id, i), layout in operands.items():
        op = graph.ops[op_id]
        t = graph.tensors[op.inputs[i]]
        now = None if t.producer is None else results.get((t.producer, t.result_index))
        if op.phase != "forward" or now is None or PARTIAL in now or PARTIAL in layout:
            continue
        if any(b == WHOLE and a != WHOLE for a, b in zip(now, layout, strict=True)):
            yield local_bytes(t.shape, t.itemsize, layout, axis_sizes), op_id, i


def _that_fit(
    graph: Graph, gathers: Sequence[Gather], waiting: Sequence[Gather], room: Room
) -> Iterator[tuple[int, int]]:
    """Those of ``waiting`` for whose copies there is room from the start of the step on, the first read first."""
    assert room.budget_bytes is not None
    ends = {s.layer: s.end_s for s in room.course.segments if s.phase == "forward"}
    if not (ends and waiting):
        return
    last = max(ends.values())
    layer_of = layers_of((op.scope for op in graph.ops), (op.scope for op in graph.ops if op.phase == "forward"))
    at_s = np.array(room.course.at_s)
    free = int(room.budget_bytes * (1 - MARGIN)) - np.array(room.course.total_bytes(), np.int64)

    def until(gather: Gather) -> int:
        return int(np.searchsorted(at_s, ends.get(layer_of[graph.ops[gather[1]].scope], last), "left"))

    waits = set(waiting)
    for gather in gathers:
        if gather not in waits:
            free[: until(gather)] -= gather[0]
    for gather in sorted(waiting, key=lambda g: (until(g), g)):
        meanwhile = free[: until(gather)]
        if meanwhile.size and gather[0] <= meanwhile.min():
            meanwhile -= gather[0]
            yield gather[1], gather[2]

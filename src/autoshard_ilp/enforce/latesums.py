"""Which sums of the backward pass may be computed after it: those whose arrays the memory has room for until then.

Nothing waits for the gradients of biases and scales, so XLA:GPU computes them when it likes, and several in one kernel,
which is quicker (:mod:`.enforce.order`). Until then it holds what they sum up. Deep models have room for that:
the further the backward pass comes, the fewer activations there are. Where there is none, below the budget or below
what the plan says that the step takes, the backward pass waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.costs.primitives import SAME_VALUES
from autoshard_ilp.course import Course, layers_of
from autoshard_ilp.graph import Graph
from autoshard_ilp.sharding import Layout, local_bytes

SLACK = 1 / 32
"""Share of the predicted peak by which sums that are put off may exceed it."""


@dataclass(frozen=True)
class Room:
    """What there is room for.

    Attributes:
        peak_bytes: most bytes per device that the plan holds.
        budget_bytes: most that it may hold; None: no limit.
        course: of the step, whose samples of memory say what is held when; without any, the peak is.
    """

    peak_bytes: int
    budget_bytes: int | None = None
    course: Course = field(default_factory=Course)

    @property
    def limit_bytes(self) -> int:
        """Most bytes per device that the step may take, with sums put off."""
        honest = int(self.peak_bytes * (1 + SLACK))
        return honest if self.budget_bytes is None else min(honest, self.budget_bytes)


def sums_waited_for(
    graph: Graph,
    operands: Mapping[tuple[int, int], Layout],
    results: Mapping[tuple[int, int], Layout],
    room: Room,
    axis_sizes: Sequence[int],
) -> Iterator[int]:
    """Ids of sums that must not be put off.

    Args:
        graph: of the step.
        operands, results: layouts per (op id, position).
        room: for what is held meanwhile.
        axis_sizes: devices along each mesh axis.
    """
    from autoshard_ilp.enforce.order import sums_put_off

    begins: dict[str, float] = {}
    for s in room.course.segments:
        if s.phase == "backward":
            begins.setdefault(s.layer, s.start_s)
    layer_of = layers_of((op.scope for op in graph.ops), (op.scope for op in graph.ops if op.phase == "forward"))
    at_s = np.array(room.course.at_s or (0.0,))
    free = room.limit_bytes - np.array(room.course.total_bytes() or (room.peak_bytes,), np.int64)
    over: dict[int, list[int]] = {}  # array -> sums over it
    held: dict[int, int] = {}
    since: dict[int, int] = {}
    for op in sums_put_off(graph):
        t, layout = graph.tensors[op.inputs[0]], operands.get((op.id, 0))
        if layout is None:
            continue
        source = graph.tensors[graph.behind(t.id, SAME_VALUES)]
        written = layout if source.producer is None else results.get((source.producer, source.result_index), layout)
        over.setdefault(source.id, []).append(op.id)
        size = max(local_bytes(x.shape, x.itemsize, lay, axis_sizes) for x, lay in ((t, layout), (source, written)))
        held[source.id] = max(held.get(source.id, 0), size)
        first = max(0, int(np.searchsorted(at_s, begins.get(layer_of[op.scope], 0.0), "right")) - 1)
        since[source.id] = min(since.get(source.id, first), first)
    for source_id in sorted(held, key=lambda array: (-since[array], held[array], array)):
        later = free[since[source_id] :]
        if held[source_id] <= later.min():
            later -= held[source_id]
        else:
            yield from over[source_id]

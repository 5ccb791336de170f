"""The decided layouts of a whole step: what the plan file stores, and what the interpreter enforces."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.costs.table import CostTable
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.latesums import Room, sums_waited_for
from autoshard_ilp.report import flow_steps
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, local_bytes

Choice = tuple[tuple[Layout | None, ...], tuple[Layout, ...]]
"""Layouts of an operation's operands (None: not read) and of its results."""


@dataclass(frozen=True)
class Placement:
    """Layouts of every operation of a graph, compressed.

    Attributes:
        choices: distinct (operand layouts, result layouts).
        of_op: index into ``choices`` per op id.
        fingerprint: of the graph that the placement belongs to.
        via: (op id, operand index, layouts in between) of reshardings of several steps, in priced order.
        primitives: how many operations of each kind that graph has, to say what differs in another one.
    """

    choices: tuple[Choice, ...]
    of_op: tuple[int, ...]
    fingerprint: str
    via: tuple[tuple[int, int, tuple[Layout, ...]], ...] = ()
    primitives: tuple[tuple[str, int], ...] = ()

    def of(self, op_id: int) -> Choice:
        """Operand and result layouts of one operation."""
        return self.choices[self.of_op[op_id]]


def place(table: CostTable, chosen: Sequence[int]) -> Placement:
    """Placement of every operation under the chosen strategy per class."""
    names: dict[Choice, int] = {}
    of_op = []
    strategies = [c.strategies[s] for c, s in zip(table.classes, chosen, strict=True)]
    for op, c in zip(table.graph.ops, table.class_of.tolist(), strict=True):
        strategy = strategies[c]
        choice: Choice = (strategy.operands, strategy.results)
        if op.primitive == "result" and strategy.results:  # shares the decision of the argument that it replaces
            choice = ((strategy.results[0],), ())
        of_op.append(names.setdefault(choice, len(names)))
    graph = table.graph
    return Placement(tuple(names), tuple(of_op), fingerprint(graph), _detours(table, chosen), primitive_counts(graph))


def _detours(table: CostTable, chosen: Sequence[int]) -> tuple[tuple[int, int, tuple[Layout, ...]], ...]:
    found: list[tuple[int, int, tuple[Layout, ...]]] = []
    for flow in table.flows:
        between = tuple(dict.fromkeys(step.after for step in flow_steps(table, flow, chosen)))[:-1]
        if between:
            found.extend((op_id, operand, between) for op_id, operand in flow.uses)
    return tuple(found)


def fingerprint(graph: Graph) -> str:
    """Hash of a graph's structure: primitives, shapes, dtypes and wiring, but no names (Keras numbers layers anew)."""
    digest = hashlib.sha256()
    for op in graph.ops:
        shapes = [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in op.outputs]
        digest.update(f"{op.primitive}{op.inputs}{shapes}{op.region}\n".encode())
    return digest.hexdigest()


def primitive_counts(graph: Graph) -> tuple[tuple[str, int], ...]:
    """How many operations of each primitive a graph has, by name."""
    return tuple(sorted(Counter(op.primitive for op in graph.ops).items()))


def misfit(placement: Placement, graph: Graph, n_axes: int) -> str | None:
    """What a placement read from a file says that its graph cannot take, in words; None where it fits."""
    if len(placement.of_op) != len(graph.ops):
        return f"placement is of {len(placement.of_op)} operations, not {len(graph.ops)}"

    def takes(layout: Layout | None, tensor: int) -> bool:
        rank = len(graph.tensors[tensor].shape)
        return layout is None or (len(layout) == n_axes and all(PARTIAL <= d < rank for d in layout))

    for op in graph.ops:
        reads, writes = placement.of(op.id)
        fits = len(reads) <= len(op.inputs) and len(writes) <= len(op.outputs)
        sides = [*zip(reads, op.inputs, strict=False), *zip(writes, op.outputs, strict=False)]
        if not fits or not all(takes(layout, tensor) for layout, tensor in sides):
            return f"placement gives operation {op.id} ({op.primitive}) layouts that it cannot have"
    for op_id, operand, between in placement.via:
        if not 0 <= op_id < len(graph.ops) or not 0 <= operand < len(graph.ops[op_id].inputs):
            return f"detours lead to operand {operand} of operation {op_id}, which does not exist"
        if not all(takes(layout, graph.ops[op_id].inputs[operand]) for layout in between):
            return f"detours give operand {operand} of operation {op_id} layouts that it cannot have"
    return None


def decisions(graph: Graph, placement: Placement, *, room: Room | None = None, axis_sizes: Sequence[int] = ()) -> Any:
    """What the interpreter enforces (:class:`autoshard_ilp.apply.Decisions`).

    Args:
        graph: of the step.
        placement: of its operations.
        room: above what the plan holds; None: plenty. Gathers of the forward pass whose copies take more than the
            budget leaves above the predicted peak are not to begin before their reader's other operand is there, and
            the backward pass does not go on before it has computed sums over arrays that there is no room for.
        axis_sizes: devices along each mesh axis.
    """
    from autoshard_ilp.apply import Decisions

    operands: dict[tuple[int, int], Layout] = {}
    results: dict[tuple[int, int], Layout] = {}
    for op in graph.ops:
        reads, writes = placement.of(op.id)
        for i, layout in enumerate(reads):
            if layout is not None and graph.tensors[op.inputs[i]].shape:
                operands[op.id, i] = layout
        for j, layout in enumerate(writes):
            if graph.tensors[op.outputs[j]].shape:
                results[op.id, j] = layout
    regather = frozenset(op.id for op in graph.ops if _gathers_again(graph, op, placement))
    via = {(op_id, operand): layouts for op_id, operand, layouts in placement.via}
    waits, sums = frozenset[tuple[int, int]](), frozenset[int]()
    if room is not None:
        sums = frozenset(sums_waited_for(graph, operands, results, room, axis_sizes))
        if room.budget_bytes is not None:
            left = room.budget_bytes - room.peak_bytes
            waits = frozenset(_large_gathers(graph, operands, results, left, axis_sizes))
    return Decisions(operands, results, regather, via, waits, sums)


def _large_gathers(
    graph: Graph,
    operands: Mapping[tuple[int, int], Layout],
    results: Mapping[tuple[int, int], Layout],
    room_bytes: int,
    axis_sizes: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """(op id, operand index) of gathers in the forward pass that must wait: all but the smallest, whose copies take
    ``room_bytes`` on a device together.

    Schedulers begin what depends on nothing, such as the gather of a weight, as early as they can, and copies made
    before their time may not fit.
    """
    from autoshard_ilp.ties import MIN_COPY_BYTES

    copies: list[tuple[int, int, int]] = []
    for (op_id, i), layout in operands.items():
        op = graph.ops[op_id]
        t = graph.tensors[op.inputs[i]]
        now = None if t.producer is None else results.get((t.producer, t.result_index))
        if op.phase != "forward" or now is None or PARTIAL in now or PARTIAL in layout:
            continue
        grows = any(b == WHOLE and a != WHOLE for a, b in zip(now, layout, strict=True))
        if grows:
            copies.append((local_bytes(t.shape, t.itemsize, layout, axis_sizes), op_id, i))
    early = 0
    for copy_bytes, op_id, i in sorted(copies):
        early += copy_bytes
        if early > room_bytes and copy_bytes >= MIN_COPY_BYTES:
            yield op_id, i


def _gathers_again(graph: Graph, op: Op, placement: Placement) -> bool:
    """A backward hub behind which the same copy is made as in the forward pass, instead of keeping that one.

    The copy may be made by the hub, or by what reads the hub in another layout; XLA would merge either with its twin.
    """
    if op.primitive != "hub" or op.params.get("first") is None:
        return False
    reads, _ = placement.of(op.id)
    tensor = graph.tensors[op.inputs[0]]
    if reads[0] is None or tensor.producer is None:
        return False
    source = placement.of(tensor.producer)[1][tensor.result_index]
    copies = _copies_behind(graph, op, placement) & _copies_behind(graph, graph.ops[op.params["first"]], placement)
    return bool(copies - {source})


def _copies_behind(graph: Graph, hub: Op, placement: Placement) -> set[Layout | None]:
    """Layouts in which a hub and its consumers read its tensor."""
    readers = graph.tensors[hub.outputs[0]].consumers
    return {placement.of(hub.id)[1][0], *(placement.of(consumer)[0][i] for consumer, i in readers)}

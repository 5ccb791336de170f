"""The decided layouts of a whole step: what the plan file stores, and what the interpreter enforces."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.costs.table import CostTable
from autoshard_ilp.enforce.earlygathers import gathers_that_wait
from autoshard_ilp.enforce.latesums import Room, sums_waited_for
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.report import flow_steps
from autoshard_ilp.sharding import PARTIAL, Layout

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
        room: above what the plan holds; None: plenty. Gathers of the forward pass for whose copies there is no room are
            not to begin before their reader's other operand is there (:mod:`.enforce.earlygathers`), and the
            backward pass does not go on before it has computed sums over arrays that there is no room for.
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
    if room is None:
        return Decisions(operands, results, regather, via)
    sums = frozenset(sums_waited_for(graph, operands, results, room, axis_sizes))
    waits, fit_early = gathers_that_wait(graph, operands, results, room, axis_sizes)
    return Decisions(operands, results, regather, via, waits, sums, fit_early)


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

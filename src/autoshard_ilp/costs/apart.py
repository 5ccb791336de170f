"""The program of a step whose repeated layers all decide for themselves, and the table that ties only some of them.

Tying layers is a restriction. Whether it costs anything is asked of the program without ties. Nothing is priced again
for it: every member of a class costs what one execution of the class costs, so a tied plan costs the same in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard_ilp.costs.build import Built, weight_of
from autoshard_ilp.costs.table import REUSE, CostTable, Flow, OpClass, executions
from autoshard_ilp.program.model import Edge, Node, Program
from autoshard_ilp.program.repeated.repeats import Alike


@dataclass(frozen=True, eq=False)
class Apart:
    """A step's program with one decision per operation, without a capacity.

    Attributes:
        program: bytes have become costs.
        alike: its kinds of nodes and of edges: what would be one class, or flow, if all repeated layers were tied.
        classes: per node, the class that it is a member of.
        op_ids: per node, the operation.
        offset: seconds, to be added to costs: what the room that the prices are for is worth (0 or less).
    """

    program: Program
    alike: Alike
    classes: np.ndarray
    op_ids: np.ndarray
    offset: float


def apart(table: CostTable, built: Built, objective: str, prices: Mapping[int, float] | None = None) -> Apart:
    """The program with one decision per operation.

    Args:
        table: of the step.
        built: the program built from it, with its capacity; strategies that it forbids stay forbidden.
        objective: that it was built for.
        prices: time -> seconds per byte in use at that time beyond the capacity. Whatever they are, the optimum with
            them is no more than that under the capacity (Lagrangian relaxation).
    """
    graph, weight, program = table.graph, weight_of(objective), built.program
    held, offset = _priced(table, built, prices or {})
    same: dict[tuple[tuple[int, ...], str], np.ndarray] = {}

    def one(array: np.ndarray) -> np.ndarray:
        """One object for equal arrays: divided layers may have classes of their own that cost the same."""
        return same.setdefault((array.shape, hashlib.sha256(array.tobytes()).hexdigest()), array)

    nodes: list[Node] = []
    node_of: dict[int, int] = {}
    for cls, tied in zip(table.classes, program.nodes, strict=True):
        each = weight * cls.compute_seconds + cls.communication_seconds
        costs = np.where(np.isinf(tied.costs), np.inf, cls.count / len(cls.members) * each)
        known: dict[tuple[tuple[int, float], ...], np.ndarray] = {}
        for m in cls.members:
            node_of[m] = len(nodes)
            own = tuple(held.of_nodes.get(m, {}).items())
            if own not in known:
                known[own] = one(sum((price * held.bytes[k] for k, price in own), costs))
            nodes.append(Node(tied.name, known[own]))
    for result, argument in graph.aliases:
        node_of[result] = node_of[argument]
    edges: list[Edge] = []
    alike_of = table.alike.tolist()
    kinds: list[int] = []
    names: dict[tuple[int, ...], int] = {}
    for kind, flow in enumerate(table.flows):
        edge = built.loops.get(kind, program.edges[kind])
        once = edge.table / flow.count
        times: dict[tuple[float, tuple[tuple[int, float], ...]], np.ndarray] = {}
        for (op_id, operand), producer in zip(flow.uses, _producers(table, flow), strict=True):
            own = tuple(held.of_edges[kind, op_id].items()) if (kind, op_id) in held.of_edges else ()
            key = executions(graph, op_id, operand), own
            if key not in times:
                times[key] = one(sum((price * held.bytes[k] for k, price in own), key[0] * once))
            a, b = node_of[producer], node_of[op_id]
            if a == b:  # an operation and itself: what a step makes of its own argument
                own_cost = times[key][edge.u_labels, edge.v_labels]
                nodes[a] = replace(nodes[a], costs=nodes[a].costs + own_cost)
                continue
            edges.append(Edge(a, b, edge.u_labels, edge.v_labels, times[key]))
            name = alike_of[producer], flow.result, alike_of[op_id], flow.operand
            kinds.append(names.setdefault(name, len(names)))
    members = [(index, m) for index, cls in enumerate(table.classes) for m in cls.members]
    classes, op_ids = np.array(members, np.int64).reshape(-1, 2).T
    backward = np.array([graph.ops[m].phase == "backward" for m in op_ids.tolist()], bool)
    alike = Alike(table.alike[op_ids], np.array(kinds, np.int64), backward)
    return Apart(Program(tuple(nodes), tuple(edges)), alike, classes, op_ids, offset)


@dataclass(frozen=True, eq=False)
class _Held:
    """What members hold, and for what price.

    Attributes:
        bytes: tables of bytes, by number.
        of_nodes: op id -> number of a table over its strategies -> seconds per byte.
        of_edges: (flow, op id of the use) -> number of a table over its labels -> seconds per byte.
    """

    bytes: dict[int, np.ndarray] = field(default_factory=dict)
    of_nodes: dict[int, dict[int, float]] = field(default_factory=dict)
    of_edges: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)


def _priced(table: CostTable, built: Built, prices: Mapping[int, float]) -> tuple[_Held, float]:
    """What every operation pays for bytes, and what the room for them is worth.

    Bytes of copies between one repeated layer and the next are left out, which only lowers the optimum.
    """
    held, program, lt = _Held(), built.program, built.program.lifetimes
    worth = {t: p for t, p in prices.items() if p > 0}
    if not worth or program.capacity is None:
        return held, 0.0
    offset = 0.0
    price = np.zeros(len(lt.owner))
    for t, p in worth.items():
        price += p * ((lt.start <= t) & (t < lt.end))
        offset -= p * (program.capacity + (program.on_chip_bytes if t < program.on_chip_instants else 0))
    flow_of = {}
    for k, flow in enumerate(table.flows):
        if k not in built.loops:
            flow_of[id(program.edges[k].u_labels), id(program.edges[k].v_labels), flow.u, flow.v] = k
    for i in np.flatnonzero(price).tolist():
        owner, op_id = int(lt.owner[i]), built.op_ids[i]
        if not lt.is_edge[i]:
            number, where = ~owner, held.of_nodes.setdefault(op_id, {})
            held.bytes[number] = program.nodes[owner].bytes  # type: ignore[assignment]
        else:
            edge = program.edges[owner]
            if edge.bytes is None or owner in built.loops:
                continue
            number = owner
            if owner < len(table.flows):
                kind: int | None = owner
            else:
                kind = flow_of.get((id(edge.u_labels), id(edge.v_labels), edge.u, edge.v))
            if kind is not None:
                held.bytes[number], where = edge.bytes, held.of_edges.setdefault((kind, op_id), {})
            elif edge.bytes.shape[1] == 1 and op_id in table.classes[edge.u].members:
                held.bytes[number], where = edge.bytes[edge.u_labels, 0], held.of_nodes.setdefault(op_id, {})
            else:
                continue
        where[number] = where.get(number, 0.0) + float(price[i])
    return held, offset


def _producers(table: CostTable, flow: Flow) -> Iterator[int]:
    """Per use of a flow, the operation that the tensor comes from."""
    graph = table.graph
    for op_id, operand in flow.uses:
        op = graph.ops[op_id]
        producer = op.params["first"] if flow.operand == REUSE else graph.tensors[op.inputs[operand]].producer
        assert producer is not None
        yield producer


def parted(table: CostTable, step: Apart, choices: np.ndarray) -> tuple[CostTable, np.ndarray]:
    """The table whose classes are tied only where members choose the same.

    Args:
        table: what ``step`` was made from.
        step: the program with one decision per operation.
        choices: one strategy per node of it.

    Returns:
        The table, and one strategy per class of it. The cost of these is that of ``choices``.
    """
    graph = table.graph
    classes: list[OpClass] = []
    chosen: list[int] = []
    class_of = table.class_of.copy()
    starts = np.searchsorted(step.classes, np.arange(len(table.classes) + 1))
    for index, cls in enumerate(table.classes):
        mine = choices[starts[index] : starts[index + 1]]
        for strategy in dict.fromkeys(mine.tolist()):
            members = tuple(m for m, s in zip(cls.members, mine, strict=True) if s == strategy)
            class_of[list(members)] = len(classes)
            part = len(members) / len(cls.members)
            classes.append(cls if part == 1 else replace(cls, members=members, count=cls.count * part))
            chosen.append(int(strategy))
    for result, argument in graph.aliases:
        class_of[result] = class_of[argument]
    flows: list[Flow] = []
    for flow in table.flows:
        uses: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for use, producer in zip(flow.uses, _producers(table, flow), strict=True):
            uses.setdefault((int(class_of[producer]), int(class_of[use[0]])), []).append(use)
        for (u, v), own in uses.items():
            count = flow.count if len(uses) == 1 else sum(executions(graph, *use) for use in own)
            flows.append(replace(flow, u=u, v=v, count=count, uses=tuple(own)))
    parts = replace(table, classes=tuple(classes), class_of=class_of, flows=tuple(flows))
    return parts, np.array(chosen, np.int64)

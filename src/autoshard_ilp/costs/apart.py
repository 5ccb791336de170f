"""The program of a step whose repeated layers all decide for themselves, and the table that ties only some of them.

Tying layers is a restriction. Whether it costs anything is asked of the program without ties. Nothing is priced again
for it: every member of a class costs what one execution of the class costs, so a tied plan costs the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoshard_ilp.costs.build import weight_of
from autoshard_ilp.costs.table import REUSE, CostTable, Flow, OpClass, executions, flow_table, operand_labels
from autoshard_ilp.program.model import Edge, Node, Program
from autoshard_ilp.program.repeats import Alike


@dataclass(frozen=True, eq=False)
class Apart:
    """A step's program with one decision per operation, memory aside.

    Attributes:
        program: no capacity, no bytes.
        alike: its kinds of nodes, which are the classes of the table, and of edges, which are the flows.
        classes: per node, the class that it is a member of.
        op_ids: per node, the operation.
    """

    program: Program
    alike: Alike
    classes: np.ndarray
    op_ids: np.ndarray


def repeats(table: CostTable) -> bool:
    """Whether some operations share a decision."""
    return any(len(c.members) > 1 for c in table.classes)


def apart(table: CostTable, program: Program, objective: str) -> Apart:
    """The program with one decision per operation.

    Args:
        table: of the step.
        program: built from it; strategies that it forbids stay forbidden.
        objective: that it was built for.
    """
    graph, weight = table.graph, weight_of(objective)
    nodes: list[Node] = []
    node_of: dict[int, int] = {}
    for cls, tied in zip(table.classes, program.nodes, strict=True):
        each = weight * cls.compute_seconds + cls.communication_seconds
        costs = np.where(np.isinf(tied.costs), np.inf, cls.count / len(cls.members) * each)
        for m in cls.members:
            node_of[m] = len(nodes)
            nodes.append(Node(tied.name, costs))
    for result, argument in graph.aliases:
        node_of[result] = node_of[argument]
    edges: list[Edge] = []
    kinds: list[int] = []
    for kind, flow in enumerate(table.flows):
        own = program.edges[kind].table / flow.count if flow.u != flow.v else flow_table(table, flow)[0]
        u, v = table.classes[flow.u].results[flow.result].of_strategy, operand_labels(table, flow).of_strategy
        times: dict[float, np.ndarray] = {}
        for (op_id, operand), producer in zip(flow.uses, _producers(table, flow), strict=True):
            often = executions(graph, op_id, operand)
            if often not in times:
                times[often] = own * often
            a, b = node_of[producer], node_of[op_id]
            if a == b:  # an operation and itself: what a step makes of its own argument
                nodes[a] = replace(nodes[a], costs=nodes[a].costs + times[often][u, v])
                continue
            edges.append(Edge(a, b, u, v, times[often]))
            kinds.append(kind)
    members = [(index, m) for index, cls in enumerate(table.classes) for m in cls.members]
    classes, op_ids = np.array(members, np.int64).reshape(-1, 2).T
    backward = np.array([graph.ops[m].phase == "backward" for m in op_ids.tolist()], bool)
    alike = Alike(classes, np.array(kinds, np.int64), backward)
    return Apart(Program(tuple(nodes), tuple(edges)), alike, classes, op_ids)


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
        for (u, v), mine in uses.items():
            count = flow.count if len(uses) == 1 else sum(executions(graph, *use) for use in mine)
            flows.append(replace(flow, u=u, v=v, count=count, uses=tuple(mine)))
    parts = replace(table, classes=tuple(classes), class_of=class_of, flows=tuple(flows))
    return parts, np.array(chosen, np.int64)

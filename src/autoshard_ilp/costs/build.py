"""From the cost table to the integer program: its nodes and edges, and the bytes that they hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.costs.account import Account, label_of
from autoshard_ilp.costs.coarse import coarser
from autoshard_ilp.costs.held import (
    hold_filled_up,
    hold_for_loops,
    hold_for_products,
    hold_kernels,
    hold_results,
    hold_workspace,
)
from autoshard_ilp.costs.primitives import fusible
from autoshard_ilp.costs.reshard_tables import agreeing
from autoshard_ilp.costs.table import REUSE, CostTable, Flow, flow_table, flow_tensor, operand_labels
from autoshard_ilp.costs.tpu.carried import count_gathers_twice, count_twice
from autoshard_ilp.costs.tpu.heap import loses, with_holes
from autoshard_ilp.costs.tpu.onchip import keep_on_chip, largest_bytes, vector_bytes
from autoshard_ilp.program.model import Edge, Node, Program
from autoshard_ilp.sharding import WHOLE

OBJECTIVES = ("step_time", "communication")
TIE_BREAK = 1e-6
"""Under objective="communication" compute still counts this little, so that ties go to the faster plan."""


@dataclass(frozen=True, eq=False)
class Built:
    """A program with what its lifetimes stand for.

    Attributes:
        program: the integer program; node i is class i of the table, edges[k] is flows[k] for k < len(flows).
        categories: per lifetime: parameters, optimizer, state, inputs, gradients, activations, gathered.
        labels: per lifetime: what is held, a path or a layer's scope.
        op_ids: per lifetime: the operation whose result, or whose copy of an operand, is held.
        loops: the edges that a flow would be, by its number, where it joins a class to itself (a repeated layer feeds
            the next): the program has them as costs of nodes.
    """

    program: Program
    categories: tuple[str, ...]
    labels: tuple[str, ...]
    op_ids: tuple[int, ...]
    loops: Mapping[int, Edge]


def weight_of(objective: str) -> float:
    """What a second of compute counts."""
    return 1.0 if objective == "step_time" else TIE_BREAK


def build_program(
    table: CostTable, roles: Mapping[int, str], *, capacity: int | None, objective: str = "step_time"
) -> Built:
    """Lays a cost table out as an integer program.

    Args:
        roles: argument op id -> memory category.
        capacity: bytes per device, or None.
        objective: "step_time" or "communication".
    """
    account = Account(table)
    weight = weight_of(objective)
    node_bytes: dict[int, np.ndarray] = {}
    extra: list[Edge] = []
    costs = [c.count * (weight * c.compute_seconds + c.communication_seconds) for c in table.classes]
    edges: list[Edge] = []
    for flow in table.flows:
        edges.append(_edge(table, flow, len(edges), account, costs))
    for flow in table.flows if table.buffers.sliced or account.hoisted else ():
        hold_for_loops(table, flow, account, extra, len(edges))
    for flow in table.flows if account.tied_lookups else ():
        hold_for_products(table, flow, account, extra, len(edges))
    for flow in table.flows if account.kernel_copies else ():
        hold_kernels(table, flow, account, extra, len(edges))
    for index in range(len(table.classes)):
        hold_results(table, index, roles, account, node_bytes, extra, len(edges))
    if account.pads:
        hold_workspace(table, account, extra, len(edges))
    if account.family == "tpu" and table.profile.fused_kernels == "fewer":
        hold_filled_up(table, account, extra, len(edges))
    nodes = tuple(
        Node(table.graph.ops[c.members[0]].scope or table.graph.ops[c.members[0]].path, cost, node_bytes.get(i))
        for i, (c, cost) in enumerate(zip(table.classes, costs, strict=True))
    )
    families = functools.partial(coarser, [c.strategies for c in table.classes], table.axis_sizes)
    program = Program(nodes, (*edges, *extra), account.lifetimes(), capacity, families=families)
    loops = {k: edge for k, edge in enumerate(edges) if edge.u == edge.v}
    counted = _without_loops(program), tuple(account.categories), tuple(account.labels)
    if account.family == "tpu":
        counted = count_twice(*counted, account.stacks, table.buffers.horizon)
        counted = count_gathers_twice(*counted, account.ahead, vector_bytes(table.profile))
    on_chip = vector_bytes(table.profile, table.graph.has_backward()), largest_bytes(table.profile)
    counted = keep_on_chip(*counted, *on_chip, table.buffers.horizon, account.waits, account.unwritten)
    lost = getattr(table.profile, "heap_loss_share", 0.0) if loses(table.graph) else 0.0
    labels, op_ids = zip(*counted[2], strict=True) if counted[2] else ((), ())
    return Built(with_holes(counted[0], lost), counted[1], labels, op_ids, loops)


def _edge(table: CostTable, flow: Flow, index: int, account: Account, costs: list[np.ndarray]) -> Edge:
    seconds, copies = flow_table(table, flow)
    u, v = table.classes[flow.u].results[flow.result], operand_labels(table, flow)
    if copies.any() and flow.operand != REUSE:
        copies = np.where(_only_sliced(table, flow, u.layouts, v.layouts), 0, copies)
    copies = _in_tiles(table, flow, account, v.layouts, copies) if copies.any() and account.family == "tpu" else copies
    if copies.any() and _counts(table, flow, account) and len(table.classes) > 1:
        reused = flow.operand == REUSE
        for op_id, operand in flow.uses:
            op = table.graph.ops[op_id]
            start, end = account.copies.of(op, reused)
            if not reused:  # that of the forward pass is counted until then
                start = min(start, account.gathered.get(op.inputs[operand], start))
            if account.family == "tpu" and op.primitive == "loop_slice":
                start = table.buffers.begins[op.region]  # with all that the loop reads: nothing is computed meanwhile
            elif account.known and account.known[op.inputs[operand]]:
                account.ahead.append(len(account.rows))
            account.hold(True, index, start, end, "gathered", label_of(table, op_id, operand), op.outputs)
            if account.family == "gpu" and op.primitive == "loop_slice":
                # Collectives put the gathered dimension in front; a loop reads its slices from a transposed copy.
                account.hold(True, index, start, start + 1, "gathered", label_of(table, op_id, operand))
    return Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, flow.count * seconds, copies)


def _in_tiles(table: CostTable, flow: Flow, account: Account, ends: Sequence[Any], copies: np.ndarray) -> np.ndarray:
    """Bytes of copies on a TPU, whose memory is tiled."""
    return np.ceil(copies * account.paddings(table, flow_tensor(table, flow).id, tuple(ends))).astype(np.int64)


def _only_sliced(table: CostTable, flow: Flow, starts: Sequence[Any], ends: Sequence[Any]) -> np.ndarray:
    """Where a fused consumer, or any consumer of a fused tensor, reads just its slice: no copy is written."""
    op = table.graph.ops[flow.uses[0][0]]
    tensor = flow_tensor(table, flow)
    root = int(table.buffers.root[tensor.id])
    if table.buffers.stored[root] and not (fusible(op) and op.primitive != "hub"):
        return np.zeros((len(starts), len(ends)), bool)
    found = np.zeros((len(starts), len(ends)), bool)
    plain = [k for k, end in enumerate(ends) if end and not isinstance(end[0], str)]
    if starts[0] and plain:
        found[:, plain] = agreeing(np.array(starts), np.array([ends[k] for k in plain]), WHOLE)
    return found


def _counts(table: CostTable, flow: Flow, account: Account) -> bool:
    """Whether copies of a flow take memory: a TPU gathers nothing in the place of the argument that it overwrites."""
    tensor = flow_tensor(table, flow)
    consumer = table.graph.ops[flow.uses[0][0]]
    in_place = consumer.primitive == "result" and flow.v in table.donated and account.family != "tpu"
    return math.prod(tensor.shape) * tensor.itemsize >= table.least_bytes and not in_place


def _without_loops(program: Program) -> Program:
    """Edges from a node to itself (a repeated layer feeding the next) become node costs.

    The edge keeps its place, with a zero table, so that edge numbers stay those of the flows; its bytes are moved to
    an edge of one column, since every edge must join two nodes. Where there is but one, a step that only hands its
    arguments back, there is nothing to copy either, and no edge is left.
    """
    costs = [n.costs for n in program.nodes]
    edges: list[Edge] = []
    for e in program.edges:
        if e.u != e.v:
            edges.append(e)
            continue
        costs[e.u] = costs[e.u] + e.table[e.u_labels, e.v_labels]
        own = e.bytes[e.u_labels, e.v_labels] if e.bytes is not None else np.zeros(len(e.u_labels), np.int64)
        if len(program.nodes) == 1:
            continue
        other = 0 if e.u else 1
        zeros = np.zeros(len(program.nodes[other].costs), np.int64)
        edges.append(Edge(e.u, other, np.arange(len(own)), zeros, np.zeros((len(own), 1)), own[:, None]))
    nodes = tuple(Node(n.name, c, n.bytes) for n, c in zip(program.nodes, costs, strict=True))
    return replace(program, nodes=nodes, edges=tuple(edges))

"""From the cost table to the integer program: nodes, edges, and who holds how many bytes when."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.costs.alike import computed_alike
from autoshard_ilp.costs.beside import gradients_beside, held_beside
from autoshard_ilp.costs.coarse import coarser
from autoshard_ilp.costs.gpu.combining import gathered_together, known_from_the_start, reduced_together
from autoshard_ilp.costs.gpu.kernel_copies import kernel_copies
from autoshard_ilp.costs.gpu.padded_images import (
    Copied,
    copied_images,
    enlarged_bytes,
    image_bytes,
    piece_bytes,
    transposed_bytes,
)
from autoshard_ilp.costs.gpu.siblings import held_for_siblings, merged_bytes
from autoshard_ilp.costs.gpu.splitk import split_bytes
from autoshard_ilp.costs.gpu.triton import leaves_triton
from autoshard_ilp.costs.gpu.workspace import workspace_spans
from autoshard_ilp.costs.grouped import copies_for_groups, copies_kept, masked_again
from autoshard_ilp.costs.padding import WORKSPACE_BYTES, copies_for_tiles, masked_copies, window_places
from autoshard_ilp.costs.prices import once
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.costs.reshard_tables import agreeing
from autoshard_ilp.costs.table import REUSE, CostTable, Flow, OpClass, flow_table, flow_tensor, operand_labels
from autoshard_ilp.costs.tpu.carried import count_gathers_twice, count_twice, is_stacked
from autoshard_ilp.costs.tpu.filled import read_by_several_products
from autoshard_ilp.costs.tpu.heap import loses, with_holes
from autoshard_ilp.costs.tpu.hoisted import hoisted_casts, never_wide
from autoshard_ilp.costs.tpu.idle import Idleness
from autoshard_ilp.costs.tpu.lookups import copied_bytes, first_lookup, is_lookup, read_by_products_later
from autoshard_ilp.costs.tpu.onchip import idle_limit_seconds, keep_on_chip, largest_bytes, vector_bytes
from autoshard_ilp.costs.tpu.rows import Rows, copied_rows, row_padding, rows_of
from autoshard_ilp.costs.tpu.tiles import (
    images_of_the_step,
    of_batched_products,
    padding,
    stacks_of_loops,
    through_convolutions,
    tiled_bytes,
)
from autoshard_ilp.costs.written import made_in_results, masks_of_extremes, packed_bytes, packed_masks
from autoshard_ilp.graph import BOUNDARY, Graph, Op
from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program
from autoshard_ilp.sharding import WHOLE, Layout, divides, local_bytes, local_shape

OBJECTIVES = ("step_time", "communication")
TIE_BREAK = 1e-6
"""Under objective="communication" compute still counts this little, so that ties go to the faster plan."""

MERGED = frozenset({"gpu"})
"""Families of hardware on which what several layers compute alike is held once. Of others it is not known: XLA:TPU
computes most of it again inside what reads it."""

Span = tuple[int, int, str, tuple[str, int]]
"""Start and end of a lifetime, its category, its label with the operation."""


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


class _Account:
    """Collects lifetimes; an owner has one byte table, so further tables of one node become edges of one column."""

    def __init__(self, table: CostTable) -> None:
        self.rows: list[tuple[bool, int, int, int]] = []
        self.categories: list[str] = []
        self.labels: list[tuple[str, int]] = []  # with the operation
        self.stacks: list[int] = []  # lifetimes of what loops stack up
        self.ahead: list[int] = []  # lifetimes of gathered copies of what the step starts with
        self.family = getattr(table.profile, "family", "")
        self.copies = _CopyLifetimes(table)
        self.known = known_from_the_start(table.graph) if self.family == "tpu" else ()
        self.gathered = gathered_together(table.graph, table.buffers, self.family)
        self.reduced = reduced_together(table.graph, table.buffers, self.family)
        self.fastest_of: dict[int, tuple[int, ...]] = {}  # on a TPU, where not any two dimensions may vary fastest
        if self.family == "tpu":
            products, images = of_batched_products(table.graph), through_convolutions(table.graph)
            self.fastest_of = {**products, **stacks_of_loops(table.graph), **images}
        self.rows_of = rows_of(table.graph) if self.family == "tpu" else Rows()
        self.alike = computed_alike(table.graph) if self.family in MERGED else ()
        self.hoisted = hoisted_casts(table.graph, table.buffers) if self.family == "tpu" else {}
        self.never_wide = never_wide(table.graph, self.hoisted)
        self.given = images_of_the_step(table.graph, table.buffers) if self.family == "tpu" else {}
        fuses = [fusible(op) and op.primitive not in VIEWS for op in table.graph.ops]
        self.packed = packed_masks(table.graph, fuses, VIEWS) if self.family == "tpu" else frozenset()
        self.pads = self.family == "gpu" and leaves_triton(table.graph)
        self.masked_again = masked_again(table.graph) if self.family == "gpu" else {}
        self.copied_images = copied_images(table.graph) if self.family == "gpu" else {}
        self.kernel_copies = kernel_copies(table.graph, table.buffers.time.tolist()) if self.family == "gpu" else {}
        self.siblings = held_for_siblings(table.graph, table.buffers) if self.pads else {}
        gpu = self.family == "gpu"
        self.beside = gradients_beside(table.graph, table.buffers, self.reduced) if gpu else {}
        self.first_lookup = first_lookup(table.graph, table.buffers.time) if self.family == "tpu" else 0
        self.tied_lookups = read_by_products_later(table.graph, table.buffers.time) if self.family == "tpu" else {}
        self.in_results = made_in_results(table.graph, fuses) if self.family == "tpu" else frozenset()
        self.unwritten: set[int] = set()
        limit = idle_limit_seconds(table.profile)
        self.idle = Idleness(table.graph, table.buffers, table.classes, limit) if limit else None
        self.waits: dict[int, int] = {}  # lifetime -> until when it is in device memory, since it is not read for long

    def bytes_of(self, table: CostTable, tensor: int, itemsize: float, layouts: Sequence[Any]) -> np.ndarray:
        """Bytes on one device of a tensor in each of some layouts; 0 for None."""
        shape, sizes = table.graph.tensors[tensor].shape, table.axis_sizes

        def on_device(layout: Layout) -> int:
            if self.family != "tpu":
                return local_bytes(shape, itemsize, layout, sizes)
            if tensor in self.packed:
                return packed_bytes(local_shape(shape, layout, sizes))
            pads = self.padding(table, tensor, local_shape(shape, layout, sizes))
            return math.ceil(local_bytes(shape, itemsize, layout, sizes) * pads)

        known = {lay: 0 if lay is None else on_device(lay) for lay in set(layouts)}
        return np.array([known[lay] for lay in layouts])

    def padding(self, table: CostTable, tensor: int, local: Sequence[int]) -> float:
        """Bytes of a tensor in a TPU's tiles over its own bytes, where it has a shape on one device."""
        root = int(table.buffers.root[tensor])
        same = len(table.graph.tensors[root].shape) == len(table.graph.tensors[tensor].shape)
        if tensor in self.rows_of.kept:
            return row_padding(local, self.rows_of.kept[tensor])
        return padding(tuple(local), self.fastest_of.get(root, ()) if same else ())

    def hold(
        self,
        is_edge: bool,
        owner: int,
        start: int,
        end: int,
        category: str,
        label: tuple[str, int],
        read: Sequence[int] = (),
    ) -> None:
        """Adds a lifetime, labelled with its operation; ``read`` are the tensors as which it is read meanwhile."""
        until = None if self.idle is None or not read else self.idle.in_memory_until(start, end, read)
        if until is not None:
            self.waits[len(self.rows)] = until
        self.rows.append((is_edge, owner, start, max(end, start + 1)))
        self.categories.append(category)
        self.labels.append(label)

    def lifetimes(self) -> Lifetimes:
        if not self.rows:
            return Lifetimes.empty()
        is_edge, owner, start, end = zip(*self.rows, strict=True)
        return Lifetimes(np.array(is_edge), np.array(owner), np.array(start), np.array(end))


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
    account = _Account(table)
    weight = weight_of(objective)
    node_bytes: dict[int, np.ndarray] = {}
    extra: list[Edge] = []
    costs = [c.count * (weight * c.compute_seconds + c.communication_seconds) for c in table.classes]
    edges: list[Edge] = []
    for flow in table.flows:
        edges.append(_edge(table, flow, len(edges), account, costs))
    for flow in table.flows if table.buffers.sliced or account.hoisted else ():
        _hold_for_loops(table, flow, account, extra, len(edges))
    for flow in table.flows if account.tied_lookups else ():
        _hold_for_products(table, flow, account, extra, len(edges))
    for flow in table.flows if account.kernel_copies else ():
        _hold_kernels(table, flow, account, extra, len(edges))
    for index in range(len(table.classes)):
        _hold_results(table, index, roles, account, node_bytes, extra, len(edges))
    if account.pads:
        _hold_workspace(table, account, extra, len(edges))
    if account.family == "tpu" and table.profile.fused_kernels == "fewer":
        _hold_filled_up(table, account, extra, len(edges))
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


def _edge(table: CostTable, flow: Flow, index: int, account: _Account, costs: list[np.ndarray]) -> Edge:
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
            account.hold(True, index, start, end, "gathered", _label(table, op_id, operand), op.outputs)
            if account.family == "gpu" and op.primitive == "loop_slice":
                # Collectives put the gathered dimension in front; a loop reads its slices from a transposed copy.
                account.hold(True, index, start, start + 1, "gathered", _label(table, op_id, operand))
    return Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, flow.count * seconds, copies)


def _hold_for_loops(table: CostTable, flow: Flow, account: _Account, extra: list[Edge], n_edges: int) -> None:
    """What a loop slices as it was made, until the loop ends; a copy gathered for it is held instead.

    A collective takes it with the gathered dimension in front, which is one more copy while it is gathered. Stacks that
    are cast before the loop (:mod:`autoshard_ilp.costs.tpu.hoisted`) are held besides, where nothing is gathered.
    """
    uses = [use for use in flow.uses if use[0] in table.buffers.sliced or use[0] in account.hoisted]
    if not uses:
        return
    u, v = table.classes[flow.u].results[flow.result], operand_labels(table, flow)
    moved = flow_table(table, flow)[1] > 0
    for op_id, operand in uses:
        cast = account.hoisted.get(op_id)
        if cast is not None and cast.stack not in account.never_wide:
            stack = flow_tensor(table, flow).id
            held = np.where(moved, 0, account.bytes_of(table, stack, cast.itemsize, u.layouts)[:, None])
            account.hold(True, n_edges + len(extra), cast.start, cast.end, "gathered", _label(table, op_id, operand))
            extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(moved.shape), held))
        if op_id not in table.buffers.sliced:
            continue
        tensor, loop_ends = table.buffers.sliced[op_id]
        held = account.bytes_of(table, tensor, float(table.precision.held[tensor]), u.layouts)[:, None]
        begins = int(table.buffers.end[tensor])
        for part, start, end in ((np.where(moved, 0, held), begins, loop_ends), (moved * held, begins - 1, begins)):
            account.hold(True, n_edges + len(extra), start, end, "activations", _label(table, op_id, operand))
            extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(moved.shape), part))


def _hold_for_products(table: CostTable, flow: Flow, account: _Account, extra: list[Edge], n_edges: int) -> None:
    """What a lookup cuts out of a table, until the last product has read it: rows, a piece for each device.

    Products take the same piece then. Of other pieces they take other ones, and XLA keeps none of them.
    """
    lookups = [op_id for op_id, operand in flow.uses if not operand and op_id in account.tied_lookups]
    if not lookups:
        return
    u, v = table.classes[flow.u].results[flow.result], operand_labels(table, flow)  # of a lookup, all are layouts
    starts, ends = np.array(u.layouts), np.array(v.layouts)
    rows = (ends[:, np.array(table.axis_sizes) > 1] == 0).all(axis=1)
    cut = agreeing(starts, ends, WHOLE) & ~agreeing(starts, ends) & rows
    tensor = flow_tensor(table, flow)
    held = cut * account.bytes_of(table, tensor.id, float(tensor.itemsize), v.layouts)
    for op_id in lookups:
        span = int(table.buffers.time[op_id]) + 1, account.tied_lookups[op_id] + 1
        account.hold(True, n_edges + len(extra), *span, "gathered", _label(table, op_id, 0), [tensor.id])
    extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(cut.shape), held))


def _hold_kernels(table: CostTable, flow: Flow, account: _Account, extra: list[Edge], n_edges: int) -> None:
    """Kernels in cuDNN's order: of a variable from its first convolution to the last, of what is gathered for each."""
    uses = [use for use in flow.uses if use in account.kernel_copies] if flow.operand != REUSE else []
    tensor = flow_tensor(table, flow)
    if not uses or math.prod(tensor.shape) * tensor.itemsize < table.least_bytes:
        return
    u, v = table.classes[flow.u].results[flow.result], operand_labels(table, flow)
    plain = [end is not None and not any(isinstance(a, str) for a in end) for end in v.layouts]
    starts = np.array(u.layouts)
    ends = np.array([end if p else u.layouts[0] for end, p in zip(v.layouts, plain, strict=True)])
    same = agreeing(starts, ends) & np.array(plain)
    held = account.bytes_of(table, tensor.id, float(tensor.itemsize), [tuple(map(int, end)) for end in ends]) * plain
    for counted, spans in (
        (same, [(c.as_it_is, use) for use in uses if (c := account.kernel_copies[use]).as_it_is is not None]),
        (~same, [((t, t + 1), use) for use in uses for t in account.kernel_copies[use].gathered]),
    ):
        table_of = counted * held[None, :]
        if not spans or not table_of.any():
            continue
        for span, (op_id, operand) in spans:
            account.hold(True, n_edges + len(extra), *span, "activations", _label(table, op_id, operand))
        extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(counted.shape), table_of))


def _hold_workspace(table: CostTable, account: _Account, extra: list[Edge], n_edges: int) -> None:
    """cuBLAS's workspace, whatever is decided."""
    spans = workspace_spans(table.graph, table.buffers, math.prod(table.axis_sizes))
    if not spans or len(table.classes) < 2:
        return
    first = next(op for op in table.graph.ops if op.primitive == "dot_general")
    u = int(table.class_of[first.id])
    v = 0 if u else 1
    labels = [np.zeros(len(table.classes[k].strategies), np.int64) for k in (u, v)]
    edge = n_edges + len(extra)
    extra.append(Edge(u, v, labels[0], labels[1], np.zeros((1, 1)), np.full((1, 1), WORKSPACE_BYTES)))
    for start, end in spans:
        account.hold(True, edge, start, end, "activations", ("workspace of cuBLAS", first.id))


def _hold_filled_up(table: CostTable, account: _Account, extra: list[Edge], n_edges: int) -> None:
    """What several products read of a dimension that does not divide, while the first of them runs."""
    for tensor, op_id, operand in read_by_several_products(table.graph, table.buffers):
        u = int(table.class_of[op_id])
        layouts = [strategy.operands[operand] for strategy in table.classes[u].strategies]
        shape = table.graph.tensors[tensor].shape
        uneven = [x is not None and not divides(shape, x, table.axis_sizes) for x in layouts]
        held = np.array(uneven) * account.bytes_of(table, tensor, float(table.precision.held[tensor]), layouts)
        if not held.any() or len(table.classes) < 2:
            continue
        start, v = int(table.buffers.time[op_id]), 0 if u else 1
        account.hold(True, n_edges + len(extra), start, start + 1, "activations", _label(table, op_id, operand))
        ends = np.zeros(len(table.classes[v].strategies), np.int64)
        extra.append(Edge(u, v, np.arange(len(held)), ends, np.zeros((len(held), 1)), held[:, None]))


def _in_tiles(table: CostTable, flow: Flow, account: _Account, ends: Sequence[Any], copies: np.ndarray) -> np.ndarray:
    """Bytes of copies on a TPU, whose memory is tiled."""
    tensor = flow_tensor(table, flow)
    plain = [end is None or any(isinstance(a, str) for a in end) for end in ends]
    shapes = [() if p else local_shape(tensor.shape, end, table.axis_sizes) for p, end in zip(plain, ends, strict=True)]
    pads = [account.padding(table, tensor.id, shape) if shape else 1.0 for shape in shapes]
    return np.ceil(copies * np.array(pads)).astype(np.int64)


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


def _counts(table: CostTable, flow: Flow, account: _Account) -> bool:
    """Whether copies of a flow take memory: a TPU gathers nothing in the place of the argument that it overwrites."""
    tensor = flow_tensor(table, flow)
    consumer = table.graph.ops[flow.uses[0][0]]
    in_place = consumer.primitive == "result" and flow.v in table.donated and account.family != "tpu"
    return math.prod(tensor.shape) * tensor.itemsize >= table.least_bytes and not in_place


def _not_merged(
    account: _Account, graph: Graph, members: Sequence[int], result: int
) -> Iterator[tuple[int, list[int]]]:
    """Members of a class, each with its result; those that compute the same from the same are one, with all of theirs.

    All members have one layout, so XLA has one buffer for them, from the first one's time to the last one's.
    """
    merged: dict[object, tuple[int, list[int]]] = {}
    for m in members:
        out = graph.ops[m].outputs[result]
        key = account.alike[out] if account.alike else out
        merged.setdefault(key, (m, []))[1].append(out)
    yield from merged.values()


class _CopyLifetimes:
    """From when to when copies of operands are held; asked for every use of every flow."""

    def __init__(self, table: CostTable) -> None:
        self.graph, self.buffers = table.graph, table.buffers
        self.time, self.last_use = table.buffers.time.tolist(), table.buffers.last_use.tolist()
        self.stored = table.buffers.stored.tolist()

    def of(self, op: Op, reused: bool) -> tuple[int, int]:
        """A hub's copy lives until its last consumer is done, and the product beside that; a reused one from the
        forward pass on; others for their operation.

        What a loop slices is there until the loop ends. A result in another layout than its producer's stays to the
        end.
        """
        start: int = self.time[op.id]
        if op.primitive == "result":
            return start, self.buffers.horizon
        beside = self.buffers.beside
        readers = (reader for t in op.outputs for reader, _ in self.graph.tensors[t].consumers) if beside else ()
        last = max([self.last_use[t] for t in op.outputs], default=start)
        last = max([last, *(beside[reader] for reader in readers if reader in beside)])
        if op.primitive == "loop_slice":
            return start, max(last, self.buffers.ends[op.region]) + 1
        if reused:
            first = self.graph.ops[op.params["first"]]
            return self.last_use[first.outputs[0]] + 1, last + 1
        if op.primitive == "hub" or (fusible(op) and op.outputs and not any(self.stored[t] for t in op.outputs)):
            return start, last + 1
        return start, start + 1


def _label(table: CostTable, op_id: int, operand: int) -> tuple[str, int]:
    op = table.graph.ops[op_id]
    producer = table.graph.tensors[op.inputs[operand]].producer
    path = table.graph.ops[producer].path if producer is not None else ""
    return path or op.scope or op.primitive, op_id


def _hold_results(
    table: CostTable,
    index: int,
    roles: Mapping[int, str],
    account: _Account,
    node_bytes: dict[int, np.ndarray],
    extra: list[Edge],
    n_edges: int,
) -> None:
    """Bytes of a class's results, and of partial results until they are scattered."""
    cls = table.classes[index]
    graph, buffers, sizes = table.graph, table.buffers, table.axis_sizes
    representative = graph.ops[cls.members[0]]

    def hold(held: np.ndarray, starts_ends: Sequence[Span], read: Sequence[int] = ()) -> None:
        if not held.any():
            return
        if index not in node_bytes or np.array_equal(node_bytes[index], held):
            node_bytes[index] = held
            is_edge, owner = False, index
        else:
            other = 0 if index else 1
            if other >= len(table.classes):
                return
            zeros = np.zeros(len(table.classes[other].strategies), np.int64)
            column = np.zeros((len(held), 1))
            is_edge, owner = True, n_edges + len(extra)
            extra.append(Edge(index, other, np.arange(len(held)), zeros, column, held[:, None]))
        for i, (start, end, category, label) in enumerate(starts_ends):
            account.hold(is_edge, owner, start, end, category, label, read[i : i + 1])

    for j, t in enumerate(representative.outputs):
        tensor = graph.tensors[t]
        if not buffers.stored[t] or math.prod(tensor.shape) * tensor.itemsize < table.least_bytes:
            continue
        itemsize = account.never_wide.get(t, float(table.precision.held[t]))
        held = account.bytes_of(table, t, itemsize, cls.results[j].layouts)[cls.results[j].of_strategy]
        if account.family == "tpu" and is_stacked(graph, buffers.root, t):
            held = np.where(held > largest_bytes(table.profile), held, 0)
        spans = []
        members = list(_not_merged(account, graph, cls.members, j))
        for m, merged in members:
            out = graph.ops[m].outputs[j]
            category, label = _category(table, m, out, roles)
            start, end = int(min(buffers.start[merged])), int(max(buffers.end[merged]))
            spans.append((start, end, category, (label, m)))
        first = len(account.rows)
        hold(held, spans, [graph.ops[m].outputs[j] for m, _ in members])
        for row, (m, _) in zip(range(first, len(account.rows)), members, strict=False):  # none where nothing is held
            if graph.ops[m].primitive == "loop_stack":
                account.stacks.append(row)
            if graph.ops[m].outputs[j] in account.in_results:
                account.unwritten.add(row)
        if account.family == "tpu" and _is_odd_result(table, t):
            odd = np.array([local_shape(tensor.shape, s.results[j], sizes)[-1] % 128 > 0 for s in cls.strategies])
            moved = [(start, start + 1, category, label) for start, _, category, label in spans]
            hold(np.where(odd, held, 0), moved)
    if representative.primitive not in BOUNDARY and any(s.resolutions for s in cls.strategies):
        tensor = graph.tensors[representative.outputs[0]]
        parts = [s.partial if s.partial != s.results[0] else None for s in cls.strategies]
        held = account.bytes_of(table, tensor.id, tensor.itemsize, parts)
        spans = [
            (int(buffers.time[m]), int(buffers.time[m]) + 1, "activations", (graph.ops[m].scope, m))
            for m in cls.members
        ]
        hold(held, spans)
        parts = [s.partial if s.resolutions else None for s in cls.strategies]
        waiting = account.bytes_of(table, tensor.id, tensor.itemsize, parts)
        ends = [(m, account.reduced.get(graph.ops[m].outputs[0], 0)) for m in cls.members]
        late = [(int(buffers.time[m]), end, m) for m, end in ends if end > buffers.time[m]]
        hold(waiting, [(t + 1, end + 1, "gradients", (graph.ops[m].scope, m)) for t, end, m in late])
    for m in cls.members:
        if m in account.given:
            numbers = graph.ops[m].params["dimension_numbers"].lhs_spec
            image, itemsize = graph.tensors[graph.ops[m].inputs[0]], table.precision.moved(graph, graph.ops[m], 0)
            reads = [s.operands[0] for s in cls.strategies]
            copied = [0 if r is None else tiled_bytes(image.shape, itemsize, r, sizes, numbers[:2]) for r in reads]
            span = int(buffers.time[m]), account.given[m] + 1, "activations", (graph.ops[m].scope, m)
            hold(np.array(copied), [span])
    if account.family == "tpu" and is_lookup(graph, representative):
        itemsize, begin = table.precision.moved(graph, representative, 0), account.first_lookup
        rows = copied_bytes(graph, representative, cls.strategies, sizes, float(itemsize))
        hold(rows, [(begin, int(buffers.time[m]) + 1, "gathered", (graph.ops[m].scope, m)) for m in cls.members])
    moved_rows = [m for m in cls.members if m in account.rows_of.copied]
    if moved_rows:
        read = representative.outputs[0] if representative.primitive == "gather" else representative.inputs[2]
        dims, itemsize = account.rows_of.copied[moved_rows[0]], float(table.precision.held[read])
        beside = copied_rows(graph, representative, dims, cls.strategies, sizes, itemsize)
        times = [(int(buffers.time[m]), (graph.ops[m].scope, m)) for m in moved_rows]
        hold(beside, [(time, time + 1, "activations", label) for time, label in times])
    if account.family != "gpu":
        return
    later = [m for m in cls.members if m in account.siblings]
    if later:
        spans = [
            (int(buffers.end[graph.ops[m].outputs[0]]), account.siblings[m], "activations", (graph.ops[m].scope, m))
            for m in later
        ]
        hold(merged_bytes(graph, representative, cls.strategies, sizes), spans)
    _hold_images(table, cls, account, hold)
    padded = once(
        table.prices.held, (id(cls.strategies), account.pads), lambda: _padded(table, representative, cls, account.pads)
    )
    # What depends on what is around the operation is not the same for all with these strategies.
    padded = padded + masks_of_extremes(graph, representative, cls.strategies, sizes)
    again = [m for m in cls.members if m in account.masked_again]
    shared = bool(again) or representative.id in account.masked_again.values()
    padded = padded + piece_bytes(graph, representative, cls.strategies, sizes)
    padded = padded + transposed_bytes(graph, representative, cls.strategies, sizes)
    padded = padded + enlarged_bytes(graph, representative, cls.strategies, sizes)
    padded = padded + copies_for_groups(graph, representative, cls.strategies, sizes, shared)
    if again:
        until = {m: int(buffers.time[account.masked_again[m]]) + 1 for m in again}
        kept = [(int(buffers.time[m]) + 1, end, "activations", (graph.ops[m].scope, m)) for m, end in until.items()]
        hold(copies_kept(graph, representative, cls.strategies, sizes), kept)
    padded = padded + held_beside(graph, representative, account.beside, cls.strategies, sizes)
    padded = padded + window_places(graph, representative, cls.strategies, sizes)
    times = [(int(buffers.time[m]), (graph.ops[m].scope, m)) for m in cls.members]
    hold(padded, [(time, time + 1, "activations", label) for time, label in times])


def _hold_images(table: CostTable, cls: OpClass, account: _Account, hold: Callable[..., None]) -> None:
    """Copies of images before convolutions of a GPU, until the last of them has read its copy."""
    graph, time = table.graph, table.buffers.time
    alike: dict[Copied, list[Span]] = defaultdict(list)
    for m in cls.members:
        if m in account.copied_images:
            copied = account.copied_images[m]
            span = int(time[m]), int(time[copied.last]) + 1, "activations", (graph.ops[m].scope, m)
            alike[replace(copied, last=0)].append(span)
    for copied, spans in alike.items():
        hold(image_bytes(graph, graph.ops[cls.members[0]], copied, cls.strategies, table.axis_sizes), spans)


def _padded(table: CostTable, op: Op, cls: OpClass, pads: bool) -> np.ndarray:
    """Bytes per strategy of what XLA:GPU holds besides, while an operation runs."""
    tiles = copies_for_tiles if pads else split_bytes
    sizes = table.axis_sizes
    return masked_copies(table.graph, op, cls.strategies, sizes) + tiles(table.graph, op, cls.strategies, sizes)


def _is_odd_result(table: CostTable, tensor: int) -> bool:
    """Whether a product's result is handed out as it is.

    XLA:TPU then copies it from the product's order of dimensions into the one that pads least, where the last dimension
    does not fill whole tiles.
    """
    graph, root = table.graph, table.buffers.root
    t = graph.tensors[tensor]
    if len(t.shape) < 2 or t.producer is None or graph.ops[t.producer].primitive != "dot_general":
        return False
    return any(int(root[graph.ops[r].inputs[0]]) == tensor for r in graph.results)


def _category(table: CostTable, op_id: int, tensor: int, roles: Mapping[int, str]) -> tuple[str, str]:
    op = table.graph.ops[op_id]
    if op.primitive == "argument":
        return roles.get(op_id, "inputs"), op.path
    if op.phase == "backward" and any(
        table.graph.ops[c].phase == "update" or table.graph.ops[c].primitive == "result"
        for c, _ in table.graph.tensors[tensor].consumers
    ):
        return "gradients", op.scope
    return "activations", op.scope or op.primitive


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

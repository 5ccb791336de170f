"""Who holds how many bytes when, besides what edges hold of copies: results, partial sums, and what compilers add."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard_ilp.costs.account import Account, Span, buffers_of, category_of, label_of
from autoshard_ilp.costs.beside import held_beside
from autoshard_ilp.costs.gpu.padded_images import (
    Copied,
    enlarged_bytes,
    image_bytes,
    piece_bytes,
    transposed_bytes,
)
from autoshard_ilp.costs.gpu.siblings import merged_bytes
from autoshard_ilp.costs.gpu.splitk import split_bytes
from autoshard_ilp.costs.gpu.workspace import workspace_spans
from autoshard_ilp.costs.grouped import copies_for_groups, copies_kept
from autoshard_ilp.costs.padding import WORKSPACE_BYTES, copies_for_tiles, masked_copies, window_places
from autoshard_ilp.costs.prices import once
from autoshard_ilp.costs.reshard_tables import agreeing
from autoshard_ilp.costs.table import REUSE, CostTable, Flow, OpClass, flow_table, flow_tensor, operand_labels
from autoshard_ilp.costs.tpu.carried import is_stacked
from autoshard_ilp.costs.tpu.filled import read_by_several_products
from autoshard_ilp.costs.tpu.lookups import copied_bytes, is_lookup
from autoshard_ilp.costs.tpu.onchip import largest_bytes
from autoshard_ilp.costs.tpu.rows import copied_rows
from autoshard_ilp.costs.tpu.tiles import (
    tiled_bytes,
)
from autoshard_ilp.costs.written import masks_of_extremes
from autoshard_ilp.graph import BOUNDARY, Op
from autoshard_ilp.program.model import Edge
from autoshard_ilp.sharding import WHOLE, divides, local_shape


class _OfClass:
    """What one class of operations holds, whatever it reads.

    Args:
        index: of the class.
        node_bytes: class -> the bytes per strategy that its node holds.
        extra: edges of one column that hold further bytes of a node, which follow ``n_edges`` others.
    """

    def __init__(
        self,
        table: CostTable,
        index: int,
        account: Account,
        node_bytes: dict[int, np.ndarray],
        extra: list[Edge],
        n_edges: int,
    ) -> None:
        self.table, self.index, self.account = table, index, account
        self.node_bytes, self.extra, self.n_edges = node_bytes, extra, n_edges
        self.cls = table.classes[index]
        self.op = table.graph.ops[self.cls.members[0]]
        self.strategies = self.cls.strategies

    def hold(self, held: np.ndarray, spans: Sequence[Span], read: Sequence[int] = ()) -> None:
        """Bytes per strategy, during each of some lifetimes; ``read``: the tensor as which each is read."""
        if not held.any():
            return
        if self.index not in self.node_bytes or np.array_equal(self.node_bytes[self.index], held):
            self.node_bytes[self.index] = held
            is_edge, owner = False, self.index
        else:
            other = 0 if self.index else 1
            if other >= len(self.table.classes):
                return
            zeros = np.zeros(len(self.table.classes[other].strategies), np.int64)
            column = np.zeros((len(held), 1))
            is_edge, owner = True, self.n_edges + len(self.extra)
            self.extra.append(Edge(self.index, other, np.arange(len(held)), zeros, column, held[:, None]))
        for i, (start, end, category, label) in enumerate(spans):
            self.account.hold(is_edge, owner, start, end, category, label, read[i : i + 1])

    def span(self, member: int, first: int, until: int, category: str = "activations") -> Span:
        """A lifetime of what one member of the class holds."""
        return first, until, category, (self.table.graph.ops[member].scope, member)

    def time(self, member: int) -> int:
        return int(self.table.buffers.time[member])

    def while_running(self, members: Sequence[int]) -> list[Span]:
        return [self.span(m, self.time(m), self.time(m) + 1) for m in members]

    def results(self, roles: Mapping[int, str]) -> None:
        """Results that have buffers."""
        table, account, cls = self.table, self.account, self.cls
        graph, buffers = table.graph, table.buffers
        for j, t in enumerate(self.op.outputs):
            tensor = graph.tensors[t]
            if not buffers.stored[t] or math.prod(tensor.shape) * tensor.itemsize < table.least_bytes:
                continue
            itemsize = account.never_wide.get(t, float(table.precision.held[t]))
            held = account.bytes_of(table, t, itemsize, cls.results[j].layouts)[cls.results[j].of_strategy]
            if account.family == "tpu" and is_stacked(graph, buffers.root, t):
                held = np.where(held > largest_bytes(table.profile), held, 0)
            spans = []
            members = list(buffers_of(account, graph, cls.members, j))
            for m, merged in members:
                category, label = category_of(table, m, graph.ops[m].outputs[j], roles)
                start, end = int(min(buffers.start[merged])), int(max(buffers.end[merged]))
                spans.append((start, end, category, (label, m)))
            first = len(account.rows)
            self.hold(held, spans, [graph.ops[m].outputs[j] for m, _ in members])
            rows = range(first, len(account.rows))  # none where nothing is held
            for row, (m, _) in zip(rows, members, strict=False):
                if graph.ops[m].primitive == "loop_stack":
                    account.stacks.append(row)
                if graph.ops[m].outputs[j] in account.in_results:
                    account.unwritten.add(row)
            if account.family == "tpu" and _is_odd_result(table, t):
                sizes = table.axis_sizes
                odd = np.array([local_shape(tensor.shape, s.results[j], sizes)[-1] % 128 > 0 for s in self.strategies])
                moved = [(start, start + 1, category, label) for start, _, category, label in spans]
                self.hold(np.where(odd, held, 0), moved)

    def partial_results(self) -> None:
        """Partial results until they are scattered, or reduced together with others."""
        if self.op.primitive in BOUNDARY or not any(s.resolutions for s in self.strategies):
            return
        table, members = self.table, self.cls.members
        tensor = table.graph.tensors[self.op.outputs[0]]
        parts = [s.partial if s.partial != s.results[0] else None for s in self.strategies]
        self.hold(self.account.bytes_of(table, tensor.id, tensor.itemsize, parts), self.while_running(members))
        parts = [s.partial if s.resolutions else None for s in self.strategies]
        waiting = self.account.bytes_of(table, tensor.id, tensor.itemsize, parts)
        ends = [(m, self.account.reduced.get(table.graph.ops[m].outputs[0], 0)) for m in members]
        late = [(m, end) for m, end in ends if end > self.time(m)]
        self.hold(waiting, [self.span(m, self.time(m) + 1, end + 1, "gradients") for m, end in late])

    def on_tpus(self) -> None:
        """Copies of images of the step in the order of convolutions, of tables, and of rows (XLA:TPU)."""
        table, account, graph, sizes = self.table, self.account, self.table.graph, self.table.axis_sizes
        for m in self.cls.members:
            if m in account.given:
                numbers = graph.ops[m].params["dimension_numbers"].lhs_spec
                image, itemsize = graph.tensors[graph.ops[m].inputs[0]], table.precision.moved(graph, graph.ops[m], 0)
                reads = [s.operands[0] for s in self.strategies]
                copied = [0 if r is None else tiled_bytes(image.shape, itemsize, r, sizes, numbers[:2]) for r in reads]
                self.hold(np.array(copied), [self.span(m, self.time(m), account.given[m] + 1)])
        if is_lookup(graph, self.op):
            itemsize, begin = table.precision.moved(graph, self.op, 0), account.first_lookup
            rows = copied_bytes(graph, self.op, self.strategies, sizes, float(itemsize))
            self.hold(rows, [self.span(m, begin, self.time(m) + 1, "gathered") for m in self.cls.members])
        moved_rows = [m for m in self.cls.members if m in account.rows_of.copied]
        if moved_rows:
            read = self.op.outputs[0] if self.op.primitive == "gather" else self.op.inputs[2]
            dims, itemsize = account.rows_of.copied[moved_rows[0]], float(table.precision.held[read])
            beside = copied_rows(graph, self.op, dims, self.strategies, sizes, itemsize)
            self.hold(beside, self.while_running(moved_rows))

    def on_gpus(self) -> None:
        """What waits for sibling products, copies of images, and what is held while an operation runs (XLA:GPU)."""
        table, account, graph, op = self.table, self.account, self.table.graph, self.op
        strategies, sizes = self.strategies, table.axis_sizes
        later = [m for m in self.cls.members if m in account.siblings]
        if later:
            ends = [(m, int(table.buffers.end[graph.ops[m].outputs[0]])) for m in later]
            self.hold(
                merged_bytes(graph, op, strategies, sizes), [self.span(m, end, account.siblings[m]) for m, end in ends]
            )
        self._images()
        padded = once(
            table.prices.held, (id(strategies), account.pads), lambda: _padded(table, op, self.cls, account.pads)
        )
        # What depends on what is around the operation is not the same for all with these strategies.
        padded = padded + masks_of_extremes(graph, op, strategies, sizes)
        again = [m for m in self.cls.members if m in account.masked_again]
        shared = bool(again) or op.id in account.masked_again.values()
        for besides in (piece_bytes, transposed_bytes, enlarged_bytes):
            padded = padded + besides(graph, op, strategies, sizes)
        padded = padded + copies_for_groups(graph, op, strategies, sizes, shared)
        if again:
            kept = [self.span(m, self.time(m) + 1, self.time(account.masked_again[m]) + 1) for m in again]
            self.hold(copies_kept(graph, op, strategies, sizes), kept)
        padded = padded + held_beside(graph, op, account.beside, strategies, sizes)
        padded = padded + window_places(graph, op, strategies, sizes)
        self.hold(padded, self.while_running(self.cls.members))

    def _images(self) -> None:
        """Copies of images before convolutions, until the last of them has read its copy."""
        alike: dict[Copied, list[Span]] = defaultdict(list)
        for m in self.cls.members:
            if m in self.account.copied_images:
                copied = self.account.copied_images[m]
                alike[replace(copied, last=0)].append(self.span(m, self.time(m), self.time(copied.last) + 1))
        for copied, spans in alike.items():
            held = image_bytes(self.table.graph, self.op, copied, self.strategies, self.table.axis_sizes)
            self.hold(held, spans)


def hold_results(
    table: CostTable,
    index: int,
    roles: Mapping[int, str],
    account: Account,
    node_bytes: dict[int, np.ndarray],
    extra: list[Edge],
    n_edges: int,
) -> None:
    """Bytes of a class's results, of partial results until they are scattered, and of what compilers hold besides.

    Args:
        roles: argument op id -> memory category.
        node_bytes, extra: what nodes and further edges hold, added to.
        n_edges: edges before the further ones.
    """
    of_class = _OfClass(table, index, account, node_bytes, extra, n_edges)
    of_class.results(roles)
    of_class.partial_results()
    if account.family == "tpu":
        of_class.on_tpus()
    if account.family == "gpu":
        of_class.on_gpus()


def hold_for_loops(table: CostTable, flow: Flow, account: Account, extra: list[Edge], n_edges: int) -> None:
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
            account.hold(True, n_edges + len(extra), cast.start, cast.end, "gathered", label_of(table, op_id, operand))
            extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(moved.shape), held))
        if op_id not in table.buffers.sliced:
            continue
        tensor, loop_ends = table.buffers.sliced[op_id]
        held = account.bytes_of(table, tensor, float(table.precision.held[tensor]), u.layouts)[:, None]
        begins = int(table.buffers.end[tensor])
        for part, start, end in ((np.where(moved, 0, held), begins, loop_ends), (moved * held, begins - 1, begins)):
            account.hold(True, n_edges + len(extra), start, end, "activations", label_of(table, op_id, operand))
            extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(moved.shape), part))


def hold_for_products(table: CostTable, flow: Flow, account: Account, extra: list[Edge], n_edges: int) -> None:
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
        account.hold(True, n_edges + len(extra), *span, "gathered", label_of(table, op_id, 0), [tensor.id])
    extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(cut.shape), held))


def hold_kernels(table: CostTable, flow: Flow, account: Account, extra: list[Edge], n_edges: int) -> None:
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
            account.hold(True, n_edges + len(extra), *span, "activations", label_of(table, op_id, operand))
        extra.append(Edge(flow.u, flow.v, u.of_strategy, v.of_strategy, np.zeros(counted.shape), table_of))


def hold_workspace(table: CostTable, account: Account, extra: list[Edge], n_edges: int) -> None:
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


def hold_filled_up(table: CostTable, account: Account, extra: list[Edge], n_edges: int) -> None:
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
        account.hold(True, n_edges + len(extra), start, start + 1, "activations", label_of(table, op_id, operand))
        ends = np.zeros(len(table.classes[v].strategies), np.int64)
        extra.append(Edge(u, v, np.arange(len(held)), ends, np.zeros((len(held), 1)), held[:, None]))


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

"""The account of a program's bytes: lifetimes, what each stands for, and what of the step they depend on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard_ilp.costs.alike import computed_alike
from autoshard_ilp.costs.beside import gradients_beside
from autoshard_ilp.costs.gpu.combining import gathered_together, known_from_the_start, reduced_together
from autoshard_ilp.costs.gpu.kernel_copies import kernel_copies
from autoshard_ilp.costs.gpu.padded_images import (
    copied_images,
)
from autoshard_ilp.costs.gpu.siblings import held_for_siblings
from autoshard_ilp.costs.gpu.triton import leaves_triton
from autoshard_ilp.costs.grouped import masked_again
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.costs.table import CostTable
from autoshard_ilp.costs.tpu.hoisted import hoisted_casts, never_wide
from autoshard_ilp.costs.tpu.idle import Idleness
from autoshard_ilp.costs.tpu.lookups import first_lookup, read_by_products_later
from autoshard_ilp.costs.tpu.onchip import idle_limit_seconds
from autoshard_ilp.costs.tpu.rows import Rows, row_padding, rows_of
from autoshard_ilp.costs.tpu.tiles import (
    images_of_the_step,
    of_batched_products,
    padding,
    stacks_of_loops,
    through_convolutions,
)
from autoshard_ilp.costs.written import made_in_results, packed_bytes, packed_masks
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.program.model import Lifetimes
from autoshard_ilp.sharding import Layout, local_bytes, local_shape

MERGED = frozenset({"gpu"})
"""Families of hardware on which what several layers compute alike is held once. Of others it is not known: XLA:TPU
computes most of it again inside what reads it."""

Span = tuple[int, int, str, tuple[str, int]]
"""Start and end of a lifetime, its category, its label with the operation."""


class Account:
    """Collects lifetimes; an owner has one byte table, so further tables of one node become edges of one column."""

    def __init__(self, table: CostTable) -> None:
        self.rows: list[tuple[bool, int, int, int]] = []
        self.categories: list[str] = []
        self.labels: list[tuple[str, int]] = []  # with the operation
        self.stacks: list[int] = []  # lifetimes of what loops stack up
        self.ahead: list[int] = []  # lifetimes of gathered copies of what the step starts with
        self.family = getattr(table.profile, "family", "")
        self.copies = CopyLifetimes(table)
        self.known = known_from_the_start(table.graph) if self.family == "tpu" else ()
        self.gathered = gathered_together(table.graph, table.buffers, self.family)
        self.reduced = reduced_together(table.graph, table.buffers, self.family)
        self._paddings: dict[Any, np.ndarray] = {}  # asked for many copies alike
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
        row, fastest = self._order(table, tensor)
        return padding(tuple(local), fastest) if row is None else row_padding(local, row)

    def paddings(self, table: CostTable, tensor: int, ends: tuple[Any, ...]) -> np.ndarray:
        """The same in each of some layouts; 1 where a copy arrives otherwise (None, or what a flow calls it)."""
        shape, sizes = table.graph.tensors[tensor].shape, table.axis_sizes
        key = shape, ends, *self._order(table, tensor)
        if key not in self._paddings:
            plain = [end is not None and not any(isinstance(a, str) for a in end) for end in ends]
            shapes = [local_shape(shape, end, sizes) if p else () for p, end in zip(plain, ends, strict=True)]
            self._paddings[key] = np.array([self.padding(table, tensor, s) if s else 1.0 for s in shapes])
        return self._paddings[key]

    def _order(self, table: CostTable, tensor: int) -> tuple[int | None, tuple[int, ...]]:
        """What decides in which order a TPU keeps the dimensions: rows, or those of which one varies fastest."""
        root = int(table.buffers.root[tensor])
        same = len(table.graph.tensors[root].shape) == len(table.graph.tensors[tensor].shape)
        return self.rows_of.kept.get(tensor), tuple(self.fastest_of.get(root, ())) if same else ()

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


class CopyLifetimes:
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


def buffers_of(account: Account, graph: Graph, members: Sequence[int], result: int) -> Iterator[tuple[int, list[int]]]:
    """Members of a class, each with its result; those that compute the same from the same are one, with all of theirs.

    All members have one layout, so XLA has one buffer for them, from the first one's time to the last one's.
    """
    merged: dict[object, tuple[int, list[int]]] = {}
    for m in members:
        out = graph.ops[m].outputs[result]
        key = account.alike[out] if account.alike else out
        merged.setdefault(key, (m, []))[1].append(out)
    yield from merged.values()


def label_of(table: CostTable, op_id: int, operand: int) -> tuple[str, int]:
    op = table.graph.ops[op_id]
    producer = table.graph.tensors[op.inputs[operand]].producer
    path = table.graph.ops[producer].path if producer is not None else ""
    return path or op.scope or op.primitive, op_id


def category_of(table: CostTable, op_id: int, tensor: int, roles: Mapping[int, str]) -> tuple[str, str]:
    op = table.graph.ops[op_id]
    if op.primitive == "argument":
        return roles.get(op_id, "inputs"), op.path
    if op.phase == "backward" and any(
        table.graph.ops[c].phase == "update" or table.graph.ops[c].primitive == "result"
        for c, _ in table.graph.tensors[tensor].consumers
    ):
        return "gradients", op.scope
    return "activations", op.scope or op.primitive

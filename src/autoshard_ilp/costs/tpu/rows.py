"""Rows that XLA:TPU gathers and scatters: they lie in memory one after another, each padded to whole tiles.

What else is of few columns lies with its many rows along the lanes (:mod:`autoshard_ilp.costs.tpu.tiles`). But a gather
writes rows, and a scatter reads them: 64 columns of 32-bit or of 16-bit numbers take twice their bytes, 16 columns
eight times as many, 128 and 256 no more than they have. Compiled for v5e (widths 2 to 192, ``float32`` and
``bfloat16``; ``tests/test_rows.py`` repeats some of it):

* Rows stay rows, ``f32[262144,64]{1,0:T(8,128)}``, in what is computed element by element from them and from what is
  the same in whole rows or columns, until a reduction or a scatter has read it: messages along the edges of a graph,
  and those that the backward pass keeps. So do rows of two dimensions that products read as they were gathered.
* Otherwise they are copied into the order that pads least: while the gather runs, both are there. An embedding
  ``f32[256,2048,64]{1,2,0}`` is a copy of ``f32[524288,64]{1,0}``.
* What a scatter reads is copied into rows, but for rows, and for what a product of two dimensions makes as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.costs.primitives import REDUCTIONS, VIEWS, fusible
from autoshard_ilp.costs.tpu.tile_shape import LANES
from autoshard_ilp.costs.tpu.tiles import MOVED, padding, whole_rows
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.sharding import Layout, local_bytes, local_shape
from autoshard_ilp.strategies import Strategy

MIN_BYTES = 2**20
"""Smaller rows are not looked at."""

UNCHANGED = ("convert_element_type", "select_n")
"""What rows may go through and still be as they were gathered: a lookup replaces those that are out of bounds."""


@dataclass(frozen=True)
class Rows:
    """Where rows are in a step.

    Attributes:
        kept: tensors that lie in rows as long as they live -> how many of their last dimensions a row has.
        copied: gathers whose result is copied into another order, and scatters that read such a copy -> the same.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    copied: Mapping[int, int] = field(default_factory=dict)


def row_padding(local: Sequence[int], dims: int) -> float:
    """Bytes of rows in tiles over their own bytes.

    Args:
        local: shape on one device.
        dims: how many of the last dimensions a row has.
    """
    sides = [n for n in (math.prod(local[:-dims]), *local[-dims:]) if n != 1]
    if len(sides) < 2 or 0 in sides:
        return 1.0
    return whole_rows(sides[-2]) / sides[-2] * (-(-sides[-1] // LANES) * LANES) / sides[-1]


def rows_of(graph: Graph) -> Rows:
    """What a step gathers and scatters in rows."""
    made, plain = _made_in_rows(graph)
    kept = _read_in_rows(graph, made, plain) if made else {}
    copied = {op.id: made[op.outputs[0]] for op in graph.ops if _gathered(graph, op) and op.outputs[0] not in kept}
    for op in graph.ops:
        dims = _scattered(graph, op)
        if not dims or op.inputs[2] in kept:
            continue
        t = graph.behind(op.inputs[2], ("hub",))
        producer = graph.tensors[t].producer
        readers = [graph.ops[r] for r, _ in graph.tensors[t].consumers]
        product = producer is not None and graph.ops[producer].primitive == "dot_general"
        if product and len(graph.tensors[t].shape) == 2 and all(r.primitive.startswith("scatter") for r in readers):
            kept[t] = dims
        else:
            copied[op.id] = dims
    return Rows(kept, copied)


def copied_rows(
    graph: Graph, op: Op, dims: int, strategies: Sequence[Strategy], sizes: Sequence[int], itemsize: float
) -> np.ndarray:
    """Bytes on one device of the rows beside the same in another order, per strategy; 0 where rows pad no more.

    Args:
        graph: of the step.
        op: one of :attr:`Rows.copied`.
        dims: how many dimensions a row has.
        strategies: of the operation.
        sizes: devices along each mesh axis.
        itemsize: bytes of an element.
    """
    gathers = op.primitive == "gather"
    shape = graph.tensors[op.outputs[0] if gathers else op.inputs[2]].shape
    layouts = [s.results[0] if gathers else s.operands[2] for s in strategies]
    held = {x: 0 if x is None else _beside(shape, dims, x, tuple(sizes), itemsize) for x in set(layouts)}
    return np.array([held[x] for x in layouts], np.int64)


def _beside(shape: tuple[int, ...], dims: int, layout: Layout, sizes: tuple[int, ...], itemsize: float) -> int:
    local = tuple(local_shape(shape, layout, sizes))
    by_row = row_padding(local, dims)
    found = math.ceil(local_bytes(shape, itemsize, layout, sizes) * by_row)
    return found if by_row > padding(local) and found >= MIN_BYTES else 0


def _gathered(graph: Graph, op: Op) -> int:
    """How many dimensions the rows have that a gather takes; 0: it is none, or takes no rows."""
    if op.primitive != "gather":
        return 0
    return _trailing(op.params["dimension_numbers"].offset_dims, len(graph.tensors[op.outputs[0]].shape))


def _scattered(graph: Graph, op: Op) -> int:
    """How many dimensions the rows have that a scatter reads; 0: it is none, or reads no rows."""
    if not op.primitive.startswith("scatter"):
        return 0
    return _trailing(op.params["dimension_numbers"].update_window_dims, len(graph.tensors[op.inputs[2]].shape))


def _trailing(dims: Sequence[int], rank: int) -> int:
    """How many dimensions there are, if they are the last ones but not all."""
    return len(dims) if len(dims) < rank and tuple(dims) == tuple(range(rank - len(dims), rank)) else 0


def _made_in_rows(graph: Graph) -> tuple[dict[int, int], frozenset[int]]:
    """Tensors gathered as rows, or computed from nothing else element by element -> dimensions of a row; and which of
    them are as they were gathered."""
    made: dict[int, int] = {}
    plain: set[int] = set()
    alike: set[int] = set()  # the same in whole rows or columns
    for op in graph.ops:
        out = op.outputs[0] if op.outputs else -1
        if dims := _gathered(graph, op):
            made[out] = dims
            plain.add(out)
        elif op.primitive in VIEWS:
            for source, t in zip(op.inputs, op.outputs, strict=False):
                if source in made and _keeps_rows(graph, op, source, t, made[source]):
                    made[t] = made[source]
                for known in (plain, alike):
                    known.update({t} if source in known else ())
        elif out >= 0 and fusible(op):
            shape = graph.tensors[out].shape
            same = [t for t in op.inputs if graph.tensors[t].shape == shape and graph.tensors[t].literal is None]
            rows = [t for t in same if t in made]
            if op.primitive in ("broadcast_in_dim", "iota") or (same and all(t in alike for t in same)):
                alike.update(op.outputs)
            elif rows and op.primitive not in MOVED and all(t in made or t in alike for t in same):
                made.update({t: made[rows[0]] for t in op.outputs if graph.tensors[t].shape == shape})
                if op.primitive in UNCHANGED and all(t in plain for t in rows):
                    plain.update(op.outputs)
    return made, frozenset(plain)


def _keeps_rows(graph: Graph, op: Op, source: int, out: int, dims: int) -> bool:
    """Whether a view leaves rows as they are."""
    before, after = graph.tensors[source].shape, graph.tensors[out].shape
    moved = op.primitive in ("transpose", "loop_carry", "loop_slice")
    return not moved and len(after) > dims and before[-dims:] == after[-dims:]


def _read_in_rows(graph: Graph, made: Mapping[int, int], plain: frozenset[int]) -> dict[int, int]:
    """Those tensors of rows that nothing reads that would have them in another order."""
    kept = dict(made)

    def reads(op: Op, t: int) -> bool:
        if op.primitive in ("gather", "scatter") or op.primitive.startswith(("scatter", *REDUCTIONS)):
            return True
        if op.primitive == "dot_general":
            return len(graph.tensors[t].consumers) == 1 or (t in plain and len(graph.tensors[t].shape) == 2)
        return bool(op.outputs) and fusible(op) and any(out in kept for out in op.outputs)

    for t in sorted(made, reverse=True, key=lambda t: graph.tensors[t].producer or 0):
        if not all(reads(graph.ops[reader], t) for reader, _ in graph.tensors[t].consumers):
            del kept[t]
    return kept

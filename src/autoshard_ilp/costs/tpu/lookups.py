"""Copies of tables that XLA:TPU makes to look rows up.

Arguments lie in the order of dimensions that pads least: of a table whose rows are no whole tiles, the columns first. A
lookup takes rows, so the table is copied into rows, each padded to whole tiles: 16 columns take eight times as much.
A copy depends on nothing, and XLA:TPU makes most of them before the first lookup has ended. (Compiled for v5e, eight
tables of 200000 x 128 whose columns eight devices share: six copies of 102 MB at once, 4.0 of the predicted peak.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard_ilp.costs.primitives import VIEWS
from autoshard_ilp.costs.tpu.tile_shape import LANES, ROWS
from autoshard_ilp.costs.tpu.tiles import padding
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.sharding import local_bytes, local_shape
from autoshard_ilp.strategies import Strategy

MIN_BYTES = 2**20
"""Smaller copies are not looked at."""


def is_lookup(graph: Graph, op: Op) -> bool:
    """Whether an operation outside of loops takes rows of a table that the step is given."""
    if op.primitive != "gather" or op.region or len(graph.tensors[op.inputs[0]].shape) != 2:
        return False
    producer = graph.tensors[graph.behind(op.inputs[0], ("hub", "convert_element_type"))].producer
    return producer is not None and graph.ops[producer].primitive == "argument"


def copied_bytes(
    graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int], itemsize: float
) -> np.ndarray:
    """Bytes on one device of the copy of a lookup's table, per strategy; 0 where rows are whole tiles.

    Args:
        graph: of the step.
        op: a lookup (:func:`is_lookup`).
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
        itemsize: bytes of a copied element: XLA:TPU rounds what only products read before it copies it.
    """
    table = graph.tensors[op.inputs[0]]
    found = np.zeros(len(strategies), np.int64)
    for i, layout in enumerate(s.operands[0] for s in strategies):
        if layout is None:
            continue
        rows, columns = local_shape(table.shape, layout, tuple(axis_sizes))
        by_row = -(-rows // ROWS) * ROWS * -(-columns // LANES) * LANES / max(rows * columns, 1)
        plain = local_bytes(table.shape, itemsize, layout, tuple(axis_sizes))
        if by_row > padding((rows, columns)) and plain * by_row >= MIN_BYTES:
            found[i] = round(plain * by_row)
    return found


def copy_seconds(
    graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int], itemsize: float, profile: Any
) -> np.ndarray:
    """Seconds that such a copy takes: its bytes are written, those of the table read."""
    table = graph.tensors[op.inputs[0]]
    seconds = np.zeros(len(strategies))
    for i, written in enumerate(copied_bytes(graph, op, strategies, axis_sizes, itemsize)):
        layout = strategies[i].operands[0]
        if written and layout is not None:
            moved = written + local_bytes(table.shape, table.itemsize, layout, tuple(axis_sizes))
            seconds[i] = profile.roofline_seconds(0.0, float(moved), table.dtype)
    return seconds


def read_by_products_later(graph: Graph, time: np.ndarray) -> dict[int, int]:
    """Lookups -> when a product reads their table for the last time, in a step without a backward pass.

    What each device cuts out of a whole table for both is one buffer then, as wide as the table's own elements, from
    the lookup on. (Compiled for v5e, Gemma 2 and 3 in ``predict``: an eighth of the rows in 32 bits, 295 and 151 MB.)
    """
    if graph.has_backward():
        return {}
    through = (*VIEWS, "convert_element_type")
    last: dict[int, int] = {}  # table -> time
    for op in graph.ops:
        if op.primitive == "dot_general" and not op.region:
            for source in (graph.behind(t, through) for t in op.inputs):
                last[source] = max(last.get(source, 0), int(time[op.id]))
    lookups = ((op.id, last.get(graph.behind(op.inputs[0], through), 0)) for op in graph.ops if is_lookup(graph, op))
    return {lookup: then for lookup, then in lookups if then > time[lookup]}


def scattered(strategy: Strategy) -> bool:
    """Whether what devices find of the rows that each holds is scattered."""
    return any(r.kind == "reduce-scatter" for r in strategy.resolutions)


def several_tables(graph: Graph) -> bool:
    """Whether a step looks rows up in several large tables: XLA:TPU then sums up what it finds in all of them by one
    all-reduce, and scatters nothing (eight tables: 1.43 of the bytes)."""
    tables = {graph.behind(op.inputs[0], ("hub", "convert_element_type")) for op in graph.ops if is_lookup(graph, op)}
    return sum(graph.tensors[t].bytes >= MIN_BYTES for t in tables) > 1


def first_lookup(graph: Graph, time: np.ndarray) -> int:
    """When the first lookup of a step runs."""
    return min((int(time[op.id]) for op in graph.ops if is_lookup(graph, op)), default=0)

"""Products in groups of rows (``ragged_dot``), as XLA:GPU and XLA:CPU compute them.

They have no kernel for them (jaxlib 0.10): one copy of the left operand per group, in which the rows of other groups
are zero, is multiplied by all matrices at once. A mixture of 16 experts on eight H100s, compiled:
``f32[16,16384,1024]`` and the same with the groups beside what is contracted, and 16 times the arithmetic. Where the
rows are contracted, in the gradient of the matrices, both operands are copied so, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.costs.padding import shape_on_device
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.strategies import Strategy

PRIMITIVE = "ragged_dot_general"

FAMILIES = frozenset({"gpu", "cpu"})

MOVED = 2
"""Times that a copy is written or read."""


def groups_of(graph: Graph, op: Op) -> int:
    """Groups of a product; 1 for other operations."""
    return int(graph.tensors[op.inputs[2]].shape[-1]) if op.primitive == PRIMITIVE else 1


def masked_again(graph: Graph) -> dict[int, int]:
    """Products of rows -> the last product that contracts them, of the same rows in the same groups.

    The copies of the rows are the same, and XLA keeps them.
    """
    sources = {op.id: tuple(graph.behind(op.inputs[i], ("hub",)) for i in (0, 2)) for op in _products(graph)}
    last = {sources[op.id]: op.id for op in _products(graph) if _contracts_rows(op)}
    found = {op.id: last.get(sources[op.id]) for op in _products(graph) if not _contracts_rows(op)}
    return {op_id: later for op_id, later in found.items() if later is not None}


def copies_for_groups(
    graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int], again: bool = False
) -> np.ndarray:
    """Bytes that one device holds besides while it computes a product in groups, per strategy.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
        again: whether the copies of its rows serve two products (:func:`masked_again`): the first holds them in the
            order in which they are multiplied besides, the second makes none.
    """
    held = np.zeros(len(strategies), np.int64)
    if op.primitive == PRIMITIVE:
        for i, n in enumerate((1 - again, 1) if _contracts_rows(op) else (1 + again, 0)):
            held += n * _copies(graph, op, i, strategies, axis_sizes)
    return held


def copies_kept(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes of the copies of rows that a product leaves for one that contracts them, per strategy."""
    return _copies(graph, op, 0, strategies, axis_sizes)


def _products(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.primitive == PRIMITIVE]


def _contracts_rows(op: Op) -> bool:
    numbers = op.params["ragged_dot_dimension_numbers"]
    return numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0]


def _copies(graph: Graph, op: Op, i: int, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """One copy of operand i for every group."""
    tensor, reads = graph.tensors[op.inputs[i]], [s.operands[i] for s in strategies]
    elements = [0 if r is None else math.prod(shape_on_device(tensor.shape, r, axis_sizes)) for r in reads]
    return groups_of(graph, op) * math.ceil(tensor.itemsize) * np.array(elements, np.int64)

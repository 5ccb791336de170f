"""Copies that a compiler makes because a shape does not suit its matrix unit.

XLA:GPU hands products of 16-bit numbers to tensor cores in tiles. Where a dimension of one device's share is not a
multiple of 8, it first pads the operands that have the dimension, and slices the result: each is one more copy of that
array while the product runs (``xla/service/gpu/transforms/cublas_pad_for_gemms``). A vocabulary of 50257 tokens is the
usual case: the logits, their gradient and the output weights are all copied.

XLA:TPU pads inside its tiled layouts instead, and picks the order of dimensions that pads least, so that arrays of
these sizes grow by less than a percent; that is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.sharding import WHOLE, Layout
from autoshard_ilp.strategies import Strategy

GEMM_MULTIPLE = 8
"""Elements that a dimension of a 16-bit product is padded to a multiple of."""


def copies_for_tiles(
    graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int], family: str
) -> np.ndarray:
    """Bytes of padded copies that one device holds while an operation runs, per strategy; zeros mostly.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
        family: of the hardware.
    """
    held = np.zeros(len(strategies), np.int64)
    if family != "gpu" or op.primitive != "dot_general" or len(op.inputs) != 2:
        return held
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs)]
    if any(t.itemsize != 2 for t in tensors[:2]):
        return held
    (contract_l, contract_r), (batch_l, batch_r) = op.params["dimension_numbers"]
    free = [
        [d for d in range(len(t.shape)) if d not in contract and d not in batch]
        for t, contract, batch in zip(tensors, (contract_l, contract_r), (batch_l, batch_r), strict=False)
    ]
    for i, s in enumerate(strategies):
        after = s.partial if s.partial is not None else s.results[0]
        if s.operands[0] is None or s.operands[1] is None:
            continue
        left, right = (
            _local_shape(t.shape, layout, axis_sizes)
            for t, layout in zip(tensors[:2], s.operands, strict=True)
            if layout is not None
        )
        m, n = (math.prod(part[d] for d in dims) for part, dims in zip((left, right), free, strict=True))
        k = math.prod(left[d] for d in contract_l)
        if min(m, n, k) == 1:
            continue  # a product with a vector
        result = _local_shape(tensors[2].shape, after, axis_sizes)
        odd_m, odd_n, odd_k = (size % GEMM_MULTIPLE != 0 for size in (m, n, k))
        padded = ((left, odd_m or odd_k), (right, odd_n or odd_k), (result, odd_m or odd_n))
        copies = [math.prod(part) * t.itemsize for t, (part, odd) in zip(tensors, padded, strict=True) if odd]
        held[i] = math.ceil(sum(copies))
    return held


def _local_shape(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> list[int]:
    """One device's share, padded up where it does not divide."""
    shards = [1] * len(shape)
    for dim, size in zip(layout, axis_sizes, strict=True):
        if dim != WHOLE:
            shards[dim] *= size
    return [-(-n // k) for n, k in zip(shape, shards, strict=True)]

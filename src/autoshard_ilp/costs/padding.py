"""Copies that a compiler makes because a shape does not suit its matrix unit.

XLA:GPU hands products to Triton, which needs no padding, or to cuBLAS (:mod:`.costs.gpu.triton`). cuBLAS has a
workspace, and products of 16-bit numbers where a dimension of one device's share is no multiple of 8 are padded first
and their results sliced: one more copy of each operand while the product runs
(``xla/service/gpu/transforms/cublas_pad_for_gemms``; the slice of the result fuses into what reads it). All calls have
their workspace in one place, and nearly everything outlives one of them, so that place is taken from the first call to
the last.

XLA:TPU pads inside its tiled layouts instead (:mod:`autoshard_ilp.costs.tpu.tiles`).
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

WORKSPACE_BYTES = 2**25
"""Of a cuBLAS call on Hopper and later (``xla/service/gpu/transforms/gemm_rewriter``; 4 MiB before)."""

PLACE_BYTES = 4
"""Of an index into one dimension, and of the maximum found there."""


def copies_for_tiles(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes of padded copies that one device holds while cuBLAS runs an operation, per strategy.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
    """
    held = np.zeros(len(strategies), np.int64)
    if op.primitive != "dot_general" or len(op.inputs) != 2:
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
        if s.operands[0] is None or s.operands[1] is None:
            continue
        left, right = (
            shape_on_device(t.shape, layout, axis_sizes)
            for t, layout in zip(tensors[:2], s.operands, strict=True)
            if layout is not None
        )
        m, n = (math.prod(part[d] for d in dims) for part, dims in zip((left, right), free, strict=True))
        k = math.prod(left[d] for d in contract_l)
        if min(m, n, k) == 1:
            continue  # a product with a vector
        odd_m, odd_n, odd_k = (size % GEMM_MULTIPLE != 0 for size in (m, n, k))
        padded = ((left, odd_m or odd_k), (right, odd_n or odd_k))
        held[i] += math.ceil(sum(2 * math.prod(part) for part, odd in padded if odd))
    return held


def masked_copies(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds besides while it contracts a dimension that does not divide, per strategy.

    The last shard of such a dimension is padded with what happens to be there, so the partitioner sets the padding of
    both operands to zero before their product; that is another copy of what is read elsewhere, too.
    """
    held = np.zeros(len(strategies), np.int64)
    if op.primitive != "dot_general":
        return held
    contract, _ = op.params["dimension_numbers"]
    for i, strategy in enumerate(strategies):
        for t, layout, dims in zip(op.inputs, strategy.operands, contract, strict=False):
            tensor = graph.tensors[t]
            shape = tensor.shape
            if layout is None or all(shape[d] % _shards(layout, d, axis_sizes) == 0 for d in dims):
                continue
            held[i] += math.prod(shape_on_device(shape, layout, axis_sizes)) * math.ceil(tensor.itemsize)
    return held


def window_places(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds besides during the gradient of a max pooling, per strategy.

    XLA:GPU first finds the place of every window's maximum: the maximum and one index per dimension, of 32 bits each.
    The gradient's own array may be filled with zeros before.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
    """
    held = np.zeros(len(strategies), np.int64)
    if op.primitive != "select_and_scatter_add":
        return held
    shape, maximum_bytes = graph.tensors[op.inputs[0]].shape, math.ceil(graph.tensors[op.inputs[1]].itemsize)
    for i, strategy in enumerate(strategies):
        layout = strategy.operands[0]
        if layout is not None:
            held[i] = (len(shape) * PLACE_BYTES + maximum_bytes) * math.prod(shape_on_device(shape, layout, axis_sizes))
    return held


def _shards(layout: Layout, dim: int, axis_sizes: Sequence[int]) -> int:
    return math.prod(size for place, size in zip(layout, axis_sizes, strict=True) if place == dim)


def shape_on_device(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> list[int]:
    """One device's share, padded up where it does not divide."""
    shards = [1] * len(shape)
    for dim, size in zip(layout, axis_sizes, strict=True):
        if dim != WHOLE:
            shards[dim] *= size
    return [-(-n // k) for n, k in zip(shape, shards, strict=True)]

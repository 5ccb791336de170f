"""Products of few tiles and a long contraction, which XLA:GPU splits.

A product whose result has fewer tiles than the GPU has cores leaves most of them idle, so XLA:GPU cuts its contraction
into pieces, makes one 32-bit partial result per piece, and adds them up in another kernel
(``xla/backends/gpu/transforms/splitk_rewriter``). Gradients of small weights over many rows are such products. The
partial results take many times the bytes of the result. Where the pieces are not whole vectors of 16 bytes, both
operands are copied, padded. The same holds for a convolution that is a sum of products, one per tap of its kernel
(:mod:`autoshard_ilp.enforce.taps`): one kernel adds up all of them.

The rule below is that of the compiler in ``jax-cuda12-plugin`` 0.10, found by compiling 58 products for H100
(``tests/test_splitk.py`` compiles some of them again): as many pieces, a power of two, as keep tiles times pieces
within one and a half times the cores, and no piece shorter than 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.costs.kernels import PER_TAP, products_instead
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.costs.padding import shape_on_device
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.sharding import Layout
from autoshard_ilp.strategies import Strategy

TILE = 128
"""Rows and columns of a tile of the result, as the rule counts them."""

CORES = 132
"""Streaming multiprocessors of H100 and H200. A100 has 108, which leads to the same power of two but for few shapes."""

MIN_PIECE = 128
"""Elements of the shortest piece of a contraction."""

MAX_PIECES = 128
VECTOR_BYTES = 16
ACCUMULATOR_BYTES = 4


def pieces(batch: int, rows: int, columns: int, contracted: int, cores: int = CORES) -> int:
    """Into how many pieces XLA:GPU cuts the contraction of a product of these (one device's) sizes.

    Args:
        batch, rows, columns: of the result.
        contracted: elements of the contraction.
        cores: streaming multiprocessors of the GPU.
    """
    tiles = batch * -(-rows // TILE) * -(-columns // TILE)
    n = 1
    while n < MAX_PIECES and tiles * n * 2 <= 1.5 * cores and contracted >= MIN_PIECE * n * 2:
        n *= 2
    return n


def split_bytes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes of partial results and padded operands that one device holds besides during an operation, per strategy: a
    product, or a convolution that is one per tap.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
    """
    held = np.zeros(len(strategies), np.int64)
    taps = _taps(graph, op)
    for i, strategy in enumerate(strategies):
        if taps:  # a product each, all of them added up by one kernel
            result = graph.tensors[op.outputs[0]]
            elements = math.prod(shape_on_device(result.shape, strategy.results[0], axis_sizes))
            held[i] = elements * (taps * ACCUMULATOR_BYTES - result.itemsize)
            continue
        split = _split(graph, op, strategy.operands, axis_sizes)
        if split is None:
            continue
        # The sum is written only after them.
        held[i] = split.elements * (split.pieces * ACCUMULATOR_BYTES - graph.tensors[op.outputs[0]].itemsize)
        narrowest = min(math.ceil(graph.tensors[t].itemsize) for t in op.inputs)
        if split.contracted % (split.pieces * VECTOR_BYTES // narrowest):
            held[i] += sum(
                math.prod(s) * math.ceil(graph.tensors[t].itemsize) for s, t in zip(split.sides, op.inputs, strict=True)
            )
    return held


def kept_in_pieces(
    graph: Graph, operand_layouts: Callable[[Op], Sequence[Layout | None]], axis_sizes: Sequence[int]
) -> frozenset[int]:
    """Results of products of the forward pass that XLA:GPU would keep in pieces until the backward pass.

    Where the forward and the backward pass each read the sum of the pieces in one kernel, each adds them up for itself.

    Args:
        graph: of the step, hubs included.
        operand_layouts: in which an operation reads its operands.
        axis_sizes: devices along each mesh axis.
    """
    split = [
        op
        for op in graph.ops
        if op.phase == "forward"
        and not op.region
        and (_split(graph, op, operand_layouts(op), axis_sizes) or _taps(graph, op))
    ]
    backward = [op.id for op in graph.ops if op.phase == "backward" and not op.region]
    if not split or not backward:
        return frozenset()
    buffers = analyse(graph, "gpu")
    begins = int(buffers.time[backward].min())
    return frozenset(t for op in split for t in op.outputs if buffers.stored[t] and buffers.last_use[t] >= begins)


def _taps(graph: Graph, op: Op) -> int:
    """Products of which a convolution is the sum (:mod:`autoshard_ilp.enforce.taps`); 0 where it is none."""
    if op.primitive != "conv_general_dilated" or products_instead(graph, op) != PER_TAP:
        return 0
    kernel = graph.tensors[op.inputs[1]].shape
    return math.prod(kernel[d] for d in op.params["dimension_numbers"].rhs_spec[2:])


@dataclass(frozen=True)
class _Split:
    """A product on one device, and in how many pieces it is computed."""

    pieces: int
    elements: int
    contracted: int
    sides: Sequence[Sequence[int]]


def _split(graph: Graph, op: Op, operands: Sequence[Layout | None], axis_sizes: Sequence[int]) -> _Split | None:
    """How an operation is split whose operands are laid out so; None where it is not."""
    if op.primitive != "dot_general" or not all(
        graph.tensors[t].dtype.startswith(("float", "bfloat")) for t in op.inputs
    ):
        return None
    left, right = operands
    if left is None or right is None:
        return None
    contract, batch = op.params["dimension_numbers"]
    sides = [
        shape_on_device(graph.tensors[t].shape, layout, axis_sizes)
        for t, layout in zip(op.inputs, (left, right), strict=True)
    ]
    rows, columns = (
        math.prod(n for d, n in enumerate(shape) if d not in c and d not in b)
        for shape, c, b in zip(sides, contract, batch, strict=True)
    )
    blocks = math.prod(sides[0][d] for d in batch[0])
    contracted = math.prod(sides[0][d] for d in contract[0])
    n = pieces(blocks, rows, columns, contracted)
    return None if n == 1 or min(rows, columns) == 1 else _Split(n, blocks * rows * columns, contracted, sides)

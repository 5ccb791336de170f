"""Bytes of an array in the tiled memory of a TPU.

XLA:TPU stores an array in tiles of 8 x 128 elements over the two dimensions that vary fastest; both are padded up to
whole tiles (of 1, 2 or 4 rows where the second of them is that small). The compiler chooses the order of dimensions,
and mostly finds one that pads little: two dimensions that fill their tiles are enough. What goes through convolutions
is not so free: the two are the batch and the channels, in either order. 32 images of 112 x 112 pixels and 32 channels
take four times their bytes. (Read off programs compiled for v5e; the tiles are described in
https://openxla.org/xla/tiled_layout.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.primitives import fusible
from autoshard_ilp.costs.tpu.tile_shape import LANES, ROWS
from autoshard_ilp.graph import Graph
from autoshard_ilp.sharding import Layout, local_bytes, local_shape

POOLING = ("reduce_window", "select_and_scatter_add", "select_and_gather_add", "pad")


MOVED = ("slice", "split", "concatenate", "pad")
"""What keeps the number of dimensions, and their order."""


def tiled_bytes(
    shape: tuple[int, ...], itemsize: float, layout: Layout, axis_sizes: tuple[int, ...], fastest: tuple[int, ...] = ()
) -> int:
    """Bytes that one device's share of a tensor takes in tiles.

    Args:
        shape: of the whole tensor.
        itemsize: bytes per element.
        layout: mesh axis -> dimension.
        axis_sizes: devices along each mesh axis.
        fastest: dimensions among which are the two that vary fastest; empty: any.
    """
    plain = local_bytes(shape, itemsize, layout, axis_sizes)
    return math.ceil(plain * padding(tuple(local_shape(shape, layout, axis_sizes)), fastest))


@cache
def padding(local: tuple[int, ...], fastest: tuple[int, ...] = ()) -> float:
    """Bytes of an array in tiles over its own bytes, in the order of dimensions that pads least.

    Args:
        local: its shape on one device.
        fastest: dimensions among which are the two that vary fastest; empty: any.
    """
    if len(local) < 2 or 0 in local:
        return 1.0
    pairs = itertools.permutations(fastest if len(fastest) > 1 else range(len(local)), 2)
    return min(whole_rows(local[i]) / local[i] * (-(-local[j] // LANES) * LANES) / local[j] for i, j in pairs)


def whole_rows(size: int) -> int:
    """Rows of whole tiles, which have as many as there are where there are fewer than eight: 1, 2 or 4."""
    return next((small for small in (1, 2, 4) if size <= small), -(-size // ROWS) * ROWS)


def through_convolutions(graph: Graph) -> Mapping[int, tuple[int, int]]:
    """Tensors that convolutions read as images or make, or that are computed from such element by element.

    Returns:
        Tensor id -> its dimensions of batch and channels.
    """
    found: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        if op.primitive == "conv_general_dilated" and op.phase == "forward":
            numbers = op.params["dimension_numbers"]
            found.setdefault(op.inputs[0], tuple(numbers.lhs_spec[:2]))
            found.setdefault(op.outputs[0], tuple(numbers.out_spec[:2]))
    if not found:
        return found
    for ops in (graph.ops, list(reversed(graph.ops)), graph.ops):
        for op in ops:
            pools = op.primitive.startswith(POOLING)
            if pools or (fusible(op) and op.primitive != "transpose"):
                _spread(graph, op.inputs, op.outputs, pools, found)
    boundary = {t for op in graph.ops if op.primitive == "argument" for t in op.outputs}
    boundary |= {graph.ops[r].inputs[0] for r in graph.results}
    return {t: dims for t, dims in found.items() if t not in boundary}


def _spread(graph: Graph, inputs: Sequence[int], outputs: Sequence[int], pools: bool, found: dict[int, Any]) -> None:
    """Gives the dimensions of one tensor of an operation to those of the same shape (or rank, where it pools)."""
    tensors = [t for t in (*inputs, *outputs) if len(graph.tensors[t].shape) > 2]
    known = next((t for t in tensors if t in found), None)
    if known is None:
        return
    shape = graph.tensors[known].shape
    for t in tensors:
        mine = graph.tensors[t].shape
        if mine == shape or (pools and len(mine) == len(shape)):
            found.setdefault(t, found[known])


def of_batched_products(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """Tensors that products in batches read or make, or that are computed from such element by element or moved -> the
    dimensions that are no batch.

    XLA:TPU runs over batches one by one, so none of them lies along a tile. Sequences of 128 tokens or more fill one;
    windows of 64 tokens do not (compiled for v5e, 16 heads: scores ``f32[128,16,64,64]{2,3,1,0}`` take twice their
    bytes, and so do queries, keys and values ``bf16[128,64,48,32]{1,3,2,0}``).
    """
    found: dict[int, tuple[int, ...]] = {}
    for op in graph.ops:
        if op.primitive != "dot_general":
            continue
        _, batches = op.params["dimension_numbers"]
        made = tuple(range(len(batches[0])))
        for t, batch in zip((*op.inputs, *op.outputs), (*batches, made), strict=True):
            inner = tuple(d for d in range(len(graph.tensors[t].shape)) if d not in batch)
            if batch and len(inner) > 1:
                found.setdefault(t, inner)
    for ops in (graph.ops, list(reversed(graph.ops))) if found else ():
        for op in ops:
            if op.primitive == "transpose":
                order, (read,), (made_t,) = op.params["permutation"], op.inputs, op.outputs
                if read in found:
                    found.setdefault(made_t, tuple(k for k, d in enumerate(order) if d in found[read]))
                elif made_t in found:
                    found[read] = tuple(sorted(order[k] for k in found[made_t]))
            elif fusible(op):
                _spread(graph, op.inputs, op.outputs, op.primitive in MOVED, found)
    kept = {t for op in graph.ops if op.primitive == "argument" for t in op.outputs}
    return {t: dims for t, dims in found.items() if t not in kept}


def stacks_of_loops(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """Tensors that loops stack up -> the dimensions of one entry, among which are the two that vary fastest.

    Loops write an entry at a time, so XLA:TPU never tiles along the stack: ``f32[256,32,2,64,64]``, stacked along its
    first dimension, pads its last to 128.
    """
    stacks = (op.outputs[0] for op in graph.ops if op.primitive == "loop_stack")
    ranks = ((t, len(graph.tensors[t].shape)) for t in stacks)
    return {t: tuple(range(1, rank)) for t, rank in ranks if rank > 2}


def images_of_the_step(graph: Graph, buffers: Buffers) -> Mapping[int, int]:
    """Convolutions whose image the step is given, at most cast and scaled on the way -> when its copy was last read.

    Arguments lie in the order of dimensions that pads least. XLA:TPU copies such an image into the order that
    convolutions take before the first of them, and keeps the copy for the gradient of the kernel.
    """
    given = [False] * len(graph.tensors)
    for op in graph.ops:
        made = op.primitive == "argument" or (bool(op.inputs) and all(_is_given(graph, given, t) for t in op.inputs))
        for t in op.outputs:
            given[t] = made and (op.primitive == "argument" or (fusible(op) and not buffers.stored[t]))
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive == "conv_general_dilated" and not op.region:
            for t in op.inputs:
                last[int(buffers.root[t])] = int(buffers.time[op.id])
            if op.phase == "forward" and given[op.inputs[0]]:
                first.setdefault(int(buffers.root[op.inputs[0]]), op.id)
    return {op: last[root] for root, op in first.items()}


def _is_given(graph: Graph, given: Sequence[bool], tensor: int) -> bool:
    return given[tensor] or graph.tensors[tensor].literal is not None

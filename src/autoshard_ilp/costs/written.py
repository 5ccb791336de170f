"""What XLA writes although it would be cheap to compute again.

On TPU masks of metrics and padded gradients, seen in programs compiled for v5e (docs/fidelity.md): where several
kernels need them, they are written once. One-hot labels, signs of activations and dropout masks are computed again. On
GPU the operand of an error function behind a product of merged dimensions, and the mask of an extreme.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autoshard_ilp.costs.padding import shape_on_device
from autoshard_ilp.costs.tpu.tile_shape import LANES
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.strategies import Strategy

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

BYTE_BITS = 8

SHORT_FLOAT_BYTES = 2
"""Of 16-bit floats, which XLA:GPU converts before a long function, and reads unconverted elsewhere."""


def made_in_results(graph: Graph, fuses: Sequence[bool]) -> frozenset[int]:
    """What XLA:TPU does not write since nothing but a result of the step is computed from it, an element from each.

    A product and the caps, scales and casts behind it are one kernel, which writes the result.

    Args:
        fuses: per operation, whether it may be computed inside another one's kernel.
    """
    found: set[int] = set()
    for op in graph.ops:
        at = op.inputs[0] if op.primitive == "result" else None
        while at is not None and len(graph.tensors[at].consumers) == 1:
            producer = graph.tensors[at].producer
            if producer is None or not fuses[producer]:
                found.add(at)
                break
            whole = [t for t in graph.ops[producer].inputs if graph.tensors[t].shape == graph.tensors[at].shape]
            at = whole[0] if len(whole) == 1 else None
    return frozenset(found)


def packed_masks(graph: Graph, fuses: Sequence[bool], views: Collection[str]) -> frozenset[int]:
    """Masks that XLA:TPU writes for a metric's ``argmax``, a bit per element.

    The second of its reductions looks for the extreme that the first has found. What both compare in their operand
    without knowing the extreme, such as where it is zero, negative or no number, is written before.

    Args:
        fuses: per operation, whether it may be computed inside its reader.
        views: primitives whose result shares its operand's buffer.
    """
    knows = [False] * len(graph.tensors)  # the result of a metric's reduction
    reads = [False] * len(graph.tensors)  # something that was computed, not only positions
    found: set[int] = set()
    for op in graph.ops:
        reduces = op.phase == "update" and op.primitive.startswith("reduce_")
        for t in op.outputs:
            knows[t] = reduces or any(knows[i] for i in op.inputs)
            reads[t] = op.primitive == "argument" or any(reads[i] for i in op.inputs)
        if not reduces or not any(knows[t] for t in op.inputs):
            continue
        shape, reached = graph.tensors[op.inputs[0]].shape, list(op.inputs)
        for t in reached:  # grows on the way
            producer = graph.tensors[t].producer
            made = None if producer is None else graph.ops[producer]
            if made is None or made.phase != "update" or not (fuses[made.id] or made.primitive in views):
                continue
            own = graph.tensors[t]
            compares = own.dtype == "bool" and not any(graph.tensors[i].dtype == "bool" for i in made.inputs)
            if compares and own.shape == shape and reads[t] and not knows[t]:
                found.add(t)
            reached += [i for i in made.inputs if i not in reached]
    return frozenset(found)


def packed_bytes(local: Sequence[int]) -> int:
    """Bytes of a mask on one device, of which its first dimension shares whole bytes."""
    return math.prod(local[1:]) * -(-local[0] // BYTE_BITS) if local else 0


def padded_for_several(
    graph: Graph,
    root: Sequence[int],
    stored: np.ndarray,
    several: np.ndarray,
    readers: Sequence[Sequence[Op]],
    fuses: Sequence[bool],
) -> np.ndarray:
    """What is padded for several kernels, at the end of the chain of operations that has one reader.

    The gradient of a slice, such as that of a sequence's first token, is as large as what was sliced. What only
    convolutions read is their own padding (causal convolutions of a WaveNet on v5e: 1138 MB of heap, where 1700 were
    counted), but for convolutions in groups (MobileNet-V2: ``bf16[32,113,113,96]``).

    Args:
        root: per tensor, the tensor whose buffer a view reads.
        stored: per tensor, whether it has a buffer anyway.
        several: per tensor, whether several kernels need it.
        readers: per tensor, the operations that read it.
        fuses: per operation, whether it may be computed inside its reader.
    """
    found, inside = np.zeros(len(graph.tensors), bool), np.zeros(len(graph.tensors), bool)
    for op in graph.ops:
        if not fuses[op.id]:
            continue
        padded = op.primitive == "pad" or any(inside[root[t]] for t in op.inputs)
        for t in op.outputs:
            written = not all(_pads(r) for r in readers[t])
            found[t] = padded and written and bool(several[t]) and len({r.id for r in readers[t]}) > 1
            inside[t] = padded and not found[t] and not stored[t]
    return found


def joined_off_lanes(graph: Graph, several: np.ndarray, readers: Sequence[Sequence[Op]]) -> np.ndarray:
    """What several kernels read that is joined, along the dimension that varies fastest, of parts that fill no lanes.

    XLA:TPU moves a part into the kernels that read the whole where it begins and ends with the vectors of
    :data:`LANES` elements. Others it would have to shift, once per kernel, so it writes the whole once: in a DenseNet,
    whose every layer joins 32 channels to all before them, one array per layer, up to 1024 channels wide (compiled for
    v5e 4x4: 1848 MB, of which 544 were predicted; with 128 channels per layer none is written).

    Args:
        several: per tensor, whether several kernels need it.
        readers: per tensor, the operations that read it.
    """
    found = np.zeros(len(graph.tensors), bool)
    for op in graph.ops:
        if op.primitive != "concatenate":
            continue
        out, last = op.outputs[0], int(op.params["dimension"])
        shape = graph.tensors[out].shape
        if last == len(shape) - 1 > 0 and len({r.id for r in readers[out]}) > 1:
            found[out] = several[out] and any(graph.tensors[t].shape[last] % LANES for t in op.inputs)
    return found


def _pads(op: Op) -> bool:
    """Whether an operation is a convolution that pads its operand itself."""
    groups = ("feature_group_count", "batch_group_count")
    return op.primitive == "conv_general_dilated" and all(op.params[name] == 1 for name in groups)


def operands_of_erfc(graph: Graph, root: Sequence[int], stored: np.ndarray, fuses: Sequence[bool]) -> np.ndarray:
    """Operands of ``erfc``, the error function of exact GELUs, behind products of merged dimensions.

    A product runs on two dimensions, so what has more is reshaped after it. XLA:GPU moves the reshape down to where the
    16-bit operand of ``erfc`` is converted, and its fusion computes nothing inside a mere reshape. So it writes the
    operand, and keeps it where the gradient reads it again. Not where nothing is reshaped: products of two dimensions,
    convolutions, 32-bit floats.

    Args:
        root, stored, fuses: as for :func:`padded_for_several`.
    """
    found, reshaped = np.zeros(len(graph.tensors), bool), np.zeros(len(graph.tensors), bool)
    if not any(op.primitive == "erfc" for op in graph.ops):
        return found
    for op in graph.ops:
        merged = op.primitive == "dot_general" and _merges(graph, op)
        inside = fuses[op.id] and any(reshaped[root[t]] for t in op.inputs)
        for t in op.outputs:
            reshaped[t] = merged or inside
        if op.primitive != "erfc":
            continue
        t = root[op.inputs[0]]
        short = graph.tensors[t].itemsize == SHORT_FLOAT_BYTES
        found[t] = short and reshaped[t] and not stored[t]
    return found


def long_functions_kept(
    graph: Graph, root: Sequence[int], fuses: Sequence[bool], primitives: Collection[str]
) -> frozenset[int]:
    """Operations whose result XLA:TPU writes beside their operand, for the backward pass: long functions of 16 bits.

    It computes them in the kernel of the product before, and writes both results. Not behind a product of merged
    dimensions, whose result is reshaped before the function is computed, nor in 32 bits: then it is computed again.
    (Compiled for v5e, six blocks 1024-4096-1024 with exact GELUs: written for ``bf16[8192,4096]``, not for
    ``bf16[8,1024,4096]``, nor for ``f32`` of either shape.)

    Args:
        root: per tensor, the tensor whose buffer a view reads.
        fuses: per operation, whether it may be computed inside its reader.
        primitives: the long functions.
    """
    reshaped = np.zeros(len(graph.tensors), bool)
    found: set[int] = set()
    for op in graph.ops:
        merged = op.primitive == "dot_general" and _merges(graph, op)
        inside = fuses[op.id] and any(reshaped[root[t]] for t in op.inputs)
        for t in op.outputs:
            reshaped[t] = merged or inside
        short = bool(op.inputs) and graph.tensors[op.inputs[0]].itemsize == SHORT_FLOAT_BYTES
        if op.primitive in primitives and short and not inside:
            found.add(op.id)
    return frozenset(found)


def _merges(graph: Graph, product: Op) -> bool:
    """Whether several dimensions of an operand become one of the result's two."""
    contract, batch = product.params["dimension_numbers"]
    free = (
        len(graph.tensors[t].shape) - len(c) - len(b) for t, c, b in zip(product.inputs, contract, batch, strict=True)
    )
    return max(free) > 1


def masks_of_extremes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds of the mask ``x == max(x)`` of a metric's ``argmax``, per strategy.

    XLA:GPU makes one Triton kernel of a reduction and what is computed elementwise of it and of what it reduced, where
    one device has whole rows, and that kernel's result is written.

    Args:
        graph: of the step.
        op: any operation.
        strategies: its strategies.
        axis_sizes: devices along each mesh axis.
    """
    held = np.zeros(len(strategies), np.int64)
    axes = _compares_with_extreme(graph, op) if op.primitive == "eq" and op.phase == "update" else ()
    if not axes:
        return held
    shape = graph.tensors[op.outputs[0]].shape
    for i, strategy in enumerate(strategies):
        layout = strategy.results[0]
        if not any(place in axes for place in layout):
            held[i] = math.prod(shape_on_device(shape, layout, axis_sizes))
    return held


def _compares_with_extreme(graph: Graph, op: Op) -> Sequence[int]:
    """Dimensions over which the extreme was taken that an operation compares its operand with; none otherwise."""
    for t in op.inputs:
        producer = graph.tensors[graph.behind(t, ("broadcast_in_dim", "hub", "reshape"))].producer
        if producer is None or graph.ops[producer].primitive not in ("reduce_max", "reduce_min"):
            continue
        reduction = graph.ops[producer]
        if reduction.inputs[0] in op.inputs:
            return tuple(reduction.params["axes"])
    return ()

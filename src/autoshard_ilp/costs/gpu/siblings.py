"""Products of one operand that XLA:GPU makes one product, whose result is then held as long as any part of it is read.

Query, key and value are such products (``xla/hlo/transforms/simplifiers/dot_merger``): the weights are concatenated,
and each reader takes its slice. Keys and values are transposed for the products of attention and kept so for the
backward pass. A query needs no transposition, but where cuBLAS wants it padded (:mod:`autoshard_ilp.costs.padding`),
its slice, bias and scale are computed inside the padding, in the forward pass and once more in the backward pass. Until
then the result of all three is held, beside the transposed keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.padding import GEMM_MULTIPLE, shape_on_device
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.strategies import Strategy

MERGED_BYTES = 2**25
"""Of a product's operands and result: larger ones are not merged (``xla_gpu_dot_merger_threshold_mb``)."""


def held_for_siblings(graph: Graph, buffers: Buffers) -> dict[int, int]:
    """Products whose result is held for a sibling's sake, and until when, later than its own buffer is."""
    groups: dict[tuple[object, ...], list[Op]] = {}
    for op in graph.ops:
        if op.primitive != "dot_general" or len(op.inputs) != 2:
            continue
        (contracted, _), (batch, _) = op.params["dimension_numbers"]
        if not batch:
            key = (int(buffers.root[op.inputs[0]]), tuple(contracted), op.phase, op.region)
            groups.setdefault(key, []).append(op)
    found: dict[int, int] = {}
    for group in groups.values():
        until = {op.id: _read_again(graph, buffers, op) for op in group}
        for op in group if len(group) > 1 else ():
            last = max(end for other, end in until.items() if other != op.id)
            if not until[op.id] and last > int(buffers.end[op.outputs[0]]):
                found[op.id] = last
    return found


def _read_again(graph: Graph, buffers: Buffers, product: Op) -> int:
    """Until when a product's result is read, if a padded product's left operand is made of it and read again; or 0."""
    end, paths = 0, [(product.outputs[0], 0)]  # tensors with the end of what is held on the way to them
    for t, kept in paths:  # grows on the way
        kept = max(kept, int(buffers.end[t])) if buffers.stored[t] else kept
        for reader, position in graph.tensors[t].consumers:
            op = graph.ops[reader]
            if op.primitive == "dot_general":
                again = position == 0 and kept > buffers.time[reader] + 1 and _is_padded_left(graph, op)
                end = max(end, kept) if again else end
            elif op.phase == product.phase and op.primitive != "transpose" and (fusible(op) or op.primitive in VIEWS):
                paths += [(out, kept) for out in op.outputs if out not in dict(paths)]
    return end


def _is_padded_left(graph: Graph, op: Op) -> bool:
    """Whether a batched product of 16-bit numbers has to pad its left operand, which needs no transposition."""
    contract, batch = op.params["dimension_numbers"]
    shapes = [graph.tensors[t].shape for t in op.inputs[:2]]
    if not batch[0] or graph.tensors[op.inputs[0]].itemsize != 2 or tuple(contract[0]) != (len(shapes[0]) - 1,):
        return False
    taken = {*contract[0], *batch[0]}
    rows = math.prod(n for d, n in enumerate(shapes[0]) if d not in taken)
    return rows % GEMM_MULTIPLE > 0


def merged_bytes(graph: Graph, op: Op, strategies: Sequence[Strategy], axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes that one device holds of a product's result as a part of a merged one, per strategy; 0: not merged."""
    held = np.zeros(len(strategies), np.int64)
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs)]
    for i, strategy in enumerate(strategies):
        layouts = (*strategy.operands, strategy.results[0])
        if strategy.resolutions or any(layout is None for layout in layouts):
            continue  # what is reduced after it is not a part of it
        sizes = [
            math.prod(shape_on_device(t.shape, layout, axis_sizes)) * math.ceil(t.itemsize)
            for t, layout in zip(tensors, layouts, strict=True)
            if layout is not None
        ]
        held[i] = sizes[-1] if sum(sizes) <= MERGED_BYTES else 0
    return held

"""Values that several layers compute for themselves: masks, rotary embeddings, buckets of relative positions.

XLA merges equal operations of equal operands before it partitions a program, so that such a value is there once.
"""

from __future__ import annotations

from autoshard_ilp.costs.primitives import PRODUCTS
from autoshard_ilp.graph import Graph


def computed_alike(graph: Graph) -> list[object]:
    """Per tensor, what equals that of another where both are computed by equal operations from equal values.

    Results of products and loops, and what is computed from them, equal nothing else.
    """
    same: list[object] = [t.id if t.literal is None else (t.dtype, str(t.literal)) for t in graph.tensors]
    numbers: dict[object, int] = {}
    for op in graph.ops:
        if op.primitive in ("argument", "constant"):
            same[op.outputs[0]] = ("given", op.id)
        if op.primitive == "hub":
            same[op.outputs[0]] = same[op.inputs[0]]
        operands = [same[t] for t in op.inputs]
        if op.region or op.eqn is None or op.primitive in PRODUCTS or any(isinstance(k, int) for k in operands):
            continue
        key = (op.primitive, repr(sorted(op.params.items(), key=lambda item: item[0])), *operands)
        number = numbers.setdefault(key, len(numbers))
        for i, t in enumerate(op.outputs):
            same[t] = ("computed", number, i)
    return same

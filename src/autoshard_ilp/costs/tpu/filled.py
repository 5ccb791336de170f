"""What two products read filled up, where a dimension does not divide: XLA:TPU writes it on some chips.

Every shard of an uneven dimension is as long as the first, and what is behind its end must not count, so products read
it with zeros there (``manual``'s ``_filled_up``, or XLA's partitioner). An operand that has no buffer, such as the
gradient of logits, is computed inside each of its products. Filled up alike for two of them, XLA:TPU v5p computes it
once and writes it; v5e does not, nor does v5p where only one of them has it filled up. (Compiled: two layers of GPT-2
on v5p, 50257 words in two shards: ``bf16[4,1024,25129]``, 206 MB beside the logits.)
"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.graph import Graph


def read_by_several_products(graph: Graph, buffers: Buffers) -> Iterator[tuple[int, int, int]]:
    """Tensor without a buffer, and operation and operand of the first of the products that read it.

    From the second one on it stands in for what it is computed of, which is as large and no longer needed.
    """
    uses: dict[int, list[tuple[int, int, int]]] = {}
    for op in graph.ops:
        for operand, t in enumerate(op.inputs if op.primitive == "dot_general" else ()):
            root = int(buffers.root[t])
            if not buffers.stored[root] and graph.tensors[root].literal is None:
                uses.setdefault(root, []).append((int(buffers.time[op.id]), op.id, operand))
    for found in uses.values():
        if len({op_id for _, op_id, _ in found}) > 1:
            _, op_id, operand = min(found)
            yield graph.ops[op_id].inputs[operand], op_id, operand

"""Long functions of what is kept anyway, which XLA:GPU computes again.

The result of a long function (an exponential, a logistic) is counted as kept for the backward pass, where computing it
again would read as much as it is large. But a kernel that is given what it is a function of has nothing to read
besides: the logistic of a SiLU is computed from its input, which the backward pass needs as well. And where what it is
a function of dies earlier, XLA keeps that, not both: the logits, of which a cross-entropy reads one per token behind
the exponentials, are not held beside these (two transformer layers with 32000 classes in 32 bits, on 8 H100s: 1268 MB,
of 1487 predicted). Error functions take too many operations to be computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autoshard_ilp.costs.primitives import REDUCTIONS, VIEWS, fusible
from autoshard_ilp.graph import BOUNDARY, Graph, Op

COMPUTED_AGAIN = frozenset({"exp", "exp2", "expm1", "logistic"})
"""Functions that XLA:GPU computes again; of others it was not seen."""

SMALL = 1 / 8
"""Share of a result's bytes up to which other operands count for nothing."""


def functions_of_one(
    graph: Graph, root: Sequence[int], stored: Sequence[bool], behind: Callable[[Op], Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Results of long functions that are kept, each with the one array that it is a function of.

    Args:
        graph: of the step.
        root: per tensor, the tensor whose buffer a view reads.
        stored: per tensor, whether it has a buffer.
        behind: what an operation reads, and what lies behind that as far as it is computed inside the same kernel.
    """
    results = {root[graph.ops[r].inputs[0]] for r in graph.results}
    for op in graph.ops:
        if op.primitive not in COMPUTED_AGAIN or op.region or not fusible(op) or len(op.outputs) != 1:
            continue
        made = graph.tensors[op.outputs[0]]
        if not stored[made.id] or made.id in results or not _fused_by_all(graph, made.id):
            continue
        read = [graph.tensors[t] for t in behind(op) if stored[t] and t != made.id]
        large = [t for t in read if math.prod(t.shape) == math.prod(made.shape)]
        others = sum(t.bytes for t in read if t not in large)
        if len(large) == 1 and large[0].bytes <= made.bytes and others <= SMALL * made.bytes:
            producer = large[0].producer
            if producer is not None and graph.ops[producer].primitive not in BOUNDARY:
                yield made.id, large[0].id


def _fused_by_all(graph: Graph, tensor: int) -> bool:
    """Whether everything that reads a tensor computes it while it reads."""
    readers = [graph.ops[r] for r, _ in graph.tensors[tensor].consumers]
    for op in readers:  # grows on the way
        if op.primitive in VIEWS or op.primitive == "hub":
            readers += [graph.ops[r] for t in op.outputs for r, _ in graph.tensors[t].consumers]
        elif op.region or not (fusible(op) or op.primitive.startswith(REDUCTIONS)):
            return False
    return bool(readers)

"""What meets random numbers of one pass: computed before them, in kernels of its own.

Where a dropout's mask is drawn again for the backward pass, XLA:TPU fuses what draws it with the softmax that the mask
is for, in the forward pass, too. All operands of that kernel are arrays, and so the thirty constants of the generator
are written as arrays as large as the mask: for two GPT-2 layers that recompute on v5e 2x4, ``u32[2,12,1024,1024]`` 30
times over, 3.4 GB where 0.59 were predicted. A barrier behind the softmax, which XLA:TPU honours, keeps the two apart,
and the mask is drawn inside the product that reads it, as usual. (Behind the mask instead, it leads to convolutions in
convolutions, over whose cost the compiler of libtpu 0.0.42 runs out of stack.)
"""

from __future__ import annotations

from autoshard_ilp.costs.primitives import RANDOM, fusible
from autoshard_ilp.graph import Graph

LEAST_BYTES = 1024
"""What holds less may be written whenever XLA likes."""


def met_by_random_bits(graph: Graph) -> frozenset[int]:
    """Computed tensors that meet what is made of random bits alone and read in one pass; none in a step that does not
    draw any bits again."""
    drawn: set[int] = set()
    met: set[int] = set()
    for op in graph.ops if _draws_again(graph) else ():
        mine = [t for t in op.inputs if t in drawn]
        others = [t for t in op.inputs if t not in drawn and _is_large(graph, t)]
        if op.primitive in RANDOM or (mine and not others and fusible(op)):
            drawn.update(op.outputs)
        elif any(len({r.phase for r in graph.readers(graph.behind(t, ("hub",)))}) == 1 for t in mine):
            met.update(t for t in others if not _is_constant(graph, t))
    return frozenset(met)


def _draws_again(graph: Graph) -> bool:
    return any(op.primitive in RANDOM and op.params.get("recomputed") for op in graph.ops)


def _is_large(graph: Graph, tensor: int) -> bool:
    return graph.tensors[tensor].bytes >= LEAST_BYTES


def _is_constant(graph: Graph, tensor: int) -> bool:
    """Whether a tensor is one number all over, which is not to be written."""
    producer = graph.tensors[graph.behind(tensor, ("hub",))].producer
    return producer is None or graph.ops[producer].primitive == "broadcast_in_dim"

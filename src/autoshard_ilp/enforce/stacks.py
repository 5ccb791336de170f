"""Stacks of matrices, written by one loop and read by another in the same order of dimensions.

XLA:GPU lets every loop lay a stack out as its own products like it best. Where the loop that reads it likes another
order than the one that writes it, the whole stack is copied in between, and both copies are held: the states of a
recurrence of matrices, which the backward pass multiplies transposed (RWKV-7 of small width, compiled for eight H100s:
67 MB per stack, two of them per layer; 510 instead of 461 MB at the peak). Where both loops are asked for the same
order, they transpose one step's matrices inside the kernels that read them. Vectors are stacked so that nothing is
copied.
"""

from __future__ import annotations

from autoshard_ilp.graph import Graph

PLATFORMS = frozenset({"gpu"})
"""Where loops are asked for the same order."""

MATRICES = 3
"""Dimensions of what is stacked: matrices of one batch, or of several heads, have as many at least."""


def stacks_of_matrices(graph: Graph, platform: str) -> frozenset[int]:
    """Ids of the operations that stack such matrices up, and of those that read them.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices.
    """
    found: set[int] = set()
    for op in graph.ops if platform in PLATFORMS else ():
        if op.primitive != "loop_slice" or len(graph.tensors[op.outputs[0]].shape) < MATRICES:
            continue
        if graph.tensors[op.outputs[0]].dtype.startswith("key"):
            continue  # random keys have no order of dimensions
        producer = graph.tensors[graph.behind(op.inputs[0], ("hub",))].producer
        if producer is not None and graph.ops[producer].primitive == "loop_stack":
            found |= {op.id, producer}
    return frozenset(found)

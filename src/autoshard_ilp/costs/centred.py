"""What XLA:GPU writes of a variance: the array less its average.

XLA:GPU computes a reduction over dimensions in the middle (the places of an image, each image by itself), or over the
rows of a wide matrix, in one kernel with what it reads only where that is a function of one array. The squares of a
group normalisation are one of two, an image and its averages. So ``x - mean`` is written, in 32 bits, and since it is
there, the backward pass reads it. (Five group normalisations between convolutions, in 16 bits, on 8 H100s: 5 arrays of
17 MB, 194 MB where 110 were predicted. Three batch normalisations between layers of width 2048: 317, and 228.)
Reductions over the last dimension (layer normalisations), or to few numbers (an image's batch normalisation), are
computed with what they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoshard_ilp.graph import Graph, Op

SQUARES = frozenset({"square", "mul", "integer_pow", "abs", "convert_element_type"})
"""What is computed of the difference before it is summed up."""

ROWS = 256
"""Places of an image whose sums are computed with the squares; more are not (256 and 1024 were compiled)."""

COLUMNS = 1024
"""The same for the columns of a matrix whose rows are summed up (1024 and 1536 were compiled)."""


def centred_for_variances(graph: Graph, fuses: Sequence[bool]) -> Iterator[int]:
    """Differences from averages that are written for a variance, and read by the backward pass.

    Args:
        graph: of the step.
        fuses: per operation, whether it is computed element by element inside other kernels.
    """
    for op in graph.ops:
        if op.primitive == "sub" and op.phase == "forward" and not op.region and _has_average(graph, op):
            (difference,) = op.outputs
            if _read_backward(graph, difference, fuses) and _summed_up(graph, difference):
                yield difference


def _has_average(graph: Graph, op: Op) -> bool:
    """Whether the second operand is of fewer elements than the first: repeated along what is averaged."""
    whole, average = (graph.tensors[t] for t in op.inputs)
    return average.literal is None and 1 < math.prod(average.shape) < math.prod(whole.shape)


def _read_backward(graph: Graph, tensor: int, fuses: Sequence[bool]) -> bool:
    """Whether the backward pass reads a tensor, or what the forward pass computes of it element by element."""
    for reader in graph.readers(tensor):
        if reader.phase == "backward":
            return True
        if reader.outputs and fuses[reader.id] and any(r.phase == "backward" for r in graph.readers(reader.outputs[0])):
            return True
    return False


def _summed_up(graph: Graph, tensor: int) -> bool:
    """Whether squares of a tensor are summed up by a kernel of their own."""
    reached = [tensor]
    for t in reached:  # grows on the way
        for reader in graph.readers(t):
            if reader.primitive == "reduce_sum" and t != tensor and _apart(graph.tensors[t].shape, reader):
                return True
            if reader.primitive in SQUARES and reader.phase == "forward" and reader.outputs[0] not in reached:
                reached.append(reader.outputs[0])
    return False


def _apart(shape: tuple[int, ...], reduction: Op) -> bool:
    """Whether a reduction keeps the last dimension of more than one element, and either the first, or many columns."""
    summed = set(reduction.params["axes"])
    long = [d for d, n in enumerate(shape) if n > 1]
    if len(long) < 2 or long[-1] in summed:
        return False
    columns = math.prod(shape[d] for d in long if d not in summed)
    rows = math.prod(shape[d] for d in long if d in summed)
    return (long[0] not in summed and rows > ROWS) or min(columns, rows) > COLUMNS

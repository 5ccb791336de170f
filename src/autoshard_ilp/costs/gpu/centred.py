"""What XLA:GPU writes of a variance: the array less its average.

XLA:GPU sums up columns in one kernel where a column has at most 4096 elements, in two where it has more (its
``TreeReductionRewriter``: what one block of threads can add up without a race). The first of two computes what it
reads; a single one only a function of one array. The squares of a batch or group normalisation are one of two, an array
and its averages. So ``x - mean`` is written, in 32 bits, and since it is there, the backward pass reads it. (Five group
normalisations between convolutions, in 16 bits, on 8 H100s: 5 arrays of 17 MB, 194 MB where 110 were predicted. Four
batch normalisations between layers of width 1024, in 16 bits: 183 MB, and 111. Compiled for one H100: matrices of 256
to 24576 rows and 256 to 2048 columns, images of 7 to 128 squared with batch, group and instance normalisations; 4096
rows are written, 4225 are not.) Sums over the last dimension (layer normalisations) are computed with what they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoshard_ilp.graph import Graph, Op

SQUARES = frozenset({"square", "mul", "integer_pow", "abs", "convert_element_type"})
"""What is computed of the difference before it is summed up."""

ROWS = 4096
"""Elements of a column that XLA:GPU adds up in one kernel: 32 times 128."""

FEW_PLACES = 256
"""Places of an image, each image by itself, up to which nothing is written. From there to :data:`ROWS` it depends on
how many images and channels there are as well, in no simple way (of 14 shapes, 8 were written in 16 bits)."""


def centred_for_variances(graph: Graph, fuses: Sequence[bool], devices: int = 1) -> Iterator[int]:
    """Differences from averages that are written for a variance, and read by the backward pass.

    Args:
        graph: of the step.
        fuses: per operation, whether it is computed element by element inside other kernels.
        devices: among which the batch is divided, the first dimension.
    """
    for op in graph.ops:
        if op.primitive == "sub" and op.phase == "forward" and not op.region and _has_average(graph, op):
            (difference,) = op.outputs
            if _read_backward(graph, difference, fuses) and _summed_up(graph, difference, devices):
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


def _summed_up(graph: Graph, tensor: int, devices: int) -> bool:
    """Whether squares of a tensor are summed up by a kernel of their own."""
    reached = [tensor]
    for t in reached:  # grows on the way
        for reader in graph.readers(t):
            if reader.primitive == "reduce_sum" and t != tensor and _apart(graph.tensors[t].shape, reader, devices):
                return True
            if reader.primitive in SQUARES and reader.phase == "forward" and reader.outputs[0] not in reached:
                reached.append(reader.outputs[0])
    return False


def _apart(shape: tuple[int, ...], reduction: Op, devices: int) -> bool:
    """Whether a reduction keeps the last dimension of more than one element, and adds up columns in one kernel."""
    summed = set(reduction.params["axes"])
    long = [d for d, n in enumerate(shape) if n > 1]
    if len(long) < 2 or long[-1] in summed:
        return False
    rows = math.prod(-(-shape[d] // devices) if d == 0 else shape[d] for d in long if d in summed)
    return (long[0] in summed or rows > FEW_PLACES) and rows <= ROWS

"""What XLA:GPU writes beside a reduction of it: an array that is also averaged over the places of an image.

What is computed of a convolution element by element (a ReLU, a normalisation with known averages) is computed anew by
each kernel that reads it. But one that sums it up over the places of each image (a squeeze-and-excitation block, a
group normalisation) has few threads where images and channels are few, so XLA writes the array with another kernel, and
everyone reads that. (Three such blocks of 64 channels on 8 H100s, 8 images each: 95 MB where 70 were predicted, 4
arrays of 8 MB.) Not where the array less its averages is written, in as many bits (:mod:`.costs.gpu.centred`):
that stands for it. An average in 32 bits reads what was rounded to 16 before it was, and that is written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from autoshard_ilp.costs.gpu.centred import FEW_PLACES
from autoshard_ilp.costs.precision import WIDE_BYTES
from autoshard_ilp.graph import Graph, Op

PLACES = 1024
"""Places of an image up to which a ReLU that is averaged is computed anew (1024 and 1600 were compiled) ..."""

MOST_PLACES = 4096
"""... and from which on they are added up in two steps, of which the first computes it (4096 and 6400)."""

SUMS = 1536
"""Images of a device times channels above which there are threads enough for the ReLU of a convolution (1536 and 2048
were compiled) ..."""

SUMS_OF_MORE = 2048
"""... and for what is dearer to compute: normalisations, leaky ReLUs (of 2048 0.7 to 1 of the arrays are written)."""

CONVOLUTION = "conv_general_dilated"
REDUCTIONS = frozenset({"reduce_sum", "reduce_max"})
SAME = ("hub", "convert_element_type")


def kept_beside_reductions(
    graph: Graph, centred: Collection[int], fuses: Sequence[bool], devices: int = 1
) -> Iterator[int]:
    """Arrays that are reduced over the places of each image, and written for those that read them as well.

    Args:
        graph: of the step.
        centred: arrays less their averages that are written.
        fuses: per operation, whether it is computed element by element inside other kernels.
        devices: among which the images of a batch are divided.
    """
    for reduction in graph.ops:
        if reduction.primitive not in REDUCTIONS:
            continue
        result = graph.behind(reduction.inputs[0], SAME)
        producer = graph.tensors[result].producer
        op = None if producer is None else graph.ops[producer]
        if op is None or op.phase != "forward" or op.region or not fuses[op.id] or _with_convolution(graph, op):
            continue
        others = [r for r in _readers(graph, result) if r.primitive not in REDUCTIONS]
        written = any(t in centred for r in others for t in r.outputs)
        if not others or (written and graph.tensors[result].itemsize >= WIDE_BYTES):
            continue
        cut = _cuts_off(graph, op)
        least = FEW_PLACES if written else PLACES if cut else PLACES - 1  # not where its squares are summed up as well
        if _over_places(graph, reduction, least, devices * (SUMS if cut else SUMS_OF_MORE)):
            yield result


def _cuts_off(graph: Graph, op: Op) -> bool:
    """Whether an operation is a ReLU of a convolution: the larger one of its result and a number."""
    if op.primitive != "max":
        return False
    return any(m.primitive == CONVOLUTION or _with_convolution(graph, m) for m in _makers(graph, op))


def _with_convolution(graph: Graph, op: Op) -> bool:
    """Whether cuDNN computes it with the convolution before it: a bias, or another array, is added to its result."""
    return op.primitive == "add" and any(m.primitive == CONVOLUTION for m in _makers(graph, op))


def _makers(graph: Graph, op: Op) -> Iterator[Op]:
    """What computes the operands."""
    made = (graph.tensors[graph.behind(t, ("hub",))].producer for t in op.inputs)
    return (graph.ops[m] for m in made if m is not None)


def _readers(graph: Graph, tensor: int) -> Iterator[Op]:
    """What reads an array, or casts of it."""
    for reader in graph.readers(tensor):
        if reader.primitive == "convert_element_type":
            yield from _readers(graph, reader.outputs[0])
        else:
            yield reader


def _over_places(graph: Graph, op: Op, least: int, sums: int) -> bool:
    """Whether a reduction is over more than so many places of each image, between its first and last dimension."""
    shape, axes = graph.tensors[op.inputs[0]].shape, op.params["axes"]
    if 0 in axes or len(shape) - 1 in axes:
        return False
    places = math.prod(shape[d] for d in axes)
    return least < places <= MOST_PLACES and math.prod(shape) <= sums * places

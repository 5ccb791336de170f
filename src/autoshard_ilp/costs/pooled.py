"""What XLA:GPU writes beside a reduction of it: a ReLU that is also averaged over the places of an image.

A ReLU is computed anew by each kernel that reads it, from what the convolution before it wrote. But one that sums it up
over the places of each image (a squeeze-and-excitation block, a group normalisation) reads all of it anyway, and writes
it as a second result for the others: convolution and ReLU are then both kept. (Three such blocks of 64 channels on 8
H100s: 95 MB where 70 were predicted, 4 arrays of 8 MB.) Not where the array less its averages is written, in as many
bits (:mod:`autoshard_ilp.costs.centred`): that stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from autoshard_ilp.costs.centred import ROWS
from autoshard_ilp.costs.precision import WIDE_BYTES
from autoshard_ilp.graph import Graph, Op

PLACES = 1024
"""Places of an image up to which a ReLU that is averaged is computed anew (1024 and 4096 were compiled) ..."""


def kept_beside_reductions(graph: Graph, centred: Collection[int]) -> Iterator[int]:
    """Results of ReLUs that a reduction over the places of each image writes for those that read them as well.

    Args:
        graph: of the step.
        centred: arrays less their averages that are written.
    """
    for op in graph.ops:
        if op.primitive != "max" or op.phase != "forward" or op.region:
            continue
        (result,) = op.outputs
        if all(graph.tensors[t].shape == graph.tensors[result].shape for t in op.inputs):
            continue  # of two arrays
        readers = list(_readers(graph, result))
        others = [r for r in readers if r.primitive != "reduce_sum"]
        written = any(t in centred for r in others for t in r.outputs)
        least = ROWS if written else PLACES  # ... but not where its squares are summed up as well
        reduced = any(_over_places(graph, r, least) for r in readers)
        if reduced and others and not (written and graph.tensors[result].itemsize >= WIDE_BYTES):
            yield result


def _readers(graph: Graph, tensor: int) -> Iterator[Op]:
    """What reads an array, or its cast."""
    for reader in graph.readers(tensor):
        if reader.primitive == "convert_element_type":
            yield from graph.readers(reader.outputs[0])
        else:
            yield reader


def _over_places(graph: Graph, op: Op, least: int) -> bool:
    """Whether an operation sums up more than so many places of each image, between its first and last dimension."""
    if op.primitive != "reduce_sum":
        return False
    shape, axes = graph.tensors[op.inputs[0]].shape, op.params["axes"]
    return 0 not in axes and len(shape) - 1 not in axes and math.prod(shape[d] for d in axes) > least

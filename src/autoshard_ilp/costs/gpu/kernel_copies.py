"""Copies of convolutions' kernels in the order that cuDNN reads them in.

cuDNN's kernels have the features of the result first, Keras's have them last. XLA:GPU copies a variable that is read as
it is, once for the convolution and for the gradient of its image, and holds the copy from the one to the other
(``f32[5,5,256,512]`` beside ``f32[512,5,5,256]``, for H100). What is gathered from other devices is copied each time it
is, and gone before the convolution is done. A cast, as in mixed precision, writes the order that is asked for, so
nothing is copied besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard_ilp.costs.kernels import is_kernel_gradient, products_instead
from autoshard_ilp.costs.primitives import VIEWS
from autoshard_ilp.graph import Graph, Op

BETWEEN = ("rev", *VIEWS)
"""What may lie between a variable's copy and a convolution: its gradient reads the kernel mirrored."""


@dataclass(frozen=True)
class KernelCopy:
    """What is held for one reader of a variable: a hub, or a convolution.

    Attributes:
        as_it_is: half-open span of time in which the copy of a variable that is read in its own layout is held; None
            where that is another reader's.
        gathered: times at which a copy of what was gathered is held.
    """

    as_it_is: tuple[int, int] | None
    gathered: tuple[int, ...]


def kernel_copies(graph: Graph, time: Sequence[int]) -> dict[tuple[int, int], KernelCopy]:
    """(op id, operand index) of who reads a variable that is a kernel -> what is held for that.

    Args:
        graph: of the step, hubs included.
        time: of each operation.
    """
    readers: dict[int, dict[tuple[int, int], list[int]]] = {}  # variable -> its reader -> times of convolutions
    for op in graph.ops:
        if _reads_copy(graph, op):
            place, t = (op.id, 1), op.inputs[1]
            while (producer := graph.tensors[t].producer) is not None and graph.ops[producer].primitive != "argument":
                made = graph.ops[producer]
                if made.primitive not in BETWEEN and made.primitive not in ("hub", "recompute"):
                    break
                place, t = (made.id, 0), made.inputs[0]
            if producer is not None and graph.ops[producer].primitive == "argument":
                readers.setdefault(t, {}).setdefault(place, []).append(int(time[op.id]))
    found: dict[tuple[int, int], KernelCopy] = {}
    for places in readers.values():
        ends = [t for times in places.values() for t in times]
        for n, (place, times) in enumerate(places.items()):
            found[place] = KernelCopy(None if n else (min(ends), max(ends) + 1), tuple(times))
    return found


def _reads_copy(graph: Graph, op: Op) -> bool:
    """Whether cuDNN computes a convolution with a kernel of more than one position: others are matrices."""
    if op.primitive != "conv_general_dilated" or op.region or is_kernel_gradient(graph, op):
        return False
    kernel = graph.tensors[op.inputs[1]].shape
    taps = math.prod(kernel[d] for d in op.params["dimension_numbers"].rhs_spec[2:])
    return taps > 1 and not products_instead(graph, op)

"""Elementwise results as the plan means them: computed on the part that a reader takes, not whole and cut for it.

What is computed inside the kernels that read it costs no memory, and a reader that takes a part of it reads just its
part of what lies behind: so a plan may keep such a result whole and cut it for one reader. XLA:TPU leaves the cut where
it is. It computes the result whole in a kernel of its own, and writes it: the 32-bit cast of what a normalisation
reads, where its statistics are computed by parts of the batch and its result is needed whole (for two Llama layers on
v5e 4x4 six arrays of 134 MB, 1.44 of the predicted peak). So what is cut is what lies behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.costs.primitives import LONG, RANDOM, VIEWS, fusible
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.rules.elementwise import SEVERAL_OPERANDS, UNARY
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, divides

PLATFORMS = frozenset({"tpu"})
"""Whose compilers leave the cut where it is."""

MIN_BYTES = 2**20
"""Smaller results may be written."""

_ELEMENTWISE = frozenset({*UNARY, *SEVERAL_OPERANDS}) - VIEWS - RANDOM - LONG


def computed_as_read(graph: Graph, platform: str) -> frozenset[int]:
    """Tensors that each reader may compute for itself, on the part that it takes.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices.
    """
    if platform not in PLATFORMS:
        return frozenset()
    stored = analyse(graph, platform).stored
    found: set[int] = set()
    for op in graph.ops:
        inside = op.inputs[0] in found if op.primitive == "hub" else _is_elementwise(graph, op)
        if inside and not stored[op.outputs[0]] and graph.tensors[op.outputs[0]].bytes >= MIN_BYTES:
            found.add(op.outputs[0])
    return frozenset(found)


def is_cut(before: Layout | None, after: Layout | None, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Whether every device's part in one layout is a part of what it holds in another."""
    if before is None or after is None or before == after or PARTIAL in before or PARTIAL in after:
        return False
    kept = all(b == a or a == WHOLE for a, b in zip(before, after, strict=True))
    return kept and divides(shape, after, axis_sizes) and divides(shape, before, axis_sizes)


def cut_for(result: Layout, shape: Sequence[int]) -> Layout:
    """The layout in which an operand is read for a result's: what has one element in a dimension is repeated there."""
    return tuple(WHOLE if dim >= 0 and (not shape or shape[dim] == 1) else dim for dim in result)


def _is_elementwise(graph: Graph, op: Op) -> bool:
    """Whether every element of an operation's one result is made of the operands' elements in the same place."""
    if op.primitive not in _ELEMENTWISE or not fusible(op) or op.eqn is None or len(op.outputs) != 1:
        return False
    rank = len(graph.tensors[op.outputs[0]].shape)
    return bool(op.inputs) and all(len(graph.tensors[t].shape) in (0, rank) for t in op.inputs)

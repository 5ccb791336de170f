"""Equal broadcasts that a plan lays out differently, and that must not become one.

A normalisation multiplies by one number per token in the forward pass, and again in the backward pass, where the plan
may shard the features of one and not of the other. Each device repeats its numbers for itself, so no collective is
planned. But the two broadcasts are equal: XLA:TPU merges them before it partitions the program, the one that is left
has one layout, and whoever wants another gathers what cost nothing to make. So these broadcasts are made device by
device, under ``shard_map`` (:func:`autoshard_ilp.manual.repeat`): of different shapes, they are nothing to merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autoshard_ilp.costs.fusion import VIEWS
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Graph, Op
from autoshard_ilp.rules.elementwise import SEVERAL_OPERANDS
from autoshard_ilp.sharding import PARTIAL, Layout

Dims = tuple[int, ...]

PLATFORMS = frozenset({"tpu"})
"""Whose compilers merge them. XLA:CPU and XLA:GPU make both."""


def unequal_broadcasts(
    graph: Graph, platform: str, layout_of: Callable[[int], Layout | None]
) -> dict[int, tuple[tuple[int, Dims], ...]]:
    """Per operation, the operands that it repeats for one layout while equal ones are repeated elsewhere for another.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices.
        layout_of: tensor -> its decided layout where it is produced.

    Returns:
        op id -> (operand index, the result's dimension for each of the operand's) of each.
    """
    if platform not in PLATFORMS:
        return {}
    uses: dict[tuple[object, ...], dict[Layout, list[tuple[int, int, Dims]]]] = {}
    for op in graph.ops:
        layout = layout_of(op.outputs[0]) if len(op.outputs) == 1 else None
        if layout is None or PARTIAL in layout:
            continue
        shape = graph.tensors[op.outputs[0]].shape
        for i, dims in _repeats(graph, op):
            t = op.inputs[i]
            key = (graph.behind(t, VIEWS), graph.tensors[t].shape, dims, shape)
            uses.setdefault(key, {}).setdefault(layout, []).append((op.id, i, dims))
    found: dict[int, tuple[tuple[int, Dims], ...]] = {}
    for by_layout in uses.values():
        if len(by_layout) > 1:
            for op_id, i, dims in (use for at in by_layout.values() for use in at):
                found[op_id] = (*found.get(op_id, ()), (i, dims))
    return found


def _repeats(graph: Graph, op: Op) -> Iterator[tuple[int, Dims]]:
    """Operands of an operation that are repeated to its result's shape, with the result's dimension for each of theirs.

    Scalars are not among them: XLA makes those anew in whatever layout is wanted. Neither are small results.
    """
    result = graph.tensors[op.outputs[0]]
    if math.prod(result.shape) < MIN_HUB_ELEMENTS or op.eqn is None:
        return
    for i, t in enumerate(op.inputs):
        shape = graph.tensors[t].shape
        if op.primitive == "broadcast_in_dim":
            dims = tuple(op.params["broadcast_dimensions"])
        elif op.primitive in SEVERAL_OPERANDS and len(shape) == len(result.shape):
            dims = tuple(range(len(shape)))
        else:
            continue
        if shape and shape != result.shape and graph.tensors[t].literal is None:
            yield i, dims

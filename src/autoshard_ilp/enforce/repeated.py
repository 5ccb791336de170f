"""Broadcasts as the plan means them: made on every device, in the layout in which they are read.

A plan may keep a broadcast whole and cut it for its reader, since neither costs anything. XLA makes one of the two
where the cut divides. Where it does not (half of a vocabulary of 50257) it writes the broadcast, whole: so what all
readers cut is made as they read it (:func:`made_as_read`).

A normalisation multiplies by one number per token in the forward pass, and again in the backward pass, where the plan
may shard the features of one and not of the other. Each device repeats its numbers for itself, so no collective is
planned. But the two broadcasts are equal: XLA:TPU merges them before it partitions the program, the one that is left
has one layout, and whoever wants another gathers what cost nothing to make. So these broadcasts are made device by
device, under ``shard_map`` (:func:`.enforce.manual.repeat`): of different shapes, they are nothing to merge.
Layers that compute the same from the same (masks, rotary embeddings) do so in equal operations, which XLA merges too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from autoshard_ilp.costs.alike import computed_alike
from autoshard_ilp.costs.primitives import VIEWS
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Graph, Op
from autoshard_ilp.rules.elementwise import SEVERAL_OPERANDS
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, before_broadcast

Dims = tuple[int, ...]

Places = Mapping[tuple[int, int], Layout]
"""(op id, operand or result index) -> layout."""

PASSED_ON = ("hub", "loop_invariant")
"""What hands a broadcast on to its readers, into a loop too: the mask of all layers of a scanned transformer."""

PLATFORMS = frozenset({"tpu"})
"""Whose compilers merge them. XLA:CPU and XLA:GPU make both."""


def made_as_read(graph: Graph, operands: Places, results: Places) -> tuple[Places, Places]:
    """Decided layouts with every broadcast in the layout to which all its readers cut it, where they agree.

    Args:
        graph: of the step, hubs included.
        operands, results: the decided layouts.

    Returns:
        Layouts of operands and results.
    """
    operands, results = dict(operands), dict(results)
    for op in reversed(graph.ops):
        now = results.get((op.id, 0))
        if now is None or not _is_broadcast(graph, op):
            continue
        read = {operands.get((reader, i), now) for reader, i in graph.tensors[op.outputs[0]].consumers}
        wanted = read.pop() if len(read) == 1 else now
        if wanted != now and all(b == a or (a == WHOLE and b >= 0) for a, b in zip(now, wanted, strict=True)):
            results[op.id, 0] = wanted
            behind = graph.tensors[op.inputs[0]].producer
            if op.primitive in PASSED_ON:
                operands[op.id, 0] = wanted
            elif behind is not None and _is_broadcast(graph, graph.ops[behind]):
                before, after = (graph.tensors[t].shape for t in (op.inputs[0], op.outputs[0]))
                operands[op.id, 0] = before_broadcast(wanted, op.params["broadcast_dimensions"], before, after)
    return operands, results


def _is_broadcast(graph: Graph, op: Op) -> bool:
    """Whether an operation is a broadcast, or passes one on."""
    passed = op.primitive in PASSED_ON
    producer = graph.tensors[graph.behind(op.outputs[0], PASSED_ON)].producer if passed else op.id
    return producer is not None and graph.ops[producer].primitive == "broadcast_in_dim"


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
    same = computed_alike(graph)
    uses: dict[tuple[object, ...], dict[Layout, list[tuple[int, int, Dims]]]] = {}
    for op in graph.ops:
        layout = layout_of(op.outputs[0]) if len(op.outputs) == 1 else None
        if layout is None or PARTIAL in layout:
            continue
        shape = graph.tensors[op.outputs[0]].shape
        for i, dims in _repeats(graph, op):
            t = op.inputs[i]
            key = (same[graph.behind(t, VIEWS)], graph.tensors[t].shape, dims, shape)
            uses.setdefault(key, {}).setdefault(layout, []).append((op.id, i, dims))
    found: dict[int, tuple[tuple[int, Dims], ...]] = {}
    for by_layout in uses.values():
        if len(by_layout) > 1:
            for op_id, i, dims in (use for at in by_layout.values() for use in at):
                found[op_id] = (*found.get(op_id, ()), (i, dims))
    return found


def _repeats(graph: Graph, op: Op) -> Iterator[tuple[int, Dims]]:
    """Operands of an operation that are repeated to its result's shape, with the result's dimension for each of theirs.

    Scalars that an operation reads beside others are not among them: XLA makes those anew in whatever layout is wanted.
    Neither are small results.
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
        alone = op.primitive == "broadcast_in_dim"
        if shape != result.shape and (alone or (shape and graph.tensors[t].literal is None)):
            yield i, dims

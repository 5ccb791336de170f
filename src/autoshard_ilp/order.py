"""Weight gradients in their place: computed when the backward pass reaches them, not behind it.

Nothing in the backward pass waits for the gradient of a weight, so a scheduler may put it off: XLA:GPU's computes many
of them last, and holds both operands of every one of them, an activation and a cotangent, until then. The plan counts
program order. So what the backward pass computes elementwise next waits for the gradients before it, by a data
dependency that costs nothing (:mod:`autoshard_ilp.ties`): one device's own product is looked at before it is reduced
over devices, so that no collective is waited for. But where unreduced gradients are large and their shards small, it is
the shard that is waited for: else the scheduler would put off the reduce-scatter, and hold all that it is to add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard_ilp.costs.combining import only_updates_read
from autoshard_ilp.costs.memory import PRODUCTS, VIEWS, fusible
from autoshard_ilp.graph import PSEUDO_OPERATIONS, Graph, Op
from autoshard_ilp.ties import MIN_COPY_BYTES, may_anchor

PLATFORMS = frozenset({"gpu"})
"""Where gradients are put in their place. XLA:TPU's scheduler keeps to its memory limit by itself."""


@dataclass(frozen=True)
class Order:
    """What waits for what.

    Attributes:
        gradients: ids of products that make a weight's gradient, and that something waits for.
        waits: (op id, operand index) -> ids of the gradients that are to be computed before that operand is read.
    """

    gradients: frozenset[int] = frozenset()
    waits: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


def order_of(graph: Graph, platform: str) -> Order:
    """The order in which a step's weight gradients are computed.

    Args:
        graph: of the step, hubs included. Gradients inside loops are left alone: an iteration ends with them.
        platform: of the mesh's devices; nothing waits where their compiler needs no help (:data:`PLATFORMS`).
    """
    if platform not in PLATFORMS:
        return Order()
    only = only_updates_read(graph)
    cotangent = [False] * len(graph.tensors)
    pending: list[int] = []
    waits: dict[tuple[int, int], tuple[int, ...]] = {}
    for op in graph.ops:
        if op.phase != "backward" or op.region:
            continue
        for t in op.outputs:
            cotangent[t] = op.primitive in PRODUCTS or any(cotangent[i] for i in op.inputs)
        if op.params.get("recomputed"):
            continue
        if op.primitive in PRODUCTS:
            large = max((graph.tensors[t].bytes for t in op.inputs), default=0) >= MIN_COPY_BYTES
            if large and only[op.outputs[0]] and may_anchor(graph, op.outputs[0]):
                pending.append(op.id)
        elif pending and (at := _carries(graph, op, only, cotangent)) is not None:
            waits[op.id, at] = tuple(pending)
            pending = []
    return Order(frozenset(g for waited in waits.values() for g in waited), waits)


def _carries(graph: Graph, op: Op, only: list[bool], cotangent: list[bool]) -> int | None:
    """Which operand of an elementwise operation brings the backward pass further; None where none does."""
    if op.primitive in VIEWS or op.primitive in PSEUDO_OPERATIONS or not fusible(op) or not op.outputs:
        return None
    if only[op.outputs[0]] or op.eqn is None:
        return None
    for i, t in enumerate(op.inputs):
        if cotangent[t] and may_anchor(graph, t) and graph.tensors[t].bytes >= MIN_COPY_BYTES:
            return i
    return None

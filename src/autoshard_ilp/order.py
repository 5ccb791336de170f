"""Weight gradients in their place: computed when the backward pass reaches them, not behind it.

Nothing in the backward pass waits for the gradient of a weight, so a scheduler may put it off: XLA:GPU's computes many
of them last, and holds both operands of every one of them, an activation and a cotangent, until then; it does so with
one of two branches, too. The plan counts program order. So what the backward pass computes
elementwise next waits for the products before it that it does not depend on, by a data
dependency that costs nothing (:mod:`autoshard_ilp.ties`): one device's own product is looked at before it is reduced
over devices, so that no collective is waited for. But where unreduced gradients are large and their shards small, it is
the shard that is waited for: else the scheduler would put off the reduce-scatter, and hold all that it is to add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard_ilp.costs.combining import only_updates_read
from autoshard_ilp.costs.fusion import PRODUCTS, VIEWS, fusible
from autoshard_ilp.graph import PSEUDO_OPERATIONS, Graph, Op
from autoshard_ilp.ties import MIN_COPY_BYTES, may_anchor

PLATFORMS = frozenset({"gpu"})
"""Where gradients are put in their place. XLA:TPU's scheduler keeps to its memory limit by itself."""


@dataclass(frozen=True)
class Order:
    """What waits for what.

    Attributes:
        gradients: ids of the operations that something waits for.
        waits: (op id, operand index) -> ids of the operations that are to be computed before that operand is read.
    """

    gradients: frozenset[int] = frozenset()
    waits: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


def order_of(graph: Graph, platform: str) -> Order:
    """The order in which a step's backward pass is computed.

    Args:
        graph: of the step, hubs included. What is inside loops is left alone: an iteration ends with it.
        platform: of the mesh's devices; nothing waits where their compiler needs no help (:data:`PLATFORMS`).
    """
    if platform not in PLATFORMS:
        return Order()
    only = only_updates_read(graph)
    cotangent = [False] * len(graph.tensors)
    behind = [0] * len(graph.tensors)  # bit i: depends on the i-th operation that something may wait for
    bits: dict[int, int] = {}
    pending: list[int] = []
    waits: dict[tuple[int, int], tuple[int, ...]] = {}
    for op in graph.ops:
        mine = 0
        for t in op.inputs:
            mine |= behind[t]
        if _may_be_put_off(graph, op):
            bits[op.id] = 1 << len(bits)
            mine |= bits[op.id]
            pending.append(op.id)
        backward = op.phase == "backward" and not op.region
        for t in op.outputs:
            behind[t] = mine
            cotangent[t] = backward and (op.primitive in PRODUCTS or any(cotangent[i] for i in op.inputs))
        if backward and pending and not op.params.get("recomputed"):
            at = _carries(graph, op, only, cotangent)
            if at is not None:
                left = tuple(p for p in pending if not mine & bits[p])
                pending = []
                if left:
                    waits[op.id, at] = left
    return Order(frozenset(p for left in waits.values() for p in left), waits)


def _may_be_put_off(graph: Graph, op: Op) -> bool:
    """Whether a scheduler may compute something late that holds large operands: products of the backward pass."""
    if op.region or not op.outputs or op.eqn is None or op.params.get("recomputed"):
        return False
    large = max((graph.tensors[t].bytes for t in op.inputs), default=0) >= MIN_COPY_BYTES
    product = op.phase == "backward" and op.primitive in PRODUCTS
    return product and large and may_anchor(graph, op.outputs[0])


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

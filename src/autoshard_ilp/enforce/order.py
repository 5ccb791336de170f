"""Weight gradients in their place: computed when the backward pass reaches them, not behind it.

Nothing in the backward pass waits for the gradient of a weight, so a scheduler may put it off: XLA:GPU's computes many
of them last, and holds both operands of every one of them, an activation and a cotangent, until then; it does so with
one of two branches, too. The plan counts program order. So what the backward pass computes
elementwise next waits for the products before it that it does not depend on, by a data
dependency that costs nothing (:mod:`.enforce.ties`): one device's own product is looked at before it is reduced
over devices, so that no collective is waited for. But where unreduced gradients are large and their shards small, it is
the shard that is waited for: else the scheduler would put off the reduce-scatter, and hold all that it is to add up.
XLA:TPU puts them off as well (two OPT layers on v5e: 200 of 1130 MB of temporaries); there it is always the shard.

Nor does anything wait for the gradients of biases and scales, which are sums. XLA:TPU computes them at the end of the
step, and holds what they sum up until then: cotangents, also gathered ones; for the layer that makes the logits these
themselves, since their gradient is never written (a language model of two layers: 67 of 224 MB of HBM at the peak). So
the backward pass waits for such sums, as each device has them; for those over the gradient of the logits its first
product does. XLA:GPU puts sums off, too, and adds several of them up in one kernel, which is quicker (BERT's step on
one H100 took 91.0 ms with, and 89.8 without waiting); so only those are waited for there that the memory has no room
to put off (:mod:`.enforce.latesums`). Compiled for 8 H100s under tight budgets: two layers of DeBERTa 173 -> 161
MB, of XLNet 126 -> 119.

XLA:GPU computes the value of a loss last, and holds the logits until then. So what the backward pass begins with, the
cotangent of each token's loss, waits for it (two transformer layers with a tied table of 8000 on 8 H100s, under a tight
budget: 187 -> 176 MB).

Nothing waits for a metric either. XLA:TPU computes the accuracy of a language model at the end of the step, and holds
the logits and the masks of its ``argmax`` until then. So the backward pass waits for the metrics that reduce large
arrays of the forward pass: what its first product reads is not known before they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from autoshard_ilp.costs.gpu.combining import only_updates_read
from autoshard_ilp.costs.primitives import PRODUCTS, REDUCTIONS, SAME_VALUES, VIEWS, fusible
from autoshard_ilp.enforce.ties import MIN_COPY_BYTES, may_anchor
from autoshard_ilp.graph import PSEUDO_OPERATIONS, Graph, Op, Region

PLATFORMS = frozenset({"gpu", "tpu"})
"""Where gradients are put in their place."""

SCATTERED_ONLY = frozenset({"tpu"})
"""Where only gradients that are reduced over devices are waited for, and only after that, and those for which larger
copies are gathered than they are themselves. XLA:TPU computes a product and its reduce-scatter in one kernel, and a
product and the update that reads it: a look at the product would part them, and its result would be written (two Llama
layers take 8 % more memory so). There the update is waited for (:mod:`.enforce.finished`). A product that is cast
and held so (``added_up_wide``) is looked at as it is held: else it would be written twice."""

SUMS_TOO = frozenset({"tpu"})
"""Where the backward pass waits for the gradients of biases and scales, whatever the budget."""

METRICS_FIRST = frozenset({"tpu"})
"""Where the backward pass waits for metrics, and for sums over the gradient that it begins with."""

LOSSES_FIRST = frozenset({"gpu"})
"""Where the backward pass waits for the values of losses. They stand behind a barrier: else the kernel of the logits'
gradient would compute them anew for the look at them, and once more at the end."""


@dataclass(frozen=True)
class Order:
    """What waits for what.

    Attributes:
        gradients: ids of the operations that something waits for, metrics included.
        waits: (op id, operand index) -> ids of the operations that are to be computed before that operand is read.
        early: op id -> ids of later operations, in order, that run before it.
        sums: those of the operations waited for that are sums over gradients: of biases and the like.
    """

    gradients: frozenset[int] = frozenset()
    waits: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    early: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sums: frozenset[int] = frozenset()

    def of(self, items: Iterable[Op | Region]) -> list[Op | Region]:
        """What one region runs, in this order."""
        items = list(items)
        by_id = {item.id: item for item in items if isinstance(item, Op)}
        moved = {i for before in self.early.values() for i in before}
        found: list[Op | Region] = []
        for item in items:
            if isinstance(item, Op):
                if item.id in moved:
                    continue
                found += [by_id.pop(i) for i in self.early.get(item.id, ()) if i in by_id]  # the first that needs it
            found.append(item)
        return found


def order_of(graph: Graph, platform: str, late_sums: Collection[int] = ()) -> Order:
    """The order in which a step's backward pass is computed.

    Args:
        graph: of the step, hubs included. What is inside loops is left alone: an iteration ends with it.
        platform: of the mesh's devices; nothing waits where their compiler needs no help (:data:`PLATFORMS`).
        late_sums: ids of sums (of :func:`sums_put_off`) to be waited for where sums need not be.
    """
    first = _metrics_first(graph) if platform in METRICS_FIRST else Order()
    if platform not in PLATFORMS:
        return first
    only = only_updates_read(graph)
    sums = _sums_first(graph, only) if platform in METRICS_FIRST else {}
    all_sums = {s for before in sums.values() for s in before}
    cotangent = [False] * len(graph.tensors)
    behind = [0] * len(graph.tensors)  # bit i: depends on the i-th operation that something may wait for
    bits: dict[int, int] = {}
    pending: list[int] = []
    waits: dict[tuple[int, int], tuple[int, ...]] = {}
    for op in graph.ops:
        mine = 0
        for t in op.inputs:
            mine |= behind[t]
        awaited = platform in SUMS_TOO or op.id in late_sums
        later_sum = awaited and op.id not in all_sums and _is_late_sum(graph, op, only)
        if later_sum:
            all_sums.add(op.id)
        if later_sum or _may_be_put_off(graph, op):
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
    losses = _losses_first(graph) if platform in LOSSES_FIRST else {}
    for place, before in (*losses.items(), *sums.items(), *first.waits.items()):
        waits[place] = (*before, *waits.get(place, ()))
    looked_at = frozenset(p for left in waits.values() for p in left)
    return Order(looked_at, waits, first.early, frozenset(all_sums) & looked_at)


def sums_put_off(graph: Graph) -> Iterator[Op]:
    """Sums over large arrays that a scheduler may compute after the backward pass: gradients of biases and scales."""
    only = only_updates_read(graph)
    return (op for op in graph.ops if _is_late_sum(graph, op, only))


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


def _metrics_first(graph: Graph) -> Order:
    """The first product of the backward pass waits for metrics: reductions of large arrays that only updates read."""
    carrier = _before_backward_products(graph)
    if carrier is None:
        return Order()
    op, operand = carrier
    metrics: list[int] = []
    early: set[int] = set()
    for metric in graph.ops:
        large = max((graph.tensors[t].bytes for t in metric.inputs), default=0) >= MIN_COPY_BYTES
        if metric.phase != "update" or not metric.primitive.startswith(REDUCTIONS) or not large:
            continue
        needed = _needed_after(graph, metric, op)
        if needed is not None and graph.tensors[metric.outputs[0]].shape:
            metrics.append(metric.id)
            early |= needed
    if not metrics:
        return Order()
    return Order(frozenset(metrics), {(op.id, operand): tuple(metrics)}, {op.id: tuple(sorted(early))})


def _losses_first(graph: Graph) -> dict[tuple[int, int], tuple[int, ...]]:
    """Operand of the backward pass -> reductions of the forward pass, computed before it, that it does not need.

    The operand is the cotangent that it reads together with what the reduction is computed from, before that is
    broadcast.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    if not any(op.phase == "backward" for op in graph.ops):
        return found
    needed = _needed_by_backward(graph)
    for op in graph.ops:
        if op.phase != "forward" or op.region or not op.primitive.startswith(REDUCTIONS) or op.eqn is None:
            continue
        large = max((graph.tensors[t].bytes for t in op.inputs), default=0) >= MIN_COPY_BYTES
        if not large or needed[op.outputs[0]] or not may_anchor(graph, op.outputs[0]):
            continue
        place = _first_cotangent(graph, _computed_from(graph, op))
        if place is not None:
            found[place] = (*found.get(place, ()), op.id)
    return found


def _needed_by_backward(graph: Graph) -> list[bool]:
    """Per tensor, whether the backward pass computes something from it."""
    needed = [False] * len(graph.tensors)
    for op in reversed(graph.ops):
        if op.phase == "backward" or any(needed[t] for t in op.outputs):
            for t in op.inputs:
                needed[t] = True
    return needed


def _computed_from(graph: Graph, op: Op) -> frozenset[int]:
    """Tensors that an operation is computed from elementwise or by reductions, from products or look-ups on."""
    reached = list(op.inputs)
    seen = set(reached)
    for t in reached:  # grows on the way
        producer = graph.tensors[t].producer
        made = None if producer is None else graph.ops[producer]
        if made is not None and (fusible(made) or made.primitive.startswith(REDUCTIONS)):
            new = [i for i in made.inputs if i not in seen]
            seen.update(new)
            reached += new
    return frozenset(seen)


def _first_cotangent(graph: Graph, values: frozenset[int]) -> tuple[int, int] | None:
    """Where the backward pass first reads a cotangent together with one of ``values``, or what is computed from them
    element by element (twice a difference, for the gradient of its square); None where it does not."""
    known = set(values)
    for op in graph.ops:
        if op.phase != "backward" or op.region or op.eqn is None or op.params.get("recomputed"):
            if op.phase == "forward" and fusible(op) and any(t in known for t in op.inputs):
                known.update(op.outputs)
            continue
        if not any(graph.behind(t, VIEWS) in known for t in op.inputs):
            continue
        for i, t in enumerate(op.inputs):
            producer = graph.tensors[t].producer
            made = None if producer is None else graph.ops[producer]
            if made is not None and made.phase == "backward" and made.primitive not in PSEUDO_OPERATIONS:
                return _before_broadcast(graph, op, i)
    return None


def _before_broadcast(graph: Graph, op: Op, operand: int) -> tuple[int, int]:
    """The operand itself or, where that is broadcast, what is."""
    while True:
        producer = graph.tensors[op.inputs[operand]].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or made.phase != "backward" or made.eqn is None or made.region:
            return op.id, operand
        if made.primitive not in ("broadcast_in_dim", *VIEWS) or not made.inputs:
            return op.id, operand
        op, operand = made, 0


def _sums_first(graph: Graph, only: list[bool]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Operand of the first product of the backward pass -> sums over it that only updates read, computed before it."""
    product = _first_backward_product(graph)
    if product is None:
        return {}
    for i, t in enumerate(product.inputs):
        source = graph.behind(t, SAME_VALUES)
        producer = graph.tensors[source].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or made.phase != "backward" or made.region or not fusible(made) or not may_anchor(graph, t):
            continue
        sums = [
            op.id
            for op in graph.ops[made.id : product.id]
            if _sums_up(graph, op, only) and graph.behind(op.inputs[0], SAME_VALUES) == source
        ]
        return {(product.id, i): tuple(sums)} if sums else {}
    return {}


def _is_late_sum(graph: Graph, op: Op, only: list[bool]) -> bool:
    """Whether an operation of the backward pass itself is such a sum as a scheduler may put off."""
    here = op.phase == "backward" and not op.region and not op.params.get("recomputed")
    return here and _sums_up(graph, op, only)


def _sums_up(graph: Graph, op: Op, only: list[bool]) -> bool:
    """Whether an operation sums a large array up, and nothing but updates reads the sum, maybe summed up further."""
    if op.primitive != "reduce_sum" or op.region:
        return False
    tensor = op.outputs[0]
    while not only[tensor]:
        readers = graph.tensors[tensor].consumers
        reader = graph.ops[readers[0][0]] if len(readers) == 1 else None
        if reader is None or reader.primitive not in (*SAME_VALUES, "reduce_sum"):
            return False
        tensor = reader.outputs[0]
    large = graph.tensors[op.inputs[0]].bytes >= MIN_COPY_BYTES
    return large and op.eqn is not None and may_anchor(graph, op.outputs[0])


def _first_backward_product(graph: Graph) -> Op | None:
    """The first product of the backward pass itself, outside of loops."""
    for op in graph.ops:
        if op.phase == "backward" and op.primitive in PRODUCTS and not op.region and not op.params.get("recomputed"):
            return op
    return None


def _before_backward_products(graph: Graph) -> tuple[Op, int] | None:
    """What is computed elementwise for the first product of the backward pass, and which operand brings it there."""
    product = _first_backward_product(graph)
    for t in () if product is None else product.inputs:
        producer = graph.tensors[graph.behind(t, VIEWS)].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or made.phase != "backward" or made.region or not fusible(made) or made.eqn is None:
            continue
        for i, read in enumerate(made.inputs):
            if may_anchor(graph, read) and graph.tensors[read].bytes >= MIN_COPY_BYTES:
                return made, i
    return None


def _needed_after(graph: Graph, metric: Op, op: Op) -> frozenset[int] | None:
    """Operations after ``op`` that a metric needs, itself included; None where it cannot be computed before."""
    needed, reached = {metric.id}, [metric]
    for one in reached:  # grows on the way
        if one.region or one.phase == "backward" or (one.eqn is None and one.primitive not in (*VIEWS, "constant")):
            return None
        for t in one.inputs:
            producer = graph.tensors[t].producer
            if producer is not None and producer >= op.id and producer not in needed:
                needed.add(producer)
                reached.append(graph.ops[producer])
    return frozenset(needed)

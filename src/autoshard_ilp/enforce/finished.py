"""Updates in their place: a gradient that no device shares is used up where it is computed.

XLA:TPU computes a product and the update that reads it in one kernel, where no collective comes between, and puts both
off to the end of the step: nothing in the backward pass waits for them. Until then it holds what the product reads; for
the weight that makes the logits that is the logits themselves, from which their gradient is computed again (two Llama
layers under a tight budget on v5p: 330 of 860 MB of temporaries). A look at the product would part it from its
update, and write it. So what the backward pass computes next waits for the variable's new value: it is written anyway,
in place of the old one (:mod:`autoshard_ilp.enforce.inplace`), and looking at it parts nothing.

XLA:GPU computes updates by kernels of their own, but puts off some of these as well, and holds their gradients (for
layers of width 2048, 8.4 of 126 MB on 8 H100s).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autoshard_ilp.costs.primitives import SAME_VALUES, VIEWS, fusible
from autoshard_ilp.enforce.inplace import Wait, product_behind
from autoshard_ilp.enforce.order import Order
from autoshard_ilp.enforce.ties import may_anchor
from autoshard_ilp.graph import Graph, Op

PLATFORMS = frozenset({"tpu", "gpu"})
"""Where updates are waited for."""


def updates_waited_for(
    graph: Graph,
    order: Order,
    updates: Mapping[tuple[int, int], Wait],
    platform: str,
    unshared: Callable[[Op], bool],
) -> Order:
    """An order in which updates, not products, are waited for, where devices share nothing of the gradient.

    Args:
        graph: of the step, hubs included.
        order: of its backward pass, products waited for.
        updates: what updates wait for themselves (:func:`autoshard_ilp.enforce.inplace.waiting_updates`).
        platform: of the mesh's devices.
        unshared: whether a product's result needs no collective in the layouts decided.
    """
    if platform not in PLATFORMS:
        return order
    new_values = _new_values(graph)
    last_readers: dict[int, int] = {}
    for (op, _), wait in updates.items():
        last_readers[op] = max(wait.reader, last_readers.get(op, 0))
    waits, early = dict(order.waits), dict(order.early)
    for (reader, operand), before in order.waits.items():
        found: list[int] = []
        for product in before:
            update = new_values.get(product)
            needed = None if update is None or not unshared(graph.ops[product]) else _needed(graph, update, reader)
            if update is None or needed is None or any(last_readers.get(n, 0) >= reader for n in needed):
                found.append(product)
                continue
            found.append(update)
            early[reader] = tuple(sorted({*early.get(reader, ()), *needed}))
        waits[reader, operand] = tuple(found)
    gradients = frozenset(p for before in waits.values() for p in before)
    return replace(order, gradients=gradients, waits=waits, early=early)


def _new_values(graph: Graph) -> dict[int, int]:
    """Product of the backward pass -> the operation that makes a variable's new value of its result, element by
    element, and of no other product's."""
    products: list[frozenset[int] | None] = [frozenset()] * len(graph.tensors)  # None: not element by element
    for op in graph.ops:
        if op.phase != "update":
            continue
        mine: set[int] | None = set() if not op.region else None
        for t in op.inputs:
            product = product_behind(graph, t)
            behind = products[t] if product is None else frozenset({product})
            mine = None if mine is None or behind is None else mine | behind
        if mine and not (op.primitive in VIEWS or op.primitive == "hub" or fusible(op)):
            mine = None
        for t in op.outputs:
            products[t] = None if mine is None else frozenset(mine)
    found: dict[int, int] = {}
    for result, _ in graph.aliases:
        tensor = graph.behind(graph.ops[result].inputs[0], ("hub", "copy"))
        made_of, producer = products[tensor], graph.tensors[tensor].producer
        if made_of is None or len(made_of) != 1 or producer is None or not may_anchor(graph, tensor):
            continue
        (product,) = made_of
        found[product] = max(producer, found.get(product, 0))
    return found


def _needed(graph: Graph, update: int, reader: int) -> frozenset[int] | None:
    """Operations from ``reader`` on that an update needs, itself included; None where they are not all updates."""
    needed, reached = {update}, [graph.ops[update]]
    for one in reached:  # grows on the way
        moves = one.primitive in SAME_VALUES
        if one.region or (one.phase == "backward" and not moves) or (one.eqn is None and not moves):
            return None
        for t in one.inputs:
            producer = graph.tensors[t].producer
            if producer is not None and producer >= reader and producer not in needed:
                needed.add(producer)
                reached.append(graph.ops[producer])
    return frozenset(needed)

"""New values of variables in place of the old ones: an update waits for whoever reads the old value last.

A donated variable's new value takes the place of the old one if the old one has been read by then. Nothing tells a
compiler so: the weight's gradient is known before, or beside, the product of the backward pass that reads the weight
once more. XLA:TPU computes a product and the update that reads it in one kernel, where no collective comes between; it
runs that first, and writes the new value somewhere else, to copy it later (for Llama's table of logits, 263 MB). So
what an update reads of such a gradient waits for the weight's other product, by a data dependency
(:mod:`autoshard_ilp.enforce.ties`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard_ilp.costs.gpu.combining import known_from_the_start, only_updates_read
from autoshard_ilp.costs.primitives import PRODUCTS, VIEWS
from autoshard_ilp.enforce.ties import MIN_COPY_BYTES, may_anchor
from autoshard_ilp.graph import Graph

PLATFORMS = frozenset({"tpu"})
"""Where updates wait. Other compilers were not seen to need it."""


@dataclass(frozen=True)
class Wait:
    """What an update waits for.

    Attributes:
        reader: id of the last product that reads the variable.
        product: id of the one whose result is the variable's gradient.
    """

    reader: int
    product: int


def waiting_updates(graph: Graph, platform: str) -> dict[tuple[int, int], Wait]:
    """(op id, operand index) of what updates read of a gradient -> what comes before.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices.
    """
    if platform not in PLATFORMS:
        return {}
    readers = _last_readers(graph)
    found: dict[tuple[int, int], Wait] = {}
    gradients: list[frozenset[int]] = [frozenset()] * len(graph.tensors)  # products that updates have used
    reads: dict[int, list[tuple[int, int]]] = {}  # product -> who reads its result
    for op in graph.ops:
        if op.phase != "update" or op.region or op.eqn is None:
            continue
        mine: set[int] = set()
        for i, t in enumerate(op.inputs):
            product = product_behind(graph, t)
            if product is not None:
                reads.setdefault(product, []).append((op.id, i))
                mine.add(product)
            mine |= gradients[t]
        for t in op.outputs:
            gradients[t] = frozenset(mine)
    for result, argument in graph.aliases:
        reader = readers.get(graph.ops[argument].outputs[0])
        for product in gradients[graph.ops[result].inputs[0]] if reader is not None else ():
            if reader is not None and reader != product:
                found |= dict.fromkeys(reads.get(product, ()), Wait(reader, product))
    return found


def _last_readers(graph: Graph) -> dict[int, int]:
    """Argument's tensor -> the last product of the backward pass that reads it, cast or moved, for a cotangent."""
    known, only = known_from_the_start(graph), only_updates_read(graph)
    source: list[int | None] = [None] * len(graph.tensors)
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive == "argument":
            source[op.outputs[0]] = op.outputs[0]
        elif op.primitive in (*VIEWS, "convert_element_type") and op.inputs and known[op.inputs[0]]:
            source[op.outputs[0]] = source[op.inputs[0]]
        elif op.primitive in PRODUCTS and op.phase == "backward" and not op.region and not only[op.outputs[0]]:
            for t in op.inputs:
                variable = source[t]
                large = variable is not None and graph.tensors[variable].bytes >= MIN_COPY_BYTES
                if variable is not None and large and may_anchor(graph, op.outputs[0]):
                    found[variable] = op.id
    return found


def product_behind(graph: Graph, tensor: int) -> int | None:
    """The product of the backward pass whose result a tensor is, cast or moved at most."""
    producer = graph.tensors[graph.behind(tensor, (*VIEWS, "convert_element_type"))].producer
    made = None if producer is None else graph.ops[producer]
    return made.id if made is not None and made.primitive in PRODUCTS and made.phase == "backward" else None

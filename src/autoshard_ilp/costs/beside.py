"""What is held while one of two products is computed beside the other, or beside a collective for it.

A layer's backward pass has two products of one cotangent: the gradient of its weight, which the program names first,
and the cotangent of its input. XLA:GPU (its latency-hiding scheduler) computes one while what the other is reduced over
devices:

- Where the weight's columns are on several devices, the cotangent is to be reduced, and the backward pass waits for it.
  So it comes first, and the gradient beside its reduction. At that instant the layer's input is there, which the
  gradient reads, and the cotangent both unreduced and reduced. (``Dense(8192)`` twice behind ``Dropout``, a batch of
  4096, on 8 H100s: 346 MB, 312 without what is counted here.)
- Where the batch is on several devices, the gradient is to be reduced, and comes first, and the cotangent beside its
  reduction: the unreduced gradient is still there then. The cotangent's own reduction begins when the other has ended.

Either way the variable's new value is computed when both products are.

XLA:TPU computes the cotangent first, too, where the gradient and the update are one kernel. What is gathered for the
gradient is held meanwhile (:attr:`autoshard_ilp.costs.buffers.Buffers.beside`; two layers of OPT on v5e 2x4 under a
budget: 1.26 of the predicted peak without).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.gpu.combining import only_updates_read
from autoshard_ilp.graph import Graph, Op, once_per_graph
from autoshard_ilp.sharding import Layout, local_bytes, local_shape
from autoshard_ilp.strategies import Strategy


@dataclass(frozen=True)
class Beside:
    """The gradient of a weight that may run beside the reduction of another product's result.

    Attributes:
        cotangent: which operand of that other product both read.
        shape: of that cotangent.
        summed: dimensions of the cotangent that the gradient sums over.
        rows: dimensions of the layer's input that it does not sum over.
        itemsize, gradient_itemsize: bytes per element of the layer's input, and of the gradient.
        dies: whether nothing else reads the layer's input any more.
        waits: whether the unreduced gradient is counted as held anyway, until gradients made later are reduced with it.
    """

    cotangent: int
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    rows: tuple[int, ...]
    itemsize: float
    gradient_itemsize: float
    dies: bool
    waits: bool


@once_per_graph
def products_beside(graph: Graph) -> dict[int, int]:
    """Gradient of a weight -> the product after it that reads the same cotangent, and that the backward pass waits for.

    Args:
        graph: with hubs.
    """
    only = only_updates_read(graph)
    gradients: dict[int, list[int]] = {}  # cotangent -> gradients that read it, and no other product since
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.phase != "backward" or op.region or op.primitive != "dot_general" or len(op.inputs) != 2:
            continue
        for t in {graph.behind(t, ("hub",)) for t in op.inputs}:
            if only[op.outputs[0]]:
                gradients.setdefault(t, []).append(op.id)
            else:
                found |= dict.fromkeys(gradients.pop(t, ()), op.id)
    return found


def gradients_beside(graph: Graph, buffers: Buffers, reduced: Mapping[int, int]) -> dict[int, Beside]:
    """Per product of the backward pass, the gradient that runs beside it.

    Args:
        graph: with hubs.
        buffers: of the graph, as XLA:GPU has them.
        reduced: gradient -> when it is reduced together with others (:mod:`autoshard_ilp.costs.gpu.combining`).
    """
    found: dict[int, Beside] = {}
    for gradient_id, op_id in products_beside(graph).items():
        gradient, op = graph.ops[gradient_id], graph.ops[op_id]
        mine, others = ([graph.behind(t, ("hub",)) for t in x.inputs] for x in (gradient, op))
        both = next(t for t in mine if t in others)
        position = mine.index(both)
        image, result = graph.tensors[gradient.inputs[1 - position]], graph.tensors[op.outputs[0]]
        if image.shape == result.shape:
            (contracted, _) = gradient.params["dimension_numbers"]
            found[op_id] = Beside(
                cotangent=others.index(both),
                shape=graph.tensors[both].shape,
                summed=tuple(contracted[position]),
                rows=tuple(d for d in range(len(image.shape)) if d not in contracted[1 - position]),
                itemsize=image.itemsize,
                gradient_itemsize=graph.tensors[gradient.outputs[0]].itemsize,
                dies=int(buffers.last_use[image.id]) == int(buffers.time[gradient_id]),
                waits=reduced.get(gradient.outputs[0], 0) >= int(buffers.time[op_id]),
            )
    return found


def held_beside(
    graph: Graph, op: Op, beside: Mapping[int, Beside], strategies: Sequence[Strategy], axis_sizes: Sequence[int]
) -> np.ndarray:
    """Bytes that one device holds for the gradient's sake while the other product is computed or reduced, per strategy.

    The layer's input is laid out as its cotangent is before the reduction, since the gradient reads both.

    Args:
        op: the product that makes the cotangent of the input.
        beside: of :func:`gradients_beside`.
    """
    held = np.zeros(len(strategies), np.int64)
    what = beside.get(op.id)
    if what is None:
        return held
    made = graph.tensors[op.outputs[0]]
    for k, strategy in enumerate(strategies):
        read: Layout | None = strategy.operands[what.cotangent]
        if read is None:
            continue
        unreduced = strategy.results[0] if strategy.partial is None else strategy.partial
        if set(read) & set(what.summed):
            if what.waits:
                continue
            inputs, columns = (local_shape(s, x, axis_sizes) for s, x in ((made.shape, unreduced), (what.shape, read)))
            elements = math.prod(inputs[d] for d in what.rows)
            elements *= math.prod(n for d, n in enumerate(columns) if d not in what.summed)
            # An all-reduce writes in the place of what it adds up; only of a scattered cotangent both are there.
            scattered = strategy.resolutions and unreduced != strategy.results[0]
            after = local_bytes(made.shape, made.itemsize, strategy.results[0], axis_sizes) if scattered else 0
            held[k] = max(0, math.ceil(elements * what.gradient_itemsize) - after)
        elif strategy.resolutions and what.dies:
            held[k] = local_bytes(made.shape, what.itemsize, unreduced, axis_sizes)
    return held

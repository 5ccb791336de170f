"""Equal casts of one variable are one operation, as they are for XLA.

A layer that is called twice (the token embedding of an encoder and its decoder, the two towers of a siamese network)
casts its variables each time, and each call's copy would be a decision of its own: to be gathered twice, where XLA
merges what is equal and gathers once. Merged, both calls read one array, and a hub stands in front of them
(:func:`autoshard_ilp.graph.insert_hubs`). Where the calls do different things with it, such as a lookup and the logits
of a tied table, XLA:TPU casts what each of them makes of the variable, and so they are left alone there. XLA:GPU
gathers one copy for both, since the plan casts before it gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoshard_ilp.costs.profile import HardwareProfile
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Graph, Op, Tensor, assemble, changed

ONE_COPY = frozenset({"gpu"})
"""Families of hardware whose compiler merges equal casts whatever reads them."""


def has_one_copy(profile: HardwareProfile) -> bool:
    """Whether equal casts of a variable are one copy on this hardware, whatever reads them."""
    return profile.family in ONE_COPY


def merge_equal_casts(graph: Graph, one_copy: bool = False) -> Graph:
    """The graph with equal casts of a variable merged into the first; itself where there are none.

    Args:
        graph: of a step, without hubs.
        one_copy: as :func:`has_one_copy` says; else casts are merged that are read alike.
    """
    instead: dict[int, int] = {}  # tensor -> the equal one that is kept
    gone: set[int] = set()
    for argument in (graph.ops[a] for a in graph.arguments):
        for first, other in _equal(graph, graph.tensors[argument.outputs[0]], one_copy):
            instead[other.outputs[0]] = first.outputs[0]
            gone.add(other.id)
    if not gone:
        return graph
    kept = (op for op in graph.ops if op.id not in gone)
    return assemble(graph, [changed(op, inputs=tuple(instead.get(t, t) for t in op.inputs)) for op in kept])


def _equal(graph: Graph, variable: Tensor, one_copy: bool) -> Iterator[tuple[Op, Op]]:
    """Casts of a variable that equal an earlier one, which comes first of the two."""
    if len(variable.consumers) < 2 or len(variable.shape) < 2 or math.prod(variable.shape) < MIN_HUB_ELEMENTS:
        return
    firsts: dict[tuple[object, ...], Op] = {}
    for op in graph.readers(variable.id):
        if op.primitive == "convert_element_type":
            (result,) = op.outputs
            uses = frozenset() if one_copy else frozenset(reader.primitive for reader in graph.readers(result))
            first = firsts.setdefault((graph.tensors[result].dtype, op.region, op.phase, uses), op)
            if first is not op:
                yield first, op

"""Sums of partial sums, reduced once.

The gradient of a tensor that several products read (the input of query, key and value) is a sum of products. Where the
contracted dimension is sharded, every device holds a partial result of each of them, and addition commutes with the
reduction over devices: ``reduce(a) + reduce(b) = reduce(a + b)``. So a tensor that only a sum reads may stay partial
(an entry :data:`~autoshard_ilp.sharding.PARTIAL` in its layout) and the sum reduces once. XLA:GPU and XLA:TPU do the
same behind the plan's back, by their pass "all-reduce reassociate"; here it is a strategy of the integer program, with
its price, and :mod:`autoshard_ilp.enforce.manual` runs it on every backend.

The same holds for a sum over dimensions of one tensor: ``sum(reduce(a)) = reduce(sum(a))``, and the second is smaller.
What a bag of words averages of a table whose rows are sharded is found partly on every device: all-reduced word by word
it is as many times larger as there are words (XLA:TPU defers that reduction by itself as well).

A tensor may stay partial on its way through operations that only rearrange it (transpose, reshape) or widen its dtype,
up to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autoshard_ilp.enforce.lookup import stays_partial
from autoshard_ilp.enforce.manual import runs_partial
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.rules.rule import Kind, Rule

SUMS = frozenset({"add", "add_any"})
SUMS_OVER_DIMENSIONS = frozenset({"reduce_sum"})
ANY_SUMS = SUMS | SUMS_OVER_DIMENSIONS
REARRANGEMENTS = frozenset({"transpose", "reshape", "squeeze", "copy"})
WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}
"""Floating-point dtypes -> those that hold all their numbers."""


@dataclass(frozen=True)
class Deferral:
    """What partial sums an operation may read and leave behind.

    Attributes:
        reads: its operands may be partial, all over the same mesh axes.
        resolves: it may reduce what it read partial (a sum); a rearrangement hands it on.
        leaves: its result may stay partial, because only a sum, of several tensors or over dimensions, reads it.
        local: it can run device by device (:func:`.enforce.manual.run`), so that its partial sums may be scattered
            onto two dimensions, one after the other; told only the layouts, XLA would all-reduce them.
    """

    reads: bool = False
    resolves: bool = False
    leaves: bool = False
    local: bool = False


NONE = Deferral()


def deferrals(graph: Graph, rules: Sequence[Rule], kinds: Sequence[int]) -> list[Deferral]:
    """Deferral of every operation.

    Args:
        graph: with hubs.
        rules: sharding rule per operation.
        kinds: per operation, a number: those with equal ones look alike.
    """
    alone = _runs_partial(graph, kinds)
    partial = _may_be_partial(graph, rules, kinds, alone)
    leaves: set[int] = set()  # ops whose result reaches a sum of such tensors
    for op in reversed(graph.ops):
        if not op.outputs or op.outputs[0] not in partial:
            continue
        user = _only_user(graph, op)
        if user is None:
            continue
        summed = user.primitive in SUMS and all(t in partial for t in user.inputs) and _summed_once(graph, user)
        if summed or _made_smaller(graph, user) or (_hands_on(graph, user) and user.id in leaves):
            leaves.add(op.id)
    found = []
    one = cache(Deferral)  # few are different
    for op in graph.ops:
        resolves = op.primitive in ANY_SUMS
        reads = (
            bool(op.inputs)
            and (resolves or _hands_on(graph, op))
            and all(graph.tensors[t].producer in leaves and graph.tensors[t].result_index == 0 for t in op.inputs)
        )
        local = op.eqn is not None and len(op.outputs) == 1 and alone[kinds[op.id]]
        found.append(one(reads, reads and resolves, op.id in leaves, local))
    return found


def _made_smaller(graph: Graph, op: Op) -> bool:
    """Whether an operation sums its operand up to an array of fewer elements."""
    if op.primitive not in SUMS_OVER_DIMENSIONS:
        return False
    before, after = (graph.tensors[t].shape for t in (op.inputs[0], op.outputs[0]))
    return bool(after) and math.prod(after) < math.prod(before)


def _hands_on(graph: Graph, op: Op) -> bool:
    """Whether an operation of partial sums leaves partial sums: it rearranges its operand, or only widens its dtype."""
    if op.primitive in REARRANGEMENTS:
        return True
    if op.primitive != "convert_element_type":
        return False
    return graph.tensors[op.outputs[0]].dtype in WIDER.get(graph.tensors[op.inputs[0]].dtype, ())


def _runs_partial(graph: Graph, kinds: Sequence[int]) -> dict[int, bool]:
    """Per kind, whether its operations may run on one device's part of what they reduce."""
    first: dict[int, Op] = {}
    for op in graph.ops:
        first.setdefault(kinds[op.id], op)
    return {kind: runs_partial(graph.view(op)) for kind, op in first.items()}


def _may_be_partial(graph: Graph, rules: Sequence[Rule], kinds: Sequence[int], alone: Mapping[int, bool]) -> set[int]:
    """Tensors that can hold partial sums: results of reductions, and what is summed or rearranged of such."""
    found: set[int] = set()
    adds: dict[int, bool] = {}
    for op in graph.ops:
        if len(op.outputs) != 1 or not graph.tensors[op.outputs[0]].shape:
            continue
        if op.primitive in SUMS:
            partial = all(t in found for t in op.inputs) and _same_type(graph, op)
        elif _hands_on(graph, op):
            partial = op.inputs[0] in found
        else:
            kind = kinds[op.id]
            if kind not in adds:
                factors = rules[op.id].factors.values()
                adds[kind] = any(f.kind is Kind.REDUCTION and f.combine == "add" for f in factors)
                adds[kind] = adds[kind] and (alone[kind] or stays_partial(graph.view(op)))
            partial = adds[kind] and op.eqn is not None
        if partial:
            found.add(op.outputs[0])
    return found


def _only_user(graph: Graph, op: Op) -> Op | None:
    """The one operation that reads an operation's result, once, in the same region."""
    consumers = graph.tensors[op.outputs[0]].consumers
    if len(consumers) != 1:
        return None
    user = graph.ops[consumers[0][0]]
    return user if user.region == op.region else None


def _summed_once(graph: Graph, op: Op) -> bool:
    """Whether every operand of a sum is read by nothing else."""
    return all(len(graph.tensors[t].consumers) == 1 for t in op.inputs)


def _same_type(graph: Graph, op: Op) -> bool:
    out = graph.tensors[op.outputs[0]]
    return all((graph.tensors[t].shape, graph.tensors[t].dtype) == (out.shape, out.dtype) for t in op.inputs)

"""What XLA:GPU's combining of small collectives saves, and what waits because of it.

All-gathers of several tensors that do not depend on one another become one instruction, up to a threshold of
:data:`THRESHOLD_BYTES` of results; so do all-reduces and reduce-scatters (flags of ``xla/debug_options_flags.cc`` like
``xla_gpu_all_gather_combine_threshold_bytes``; passes like ``all_gather_combiner``). A combined gather runs where the
first of its members is needed and holds all of them from there; a combined reduction runs where the last of its
operands is known and holds the unreduced ones until then.

Which tensors are combined depends on the layouts chosen, that is, on the solution. Here the groups are those of a plan
that communicates every weight and every gradient: program order, greedily filled. A group never holds more than the
threshold, so the error is bounded by it, and large models, whose weights exceed it one by one, have no groups at all.

A combined collective pays its fixed time once, so each member pays its share of it. A plan that communicates only some
members of a group, or over several sets of mesh axes, pays more than that, by a few fixed times per group; without
groups, plans paid one per tensor: 2.4 to 4.7 times the seconds of what was compiled for two layers of BERT.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.graph import Graph, Op, is_batch, once_per_graph

THRESHOLD_BYTES = 30 * 2**20
"""Default of XLA:GPU's three thresholds (30 MiB and 7 bytes)."""


@dataclass(frozen=True)
class Shares:
    """Of the fixed time of a collective, what a member of a group pays; by tensor. Others pay all of it.

    Attributes:
        gathered: weights, or casts of them, that the forward pass reads.
        reduced: gradients that only updates read.
        updated: new values of variables, gathered where they are kept whole.
    """

    gathered: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, float] = field(default_factory=dict)
    updated: dict[int, float] = field(default_factory=dict)

    def of_reductions(self, graph: Graph, op_ids: Sequence[int]) -> float:
        """For the partial results of operations that share one decision."""
        return _mean([self.reduced.get(t, 1.0) for o in op_ids for t in graph.ops[o].outputs[:1]])

    def of_gathers(self, graph: Graph, uses: Sequence[tuple[int, int]]) -> float:
        """For a tensor that passes to these operands (op id, position), which share one decision."""
        return _mean([self._gather(graph.ops[o], graph.ops[o].inputs[i]) for o, i in uses])

    def _gather(self, op: Op, tensor: int) -> float:
        if op.primitive == "result":
            return self.updated.get(tensor, 1.0)
        return self.gathered.get(tensor, 1.0) if op.phase == "forward" else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0


def shares(graph: Graph, buffers: Buffers, family: str) -> Shares:
    """What the members of all groups of a step pay; nothing is shared but on GPUs."""
    if family != "gpu":
        return Shares()
    reduced = _each(_groups(graph, _made_for_updates(graph, buffers, dropped=True)))
    for op in graph.ops:  # what is handed on partial is reduced later on
        views = op.primitive in VIEWS or fusible(op) or _drops_dimensions(graph, op)
        if op.outputs and op.inputs and views and op.phase == "backward":
            before = [reduced[t] for t in op.inputs if t in reduced]
            if before and not op.region:
                reduced.setdefault(op.outputs[0], min(before))
    for t, share in _each(g for beside in _sums_beside(graph, reduced) for g in _groups(graph, beside)).items():
        reduced.setdefault(t, share)
    variables = _variables_read(graph, buffers)
    gathered = _each(_groups(graph, (min(read, key=lambda t: graph.tensors[t].bytes) for read in variables.values())))
    of_variable = {v: gathered[t] for v, read in variables.items() for t in read if t in gathered}
    new = [graph.ops[result].inputs[0] for result, argument in graph.aliases if argument in variables]
    return Shares(
        {t: of_variable[v] for v, read in variables.items() if v in of_variable for t in read},
        reduced,
        _each(_groups(graph, new)),
    )


def _sums_beside(graph: Graph, known: Container[int]) -> Iterable[list[int]]:
    """Sums over elements, such as the mean and the square of a batch normalisation, none of which needs another.

    They need as many operations before them, of those that are no elementwise work: whoever needs a sum needs more.
    """
    before = [0] * len(graph.tensors)
    found: dict[tuple[str, int], list[int]] = {}
    for op in graph.ops:
        depth = max([before[t] for t in op.inputs], default=0) + (not fusible(op))
        for t in op.outputs:
            before[t] = depth
        if op.primitive == "reduce_sum" and not op.region and op.outputs[0] not in known:
            found.setdefault((op.phase, depth), []).append(op.outputs[0])
    return found.values()


def _variables_read(graph: Graph, buffers: Buffers) -> dict[int, list[int]]:
    """Argument of the step -> itself and what is computed of it alone that the forward pass reads; but for the batch.

    Scalars are on all devices.
    """
    source: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive == "argument" and not is_batch(op):
            source[op.outputs[0]] = op.id
        found = {source[t] for t in op.inputs if t in source}
        if len(found) == 1 and fusible(op) and not op.region:
            source.update(dict.fromkeys(op.outputs, found.pop()))
    variables: dict[int, list[int]] = {}
    for t in _first_reads(graph, buffers):
        if t in source and graph.tensors[t].shape:
            variables.setdefault(source[t], []).append(t)
    return variables


def _each(groups: Iterable[Sequence[int]]) -> dict[int, float]:
    return {t: 1.0 / len(group) for group in groups for t in group}


def gathered_together(graph: Graph, buffers: Buffers, family: str) -> dict[int, int]:
    """Tensor that is known from the step's start (a weight, a cast of it) -> time at which a combined gather makes it.

    Args:
        graph: with hubs.
        buffers: of the graph.
        family: of the hardware; only XLA:GPU combines so.
    """
    if family != "gpu":
        return {}
    first = _first_reads(graph, buffers)
    return {t: first[group[0]] for group in _groups(graph, first) for t in group}


def _first_reads(graph: Graph, buffers: Buffers) -> dict[int, int]:
    """Tensor that is known from the step's start -> first time that the forward pass reads it, in this order."""
    known, time = known_from_the_start(graph), buffers.time.tolist()
    first: dict[int, int] = {}
    for op in graph.ops:
        if op.phase == "forward" and op.primitive != "result" and not op.region:
            for t in op.inputs:
                if known[t]:
                    first.setdefault(t, time[op.id])
    return dict(sorted(first.items(), key=lambda item: (item[1], item[0])))


@once_per_graph
def known_from_the_start(graph: Graph) -> list[bool]:
    """Per tensor, whether it is an argument of the step, or computed element by element from such."""
    known = [False] * len(graph.tensors)
    for op in graph.ops:
        ready = op.primitive == "argument" or (op.inputs and all(known[t] for t in op.inputs) and fusible(op))
        if ready and not op.region:
            for t in op.outputs:
                known[t] = True
    return known


def reduced_together(graph: Graph, buffers: Buffers, family: str) -> dict[int, int]:
    """Gradient that only updates read -> time at which a combined reduction has all its operands."""
    if family != "gpu":
        return {}
    groups = _groups(graph, _made_for_updates(graph, buffers))
    return {t: int(buffers.start[group[-1]]) for group in groups for t in group}


def _made_for_updates(graph: Graph, buffers: Buffers, *, dropped: bool = False) -> list[int]:
    """Gradients that only updates read, in the order in which they are made; ``dropped``: those of biases, too."""
    only = only_updates_read(graph, dropped=dropped)
    made = [
        op.outputs[0]
        for op in graph.ops
        if op.phase == "backward" and op.outputs and not op.region and only[op.outputs[0]]
        if not (fusible(op) or (dropped and _drops_dimensions(graph, op)))
    ]
    start = buffers.start.tolist()
    return sorted(made, key=lambda t: (start[t], t))


def _drops_dimensions(graph: Graph, op: Op) -> bool:
    """Whether an operation sums up over dimensions of size 1: what the gradient of a bias ends in, a view."""
    shapes = (graph.tensors[t].shape for t in (*op.inputs, *op.outputs))
    return op.primitive == "reduce_sum" and len({math.prod(shape) for shape in shapes}) == 1


@once_per_graph
def only_updates_read(graph: Graph, *, dropped: bool = False) -> list[bool]:
    """Per tensor, whether nothing but updates and results read it, directly or through views and elementwise work.

    Args:
        graph: with hubs.
        dropped: sums over dimensions of size 1 count as views.
    """
    only = [False] * len(graph.tensors)
    for op in reversed(graph.ops):
        ends = op.phase == "update" or op.primitive == "result"
        if not ends and op.outputs and all(only[t] for t in op.outputs):
            ends = op.primitive in VIEWS or fusible(op) or (dropped and _drops_dimensions(graph, op))
        for t in op.inputs:
            others = graph.tensors[t].consumers
            last = others[-1][0] == op.id  # reversed order: seen first
            only[t] = ends and (last or only[t])
    return only


def _groups(graph: Graph, order: Iterable[int]) -> list[list[int]]:
    """Consecutive tensors that fit under the threshold together; larger ones are left alone."""
    groups: list[list[int]] = []
    filled = THRESHOLD_BYTES + 1
    for t in order:
        size = graph.tensors[t].bytes
        if size > THRESHOLD_BYTES:
            continue
        if filled + size > THRESHOLD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(t)
        filled += size
    return groups

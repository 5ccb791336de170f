"""The cost table: classes of operations with their strategies, and what every choice costs.

One class is one decision of the integer program (several operations where layers repeat). The table prices it in
seconds, compute and communication apart, and prices resharding between every pair of classes that exchange a tensor.
:func:`to_program` lays the numbers out as the plain arrays of :class:`~autoshard_ilp.program.model.Program`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autoshard_ilp.costs import compute
from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.facts import Facts
from autoshard_ilp.costs.gpu.combining import Shares
from autoshard_ilp.costs.kernels import COUNTED, with_kernels
from autoshard_ilp.costs.memory import is_computed_inside
from autoshard_ilp.costs.precision import Precision
from autoshard_ilp.costs.prices import Prices
from autoshard_ilp.costs.reshard import CollectiveSeconds
from autoshard_ilp.costs.resolution import resolution_seconds
from autoshard_ilp.costs.tpu.lookups import copy_seconds, is_lookup, scattered, several_tables
from autoshard_ilp.deferral import Deferral
from autoshard_ilp.graph import BOUNDARY, Graph, Op, is_batch
from autoshard_ilp.rules.rule import Rule
from autoshard_ilp.sharding import Layout, Together, local_bytes
from autoshard_ilp.strategies import Strategy, hub_strategies, strategies_of

SMALL_BYTES = 1024
"""Tensors smaller than this are left out of the memory account, unless the whole program is small."""

Restriction = Callable[[Op, list[Strategy]], list[Strategy]]


@dataclass(frozen=True, eq=False)
class Labels:
    """Distinct layouts of one operand or result over a class's strategies; None: the operand is not read."""

    layouts: tuple[Layout | None, ...]
    of_strategy: np.ndarray

    @staticmethod
    def of(layouts: Sequence[Layout | None]) -> Labels:
        names: dict[Layout | None, int] = {}
        labels = np.array([names.setdefault(lay, len(names)) for lay in layouts], np.int64)
        return Labels(tuple(names), labels)


@dataclass(frozen=True, eq=False)
class OpClass:
    """Operations that share one decision.

    Attributes:
        members: op ids; the first represents the class.
        rule: its sharding rule.
        strategies: what can be chosen.
        count: executions per step of all members together.
        compute_seconds, communication_seconds: per strategy, of one execution.
        operands, results: labels per operand and result.
        share: what it pays of a reduction's fixed time (:class:`~autoshard_ilp.costs.gpu.combining.Shares`).
    """

    members: tuple[int, ...]
    rule: Rule
    strategies: tuple[Strategy, ...]
    count: float
    compute_seconds: np.ndarray
    communication_seconds: np.ndarray
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    share: float


@dataclass(frozen=True, eq=False)
class Flow:
    """A tensor that passes from a result of class ``u`` to an operand of class ``v``, ``count`` times per step.

    ``share`` is what it pays of a gather's fixed time (:class:`~autoshard_ilp.costs.gpu.combining.Shares`).
    """

    u: int
    result: int
    v: int
    operand: int
    count: float
    uses: tuple[tuple[int, int], ...]  # (op id, operand index) of every member
    share: float


@dataclass(frozen=True, eq=False)
class CostTable:
    """Everything the program is made of; see the module docstring."""

    graph: Graph
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    profile: Any
    collectives: CollectiveSeconds
    buffers: Buffers
    classes: tuple[OpClass, ...]
    class_of: np.ndarray  # op id -> class, results of donated arguments sharing the argument's class
    flows: tuple[Flow, ...]
    prices: Prices
    precision: Precision
    alike: np.ndarray  # op id -> class if all repeated layers shared one decision
    unknown: tuple[str, ...] = field(default=())
    first_share: float = 0.0  # of the repeated layers, those that decide apart from the others; 0: all share decisions
    together: Together = ()  # mesh axes that split the same dimension throughout
    facts: Facts | None = field(default=None, repr=False)  # for another table of the same graph

    @property
    def tied(self) -> bool:
        """Whether some operations share a decision."""
        return any(len(c.members) > 1 for c in self.classes)

    @cached_property
    def donated(self) -> frozenset[int]:
        """Classes of the arguments that a result of the step overwrites."""
        return frozenset(int(self.class_of[argument]) for _, argument in self.graph.aliases)

    @cached_property
    def least_bytes(self) -> int:
        """Tensors smaller than this, whole, are left out of the memory account: a kilobyte, or of a program of small
        tensors a thousandth of the largest."""
        largest = max((math.prod(t.shape) * t.itemsize for t in self.graph.tensors), default=0)
        return int(min(SMALL_BYTES, largest // 1000))


def build_table(
    facts: Facts,
    axis_names: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    collectives: CollectiveSeconds,
    *,
    prices: Prices | None = None,
    restriction: Restriction | None = None,
    first_share: float = 0.0,
    together: Together = (),
) -> CostTable:
    """Prices a graph on a mesh.

    Args:
        facts: of the graph.
        prices: of this mesh and profile, where some are known.
        restriction: drops strategies that a pin forbids; the facts tell apart ops it treats differently.
        first_share: of the repeated layers, how many share one decision, and the others another; 0: all share one.
        together: groups of mesh axes that split the same dimension throughout
            (:mod:`autoshard_ilp.costs.together`).
    """
    class_of = facts.classes(first_share)
    members: dict[int, list[int]] = {}
    for op_id, c in enumerate(class_of.tolist()):
        members.setdefault(c, []).append(op_id)
    alike = facts.classes(0.0) if first_share else class_of
    tied: dict[int, list[int]] = {}  # what a step pays does not depend on how its layers are divided
    for op_id, c in enumerate(alike.tolist()):
        tied.setdefault(c, []).append(op_id)
    shares = {c: facts.shares.of_reductions(facts.graph, own) for c, own in tied.items()}
    prices = Prices.of(axis_sizes, collectives) if prices is None else prices
    fixed = (axis_sizes, collectives, restriction, prices.classes, together)
    classes = tuple(_price(facts, members[c], shares[int(alike[members[c][0]])], *fixed) for c in range(len(members)))
    return CostTable(
        facts.graph,
        axis_names,
        axis_sizes,
        facts.profile,
        collectives,
        facts.buffers,
        classes,
        class_of,
        _flows(facts.graph, class_of, alike, classes, facts.shares),
        prices,
        facts.precision,
        alike,
        facts.unknown,
        first_share,
        together,
        facts,
    )


def _price(
    facts: Facts,
    members: list[int],
    share: float,
    axis_sizes: tuple[int, ...],
    collectives: CollectiveSeconds,
    restriction: Restriction | None,
    cache: dict[Any, Any],
    together: Together,
) -> OpClass:
    graph, buffers, rounded, profile = facts.graph, facts.buffers, facts.precision, facts.profile
    op = graph.ops[members[0]]
    rule = facts.rules[op.id]
    ins = [graph.tensors[t] for t in op.inputs]
    outs = [graph.tensors[t] for t in op.outputs]
    held = {t.id: float(rounded.held[t.id]) for t in (*ins, *outs)}
    traffic = compute.Traffic(
        tuple((i, ins[i].shape, held[ins[i].id]) for i in buffers.reads[op.id]),
        tuple(
            (j, _written_shape(op, t.shape), held[t.id])
            for j, t in enumerate(outs)
            if (buffers.stored[t.id] and op.primitive not in BOUNDARY) or is_batch(op)
        ),
        ins[0].dtype if ins else (outs[0].dtype if outs else "float32"),
        tuple((j, t.shape, held[t.id]) for j, t in enumerate(outs) if is_computed_inside(op, t.id, buffers)),
    )
    if getattr(profile, "family", "") in COUNTED and op.primitive not in BOUNDARY:
        traffic = with_kernels(traffic, graph, op, profile)
    kinds = tuple((n, f.size, f.kind, f.combine) for n, f in rule.factors.items())
    shapes = tuple((t.shape, t.itemsize) for t in (*ins, *outs))
    first = op.params.get("first") is None
    deferral = facts.deferred[op.id]
    looks_up = getattr(profile, "family", "") == "tpu" and is_lookup(graph, op)
    row_bytes = float(rounded.moved(graph, op, 0)) if looks_up else 0.0
    lookup = (row_bytes, looks_up and several_tables(graph))
    priced_by = (traffic, rule.flops, deferral, share, lookup)
    key = (op.primitive, str(rule), kinds, facts.restriction_key(op), first, shapes, priced_by, together)
    if key not in cache:
        whole = [t.shape for t in ins], [t.shape for t in outs]
        strategies = _strategies(op, rule, *whole, axis_sizes, deferral, together)
        strategies = [s for s in strategies if not (lookup[1] and scattered(s))]
        if restriction is not None:
            strategies = restriction(op, strategies)
        compute_s = np.array([compute.seconds(rule, traffic, s, axis_sizes, profile) for s in strategies])
        if looks_up:
            compute_s = compute_s + copy_seconds(graph, op, strategies, axis_sizes, row_bytes, profile)
        itemsize = outs[0].itemsize if outs else 0.0
        shape = outs[0].shape if outs else ()
        priced = (shape, itemsize, axis_sizes, collectives, share)
        comm_s = np.array([resolution_seconds(s, *priced) for s in strategies])
        keep = _undominated(strategies, compute_s + comm_s)
        strategies = [strategies[i] for i in keep]
        operands = tuple(Labels.of([s.operands[i] for s in strategies]) for i in range(len(ins)))
        results = tuple(Labels.of([s.results[j] for s in strategies]) for j in range(len(outs)))
        cache[key] = (tuple(strategies), compute_s[keep], comm_s[keep], operands, results)
    strategies, compute_s, comm_s, operands, results = cache[key]
    own = [m for m in members if graph.ops[m].primitive != "result" or op.primitive == "result"]
    count = sum(graph.ops[m].count for m in own)
    return OpClass(tuple(own), rule, strategies, count, compute_s, comm_s, operands, results, share)


def _written_shape(op: Op, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What one execution writes of a result: a loop one slice of what it stacks up."""
    return (1, *shape[1:]) if op.primitive == "loop_stack" else shape


def _strategies(
    op: Op,
    rule: Rule,
    operands: list[tuple[int, ...]],
    results: list[tuple[int, ...]],
    axis_sizes: tuple[int, ...],
    deferral: Deferral,
    together: Together,
) -> list[Strategy]:
    if op.primitive == "hub":
        may_reuse = op.params.get("first") is not None
        return hub_strategies(results[0], axis_sizes, may_reuse=may_reuse, together=together)
    even = op.primitive in ("argument", "result")
    return strategies_of(rule, operands, results, axis_sizes, even=even, deferral=deferral, together=together)


def _undominated(strategies: list[Strategy], seconds: np.ndarray) -> list[int]:
    """Of strategies with equal operand and result layouts (and equal partial results) only the cheapest."""
    best: dict[Any, int] = {}
    for i, s in enumerate(strategies):
        key = (s.operands, s.results)
        if key not in best or seconds[i] < seconds[best[key]]:
            best[key] = i
    return sorted(best.values())


def _flows(
    graph: Graph, class_of: np.ndarray, alike: np.ndarray, classes: Sequence[OpClass], shares: Shares
) -> tuple[Flow, ...]:
    uses: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    class_numbers = class_of.tolist()
    for op in graph.ops:
        v = class_numbers[op.id]
        known: dict[tuple[int, bytes], int] = {}
        twice = len(set(op.inputs)) < len(op.inputs) and op.primitive != "result"
        for i, t in enumerate(op.inputs):
            tensor = graph.tensors[t]
            if tensor.producer is None or not tensor.shape:
                continue
            if twice:
                # One tensor read twice in the same layout is one copy; in two layouts it is two.
                same = (t, classes[v].operands[i].of_strategy.tobytes())
                if same in known and classes[v].operands[known[same]].layouts == classes[v].operands[i].layouts:
                    continue
                known[same] = i
            key = (class_numbers[tensor.producer], tensor.result_index, v, -1 if op.primitive == "result" else i)
            uses.setdefault(key, []).append((op.id, i))
        first = op.params.get("first") if op.primitive == "hub" else None
        if first is not None:
            uses.setdefault((class_numbers[first], 0, v, REUSE), []).append((op.id, 0))

    def kind(key: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        u, j, v, i = key
        return int(alike[classes[u].members[0]]), j, int(alike[classes[v].members[0]]), i

    tied: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for key, members in uses.items():
        tied.setdefault(kind(key), []).extend(members)
    passing = {key: 1.0 if key[3] == REUSE else shares.of_gathers(graph, own) for key, own in tied.items()}
    return tuple(
        Flow(*key, sum(executions(graph, op, k) for op, k in members), tuple(members), passing[kind(key)])
        for key, members in uses.items()
    )


REUSE = -2
"""Operand number of the link from a forward hub to the backward hub that may reuse its copy."""


def executions(graph: Graph, op_id: int, operand: int) -> float:
    """How often an operand passes: slices of a loop are laid out once, before it; what a carry becomes, in the loop."""
    op = graph.ops[op_id]
    if op.primitive == "loop_slice":
        return graph.regions[graph.regions[op.region].parent].count
    if op.primitive == "loop_carry" and operand == 1:
        return graph.regions[op.params["region"]].count
    return op.count


HELD = "held"
"""Marks the label of a hub that reuses the forward copy in some layout instead of reading its own operand."""


def operand_labels(table: CostTable, flow: Flow) -> Labels:
    """Labels of the layouts a flow arrives in; a result of the step arrives in its own (or its argument's) layout."""
    v = table.classes[flow.v]
    if flow.operand == REUSE:
        return Labels.of([s.results[0] if s.operands[0] is None else None for s in v.strategies])
    if flow.operand == -1:
        return v.results[0] if v.results else v.operands[0]
    if any(lay is None for lay in v.operands[flow.operand].layouts):
        arrivals: list[Any] = [(HELD, s.results[0]) if s.operands[0] is None else s.operands[0] for s in v.strategies]
        return Labels.of(arrivals)
    return v.operands[flow.operand]


def flow_table(table: CostTable, flow: Flow) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of one passage, bytes of the copy held) per pair of labels.

    A backward hub may reuse the forward hub's copy only where that *is* a copy, in the same layout; it costs no time
    but keeps the copy alive. Otherwise it reads its operand afresh.
    """
    v: Any = operand_labels(table, flow)
    tensor, itemsize = flow_tensor(table, flow), flow_itemsize(table, flow)
    starts: Any = table.classes[flow.u].results[flow.result].layouts
    seconds = np.zeros((len(starts), len(v.layouts)))
    copies = np.zeros((len(starts), len(v.layouts)), np.int64)
    if flow.operand == REUSE:
        for k, end in enumerate(v.layouts):
            if end is not None:
                seconds[:, k] = [0.0 if start == end else np.inf for start in starts]
                copies[:, k] = local_bytes(tensor.shape, itemsize, end, table.axis_sizes)
        return seconds, copies
    fresh = [k for k, end in enumerate(v.layouts) if not _held(end)]
    ends = tuple(v.layouts[k] for k in fresh)
    asked = (tensor.shape, itemsize, starts, ends)
    seconds[:, fresh], copies[:, fresh] = table.prices.reshard.table(*asked)
    if flow.share < 1.0:
        seconds[:, fresh] -= (1.0 - flow.share) * table.prices.reshard.gather_calls(*asked)
    for k, end in enumerate(v.layouts):
        if _held(end):
            seconds[:, k] = [np.inf if start == end[1] else 0.0 for start in starts]
    return seconds, copies


def flow_tensor(table: CostTable, flow: Flow) -> Any:
    """The tensor that passes."""
    op_id, operand = flow.uses[0]
    return table.graph.tensors[table.graph.ops[op_id].inputs[operand]]


def flow_itemsize(table: CostTable, flow: Flow) -> float:
    """Bytes per element of the copies that a flow makes."""
    op_id, operand = flow.uses[0]
    return table.precision.moved(table.graph, table.graph.ops[op_id], operand)


def _held(label: Any) -> bool:
    return bool(label) and label[0] == HELD

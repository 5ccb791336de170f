"""What a chosen plan costs, sends and holds: read off the cost table, in seconds and exact bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.costs import reshard
from autoshard_ilp.costs.build import Built
from autoshard_ilp.costs.collectives import ring_bytes_per_device
from autoshard_ilp.costs.overlap import hidden_seconds
from autoshard_ilp.costs.resolution import resolution_payloads, saved_seconds
from autoshard_ilp.costs.table import (
    REUSE,
    CostTable,
    Flow,
    flow_itemsize,
    flow_tensor,
    operand_labels,
)
from autoshard_ilp.names import common, pattern

MAX_CONTRIBUTORS = 20
"""Kinds of tensors and layers that :class:`Memory` names at the peak."""


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the plan.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        bytes_per_device: bytes one device sends under a ring, per execution.
        mesh_axes: names of the mesh axes its groups span.
        seconds: of one execution, under the profile, that the step waits for.
        hidden_seconds: of one execution, that the profile declares to run behind compute.
        tensor: path or shape of what is moved.
        operation: layer path and primitive that needs it.
        source: the user's line.
        count: executions per step.
        op_ids: operations of the planned graph that need it, one per execution outside of loops.
    """

    kind: str
    bytes_per_device: float
    mesh_axes: tuple[str, ...]
    seconds: float
    tensor: str
    operation: str
    source: str
    count: float
    op_ids: tuple[int, ...] = field(default=(), repr=False)
    hidden_seconds: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one step on one device.

    ``per_axis`` and ``per_kind`` split the communication; a collective over several axes counts under their joined
    names ("data+model"). ``flops`` are those of one device. All communication here is *exposed*: what the step waits
    for. ``hidden_s`` is what the profile declares to run behind compute, on top (:mod:`autoshard_ilp.costs.overlap`).
    """

    total_s: float
    compute_s: float
    communication_s: float
    per_axis: Mapping[str, float] = field(default_factory=dict)
    per_kind: Mapping[str, float] = field(default_factory=dict)
    flops: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Predicted bytes per device at the peak of the step, and what they are.

    ``peak_bytes`` compares with XLA's argument + output + temporary - aliased bytes. The plan's ``course`` (see
    :mod:`autoshard_ilp.course`) has the whole step.
    """

    peak_bytes: int
    budget_bytes: int | None
    parameters: int = 0
    optimizer: int = 0
    state: int = 0
    gradients: int = 0
    activations: int = 0
    gathered: int = 0
    inputs: int = 0
    contributors: tuple[tuple[str, int], ...] = ()

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part; they add up to the peak."""
        names = ("parameters", "optimizer", "state", "gradients", "activations", "gathered", "inputs")
        return {n: getattr(self, n) for n in names}


def planned_collectives(table: CostTable, choices: Sequence[int]) -> list[PlannedCollective]:
    """Every collective the chosen strategies imply, dearest first."""
    found = [c for c, _ in collective_sites(table, choices) if c.bytes_per_device > 0]
    return sorted(found, key=lambda c: -c.seconds * c.count)


def collective_sites(
    table: CostTable, choices: Sequence[int]
) -> Iterator[tuple[PlannedCollective, tuple[tuple[int, bool], ...]]]:
    """Every collective with the operations that run it: (op id, whether it runs before that operation or after)."""
    for index, cls in enumerate(table.classes):
        strategy = cls.strategies[choices[index]]
        if not strategy.resolutions:
            continue
        op = table.graph.ops[cls.members[0]]
        out = table.graph.tensors[op.outputs[0]]
        after = tuple((m, False) for m in cls.members)
        sizes, costs = table.axis_sizes, table.collectives
        share = cls.share
        for kind, axes, payload in resolution_payloads(strategy, out.shape, out.itemsize, sizes, costs):
            yield _collective(table, kind, axes, payload, share, _name(table, out.id), cls.members, cls.count), after
    for flow in table.flows:
        before = tuple((op_id, True) for op_id, _ in flow.uses)
        for step in flow_steps(table, flow, choices):
            if step.kind != "slice":
                op_id, operand = flow.uses[0]
                name = _name(table, table.graph.ops[op_id].inputs[operand])
                share = flow.share if step.kind == "all-gather" else 1.0
                users = tuple(user for user, _ in flow.uses)
                what = (step.kind, step.axes, step.payload_bytes, share, name, users)
                yield _collective(table, *what, flow.count), before


def flow_steps(table: CostTable, flow: Flow, choices: Sequence[int]) -> list[reshard.Step]:
    """Steps that reshard a flow's tensor under the chosen strategies."""
    if flow.operand == REUSE:
        return []
    u = table.classes[flow.u].results[flow.result]
    v = operand_labels(table, flow)
    start = u.layouts[u.of_strategy[choices[flow.u]]]
    end = v.layouts[v.of_strategy[choices[flow.v]]]
    if end is None or start is None or start == end or (end and isinstance(end[0], str)):
        return []
    tensor = flow_tensor(table, flow)
    return reshard.steps(tensor.shape, flow_itemsize(table, flow), start, end, table.axis_sizes, table.collectives)


def _collective(
    table: CostTable,
    kind: str,
    axes: tuple[int, ...],
    payload: float,
    share: float,
    tensor: str,
    op_ids: tuple[int, ...],
    count: float,
) -> PlannedCollective:
    op = table.graph.ops[op_ids[0]]
    group = int(np.prod([table.axis_sizes[a] for a in axes]))
    return PlannedCollective(
        kind,
        ring_bytes_per_device(kind, group, payload),
        tuple(table.axis_names[a] for a in axes),
        table.collectives.seconds(kind, axes, payload) - saved_seconds(table.collectives, kind, axes, payload, share),
        tensor,
        f"{op.scope}/{op.primitive}" if op.scope else op.primitive,
        op.source,
        count,
        op_ids,
        hidden_seconds(table.collectives, kind, axes, payload),
    )


def _name(table: CostTable, tensor_id: int) -> str:
    tensor = table.graph.tensors[tensor_id]
    producer = table.graph.ops[tensor.producer] if tensor.producer is not None else None
    while producer is not None and producer.primitive in ("hub", "convert_element_type", "copy") and producer.inputs:
        source = table.graph.tensors[producer.inputs[0]].producer
        if source is None:
            break
        producer = table.graph.ops[source]
    if producer is not None and producer.path:
        return producer.path
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def total_cost(table: CostTable, choices: Sequence[int], collectives: Sequence[PlannedCollective]) -> Cost:
    """Sums a plan's cost."""
    compute = sum(c.count * float(c.compute_seconds[s]) for c, s in zip(table.classes, choices, strict=True))
    flops = sum(c.count * c.rule.flops * c.strategies[s].fraction for c, s in zip(table.classes, choices, strict=True))
    per_axis: dict[str, float] = {}
    per_kind: dict[str, float] = {}
    for c in collectives:
        axis = "+".join(c.mesh_axes)
        per_axis[axis] = per_axis.get(axis, 0.0) + c.seconds * c.count
        per_kind[c.kind] = per_kind.get(c.kind, 0.0) + c.seconds * c.count
    communication = sum(per_kind.values())
    hidden = sum(c.hidden_seconds * c.count for c in collectives)
    return Cost(compute + communication, compute, communication, per_axis, per_kind, flops, hidden)


def peak_memory(built: Built, choices: Sequence[int] | np.ndarray, budget: int | None) -> Memory:
    """What fills the memory when it is fullest."""
    program = built.program
    usage = program.usage_over_time(choices)
    if not len(usage):
        return Memory(0, budget)
    when = int(usage.argmax())
    lt = program.lifetimes
    alive = np.flatnonzero((lt.start <= when) & (when < lt.end))
    parts: dict[str, int] = {}
    by_label: dict[str, int] = {}
    for i in alive:
        held = held_bytes(built, int(i), choices)
        if held:
            category = built.categories[i]
            parts[category] = parts.get(category, 0) + held
            label = built.labels[i]
            by_label[label] = by_label.get(label, 0) + held
    on_chip = sum(parts.values()) - int(usage[when])
    for category in dict.fromkeys((*ON_CHIP_FIRST, *parts)):
        taken = min(on_chip, parts.get(category, 0))
        parts |= {category: parts[category] - taken} if taken else {}
        on_chip -= taken
    return Memory(int(usage[when]), budget, **parts, contributors=_largest(by_label))


def _largest(by_label: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """All of the :data:`MAX_CONTRIBUTORS` kinds that hold most; those of repeated layers are one kind."""
    kinds: dict[str, int] = {}
    for label, held in by_label.items():
        kinds[pattern(label)] = kinds.get(pattern(label), 0) + held
    kept = set(sorted(kinds, key=lambda kind: -kinds[kind])[:MAX_CONTRIBUTORS])
    order = sorted(by_label.items(), key=lambda item: -item[1])
    return tuple((label, held) for label, held in order if pattern(label) in kept)


def alike(contributors: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """``Memory.contributors`` with those of repeated layers together, the largest first."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for label, held in contributors:
        groups.setdefault(pattern(label), []).append((label, held))
    found = []
    for group in groups.values():
        name = common(label for label, _ in group)
        found.append((f"{name} (x{len(group)})" if len(group) > 1 else name, sum(held for _, held in group)))
    return sorted(found, key=lambda item: -item[1])


ON_CHIP_FIRST = ("activations", "gathered", "gradients")
"""Parts from which what lies in a TPU's vector memory is taken: they do not tell which buffers those are."""


def held_by_all(built: Built, choices: Sequence[int] | np.ndarray) -> list[int]:
    """:func:`held_bytes` of every lifetime; those of one owner hold the same."""
    lt = built.program.lifetimes
    of_owner: dict[tuple[bool, int], int] = {}
    found = []
    for i, owner in enumerate(zip(lt.is_edge.tolist(), lt.owner.tolist(), strict=True)):
        if owner not in of_owner:
            of_owner[owner] = held_bytes(built, i, choices)
        found.append(of_owner[owner])
    return found


def held_bytes(built: Built, lifetime: int, choices: Sequence[int] | np.ndarray) -> int:
    """Bytes per device of one lifetime of ``built.program`` under the chosen strategies."""
    lt = built.program.lifetimes
    owner = int(lt.owner[lifetime])
    if lt.is_edge[lifetime]:
        e = built.program.edges[owner]
        return 0 if e.bytes is None else int(e.bytes[e.u_labels[choices[e.u]], e.v_labels[choices[e.v]]])
    held = built.program.nodes[owner].bytes
    return 0 if held is None else int(held[choices[owner]])

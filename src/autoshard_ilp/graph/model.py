"""The graph of a step: operations and tensors, flattened from a jaxpr.

Calls (pjit, custom_jvp, custom_vjp, remat) are inlined. Loops and branches are inlined too, each into a *region* whose
operations carry how often they run per step, joined to the outside by pseudo-operations that compute nothing:

======================  =====================================================================================
``argument``            no operand; one result: an argument of the step
``constant``            no operand; one result: a constant captured by the jaxpr (of rank 1 or more)
``result``              one operand, no result: a result of the step
``loop_slice``          one operand (T, ...) outside, one result (...) inside: what a scan reads per iteration
``loop_stack``          one operand (...) inside, one result (T, ...) outside: what a scan writes per iteration
``loop_invariant``      identity on the way into a loop body, runs once per entry of the loop
``loop_carry``          two operands (initial value, value at the end of the body); two results of the same shape
                        (value inside the body, final value outside)
``while_cond``          the condition of a while loop, kept whole; reads loop carries and invariants, no result
``branch_merge``        one operand per branch, one result
``hub``                 identity that stands between a tensor and several of its consumers (see :func:`insert_hubs`)
``recompute``           identity behind which activations are computed again (see :mod:`autoshard_ilp.graph.remat`)
======================  =====================================================================================

Every other operation is one jaxpr equation (or the ``optimization_barrier`` that stands over the inputs of a
rematerialised computation). Operations are listed in program order, ``loop_carry`` before its body.

Regions nest: ``loop_slice``, ``loop_stack`` and ``while_cond`` belong to the loop's region; ``loop_invariant``,
``loop_carry`` and ``branch_merge`` to the region around it. A loop body reads only tensors of its own region (and
literals); a branch also reads those of the region around its ``cond`` directly.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import networkx as nx

    from autoshard_ilp.rules.rule import OpView

BOUNDARY = frozenset({"argument", "constant", "result"})
"""Where a step's values come from, and go to: no computation."""

PSEUDO_OPERATIONS = BOUNDARY | {
    *("loop_slice", "loop_stack", "loop_invariant", "loop_carry", "while_cond"),
    *("branch_merge", "hub", "recompute"),
}
#: Consumers that a hub never stands in front of: they tie a value to another one, or read it from inside a loop.
_NOT_BEHIND_HUBS = frozenset({"result", "loop_carry", "loop_slice", "loop_stack", "branch_merge", "while_cond", "hub"})

MIN_HUB_ELEMENTS = 1024
"""Smaller tensors get no hub: whether they are gathered once or twice is no decision worth making."""

Record = TypeVar("Record", "Tensor", "Op", "Region")
Options = ParamSpec("Options")
Found = TypeVar("Found")


def changed(record: Record, **fields: Any) -> Record:
    """``dataclasses.replace`` without its checks: graphs have hundreds of thousands of records."""
    other = object.__new__(type(record))
    other.__dict__ = record.__dict__ | fields
    return other


@dataclass(eq=False)
class Tensor:
    """A value. ``literal`` holds the value of a scalar literal; ``producer`` is then None and it is never sharded."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float  # bytes per element; extended key dtypes count their raw bits
    producer: int | None = None  # op id
    result_index: int = 0  # which result of the producer
    consumers: list[tuple[int, int]] = field(default_factory=list)  # (op id, operand index)
    literal: Any = None

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.ceil(math.prod(self.shape) * self.itemsize)


@dataclass(eq=False)
class Op:
    """An operation or pseudo-operation; ``inputs`` and ``outputs`` are tensor ids."""

    id: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""  # Keras layer path, e.g. "gpt2_backbone/transformer_layer_0/self_attention/query"
    phase: str = "forward"  # "forward" | "backward" | "update"
    count: float = 1.0  # executions per step (product of the trip counts of the loops around it)
    region: int = 0  # 0 is the top level
    position: int = 0  # index of an argument or result in the flat lists of the step
    path: str = ""  # argument and result: variable path, "inputs/..." or "outputs/..."
    eqn: Any = None  # the jaxpr equation; None for pseudo-operations and inserted barriers
    name_stack: Any = None  # JAX name stack relative to the region

    @property
    def source(self) -> str:
        """The user's line, ``"file.py:12 (function)"``; empty where there is none. Computed on demand."""
        if self.eqn is None:
            return ""
        from autoshard_ilp._jax_compat import source_line

        return source_line(self.eqn)


@dataclass(eq=False)
class Region:
    """A loop body, a conditional, or one of its branches. Fields hold op ids unless they say otherwise.

    ``kind`` is "top", "scan", "while", "cond" (holds branches only) or "branch". ``params`` of a scan: reverse, unroll;
    of a while: counted ("exact", "bound", "declared" or "unknown": where ``trip_count`` comes from).
    """

    id: int
    kind: str
    parent: int = 0
    count: float = 1.0  # executions of the body per step
    trip_count: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    invariants: tuple[int, ...] = ()
    carries: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    stacks: tuple[int, ...] = ()
    condition: int | None = None  # while: its while_cond
    index: int | None = None  # cond: *tensor* id of the branch index
    branches: tuple[int, ...] = ()  # cond: *region* ids, by branch index
    merges: tuple[int, ...] = ()  # cond: its branch_merge ops
    name_stack: Any = None


@dataclass(eq=False)
class Graph:
    """Operations and tensors of a step; ``ops[i].id == i`` and ``tensors[i].id == i``.

    ``arguments`` and ``results`` are op ids by position; ``aliases`` pairs a result op with the argument op whose
    buffer it replaces; ``regions[i].id == i``, the first one is the top level.
    """

    ops: list[Op]
    tensors: list[Tensor]
    arguments: list[int]
    results: list[int]
    aliases: list[tuple[int, int]]
    regions: list[Region]

    def view(self, op: Op) -> OpView:
        """What a sharding rule may see of ``op``."""
        from autoshard_ilp.rules.rule import OpView

        ins = [self.tensors[t] for t in op.inputs]
        outs = [self.tensors[t] for t in op.outputs]
        return OpView(
            op.primitive,
            tuple(t.shape for t in ins),
            tuple(t.shape for t in outs),
            tuple(t.dtype for t in ins),
            tuple(t.dtype for t in outs),
            op.params,
        )

    def behind(self, tensor: int, through: Collection[str]) -> int:
        """The tensor that ``tensor`` is made of by nothing but operations whose primitive is in ``through``."""
        producer = self.tensors[tensor].producer
        while producer is not None and self.ops[producer].primitive in through:
            tensor = self.ops[producer].inputs[0]
            producer = self.tensors[tensor].producer
        return tensor

    def readers(self, tensor: int) -> Iterator[Op]:
        """What reads a tensor, also through hubs."""
        for reader in (self.ops[c] for c, _ in self.tensors[tensor].consumers):
            if reader.primitive == "hub":
                yield from self.readers(reader.outputs[0])
            else:
                yield reader

    def has_backward(self) -> bool:
        """Whether gradients are computed."""
        return any(op.phase == "backward" for op in self.ops)

    def networkx(self) -> nx.DiGraph:
        """The graph as a ``networkx.DiGraph``, built on demand.

        Nodes are ``("op", i)`` and ``("tensor", i)``. An edge tensor -> op has ``kind="operand"`` and ``operands``, the
        operand positions it feeds; an edge op -> tensor has ``kind="result"`` and ``result``, the result position.
        """
        import networkx as nx

        graph = nx.DiGraph()
        for t in self.tensors:
            graph.add_node(("tensor", t.id), kind="tensor", shape=t.shape, dtype=t.dtype, bytes=t.bytes)
        for op in self.ops:
            graph.add_node(
                ("op", op.id),
                kind="op",
                primitive=op.primitive,
                scope=op.scope,
                phase=op.phase,
                count=op.count,
                region=op.region,
                path=op.path,
            )
            for i, tensor in enumerate(op.inputs):
                edge = (("tensor", tensor), ("op", op.id))
                before = graph.edges[edge]["operands"] if graph.has_edge(*edge) else ()
                graph.add_edge(*edge, kind="operand", operands=(*before, i))
            for j, tensor in enumerate(op.outputs):
                graph.add_edge(("op", op.id), ("tensor", tensor), kind="result", result=j)
        return graph

    def ancestors(self, region: int) -> list[int]:
        """``region`` and the regions around it, innermost first; ends with 0."""
        chain = [region]
        while chain[-1] != 0:
            chain.append(self.regions[chain[-1]].parent)
        return chain

    def schedule(self) -> list[list[Op | Region]]:
        """For every region, its own operations and the regions directly inside it, in the order they run.

        A region runs where its first operation stands; one without operations right after its last ``loop_carry`` or
        right before its first ``branch_merge``.
        """
        items: list[list[Op | Region]] = [[] for _ in self.regions]
        placed = {0}
        last_carry = {r.carries[-1]: r for r in self.regions if r.carries and self._is_empty(r)}
        first_merge = {r.merges[0]: r for r in self.regions if r.merges}

        def place(region: int) -> None:
            if region not in placed:
                placed.add(region)
                parent = self.regions[region].parent
                place(parent)
                items[parent].append(self.regions[region])

        for op in self.ops:
            if op.id in first_merge:
                place(first_merge[op.id].id)
            place(op.region)
            items[op.region].append(op)
            if op.id in last_carry:
                place(last_carry[op.id].id)
        return items

    def _is_empty(self, region: Region) -> bool:
        if not hasattr(self, "_inhabited"):
            self._inhabited = {r for op in self.ops for r in self.ancestors(op.region)}
        return region.id not in self._inhabited


def once_per_graph(
    function: Callable[Concatenate[Graph, Options], Found],
) -> Callable[Concatenate[Graph, Options], Found]:
    """Asks a function only once about each graph and options: a graph that is built stays as it is.

    What it finds is kept as long as the graph is, and must not be changed either.
    """
    known: WeakKeyDictionary[Graph, dict[Any, Found]] = WeakKeyDictionary()
    signature = inspect.signature(function)

    @functools.wraps(function)
    def found(graph: Graph, *args: Options.args, **options: Options.kwargs) -> Found:
        answers = known.setdefault(graph, {})
        asked = signature.bind(graph, *args, **options)
        asked.apply_defaults()
        key = asked.args[1:], tuple(asked.kwargs.items())
        if key not in answers:
            answers[key] = function(graph, *args, **options)
        return answers[key]

    return found


def is_batch(op: Op) -> bool:
    """Whether an argument is part of the batch: it is written anew every step, so a sharded copy is cheaper."""
    return op.primitive == "argument" and op.path.partition("/")[0] in ("inputs", "targets", "sample_weight")


def assemble(graph: Graph, ops: Iterable[Op], tensors: Mapping[int, Tensor] | None = None) -> Graph:
    """A new graph of ``ops`` in the given order: ids compacted, consumers recomputed, records renamed.

    Args:
        graph: where regions, arguments, results and aliases come from (by old op and tensor ids); not modified.
        ops: operations with unique old ids; those of ``graph`` that are missing disappear.
        tensors: old id -> tensor, when tensors beyond those of ``graph`` occur.
    """
    ops = list(ops)
    known: Any = graph.tensors if tensors is None else tensors
    op_ids = {op.id: i for i, op in enumerate(ops)}
    tensor_ids: dict[int, int] = {}
    new_tensors: list[Tensor] = []
    for op in ops:
        for old in (*op.inputs, *op.outputs):
            if old not in tensor_ids:
                tensor_ids[old] = len(new_tensors)
                new_tensors.append(changed(known[old], id=len(new_tensors), consumers=[], producer=None))
    for region in graph.regions:  # a literal branch index belongs to no operation
        old_index = region.index
        if old_index is not None and known[old_index].literal is not None and old_index not in tensor_ids:
            tensor_ids[old_index] = len(new_tensors)
            new_tensors.append(changed(known[old_index], id=len(new_tensors), consumers=[], producer=None))
    new_ops = []
    for i, op in enumerate(ops):
        inputs = tuple([tensor_ids[t] for t in op.inputs])
        outputs = tuple([tensor_ids[t] for t in op.outputs])
        params = op.params
        if op.primitive == "hub":
            params = {**params, "of": inputs[0], "first": op_ids.get(params["first"])}
        new_ops.append(changed(op, id=i, inputs=inputs, outputs=outputs, params=params))
        for position, t in enumerate(inputs):
            new_tensors[t].consumers.append((i, position))
        for position, t in enumerate(outputs):
            tensor = new_tensors[t]
            tensor.producer, tensor.result_index = i, position

    def kept(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(op_ids[i] for i in old if i in op_ids)

    regions = [
        changed(
            r,
            invariants=kept(r.invariants),
            carries=kept(r.carries),
            slices=kept(r.slices),
            stacks=kept(r.stacks),
            merges=kept(r.merges),
            condition=None if r.condition is None else op_ids.get(r.condition),
            index=None if r.index is None else tensor_ids.get(r.index),
        )
        for r in graph.regions
    ]
    arguments, results = list(kept(graph.arguments)), list(kept(graph.results))
    aliases = [(op_ids[r], op_ids[a]) for r, a in graph.aliases]
    return Graph(new_ops, new_tensors, arguments, results, aliases, regions)


def insert_hubs(graph: Graph, min_elements: int = MIN_HUB_ELEMENTS) -> Graph:
    """Puts a ``hub`` between a tensor and its consumers wherever one resharded copy may serve several of them.

    Within one region, a tensor gets a hub for every phase in which it has two or more consuming operations, and, when
    both the forward and the backward phase consume it, a hub for each of these two. The hub stands right before the
    first consumer of its phase. Its params: ``of`` (tensor id), ``phase``, and ``first``: op id of the forward hub of
    the same tensor and region for a backward hub, else None.

    Args:
        graph: not modified.
        min_elements: tensors with fewer elements get no hub.
    """
    tensors = dict(enumerate(graph.tensors))
    ops = {op.id: op for op in graph.ops}
    before: dict[int, list[Op]] = {}  # op id -> hubs that stand right before it
    next_op = len(graph.ops)
    for tensor in graph.tensors:
        if len(tensor.consumers) < 2 or tensor.literal is not None or not tensor.shape:
            continue
        if math.prod(tensor.shape) < min_elements:
            continue
        groups: dict[int, dict[str, list[int]]] = {}
        for consumer in dict.fromkeys(op_id for op_id, _ in tensor.consumers):
            op = graph.ops[consumer]
            if op.primitive not in _NOT_BEHIND_HUBS:
                groups.setdefault(op.region, {}).setdefault(op.phase, []).append(consumer)
        for phases in groups.values():
            both = {"forward", "backward"} <= phases.keys()
            hubs: dict[str, int] = {}
            for phase in ("forward", "backward", "update"):
                consumers = sorted(phases.get(phase, ()))
                if len(consumers) < (1 if both and phase != "update" else 2):
                    continue
                first_consumer = graph.ops[consumers[0]]
                out = changed(tensor, id=len(tensors))
                tensors[out.id] = out
                hubs[phase] = next_op
                hub = changed(
                    first_consumer,
                    id=next_op,
                    primitive="hub",
                    inputs=(tensor.id,),
                    outputs=(out.id,),
                    params={
                        "of": tensor.id,
                        "phase": phase,
                        "first": hubs.get("forward") if phase == "backward" else None,
                    },
                    eqn=None,
                )
                next_op += 1
                before.setdefault(consumers[0], []).append(hub)
                for c in consumers:
                    inputs = tuple(out.id if t == tensor.id else t for t in ops[c].inputs)
                    ops[c] = changed(ops[c], inputs=inputs)
    order: list[Op] = []
    for op_id, op in ops.items():
        order.extend(before.get(op_id, ()))
        order.append(op)
    return assemble(graph, order, tensors)

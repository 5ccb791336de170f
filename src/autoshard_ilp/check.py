"""Invariants of the values that pass between stages, as a table: a name, and what must hold.

Each check yields a line for every violation; :func:`check_graph` raises with the invariant's name and the first few.
They hold for every graph that :mod:`autoshard_ilp.graph` makes, so a failure is a mistake in this package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from autoshard_ilp.graph import PSEUDO_OPERATIONS, Graph, Op

PHASES = ("forward", "backward", "update")


class BrokenInvariant(AssertionError):
    """A stage handed over something that it promised never to make. ``invariant`` is its name in the table."""

    def __init__(self, invariant: str, violations: list[str]) -> None:
        shown = "; ".join(violations[:3])
        super().__init__(f"graph invariant {invariant!r} is broken {len(violations)} time(s): {shown}")
        self.invariant = invariant


def _ids(g: Graph) -> Iterator[str]:
    for what, items in (("op", g.ops), ("tensor", g.tensors), ("region", g.regions)):
        yield from (f"{what} {x.id} stands at index {i}" for i, x in enumerate(items) if x.id != i)  # type: ignore[attr-defined]


def _producers(g: Graph) -> Iterator[str]:
    for t in g.tensors:
        if (t.producer is None) != (t.literal is not None):
            yield f"tensor {t.id} has producer {t.producer} and literal {t.literal!r}"
        elif t.producer is not None and g.ops[t.producer].outputs[t.result_index : t.result_index + 1] != (t.id,):
            yield f"tensor {t.id} is not result {t.result_index} of op {t.producer}"
    for op in g.ops:
        yield from (
            f"result {t} of op {op.id} has another producer" for t in op.outputs if g.tensors[t].producer != op.id
        )


def _consumers(g: Graph) -> Iterator[str]:
    wanted = Counter((op.id, i, t) for op in g.ops for i, t in enumerate(op.inputs))
    listed = Counter((op_id, i, t.id) for t in g.tensors for op_id, i in t.consumers)
    yield from (f"(op, operand, tensor) {c} is listed by only one side" for c in (wanted - listed) + (listed - wanted))


def _order(g: Graph) -> Iterator[str]:
    for op in g.ops:
        for i, t in enumerate(op.inputs):
            producer = g.tensors[t].producer
            at_the_end = op.primitive == "loop_carry" and i == 1
            if producer is not None and producer >= op.id and not at_the_end:
                yield f"op {op.id} ({op.primitive}) reads tensor {t} before op {producer} makes it"


def _ends(g: Graph) -> Iterator[str]:
    for what, ids in (("argument", g.arguments), ("result", g.results)):
        for position, i in enumerate(ids):
            if g.ops[i].primitive != what or g.ops[i].position != position:
                yield f"{what} {position} is op {i} ({g.ops[i].primitive}, position {g.ops[i].position})"
        extra = [op.id for op in g.ops if op.primitive == what and op.id not in set(ids)]
        yield from (f"op {i} is an unlisted {what}" for i in extra)


def _aliases(g: Graph) -> Iterator[str]:
    for result, argument in g.aliases:
        new, old = g.tensors[g.ops[result].inputs[0]], g.tensors[g.ops[argument].outputs[0]]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            yield f"result {new.shape} {new.dtype} cannot replace argument {old.shape} {old.dtype}"


_ARITY = {  # primitive: (operands, results); None: any number
    "argument": (0, 1),
    "constant": (0, 1),
    "result": (1, 0),
    "loop_slice": (1, 1),
    "loop_stack": (1, 1),
    "loop_invariant": (1, 1),
    "loop_carry": (2, 2),
    "while_cond": (None, 0),
    "branch_merge": (None, 1),
    "hub": (1, 1),
    "recompute": (1, 1),
}


def _arity(g: Graph) -> Iterator[str]:
    for op in g.ops:
        if op.primitive in PSEUDO_OPERATIONS:
            operands, results = _ARITY[op.primitive]
            if operands not in (None, len(op.inputs)) or results != len(op.outputs):
                yield f"op {op.id} ({op.primitive}) has {len(op.inputs)} operands and {len(op.outputs)} results"
        elif op.eqn is None and op.primitive != "optimization_barrier":
            yield f"op {op.id} ({op.primitive}) has no equation"


def _shapes(g: Graph) -> Iterator[str]:
    for op in g.ops:
        ins, outs = [g.tensors[t].shape for t in op.inputs], [g.tensors[t].shape for t in op.outputs]
        if op.primitive in ("loop_invariant", "hub", "recompute", "loop_carry", "branch_merge", "optimization_barrier"):
            same = ins == outs if op.primitive == "optimization_barrier" else len({*ins, *outs}) == 1
        elif op.primitive == "loop_slice":
            same = ins[0] == (op.params["length"], *outs[0])
        elif op.primitive == "loop_stack":
            same = outs[0] == (op.params["length"], *ins[0])
        else:
            continue
        if not same:
            yield f"op {op.id} ({op.primitive}) maps {ins} to {outs}"


def _regions(g: Graph) -> Iterator[str]:
    for r in g.regions[1:]:
        if not 0 <= r.parent < r.id:
            yield f"region {r.id} lies in region {r.parent}"
        elif (r.kind == "branch") != (g.regions[r.parent].kind == "cond"):
            yield f"region {r.id} ({r.kind}) lies in region {r.parent} ({g.regions[r.parent].kind})"
    for op in g.ops:
        if not 0 <= op.region < len(g.regions) or g.regions[op.region].kind == "cond":
            yield f"op {op.id} lies in region {op.region}"
        elif op.count != g.regions[op.region].count:
            yield f"op {op.id} runs {op.count} times, its region {g.regions[op.region].count}"


def _visible(g: Graph, op: Op, tensor: int) -> bool:
    """Whether an op may read a tensor: its own region's, or, from a branch, one of the region around the cond."""
    producer = g.tensors[tensor].producer
    if producer is None:
        return True
    home = g.ops[producer]
    made_in = g.regions[home.region].parent if home.primitive == "loop_stack" else home.region
    inside = op.region
    if home.primitive == "loop_invariant" or (home.primitive == "loop_carry" and tensor == home.outputs[0]):
        made_in = home.params["region"]
    while inside != made_in and g.regions[inside].kind in ("branch", "cond"):
        inside = g.regions[inside].parent
    return inside == made_in


def _nesting(g: Graph) -> Iterator[str]:
    for op in g.ops:
        for i, t in enumerate(op.inputs):
            if op.primitive == "loop_slice":
                outside = Op(op.id, op.primitive, (), (), region=g.regions[op.region].parent)
                fine = _visible(g, outside, t)
            elif op.primitive == "loop_carry" and i == 1:
                fine = _visible(g, Op(op.id, op.primitive, (), (), region=op.params["region"]), t)
            elif op.primitive == "branch_merge":
                branch = g.regions[op.params["region"]].branches[i]
                fine = _visible(g, Op(op.id, op.primitive, (), (), region=branch), t)
            else:
                fine = _visible(g, op, t)
            if not fine:
                yield f"op {op.id} ({op.primitive}) of region {op.region} cannot see tensor {t}"


def _contiguous(g: Graph) -> Iterator[str]:
    left: set[int] = set()
    inside: set[int] = set()
    for op in g.ops:
        now = set(g.ancestors(op.region))
        yield from (f"op {op.id} returns to region {r}" for r in now & left)
        left |= inside - now
        inside = now


def _records(g: Graph) -> Iterator[str]:
    roles = {"invariants": "loop_invariant", "carries": "loop_carry", "slices": "loop_slice"}
    roles |= {"stacks": "loop_stack", "merges": "branch_merge"}
    for name, primitive in roles.items():
        listed = [(i, r.id) for r in g.regions for i in getattr(r, name)]
        wanted = [(op.id, op.params["region"]) for op in g.ops if op.primitive == primitive]
        if sorted(listed) != sorted(wanted):
            yield f"regions list the {primitive} ops {sorted(set(listed) ^ set(wanted))[:3]} wrongly"


def _hubs(g: Graph) -> Iterator[str]:
    for op in g.ops:
        if op.primitive == "hub":
            first = op.params["first"]
            if op.params["of"] != op.inputs[0] or op.params["phase"] != op.phase:
                yield f"hub {op.id} of tensor {op.inputs[0]}, phase {op.phase}, says {dict(op.params)}"
            elif first is not None and (
                g.ops[first].inputs != op.inputs
                or g.ops[first].region != op.region
                or (g.ops[first].phase, op.phase) != ("forward", "backward")
            ):
                yield f"hub {op.id} follows op {first}"


def _phases(g: Graph) -> Iterator[str]:
    yield from (f"op {op.id} has phase {op.phase!r}" for op in g.ops if op.phase not in PHASES)


GRAPH_INVARIANTS: dict[str, Callable[[Graph], Iterator[str]]] = {
    "ids are indices": _ids,
    "every tensor has one producer or is a literal": _producers,
    "consumers mirror operands": _consumers,
    "phases are known": _phases,
    "pseudo-operations have their number of operands": _arity,
    "arguments and results stand by position": _ends,
    "operands are made before they are read": _order,
    "aliases have equal types": _aliases,
    "pseudo-operations keep shapes": _shapes,
    "regions nest": _regions,
    "regions are contiguous": _contiguous,
    "operands are visible from their region": _nesting,
    "region records match operations": _records,
    "hubs know their tensor": _hubs,
}


def check_graph(graph: Graph) -> None:
    """Checks every invariant of :data:`GRAPH_INVARIANTS`.

    Raises:
        BrokenInvariant: with the name of the first invariant that does not hold.
    """
    for name, invariant in GRAPH_INVARIANTS.items():
        violations = list(invariant(graph))
        if violations:
            raise BrokenInvariant(name, violations)

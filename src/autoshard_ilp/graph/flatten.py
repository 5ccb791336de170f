"""From a jaxpr to a :class:`~autoshard_ilp.graph.Graph`: calls inlined, loops and branches made regions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.graph import Graph, Op, Region, Tensor, assemble
from autoshard_ilp.graph.rewrites import REWRITTEN, rewrite
from autoshard_ilp.graph.trip_counts import as_integer, counted_loop

_TRANSPOSED = re.compile(r"(?:^|[/(])transpose\(")
_DIFFERENTIATED = re.compile(r"(?:^|[/(])jvp\(")
_TRANSFORM = re.compile(r"^(\w+)\((.*)\)$")
#: Names that JAX itself adds to a name stack, not a layer; so are the equations of einsum ("ij,jk->ik").
_NOT_A_LAYER = frozenset({"rematted_computation", "checkpoint", ""})


@dataclass(frozen=True)
class _Context:
    """Where in the nest of calls and loops an equation stands."""

    region: int
    count: float
    outer: Any  # name stack of the enclosing calls and loops, from the root of the step
    local: Any  # the same, from the enclosing loop body on


class _Flattener:
    """Collects operations; one instance per graph."""

    def __init__(self, while_trip_count: int | None) -> None:
        self.ops: list[Op] = []
        self.stacks: list[str] = []  # per op: its whole name stack
        self.tensors: list[Tensor] = []
        self.regions = [Region(0, "top")]
        self.effectful: list[int] = []
        self.while_trip_count = while_trip_count
        self._invariants: dict[tuple[int, int], int] = {}  # (loop region, tensor outside) -> tensor inside

    # -- tensors and operations

    def tensor(self, aval: Any, literal: Any = None) -> int:
        name, size = compat.dtype_name_and_size(getattr(aval, "dtype", None))
        shape = tuple(getattr(aval, "shape", ()))
        self.tensors.append(Tensor(len(self.tensors), shape, name, size, literal=literal))
        return len(self.tensors) - 1

    def like(self, tensor: int, shape: tuple[int, ...] | None = None) -> int:
        t = self.tensors[tensor]
        self.tensors.append(Tensor(len(self.tensors), t.shape if shape is None else shape, t.dtype, t.itemsize))
        return len(self.tensors) - 1

    def emit(
        self, primitive: str, inputs: Sequence[int], outputs: Sequence[int], ctx: _Context, eqn: Any = None, **more: Any
    ) -> Op:
        stack, local = ctx.outer, ctx.local
        if eqn is not None and eqn.source_info.name_stack.stack:
            stack, local = stack + eqn.source_info.name_stack, local + eqn.source_info.name_stack
        op = Op(
            len(self.ops),
            primitive,
            tuple(inputs),
            tuple(outputs),
            region=ctx.region,
            count=ctx.count,
            name_stack=local,
            **more,
        )
        self.ops.append(op)
        self.stacks.append(str(stack))
        return op

    def constant(self, value: Any, aval: Any, ctx: _Context) -> int:
        if not np.shape(value):
            return self.tensor(aval, literal=value)
        out = self.tensor(aval)
        self.emit("constant", (), (out,), ctx, params={"value": value})
        return out

    def read(self, env: dict[Any, int], atom: Any, ctx: _Context) -> int:
        if compat.is_literal(atom):
            return self.constant(atom.val, atom.aval, ctx)
        return env[atom]

    def invariant(self, tensor: int, region: Region, ctx: _Context, eqn: Any) -> int:
        """The tensor inside a loop body that stands for one outside; literals need none."""
        if self.tensors[tensor].literal is not None:
            return tensor
        key = (region.id, tensor)
        if key not in self._invariants:
            out = self.like(tensor)
            op = self.emit("loop_invariant", (tensor,), (out,), ctx, eqn, params={"region": region.id})
            region.invariants += (op.id,)
            self._invariants[key] = out
        return self._invariants[key]

    # -- jaxprs

    def inline(self, jaxpr: Any, constants: Sequence[int], args: Sequence[int], ctx: _Context) -> list[int]:
        """Emits the equations of an open jaxpr; returns the tensors of its results."""
        env: dict[Any, int] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [self.read(env, v, ctx) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, inputs, ctx), strict=True))
        return [self.read(env, v, ctx) for v in jaxpr.outvars]

    def constants(self, jaxpr: Any, values: Sequence[Any], ctx: _Context) -> list[int]:
        return [self.constant(c, v.aval, ctx) for c, v in zip(values, jaxpr.constvars, strict=True)]

    def equation(self, eqn: Any, inputs: list[int], ctx: _Context) -> list[int]:
        name = eqn.primitive.name
        if name in compat.LAYOUT_ONLY:
            return inputs
        called = compat.called_jaxpr(name, eqn.params)
        if called is not None:
            jaxpr, values, operands = called
            inputs = [t for part in operands for t in inputs[part]]
            if name in compat.REMAT_PRIMITIVES:
                inputs = self.remat_barrier(eqn, inputs, ctx)
            return self.inline(jaxpr, self.constants(jaxpr, values, ctx), inputs, self.below(eqn, ctx))
        if name == "scan":
            return self.scan(eqn, inputs, ctx)
        if name == "while" and not compat.decides_by_element(eqn):
            return self.while_loop(eqn, inputs, ctx)
        if name == "cond" and eqn.params.get("branches_platforms") is None:
            return self.cond(eqn, inputs, ctx)
        equal = compat.in_order(eqn) if eqn.effects else None
        if name in REWRITTEN:
            equal = rewrite(name, eqn.params, [v.aval for v in eqn.invars], eqn.outvars[0].aval.shape)
        if equal is not None:
            jaxpr, values = compat.open_jaxpr(compat.trace_like(eqn, equal))
            return self.inline(jaxpr, self.constants(jaxpr, values, ctx), inputs, self.below(eqn, ctx))
        outputs = [self.tensor(v.aval) for v in eqn.outvars]
        op = self.emit(name, inputs, outputs, ctx, eqn, params=eqn.params)
        op.eqn = eqn
        if eqn.effects:
            self.effectful.append(op.id)
        return outputs

    def below(self, eqn: Any, ctx: _Context) -> _Context:
        """The context of what an equation calls in place."""
        stack = eqn.source_info.name_stack
        return replace(ctx, outer=ctx.outer + stack, local=ctx.local + stack) if stack.stack else ctx

    def remat_barrier(self, eqn: Any, inputs: list[int], ctx: _Context) -> list[int]:
        """The barrier that JAX's own lowering puts over a rematerialised computation, so XLA cannot undo it."""
        prevent = eqn.params.get("prevent_cse", True)
        prevent = (prevent,) * len(inputs) if isinstance(prevent, bool) else prevent
        barred = [i for i, (t, p) in enumerate(zip(inputs, prevent, strict=True)) if p and self.is_value(t)]
        if not eqn.params.get("differentiated", False) or not barred:
            return inputs
        outputs = {i: self.like(inputs[i]) for i in barred}
        self.emit("optimization_barrier", [inputs[i] for i in barred], list(outputs.values()), ctx, eqn)
        return [outputs.get(i, t) for i, t in enumerate(inputs)]

    def is_value(self, tensor: int) -> bool:
        return self.tensors[tensor].literal is None and self.tensors[tensor].dtype != "token"

    # -- regions

    def enter(self, kind: str, eqn: Any, ctx: _Context, trip_count: int = 1, **params: Any) -> tuple[Region, _Context]:
        """A new region inside ``ctx`` and the context of its body."""
        stack = eqn.source_info.name_stack
        count = ctx.count * trip_count
        region = Region(len(self.regions), kind, ctx.region, count, trip_count, params, name_stack=ctx.local + stack)
        self.regions.append(region)
        return region, _Context(region.id, count, ctx.outer + stack, compat.empty_name_stack())

    def carry(self, region: Region, initial: int, aval: Any, ctx: _Context, eqn: Any) -> Op:
        """A loop_carry whose second operand (the value at the end of the body) is filled in later."""
        outputs = (self.tensor(aval), self.tensor(aval))
        op = self.emit("loop_carry", (initial, initial), outputs, ctx, eqn, params={"region": region.id})
        region.carries += (op.id,)
        return op

    def scan(self, eqn: Any, inputs: list[int], ctx: _Context) -> list[int]:
        p = eqn.params
        length = p["length"]
        n_consts, n_carry = compat.scan_sizes(p)
        jaxpr, values = compat.open_jaxpr(p["jaxpr"])
        region, body = self.enter("scan", eqn, ctx, length, reverse=p["reverse"], unroll=p["unroll"])
        captured = [self.invariant(c, region, ctx, eqn) for c in self.constants(jaxpr, values, ctx)]
        consts = [self.invariant(t, region, ctx, eqn) for t in inputs[:n_consts]]
        carried = zip(inputs[n_consts : n_consts + n_carry], jaxpr.invars[n_consts:], strict=False)
        carries = [self.carry(region, t, v.aval, ctx, eqn) for t, v in carried]
        slices = []
        for xs in inputs[n_consts + n_carry :]:
            x = self.like(xs, self.tensors[xs].shape[1:])
            op = self.emit("loop_slice", (xs,), (x,), body, params={"region": region.id, "length": length})
            region.slices += (op.id,)
            slices.append(x)
        ends = self.inline(jaxpr, captured, [*consts, *(c.outputs[0] for c in carries), *slices], body)
        for c, end in zip(carries, ends, strict=False):
            c.inputs = (c.inputs[0], end)
        outputs = [c.outputs[1] for c in carries]
        for y in ends[n_carry:]:
            ys = self.like(y, (length, *self.tensors[y].shape))
            op = self.emit("loop_stack", (y,), (ys,), body, params={"region": region.id, "length": length})
            region.stacks += (op.id,)
            outputs.append(ys)
        return outputs

    def trips(self, params: Mapping[str, Any], inputs: Sequence[int]) -> tuple[int, str]:
        """Iterations that a while loop is priced at, and where they come from."""
        if self.while_trip_count is not None:
            return self.while_trip_count, "declared"
        found = counted_loop(params, [self.integer(t) for t in inputs])
        if found is None:
            return 1, "unknown"
        return found.iterations, "exact" if found.exact else "bound"

    def integer(self, tensor: int) -> int | None:
        """The integer that a tensor is known to be while tracing, seen through conversions."""
        while self.tensors[tensor].literal is None:
            maker = next((op for op in reversed(self.ops) if tensor in op.outputs), None)
            if maker is None or maker.primitive not in ("convert_element_type", "copy", "broadcast_in_dim"):
                return None
            tensor = maker.inputs[0]
        return as_integer(self.tensors[tensor].literal)

    def while_loop(self, eqn: Any, inputs: list[int], ctx: _Context) -> list[int]:
        p = eqn.params
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        jaxpr, values = compat.open_jaxpr(p["body_jaxpr"])
        trips, source = self.trips(p, inputs)
        region, body = self.enter("while", eqn, ctx, trips, counted=source)
        captured = [self.invariant(c, region, ctx, eqn) for c in self.constants(jaxpr, values, ctx)]
        cond_consts = [self.invariant(t, region, ctx, eqn) for t in inputs[:n_cond]]
        body_consts = [self.invariant(t, region, ctx, eqn) for t in inputs[n_cond : n_cond + n_body]]
        initial = zip(inputs[n_cond + n_body :], jaxpr.invars[n_body:], strict=True)
        carries = [self.carry(region, t, v.aval, ctx, eqn) for t, v in initial]
        inside = [c.outputs[0] for c in carries]
        used = compat.used_inputs(p["cond_jaxpr"])
        operands = [*cond_consts, *inside]
        params = {"region": region.id, "jaxpr": p["cond_jaxpr"], "used": used, "n_operands": len(operands)}
        condition = self.emit("while_cond", [operands[i] for i in used], (), body, params=params)
        region.condition = condition.id
        ends = self.inline(jaxpr, captured, [*body_consts, *inside], body)
        for c, end in zip(carries, ends, strict=True):
            c.inputs = (c.inputs[0], end)
        return [c.outputs[1] for c in carries]

    def cond(self, eqn: Any, inputs: list[int], ctx: _Context) -> list[int]:
        region, inside = self.enter("cond", eqn, ctx)
        region.index = inputs[0]
        inside = replace(inside, region=region.id)
        ends = []
        for closed in eqn.params["branches"]:
            jaxpr, values = compat.open_jaxpr(closed)
            branch = Region(len(self.regions), "branch", region.id, ctx.count, name_stack=inside.local)
            self.regions.append(branch)
            region.branches += (branch.id,)
            within = replace(inside, region=branch.id)
            ends.append(self.inline(jaxpr, self.constants(jaxpr, values, within), inputs[1:], within))
        outputs = []
        for v, *operands in zip(eqn.outvars, *ends, strict=True):
            out = self.tensor(v.aval)
            op = self.emit("branch_merge", operands, (out,), ctx, eqn, params={"region": region.id})
            region.merges += (op.id,)
            outputs.append(out)
        return outputs


def build_graph(
    closed_jaxpr: Any,
    *,
    argument_paths: Sequence[str],
    result_paths: Sequence[str],
    aliases: Mapping[int, int] | None = None,
    while_trip_count: int | None = None,
) -> Graph:
    """Flattens a closed jaxpr into a :class:`Graph`, without the operations that nothing needs.

    Args:
        closed_jaxpr: of the whole step.
        argument_paths: a path per argument.
        result_paths: a path per result.
        aliases: result position -> position of the argument that it replaces (donated state).
        while_trip_count: iterations of every while loop; None: what its own constants say, else 1.

    Raises:
        InputShapeError: the number of paths is not the number of arguments or results, or an alias is out of range.
    """
    aliases = dict(aliases or {})
    jaxpr, values = compat.open_jaxpr(closed_jaxpr)
    for what, paths, atoms in (("argument", argument_paths, jaxpr.invars), ("result", result_paths, jaxpr.outvars)):
        if len(paths) != len(atoms):
            raise InputShapeError(
                f"Every {what} of the step needs one path. Received {len(paths)} paths for {len(atoms)} {what}s; "
                f"flatten the {what}s of the traced function and name each leaf."
            )
    if any(not 0 <= r < len(result_paths) or not 0 <= a < len(argument_paths) for r, a in aliases.items()):
        raise InputShapeError(
            f"aliases map a result position below {len(result_paths)} to an argument position below "
            f"{len(argument_paths)}. Received: {dict(aliases)}."
        )
    f = _Flattener(while_trip_count)
    empty = compat.empty_name_stack()
    top = _Context(0, 1.0, empty, empty)
    args = []
    for position, (v, path) in enumerate(zip(jaxpr.invars, argument_paths, strict=True)):
        args.append(f.tensor(v.aval))
        f.emit("argument", (), args[-1:], top, position=position, path=path)
    arguments = list(range(len(args)))
    ends = f.inline(jaxpr, f.constants(jaxpr, values, top), args, top)
    results = []
    for position, (t, path) in enumerate(zip(ends, result_paths, strict=True)):
        results.append(f.emit("result", (t,), (), top, position=position, path=path).id)
    _set_scopes_and_phases(f)
    pairs = [(results[r], arguments[a]) for r, a in sorted(aliases.items())]
    whole = Graph(f.ops, f.tensors, arguments, results, pairs, f.regions)
    return assemble(whole, _needed(whole, f.effectful))


def _needed(graph: Graph, effectful: Sequence[int]) -> list[Op]:
    """Operations that a result or an effect depends on, and all arguments, in order."""
    producer: dict[int, int] = {t: op.id for op in graph.ops for t in op.outputs}
    live = [False] * len(graph.ops)
    regions_seen = {0}
    todo = [*graph.arguments, *graph.results, *effectful]
    while todo:
        op = graph.ops[todo.pop()]
        if live[op.id]:
            continue
        live[op.id] = True
        todo.extend(producer[t] for t in op.inputs if t in producer)
        inside = op.params["region"] if op.primitive in ("loop_carry", "branch_merge") else op.region
        while inside not in regions_seen:
            regions_seen.add(inside)
            region = graph.regions[inside]
            if region.condition is not None:
                todo.append(region.condition)
            if region.index in producer:
                todo.append(producer[region.index])
            inside = region.parent
    return [op for op in graph.ops if live[op.id]]


@cache
def layer_path(name_stack: str) -> str:
    """The layer path in a JAX name stack: ``"transpose(jvp(net))/dense/dot"`` is ``"net/dense/dot"``.

    A part that starts with a transformation and repeats the path so far (as rematerialisation writes it,
    ``"transpose(jvp(net))/jvp(net)/dense"``) is counted once.
    """
    path: list[str] = []
    group: list[str] = []
    for name in _split(name_stack):
        transformed = False
        while (match := _TRANSFORM.match(name)) is not None:
            transformed = True
            name = "" if match.group(1) in ("jit", "pjit") else match.group(2)
        if transformed:
            path, group = _join(path, group), []
        group.extend(part for part in name.split("/") if part not in _NOT_A_LAYER and "->" not in part)
    return "/".join(_join(path, group))


def _split(name_stack: str) -> list[str]:
    """Splits at the slashes outside of parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(name_stack):
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append(name_stack[start:i])
            start = i + 1
    return [*parts, name_stack[start:]]


def _join(path: list[str], group: list[str]) -> list[str]:
    return group if path and group[: len(path)] == path else path + group


def _set_scopes_and_phases(f: _Flattener) -> None:
    transposed = [bool(_TRANSPOSED.search(s)) for s in f.stacks]
    has_gradient = any(transposed)
    seen_backward = False
    for op, stack, backward in zip(f.ops, f.stacks, transposed, strict=True):
        seen_backward |= backward
        op.scope = layer_path(stack)
        if backward:
            op.phase = "backward"
        elif has_gradient and seen_backward and not _DIFFERENTIATED.search(stack):
            op.phase = "update"
        else:
            op.phase = "forward"

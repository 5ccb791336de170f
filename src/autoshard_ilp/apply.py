"""Runs the graph of a step with the layouts that a plan decided.

The interpreter binds every equation of the graph again, in program order, under its own name scope and source line, and
puts ``jax.lax.with_sharding_constraint`` where a layout was decided. Loops and branches are rebuilt with ``lax.scan``,
``lax.while_loop`` and ``lax.switch``, with the constraints of their bodies inside. What XLA's partitioner would gather
although its rule shards it (:mod:`autoshard_ilp.rules.local`) runs device by device, under ``shard_map``, and so do the
collectives that it would replace by others (:mod:`autoshard_ilp.manual`).

Gather once or gather again: XLA merges two equal all-gathers of one weight and so keeps the gathered copy alive from
the forward to the backward pass. A hub that must gather again therefore first ties the *sharded* value to a value that
exists only in the backward pass (:mod:`autoshard_ilp.ties`). The constraint on the tied value keeps it sharded: else
propagation would move the gather in front of the tie. What is recomputed is tied alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp import manual, rewrites, ties
from autoshard_ilp.bounds import within_bounds
from autoshard_ilp.costs.combining import THRESHOLD_BYTES, known_from_the_start
from autoshard_ilp.costs.masks import met_by_random_bits
from autoshard_ilp.costs.precision import cast_before_collectives
from autoshard_ilp.cuts import computed_as_read, cut_for, is_cut
from autoshard_ilp.errors import InputShapeError, PlanMismatchError
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Graph, Op, Region
from autoshard_ilp.inplace import waiting_updates
from autoshard_ilp.order import SCATTERED_ONLY, order_of
from autoshard_ilp.repeated import made_as_read, unequal_broadcasts
from autoshard_ilp.rules import OpView, axes_of_factors, rule_for, run_locally, runs_locally
from autoshard_ilp.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    divides,
    local_bytes,
    local_shape,
    replicated,
    to_partition_spec,
)


@dataclass(frozen=True)
class Decisions:
    """Layouts to enforce; what is absent is left to XLA's propagation.

    Attributes:
        operands: (op id, operand index) -> the layout in which the op reads that operand.
        results: (op id, result index) -> the layout of that result; for ``argument`` ops, how the argument arrives.
        regather: ids of backward hubs that gather again instead of sharing the copy of their forward hub.
        via: (op id, operand index) -> layouts to pass through on the way, in order. A partitioner asked for several
            changes at once may gather the whole tensor; one step at a time it does what was priced.
    """

    operands: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    results: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    regather: frozenset[int] = frozenset()
    via: Mapping[tuple[int, int], tuple[Layout, ...]] = field(default_factory=dict)
    waits: frozenset[tuple[int, int]] = frozenset()


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with every axis of type Auto, as ``with_sharding_constraint`` needs.

    Raises:
        InputShapeError: ``mesh`` is no mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise InputShapeError(f"A mesh must be a jax.sharding.Mesh or AbstractMesh. Received: {type(mesh).__name__}.")
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def planned_function(
    graph: Graph, decisions: Decisions, mesh: Mesh | AbstractMesh, axis_names: Sequence[str], *, marked: bool = False
) -> Callable[..., list[Any]]:
    """The step as a function of its flat arguments, to be called under ``jax.jit``.

    Args:
        graph: of the step, hubs included if ``decisions`` was made with them.
        decisions: layouts to enforce.
        mesh: where the constraints refer to; axes of another type than Auto are taken as Auto.
        axis_names: the mesh axis behind each entry of a layout.
        marked: add the number of every operation to its name scope (:func:`mark`), so that a compiled program tells
            which operation an instruction comes from; nothing else changes.

    Returns:
        ``f(*arguments) -> list of results``, in the order of the graph's arguments and results.

    Raises:
        InputShapeError: ``mesh`` is no mesh, or does not have ``axis_names``.
        PlanMismatchError: (from the function) it was called with another number of arguments.
    """
    mesh = auto_mesh(mesh)
    missing = [name for name in axis_names if name not in mesh.axis_names]
    if missing:
        raise InputShapeError(f"Layouts refer to mesh axes {missing}, but the mesh has axes {tuple(mesh.axis_names)}.")
    plan = _Plan(graph, decisions, mesh, tuple(axis_names), marked)

    def step(*arguments: Any) -> list[Any]:
        if len(arguments) != len(graph.arguments):
            raise PlanMismatchError(
                f"The planned step takes {len(graph.arguments)} flat arguments. Received: {len(arguments)}."
            )
        return _Run(plan, arguments).results()

    return step


def mark(op_id: int) -> str:
    """The name scope of an operation in a marked program; :mod:`autoshard_ilp.verify.diff` reads it back."""
    return f"op.{op_id}"


class _Plan:
    """What does not change between two traces of one planned function."""

    def __init__(
        self,
        graph: Graph,
        decisions: Decisions,
        mesh: Mesh | AbstractMesh,
        axis_names: tuple[str, ...],
        marked: bool = False,
    ) -> None:
        operands, results = made_as_read(graph, decisions.operands, decisions.results)
        decisions = replace(decisions, operands=operands, results=results)
        self.graph, self.decisions, self.mesh, self.axis_names = graph, decisions, mesh, axis_names
        self.marked = marked
        self.platform = platform = compat.platform_of(mesh)
        self.gradients = _gradients(graph) if platform == "tpu" else frozenset()
        self.order = order_of(graph, platform)
        self.updates = waiting_updates(graph, platform)
        self.readers = frozenset(wait.reader for wait in self.updates.values())
        self.casts = cast_before_collectives(graph) if platform == "gpu" else ("",) * len(graph.ops)
        self.broadcasts = unequal_broadcasts(graph, platform, self.layout)
        self.as_read = computed_as_read(graph, platform)
        self.pieces = ties.pieces_of_activations(graph, platform)
        self.apart = met_by_random_bits(graph) if platform == "tpu" else frozenset()
        self.schedule = [self.order.of(items) for items in graph.schedule()]
        self.shardings: dict[tuple[Layout, int], NamedSharding] = {}
        self._latest: dict[int, int] | None = None
        self._known: list[bool] | None = None

    def stack(self, op: Op) -> Any:
        """The name stack under which ``op`` runs."""
        return op.name_stack.extend(mark(op.id)) if self.marked and op.name_stack is not None else op.name_stack

    def layout(self, tensor: int) -> Layout | None:
        """The decided layout of a tensor where it is produced."""
        t = self.graph.tensors[tensor]
        return None if t.producer is None else self.decisions.results.get((t.producer, t.result_index))

    def operand_layouts(self, op: Op) -> list[Layout | None]:
        """The decided layouts in which an operation reads its operands."""
        return [self.decisions.operands.get((op.id, i), self.layout(t)) for i, t in enumerate(op.inputs)]

    def constrain(self, value: Any, tensor: int, layout: Layout | None) -> Any:
        """``value`` with a sharding constraint; scalars, keys, partial sums and undecided tensors pass unchanged."""
        rank = len(self.graph.tensors[tensor].shape)
        if layout is None or rank == 0 or PARTIAL in layout or compat.is_key_dtype(getattr(value, "dtype", None)):
            return value
        key = (layout, rank)
        if key not in self.shardings:
            self.shardings[key] = NamedSharding(self.mesh, to_partition_spec(layout, rank, self.axis_names))
        return jax.lax.with_sharding_constraint(value, self.shardings[key])

    def move(self, value: Any, tensor: int, before: Layout | None, after: Layout | None) -> Any:
        """``value`` one step further, from one decided layout to the next, by the collective that was priced."""
        moved = None
        if before and after and before != after and not compat.is_key_dtype(getattr(value, "dtype", None)):
            moved = manual.move(value, before, after, self.mesh, self.axis_names)
        return self.constrain(value, tensor, after) if moved is None else moved

    def stored_order(self, value: Any, tensor: int) -> Any:
        """On TPU, a gradient in the order of dimensions in which its variable is stored.

        XLA:TPU would rather copy the variable and its optimizer's slots into the order that the product which makes the
        gradient likes, hold all copies at once, and copy the new values back. Variables of whole tiles are stored row
        by row; others are left alone. Asked for device by device: on a mesh of three axes the partitioner gathers the
        whole gradient for it.
        """
        layout, shape = self.layout(tensor), self.graph.tensors[tensor].shape
        if tensor not in self.gradients or layout is None or PARTIAL in layout:
            return value
        sizes = [self.mesh.shape[name] for name in self.axis_names]
        local = local_shape(shape, layout, sizes)
        if local[-1] % 128 or local[-2] % 8 or not divides(shape, layout, sizes):
            return value
        spec = to_partition_spec(layout, len(shape), self.axis_names)
        return jax.shard_map(compat.row_major, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(value)

    def anchor(self, op: Op) -> int | None:
        """The gradient that the backward pass has reached before ``op`` may run (:func:`ties.anchors`)."""
        if self._latest is None:
            self._latest = ties.anchors(self.graph, self.platform, self.can_be_looked_at)
        return self._latest.get(op.id)

    def can_be_looked_at(self, tensor: int) -> bool:
        """Whether every device has an equal part of a tensor: else nothing can wait for it (:meth:`_Run.after`)."""
        at = self.sharding(tensor)
        return at is not None and ties.is_even(at, self.graph.tensors[tensor].shape)

    def known(self) -> list[bool]:
        """Per tensor, whether nothing should wait for it, since it is there from the start: on TPU, where the cast of a
        weight is written for the look at it. Other compilers were not tried so."""
        if self._known is None:
            tpu = self.platform == "tpu"
            self._known = known_from_the_start(self.graph) if tpu else [False] * len(self.graph.tensors)
        return self._known

    def sharding(self, tensor: int) -> NamedSharding | None:
        """The decided layout of a tensor where it is produced (partial sums as :mod:`manual` holds them)."""
        layout = self.layout(tensor)
        if layout is None:
            return None
        spec = manual.spec_of(layout, len(self.graph.tensors[tensor].shape), self.axis_names)
        return NamedSharding(self.mesh, spec)


def _gradients(graph: Graph) -> frozenset[int]:
    """Gradients that updates read, where they are computed: before they are converted to the variable's type."""
    found = set()
    for op in graph.ops:
        for t in op.inputs if op.phase == "update" else ():
            producer = graph.tensors[t].producer
            while producer is not None and graph.ops[producer].phase == "backward":
                found.add(t)
                if graph.ops[producer].primitive not in ("convert_element_type", "hub", "copy"):
                    break
                found.discard(t)
                t = graph.ops[producer].inputs[0]
                producer = graph.tensors[t].producer
    return frozenset(
        t for t in found if len(graph.tensors[t].shape) > 1 and graph.tensors[t].dtype.startswith(("float", "bfloat"))
    )


class _Frame:
    """Values of one region; falls back to those of the region around it."""

    def __init__(self, parent: _Frame | None = None) -> None:
        self.parent = parent
        self.values: dict[int, Any] = {}
        self.copies: dict[tuple[int, Layout, str], tuple[Any, Op]] = {}  # with the operation that read it last
        self.ties: dict[int, Any] = {}  # anchor -> scalar that is known once the anchor is
        self.computed: dict[int, Any] = {}  # op whose result something waits for -> scalar known once that is computed

    def get(self, tensor: int) -> Any:
        frame: _Frame | None = self
        while frame is not None:
            if tensor in frame.values:
                return frame.values[tensor]
            frame = frame.parent
        raise KeyError(tensor)

    def has(self, tensor: int) -> bool:
        """Whether a tensor is computed already."""
        return tensor in self.values or (self.parent is not None and self.parent.has(tensor))


class _Run:
    """One trace of the planned step."""

    def __init__(self, plan: _Plan, arguments: Sequence[Any]) -> None:
        self.plan, self.graph, self.arguments = plan, plan.graph, arguments

    def results(self) -> list[Any]:
        top = _Frame()
        self.run(0, top)
        ops = self.graph.ops
        return [self.array(top, ops[r], 0) for r in self.graph.results]

    def run(self, region: int, frame: _Frame) -> None:
        for item in self.plan.schedule[region]:
            if isinstance(item, Region):
                {"scan": self.scan, "while": self.while_loop, "cond": self.cond}[item.kind](item, frame)
            else:
                self.operation(item, frame)

    # -- reading and writing values

    def value(self, frame: _Frame, tensor: int) -> Any:
        literal = self.graph.tensors[tensor].literal
        return frame.get(tensor) if literal is None else literal

    def read(self, frame: _Frame, op: Op, i: int) -> Any:
        """Operand i of ``op`` in the layout in which the op wants it.

        Equal copies are made once where that is free. What every reader gathers for itself was priced so, to hold the
        copy for less long; the later gathers wait for the reader before, or XLA would merge them all.
        """
        tensor = op.inputs[i]
        value = self.value(frame, tensor)
        layout = self.plan.decisions.operands.get((op.id, i))
        if layout is None or layout == self.plan.layout(tensor):
            return value
        key = (tensor, layout, self.plan.casts[op.id])
        copy, reader = frame.copies.get(key, (None, op))
        if reader is not op:
            again = self.behind(frame, op, value, tensor, layout, reader)
            copy = copy if again is None else self.reshard(again, op, i, layout)
        elif copy is None:
            copy = self.cut_before(frame, tensor, layout)
        if copy is None:
            copy = self.reshard(self.held_back(frame, op, i, value, layout), op, i, layout)
        frame.copies[key] = (copy, op)
        return copy

    def cut_before(self, frame: _Frame, tensor: int, layout: Layout) -> Any | None:
        """The part of an elementwise result that a layout cuts from it, computed from its operands' parts
        (:mod:`autoshard_ilp.cuts`); None where it is to be cut itself, or where this is no cut."""
        plan, t = self.plan, self.graph.tensors[tensor]
        sizes = [plan.mesh.shape[name] for name in plan.axis_names]
        if tensor not in plan.as_read or tensor not in frame.values or t.producer is None:
            return None
        made, now = self.graph.ops[t.producer], plan.layout(tensor)
        reads = plan.operand_layouts(made)
        if not is_cut(now, layout, t.shape, sizes) or any(read is not None and PARTIAL in read for read in reads):
            return None
        if made.primitive == "hub":
            same = plan.layout(made.inputs[0]) == now
            return self.cut_before(frame, made.inputs[0], layout) if same else None
        with compat.under_name_stack(plan.stack(made)):
            args = [self.cut_operand(frame, made, i, layout) for i in range(len(made.inputs))]
        specs = [to_partition_spec(cut_for(layout, a.shape), a.ndim, plan.axis_names) for a in args]
        with compat.like_equation(made.eqn, plan.stack(made)):
            return jax.shard_map(
                lambda *parts: compat.bind_equation(made.eqn, parts, plan.stack(made), plan.mesh)[0],
                mesh=plan.mesh,
                in_specs=tuple(specs),
                out_specs=to_partition_spec(layout, len(t.shape), plan.axis_names),
                check_vma=False,
            )(*args)

    def cut_operand(self, frame: _Frame, op: Op, i: int, result: Layout) -> Any:
        """What an elementwise operation needs of operand i for the part of its result that a layout cuts from it."""
        source = op.inputs[i]
        shape, now = self.graph.tensors[source].shape, self.plan.layout(source)
        layout = cut_for(result, shape)
        if not shape or now == layout:
            return self.array(frame, op, i) if not shape else self.value(frame, source)
        key = (source, layout, "")
        if key in frame.copies:
            return frame.copies[key][0]
        part = None
        if self.plan.decisions.operands.get((op.id, i), now) == now:
            part = self.cut_before(frame, source, layout)
        if part is None:
            part = self.plan.constrain(self.read(frame, op, i), source, layout)
        frame.copies[key] = (part, op)
        return part

    def behind(self, frame: _Frame, op: Op, value: Any, tensor: int, layout: Layout, reader: Op) -> Any | None:
        """``value`` that cannot be had before the result of ``reader``; None where one copy for both is as good."""
        now = self.plan.layout(tensor)
        moves = now is not None and any(a != b and a >= 0 for a, b in zip(now, layout, strict=True))
        if not moves or reader.eqn is None or math.prod(self.graph.tensors[tensor].shape) < MIN_HUB_ELEMENTS:
            return None
        return self.after(frame, op, value, tensor, reader.outputs[0])

    def held_back(self, frame: _Frame, op: Op, i: int, value: Any, layout: Layout) -> Any:
        """What the backward pass gathers of the forward pass, not to be had before the backward pass is there.

        Schedulers start collectives as early as they can, and would hold the copy from the forward pass on. Where the
        budget leaves no room for that, what the forward pass gathers waits for the other operand of its reader.
        """
        tensor = op.inputs[i]
        t, now = self.graph.tensors[tensor], self.plan.layout(tensor)
        if (op.id, i) in self.plan.decisions.waits:
            other = ties.beside(self.graph, op, i, self.plan.known())
            tied = None if other is None or not frame.has(other) else self.after(frame, op, value, tensor, other)
            return value if tied is None else tied
        grows = now is not None and any(b == WHOLE and a >= 0 for a, b in zip(now, layout, strict=True))
        source = self.graph.tensors[self.graph.behind(tensor, ("hub",))].producer
        made_before = source is not None and self.graph.ops[source].phase == "forward"
        anchor = self.plan.anchor(op)
        if not grows or not made_before or op.phase != "backward" or anchor is None or t.bytes < ties.MIN_COPY_BYTES:
            return value
        tied = self.after(frame, op, value, tensor, anchor)
        return value if tied is None else tied

    def after(self, frame: _Frame, op: Op, value: Any, tensor: int, anchor: int) -> Any | None:
        """``value`` in its own layout, unavailable before the tensor ``anchor`` is; None where nothing can tie it."""
        plan, at = self.plan, self.plan.sharding(anchor)
        if at is None or not ties.may_anchor(self.graph, anchor) or not ties.can_tie(op, value):
            return None
        made = frame.get(anchor)
        if not ties.is_even(at, made.shape):
            return None
        if anchor not in frame.ties:
            frame.ties[anchor] = ties.never(made, at.spec, plan.mesh)
        return plan.constrain(ties.tied(value, frame.ties[anchor]), tensor, plan.layout(tensor))

    def reshard(self, value: Any, op: Op, i: int, layout: Layout | None) -> Any:
        """``value`` on its way into operand i of ``op``, one decided layout after the other.

        What is cast to 16 bits when it arrives is cast before it leaves, as it was priced: XLA:GPU does so by itself
        only where nothing lies between the collective and the cast.
        """
        plan, tensor = self.plan, op.inputs[i]
        now = plan.layout(tensor)
        if plan.casts[op.id] and layout is not None and now != layout:
            value = value.astype(plan.casts[op.id])
        for after in (*plan.decisions.via.get((op.id, i), ()), layout):
            value, now = plan.move(value, tensor, now, after), after
        return value

    def array(self, frame: _Frame, op: Op, i: int) -> Any:
        """As :meth:`read`; a literal becomes an array of its exact type."""
        value = self.read(frame, op, i)
        tensor = self.graph.tensors[op.inputs[i]]
        return value if tensor.literal is None else jnp.asarray(value, dtype=tensor.dtype)

    def write(self, frame: _Frame, op: Op, j: int, value: Any) -> None:
        layout = self.plan.decisions.results.get((op.id, j))
        value = self.plan.constrain(value, op.outputs[j], layout)
        if op.outputs[j] in self.plan.apart:
            value = jax.lax.optimization_barrier(value)
        frame.values[op.outputs[j]] = self.plan.stored_order(value, op.outputs[j])

    # -- operations

    def operation(self, op: Op, frame: _Frame) -> None:
        if op.primitive == "argument":
            self.write(frame, op, 0, self.arguments[op.position])
        elif op.primitive == "constant":
            self.write(frame, op, 0, jnp.asarray(op.params["value"]))
        elif op.primitive == "hub":
            with compat.under_name_stack(self.plan.stack(op)):
                self.hub(op, frame)
        elif op.primitive == "recompute":
            with compat.under_name_stack(self.plan.stack(op)):
                self.write(frame, op, 0, self.tied(op, frame))
        elif op.primitive == "loop_invariant":
            self.write(frame, op, 0, self.read(frame, op, 0))
        elif op.eqn is not None or op.primitive == "optimization_barrier":
            self.equation(op, frame)
        # What is left is done by the loop or branch that owns it, or is a result.

    def equation(self, op: Op, frame: _Frame) -> None:
        with compat.under_name_stack(self.plan.stack(op)):
            args = [self.in_order(frame, op, i, self.read(frame, op, i)) for i in range(len(op.inputs))]
            if op.primitive == "conv_general_dilated":
                args = self.whole_windows(op, args)
            args = within_bounds(self.graph.view(op), args, self.plan.mesh.size)
        if op.primitive == "optimization_barrier":
            outs = list(jax.lax.optimization_barrier(tuple(args)))
        elif op.primitive == "sharding_constraint":
            outs = args  # the plan replaces constraints written for another mesh
        else:
            outs = self.bind(op, args, frame)
        with compat.under_name_stack(self.plan.stack(op)):
            for j, out in enumerate(outs):
                self.write(frame, op, j, out)
            self.note_computed(op, frame)

    def note_computed(self, op: Op, frame: _Frame) -> None:
        """Remembers how to wait for a metric, for the last reader of a variable, or for a gradient that was not looked
        at before its reduction."""
        reads_last = op.id in self.plan.readers
        if not (reads_last or op.id in self.plan.order.gradients) or op.id in frame.computed:
            return
        value, at = frame.get(op.outputs[0]), self.plan.sharding(op.outputs[0])
        sums, alone = self.partial_sums(op)
        waited = sums or reads_last or op.phase == "update" or self.reads_larger_copies(op)
        if not waited and self.plan.platform in SCATTERED_ONLY:
            return
        if (
            at is not None
            and (alone or not sums or reads_last or op.phase == "update")
            and ties.is_even(at, value.shape)
        ):
            frame.computed[op.id] = ties.never(value, at.spec, self.plan.mesh)

    def reads_larger_copies(self, op: Op) -> bool:
        """Whether copies gathered for an operation take more memory than its result does. Whoever puts it off holds
        them."""
        plan = self.plan
        sizes = [plan.mesh.shape[name] for name in plan.axis_names]

        def held(tensor: int, layout: Layout | None) -> int:
            t = self.graph.tensors[tensor]
            return 0 if layout is None else local_bytes(t.shape, t.itemsize, layout, sizes)

        copies = 0
        for t, layout in zip(op.inputs, plan.operand_layouts(op), strict=True):
            source = self.graph.behind(t, ("hub",))
            read = held(t, layout)
            copies += read if read > held(source, plan.layout(source)) > 0 else 0
        return copies > held(op.outputs[0], plan.layout(op.outputs[0]))

    def partial_sums(self, op: Op) -> tuple[bool, bool]:
        """Whether devices hold partial sums of an operation's result, and whether these are scattered by a collective
        of their own: too large to be combined with others, and to be held until it suits the scheduler; or to be taken
        for such."""
        plan, tensor = self.plan, self.graph.tensors[op.outputs[0]]
        left = manual.unreduced(rule_for(replace(self.graph.view(op), params=op.eqn.params)), plan.operand_layouts(op))
        result = plan.layout(op.outputs[0])
        if left is None or result is None:
            return True, False
        sums, before = left
        sizes = [plan.mesh.shape[name] for name in plan.axis_names]
        held = local_bytes(tensor.shape, tensor.itemsize, before, sizes)
        if plan.platform in SCATTERED_ONLY:
            return bool(sums), bool(sums)
        return bool(sums), any(result[axis] >= 0 for axis in sums) and held > THRESHOLD_BYTES

    def in_order(self, frame: _Frame, op: Op, i: int, value: Any) -> Any:
        """Operand i of ``op``, not to be had before the weight gradients that come before it, or before a variable was
        read for the last time."""
        wait = self.plan.updates.get((op.id, i))
        known = None if wait is None else frame.computed.get(wait.reader)
        if wait is not None and known is not None and not self.partial_sums(self.graph.ops[wait.product])[0]:
            value = ties.tied(value, known)
        for gradient in self.plan.order.waits.get((op.id, i), ()):
            known = frame.computed.get(gradient)
            if known is not None:
                value = ties.tied(value, known)
        if (op.id, i) in self.plan.pieces:
            anchor = self.plan.anchor(op)
            tied = None if anchor is None else self.after(frame, op, value, op.inputs[i], anchor)
            value = value if tied is None else tied
        return value

    def bind(self, op: Op, args: list[Any], frame: _Frame) -> list[Any]:
        """Results of an equation; device by device where XLA's partitioner would gather what the rule shards."""
        if op.id in self.plan.broadcasts:
            args = self.repeated(op, args)
            if op.primitive == "broadcast_in_dim" and args[0].shape == self.graph.tensors[op.outputs[0]].shape:
                return [args[0]]
        view = replace(self.graph.view(op), params=op.eqn.params)
        out = self.reduced(op, view, args, frame)
        if out is not None:
            return [out]
        if runs_locally(view):
            rule, axes_of = rule_for(view), self.axes_of(op, view)
            with compat.like_equation(op.eqn, self.plan.stack(op)):
                if axes_of:
                    return run_locally(compat.binder(op.eqn, self.plan.mesh), view, rule, args, self.plan.mesh, axes_of)
                equal = self.without_batch_groups(op)
                if equal is not None:
                    return [equal(*args)]
        return compat.bind_equation(op.eqn, args, self.plan.stack(op), self.plan.mesh)

    def repeated(self, op: Op, args: list[Any]) -> list[Any]:
        """Operands of ``op``, those repeated device by device that XLA would repeat once for several layouts."""
        plan, found = self.plan, list(args)
        layout, shape = plan.layout(op.outputs[0]), self.graph.tensors[op.outputs[0]].shape
        with compat.like_equation(op.eqn, plan.stack(op)):
            for i, dims in plan.broadcasts[op.id]:
                assert layout is not None  # broadcasts are told apart by their layouts
                out = manual.repeat(args[i], dims, shape, layout, plan.mesh, plan.axis_names)
                found[i] = args[i] if out is None else out
        return found

    def reduced(self, op: Op, view: OpView, args: list[Any], frame: _Frame) -> Any | None:
        """The result of an operation whose partial sums are scattered or left partial; None for any other."""
        plan = self.plan
        if not manual.runs_partial(view):
            return None
        layouts = (plan.operand_layouts(op), plan.decisions.results.get((op.id, 0)))
        waited_for = op.id in plan.order.gradients and not self.partial_sums(op)[1]
        with compat.like_equation(op.eqn, plan.stack(op)):
            out = manual.run(
                op.eqn.primitive.bind,
                view,
                rule_for(view),
                args,
                layouts,
                plan.mesh,
                plan.axis_names,
                looked_at=waited_for,
                leading=self.leading(op.outputs[0]),
            )
        if waited_for and out is not None:
            out, frame.computed[op.id] = out
        return out

    def leading(self, tensor: int) -> int:
        """The dimension of a tensor that all its readers move to the front; 0: they leave the order as it is."""
        found, reached = set(), [tensor]
        for t in reached:  # grows on the way
            for reader in (self.graph.ops[consumer] for consumer, _ in self.graph.tensors[t].consumers):
                if reader.primitive in ("hub", "convert_element_type", "copy"):
                    reached += reader.outputs
                else:
                    found.add(reader.params["permutation"][0] if reader.primitive == "transpose" else 0)
        return found.pop() if len(found) == 1 else 0

    def without_batch_groups(self, op: Op) -> Callable[..., Any] | None:
        """A function equal to a convolution that XLA partitions wrongly, without its fault; None for others."""
        if op.primitive != "conv_general_dilated" or self.plan.mesh.size == 1:
            return None
        return rewrites.without_batch_groups(op.eqn.params, self.graph.tensors[op.outputs[0]].shape)

    def axes_of(self, op: Op, view: OpView) -> dict[str, tuple[str, ...]] | None:
        """Mesh axes of every factor that the decided layouts shard; None where some operand has no decided layout."""
        plan = self.plan
        layouts: list[Layout] = []
        for tensor, layout in zip(op.inputs, plan.operand_layouts(op), strict=True):
            if not self.graph.tensors[tensor].shape:
                layout = replicated(len(plan.axis_names))
            if layout is None:
                return None
            layouts.append(layout)
        sizes = [plan.mesh.shape[name] for name in plan.axis_names]
        return axes_of_factors(view, rule_for(view), layouts, plan.axis_names, sizes)

    def whole_windows(self, op: Op, args: list[Any]) -> list[Any]:
        """Keeps the image whole in a convolution whose window is as large as its result (a kernel gradient).

        On a mesh of two axes XLA's partitioner sums partial windows over mere copies too, and returns a multiple of the
        right value. Only operands without a decided layout need this; the rule of a convolution never shards them so.
        """
        numbers = op.params["dimension_numbers"]
        window = [self.graph.tensors[op.inputs[1]].shape[d] for d in numbers.rhs_spec[2:]]
        result = [self.graph.tensors[op.outputs[0]].shape[d] for d in numbers.out_spec[2:]]
        if all(w < r for w, r in zip(window, result, strict=True)):
            return args
        for i, spatial in enumerate((numbers.lhs_spec[2:], numbers.rhs_spec[2:])):
            if (op.id, i) not in self.plan.decisions.operands:
                spec = [None if d in spatial else PartitionSpec.UNCONSTRAINED for d in range(args[i].ndim)]
                args[i] = jax.lax.with_sharding_constraint(args[i], NamedSharding(self.plan.mesh, PartitionSpec(*spec)))
        return args

    def hub(self, op: Op, frame: _Frame) -> None:
        decided = self.plan.decisions
        layout = decided.results.get((op.id, 0))
        first = op.params.get("first")
        if op.id in decided.regather and layout is not None:
            part = self.cut_before(frame, op.inputs[0], layout)
            if part is not None:  # nothing is gathered
                frame.values[op.outputs[0]] = part
                return
            value = self.tied(op, frame)
            stays = layout == self.plan.layout(op.inputs[0])  # then what reads the hub makes the copy
            frame.values[op.outputs[0]] = value if stays else self.reshard(value, op, 0, layout)
        elif first is not None and layout is not None and decided.results.get((first, 0)) == layout:
            frame.values[op.outputs[0]] = frame.get(self.graph.ops[first].outputs[0])
        elif decided.operands.get((op.id, 0)) == layout:
            frame.values[op.outputs[0]] = self.read(frame, op, 0)  # the copy that is read has this layout already
        else:
            self.write(frame, op, 0, self.read(frame, op, 0))

    def tied(self, op: Op, frame: _Frame) -> Any:
        """The operand of a hub or recompute, in its own layout, unavailable before a value of the backward pass is."""
        plan, tensor = self.plan, op.inputs[0]
        value = self.value(frame, tensor)
        anchor = plan.anchor(op)
        if anchor is None:
            return value
        tied = self.after(frame, op, value, tensor, anchor)
        if tied is not None:
            return tied
        value, frame.values[anchor] = jax.lax.optimization_barrier((value, frame.get(anchor)))
        return plan.constrain(value, tensor, plan.layout(tensor))

    # -- regions

    def carries(self, region: Region, outer: _Frame) -> list[Any]:
        ops = self.graph.ops
        return [self.array(outer, ops[c], 0) for c in region.carries]

    def enter(self, region: Region, outer: _Frame, carried: Sequence[Any]) -> _Frame:
        frame = _Frame(outer)
        for c, value in zip(region.carries, carried, strict=True):
            self.write(frame, self.graph.ops[c], 0, value)
        return frame

    def leave(self, region: Region, frame: _Frame) -> list[Any]:
        """Values at the end of a loop body, in the layout that they have at its beginning."""
        ends = []
        for c in region.carries:
            op = self.graph.ops[c]
            layout = self.plan.decisions.results.get((c, 0))
            ends.append(self.plan.constrain(self.array(frame, op, 1), op.outputs[0], layout))
        return ends

    def finals(self, region: Region, outer: _Frame, values: Sequence[Any]) -> None:
        for c, value in zip(region.carries, values, strict=True):
            self.write(outer, self.graph.ops[c], 1, value)

    def scan(self, region: Region, outer: _Frame) -> None:
        ops = self.graph.ops
        xs = [self.read(outer, ops[s], 0) for s in region.slices]

        def body(carried: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            frame = self.enter(region, outer, carried)
            for s, value in zip(region.slices, x, strict=True):
                self.write(frame, ops[s], 0, value)
            self.run(region.id, frame)
            return self.leave(region, frame), [self.array(frame, ops[s], 0) for s in region.stacks]

        with compat.under_name_stack(region.name_stack):
            finals, ys = jax.lax.scan(
                body,
                self.carries(region, outer),
                xs,
                length=region.trip_count,
                reverse=region.params["reverse"],
                unroll=region.params["unroll"],
            )
            self.finals(region, outer, finals)
            for s, value in zip(region.stacks, ys, strict=True):
                self.write(outer, ops[s], 0, value)

    def while_loop(self, region: Region, outer: _Frame) -> None:
        ops = self.graph.ops
        assert region.condition is not None
        test = ops[region.condition]

        def condition(carried: Sequence[Any]) -> Any:
            frame = self.enter(region, outer, carried)
            operands: list[Any] = [None] * test.params["n_operands"]
            for i, position in enumerate(test.params["used"]):
                operands[position] = self.read(frame, test, i)
            return compat.run_jaxpr(test.params["jaxpr"], operands)[0]

        def body(carried: Sequence[Any]) -> list[Any]:
            frame = self.enter(region, outer, carried)
            self.run(region.id, frame)
            return self.leave(region, frame)

        with compat.under_name_stack(region.name_stack):
            self.finals(region, outer, jax.lax.while_loop(condition, body, self.carries(region, outer)))

    def merged_layout(self, merge: Op) -> Layout | None:
        """The layout in which every branch returns its value: XLA refuses branches that differ."""
        decided = self.plan.decisions
        wanted = [decided.results.get((merge.id, 0))]
        wanted += [decided.operands.get((merge.id, i)) for i in range(len(merge.inputs))]
        wanted += [self.plan.layout(t) for t in merge.inputs]
        return next((layout for layout in wanted if layout is not None), None)

    def cond(self, region: Region, outer: _Frame) -> None:
        ops = self.graph.ops
        assert region.index is not None
        merges = [ops[m] for m in region.merges]
        layouts = [self.merged_layout(op) for op in merges]

        def branch(position: int) -> Callable[[], list[Any]]:
            def run_branch() -> list[Any]:
                frame = _Frame(outer)
                self.run(region.branches[position], frame)
                ends = [self.array(frame, op, position) for op in merges]
                return [
                    self.plan.constrain(v, op.outputs[0], at) for v, op, at in zip(ends, merges, layouts, strict=True)
                ]

            return run_branch

        with compat.under_name_stack(region.name_stack):
            index = self.value(outer, region.index)
            values = jax.lax.switch(index, [branch(i) for i in range(len(region.branches))])
            for op, value in zip(merges, values, strict=True):
                self.write(outer, op, 0, value)

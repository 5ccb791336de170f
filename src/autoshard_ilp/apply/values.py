"""Values of a step while it is traced: read in the layouts that operations want, written in those decided."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.apply.planned import Planned
from autoshard_ilp.enforce import ties
from autoshard_ilp.enforce.cuts import cut_for, is_cut
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Op
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, to_partition_spec


class Frame:
    """Values of one region; falls back to those of the region around it."""

    def __init__(self, parent: Frame | None = None) -> None:
        self.parent = parent
        self.values: dict[int, Any] = {}
        self.entered: dict[int, Any] = {}  # values of regions around this one, as they are inside
        self.copies: dict[tuple[int, Layout, str], tuple[Any, Op]] = {}  # with the operation that read it last
        self.ties: dict[int, Any] = {}  # anchor -> scalar that is known once the anchor is
        self.computed: dict[int, Any] = {}  # op whose result something waits for -> scalar known once that is computed

    def get(self, tensor: int) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if tensor in frame.values:
                return frame.values[tensor]
            frame = frame.parent
        raise KeyError(tensor)

    def has(self, tensor: int) -> bool:
        """Whether a tensor is computed already."""
        return tensor in self.values or (self.parent is not None and self.parent.has(tensor))


class Values:
    """How operations of one trace read and write."""

    def __init__(self, plan: Planned) -> None:
        self.plan, self.graph = plan, plan.graph

    def value(self, frame: Frame, tensor: int) -> Any:
        """A tensor as it was computed, or its literal.

        What a loop or a branch takes from around it, it gets as an argument of its own. The partitioner gives that the
        layout of whatever inside reads it first, and moves it for all others, once per iteration (a table that a
        decoding loop looks up and multiplies by: 180 MB gathered per token). So it is told the layout inside, too.
        """
        literal = self.graph.tensors[tensor].literal
        if literal is not None:
            return literal
        if tensor in frame.values or frame.parent is None:
            return frame.get(tensor)
        if tensor not in frame.entered:
            frame.entered[tensor] = self.plan.constrain(frame.get(tensor), tensor, self.plan.layout(tensor))
        return frame.entered[tensor]

    def read(self, frame: Frame, op: Op, i: int) -> Any:
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

    def cut_before(self, frame: Frame, tensor: int, layout: Layout) -> Any | None:
        """The part of an elementwise result that a layout cuts from it, computed from its operands' parts
        (:mod:`autoshard_ilp.enforce.cuts`); None where it is to be cut itself, or where this is no cut."""
        plan, t = self.plan, self.graph.tensors[tensor]
        if tensor not in plan.as_read or tensor not in frame.values or t.producer is None:
            return None
        made, now = self.graph.ops[t.producer], plan.layout(tensor)
        reads = plan.operand_layouts(made)
        if not is_cut(now, layout, t.shape, plan.axis_sizes) or any(
            read is not None and PARTIAL in read for read in reads
        ):
            return None
        if made.primitive == "hub":
            same = plan.layout(made.inputs[0]) == now
            return self.cut_before(frame, made.inputs[0], layout) if same else None
        with compat.under_name_stack(plan.stack(made)):
            args = [self.cut_operand(frame, made, i, layout) for i in range(len(made.inputs))]
        specs = [to_partition_spec(cut_for(layout, a.shape), a.ndim, plan.axis_names) for a in args]
        with compat.like_equation(made.eqn, plan.stack(made)):
            return jax.shard_map(
                lambda *parts: compat.bind_equation(
                    made.eqn, parts, plan.stack(made), compat.binder(made.eqn, plan.mesh)
                )[0],
                mesh=plan.mesh,
                in_specs=tuple(specs),
                out_specs=to_partition_spec(layout, len(t.shape), plan.axis_names),
                check_vma=False,
            )(*args)

    def cut_operand(self, frame: Frame, op: Op, i: int, result: Layout) -> Any:
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

    def behind(self, frame: Frame, op: Op, value: Any, tensor: int, layout: Layout, reader: Op) -> Any | None:
        """``value`` that cannot be had before the result of ``reader``; None where one copy for both is as good."""
        now = self.plan.layout(tensor)
        moves = now is not None and any(a != b and a >= 0 for a, b in zip(now, layout, strict=True))
        if not moves or reader.eqn is None or math.prod(self.graph.tensors[tensor].shape) < MIN_HUB_ELEMENTS:
            return None
        return self.after(frame, op, value, tensor, reader.outputs[0])

    def held_back(self, frame: Frame, op: Op, i: int, value: Any, layout: Layout) -> Any:
        """What the backward pass gathers of the forward pass, not to be had before the backward pass is there.

        Schedulers start collectives as early as they can, and would hold the copy from the forward pass on. Where the
        budget leaves no room for that, what the forward pass gathers waits for the other operand of its reader
        (:mod:`autoshard_ilp.enforce.earlygathers`).
        """
        tensor = op.inputs[i]
        t, now = self.graph.tensors[tensor], self.plan.layout(tensor)
        if self.plan.waits(op, i):
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

    def after(self, frame: Frame, op: Op, value: Any, tensor: int, anchor: int) -> Any | None:
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
        only where nothing lies between the collective and the cast, XLA:TPU not before an all-to-all. Nothing is
        rounded for a cut, which sends nothing: XLA would take it for the cast that another reader asks for, and gather
        that one.
        """
        plan, tensor = self.plan, op.inputs[i]
        now = plan.layout(tensor)
        moves = layout is not None and now != layout
        rounded = moves and (op.id, i) in plan.rounded
        if rounded:
            rounded = not is_cut(now, layout, self.graph.tensors[tensor].shape, plan.axis_sizes)
        dtype = plan.casts[op.id] or (jnp.bfloat16 if rounded else "")
        if moves and dtype:
            # In its old layout, or the partitioner casts what has arrived.
            value = plan.constrain(value.astype(dtype), tensor, now)
        for after in (*plan.decisions.via.get((op.id, i), ()), layout):
            value, now = plan.move(value, tensor, now, after), after
        # In its new layout, too, or it takes that of a reader that cuts it further, and is sent once more.
        value = plan.constrain(value.astype(jnp.float32), tensor, layout) if rounded else value
        return plan.in_rows(value, op, tensor, layout)

    def array(self, frame: Frame, op: Op, i: int) -> Any:
        """As :meth:`read`; a literal becomes an array of its exact type."""
        value = self.read(frame, op, i)
        tensor = self.graph.tensors[op.inputs[i]]
        return value if tensor.literal is None else jnp.asarray(value, dtype=tensor.dtype)

    def outcome(self, frame: Frame, op: Op) -> Any:
        """A result of the step.

        XLA:TPU gathers nothing into the place of a donated argument: it copies the argument when the step begins, to
        keep it from being overwritten, and what was gathered when the step ends. So what arrives is written by an
        operation of our own, a select that takes it whatever happens; XLA drops the barrier after its last chance to
        simplify that. (Four weights ``f32[2048,8192]`` and their optimizer's shards, v5e: 409 MB of temporaries, 629
        with copies.)
        """
        value, tensor = self.array(frame, op, 0), self.graph.tensors[op.inputs[0]]
        now, layout = self.plan.layout(tensor.id), self.plan.decisions.operands.get((op.id, 0))
        if self.plan.platform != "tpu" or now is None or layout is None or not ties.can_tie(op, value):
            return value
        arrives = any(a >= 0 and a != b for a, b in zip(now, layout, strict=True))
        if not arrives or tensor.bytes < ties.MIN_COPY_BYTES:
            return value
        return ties.tied(value, jax.lax.optimization_barrier(jnp.bool_(False)))

    def write(self, frame: Frame, op: Op, j: int, value: Any) -> None:
        layout = self.plan.decisions.results.get((op.id, j))
        value = self.plan.constrain(value, op.outputs[j], layout)
        if op.outputs[j] in self.plan.apart:
            # On both sides, or the partitioner lays out what stands behind it as one of its readers likes.
            value = self.plan.constrain(jax.lax.optimization_barrier(value), op.outputs[j], layout)
        frame.values[op.outputs[j]] = self.plan.stored_order(value, op.outputs[j])

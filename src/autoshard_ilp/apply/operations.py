"""Operations of a step while it is traced: bound again under their names, by the collectives that were priced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.apply.planned import Planned
from autoshard_ilp.apply.values import Frame, Values
from autoshard_ilp.costs.precision import added_up_wide
from autoshard_ilp.costs.primitives import PRODUCTS, VIEWS
from autoshard_ilp.enforce import manual, ties
from autoshard_ilp.enforce.bounds import within_bounds
from autoshard_ilp.enforce.lookup import along_inner, look_up
from autoshard_ilp.enforce.order import SCATTERED_ONLY
from autoshard_ilp.enforce.taps import as_products, without_batch_groups
from autoshard_ilp.graph import Op
from autoshard_ilp.rules import OpView, axes_of_factors, rule_for, run_locally, runs_locally
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, local_bytes, replicated, to_partition_spec

MIRRORED_HERE = frozenset({"gpu"})
"""Platforms on which a transposed convolution is told by the mirrored kernel right before it."""

ZEROS_LATE = frozenset({"gpu"})
"""Platforms on which what gradients are added up in is not to be written before they are there."""

VIEWED_FREELY = frozenset({"gpu"})
"""Platforms whose products read transposed operands as they are, so that a view is no copy."""


class Operations:
    """How operations of one trace run.

    Args:
        arguments: of the step, in the order of the graph's.
    """

    def __init__(self, plan: Planned, values: Values, arguments: Sequence[Any]) -> None:
        self.plan, self.graph, self.values, self.arguments = plan, plan.graph, values, arguments

    def run(self, op: Op, frame: Frame) -> None:
        """One operation, unless the loop or branch that owns it runs it."""
        if op.primitive == "argument":
            self.values.write(frame, op, 0, self.arguments[op.position])
        elif op.primitive == "constant":
            self.values.write(frame, op, 0, jnp.asarray(op.params["value"]))
        elif op.primitive == "hub":
            with compat.under_name_stack(self.plan.stack(op)):
                self.hub(op, frame)
        elif op.primitive == "recompute":
            with compat.under_name_stack(self.plan.stack(op)):
                self.values.write(frame, op, 0, self.tied(op, frame))
        elif op.primitive == "loop_invariant":
            self.values.write(frame, op, 0, self.values.read(frame, op, 0))
        elif op.eqn is not None or op.primitive == "optimization_barrier":
            self.equation(op, frame)

    def equation(self, op: Op, frame: Frame) -> None:
        with compat.under_name_stack(self.plan.stack(op)):
            args = [self.in_order(frame, op, i, self.values.read(frame, op, i)) for i in range(len(op.inputs))]
            if op.primitive == "conv_general_dilated":
                args = self.mirrored_here(op, self.whole_windows(op, args))
            args = self.not_simplified(op, args)
            args = within_bounds(self.graph.view(op), args, self.plan.mesh.size)
        if op.primitive == "optimization_barrier":
            outs = list(jax.lax.optimization_barrier(tuple(args)))
        elif op.primitive == "sharding_constraint":
            outs = args  # the plan replaces constraints written for another mesh
        else:
            outs = self.bind(op, args, frame)
        with compat.under_name_stack(self.plan.stack(op)):
            for j, out in enumerate(outs):
                self.values.write(frame, op, j, out)
            self.note_computed(op, frame)

    def not_simplified(self, op: Op, args: list[Any]) -> list[Any]:
        """Operands of ``op``, some behind a barrier: XLA's algebraic simplifier makes other numbers of two programs.

        It reduces the parts of a concatenation, in which an all-to-all may end, one by one, and begins every time with
        the initial value, which is wrong for any but the identity. And it loses the product of whole numbers and a
        constant, where what is multiplied is cut before and after it, to a single element.
        """
        if op.primitive in ("reduce", "reduce_window") and len(args) == 2:
            return [jax.lax.optimization_barrier(args[0]), args[1]]
        made = self.graph.tensors[op.outputs[0]] if op.primitive == "mul" else None
        whole_numbers = made is not None and made.dtype.startswith(("int", "uint"))
        if made is not None and whole_numbers and 1 < math.prod(made.shape) <= self.plan.mesh.size:
            return [jax.lax.optimization_barrier(jnp.asarray(a, made.dtype)) for a in args]
        return args

    def note_computed(self, op: Op, frame: Frame) -> None:
        """Remembers how to wait for a metric, for the last reader of a variable, or for a gradient that was not looked
        at before its reduction."""
        reads_last = op.id in self.plan.readers
        if not (reads_last or op.id in self.plan.order.gradients) or op.id in frame.computed:
            return
        value, at = frame.get(op.outputs[0]), self.plan.sharding(op.outputs[0])
        sums, alone = self.plan.partial_sums(op)
        own = reads_last or op.phase == "update" or op.id in self.plan.order.sums
        wide = added_up_wide(self.graph, op)
        waited = sums or own or wide or self.reads_larger_copies(op)
        if not waited and self.plan.platform in SCATTERED_ONLY:
            return
        if at is not None and (alone or not sums or own):
            loss = op.phase == "forward" and op.id in self.plan.order.gradients
            if self.plan.platform in manual.SPLIT_PRODUCTS and (op.primitive in PRODUCTS or loss):
                value = frame.values[op.outputs[0]] = jax.lax.optimization_barrier(value)
            looked_at = value.astype(jnp.float32) if wide else value
            frame.computed[op.id] = ties.never(looked_at, at.spec, self.plan.mesh)

    def reads_larger_copies(self, op: Op) -> bool:
        """Whether copies gathered for an operation take more memory than its result does. Whoever puts it off holds
        them."""
        plan = self.plan

        def held(tensor: int, layout: Layout | None) -> int:
            t = self.graph.tensors[tensor]
            return 0 if layout is None else local_bytes(t.shape, t.itemsize, layout, plan.axis_sizes)

        copies = 0
        for t, layout in zip(op.inputs, plan.operand_layouts(op), strict=True):
            source = self.graph.behind(t, ("hub",))
            read = held(t, layout)
            copies += read if read > held(source, plan.layout(source)) > 0 else 0
        return copies > held(op.outputs[0], plan.layout(op.outputs[0]))

    def in_order(self, frame: Frame, op: Op, i: int, value: Any) -> Any:
        """Operand i of ``op``, not to be had before the weight gradients that come before it, or before a variable was
        read for the last time."""
        wait = self.plan.updates.get((op.id, i))
        known = None if wait is None else frame.computed.get(wait.reader)
        if wait is not None and known is not None and not self.plan.partial_sums(self.graph.ops[wait.product])[0]:
            value = ties.tied(value, known)
        for gradient in self.plan.order.waits.get((op.id, i), ()):
            known = frame.computed.get(gradient)
            if known is not None:
                value = ties.tied(value, known)
        if (op.id, i) in self.plan.pieces:
            anchor = self.plan.anchor(op)
            tied = None if anchor is None else self.values.after(frame, op, value, op.inputs[i], anchor)
            value = value if tied is None else tied
        return value

    def bind(self, op: Op, args: list[Any], frame: Frame) -> list[Any]:
        """Results of an equation; device by device where XLA's partitioner would gather what the rule shards."""
        if op.id in self.plan.broadcasts:
            args = self.repeated(op, args)
            if op.primitive == "broadcast_in_dim" and args[0].shape == self.graph.tensors[op.outputs[0]].shape:
                return [args[0]]
        if op.primitive == "select_and_scatter_add" and self.plan.platform in ZEROS_LATE:
            pooled = self.added_to_late_zeros(op, args)
            if pooled is not None:
                return [pooled]
        view = replace(self.graph.view(op), params=op.eqn.params)
        out = self.reduced(op, view, args, frame)
        if out is not None:
            return [out]
        if runs_locally(view, self.plan.operand_layouts(op)):
            rule, axes_of = rule_for(view), self.axes_of(op, view)
            with compat.like_equation(op.eqn, self.plan.stack(op)):
                if axes_of:
                    return run_locally(self.binder(op), view, rule, args, self.plan.mesh, axes_of)
                equal = self.without_batch_groups(op) or self.with_whole_features(op)
                if equal is not None:
                    return [equal(*args)]
        return compat.bind_equation(op.eqn, args, self.plan.stack(op), self.binder(op))

    def added_to_late_zeros(self, op: Op, args: list[Any]) -> Any | None:
        """The gradient of a max pooling, added up in zeros that are not known before its cotangent is; None where
        nothing can wait for that.

        XLA:GPU writes constants, such as the zeros that the gradient is added up in, when the step begins, and holds
        them until then, with a second array of zeros for a ReLU of that shape (``Conv2D``, ReLU and pooling, three
        times, on 8 H100s: 235 MB with these zeros, 143 without).
        """
        layout, t = self.plan.operand_layouts(op)[0], self.graph.tensors[op.inputs[0]]
        if layout is None or PARTIAL in layout or not ties.may_anchor(self.graph, t.id):
            return None
        spec = to_partition_spec(layout, len(t.shape), self.plan.axis_names)
        late = jnp.where(ties.never(args[0], spec, self.plan.mesh), 1, 0).astype(t.dtype)
        with compat.like_equation(op.eqn, self.plan.stack(op)):
            return compat.gradient_of_max_pooling(op.eqn, args[0], args[1], late)

    def binder(self, op: Op) -> Callable[..., Any]:
        """What computes an equation on the mesh's devices."""
        by_products: Callable[..., Any] | None = as_products(self.graph, op, self.plan.platform)
        return by_products or compat.binder(op.eqn, self.plan.mesh)

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

    def reduced(self, op: Op, view: OpView, args: list[Any], frame: Frame) -> Any | None:
        """The result of an operation whose partial sums are scattered or left partial; None for any other."""
        plan = self.plan
        layouts = (plan.operand_layouts(op), plan.decisions.results.get((op.id, 0)))
        if view.primitive == "gather":
            with compat.like_equation(op.eqn, plan.stack(op)):
                out = look_up(view, rule_for(view), args, layouts, plan.mesh, plan.axis_names)
            return self.added_up_first(op, view, args, layouts) if out is None else out
        if not manual.runs_partial(view):
            return None
        order = plan.order
        waited_for = op.id in order.gradients and (op.id in order.sums or not self.plan.partial_sums(op)[1])
        with compat.like_equation(op.eqn, plan.stack(op)):
            out = manual.run(
                self.binder(op),
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

    def added_up_first(
        self, op: Op, view: OpView, args: list[Any], layouts: tuple[list[Layout | None], Layout | None]
    ) -> Any | None:
        """A look-up that XLA would scatter wrongly, added up on all devices before it is cut; None for others."""
        operands, result = layouts
        if result is None or not along_inner(view):
            return None
        sums, before = manual.unreduced(rule_for(view), operands) or ((), ())
        if all(result[a] == WHOLE for a in sums):
            return None
        (out,) = compat.bind_equation(op.eqn, args, self.plan.stack(op), self.binder(op))
        return self.plan.constrain(out, op.outputs[0], before)

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
        equal = without_batch_groups(op.eqn.params, self.graph.tensors[op.outputs[0]].shape)
        return None if equal is None else lambda *args: equal(*args, **op.eqn.params)

    def with_whole_features(self, op: Op) -> Callable[..., Any] | None:
        """A convolution that cannot run device by device, since a dimension does not divide: every device computes all
        features. XLA would add equal results up, or refuse groups (:mod:`autoshard_ilp.rules.local`)."""
        if op.primitive != "conv_general_dilated":
            return None
        spec, grouped = op.params["dimension_numbers"], int(op.params["feature_group_count"]) > 1
        layouts = (*self.plan.operand_layouts(op), self.plan.layout(op.outputs[0]))
        features = (spec.lhs_spec[1] if grouped else None, spec.rhs_spec[0], spec.out_spec[1])
        if any(layout is None for layout in layouts):
            return None
        whole = [
            tuple(WHOLE if place == d else place for place in layout or ())
            for d, layout in zip(features, layouts, strict=True)
        ]
        if whole == list(layouts):
            return None

        def convolved(*args: Any) -> Any:
            gathered = [self.plan.constrain(a, t, w) for a, t, w in zip(args, op.inputs, whole, strict=False)]
            (out,) = compat.bind_equation(op.eqn, gathered, self.plan.stack(op), self.binder(op))
            return self.plan.constrain(out, op.outputs[0], whole[2])

        return convolved

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
        return axes_of_factors(view, rule_for(view), layouts, plan.axis_names, plan.axis_sizes)

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

    def mirrored_here(self, op: Op, args: list[Any]) -> list[Any]:
        """A transposed convolution's kernel, which is mirrored, with nothing between that and the convolution.

        XLA:GPU takes it for a gradient of a convolution's image where it sees the ``reverse``, not where a gather lies
        between the two; then cuDNN convolves an image filled with zeros (4.2 times the FLOP of a ``Conv3DTranspose``).
        So what was gathered is mirrored twice more, behind a barrier, or XLA would mirror it not at all.
        """
        graph, at = self.graph, self.plan.decisions.operands.get((op.id, 1))
        if self.plan.platform not in MIRRORED_HERE or all(d == 1 for d in op.params["lhs_dilation"]):
            return args
        producer = graph.tensors[graph.behind(op.inputs[1], ("hub", "transpose", "convert_element_type"))].producer
        made = None if producer is None else graph.ops[producer]
        before = self.plan.layout(made.outputs[0]) if made is not None and made.primitive == "rev" else None
        if at is None or before is None or not any(a != WHOLE == b for a, b in zip(before, at, strict=True)):
            return args
        image, kernel = args
        dims = op.params["dimension_numbers"].rhs_spec[2:]
        back = self.plan.constrain(jax.lax.rev(kernel, dims), op.inputs[1], at)
        return [image, jax.lax.rev(jax.lax.optimization_barrier(back), dims)]

    def hub(self, op: Op, frame: Frame) -> None:
        decided = self.plan.decisions
        layout = decided.results.get((op.id, 0))
        first = op.params.get("first")
        if op.id in decided.regather and layout is not None:
            part = self.values.cut_before(frame, op.inputs[0], layout)
            if part is not None:  # nothing is gathered
                frame.values[op.outputs[0]] = part
                return
            value = self.tied(op, frame)
            stays = layout == self.plan.layout(op.inputs[0])  # then what reads the hub makes the copy
            frame.values[op.outputs[0]] = value if stays else self.values.reshard(value, op, 0, layout)
        elif first is not None and layout is not None and decided.results.get((first, 0)) == layout:
            frame.values[op.outputs[0]] = frame.get(self.graph.ops[first].outputs[0])
        elif decided.operands.get((op.id, 0)) == layout:
            # The copy that is read has this layout already.
            frame.values[op.outputs[0]] = self.values.read(frame, op, 0)
        else:
            self.values.write(frame, op, 0, self.values.read(frame, op, 0))

    def only_viewed(self, op: Op) -> bool:
        """Whether what is recomputed are views of a tensor at most, which the backward pass may have at any time."""
        if op.primitive != "recompute" or self.plan.platform not in VIEWED_FREELY:
            return False
        reached = list(op.outputs)
        for t in reached:  # grows on the way
            for reader in self.graph.readers(t):
                if reader.params.get("recomputed"):
                    if reader.primitive not in VIEWS:
                        return False
                    reached += reader.outputs
        return True

    def tied(self, op: Op, frame: Frame) -> Any:
        """The operand of a hub or recompute, in its own layout, unavailable before a value of the backward pass is."""
        plan, tensor = self.plan, op.inputs[0]
        value = self.values.value(frame, tensor)
        anchor = plan.anchor(op)
        if anchor is None or self.only_viewed(op):
            return value
        tied = self.values.after(frame, op, value, tensor, anchor)
        if tied is not None:
            return tied
        value, frame.values[anchor] = jax.lax.optimization_barrier((value, frame.get(anchor)))
        return plan.constrain(value, tensor, plan.layout(tensor))

"""A graph with its decisions on one mesh: what does not change between two traces of the planned step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.apply.decisions import Decisions, mark
from autoshard_ilp.costs.fusion import roots
from autoshard_ilp.costs.gpu.combining import THRESHOLD_BYTES, known_from_the_start
from autoshard_ilp.costs.gpu.inside_products import sums_read_by_products
from autoshard_ilp.costs.gpu.splitk import kept_in_pieces
from autoshard_ilp.costs.kernels import is_kernel_gradient
from autoshard_ilp.costs.masks import met_by_random_bits
from autoshard_ilp.costs.precision import cast_before_collectives, rounded_operands
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.costs.tpu.tile_shape import LANES
from autoshard_ilp.costs.tpu.tiles import whole_rows
from autoshard_ilp.enforce import manual, ties
from autoshard_ilp.enforce.cuts import computed_as_read
from autoshard_ilp.enforce.earlygathers import COMBINED
from autoshard_ilp.enforce.finished import updates_waited_for
from autoshard_ilp.enforce.inplace import waiting_updates
from autoshard_ilp.enforce.moved import move
from autoshard_ilp.enforce.order import SCATTERED_ONLY, order_of
from autoshard_ilp.enforce.parts import spec_of
from autoshard_ilp.enforce.repeated import made_as_read, unequal_broadcasts
from autoshard_ilp.enforce.stacks import stacks_of_matrices
from autoshard_ilp.enforce.uncut import sums_of_the_whole
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.rules import rule_for
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, divides, local_bytes, local_shape, to_partition_spec

IN_STORED_ORDER = frozenset({"tpu", "gpu"})
"""Where gradients are asked for in the order of dimensions in which their variables are stored."""


class Planned:
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
        self.axis_sizes = [mesh.shape[name] for name in axis_names]
        self.platform = platform = compat.platform_of(mesh)
        operands, results = sums_of_the_whole(graph, operands, results, self.axis_sizes, platform)
        decisions = replace(decisions, operands=operands, results=results)
        self.graph, self.decisions, self.mesh, self.axis_names = graph, decisions, mesh, axis_names
        self.marked = marked
        self.gradients = _gradients(graph, platform) if platform in IN_STORED_ORDER else frozenset()
        self.updates = waiting_updates(graph, platform)
        self.order = updates_waited_for(
            graph,
            order_of(graph, platform, decisions.sums),
            self.updates,
            platform,
            lambda op: not self.partial_sums(op)[0],
        )
        self.readers = frozenset(wait.reader for wait in self.updates.values())
        self.casts = cast_before_collectives(graph) if platform == "gpu" else ("",) * len(graph.ops)
        self.rounded = rounded_operands(graph) if platform == "tpu" else frozenset[tuple[int, int]]()
        self.broadcasts = unequal_broadcasts(graph, platform, self.layout)
        self.as_read = computed_as_read(graph, platform)
        self.pieces = ties.pieces_of_activations(graph, platform)
        self.stacks = stacks_of_matrices(graph, platform)
        self.apart = self._apart()
        self.schedule = [self.order.of(items) for items in graph.schedule()]
        self.shardings: dict[tuple[Layout, int], NamedSharding] = {}
        self._latest: dict[int, int] | None = None
        self._known: list[bool] | None = None

    def _apart(self) -> frozenset[int]:
        """Tensors that a barrier stands behind: XLA would compute what reads them from something larger, or twice."""
        if self.platform == "gpu":
            pieces = kept_in_pieces(self.graph, self.operand_layouts, self.axis_sizes)
            return pieces | sums_read_by_products(self.graph, roots(self.graph), self._is_moved)
        return met_by_random_bits(self.graph) if self.platform == "tpu" else frozenset()

    def _is_moved(self, op: Op, operand: int) -> bool:
        """Whether an operation reads an operand in another layout than that is produced in."""
        return self.operand_layouts(op)[operand] != self.layout(op.inputs[operand])

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
            moved = move(value, before, after, self.mesh, self.axis_names)
        return self.constrain(value, tensor, after) if moved is None else moved

    def stored_order(self, value: Any, tensor: int) -> Any:
        """A gradient in the order of dimensions in which its variable is stored.

        XLA would rather copy the variable and its optimizer's slots into the order that the product which makes the
        gradient likes, hold all copies at once, and copy the new values back (GPUs copy the variable when the step
        begins: for layers of width 8192 in 16 bits 67 of 618 MB on 8 H100s). On TPUs variables of whole tiles are
        stored row by row; others are left alone. On GPUs all are that products make. cuDNN makes gradients of kernels
        in an order of its own, and the update, which would read some of its operands along other dimensions than it
        writes, overwrites none of them then: with Adam a kernel, its two slots and all three results are there at once
        (``f32[5,5,256,512]`` on 8 H100s: 126 MB, of which 39 are these results). So large ones are put in order, too.
        """
        layout, shape = self.layout(tensor), self.graph.tensors[tensor].shape
        if tensor not in self.gradients or layout is None or PARTIAL in layout:
            return value
        local = local_shape(shape, layout, self.axis_sizes)
        if self.platform == "tpu" and (local[-1] % LANES or local[-2] != whole_rows(local[-2])):
            return value
        return self._row_by_row(value, tensor, layout)

    def in_rows(self, value: Any, op: Op, tensor: int, layout: Layout | None) -> Any:
        """What was gathered along its last dimension for an elementwise operation, with that dimension minor in memory.

        Collectives put the gathered dimension in front, and XLA:GPU lays out all that is computed element by element of
        what arrives, a residual stream from end to end, in the same way. The layer normalisations in it add up columns
        then, and write ``x - mean`` in 32 bits (``costs/gpu/centred.py``).
        """
        now, shape = self.layout(tensor), self.graph.tensors[tensor].shape
        last = len(shape) - 1
        if self.platform != "gpu" or now is None or layout is None or last < 1 or not fusible(op):
            return value
        gathered = any(a == last and b == WHOLE for a, b in zip(now, layout, strict=True))
        if not gathered or self.graph.tensors[tensor].bytes < ties.MIN_COPY_BYTES:
            return value
        return self._row_by_row(value, tensor, layout)

    def _row_by_row(self, value: Any, tensor: int, layout: Layout | None) -> Any:
        """``value`` with its last dimension minor in memory, where every device has an equal part.

        Asked for device by device: on a mesh of three axes the partitioner gathers the whole array for it.
        """
        shape = self.graph.tensors[tensor].shape
        if layout is None or PARTIAL in layout or not divides(shape, layout, self.axis_sizes):
            return value
        spec = to_partition_spec(layout, len(shape), self.axis_names)
        return jax.shard_map(compat.row_major, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(value)

    def as_stacked(self, value: Any, op: Op) -> Any:
        """What a loop stacks up, or reads of a stack, in the order of dimensions of both (:mod:`.enforce.stacks`)."""
        if op.id not in self.stacks:
            return value
        if op.primitive == "loop_stack":
            return self._row_by_row(value, op.inputs[0], self.operand_layouts(op)[0])
        return self._row_by_row(value, op.outputs[0], self.layout(op.outputs[0]))

    def anchor(self, op: Op) -> int | None:
        """The gradient that the backward pass has reached before ``op`` may run (:func:`ties.anchors`)."""
        if self._latest is None:
            self._latest = ties.anchors(self.graph, self.platform, self.can_be_looked_at)
        return self._latest.get(op.id)

    def waits(self, op: Op, i: int) -> bool:
        """Whether what a forward operation gathers waits for the other operand."""
        decided = self.decisions
        return (op.id, i) in decided.waits and not (self.platform in COMBINED and (op.id, i) in decided.fit_early)

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

    def partial_sums(self, op: Op) -> tuple[bool, bool]:
        """Whether devices hold partial sums of an operation's result, and whether these are scattered by a collective
        of their own: too large to be combined with others, and to be held until it suits the scheduler; or to be taken
        for such."""
        tensor = self.graph.tensors[op.outputs[0]]
        left = manual.unreduced(rule_for(replace(self.graph.view(op), params=op.eqn.params)), self.operand_layouts(op))
        result = self.layout(op.outputs[0])
        if left is None or result is None:
            return True, False
        sums, before = left
        held = local_bytes(tensor.shape, tensor.itemsize, before, self.axis_sizes)
        if self.platform in SCATTERED_ONLY:
            return bool(sums), bool(sums)
        return bool(sums), any(result[axis] >= 0 for axis in sums) and held > THRESHOLD_BYTES

    def sharding(self, tensor: int) -> NamedSharding | None:
        """The decided layout of a tensor where it is produced (partial sums as :mod:`manual` holds them)."""
        layout = self.layout(tensor)
        if layout is None:
            return None
        spec = spec_of(layout, len(self.graph.tensors[tensor].shape), self.axis_names)
        return NamedSharding(self.mesh, spec)


def _gradients(graph: Graph, platform: str) -> frozenset[int]:
    """Gradients that updates read, where they are computed: before they are converted to the variable's type.

    On GPUs only those that products make, and gradients of convolutions' kernels that take a good deal of memory.
    """

    def is_made_so(tensor: int) -> bool:
        producer = graph.tensors[graph.behind(tensor, VIEWS)].producer
        if producer is None or graph.ops[producer].primitive != "conv_general_dilated":
            return producer is not None and graph.ops[producer].primitive == "dot_general"
        return graph.tensors[tensor].bytes >= ties.MIN_COPY_BYTES and is_kernel_gradient(graph, graph.ops[producer])

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
    wanted = (t for t in found if platform != "gpu" or is_made_so(t))
    return frozenset(
        t for t in wanted if len(graph.tensors[t].shape) > 1 and graph.tensors[t].dtype.startswith(("float", "bfloat"))
    )

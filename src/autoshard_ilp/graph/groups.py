"""Statistics over groups of channels, computed in the channels' own shape.

A group normalisation splits its channels C into (g, c), computes statistics over places and c, scales, and merges g and
c again; JAX's gradient of it does all that once more. On a TPU the split is no view: memory is tiled by the two
dimensions that vary fastest, and 16 channels per group fill an eighth of a tile. XLA:TPU writes the operand of every
such normalisation for it, in 32 bits (a U-Net on v5e took 957 MB where 346 were predicted). So whatever is computed
element by element between a split and a merge is computed on C instead::

    reduce(split(x))  =  reduce over c of split(reduce over places of x)
    split(x) op s     =  split(x op merge(s repeated over g and c))      s: one number per group, or per channel

What is split is then as small as the statistics. Which device computes what is decided afterwards, for this form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.graph import MIN_HUB_ELEMENTS, Graph, Op, Tensor, assemble, changed
from autoshard_ilp.rules.elementwise import SEVERAL_OPERANDS, UNARY

_ELEMENTWISE = frozenset({*UNARY, *SEVERAL_OPERANDS}) - frozenset(
    "hub recompute loop_invariant loop_carry branch_merge zeros_like threefry2x32 threefry4x32".split()  # noqa: SIM905
)
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})


@dataclass(frozen=True)
class _Split:
    """A dimension of a shape taken apart: ``(..., g * c, ...)`` to ``(..., g, c, ...)``."""

    shape: tuple[int, ...]  # with the dimension as one
    dim: int
    groups: int

    @property
    def parts(self) -> tuple[int, int]:
        return self.groups, self.shape[self.dim] // self.groups

    @property
    def apart(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], *self.parts, *self.shape[self.dim + 1 :])

    def others(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What is left of a shape without g and c."""
        return (*shape[: self.dim], *shape[self.dim + 2 :])

    def is_small(self, shape: Sequence[int]) -> bool:
        """Whether an array of as many dimensions is repeated along one that is neither g nor c."""
        fits = len(shape) == len(self.shape) + 1
        return fits and math.prod(self.others(shape)) < math.prod(self.others(self.apart))

    def merged(self, value: Any) -> Any:
        """A small array in as many dimensions as the whole, repeated over g and c if it has either."""
        shape = list(value.shape)
        if shape[self.dim] * shape[self.dim + 1] > 1:
            shape[self.dim : self.dim + 2] = self.parts
        if tuple(shape) != value.shape:
            value = lax.broadcast_in_dim(value, tuple(shape), tuple(range(len(shape))))
        one = math.prod(shape[self.dim : self.dim + 2])
        return lax.reshape(value, (*shape[: self.dim], one, *shape[self.dim + 2 :]))


def merge_groups(graph: Graph) -> Graph:
    """The graph with statistics over groups computed in the channels' own shape; itself where there are none.

    Args:
        graph: of a step, without hubs.
    """
    splits: dict[int, _Split] = {}
    beside: set[int] = set()
    for op in graph.ops:
        split = _split_of(graph, op)
        if split is None or op.outputs[0] in splits:
            continue
        found = _between(graph, op.outputs[0], split)
        around = {t for i in found for op in _around(graph, i) for t in (*op.inputs, *op.outputs)} - found
        if not found & beside and not around & splits.keys():  # one may not be the other's small array
            splits.update(dict.fromkeys(found, split))
            beside |= around if found else set()
    return _Rewriter(graph, splits).run() if splits else graph


def _split_of(graph: Graph, op: Op) -> _Split | None:
    """How a reshape takes one dimension apart."""
    if op.primitive != "reshape" or op.eqn is None:
        return None
    whole, apart = (graph.tensors[t].shape for t in (op.inputs[0], op.outputs[0]))
    if len(apart) != len(whole) + 1 or math.prod(whole) < MIN_HUB_ELEMENTS:
        return None
    for dim, groups in enumerate(apart[:-1]):
        split = _Split(whole, dim, groups)
        if dim < len(whole) and whole[dim] == groups * apart[dim + 1] and split.apart == apart:
            return split if min(split.parts) > 1 else None
    return None


def _around(graph: Graph, tensor: int) -> list[Op]:
    """What makes a tensor, and what reads it."""
    record = graph.tensors[tensor]
    makes = [] if record.producer is None else [record.producer]
    return [graph.ops[i] for i in dict.fromkeys([*makes, *(c for c, _ in record.consumers)])]


def _between(graph: Graph, tensor: int, split: _Split) -> frozenset[int]:
    """All that is computed element by element of a split tensor and in its shape; nothing if it serves anything but
    statistics over groups."""
    found, seen = {tensor}, set[int]()
    waiting, merges, over_groups = [tensor], False, False
    region = graph.ops[graph.tensors[tensor].producer or 0].region
    while waiting:
        for op in _around(graph, waiting.pop()):
            if op.id in seen:
                continue
            seen.add(op.id)
            if op.eqn is None or op.region != region:
                return frozenset()
            if op.primitive in _REDUCTIONS and _reduces_places(op, split, graph):
                over_groups |= split.dim + 1 in op.params["axes"]
            elif op.primitive == "reshape" and _moves(graph, op, split):
                merges |= op.inputs[0] in found
            elif op.primitive == "broadcast_in_dim" and _is_repeated(graph, op, split):
                pass
            elif op.primitive not in _ELEMENTWISE or not _is_in_shape(graph, op, split):
                return frozenset()
            mine = [t for t in (*op.inputs, *op.outputs) if graph.tensors[t].shape == split.apart]
            new = [t for t in mine if t not in found and graph.tensors[t].literal is None]
            found.update(new)
            waiting += new
    return frozenset(found) if merges and over_groups else frozenset()


def _reduces_places(op: Op, split: _Split, graph: Graph) -> bool:
    """Whether a reduction of a split array reads it, and leaves something smaller even before g or c are reduced."""
    axes = [a for a in op.params["axes"] if a not in (split.dim, split.dim + 1)]
    return graph.tensors[op.inputs[0]].shape == split.apart and any(split.apart[a] > 1 for a in axes)


def _moves(graph: Graph, op: Op, split: _Split) -> bool:
    """Whether a reshape splits as ``split`` does, or undoes it."""
    shapes = tuple(graph.tensors[t].shape for t in (op.inputs[0], op.outputs[0]))
    return shapes in ((split.shape, split.apart), (split.apart, split.shape))


def _is_repeated(graph: Graph, op: Op, split: _Split) -> bool:
    """Whether a broadcast makes a split array of a smaller one."""
    shape = _in_all_dimensions(graph.tensors[op.inputs[0]].shape, op.params["broadcast_dimensions"], len(split.apart))
    return graph.tensors[op.outputs[0]].shape == split.apart and split.is_small(shape)


def _in_all_dimensions(shape: Sequence[int], dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape of a broadcast's operand with dimensions of one element where it has none."""
    sizes = dict(zip(map(int, dims), shape, strict=True))
    return tuple(sizes.get(d, 1) for d in range(rank))


def _is_in_shape(graph: Graph, op: Op, split: _Split) -> bool:
    """Whether an elementwise operation computes a split array of such, of numbers, and of small arrays."""
    shapes = [graph.tensors[t].shape for t in op.inputs]
    fits = all(not s or s == split.apart or split.is_small(s) for s in shapes)
    return fits and all(graph.tensors[t].shape == split.apart for t in op.outputs)


class _Rewriter:
    """Builds the new list of operations; new ids start after the old ones."""

    def __init__(self, graph: Graph, splits: Mapping[int, _Split]) -> None:
        self.graph = graph
        self.splits = splits  # tensor -> how its shape was taken apart
        self.tensors: dict[int, Tensor] = dict(enumerate(graph.tensors))
        self.same: dict[int, int] = {}  # tensor -> what stands for it
        self.small: dict[tuple[int, _Split], int] = {}  # small operand -> the same, merged
        self.order: list[Op] = []
        self.next_op = len(graph.ops)

    def run(self) -> Graph:
        for tensor, split in self.splits.items():
            self.tensors[tensor] = changed(self.tensors[tensor], shape=split.shape)
        for op in self.graph.ops:
            known = [self.splits[t] for t in (*op.outputs, *op.inputs) if t in self.splits]
            inputs = tuple(self.same.get(t, t) for t in op.inputs)
            if not known:
                self.order.append(changed(op, inputs=inputs))
                continue
            split = known[0]
            if op.primitive == "reshape":
                self.same[op.outputs[0]] = inputs[0]
            elif op.primitive == "broadcast_in_dim":
                self.repeat(op, split, inputs)
            elif op.primitive in _REDUCTIONS:
                self.reduce(op, split, inputs)
            else:
                self.order.append(changed(op, inputs=tuple(self.operand(op, t, split) for t in inputs)))
        return assemble(self.graph, self.order, self.tensors)

    def operand(self, op: Op, tensor: int, split: _Split) -> int:
        """An operand of an elementwise operation, merged."""
        shape = self.tensors[tensor].shape
        if not shape or shape == split.shape:
            return tensor
        key = tensor, split
        if key not in self.small:
            self.small[key] = self.place(op, split.merged, (tensor,))
        return self.small[key]

    def repeat(self, op: Op, split: _Split, inputs: Sequence[int]) -> None:
        rank, dims = len(split.apart), tuple(map(int, op.params["broadcast_dimensions"]))

        def repeated(value: Any) -> Any:
            if not value.shape:
                return lax.broadcast(value, split.shape)
            small = lax.broadcast_in_dim(value, _in_all_dimensions(value.shape, dims, rank), dims)
            return lax.broadcast_in_dim(split.merged(small), split.shape, tuple(range(rank - 1)))

        self.place(op, repeated, inputs, op.outputs[0])

    def reduce(self, op: Op, split: _Split, inputs: Sequence[int]) -> None:
        axes = sorted(op.params["axes"])
        places = [a - (a > split.dim) for a in axes if a not in (split.dim, split.dim + 1)]
        at = split.dim - sum(a < split.dim for a in places)
        left = [at + a - split.dim for a in axes if a in (split.dim, split.dim + 1)]

        def bind(value: Any, over: Sequence[int]) -> Any:
            params = op.eqn.primitive.get_bind_params(op.eqn.params)
            return op.eqn.primitive.bind(value, **{**params, "axes": tuple(over)}) if over else value

        def reduced(value: Any) -> Any:
            per_channel = bind(value, places)
            shape = per_channel.shape
            return bind(lax.reshape(per_channel, (*shape[:at], *split.parts, *shape[at + 1 :])), left)

        self.place(op, reduced, inputs, op.outputs[0])

    def place(self, op: Op, function: Callable[..., Any], inputs: Sequence[int], output: int | None = None) -> int:
        """Places what a function of some tensors computes, in an operation's stead; its result is ``output``."""
        avals = [jax.ShapeDtypeStruct(self.tensors[t].shape, self.tensors[t].dtype) for t in inputs]
        jaxpr, _ = compat.open_jaxpr(compat.trace_like(op.eqn, function, avals))
        known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            made = []
            for variable in eqn.outvars:
                last = output is not None and variable is jaxpr.outvars[0]
                made.append(output if last and output is not None else self.tensor(variable.aval))
                known[variable] = made[-1]
            new = changed(
                op,
                id=self.next_op,
                primitive=eqn.primitive.name,
                inputs=tuple(known[v] for v in eqn.invars),
                outputs=tuple(made),
                params=eqn.params,
                eqn=eqn,
            )
            self.next_op += 1
            self.order.append(new)
        return known[jaxpr.outvars[0]]

    def tensor(self, aval: Any) -> int:
        number = len(self.tensors)
        name, size = compat.dtype_name_and_size(aval.dtype)
        self.tensors[number] = Tensor(number, tuple(aval.shape), name, size)
        return number

"""Which 32-bit floats XLA holds and sends as 16-bit ones.

A TPU's matrix unit takes bfloat16. Under ``Precision.DEFAULT`` XLA:TPU rounds the float32 operands of products and
convolutions, and its pass "bfloat16 propagation" moves the rounding upstream, through everything that only moves,
selects or compares elements: gathers and all-to-alls of a float32 weight that only products read send half the bytes,
and an activation that only products read is written as bfloat16. Values do not change, since they would be rounded a
moment later. Products under ``Precision.HIGH`` or ``HIGHEST`` keep their operands as they are, and so do arguments and
results of the step, sums and arithmetic.

Source: ``EffectiveOperandPrecisionIsOutputPrecision`` in openxla/xla, xla/service/bfloat16_support.cc, lists what the
rounding passes through; that collectives of every kind do was seen in programs compiled for v5e
(``tests/test_precision.py``).

XLA:GPU rounds nothing by itself, but its pass ``xla/service/collective_quantizer`` casts before a gather or all-to-all
what a single reader would cast to 16 bits after it. Not always (a cut of a dimension that does not divide, between the
gather and the cast, is one exception), so the planned step casts first by itself (:mod:`autoshard_ilp.apply`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.costs.primitives import PRODUCTS
from autoshard_ilp.graph import Graph, Op

WIDE, WIDE_BYTES, NARROW_BYTES = "float32", 4.0, 2.0

ANY_OPERAND = frozenset(
    """
    reshape squeeze expand_dims transpose copy copy_p stop_gradient broadcast_in_dim rev slice concatenate pad abs max
    min sort reduce_max reduce_min reduce_window_max reduce_window_min hub loop_invariant loop_slice loop_carry
    loop_stack recompute optimization_barrier sharding_constraint
    """.split()  # noqa: SIM905
)
"""Operations that round as well before as after, whichever operand it is."""

SOME_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "clamp": (0, 1, 2),
}
"""The same for operations that also take indices."""

INDEX_VIEWS = ("hub", "reshape", "squeeze", "expand_dims")
"""Operations whose result has the buffer of what they read."""

REARRANGED = ("transpose", *INDEX_VIEWS)
"""What may lie between a product and the cast of its result."""

SUMS = ("add", "add_any")
"""Operations that add two arrays up."""


@dataclass(frozen=True, eq=False)
class Precision:
    """Bytes per element of a graph on one kind of hardware.

    Attributes:
        held: per tensor, of its buffer.
        rounds: per op and operand, whether the operation rounds that operand to 16 bits.
    """

    held: np.ndarray
    rounds: tuple[tuple[bool, ...], ...]

    def moved(self, graph: Graph, op: Op, operand: int) -> float:
        """Bytes per element of a copy made for one operand: what a collective on its way sends."""
        tensor = op.inputs[operand]
        own = float(min(self.held[tensor], graph.tensors[tensor].itemsize))
        return min(own, NARROW_BYTES) if self.rounds[op.id][operand] else own


def precision(graph: Graph, profile: Any) -> Precision:
    """Finds what is rounded early.

    Args:
        graph: of the step.
        profile: :class:`~autoshard_ilp.costs.profile.HardwareProfile`; the family "cpu" rounds nothing.
    """
    held = np.array([t.itemsize for t in graph.tensors], float)
    if getattr(profile, "family", "") == "gpu":
        for t, times in _batched_indices(graph):
            held[t] *= times
        casts = cast_before_collectives(graph)
        return Precision(held, tuple((bool(casts[op.id]),) * len(op.inputs) for op in graph.ops))
    if getattr(profile, "family", "") != "tpu":
        return Precision(held, tuple((False,) * len(op.inputs) for op in graph.ops))
    held[list(_widened(graph))] = WIDE_BYTES
    held[[op.outputs[0] for op in graph.ops if added_up_wide(graph, op)]] = WIDE_BYTES
    rounded = rounded_operands(graph)
    return Precision(held, tuple(tuple((op.id, i) in rounded for i in range(len(op.inputs))) for op in graph.ops))


def _batched_indices(graph: Graph) -> Iterator[tuple[int, float]]:
    """Indices of gathers and scatters whose batch dimensions are the operand's too, and how much larger XLA:GPU makes
    them: it writes the position in each such dimension beside every index, and keeps that for the backward pass.

    (``take_along_axis`` in DeBERTa's attention, compiled for H100: ``s32[2,8,256,256,4]`` twice, 15 % of the peak.)
    """
    found: dict[int, float] = {}
    for op in graph.ops:
        if not op.primitive.startswith(("gather", "scatter")):
            continue
        if not (batch := getattr(op.params.get("dimension_numbers"), "operand_batching_dims", ())):
            continue
        indices = op.inputs[1]
        source = graph.behind(indices, INDEX_VIEWS)
        producer = graph.tensors[source].producer
        if producer is not None and graph.ops[producer].primitive not in ("argument", "constant"):
            depth = graph.tensors[indices].shape[-1]
            found[source] = max(found.get(source, 1.0), 1.0 + len(batch) / max(depth, 1))
    yield from found.items()


def _widened(graph: Graph) -> Iterator[int]:
    """Results of convolutions in groups of several channels that are read as 32-bit floats alone.

    XLA:TPU computes them with a dimension for the groups and copies them into place, and the cast, such as that of a
    batch normalisation, goes before the copy. (Compiled for v5e, blocks of a ResNeXt: ``f32[64,48,48,128]``.)
    """
    for op in graph.ops:
        if op.primitive != "conv_general_dilated" or op.phase != "forward":
            continue
        groups, kernel = op.params["feature_group_count"], graph.tensors[op.inputs[1]].shape
        if groups == 1 or kernel[op.params["dimension_numbers"].rhs_spec[1]] == 1:
            continue
        short = graph.tensors[op.outputs[0]].itemsize == NARROW_BYTES
        if short and all(_widens(graph, reader) for reader in graph.readers(op.outputs[0])):
            yield op.outputs[0]


def added_up_wide(graph: Graph, op: Op) -> bool:
    """Whether the result of a product of the backward pass goes as 32-bit floats, at most rearranged, into one sum: as
    the gradient of a table that also makes the logits does.

    XLA:TPU computes the product and the cast in one kernel, and holds the wide result until the other summand is known.
    (Two OPT layers compiled for v5e: ``f32[6284,4096]``, 103 MB.)
    """
    if op.primitive not in PRODUCTS or op.phase != "backward" or graph.tensors[op.outputs[0]].itemsize != NARROW_BYTES:
        return False
    reader = _only_reader(graph, op)
    while reader is not None and reader.primitive in REARRANGED:
        reader = _only_reader(graph, reader)
    if reader is None or not _widens(graph, reader):
        return False
    summed = _only_reader(graph, reader)
    return summed is not None and summed.primitive in SUMS


def _only_reader(graph: Graph, op: Op) -> Op | None:
    consumers = graph.tensors[op.outputs[0]].consumers
    return graph.ops[consumers[0][0]] if len(consumers) == 1 else None


def _widens(graph: Graph, op: Op) -> bool:
    return op.primitive == "convert_element_type" and graph.tensors[op.outputs[0]].dtype == WIDE


def cast_before_collectives(graph: Graph) -> tuple[str, ...]:
    """Per op, the 16-bit type to which its operand's copy is cast by its one reader, at most rearranged in between.

    Empty where there is none such, and where the operand has no 32 bits.
    """
    reused = {op.params["first"] for op in graph.ops if op.primitive == "hub"}
    casts = [""] * len(graph.ops)
    for op in reversed(graph.ops):
        if not op.inputs or not op.outputs or graph.tensors[op.inputs[0]].dtype != WIDE:
            continue
        result = graph.tensors[op.outputs[0]]
        if op.primitive == "convert_element_type":
            casts[op.id] = result.dtype if result.dtype in ("bfloat16", "float16") else ""
        elif op.primitive in ("transpose", "reshape", "squeeze", "hub") and op.id not in reused:
            alone = op.params.get("first") is None and len(result.consumers) == 1
            casts[op.id] = casts[result.consumers[0][0]] if alone else ""
    return tuple(casts)


def rounded_operands(graph: Graph) -> frozenset[tuple[int, int]]:
    """Operands (op id, position) of 32 bits that XLA:TPU rounds to 16 bits, itself or in whatever reads the result.

    It rounds before it gathers, mostly: not before an all-to-all, and not what a reduce-scatter makes. (The gradient
    of a residual stream, scattered and gathered again for two products, v5e: ``f32[4096,4096]``.)
    """
    narrow = _narrow(graph)
    return frozenset(
        (op.id, i)
        for op in graph.ops
        for i, t in enumerate(op.inputs)
        if graph.tensors[t].dtype == WIDE and _rounds(graph, op, i, narrow)
    )


def _narrow(graph: Graph) -> np.ndarray:
    """Tensors that every reader rounds. From above: all 32-bit ones, less what one reader needs, until none is left."""
    narrow = np.array([t.dtype == WIDE and t.producer is not None and bool(t.consumers) for t in graph.tensors])
    for op in graph.ops:
        if op.primitive in ("argument", "constant"):
            narrow[list(op.outputs)] = False
    changed = True
    while changed:
        changed = False
        for op in reversed(graph.ops):
            for i, t in enumerate(op.inputs):
                if narrow[t] and not _rounds(graph, op, i, narrow):
                    narrow[t], changed = False, True
            first = op.params.get("first") if op.primitive == "hub" else None
            if first is not None:  # a copy gathered once serves both passes
                pair = [op.outputs[0], graph.ops[first].outputs[0]]
                if narrow[pair].any() and not narrow[pair].all():
                    narrow[pair], changed = False, True
    return narrow


def _rounds(graph: Graph, op: Op, operand: int, narrow: np.ndarray) -> bool:
    """Whether an operation rounds a 32-bit operand to 16 bits, or hands it only to such that do."""
    if op.primitive in PRODUCTS:
        return _is_default(op.params.get("precision"))
    if op.primitive == "convert_element_type":
        return graph.tensors[op.outputs[0]].dtype == "bfloat16"
    if op.primitive == "select_n":
        passes = operand > 0
    else:
        passes = op.primitive in ANY_OPERAND or operand in SOME_OPERANDS.get(op.primitive, ())
    return passes and bool(op.outputs) and bool(narrow[list(op.outputs)].all())


def _is_default(asked: Any) -> bool:
    """Whether a product may round its operands: no precision asked for, or ``Precision.DEFAULT``."""
    if asked is None:
        return True
    sides = asked if isinstance(asked, tuple) else (asked,)
    return all(side is None or getattr(side, "name", "") == "DEFAULT" for side in sides)

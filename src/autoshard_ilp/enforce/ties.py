"""Work that must not start before the backward pass reaches it: gathering a weight again, recomputing an activation.

XLA merges equal operations, and it runs what is ready as early as it likes. ``optimization_barrier`` keeps two copies
apart, but XLA:GPU and XLA:CPU drop barriers before they schedule, so a copy meant for the backward pass may run in the
forward pass and hold its memory all the way. A *data dependency* survives every pass of every compiler: the value is
replaced by ``select(never, c, value)``, where ``never`` is computed from one element of a gradient that exists only in
the backward pass. ``(g != g) and (g == g)`` is false for every g, NaN and infinities included, so the value is bit for
bit the same; no compiler folds it, since neither half is a constant in floating-point arithmetic.

Each device looks at the first element of its own part of the gradient, so nothing is sent. The select is elementwise:
XLA fuses it into what reads the value, and it costs no memory traffic of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.costs.gpu.combining import only_updates_read
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.costs.primitives import VIEWS
from autoshard_ilp.enforce.manual import never_known_before
from autoshard_ilp.graph import Graph, Op

MIN_ELEMENTS = 128
"""A gradient of fewer elements is no anchor: it may be a sum that is known long before the layer's backward pass."""

PIECES = frozenset({"slice", "pad", "dynamic_slice"})
PIECES_LATE = frozenset({"tpu"})
"""Platforms on which pieces of activations wait for the backward pass."""

NOBODYS = 113
"""What is never chosen in place of a tied value. A one or a zero may be the value itself, which would untie it; and
zeros as large as a table, which its gradient is added up in, would be written where the tie is, and held until then."""

MIN_COPY_BYTES = 2**20
"""Smaller copies of activations may be made when the compiler likes."""


def anchors(graph: Graph, platform: str = "", usable: Callable[[int], bool] = lambda tensor: True) -> dict[int, int]:
    """Per op of the backward pass, hub and recompute op, the gradient that the backward pass has reached before it.

    It is the deepest tensor that the backward pass has written to memory before the op, in the op's own region. Depth,
    not program order, says what depends on the loss: a transposed weight in the backward pass does not. A gradient
    that only an update reads is passed over where another is at hand, since its collective need not have ended; on TPU
    also one that is converted for it, since a product that is looked at is written.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices. What XLA:TPU computes inside the products that read it, such as the gradient of
            logits, would be written for the look at it, so it is no anchor there.
        usable: whether a tensor can be looked at in the layout that it has.
    """
    depth = [0] * len(graph.tensors)
    constant = [t.literal is not None for t in graph.tensors]
    stored = analyse(graph, platform if platform == "tpu" else "").stored
    read_later = _read_in_backward(
        graph, only_updates_read(graph) if platform == "tpu" else [False] * len(graph.tensors)
    )
    deepest: dict[int, tuple[tuple[bool, int], int]] = {}  # region -> (rank of the candidate, tensor)
    found: dict[int, int] = {}
    for op in graph.ops:
        here = 1 + max((depth[t] for t in op.inputs), default=0)
        known = op.primitive == "constant" or (op.primitive != "argument" and all(constant[t] for t in op.inputs))
        for t in op.outputs:
            depth[t], constant[t] = here, known
        region = graph.regions[op.region].parent if op.primitive == "loop_slice" else op.region  # where it reads
        if region in deepest and (op.phase == "backward" or op.primitive in ("hub", "recompute")):
            found[op.id] = deepest[region][1]
        if op.primitive in ("hub", "recompute"):
            continue
        if op.phase == "backward" and op.outputs and not op.params.get("recomputed"):
            t = op.outputs[0]
            if stored[t] and not constant[t] and may_anchor(graph, t) and usable(t):
                rank = (read_later[t], here)
                made_in = graph.regions[op.region].parent if op.primitive == "loop_stack" else op.region
                if made_in not in deepest or rank > deepest[made_in][0]:
                    deepest[made_in] = (rank, t)
    return found


def beside(graph: Graph, op: Op, operand: int, known: Sequence[bool]) -> int | None:
    """What an operation of the forward pass computes with next to one of its operands, as first computed.

    Args:
        op: it, or what only hands the operand on to it: a hub, a cast, a transpose.
        operand: which one is left out.
        known: per tensor, whether it is there from the start (``costs/gpu/combining.py``).

    Returns:
        A tensor that something may wait for; None where there is none but what the step starts with: a weight's cast is
        there from the start as well, and would be written for the look at it.
    """
    first, at = op, operand
    while len(first.inputs) == len(first.outputs) == 1 and graph.tensors[first.outputs[0]].consumers:
        reader, at = graph.tensors[first.outputs[0]].consumers[0]
        first = graph.ops[reader]
    others = [t for i, t in enumerate(first.inputs) if i != at]
    for t in (graph.behind(other, VIEWS) for other in others):
        producer = graph.tensors[t].producer
        made = None if producer is None else graph.ops[producer]
        here = made is not None and made.primitive not in ("argument", "constant") and made.region == op.region
        if here and not known[t] and may_anchor(graph, t):
            return t
    return None


def _read_in_backward(graph: Graph, only: Sequence[bool]) -> list[bool]:
    """Whether the backward pass computes something from a tensor, or from a view of it, but for what is in ``only``."""
    read = [False] * len(graph.tensors)
    for op in reversed(graph.ops):
        if op.phase == "backward" and (op.primitive not in VIEWS or any(read[t] for t in op.outputs)):
            for t in () if op.outputs and all(only[t] for t in op.outputs) else op.inputs:
                read[t] = True
    return read


def pieces_of_activations(graph: Graph, platform: str) -> frozenset[tuple[int, int]]:
    """(op id, operand index) where the backward pass takes a piece of what the forward pass computed, or pads it.

    A gradient that is written as one product per position of a kernel, as grouped convolutions' were, reads as many
    pieces of the image. XLA:TPU copies the pieces as soon as the image is there, and would hold all of them, of every
    layer, until the backward pass.

    Args:
        graph: of the step, hubs included.
        platform: of the mesh's devices.
    """
    if platform not in PIECES_LATE:
        return frozenset()
    found = set()
    for op in graph.ops:
        if op.phase != "backward" or op.primitive not in PIECES or op.region or op.params.get("recomputed"):
            continue
        t = graph.tensors[graph.behind(op.inputs[0], VIEWS)]
        forward = t.producer is not None and graph.ops[t.producer].phase == "forward"
        if forward and t.bytes >= MIN_COPY_BYTES and graph.ops[t.producer or 0].primitive != "constant":
            found.add((op.id, 0))
    return frozenset(found)


def may_anchor(graph: Graph, tensor: int) -> bool:
    """Whether something may wait for a tensor: floating point, and no mere scalar or the like."""
    t = graph.tensors[tensor]
    return t.dtype.startswith(("float", "bfloat")) and math.prod(t.shape) >= MIN_ELEMENTS


def never(gradient: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """A boolean scalar that is always false but is known only once ``gradient`` is.

    Args:
        gradient: a floating-point array of rank 1 or more, laid out as ``spec`` says. Dimensions that do not divide are
            filled up to whole shards, as the partitioner holds them.
        spec: its layout.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
    """
    edges = [(0, -n % parts, 0) for n, parts in zip(gradient.shape, _parts(spec, mesh, gradient.ndim), strict=True)]
    if any(high for _, high, _ in edges):
        gradient = jax.lax.pad(gradient, jnp.zeros((), gradient.dtype), edges)
    look = jax.shard_map(never_known_before, mesh=mesh, in_specs=(spec,), out_specs=PartitionSpec(), check_vma=False)
    return look(gradient)


def tied(value: Any, unavailable: Any) -> Any:
    """``value``, bit for bit, but not before the scalar ``unavailable`` (of :func:`never`) is known."""
    return jnp.where(unavailable, jnp.asarray(NOBODYS, value.dtype), value)


def can_tie(op: Op, value: Any) -> bool:
    """Whether a value can pass a select: typed random keys cannot."""
    return not compat.is_key_dtype(getattr(value, "dtype", None))


def is_even(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether every device holds an equal part."""
    parts = _parts(sharding.spec, sharding.mesh, len(shape))
    return all(n % k == 0 for n, k in zip(shape, parts, strict=True))


def _parts(spec: PartitionSpec, mesh: Any, rank: int) -> list[int]:
    """In how many shards a layout cuts each dimension (partial sums have one more in front, which is left out)."""
    found = [1] * rank
    for d, names in enumerate(tuple(spec)[max(0, len(spec) - rank) :]):
        axes = () if names is None else (names,) if isinstance(names, str) else names
        found[d] = math.prod(mesh.shape[name] for name in axes)
    return found

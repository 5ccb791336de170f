"""Which tensors XLA writes to memory, and which it computes inside the kernels that read them.

XLA does not materialise everything: views (reshape, transpose folded into its consumer) share their operand's buffer,
and chains of elementwise operations are fused, so that only what leaves the fusion is written. The rules here follow
XLA's instruction fusion in outline: a fusible operation is recomputed inside each consumer when that is cheap, and
written once when several kernels need an expensive one, or one that takes more bytes to compute than it has (a
residual sum on TPUs; for GPUs :mod:`.costs.gpu.kernels` counts more exactly), or when a consumer (matrix
product, convolution, gather, sort, a result of the step) cannot fuse it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autoshard_ilp.costs.gpu.centred import centred_for_variances
from autoshard_ilp.costs.gpu.inside_products import computed_in_products
from autoshard_ilp.costs.gpu.kernels import worth_writing
from autoshard_ilp.costs.gpu.padded_images import made_for_each
from autoshard_ilp.costs.gpu.pooled import kept_beside_reductions
from autoshard_ilp.costs.primitives import (
    LONG,
    PRODUCTS,
    RANDOM,
    REDUCTIONS,
    TRANSCENDENTAL,
    VIEWS,
    WINDOWS,
    dilates,
    fusible,
    has_vector,
    slow_on_gpus,
    strides,
)
from autoshard_ilp.costs.written import (
    COMPARISONS,
    joined_off_lanes,
    long_functions_kept,
    operands_of_erfc,
    packed_masks,
    padded_for_several,
)
from autoshard_ilp.graph import BOUNDARY, Graph, Op

MAX_LEAVES = 8
"""Buffers counted behind a fused tensor: enough to tell that reading them takes longer than reading the tensor."""

MOVES = frozenset({"rev", "concatenate"})
"""Fusible operations whose result may have the shape of what it takes from other places."""

TAKEN = frozenset({"slice", "split"})
"""Parts of an array: each kernel reads its part of the array's buffer."""

DEAR_LEAVES = 1.1
"""A fused tensor is written once for several kernels when computing it reads this many times its own bytes."""


def roots(graph: Graph) -> list[int]:
    """Per tensor, the tensor whose buffer a view reads.

    A loop writes what it carries in the place of what it started with, but never in an argument that is not donated:
    what the carry starts with is copied then.
    """
    root = list(range(len(graph.tensors)))
    donated = {argument for _, argument in graph.aliases}
    given = {t for op in graph.ops if op.primitive == "argument" and op.id not in donated for t in op.outputs}
    for op in graph.ops:
        if op.primitive not in VIEWS:
            continue
        if op.primitive == "loop_carry" and root[op.inputs[0]] in given:
            root[op.outputs[1]] = op.outputs[0]
            continue
        for position, out in enumerate(op.outputs):
            source = op.inputs[min(position, len(op.inputs) - 1)] if op.primitive != "loop_carry" else op.inputs[0]
            if graph.tensors[source].literal is None:
                root[out] = root[source]
    return root


def written_to_memory(
    graph: Graph, root: Sequence[int], family: str, anew: bool = True, devices: int = 1
) -> np.ndarray:
    """Whether each tensor is written to memory (see the module docstring).

    Args:
        graph: of the step.
        root: per tensor, the tensor whose buffer a view reads.
        family: of the hardware.
        anew: whether XLA:TPU computes softmaxes in the products of attention, and long functions in the backward pass
            again, as for v5e. For v5p it writes them. Whether XLA:GPU computes long functions again where less is read
            for them than they are large, as for h100. For b200 it writes them.
        devices: among which the batch is divided.
    """
    readers = _readers(graph, root)
    fuses = [op.primitive not in VIEWS and fusible(op) for op in graph.ops]
    stored = _needs_buffer(graph, root, readers, fuses, family, anew)
    for image in made_for_each(graph) if family == "gpu" else ():
        producer = graph.tensors[root[image]].producer
        if producer is not None and not slow_on_gpus(graph.ops[producer].primitive, graph.tensors[image].itemsize):
            stored[root[image]] = False
    if family == "gpu":
        stored |= operands_of_erfc(graph, root, stored, fuses)
        centred = frozenset(centred_for_variances(graph, fuses, devices))
        beside = kept_beside_reductions(graph, centred, fuses, devices)
        stored[[*_read_step_by_step(graph, root, fuses), *centred, *beside]] = True
    several = _read_by_several_kernels(graph, root, stored, readers, family)
    if family == "gpu":
        stored = worth_writing(graph, root, stored, _last_of_chains(graph, several, readers))
        several = _masks_of_metrics(graph, root, stored, readers)
    if family == "tpu":
        padded = padded_for_several(graph, root, stored, several, readers, fuses)
        written = padded | joined_off_lanes(graph, several, readers)
        stored |= written
        several &= ~written
        stored[list(packed_masks(graph, fuses, VIEWS))] = True
    stored = _with_dear_ones(graph, root, stored, several, family)
    stored[_chosen_by_branches(graph, root)] = True
    carries = [op for op in graph.ops if op.primitive == "loop_carry"]
    stored[[root[op.outputs[0]] for op in carries]] = True
    stored[[root[op.inputs[1]] for op in carries if _is_moved(graph, root, stored, op)]] = True
    return stored


def _chosen_by_branches(graph: Graph, root: Sequence[int]) -> list[int]:
    """What is computed before a ``cond`` for a branch to hand it on: no branch can fuse what is an operand of it."""
    found = []
    for op in graph.ops:
        for t in op.inputs if op.primitive == "branch_merge" else ():
            producer = graph.tensors[root[t]].producer
            if producer is None or graph.ops[producer].region != op.region:
                continue
            if graph.tensors[t].shape and graph.ops[producer].primitive not in BOUNDARY:
                found.append(root[t])
    return found


def _is_moved(graph: Graph, root: Sequence[int], stored: np.ndarray, carry: Op) -> bool:
    """Whether the next value of a carry is computed in one kernel from other elements of the last one, as a stencil
    does: it cannot be written in the last one's place then."""
    last, following = root[carry.outputs[0]], root[carry.inputs[1]]
    reached = {(following, False)}
    left = list(reached)
    for t, moved in left:  # grows on the way
        producer = graph.tensors[t].producer
        if t == last or producer is None or (stored[t] and t != following):
            continue
        op = graph.ops[producer]
        if not fusible(op) or op.region != carry.params["region"]:
            continue
        for i in op.inputs:
            elsewhere = op.primitive in MOVES or graph.tensors[i].shape != graph.tensors[op.outputs[0]].shape
            found = root[i], moved or elsewhere
            if found not in reached:
                reached.add(found)
                left.append(found)
    return (last, True) in reached


def _read_step_by_step(graph: Graph, root: Sequence[int], fuses: Sequence[bool]) -> list[int]:
    """What loops read a slice of in every iteration: it has a buffer, as all that a loop is given, although kernels
    inside could compute it."""
    sources = {root[op.inputs[0]] for op in graph.ops if op.primitive == "loop_slice"}
    producers = {t: graph.tensors[t].producer for t in sources}
    return [t for t, producer in producers.items() if producer is not None and fuses[producer]]


def _masks_of_metrics(
    graph: Graph, root: Sequence[int], stored: np.ndarray, readers: Sequence[Sequence[Op]]
) -> np.ndarray:
    """Masks inside what several reductions of a metric compute anew, each for itself: Keras's ``argmax`` replaces
    negative zeros first, in the logits as large as they are, and XLA:GPU writes where these are."""
    masks = np.zeros(len(graph.tensors), bool)
    updates = (t for op in graph.ops if op.phase == "update" for t in op.outputs)
    masks[[t for t in updates if graph.tensors[t].dtype == "bool"]] = True
    several = _read_by_several_kernels(graph, root, stored, readers, "gpu", computed_anew=True)
    return _last_of_chains(graph, several & masks, readers)


def _readers(graph: Graph, root: Sequence[int]) -> list[list[Op]]:
    """Operations that read each tensor, directly or through views."""
    readers: list[list[Op]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        if op.primitive not in VIEWS:
            for t in op.inputs:
                readers[root[t]].append(op)
    return readers


def _read_by_several_kernels(
    graph: Graph,
    root: Sequence[int],
    stored: np.ndarray,
    readers: Sequence[Sequence[Op]],
    family: str,
    computed_anew: bool = False,
) -> np.ndarray:
    """Fusible tensors without a buffer that end up in two or more kernels; also through others that do, where these are
    ``computed_anew`` in each of the kernels."""
    donated = written_in_place(graph, root)
    written, found = stored.tolist(), [False] * len(graph.tensors)
    sinks: list[frozenset[int]] = [frozenset()] * len(graph.tensors)  # kernels, two at most: (op id), or ~(tensor id)
    for op in reversed(graph.ops):
        if op.primitive in VIEWS:
            continue
        for t in op.outputs:
            kernels: set[int] = set()
            for reader in readers[t]:
                if not fusible(reader):
                    kernels.add(reader.id)
                    continue
                for out in reader.outputs:
                    kernels |= {~out} if written[out] or (found[out] and not computed_anew) else sinks[out]
            sinks[t] = frozenset(list(kernels)[:2])
            if len(kernels) > 1 and op.inputs and t not in donated and not written[t]:
                # The update of a variable is one kernel of several results; metrics are reductions.
                found[t] = fusible(op) and (op.phase != "update" or (family == "gpu" and any(k >= 0 for k in kernels)))
    return np.array(found, bool)


def _last_of_chains(graph: Graph, several: np.ndarray, readers: Sequence[Sequence[Op]]) -> np.ndarray:
    """Of what several kernels need, all but what only one operation reads, whose result they need, and is no larger:
    where one of the two is written, it is the second."""
    found = several.copy()
    for t in map(int, np.flatnonzero(several)):
        only = readers[t][0] if len(readers[t]) == 1 else None
        if only is not None and only.outputs and several[only.outputs[0]]:
            found[t] = graph.tensors[only.outputs[0]].bytes > graph.tensors[t].bytes
    return found


def _with_dear_ones(
    graph: Graph, root: Sequence[int], stored: np.ndarray, several: np.ndarray, family: str
) -> np.ndarray:
    """``stored``, and what several kernels need that takes a kernel more bytes to compute anew than to read."""
    found, shared = stored.tolist(), several.tolist()
    behind: list[frozenset[int]] = [frozenset()] * len(graph.tensors)
    # A long function's result stands beside what it was made of: kernels read both rather than a third array.
    # A mask is a byte per element.
    beside = LONG | COMPARISONS if family == "tpu" else frozenset()
    long = frozenset(t for op in graph.ops if op.primitive in beside for t in op.outputs)
    for op in graph.ops:
        mine = _leaves(graph, root, found, behind, op, largest=family == "tpu")
        for t in op.outputs:
            behind[t] = mine
            if not shared[t] or (op.primitive in TAKEN and found[root[op.inputs[0]]]):
                continue  # of what is taken from a buffer a kernel reads no more than that
            own = graph.tensors[t]
            # XLA:TPU casts a weight or an input in each of the products that read it, though it reads twice the bytes.
            read = _size(graph, mine - long, own.itemsize if family == "tpu" else math.inf)
            found[t] |= read > DEAR_LEAVES * own.bytes
    return np.array(found, bool)


def _needs_buffer(
    graph: Graph,
    root: Sequence[int],
    readers: Sequence[Sequence[Op]],
    fuses: Sequence[bool],
    family: str,
    again: bool,
) -> np.ndarray:
    """Tensors that their producer or one of their readers cannot fuse, or that nobody computes twice."""
    stored = [False] * len(graph.tensors)
    drawn = [False] * len(graph.tensors)  # from random bits, inside a fusion
    costly = [False] * len(graph.tensors)  # from a transcendental function, inside a fusion
    slow = [False] * len(graph.tensors)  # from one of its own size that XLA:GPU computes once
    behind: list[frozenset[int]] = [frozenset()] * len(graph.tensors)
    donated = written_in_place(graph, root)
    kept: Collection[int] = range(len(graph.ops))
    nothing: frozenset[int] = frozenset()
    in_products, for_products = computed_in_products(graph, root) if family == "gpu" else (nothing, nothing)
    if family == "tpu" and again:
        kept = long_functions_kept(graph, root, fuses, LONG)
    for op in graph.ops:
        if op.primitive in VIEWS:
            for position, out in enumerate(op.outputs):
                source = op.inputs[min(position, len(op.inputs) - 1)]
                drawn[out], costly[out], slow[out] = drawn[source], costly[source], slow[source]
            continue
        inside = [root[t] for t in op.inputs if not stored[root[t]]]
        random = op.primitive in RANDOM or any(drawn[t] for t in inside)
        once = op.primitive in (LONG if family == "tpu" else TRANSCENDENTAL) and (family != "tpu" or op.id in kept)
        dear = once or any(costly[t] for t in inside)
        mine = _leaves(graph, root, stored, behind, op)
        for t in op.outputs:
            drawn[t], costly[t], behind[t] = random, dear, mine
            own = graph.tensors[t]
            slow[t] = slow_on_gpus(op.primitive, own.itemsize) or any(
                slow[i] and math.prod(graph.tensors[i].shape) == math.prod(own.shape) for i in inside
            )
            if op.primitive in ("argument", "constant"):
                stored[t] = True
            elif not own.shape or not readers[t] or (family == "gpu" and _is_mirrored_kernel(op, t, readers)):
                stored[t] = False
            elif not fusible(op) or (family == "tpu" and dilates(op)):
                stored[t] = True
            elif t in donated:
                stored[t] = False
            else:
                anew = not random or family == "tpu"
                if dear and anew:  # only where less is read than what is kept
                    anew = family == "gpu" and again and not slow[t] and _size(graph, mine) < own.bytes
                stored[t] = (
                    t in for_products
                    or any(
                        not _fuses_operand(graph, r, family, again)
                        for r in readers[t]
                        if t not in in_products or r.primitive != "dot_general"
                    )
                    or (not anew and len({r.id for r in readers[t]}) > 1)
                )
    return np.array(stored, bool)


def _is_mirrored_kernel(op: Op, tensor: int, readers: Sequence[Sequence[Op]]) -> bool:
    """Whether only convolutions read a mirrored kernel: cuDNN mirrors it itself, in the gradient of an image."""
    return op.primitive == "rev" and all(
        r.primitive == "conv_general_dilated" and tensor in r.inputs[1:] for r in readers[tensor]
    )


def _fuses_operand(graph: Graph, op: Op, family: str, again: bool) -> bool:
    """Whether an operation may compute its operands element by element while it reads them."""
    if family == "tpu" and (dilates(op) or strides(op)):
        return False
    if fusible(op) or (family == "gpu" and has_vector(graph, op)):
        return True
    if family == "tpu" and not again and op.primitive == "dot_general" and op.params["dimension_numbers"][1][0]:
        return False  # a product of batches
    inside = {"tpu": PRODUCTS, "gpu": WINDOWS}.get(family, frozenset())
    return op.primitive.startswith(REDUCTIONS) or op.primitive in inside


def _leaves(
    graph: Graph,
    root: Sequence[int],
    stored: Sequence[bool],
    behind: Sequence[frozenset[int]],
    op: Op,
    largest: bool = False,
) -> frozenset[int]:
    """Buffers that a kernel reads to compute an operation; of many, the first ones, or the largest."""
    read: set[int] = set()
    for t in op.inputs:
        base = root[t]
        if graph.tensors[base].literal is None:
            read |= {base} if stored[base] else behind[base]
    if len(read) <= MAX_LEAVES:
        return frozenset(read)
    order = sorted(read, key=lambda t: (-graph.tensors[t].bytes, t)) if largest else sorted(read)
    return frozenset(order[:MAX_LEAVES])


def _size(graph: Graph, tensors: frozenset[int], widest: float = math.inf) -> float:
    """Bytes of tensors, as if none had more than ``widest`` bytes per element."""
    found = (graph.tensors[t] for t in tensors)
    return sum(t.bytes if t.itemsize <= widest else math.prod(t.shape) * widest for t in found)


def written_in_place(graph: Graph, root: Sequence[int]) -> set[int]:
    """Tensors that become the new value of a donated argument: they need no buffer besides the argument's."""
    return {root[graph.ops[r].inputs[0]] for r, _ in graph.aliases}

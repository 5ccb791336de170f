"""Which tensors get a buffer, and from when to when it is held.

XLA does not materialise everything: views (reshape, transpose folded into its consumer) share their operand's buffer,
and chains of elementwise operations are fused, so that only what leaves the fusion is written. The rules here follow
XLA's instruction fusion in outline: a fusible operation is recomputed inside each consumer when that is cheap, and
written once when several kernels need an expensive one, or one that takes more bytes to compute than it has (a
residual sum), or when a consumer (matrix product, convolution, gather, sort, a result of the step) cannot fuse it.

Time is program order, except that parameter updates run as soon as their operands are known: every XLA scheduler that
minimises memory does so, since an update frees a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.costs.written import COMPARISONS, compared_positions, padded_for_several
from autoshard_ilp.graph import PSEUDO_OPERATIONS, Graph, Op

VIEWS = frozenset(
    """
    reshape squeeze expand_dims transpose bitcast_convert_type copy copy_p stop_gradient hub loop_invariant
    loop_slice loop_carry recompute branch_merge optimization_barrier sharding_constraint random_wrap
    random_unwrap
    """.split()  # noqa: SIM905
)
"""Operations whose result shares its operand's buffer (or is a free slice of it)."""

RANDOM = frozenset({"random_bits", "threefry2x32"})
"""Random bits take too long to be drawn in several kernels; XLA:TPU draws them again all the same."""

TRANSCENDENTAL = frozenset(
    """
    exp exp2 expm1 log log1p tanh tan sin cos sinh cosh asin acos atan atan2 erf erfc erf_inv logistic pow lgamma
    digamma
    """.split()  # noqa: SIM905
)
"""Elementwise operations that XLA:CPU does not compute in several kernels. XLA:TPU does, and XLA:GPU where that reads
fewer bytes than the result has: float32 exponentials of bfloat16 logits. Divisions and square roots are on XLA's list
of dear operations as well, but are duplicated freely."""

LONG = frozenset({"erf", "erfc", "erf_inv", "lgamma", "digamma"})
"""What XLA expands to polynomials of a hundred instructions: XLA:TPU too computes these once, for several kernels."""

UNFUSIBLE = frozenset(
    """
    dot_general ragged_dot conv_general_dilated gather scatter scatter-add scatter_add scatter-mul scatter-min
    scatter-max sort top_k cumsum cumprod cummax cummin cumlogsumexp fft cholesky triangular_solve qr eigh svd lu
    reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add
    select_and_gather_add argmax argmin result loop_stack
    """.split()  # noqa: SIM905
)
"""Operations that read their operands from memory and write their result to memory."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""XLA:TPU computes operands of these inside the kernel: an activation function is not written for the product after it,
and is computed again for the weight's gradient."""

MAX_LEAVES = 8
"""Buffers counted behind a fused tensor: enough to tell that reading them takes longer than reading the tensor."""

DEAR_LEAVES = 1.1
"""A fused tensor is written once for several kernels when computing it reads this many times its own bytes."""

REDUCTIONS = ("reduce_", "argm")


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of a graph, per tensor id; times are half-open steps of program order.

    Attributes:
        stored: whether the tensor has a buffer of its own.
        start, end: when that buffer is held (meaningful where stored).
        root: the tensor whose buffer a view reads.
        reads: per op, operand tensors counted as read from memory (each buffer once per fused group).
        last_use: last time any consumer, through views and fusions, needs the tensor.
        time: time of each op.
        horizon: number of time steps; at the last one only arguments and results are left.
    """

    stored: np.ndarray
    start: np.ndarray
    end: np.ndarray
    root: np.ndarray
    reads: tuple[tuple[int, ...], ...]
    last_use: np.ndarray
    time: np.ndarray
    horizon: int


def fusible(op: Op) -> bool:
    """Whether XLA may compute the operation inside its consumer."""
    return op.primitive not in UNFUSIBLE and not op.primitive.startswith(REDUCTIONS)


def is_computed_inside(op: Op, tensor: int, buffers: Buffers) -> bool:
    """Whether a result is computed element by element inside a fusion, and not written."""
    free = op.primitive in VIEWS or op.primitive in PSEUDO_OPERATIONS or op.primitive in ("iota", "broadcast_in_dim")
    return not free and fusible(op) and not buffers.stored[tensor]


def analyse(graph: Graph, family: str = "") -> Buffers:
    """Finds the buffers of a graph.

    Args:
        family: of the hardware, "tpu", "gpu" or "cpu": their compilers fuse differently (:data:`TRANSCENDENTAL`).
    """
    root = _roots(graph)
    stored = _stored(graph, root, family)
    time = schedule(graph)
    horizon = int(time.max()) + 2 if len(time) else 1
    last_use = _last_uses(graph, root, stored, time)
    start = np.zeros(len(graph.tensors), np.int64)
    end = np.zeros(len(graph.tensors), np.int64)
    results = {graph.ops[r].inputs[0] for r in graph.results}
    held_to_end = results | {int(root[t]) for t in results}
    for t in graph.tensors:
        if t.producer is None:
            continue
        producer = graph.ops[t.producer]
        if producer.primitive == "argument":
            start[t.id], end[t.id] = 0, horizon
        else:
            start[t.id] = (
                _region_start(graph, producer, time) if producer.primitive == "loop_stack" else time[t.producer]
            )
            end[t.id] = horizon if t.id in held_to_end else max(last_use[t.id], start[t.id]) + 1
    if family == "gpu":
        _prepared_together(graph, start)
    for t_id in _overwritten(graph, root, stored, last_use, time, family):
        if t_id not in held_to_end:
            end[t_id] = max(end[t_id] - 1, start[t_id] + 1)
    return Buffers(stored, start, end, root, _reads(graph, root, stored), last_use, time, horizon)


def schedule(graph: Graph) -> np.ndarray:
    """Time of each op: program order, with update operations as soon as their operands are known."""
    time = np.arange(len(graph.ops), dtype=np.int64)
    for op in graph.ops:
        if op.phase != "update" or op.region or op.primitive in ("argument", "constant"):
            continue
        producers = [graph.tensors[t].producer for t in op.inputs]
        time[op.id] = max((int(time[p]) for p in producers if p is not None), default=0)
    for result in graph.results:
        producer = graph.tensors[graph.ops[result].inputs[0]].producer
        time[result] = time[producer] if producer is not None else 0
    return time


def _roots(graph: Graph) -> np.ndarray:
    root = np.arange(len(graph.tensors))
    for op in graph.ops:
        if op.primitive not in VIEWS:
            continue
        for position, out in enumerate(op.outputs):
            source = op.inputs[min(position, len(op.inputs) - 1)] if op.primitive != "loop_carry" else op.inputs[0]
            if graph.tensors[source].literal is None:
                root[out] = root[source]
    return root


def _stored(graph: Graph, root: np.ndarray, family: str) -> np.ndarray:
    """Whether each tensor is written to memory (see the module docstring)."""
    readers = _readers(graph, root)
    stored = _needs_buffer(graph, root, readers, family)
    several = _read_by_several_kernels(graph, root, stored, readers, family)
    if family == "gpu":
        several = _last_of_chains(graph, several, readers)
    if family == "tpu":
        fuses = [op.primitive not in VIEWS and fusible(op) for op in graph.ops]
        padded = padded_for_several(graph, root, stored, several, readers, fuses)
        stored |= padded
        several &= ~padded
        stored |= compared_positions(graph, root, several, VIEWS)
    return _with_dear_ones(graph, root, stored, several, family)


def _readers(graph: Graph, root: np.ndarray) -> list[list[Op]]:
    """Operations that read each tensor, directly or through views."""
    readers: list[list[Op]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        if op.primitive not in VIEWS:
            for t in op.inputs:
                readers[root[t]].append(op)
    return readers


def _read_by_several_kernels(
    graph: Graph, root: np.ndarray, stored: np.ndarray, readers: Sequence[Sequence[Op]], family: str
) -> np.ndarray:
    """Fusible tensors without a buffer that end up in two or more kernels."""
    donated = _written_in_place(graph, root)
    found = np.zeros(len(graph.tensors), bool)
    sinks: list[frozenset[int]] = [frozenset()] * len(graph.tensors)  # kernels, two at most: (op id), or ~(tensor id)
    for op in reversed(graph.ops):
        if op.primitive in VIEWS:
            continue
        for t in op.outputs:
            kernels: set[int] = set()
            for reader in readers[t]:
                if not fusible(reader):
                    kernels.add(reader.id)
                for out in reader.outputs if fusible(reader) else ():
                    kernels |= {~out} if stored[out] or found[out] else sinks[out]
            sinks[t] = frozenset(list(kernels)[:2])
            # The update of a variable is one kernel of several results; metrics are reductions.
            fused = fusible(op) and (op.phase != "update" or (family == "gpu" and any(k >= 0 for k in kernels)))
            found[t] = len(kernels) > 1 and fused and bool(op.inputs) and t not in donated and not stored[t]
    return found


def _last_of_chains(graph: Graph, several: np.ndarray, readers: Sequence[Sequence[Op]]) -> np.ndarray:
    """Of what several kernels need, all but what only one operation reads, whose result they need, and is no larger:
    where one of the two is written, it is the second."""
    found = several.copy()
    for t in map(int, np.flatnonzero(several)):
        only = readers[t][0] if len(readers[t]) == 1 else None
        if only is not None and only.outputs and several[only.outputs[0]]:
            found[t] = graph.tensors[only.outputs[0]].bytes > graph.tensors[t].bytes
    return found


def _with_dear_ones(graph: Graph, root: np.ndarray, stored: np.ndarray, several: np.ndarray, family: str) -> np.ndarray:
    """``stored``, and what several kernels need that takes a kernel more bytes to compute anew than to read."""
    found = stored.copy()
    behind: list[frozenset[int]] = [frozenset()] * len(graph.tensors)
    # A long function's result stands beside what it was made of: kernels read both rather than a third array.
    # A mask is a byte per element.
    beside = LONG | COMPARISONS if family == "tpu" else frozenset()
    long = frozenset(t for op in graph.ops if op.primitive in beside for t in op.outputs)
    for op in graph.ops:
        mine = _leaves(graph, root, found, behind, op, largest=family == "tpu")
        for t in op.outputs:
            behind[t] = mine
            own = graph.tensors[t]
            # XLA:TPU casts a weight or an input in each of the products that read it, though it reads twice the bytes.
            read = _size(graph, mine - long, own.itemsize if family == "tpu" else math.inf)
            found[t] |= several[t] and read > DEAR_LEAVES * own.bytes
    return found


def _needs_buffer(graph: Graph, root: np.ndarray, readers: Sequence[Sequence[Op]], family: str) -> np.ndarray:
    """Tensors that their producer or one of their readers cannot fuse, or that nobody computes twice."""
    stored = np.zeros(len(graph.tensors), bool)
    drawn = np.zeros(len(graph.tensors), bool)  # from random bits, inside a fusion
    costly = np.zeros(len(graph.tensors), bool)  # from a transcendental function, inside a fusion
    behind: list[frozenset[int]] = [frozenset()] * len(graph.tensors)
    donated = _written_in_place(graph, root)
    for op in graph.ops:
        if op.primitive in VIEWS:
            for position, out in enumerate(op.outputs):
                source = op.inputs[min(position, len(op.inputs) - 1)]
                drawn[out], costly[out] = drawn[source], costly[source]
            continue
        inside = [root[t] for t in op.inputs if not stored[root[t]]]
        random = op.primitive in RANDOM or any(drawn[t] for t in inside)
        dear = op.primitive in (LONG if family == "tpu" else TRANSCENDENTAL) or any(costly[t] for t in inside)
        mine = _leaves(graph, root, stored, behind, op)
        for t in op.outputs:
            drawn[t], costly[t], behind[t] = random, dear, mine
            if op.primitive in ("argument", "constant"):
                stored[t] = True
            elif not graph.tensors[t].shape or not readers[t]:
                stored[t] = False
            elif t in donated:
                stored[t] = not fusible(op)
            else:
                smaller = family == "gpu" and _size(graph, mine) < graph.tensors[t].bytes  # to read than to keep
                once = (random and family != "tpu") or (dear and not smaller)
                stored[t] = (
                    not fusible(op)
                    or any(not _fuses_operand(r, family) for r in readers[t])
                    or (once and len({r.id for r in readers[t]}) > 1)
                )
    return stored


def _fuses_operand(op: Op, family: str) -> bool:
    """Whether an operation may compute its operands element by element while it reads them."""
    return fusible(op) or op.primitive.startswith(REDUCTIONS) or (family == "tpu" and op.primitive in PRODUCTS)


def _leaves(
    graph: Graph,
    root: np.ndarray,
    stored: np.ndarray,
    behind: Sequence[frozenset[int]],
    op: Op,
    largest: bool = False,
) -> frozenset[int]:
    """Buffers that a kernel reads to compute an operation; of many, the first ones, or the largest."""
    read: set[int] = set()
    for t in op.inputs:
        base = int(root[t])
        if graph.tensors[base].literal is None:
            read |= {base} if stored[base] else behind[base]
    order = sorted(read, key=lambda t: (-graph.tensors[t].bytes, t)) if largest else sorted(read)
    return frozenset(order[:MAX_LEAVES])


def _size(graph: Graph, tensors: frozenset[int], widest: float = math.inf) -> float:
    """Bytes of tensors, as if none had more than ``widest`` bytes per element."""
    found = (graph.tensors[t] for t in tensors)
    return sum(t.bytes if t.itemsize <= widest else math.prod(t.shape) * widest for t in found)


def _written_in_place(graph: Graph, root: np.ndarray) -> set[int]:
    """Tensors that become the new value of a donated argument: they need no buffer besides the argument's."""
    return {int(root[graph.ops[r].inputs[0]]) for r, _ in graph.aliases}


def _last_uses(graph: Graph, root: np.ndarray, stored: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Last time each tensor is needed, looking through views and fused operations, and to the end of loops."""
    last = np.full(len(graph.tensors), -1, np.int64)
    ends = _region_ends(graph, time)
    for op in reversed(graph.ops):
        when = int(time[op.id])
        through = op.primitive in VIEWS or (fusible(op) and op.outputs and not any(stored[t] for t in op.outputs))
        if through:
            when = max((int(last[t]) for t in op.outputs), default=when)
        for t in op.inputs:
            producer = graph.tensors[t].producer
            needed = when
            if producer is not None and op.region and graph.ops[producer].region != op.region:
                needed = max(needed, ends.get(op.region, needed))
            last[t] = max(last[t], needed)
    for t in reversed(range(len(last))):
        if root[t] != t:
            last[root[t]] = max(last[root[t]], last[t])
    return last


def _overwritten(
    graph: Graph, root: np.ndarray, stored: np.ndarray, last_use: np.ndarray, time: np.ndarray, family: str
) -> Iterator[int]:
    """Buffers that a fused operation reads for the last time and overwrites with a result of the same size.

    A product's result whose only reader is a chain of elementwise operations is among them; XLA:GPU may even fuse the
    chain into the product. On GPUs a kernel that also computes reductions of what it reads, such as a softmax, its
    gradient or that of a normalisation, overwrites nothing.
    """
    for op in graph.ops:
        written = [t for t in op.outputs if stored[t]]
        if not written or not fusible(op) or op.primitive in ("argument", "constant"):
            continue
        size = graph.tensors[written[0]].bytes
        behind = _behind_chain(graph, root, stored, op)
        elements = math.prod(graph.tensors[written[0]].shape)
        reduced = _reduced_beside(graph, root, stored, behind, op.phase) if family == "gpu" else frozenset()
        if any(t in reduced and stored[t] and math.prod(graph.tensors[t].shape) == elements for t in behind):
            continue
        for t in behind:
            producer = graph.tensors[t].producer
            if producer is None or graph.ops[producer].primitive in ("argument", "constant"):
                continue
            if stored[t] and last_use[t] == time[op.id] and graph.tensors[t].bytes == size:
                yield t
                break


def _reduced_beside(
    graph: Graph, root: np.ndarray, stored: np.ndarray, behind: Sequence[int], phase: str
) -> frozenset[int]:
    """Tensors that reductions of the same phase read whose results are among those behind a chain.

    What the forward pass has summed up is at hand in the backward pass, whose kernels need not read it again.
    """
    found: set[int] = set()
    reached = list(behind)
    for t in reached:  # grows on the way
        producer = graph.tensors[t].producer
        made = None if producer is None else graph.ops[producer]
        if made is not None and made.primitive.startswith(REDUCTIONS) and made.phase == phase:
            mine = {*(int(root[i]) for i in made.inputs), *_behind_chain(graph, root, stored, made)}
            reached += sorted(mine - found - set(reached))
            found |= mine
    return frozenset(found)


def _behind_chain(graph: Graph, root: np.ndarray, stored: np.ndarray, op: Op) -> list[int]:
    """Tensors that an operation reads, and those behind what is computed inside it."""
    found = list(dict.fromkeys(int(root[t]) for t in op.inputs))
    for t in found:  # grows on the way
        producer = graph.tensors[t].producer
        if stored[t] or producer is None or not fusible(graph.ops[producer]):
            continue
        found += [r for r in (int(root[i]) for i in graph.ops[producer].inputs) if r not in found]
    return found


def _region_ends(graph: Graph, time: np.ndarray) -> dict[int, int]:
    ends: dict[int, int] = {}
    for op in graph.ops:
        region = op.region
        while region:
            ends[region] = max(ends.get(region, 0), int(time[op.id]))
            region = graph.regions[region].parent
    return ends


def _region_start(graph: Graph, stack: Op, time: np.ndarray) -> int:
    """A scan writes its stacked result into a buffer held from the loop's start."""
    return min((int(time[op.id]) for op in graph.ops if op.region == stack.region), default=int(time[stack.id]))


def _prepared_together(graph: Graph, start: np.ndarray) -> None:
    """XLA:GPU fills with zeros in one kernel, before the first of them is needed, what has equal shapes: the stacks of
    all loops, and what gradients of tables are added up in."""
    filled = [
        graph.tensors[op.outputs[0]]
        for op in graph.ops
        if (op.primitive == "loop_stack" and graph.regions[op.region].parent == 0) or _adds_to_zeros(graph, op)
    ]
    first: dict[tuple[tuple[int, ...], str], int] = {}
    for t in filled:
        key = (t.shape, t.dtype)
        first[key] = min(first.get(key, int(start[t.id])), int(start[t.id]))
    for t in filled:
        start[t.id] = first[t.shape, t.dtype]


def _adds_to_zeros(graph: Graph, op: Op) -> bool:
    """Whether an operation outside of loops scatters into a constant: the gradient of a gather."""
    if op.primitive not in ("scatter-add", "scatter_add") or op.region:
        return False
    producer = graph.tensors[op.inputs[0]].producer
    while producer is not None and graph.ops[producer].primitive in (*VIEWS, "broadcast_in_dim"):
        t = graph.tensors[graph.ops[producer].inputs[0]]
        if t.literal is not None:
            return True
        producer = t.producer
    return producer is not None and graph.ops[producer].primitive == "constant"


def _reads(graph: Graph, root: np.ndarray, stored: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Operands read from memory: all of an unfusible operation's; of fused ones, each buffer once per phase."""
    seen: set[tuple[int, str]] = set()
    reads: list[tuple[int, ...]] = []
    for op in graph.ops:
        if op.primitive in VIEWS or op.primitive in ("argument", "constant", "result"):
            reads.append(())
            continue
        mine = []
        for t in dict.fromkeys(op.inputs):
            key = (int(root[t]), op.phase)
            if not stored[root[t]] or not graph.tensors[t].shape:
                continue
            if not fusible(op):
                mine.append(t)
            elif key not in seen:
                seen.add(key)
                mine.append(t)
        reads.append(tuple(mine))
    return tuple(reads)

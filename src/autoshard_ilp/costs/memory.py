"""From when to when the buffers of a step are held.

Which tensors have one, :mod:`autoshard_ilp.costs.fusion` says. Time is program order, except that parameter updates
run as soon as their operands are known: every XLA scheduler that minimises memory does so, since an update frees a
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from autoshard_ilp.costs.beside import products_beside
from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.fusion import roots, written_to_memory
from autoshard_ilp.costs.gpu.kernels import reads_by_kernel
from autoshard_ilp.costs.gpu.longkept import functions_of_one
from autoshard_ilp.costs.gpu.triton import leaves_triton
from autoshard_ilp.costs.masks import met_by_random_bits
from autoshard_ilp.costs.primitives import PRODUCTS, REDUCTIONS, VIEWS, fusible
from autoshard_ilp.graph import BOUNDARY, PSEUDO_OPERATIONS, Graph, Op

SLICED_APART = frozenset({"gpu"})
"""Families of hardware on which a loop holds nothing but the copy that was gathered for it."""

SOFTMAX_ROW = 16384
"""Elements of the longest row whose softmax XLA:GPU computes in one kernel. (The loss of 2048 tokens, compiled for
H100: with 16384 classes, the gradient of the logits is written beside them, with 16400 in their place.)"""


def is_computed_inside(op: Op, tensor: int, buffers: Buffers) -> bool:
    """Whether a result is computed element by element inside a fusion, and not written."""
    free = op.primitive in VIEWS or op.primitive in PSEUDO_OPERATIONS or op.primitive in ("iota", "broadcast_in_dim")
    return not free and fusible(op) and not buffers.stored[tensor]


def analyse(graph: Graph, family: str = "", anew: bool = True, devices: int = 1) -> Buffers:
    """Finds the buffers of a graph.

    Args:
        family: of the hardware, "tpu", "gpu" or "cpu": their compilers fuse differently.
        anew: whether long functions are computed again, and softmaxes of TPUs (:func:`written_to_memory`).
        devices: among which the batch is divided.
    """
    root = roots(graph)
    written = written_to_memory(graph, root, family, anew, devices)
    if family == "tpu":
        written[[root[t] for t in met_by_random_bits(graph)]] = True  # a barrier stands behind them
    stored = written.tolist()  # lists: of arrays, single entries are slow to read
    time = schedule(graph, family)
    horizon = max(time) + 2 if time else 1
    last_use = _last_uses(graph, root, stored, time)
    made_of: dict[int, int] = {}
    if family == "gpu" and anew:
        made_of = dict(functions_of_one(graph, root, stored, lambda op: _behind_chain(graph, root, stored, op)))
        again = [t for t, source in made_of.items() if last_use[source] >= last_use[t]]
        for t in again:
            stored[t] = False
        last_use = _last_uses(graph, root, stored, time) if again else last_use
    begins = _region_begins(graph, time)
    start = [0] * len(graph.tensors)
    end = [0] * len(graph.tensors)
    results = {graph.ops[r].inputs[0] for r in graph.results}
    held_to_end = results | {root[t] for t in results}
    for op in graph.ops:
        for t_id in op.outputs:
            if op.primitive == "argument":
                start[t_id], end[t_id] = 0, horizon
            else:
                stacked = op.primitive == "loop_stack"  # in a buffer held from the loop's start
                start[t_id] = begins[op.region] if stacked else time[op.id]
                end[t_id] = horizon if t_id in held_to_end else max(last_use[t_id], start[t_id]) + 1
    if family == "gpu":
        _prepared_before_what_is_read(graph, stored, time, start)
        _prepared_together(graph, start)
    for t_id, source in made_of.items():
        if stored[t_id] and stored[source] and end[source] < end[t_id]:
            start[t_id] = max(start[t_id], end[source])  # until then the source stands for it
    for t_id in _overwritten(graph, root, stored, last_use, time, family):
        if t_id not in held_to_end:
            end[t_id] = max(end[t_id] - 1, start[t_id] + 1)
    sliced = dict(_sliced_by_one_loop(graph, stored, end, held_to_end)) if family in SLICED_APART else {}
    for op_id, (t_id, _) in sliced.items():
        end[t_id] = time[op_id] + 1
    reads = reads_by_kernel(graph, root, stored) if family == "gpu" else _reads(graph, root, stored)
    beside = {g: time[p] for g, p in products_beside(graph).items()} if family == "tpu" else {}
    return Buffers(
        np.array(stored, bool),
        np.array(start, np.int64),
        np.array(end, np.int64),
        np.array(root, np.int64),
        reads,
        np.array(last_use, np.int64),
        np.array(time, np.int64),
        horizon,
        begins,
        _region_ends(graph, time),
        sliced,
        beside,
    )


def _sliced_by_one_loop(
    graph: Graph, stored: Sequence[bool], end: Sequence[int], held_to_end: Container[int]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Loop slices with the buffers that nothing else reads, and when these end."""
    for op in graph.ops:
        t = graph.tensors[op.inputs[0]] if op.primitive == "loop_slice" else None
        if t is None or t.producer is None or not stored[t.id] or len(t.consumers) > 1:
            continue
        made = graph.ops[t.producer]
        if made.primitive not in BOUNDARY and t.id not in held_to_end:
            yield op.id, (t.id, end[t.id])


def schedule(graph: Graph, family: str = "") -> list[int]:
    """Time of each op: program order, with update operations as soon as their operands are known.

    An update is one kernel, at one moment; a ``cond`` chooses all its results at once. Where updates multiply matrices
    (Muon orthogonalises what it adds, step by step), they are left in program order, or what every step makes would be
    there at once.
    """
    time = list(range(len(graph.ops)))
    multiplied = any(op.phase == "update" and op.primitive in PRODUCTS for op in graph.ops)
    known = time.copy()
    for gradient, product in products_beside(graph).items() if family == "gpu" else ():
        waiting = [gradient]
        for op_id in waiting:  # grows on the way
            known[op_id] = max(known[op_id], product)  # whichever of the two is first
            readers = (graph.ops[r] for t in graph.ops[op_id].outputs for r, _ in graph.tensors[t].consumers)
            waiting += [r.id for r in readers if r.phase == "backward" and known[r.id] < product]
    for op in graph.ops:
        if multiplied or op.phase != "update" or op.region or op.primitive in ("argument", "constant"):
            continue
        together = graph.regions[op.params["region"]].merges if op.primitive == "branch_merge" else (op.id,)
        producers = [graph.tensors[t].producer for other in together for t in graph.ops[other].inputs]
        time[op.id] = known[op.id] = max((known[p] for p in producers if p is not None), default=0)
    last = 1 + max((time[op.id] for op in graph.ops if op.phase == "update"), default=0)
    for op_id in _chosen_last(graph) if family == "gpu" and not multiplied else ():
        time[op_id] = last
    for result in graph.results:
        producer = graph.tensors[graph.ops[result].inputs[0]].producer
        time[result] = time[producer] if producer is not None else 0
    return time


def _chosen_last(graph: Graph) -> Iterator[int]:
    """Operations of each ``cond`` among the updates that only results wait for: XLA:GPU leaves it to the end (the
    gradients that an optimizer accumulates are held until the others, and their slots, are updated)."""
    for region in graph.regions:
        merges = [graph.ops[m] for m in region.merges]
        if not merges or region.parent or any(op.phase != "update" for op in merges):
            continue
        if all(reader.primitive == "result" for op in merges for t in op.outputs for reader in graph.readers(t)):
            yield from region.merges
            yield from (op.id for op in graph.ops if op.region in region.branches)


def _last_uses(graph: Graph, root: Sequence[int], stored: Sequence[bool], time: Sequence[int]) -> list[int]:
    """Last time each tensor is needed, looking through views and fused operations, and to the end of loops."""
    last = [-1] * len(graph.tensors)
    ends = _region_ends(graph, time)
    for op in reversed(graph.ops):
        when = time[op.id]
        through = op.primitive in VIEWS or (fusible(op) and op.outputs and not any(stored[t] for t in op.outputs))
        if through:
            when = max([last[t] for t in op.outputs], default=when)
        for t in op.inputs:
            needed = when
            producer = graph.tensors[t].producer if op.region else None
            if producer is not None and graph.ops[producer].region != op.region:
                needed = max(needed, ends.get(op.region, needed))
            if needed > last[t]:
                last[t] = needed
    for t in reversed(range(len(last))):
        if root[t] != t:
            last[root[t]] = max(last[root[t]], last[t])
    return last


def _overwritten(
    graph: Graph,
    root: Sequence[int],
    stored: Sequence[bool],
    last_use: Sequence[int],
    time: Sequence[int],
    family: str,
) -> Iterator[int]:
    """Buffers that a fused operation reads for the last time and overwrites with a result of the same size.

    A product's result whose only reader is a chain of elementwise operations is among them; XLA:GPU may even fuse the
    chain into the product. On GPUs a kernel that also computes reductions of what it reads, such as a softmax, its
    gradient or that of a normalisation, overwrites nothing; and nothing overwrites what a library's call returns beside
    its workspace: convolutions, and products where these are cuBLAS's. Only a bias and a ReLU are part of such a call.
    Nor is anything overwritten that is written beside an exact GELU of such a product, for its gradient.
    What loops read transposed is written transposed, beside what it was made of.
    """
    in_library = _library_results(graph, root) if family == "gpu" else frozenset()
    moved = _transposed_for_loops(graph, root) if family == "gpu" else frozenset()
    for op in graph.ops:
        written = [t for t in op.outputs if stored[t] and t not in moved]
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
            if not stored[t] or last_use[t] != time[op.id] or graph.tensors[t].bytes != size:
                continue
            if family == "gpu" and _of_softmax(graph, root, stored, graph.ops[producer]):
                continue
            if t not in in_library or _is_biased_relu(graph, root, op, t):
                yield t
                break


def _transposed_for_loops(graph: Graph, root: Sequence[int]) -> frozenset[int]:
    """Buffers that loops read slices of in another order of dimensions."""
    found = set()
    for op in graph.ops:
        t = op.inputs[0] if op.primitive == "loop_slice" else -1
        while t >= 0 and t != root[t]:
            producer = graph.tensors[t].producer
            view = None if producer is None else graph.ops[producer]
            if view is None or view.primitive not in VIEWS:
                break
            if view.primitive == "transpose":
                found.add(root[t])
            t = view.inputs[0]
    return frozenset(found)


def _library_results(graph: Graph, root: Sequence[int]) -> frozenset[int]:
    """Results of cuDNN's and cuBLAS's calls, and what is written beside a GELU's."""
    if not leaves_triton(graph):
        return frozenset(t for op in graph.ops if op.primitive == "conv_general_dilated" for t in op.outputs)
    calls = {"conv_general_dilated", "dot_general"}
    beside = {root[t] for op in graph.ops if op.primitive == "erfc" for t in (*op.inputs, *op.outputs)}
    return frozenset(t for op in graph.ops if op.primitive in calls for t in op.outputs) | beside


def _is_biased_relu(graph: Graph, root: Sequence[int], op: Op, tensor: int) -> bool:
    """Whether an operation computes ``max(tensor, 0)``, or that of ``tensor`` and a bias of one dimension."""

    def constant(t: int) -> bool:
        return graph.tensors[t].literal is not None or not graph.tensors[t].shape

    def bias(t: int) -> bool:
        t = graph.behind(t, (*VIEWS, "broadcast_in_dim"))
        return sum(n > 1 for n in graph.tensors[t].shape) <= 1

    if op.primitive != "max" or not any(constant(t) for t in op.inputs):
        return False
    for t in (root[i] for i in op.inputs if not constant(i)):
        producer = graph.tensors[t].producer
        added = producer is not None and graph.ops[producer].primitive in ("add", "add_any")
        beside = [root[i] for i in graph.ops[producer].inputs] if added and producer is not None else []
        if t == tensor or (tensor in beside and all(i == tensor or bias(i) for i in beside)):
            return True
    return False


def _reduced_beside(
    graph: Graph, root: Sequence[int], stored: Sequence[bool], behind: Sequence[int], phase: str
) -> frozenset[int]:
    """Tensors that reductions of the same phase read whose results are among those behind a chain.

    What the forward pass has summed up is at hand in the backward pass, whose kernels need not read it again; but not
    the largest of a row that a softmax was computed of in one kernel, which was not written.
    """
    found: set[int] = set()
    reached = list(behind)
    for t in reached:  # grows on the way
        producer = graph.tensors[t].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or not made.primitive.startswith(REDUCTIONS):
            continue
        if made.phase == phase or _inside_softmax(graph, made):
            mine = {*(root[i] for i in made.inputs), *_behind_chain(graph, root, stored, made)}
            reached += sorted(mine - found - set(reached))
            found |= mine
    return frozenset(found)


def _inside_softmax(graph: Graph, reduction: Op) -> bool:
    """Whether XLA:GPU finds the largest of a row in the kernel that computes its softmax, without writing it."""
    if reduction.primitive != "reduce_max":
        return False
    shape = graph.tensors[reduction.inputs[0]].shape
    return tuple(reduction.params["axes"]) == (len(shape) - 1,) and shape[-1] <= SOFTMAX_ROW


def _of_softmax(graph: Graph, root: Sequence[int], stored: Sequence[bool], op: Op) -> bool:
    """Whether an operation computes the exponentials of a softmax that is one kernel: what reads them reads the logits
    instead, and finds the largest of every row again."""
    if op.primitive != "exp":
        return False
    producers = (graph.tensors[t].producer for t in _behind_chain(graph, root, stored, op))
    return any(p is not None and _inside_softmax(graph, graph.ops[p]) for p in producers)


def _behind_chain(graph: Graph, root: Sequence[int], stored: Sequence[bool], op: Op) -> list[int]:
    """Tensors that an operation reads, and those behind what is computed inside it."""
    found = list(dict.fromkeys(root[t] for t in op.inputs))
    for t in found:  # grows on the way
        producer = graph.tensors[t].producer
        if stored[t] or producer is None or not fusible(graph.ops[producer]):
            continue
        found += [r for r in (root[i] for i in graph.ops[producer].inputs) if r not in found]
    return found


def _region_ends(graph: Graph, time: Sequence[int]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for op in graph.ops:
        region = op.region
        while region:
            ends[region] = max(ends.get(region, 0), time[op.id])
            region = graph.regions[region].parent
    return ends


def _region_begins(graph: Graph, time: Sequence[int]) -> dict[int, int]:
    begins: dict[int, int] = {}
    for op in graph.ops:
        begins[op.region] = min(begins.get(op.region, time[op.id]), time[op.id])
    return begins


def _prepared_before_what_is_read(graph: Graph, stored: Sequence[bool], time: Sequence[int], start: list[int]) -> None:
    """XLA:GPU puts the larger of what a loop starts with first: the zeros in all its stacks, where these are larger
    than what it takes to make what the loop reads step by step (a recurrent layer's inputs times its kernel, and that
    transposed: 150 MiB each, and ten stacks of 50, for a GRU of width 1024)."""
    for region in graph.regions:
        stacks = [t for op_id in region.stacks for t in graph.ops[op_id].outputs]
        if region.parent or not stacks or region.kind != "scan":
            continue
        behind = _behind(graph, [graph.ops[op_id].inputs[0] for op_id in region.slices])
        if any(graph.ops[i].region or graph.ops[i].primitive == "loop_stack" for i in behind):
            continue  # another loop, with stacks of its own
        made = [i for i in behind if graph.ops[i].primitive not in ("argument", "constant")]
        written = sum(graph.tensors[t].bytes for i in made for t in graph.ops[i].outputs if stored[t])
        if made and written < sum(graph.tensors[t].bytes for t in stacks):
            first = min(time[i] for i in made)
            for t in stacks:
                start[t] = min(start[t], first)


def _behind(graph: Graph, tensors: Iterable[int]) -> set[int]:
    """Operations that some tensors are made by."""
    found, left = set[int](), list(tensors)
    while left:
        producer = graph.tensors[left.pop()].producer
        if producer is not None and producer not in found:
            found.add(producer)
            left += graph.ops[producer].inputs
    return found


def _prepared_together(graph: Graph, start: list[int]) -> None:
    """XLA:GPU fills with zeros in one kernel, before the first of them is needed, what has equal shapes: the stacks of
    all loops, and what gradients of tables are added up in. Zeros for tables of other shapes wait for nothing, so it
    makes them while it waits for a collective, before the first of all. Those that the gradient of a max pooling is
    added up in wait for its cotangent (``apply/``)."""
    filled = [
        graph.tensors[op.outputs[0]]
        for op in graph.ops
        if (op.primitive == "loop_stack" and graph.regions[op.region].parent == 0) or _adds_to_zeros(graph, op)
    ]
    first: dict[tuple[tuple[int, ...], str], int] = {}
    for t in filled:
        key = (t.shape, t.dtype)
        first[key] = min(first.get(key, start[t.id]), start[t.id])
    of_tables = {op.outputs[0] for op in graph.ops if _adds_to_zeros(graph, op)}
    early = min((first[t.shape, t.dtype] for t in filled if t.id in of_tables), default=0)
    for t in filled:
        start[t.id] = early if t.id in of_tables else first[t.shape, t.dtype]


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


def _reads(graph: Graph, root: Sequence[int], stored: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Operands read from memory: all of an unfusible operation's; of fused ones, each buffer once per phase."""
    seen: set[tuple[int, str]] = set()
    reads: list[tuple[int, ...]] = []
    for op in graph.ops:
        if op.primitive in VIEWS or op.primitive in BOUNDARY:
            reads.append(())
            continue
        mine = []
        for i, t in enumerate(op.inputs):
            if t in op.inputs[:i]:
                continue
            key = (root[t], op.phase)
            if not stored[root[t]] or not graph.tensors[t].shape:
                continue
            if not fusible(op):
                mine.append(i)
            elif key not in seen:
                seen.add(key)
                mine.append(i)
        reads.append(tuple(mine))
    return tuple(reads)

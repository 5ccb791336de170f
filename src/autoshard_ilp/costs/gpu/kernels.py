"""Which kernels XLA:GPU makes of a step: what they write, and what each of them reads.

A kernel is an operation that cannot be fused, a reduction with what is computed inside it, or what is computed for one
buffer. An operation inside several kernels is computed in each of them, and its operands are read by each. XLA:GPU then
makes one kernel of several that read a buffer of the size they run over and do not need one another, or of one that
writes such a buffer and one that reads it (``multi_output_fusion``): the sums of a normalisation's backward pass, a
residual sum and the mean of its rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.costs.gpu.splits import Branches
from autoshard_ilp.costs.primitives import REDUCTIONS, VIEWS, fusible
from autoshard_ilp.graph import BOUNDARY, Graph, Op


def kernels_of_operations(graph: Graph, root: Sequence[int], stored: Sequence[bool]) -> list[frozenset[int]]:
    """Per operation, the kernels that it is computed in: operation ids, or ``~t`` for what is computed for tensor t.

    Args:
        root: per tensor, the tensor whose buffer a view reads.
        stored: per tensor, whether it has a buffer of its own.
    """
    needed: list[set[int]] = [set() for _ in graph.tensors]  # kernels that compute a tensor inside
    found: list[frozenset[int]] = [frozenset()] * len(graph.ops)
    for op in reversed(graph.ops):
        if op.primitive in VIEWS or op.primitive in ("argument", "constant"):
            continue
        kernels = {op.id}
        if fusible(op):
            kernels = set().union(*[{~t} if stored[t] else needed[t] for t in op.outputs])
        found[op.id] = frozenset(kernels)
        for t in op.inputs:
            if not stored[root[t]]:
                needed[root[t]] |= kernels
    return found


def worth_writing(graph: Graph, root: Sequence[int], stored: np.ndarray, several: np.ndarray) -> np.ndarray:
    """Which of the tensors that several kernels need are written rather than computed in each of them.

    As XLA:GPU does (``priority_fusion``), what saves most is fused first: the bytes of a tensor, written once and read
    by each of its kernels, against those of what it is computed of, which each kernel must read that does not anyway.
    Nothing is fused that makes too many branches (:mod:`.costs.gpu.splits`).

    Args:
        root: per tensor, the tensor whose buffer a view reads.
        stored: per tensor, whether it has a buffer anyway.
        several: per tensor, whether several kernels need it.
    """
    held = (stored | several).tolist()
    inside = kernels_of_operations(graph, root, held)
    branches = Branches(graph, root, held, inside)
    if branches.repeated:
        several = several.copy()
        several[sorted(branches.repeated)] = True
        held = (stored | several).tolist()
        inside = kernels_of_operations(graph, root, held)
        branches = Branches(graph, root, held, inside)
    reads = _buffers(graph, root, held, inside)
    readers: dict[int, set[int]] = {}  # of each buffer
    for kernel, buffers in reads.items():
        for buffer in buffers:
            readers.setdefault(buffer, set()).add(kernel)
    size = [t.bytes for t in graph.tensors]

    def saved(t: int) -> float:
        of, by = reads.get(~t, set()), readers.get(t, set())
        anew = sum(size[b] for k in by for b in of - reads[k])
        return size[t] * (1 + len(by)) + sum(size[b] for b in of) - anew

    queue = [(-saved(t), t) for t in map(int, np.flatnonzero(several))]
    heapq.heapify(queue)
    written = set(map(int, np.flatnonzero(several)))
    while queue:
        known, t = heapq.heappop(queue)
        now = saved(t) if t in written else -1.0
        if now != -known or now < 0 or not branches.allow(t, readers.get(t, ())):
            continue  # there is a newer entry, or it is written
        written.remove(t)
        of, by = reads.pop(~t, set()), readers.pop(t, set())
        branches.fuse(t, by, of)
        for buffer in of:
            readers[buffer] = readers[buffer] - {~t} | by
        for kernel in by:
            reads[kernel] = reads[kernel] - {t} | of
        changed = {b for b in of if b in written} | {~k for k in by if k < 0 and ~k in written}
        changed |= {b for k in by for b in reads[k] if b in written}
        for other in changed:
            heapq.heappush(queue, (-saved(other), other))
    found = stored.copy()
    found[sorted(written)] = True
    return found


def reads_by_kernel(graph: Graph, root: Sequence[int], stored: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Per operation, positions of the operands that it reads from memory, one for each kernel that reads them for it.

    Args:
        root, stored: as for :func:`kernels_of_operations`.
    """
    inside = kernels_of_operations(graph, root, stored)
    group = _merged(graph, root, inside, _buffers(graph, root, stored, inside))
    reads: list[tuple[int, ...]] = []
    seen = {(group[k], ~k) for k in group if k < 0}  # what a kernel has written it need not read
    for op in graph.ops:
        mine: list[int] = []
        kernels = sorted({group[k] for k in inside[op.id]}) if op.primitive not in BOUNDARY else []
        operands = _read(graph, root, stored, op) if kernels else []
        for kernel in kernels:
            for position, buffer in operands:
                if (kernel, buffer) not in seen:
                    seen.add((kernel, buffer))
                    mine.append(position)
        reads.append(tuple(sorted(mine)))
    return tuple(reads)


def _read(graph: Graph, root: Sequence[int], stored: Sequence[bool], op: Op) -> list[tuple[int, int]]:
    """Positions of an operation's operands that lie in memory, and their buffers."""
    return [(i, root[t]) for i, t in enumerate(op.inputs) if stored[root[t]] and graph.tensors[t].shape]


def _buffers(
    graph: Graph, root: Sequence[int], stored: Sequence[bool], inside: Sequence[frozenset[int]]
) -> dict[int, set[int]]:
    """Kernel -> the buffers that it reads."""
    found: dict[int, set[int]] = {}
    for op in graph.ops:
        if inside[op.id]:
            mine = [buffer for _, buffer in _read(graph, root, stored, op)]
            for kernel in inside[op.id]:
                found.setdefault(kernel, set()).update(mine)
    return found


def _op(graph: Graph, kernel: int) -> Op:
    """The last operation of a kernel."""
    producer = kernel if kernel >= 0 else graph.tensors[~kernel].producer
    assert producer is not None
    return graph.ops[producer]


def _needs(graph: Graph, root: Sequence[int], inside: Sequence[frozenset[int]]) -> dict[int, set[int]]:
    """Kernel -> those whose results it reads, single numbers among them."""
    maker: dict[int, int] = {}  # tensor -> the kernel that writes it
    for op in graph.ops:
        for t in op.outputs:
            maker.update((t, k) for k in inside[op.id] if k in (~t, op.id))
    found: dict[int, set[int]] = {}
    for op in graph.ops:
        needed = {maker[root[t]] for t in op.inputs if root[t] in maker}
        for k in inside[op.id]:
            found.setdefault(k, set()).update(needed - {k})
    return found


def _merged(
    graph: Graph, root: Sequence[int], inside: Sequence[frozenset[int]], buffers: dict[int, set[int]]
) -> dict[int, int]:
    """Kernel -> the first of those that it becomes one with; ``buffers`` that each kernel reads."""
    needs = _needs(graph, root, inside)
    number = {k: i for i, k in enumerate(sorted(needs, key=lambda k: _op(graph, k).id))}
    before = [0] * len(number)  # bits: the kernels that one needs, and those of its group need
    group: dict[int, int] = {}
    of_buffer: dict[tuple[int, int, int], list[int]] = {}  # buffer, elements, region -> groups that read it

    def joins(k: int, maker: int) -> bool:
        """Whether a kernel may compute what it reads, and write it as well: nothing else that it needs needs that."""
        if maker not in group or _elements(graph, k) != _elements(graph, maker) or _reduces_columns(graph, k):
            return False
        bit = number[group[maker]]
        others = {group[other] for other in needs[k] - {maker} if other in group}
        return not any(number[other] == bit or before[number[other]] >> bit & 1 for other in others)

    for k in number:
        group[k] = k
        for other in needs[k]:
            if other in group:
                before[number[k]] |= before[number[group[other]]] | 1 << number[group[other]]
        elements, region = _elements(graph, k), _op(graph, k).region
        if not elements:
            continue
        large = [b for b in sorted(buffers.get(k, ())) if math.prod(graph.tensors[b].shape) == elements]
        candidates = dict.fromkeys(g for b in large for g in of_buffer.get((b, elements, region), ()))
        first = next((g for g in candidates if not before[number[k]] >> number[g] & 1), k)
        if first == k:
            first = next((group[~b] for b in large if joins(k, ~b)), k)
        group[k] = first
        before[number[first]] |= before[number[k]] & ~(1 << number[first])
        for b in large:
            groups = of_buffer.setdefault((b, elements, region), [])
            if first not in groups:
                groups.append(first)
    return group


def _elements(graph: Graph, kernel: int) -> int:
    """Over how many elements a kernel runs that may become one with others; 0 of those that may not."""
    if kernel < 0:
        return math.prod(graph.tensors[~kernel].shape)
    op = graph.ops[kernel]
    if op.primitive == "result" or op.primitive.startswith(REDUCTIONS):
        return math.prod(graph.tensors[op.inputs[0]].shape)
    return 0


def _reduces_columns(graph: Graph, kernel: int) -> bool:
    """Whether a kernel is a reduction that keeps the last dimension."""
    op = _op(graph, kernel)
    rank = len(graph.tensors[op.inputs[0]].shape) if op.inputs else 0
    return kernel >= 0 and op.primitive.startswith(REDUCTIONS) and rank - 1 not in op.params.get("axes", ())

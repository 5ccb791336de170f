"""Casts that XLA:TPU moves out of loops.

A scanned model keeps its weights as stacks of 32 bits, slices them layer by layer and casts every slice to 16 bits.
XLA:TPU casts the stack before the loop, and slices that: it holds a second stack of half the size until the last loop
ends that casts it alike. (Compiled for v5e, four layers ``f32[4,2048,8192]``: ``bf16[4,2048,8192]`` and no 32-bit
slice, forward or in both passes, of arguments and of what is computed. XLA:GPU casts inside the loop.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.graph import BOUNDARY, Graph, Op


@dataclass(frozen=True)
class Hoisted:
    """A cast stack.

    Attributes:
        stack: the tensor that is cast.
        itemsize: bytes per element.
        start, end: when it is held.
    """

    stack: int
    itemsize: float
    start: int
    end: int


def hoisted_casts(graph: Graph, buffers: Buffers) -> Mapping[int, Hoisted]:
    """Loop slices of which the loop reads nothing but one narrower cast -> the stack that is cast before the loop.

    A stack that several loops cast is held from one to the next.
    """
    casts: dict[tuple[int, str], list[tuple[int, Op]]] = defaultdict(list)
    for op in graph.ops:
        dtype = _cast_to(graph, op) if op.primitive == "loop_slice" else ""
        if dtype:
            stack = graph.behind(op.inputs[0], ("hub",))
            casts[stack, dtype].append((buffers.begins[op.region], op))
    found: dict[int, Hoisted] = {}
    for (stack, dtype), loops in casts.items():
        loops.sort(key=lambda loop: loop[0])
        after = [begins for begins, _ in loops[1:]]
        for k, (begins, op) in enumerate(loops):
            end = max((buffers.ends[op.region] + 1, *after[k : k + 1]))
            found[op.id] = Hoisted(stack, float(_ITEMSIZE[dtype]), begins, end)
    return found


def never_wide(graph: Graph, hoisted: Mapping[int, Hoisted]) -> Mapping[int, float]:
    """Stacks computed element by element that only such slices read -> bytes per element: the cast is computed with
    them, and they are held as it leaves them."""
    found: dict[int, float] = {}
    for cast in hoisted.values():
        producer = graph.tensors[cast.stack].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or made.primitive in (*VIEWS, *BOUNDARY) or not fusible(made):
            continue
        if all(reader.id in hoisted for reader in graph.readers(cast.stack)):
            found[cast.stack] = cast.itemsize
    return found


_ITEMSIZE = {"bfloat16": 2, "float16": 2}
"""What stacks are known to be cast to."""


def _cast_to(graph: Graph, op: Op) -> str:
    """The only type that a loop slice is read as, where that is narrower than its own; barriers are no readers."""
    sliced = graph.tensors[op.outputs[0]]
    left, types = [sliced.id], set[str]()
    while left:
        for c, operand in graph.tensors[left.pop()].consumers:
            reader = graph.ops[c]
            if reader.primitive == "optimization_barrier":
                left.append(reader.outputs[operand])
            elif reader.primitive in VIEWS:
                left += reader.outputs
            elif reader.primitive != "convert_element_type":
                return ""
            else:
                types.add(graph.tensors[reader.outputs[0]].dtype)
    dtype = types.pop() if len(types) == 1 else ""
    return dtype if _ITEMSIZE.get(dtype, sliced.itemsize) < sliced.itemsize else ""

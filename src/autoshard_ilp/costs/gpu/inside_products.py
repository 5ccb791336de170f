"""What XLA:GPU computes inside the matrix products that read it.

Triton's products take in what stands before them where each element is a function of one element of one array: a bias
and a ReLU, a scale, a sigmoid. Of two arrays, or of one that is read twice (a leaky ReLU, a GELU), the result is
written; so is a sum with a vector that was itself computed, such as a cast bias or what a batch normalisation adds, and
the rest of the chain is computed from that. The backward pass computes the chain again in the gradient of the weight.
So of a layer with a ReLU one array is kept for it, not two.

Found by compiling three layers of width 1024 for H100 in 16 and 32 bits with fifty functions after them
(``jax-cuda12-plugin`` 0.10; ``tests/test_inside_products.py`` compiles some again). Where products go to cuBLAS
(:mod:`autoshard_ilp.costs.gpu.triton`), they read what was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard_ilp.costs.gpu.triton import leaves_triton
from autoshard_ilp.costs.primitives import VIEWS, has_vector
from autoshard_ilp.graph import Graph, Op

OF_ONE = frozenset("abs neg exp expm1 log log1p sqrt rsqrt sin cos tanh atan erf logistic cbrt".split())  # noqa: SIM905
"""Functions of one operand, each of them one instruction: XLA does not expand them before products are made."""

OF_TWO = frozenset({"add", "add_any", "sub", "mul", "div", "max", "min"})
"""Functions of two operands, one of which may be a single number or a vector that the step is given."""

_SPREAD = frozenset((*VIEWS, "broadcast_in_dim"))


def computed_in_products(graph: Graph, root: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Tensors that a ``dot_general`` computes while it reads them, and the arrays that it reads for them.

    Args:
        graph: of a step for GPUs.
        root: per tensor, the tensor whose buffer a view reads.
    """
    inside: set[int] = set()
    read: set[int] = set()
    if leaves_triton(graph):
        return frozenset(), frozenset()
    for op in graph.ops:
        if op.primitive != "dot_general" or has_vector(graph, op):
            continue
        for t in (root[i] for i in op.inputs):
            if _array_of(graph, t) is not None:
                inside.add(t)
                read.add(_read_for(graph, root, t))
    return frozenset(inside), frozenset(read)


def _read_for(graph: Graph, root: Sequence[int], tensor: int) -> int:
    """The array that a product reads for one of its operands: the operand, or what it is computed from inside."""
    t = root[tensor]
    while (array := _array_of(graph, t)) is not None:
        t = root[array]
    return t


def sums_read_by_products(
    graph: Graph, root: Sequence[int], is_moved: Callable[[Op, int], bool] = lambda op, i: False
) -> frozenset[int]:
    """Sums with a computed vector that XLA:GPU writes for products, and that others read as well.

    XLA moves the reshape behind a product of merged dimensions down, in the forward pass not as far as in the backward
    pass, which would add the vector again: then it keeps both the product and the sum. Behind a barrier the sum is one
    for all. (Compiled for H100: a ReLU of ``bf16[16,196,1024]`` with a cast bias, and of ``f32[8192,4096]`` with one
    that is gathered.)

    Args:
        is_moved: whether an operation reads an operand in another layout than that is produced in, so that devices
            exchange it first, or take a part.
    """
    found: set[int] = set()
    if leaves_triton(graph):
        return frozenset()
    for op in graph.ops:
        for i in op.inputs if op.primitive == "dot_general" and not has_vector(graph, op) else ():
            t = root[i]
            while (array := _array_of(graph, t)) is not None and not _has_moved(graph, t, array, is_moved):
                t = root[array]
            producer = graph.tensors[t].producer
            adds = producer is not None and graph.ops[producer].primitive in ("add", "add_any")
            if adds and any(reader.primitive != "dot_general" for reader in graph.readers(t)):
                found.add(t)
    return frozenset(found)


def _has_moved(graph: Graph, tensor: int, array: int, is_moved: Callable[[Op, int], bool]) -> bool:
    """Whether what a tensor is made of, besides an array, is moved before it is read."""
    producer = graph.tensors[tensor].producer
    made = None if producer is None else graph.ops[producer]
    for i, t in enumerate(() if made is None else made.inputs):
        if t == array or made is None:
            continue
        if is_moved(made, i):
            return True
        source = graph.tensors[t].producer
        while source is not None and graph.ops[source].primitive in _SPREAD:
            if is_moved(graph.ops[source], 0):
                return True
            source = graph.tensors[graph.ops[source].inputs[0]].producer
    return False


def _array_of(graph: Graph, tensor: int) -> int | None:
    """The array that each element of a tensor is a function of one element of; None where Triton does not compute it
    inside a product."""
    own = graph.tensors[tensor]
    made = None if own.producer is None else graph.ops[own.producer]
    if made is None or made.primitive not in OF_ONE | OF_TWO:
        return None
    arrays = [t for t in made.inputs if not _is_at_hand(graph, made, t)]
    if len(arrays) != 1:
        return None
    read = graph.tensors[arrays[0]]
    if read.dtype != own.dtype or math.prod(read.shape) != math.prod(own.shape):
        return None
    return None if _clamps(graph, made, arrays[0]) else arrays[0]


def _clamps(graph: Graph, op: Op, operand: int) -> bool:
    """Whether an operation and the one before are a maximum and a minimum: XLA makes one of three operands of them."""
    producer = graph.tensors[graph.behind(operand, VIEWS)].producer
    before = "" if producer is None else graph.ops[producer].primitive
    return {op.primitive, before} == {"max", "min"}


def _is_at_hand(graph: Graph, reader: Op, tensor: int) -> bool:
    """Whether an operand is a number, or a vector that is read as the step was given it."""
    t = graph.behind(tensor, _SPREAD)
    source = graph.tensors[t]
    if source.literal is not None or not source.shape:
        return True
    given = source.producer is not None and graph.ops[source.producer].primitive == "argument"
    return given and source.bytes < graph.tensors[reader.outputs[0]].bytes

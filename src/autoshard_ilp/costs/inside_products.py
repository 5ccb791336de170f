"""What XLA:GPU computes inside the matrix products that read it.

Triton's products take in what stands before them where each element is a function of one element of one array: a bias
and a ReLU, a scale, a sigmoid. Of two arrays, or of one that is read twice (a leaky ReLU, a GELU), the result is
written; so is a sum with a vector that was itself computed, such as a cast bias or what a batch normalisation adds, and
the rest of the chain is computed from that. The backward pass computes the chain again in the gradient of the weight.
So of a layer with a ReLU one array is kept for it, not two.

Found by compiling three layers of width 1024 for H100 in 16 and 32 bits with fifty functions after them
(``jax-cuda12-plugin`` 0.10; ``tests/test_inside_products.py`` compiles some again). Where products go to cuBLAS
(:mod:`autoshard_ilp.costs.triton`), they read what was written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoshard_ilp.costs.primitives import VIEWS, has_vector
from autoshard_ilp.costs.triton import leaves_triton
from autoshard_ilp.costs.written import merges_dimensions
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
            array = _array_of(graph, t)
            if array is not None:
                inside.add(t)
                while array is not None:
                    t, array = root[array], _array_of(graph, root[array])
                read.add(t)
    return frozenset(inside), frozenset(read)


def read_beside_sums(graph: Graph, root: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Products that the backward pass reads again, though their sum with a bias was written: (product, sum).

    A product runs on two dimensions, so what has more is reshaped after it. XLA:GPU moves the reshape down, in the
    forward pass not as far as in the backward pass, which adds the bias again. (Compiled for H100: a ReLU of
    ``bf16[16,196,1024]``. Not for two dimensions, nor in 32 bits, where the bias is no cast one.)
    """
    for t in sorted(computed_in_products(graph, root)[1]):
        producer = graph.tensors[t].producer
        made = None if producer is None else graph.ops[producer]
        if made is None or made.primitive not in ("add", "add_any"):
            continue
        if all(reader.primitive == "dot_general" for reader in graph.readers(t)):
            continue
        for i in made.inputs:
            source = graph.tensors[root[i]].producer
            product = None if source is None else graph.ops[source]
            if product is not None and product.primitive == "dot_general" and merges_dimensions(graph, product):
                yield root[i], t


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

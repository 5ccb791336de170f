"""Whether XLA:GPU hands the products of a step to Triton.

Triton gets them all, or, where it finds no tiles for one and there is no GPU to try on, none: then all go to cuBLAS.
Complex numbers it has not. Real products it cannot tile only for what was made part of them. XLA asks for tiles of 16
rows and 16 contracted elements. What a product with several batch dimensions computes, such as attention, is often read
by the next one in another order, ``bnht -> (bt)(nh)``; the transposition becomes part of that product where the
contracted dimensions stay neighbours and the rows do not, and then the ``t`` tokens of a sequence, and the ``h``
elements of a head, must be whole tiles or whole parts of one.

The rule is that of the compiler in ``jax-cuda12-plugin`` 0.10, found by compiling attention of six forms and thirty
shapes for H100 (``tests/test_triton.py`` compiles some of them again). A product of few rows that XLA splits
(:mod:`.costs.gpu.splitk`) reads a copy and keeps its tiles. How many rows a device has depends on the layouts,
and this must be known before them, so those count as if they had none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autoshard_ilp.graph import Graph, Op

TRITON_TILE = 16
"""Rows, and contracted elements, of the tiles that are asked for where there is no GPU to try on."""

_REORDERED = frozenset(("transpose", "reshape", "squeeze", "expand_dims"))
_SAME_ORDER = frozenset(("hub", "copy", "convert_element_type"))


def leaves_triton(graph: Graph) -> bool:
    """Whether XLA:GPU, without a GPU to try on, finds no Triton tiles for some product of a step."""
    for op in graph.ops:
        if op.primitive != "dot_general":
            continue
        if graph.tensors[op.outputs[0]].dtype.startswith("complex"):
            return True  # Triton has none
        (contract, _), (batch, _) = op.params["dimension_numbers"]
        parts = [] if batch else _parts_of_product(graph, op.inputs[0])
        if not parts:
            continue
        maker = _maker(graph, op.inputs[0])
        if maker is not None and maker.primitive != "transpose":
            contract = sorted(contract)  # as XLA does, but for those that it has already put a transposition into
        contracted = [part for d in contract for part in parts[d]]
        rows = [part for d, several in enumerate(parts) if d not in contract for part in several]
        if _are_neighbours(contracted) and not _are_neighbours(rows):
            sizes = [n for group in (contracted, rows) for _, n in group[1:]]
            if any(n % TRITON_TILE and TRITON_TILE % n for n in sizes):
                return True
    return False


def _maker(graph: Graph, tensor: int) -> Op | None:
    """The operation that computes a tensor, seen through copies."""
    producer = graph.tensors[graph.behind(tensor, _SAME_ORDER)].producer
    return None if producer is None else graph.ops[producer]


def _parts_of_product(graph: Graph, tensor: int) -> list[list[tuple[int, int]]]:
    """Per dimension, those of the result of a product with several batch dimensions that it consists of, major first.

    Each is (position among those of that result, size); those of size 1 are left out. Empty where a tensor is no such
    result, seen through transpositions and dimensions joined into one.
    """
    views: list[Op] = []
    product = _maker(graph, tensor)
    while product is not None and product.primitive in _REORDERED:
        views.append(product)
        product = _maker(graph, product.inputs[0])
    if product is None or product.primitive != "dot_general" or len(product.params["dimension_numbers"][1][0]) < 2:
        return []
    shape = graph.tensors[product.outputs[0]].shape
    while views and views[-1].params.get("permutation") == (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2):
        shape = graph.tensors[views.pop().outputs[0]].shape  # XLA swaps the product's operands instead
    places = itertools.accumulate((n > 1 for n in shape), initial=0)
    parts = [[place] for place in zip(places, shape, strict=False)]
    for op in reversed(views):
        if op.primitive == "transpose":
            parts = [parts[d] for d in op.params["permutation"]]
        else:
            parts = _joined([part for several in parts for part in several], graph.tensors[op.outputs[0]].shape)
        if not parts:
            return []
    return [[part for part in several if part[1] > 1] for several in parts]


def _joined(parts: list[tuple[int, int]], shape: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Dimensions reshaped: those that each new one is made of; empty where one is split."""
    parts = [part for part in parts if part[1] > 1]
    found = []
    for size in shape:
        joined: list[tuple[int, int]] = []
        while parts and math.prod(n for _, n in joined) < size:
            joined.append(parts.pop(0))
        if math.prod(n for _, n in joined) != size:
            return []
        found.append(joined)
    return found


def _are_neighbours(parts: Sequence[tuple[int, int]]) -> bool:
    """Whether dimensions follow one another where they come from."""
    return all(after == before + 1 for (before, _), (after, _) in itertools.pairwise(parts))

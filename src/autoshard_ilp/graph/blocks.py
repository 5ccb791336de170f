"""Where the forward pass is cut into the blocks that recompute.

Whoever recomputes a block keeps what is alive at the cut before it for the whole forward pass, and holds what the block
makes while its own backward pass runs (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). So a good
set of cuts has a small

    held  =  bytes kept at all cuts  +  bytes that the largest block makes

Candidates are the *dips*: minima of what is alive. Dips that look alike (the same operations around them, the same
bytes) are of one *kind* and are treated alike, so that repeated layers are cut alike.

1. Beginning with all dips and the kind that keeps most, those are given up without which no more is held; of a kind all
   stay, every second, every third and so on, or none.
   Where tensors pile up that are read much later, hardly two dips are alike, and that ends far from the least. So the
   narrowest dip of every half, third, quarter and so on of what is made is tried as well, and taken where that holds
   clearly less (:data:`CLEARLY`).
2. Then kinds are taken back, the most useful first, as long as little more is held (:data:`NEAR_LEAST`). Useful is
   what keeps less than half of what it divides, on either side of it. More blocks leave more to choose from where only
   some recompute, and what leads to nothing but a cut need not be computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from autoshard_ilp.costs.primitives import PRODUCTS
from autoshard_ilp.graph import BOUNDARY, Graph, Op

NARROW_OPS = 12
"""A dip is a minimum of the forward pass's width among this many operations on either side."""

ALIKE_OPS = 6
"""Dips are of one kind if so many operations on either side are alike."""

NEAR_LEAST = 1.35
"""Cuts may hold so many times the least. With two cuts per layer rather than one, 12 layers of ViT-B hold 1.05 times as
much, 32 of Llama 3 8B 1.19 times, and the product that leads to the further cut is spared."""

CLEARLY = 0.9
"""Of what is held with repeated layers cut alike: less is worth cutting them differently."""

MOST_PARTS = 64
"""Parts of what is made with one cut in each."""

USEFUL = 0.5
"""Of the smaller part that a further cut divides a block into: what the cut may keep."""

FORMS = frozenset({"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims"})
"""Operations whose result is their operand in another form."""


def is_forward(op: Op) -> bool:
    """Whether an operation is of the forward pass, and of no loop or branch."""
    return op.phase == "forward" and op.region == 0


def is_dear(op: Op) -> bool:
    """Whether an operation is a convolution, or a matrix product without batch dimensions.

    No compiler computes their results again for each of their readers.
    """
    batched = op.primitive == "dot_general" and op.params["dimension_numbers"][1][0]
    return op.primitive in PRODUCTS and not batched


def tail(graph: Graph) -> int:
    """Number of the operation from which on nothing is recomputed."""
    return max((op.id for op in graph.ops if is_forward(op) and is_dear(op)), default=len(graph.ops))


class Blocks:
    """The blocks of a graph that recomputes nothing yet.

    ``cuts`` are places of the forward pass, in order; a cut lies before the operation at its place. Where products are
    kept anyway, ``few`` of them are enough.
    """

    def __init__(self, graph: Graph) -> None:
        forward = [op for op in graph.ops if is_forward(op) and op.primitive not in BOUNDARY]
        self._place = {op.id: i for i, op in enumerate(forward)}
        made = _made(graph, self._place)
        self._spans = _Spans(graph, self._place, made)
        dips, kinds = self._spans.dips(graph, forward)
        self.cuts = self._spans.chosen(dips, kinds)
        besides = _Spans(graph, self._place, {t: bytes_ for t, bytes_ in made.items() if not _is_made_dear(graph, t)})
        self.few = besides.chosen(self.cuts, [[p for p in alike if p in self.cuts] for alike in kinds])

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.cuts) + 1

    def kept(self, policies: Sequence[str]) -> set[int]:
        """Tensors kept for blocks with these policies: what is alive at a cut."""
        beside_full = (a == "full" or b == "full" for a, b in pairwise(policies))
        used = [cut for cut, full in zip(self.cuts, beside_full, strict=True) if full or cut in self.few]
        return self._spans.alive_at(np.array(used, dtype=int))

    def of(self, op: Op) -> int:
        """The number of an operation's block."""
        return int(np.searchsorted(self.cuts, self._place.get(op.id, 0), side="right"))


class _Spans:
    """From where to where of the forward pass its tensors are alive, counting readers of the forward pass only, and the
    bytes that are ``made`` on the way."""

    def __init__(self, graph: Graph, place: Mapping[int, int], made: Mapping[int, int]) -> None:
        spans = list[tuple[int, int, int]]()  # tensor, first and last place
        for i, at in place.items():
            for t in graph.ops[i].outputs:
                last = max((place[c] for c, _ in graph.tensors[t].consumers if c in place), default=-1)
                if last > at:
                    spans.append((t, at + 1, last))
        self._tensors, self._starts, self._ends = np.array(spans, dtype=int).reshape(-1, 3).T
        self._bytes = np.array([graph.tensors[t].bytes for t in self._tensors], dtype=float)
        at_place = np.zeros(len(place))
        for t, bytes_ in made.items():
            at_place[place[graph.tensors[t].producer or 0]] += bytes_
        self._made = np.concatenate([[0.0], np.cumsum(at_place)])
        change = np.zeros(len(place) + 2)
        np.add.at(change, self._starts, self._bytes)
        np.add.at(change, self._ends + 1, -self._bytes)
        self.width = np.rint(np.cumsum(change)[: len(place)])

    def dips(self, graph: Graph, forward: Sequence[Op]) -> tuple[np.ndarray, list[list[int]]]:
        """Minima of what is alive, and the same by kind."""
        dips = _dips(self.width)
        kinds = defaultdict[Hashable, list[int]](list)
        for p in dips:
            around = forward[max(0, p - ALIKE_OPS) : p + ALIKE_OPS]
            alike = tuple((op.primitive, *(graph.tensors[t].shape for t in op.outputs)) for op in around)
            kinds[alike, float(self.width[p])].append(p)
        return np.array(dips, dtype=int), list(kinds.values())

    def alive_at(self, cuts: np.ndarray) -> set[int]:
        """Tensors alive at a cut."""
        return set(self._tensors[self._hold(cuts)].tolist())

    def chosen(self, dips: np.ndarray, kinds: Sequence[list[int]]) -> np.ndarray:
        """The cuts among dips, which are given by kind as well."""
        kinds = [alike for alike in kinds if alike]
        least = self._fewer(dips, sorted(kinds, key=lambda alike: -len(alike) * self.width[alike[0]]))
        spread = min(self._spread(dips), key=self._held, default=least)
        if self._held(spread) < CLEARLY * self._held(least):
            least = spread
        return self._more(least, sorted(kinds, key=lambda alike: float(self.width[alike[0]])))

    def _fewer(self, cuts: np.ndarray, kinds: Sequence[list[int]]) -> np.ndarray:
        """Without what makes no more held."""
        shrinking = True
        while shrinking:
            shrinking, left = False, list[list[int]]()
            for alike in kinds:
                others = np.setdiff1d(cuts, alike, assume_unique=True)
                ways = [(np.union1d(others, some).astype(int), some) for some in _thinned(alike)]
                best, some = min(ways, key=lambda way: (self._held(way[0]), len(way[0])))
                shrinking |= len(best) < len(cuts)
                cuts = best
                left.extend([some] if some else [])
            kinds = left
        return cuts

    def _spread(self, dips: np.ndarray) -> Iterator[np.ndarray]:
        """The narrowest dip of every half, third, quarter, ... of what is made."""
        before = self._made[dips] / max(self._made[-1], 1.0)
        order = np.lexsort((-dips, self.width[dips]))
        for parts in range(2, min(MOST_PARTS, len(dips)) + 1):
            _, first = np.unique(np.minimum(before[order] * parts, parts - 1).astype(int), return_index=True)
            yield np.sort(dips[order[first]])

    def _more(self, cuts: np.ndarray, kinds: Sequence[list[int]]) -> np.ndarray:
        """With more that is useful, and has little more held."""
        most = NEAR_LEAST * self._held(cuts)
        for alike in sorted(kinds, key=lambda alike: self._keeps_of_divided(cuts, alike)):
            more = np.union1d(cuts, alike).astype(int)
            if self._keeps_of_divided(cuts, alike) < USEFUL and self._held(more) <= most:
                cuts = more
        return cuts

    def _keeps_of_divided(self, cuts: np.ndarray, alike: list[int]) -> float:
        """What further cuts keep, of the smaller parts that they divide blocks into."""
        more = np.union1d(cuts, alike).astype(int)
        parts = np.diff(self._made[self._edges(more)])
        new = np.isin(more, cuts, invert=True)
        divided = float(np.minimum(parts[:-1], parts[1:])[new].sum())
        return (self._kept_bytes(more) - self._kept_bytes(cuts)) / divided if divided else np.inf

    def _held(self, cuts: np.ndarray) -> float:
        """Bytes kept at all cuts, and made by the largest block."""
        return self._kept_bytes(cuts) + float(np.diff(self._made[self._edges(cuts)]).max())

    def _edges(self, cuts: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], cuts, [len(self._made) - 1]])

    def _kept_bytes(self, cuts: np.ndarray) -> float:
        return float(self._bytes[self._hold(cuts)].sum())

    def _hold(self, cuts: np.ndarray) -> np.ndarray:
        """Which spans hold a cut."""
        following = np.searchsorted(cuts, self._starts)
        inside = following < len(cuts)
        inside[inside] = cuts[following[inside]] <= self._ends[inside]
        return inside


def _made(graph: Graph, place: Mapping[int, int]) -> dict[int, int]:
    """Tensors that are written, whatever is fused, and may be computed again, and their bytes: what products make, and
    what they read, unless it is an argument in another form."""
    end = tail(graph)
    made = dict[int, int]()
    for op in graph.ops:
        if op.id in place and op.id <= end and op.primitive in PRODUCTS:
            for t in (*op.inputs, *op.outputs) if op.id < end else op.inputs:
                whole = graph.behind(t, FORMS)
                if graph.tensors[whole].producer in place:
                    made.setdefault(whole, graph.tensors[t].bytes)
    return made


def _is_made_dear(graph: Graph, tensor: int) -> bool:
    producer = graph.tensors[tensor].producer
    return producer is not None and is_dear(graph.ops[producer])


def _dips(width: np.ndarray) -> list[int]:
    """Minima among their neighbours, but for places where nothing is alive besides arguments."""
    wide = np.where(width > 0, width, np.inf)
    dips = (wide[max(0, p - NARROW_OPS) : p + NARROW_OPS + 1].min() for p in range(len(wide)))
    return [p for p, least in enumerate(dips) if 0 < p < len(wide) - 1 and wide[p] == least < np.inf]


def _thinned(alike: list[int]) -> list[list[int]]:
    """All of them, every second, third, ..., or none; what comes first is left out, since blocks end with a cut."""
    return [*(alike[step - 1 :: step] for step in range(1, len(alike) // 2 + 2)), []]

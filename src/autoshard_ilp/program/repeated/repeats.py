"""Where a program repeats itself: equal layers, cut where least passes from one to the next.

A network of many equal layers has as many equal pieces in its program. What shrinks one of them shrinks all of them
(:mod:`.program.repeated.stamping`), so it matters which nodes make up a layer, and that few edges leave it.

Nodes of one *kind* are numbered along the layers. An edge that joins two kinds joins members whose numbers differ by
always the same; every kind is given an offset so that number plus offset is the layer. Around a circle (out of a layer
and into the next) not all edges can stay within a layer, so some are cut. The offsets that cut the least table cells
solve a linear program whose matrix is that of a network, so its vertices are whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.model import Program

REFINEMENTS = 3
"""Times that kinds with several members in a layer are told apart by their edges."""


@dataclass(frozen=True, eq=False)
class Alike:
    """Which nodes and edges of a program are alike.

    Attributes:
        nodes: kind of every node; members of a kind are in the order of their layers.
        edges: kind of every edge; edges of a kind join nodes of the same two kinds in the same way.
        backward: whether a node's kind meets the layers from the last to the first.
    """

    nodes: np.ndarray
    edges: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True, eq=False)
class Copies:
    """Equal pieces of a program: the same costs and tables, edge by edge.

    Attributes:
        nodes: node numbers, (copies, nodes of one).
        edges: numbers of the edges within, (copies, edges of one).
        layers: which layer each copy is.
        chain: number of the chain of layers; those of several groups may be of one chain.
    """

    nodes: np.ndarray
    edges: np.ndarray
    layers: np.ndarray
    chain: int


@dataclass(frozen=True, eq=False)
class _Links:
    """Edges that join the same two kinds: one entry each."""

    first: np.ndarray  # an edge of it
    count: np.ndarray
    least: np.ndarray  # of the differences between the two numbers along the layers ..
    most: np.ndarray  # .. and the largest of them
    both: np.ndarray  # whether both kinds have several members


def copies_in(program: Program, alike: Alike) -> list[Copies]:
    """Equal pieces, each as large as the layers allow, all disjoint.

    Args:
        program: arrays that are the same for two nodes, or two edges, are the same object.
        alike: its kinds.

    Returns:
        Groups of equal layers; a chain has two layers or more. Empty where nothing repeats.
    """
    u, v = (np.array([getattr(e, end) for e in program.edges], np.int64) for end in ("u", "v"))
    if not len(u):
        return []
    kinds, links, number = _with_constant_steps(alike, u, v)
    part, layer = _layers(program, kinds, links, number, u, v)
    piece = _pieces(kinds, part, layer)  # per node; -1: none
    return _grouped(program, kinds, alike.edges, piece, part, u, v)


def _numbers(kinds: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Each node's number among those of its kind, along the layers."""
    count = np.bincount(kinds)
    order = np.argsort(kinds, kind="stable")
    number = np.empty(len(kinds), np.int64)
    number[order] = np.arange(len(kinds)) - np.repeat(np.cumsum(count) - count, count)
    return np.where(backward, count[kinds] - 1 - number, number)


def _with_constant_steps(alike: Alike, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, _Links, np.ndarray]:
    """Kinds, their links, and numbers along the layers; kinds that meet a layer several times are told apart."""
    kinds, edges = np.unique(alike.nodes, return_inverse=True)[1], np.unique(alike.edges, return_inverse=True)[1]
    left = REFINEMENTS
    while True:
        number = _numbers(kinds, alike.backward)
        links = _links(kinds, edges, number, u, v)
        uneven = links.both & (links.least != links.most)
        if not uneven.any() or not left:
            return kinds, links, number
        left -= 1
        again = np.zeros(kinds.max() + 1, bool)
        again[kinds[u[links.first[uneven]]]] = again[kinds[v[links.first[uneven]]]] = True
        around: list[list[int]] = [[] for _ in kinds]
        for ends, sign in ((u, 0), (v, 1)):
            for e in np.flatnonzero(again[kinds[ends]]).tolist():
                around[ends[e]].append(2 * int(edges[e]) + sign)
        names: dict[tuple[int, tuple[int, ...]], int] = {}
        parts = [(k, tuple(sorted(near))) for k, near in zip(kinds.tolist(), around, strict=True)]
        kinds = np.array([names.setdefault(p, len(names)) for p in parts], np.int64)
        edges = np.unique(np.stack([edges, kinds[u], kinds[v]]), axis=1, return_inverse=True)[1].reshape(-1)


def _links(kinds: np.ndarray, edges: np.ndarray, number: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Links:
    order = np.argsort(edges, kind="stable")
    starts = np.flatnonzero(np.diff(edges[order], prepend=-1))
    step = (number[v] - number[u])[order]
    first, size = order[starts], np.bincount(kinds)
    return _Links(
        first,
        np.diff(starts, append=len(order)),
        np.minimum.reduceat(step, starts),
        np.maximum.reduceat(step, starts),
        (size[kinds[u[first]]] > 1) & (size[kinds[v[first]]] > 1),
    )


def _layers(
    program: Program, kinds: np.ndarray, links: _Links, number: np.ndarray, u: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per node the connected part of the repeated kinds that it belongs to (-1: it does not repeat), and its layer."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    size = np.bincount(kinds)
    several = size[kinds] > 1
    even = np.flatnonzero(links.both & (links.least == links.most))
    if not len(even):
        return np.where(several, kinds, -1), np.where(several, number, 0)
    a, b = kinds[u[links.first[even]]], kinds[v[links.first[even]]]
    step = links.least[even].astype(float)
    cells = np.array([program.edges[e].table.size for e in links.first[even]]) * links.count[even]
    # minimise sum of cells * cut  where  cut >= |step + offset[b] - offset[a]|
    n, m, each = len(size), len(even), np.arange(len(even))
    rows = np.concatenate([each] * 3 + [m + each] * 3)
    columns = np.tile(np.concatenate([b, a, n + each]), 2)
    values = np.repeat([1.0, -1.0, -1.0, -1.0, 1.0, -1.0], m)
    matrix = coo_matrix((values, (rows, columns)), (2 * m, n + m)).tocsr()
    costs = np.concatenate([np.zeros(n), cells.astype(float)])
    bounds = np.repeat([[-np.inf, np.inf], [0.0, np.inf]], [n, m], axis=0)
    found = linprog(costs, matrix, np.concatenate([-step, step]), bounds=bounds, method="highs")
    offset = np.rint(found.x[:n]).astype(np.int64) if found.x is not None else np.zeros(n, np.int64)
    part = connected_components(coo_matrix((np.ones(m), (a, b)), (n, n)), directed=False)[1]
    return np.where(several, part[kinds], -1), np.where(several, number + offset[kinds], 0)


def _pieces(kinds: np.ndarray, part: np.ndarray, layer: np.ndarray) -> np.ndarray:
    """Per node the piece, a part's layer, that it belongs to; -1 where its layer is not as the others are.

    Near the first and the last layer some kinds are missing. A part's pieces consist of the kinds with so many members
    that least is left to shrink: one piece, and what is outside of all.
    """
    piece, pieces = np.full(len(kinds), -1, np.int64), 0
    order = np.argsort(part, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(part[order])) + 1):
        if part[nodes[0]] < 0:
            continue
        kind, layers = (np.unique(x[nodes], return_inverse=True)[1] for x in (kinds, layer))
        here = np.zeros((kind.max() + 1, layers.max() + 1), bool)
        here[kind, layers] = True
        members = here.sum(axis=1)
        best: tuple[int, np.ndarray, np.ndarray] | None = None
        for least in np.unique(members):
            chosen = members >= least
            whole = here[chosen].all(axis=0)
            left = int(chosen.sum()) * (1 - int(whole.sum())) + len(nodes)
            if whole.sum() > 1 and (best is None or left < best[0]):
                best = left, chosen, whole
        if best is not None:
            inside = best[1][kind] & best[2][layers]
            piece[nodes[inside]] = pieces + layers[inside]
        pieces += here.shape[1]
    return piece


def _grouped(
    program: Program,
    kinds: np.ndarray,
    edge_kinds: np.ndarray,
    piece: np.ndarray,
    part: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
) -> list[Copies]:
    """Pieces with equal costs and tables together."""
    nodes = np.lexsort((kinds, piece))
    nodes = nodes[piece[nodes] >= 0]
    within = np.flatnonzero((piece[u] >= 0) & (piece[u] == piece[v]))
    within = within[np.lexsort((kinds[v[within]], kinds[u[within]], edge_kinds[within], piece[u[within]]))]
    edges_of = dict(_runs(piece[u[within]], within))
    groups: dict[tuple[int, tuple[object, ...]], list[tuple[int, np.ndarray, np.ndarray]]] = {}
    local = np.zeros(len(kinds), np.int64)
    for at, mine in _runs(piece[nodes], nodes):
        local[mine] = np.arange(len(mine))
        inner = edges_of.get(at, np.zeros(0, np.int64))
        key: tuple[object, ...] = (
            *(id(program.nodes[x].costs) for x in mine.tolist()),
            None,
            *((id(program.edges[e].table), local[u[e]], local[v[e]]) for e in inner.tolist()),
        )
        groups.setdefault((int(part[mine[0]]), key), []).append((at, mine, inner))
    found = []
    for (chain, _), group in groups.items():
        layers, members, edges = zip(*group, strict=True)
        found.append(Copies(np.stack(members), np.stack(edges), np.array(layers, np.int64), chain))
    return found


def _runs(values: np.ndarray, items: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """``items`` by their values, which are sorted."""
    if not len(items):
        return []
    cuts = np.flatnonzero(np.diff(values)) + 1
    return [(int(x[0]), y) for x, y in zip(np.split(values, cuts), np.split(items, cuts), strict=True)]

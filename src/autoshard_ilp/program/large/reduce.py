"""Exact reductions on flat arrays, in rounds: each takes a ``Flat`` and returns a smaller one with what undoes it.

| step | exact because |
|---|---|
| values without a finite partner go | no finite assignment has them |
| nodes determined by a neighbour merge into it | the finite cells of the table are a function |
| parallel tables add up, separable tables move into the costs | no assignment changes its cost |
| dominated values go | another is no dearer and holds no more, whatever the neighbours choose |
| nodes without bytes and with at most two neighbours go | bucket elimination |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard_ilp.program.large import kernels_reduce as kernels
from autoshard_ilp.program.large.flat import Flat, offsets
from autoshard_ilp.program.large.undo import Elimination, Substitution, Undo
from autoshard_ilp.program.nets.net import EmptyNodeError

GROWTH = 4000  # rows that the tables of one merged node may gain
NOISE = 1e-13  # relative difference of sums that are equal
DOMINANCE_WORK = 20_000_000  # comparisons per node and round
PRODUCT_CELLS = 4096  # largest table made by an elimination


@dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced program with the way back; ``sizes``: the nodes after each step that changed something."""

    flat: Flat
    undo: tuple[Undo, ...]
    counts: tuple[np.ndarray, ...]  # values per node after each entry of ``undo``
    sizes: tuple[tuple[str, int], ...]

    def expand(self, x: np.ndarray) -> np.ndarray:
        """The assignment of the original nodes."""
        for step in reversed(self.undo):
            x = step.expand(x)
        return x

    def project(self, x: np.ndarray) -> np.ndarray:
        """An assignment of what is left that expands to ``x`` or better, wherever the values are still there."""
        for step, counts in zip(self.undo, self.counts, strict=True):
            x = step.project(x, counts)
        return x


def group_by_node(nodes: int, eu: np.ndarray, ev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges per node: offsets and edge numbers, ascending."""
    ends = np.concatenate((eu, ev))
    order = np.argsort(ends, kind="stable")
    return offsets(np.bincount(ends, minlength=nodes)), (order % max(1, len(eu))).astype(np.int64)


def substitute(
    flat: Flat, new: np.ndarray, moff: np.ndarray, maps: np.ndarray, counts: np.ndarray, keep: np.ndarray
) -> Flat:
    """The program over new nodes of ``counts`` values; edges with ``keep`` only, tables over the same pair add up.

    Args:
        flat: the program.
        new: new node of every old node.
        moff: start of an old node's map in ``maps``: from values of its new node to its own.
        maps: old values.
        counts: values of the new nodes.
        keep: bool per edge.
    """
    noff = offsets(counts)
    eu, ev = flat.eu[keep], flat.ev[keep]
    toff_in = np.append(flat.toff[:-1][keep], 0)
    ru, rv = new[eu], new[ev]
    low, high = np.minimum(ru, rv), np.maximum(ru, rv)
    outer = np.flatnonzero(ru != rv)
    _, first, inverse = np.unique(low[outer] * len(counts) + high[outer], return_index=True, return_inverse=True)
    target = np.full(len(eu), -1, np.int64)
    target[outer] = inverse
    nev = rv[outer[first]]
    neu = ru[outer[first]]
    ntoff = offsets(counts[neu] * counts[nev])
    ncost, ntable = np.zeros(noff[-1]), np.zeros(ntoff[-1])
    kernels.substitute(
        flat.off, flat.cost, eu, ev, toff_in, flat.table, new, moff, maps, target, noff, ncost, nev, ntoff, ntable
    )
    return _with_segments(flat, new, moff, maps, noff, ncost, neu, nev, ntoff, ntable)


def _with_segments(flat, new, moff, maps, noff, ncost, neu, nev, ntoff, ntable) -> Flat:  # type: ignore[no-untyped-def]
    """Carry the bytes over: what all values of a node hold goes into ``base``, segments of one interval add up."""
    owner = np.repeat(np.arange(flat.nodes), np.diff(flat.soff))
    home = new[owner]
    counts = np.diff(noff)
    order = np.lexsort((flat.send, flat.sstart, home))
    home, owner, starts, ends = home[order], owner[order], flat.sstart[order], flat.send[order]
    if len(order):
        fresh = np.ones(len(order), bool)
        fresh[1:] = (home[1:] != home[:-1]) | (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    else:
        fresh = np.zeros(0, bool)
    group = np.cumsum(fresh) - 1
    home_g, starts, ends = home[fresh], starts[fresh], ends[fresh]
    goff = offsets(counts[home_g])
    size = counts[home]
    entry = np.repeat(np.arange(len(order)), size)
    value = np.arange(len(entry)) - np.repeat(offsets(size)[:-1], size)
    held = flat.use[flat.uoff[:-1][order][entry] + maps[moff[owner[entry]] + value]]
    use = np.zeros(goff[-1], np.int64)
    np.add.at(use, goff[:-1][group[entry]] + value, held)
    least = np.minimum.reduceat(use, goff[:-1]) if len(home_g) else np.zeros(0, np.int64)
    use -= np.repeat(least, np.diff(goff))
    most = np.maximum.reduceat(use, goff[:-1]) if len(home_g) else least
    delta = np.zeros(len(flat.base) + 1, np.int64)
    np.add.at(delta, starts, least)
    np.add.at(delta, ends, -least)
    varies = most > 0
    kept = np.repeat(varies, np.diff(goff))
    soff = offsets(np.bincount(home_g[varies], minlength=len(counts)))
    uoff = offsets(np.diff(goff)[varies])
    base = flat.base + np.cumsum(delta)[:-1]
    return Flat(
        noff, ncost, neu, nev, ntoff, ntable, soff, starts[varies], ends[varies], uoff, use[kept], base, flat.capacity
    )


def keep_values(flat: Flat, alive: np.ndarray, keep: np.ndarray | None = None) -> tuple[Flat, Substitution]:
    """Drop values (and edges without ``keep``)."""
    counts = np.add.reduceat(alive, flat.off[:-1], dtype=np.int64)
    if (counts == 0).any():
        raise EmptyNodeError(int(np.argmin(counts)))
    identity = np.arange(flat.nodes)
    own = np.arange(len(alive)) - np.repeat(flat.off[:-1], flat.counts)
    undo = Substitution(identity, offsets(counts)[:-1], own[alive])
    every = np.ones(len(flat.eu), bool) if keep is None else keep
    return substitute(flat, undo.new, undo.moff, undo.maps, counts, every), undo


def arc_consistency(flat: Flat) -> tuple[Flat, list[Undo]]:
    """Drop values without a finite partner.

    Raises:
        EmptyNodeError: no finite assignment.
    """
    alive = np.ones(len(flat.cost), bool)
    removed = kernels.propagate(flat.off, flat.cost, flat.eu, flat.ev, flat.toff, flat.table, alive)
    if removed < 0:
        raise EmptyNodeError("arc consistency")
    if not removed:
        return flat, []
    out, undo = keep_values(flat, alive)
    return out, [undo]


def merge(flat: Flat, growth: int = GROWTH) -> tuple[Flat, list[Undo]]:
    """Merge nodes that a neighbour determines, after dropping values without a finite partner (if there are any).

    Among consistent values, as many finite cells as the larger node has values mean that it determines the smaller.

    Raises:
        EmptyNodeError: no finite assignment.
    """
    flat, first = arc_consistency(flat)
    degree = np.bincount(np.concatenate((flat.eu, flat.ev)), minlength=flat.nodes).astype(np.int64)
    root, moff, maps = kernels.merge_forest(flat.off, flat.eu, flat.ev, flat.toff, flat.table, degree, growth)
    roots = np.flatnonzero(root == np.arange(flat.nodes))
    if len(roots) == flat.nodes:
        return flat, first
    number = np.zeros(flat.nodes, np.int64)
    number[roots] = np.arange(len(roots))
    undo = Substitution(number[root], moff, maps)
    every = np.ones(len(flat.eu), bool)
    return substitute(flat, undo.new, moff, maps, flat.counts[roots], every), [*first, undo]


def separable(flat: Flat) -> tuple[Flat, list[Undo]]:
    """Drop tables that are sums of two vectors."""
    cost, keep = flat.cost.copy(), np.ones(len(flat.eu), bool)
    kernels.fold_separable(flat.off, cost, flat.eu, flat.ev, flat.toff, flat.table, NOISE, keep)
    if keep.all():
        return flat, []
    sizes = np.diff(flat.toff)
    table = flat.table[np.repeat(keep, sizes)]
    return replace(flat, cost=cost, eu=flat.eu[keep], ev=flat.ev[keep], toff=offsets(sizes[keep]), table=table), []


def dominance(flat: Flat) -> tuple[Flat, list[Undo]]:
    """Drop dominated values."""
    ioff, inc = group_by_node(flat.nodes, flat.eu, flat.ev)
    alive = np.ones(len(flat.cost), bool)
    better = np.full(len(flat.cost), -1)
    removed = kernels.dominate(
        *(flat.off, flat.cost, flat.eu, flat.ev, flat.toff, flat.table, ioff, inc),
        *(flat.soff, flat.uoff, flat.use, alive, better, DOMINANCE_WORK),
    )
    if not removed:
        return flat, []
    out, undo = keep_values(flat, alive)
    return out, [replace(undo, off=flat.off, better=better)]


def eliminate(flat: Flat) -> tuple[Flat, list[Undo]]:
    """Take out nodes that hold no bytes and have at most two neighbours, no two of them adjacent."""
    ioff, inc = group_by_node(flat.nodes, flat.eu, flat.ev)
    degree, counts = np.diff(ioff), flat.counts
    chosen = np.zeros(flat.nodes, bool)
    blocked = np.zeros(flat.nodes, bool)
    plan: list[tuple[int, int, int, int, int]] = []  # node, its edges and neighbours (-1: none)
    for v in np.flatnonzero((degree <= 2) & (np.diff(flat.soff) == 0)).tolist():
        edges = inc[ioff[v] : ioff[v + 1]].tolist()
        ends = [int(flat.ev[e] if flat.eu[e] == v else flat.eu[e]) for e in edges]
        if blocked[v] or any(chosen[w] for w in ends):
            continue
        if len(ends) == 2 and counts[ends[0]] * counts[ends[1]] > PRODUCT_CELLS:
            continue
        chosen[v] = True
        blocked[ends] = True
        edges, ends = [*edges, -1, -1], [*ends, -1, -1]
        plan.append((v, edges[0], ends[0], edges[1], ends[1]))
    if not plan or len(plan) == flat.nodes:
        return flat, []
    return _take_out(flat, chosen, plan)


def _side(flat: Flat, edge: int, node: int) -> np.ndarray:
    """The table of an edge with the values of ``node`` as columns."""
    table = flat.table[flat.toff[edge] : flat.toff[edge + 1]].reshape(flat.counts[flat.eu[edge]], -1)
    return table if flat.ev[edge] == node else table.T


def _take_out(flat: Flat, chosen: np.ndarray, plan: list[tuple[int, int, int, int, int]]) -> tuple[Flat, list[Undo]]:
    """Minimise over each chosen node: the result goes into a neighbour's cost or into a new table."""
    cost = flat.cost.copy()
    best, new_edges, new_tables, constant = [], [], [], 0.0
    for v, left, a, right, b in plan:
        own = cost[flat.off[v] : flat.off[v + 1]]
        if left < 0:
            best.append(np.array([int(np.argmin(own))]))
            constant += float(own.min())
        elif right < 0:
            total = _side(flat, left, v) + own
            best.append(total.argmin(axis=1))
            cost[flat.off[a] : flat.off[a + 1]] += total.min(axis=1)
        else:
            total = (_side(flat, left, v) + own)[:, None, :] + _side(flat, right, v)[None, :, :]
            best.append(total.argmin(axis=2).ravel())
            new_edges.append((a, b))
            new_tables.append(total.min(axis=2).ravel())
    kept = np.flatnonzero(~chosen)
    stays = ~(chosen[flat.eu] | chosen[flat.ev])
    pairs = np.array(new_edges, np.int64).reshape(-1, 2)
    eu, ev = np.concatenate((flat.eu[stays], pairs[:, 0])), np.concatenate((flat.ev[stays], pairs[:, 1]))
    table = np.concatenate((flat.table[np.repeat(stays, np.diff(flat.toff))], *new_tables))
    number = np.cumsum(~chosen) - 1
    values = np.repeat(~chosen, flat.counts)
    cost[flat.off[kept[0]] : flat.off[kept[0] + 1]] += constant
    rest = replace(
        flat,
        off=offsets(flat.counts[kept]),
        cost=cost[values],
        eu=number[eu],
        ev=number[ev],
        toff=offsets(flat.counts[eu] * flat.counts[ev]),
        table=table,
        soff=offsets(np.diff(flat.soff)[kept]),
    )
    columns = np.array(plan, np.int64)
    width = np.where(columns[:, 4] >= 0, flat.counts[columns[:, 4]], 1)
    undo = Elimination(
        size=flat.nodes,
        kept=kept,
        node=columns[:, 0],
        left=columns[:, 2],
        right=columns[:, 4],
        width=width,
        boff=offsets(np.array([len(b) for b in best]))[:-1],
        best=np.concatenate(best),
    )
    return rest, [undo]


STEPS = (arc_consistency, merge, separable, dominance, eliminate)


def reduce(flat: Flat, alive: np.ndarray | None = None, rounds: int = 12) -> Reduced:
    """Apply all steps until nothing changes.

    Args:
        flat: the program.
        alive: bool per value: those to keep (None: all).
        rounds: most repetitions.

    Raises:
        EmptyNodeError: no finite assignment.
    """
    undo: list[Undo] = []
    counts: list[np.ndarray] = []
    sizes: list[tuple[str, int]] = []
    if alive is not None:
        flat, step_undo = keep_values(flat, alive)
        undo.append(step_undo)
        counts.append(flat.counts)
    for _ in range(rounds):
        before = len(undo), len(flat.eu)
        for step in STEPS:
            size = flat.size()
            flat, steps_undo = step(flat)
            undo += steps_undo
            counts += [flat.counts] * len(steps_undo)
            if flat.size() != size:
                sizes.append((step.__name__, flat.nodes))
        if (len(undo), len(flat.eu)) == before:
            break
    return Reduced(flat, tuple(undo), tuple(counts), tuple(sizes))

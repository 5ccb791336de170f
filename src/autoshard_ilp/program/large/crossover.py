"""Partition crossover: of two assignments, the better parts of each.

The nodes where they differ fall into connected components; each can be taken over on its own, and its change of cost
does not depend on the others. Source: D. Whitley, D. Hains, A. Howe, "Tunneling between optima: partition crossover
for the traveling salesman problem", GECCO 2009.
"""

from __future__ import annotations

import numpy as np

from autoshard_ilp.program.large.flat import Flat


def components(flat: Flat, nodes: np.ndarray) -> np.ndarray:
    """Component number of each of ``nodes`` in the graph that they induce."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    place = np.full(flat.nodes, -1)
    place[nodes] = np.arange(len(nodes))
    u, v = place[flat.eu], place[flat.ev]
    inside = (u >= 0) & (v >= 0)
    ones = np.ones(int(inside.sum()), bool)
    graph = coo_matrix((ones, (u[inside], v[inside])), shape=(len(nodes), len(nodes)))
    return connected_components(graph, directed=False)[1]


def combine(flat: Flat, base: np.ndarray, other: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """``base`` with every component of ``other`` that makes it cheaper and fits.

    Args:
        flat: the program; its times are memory rows.
        base: an assignment that fits.
        other: any assignment of finite cost.
        prices: cost per byte and row, which order the components.
    """
    differ = np.flatnonzero(base != other)
    if not len(differ):
        return base
    label = np.full(flat.nodes, -1)
    label[differ] = components(flat, differ)
    count = int(label.max()) + 1
    gain = np.zeros(count)
    np.add.at(
        gain, label[differ], flat.cost[flat.off[differ] + other[differ]] - flat.cost[flat.off[differ] + base[differ]]
    )
    touched = np.flatnonzero((label[flat.eu] >= 0) | (label[flat.ev] >= 0))
    u, v, kv = flat.eu[touched], flat.ev[touched], flat.counts[flat.ev[touched]]
    start = flat.toff[touched]
    change = flat.table[start + other[u] * kv + other[v]] - flat.table[start + base[u] * kv + base[v]]
    np.add.at(gain, np.maximum(label[u], label[v]), change)
    owner = np.repeat(np.arange(flat.nodes), np.diff(flat.soff))
    segments = np.flatnonzero(label[owner] >= 0)
    held = (
        flat.use[flat.uoff[segments] + other[owner[segments]]] - flat.use[flat.uoff[segments] + base[owner[segments]]]
    )
    segments, held = segments[held != 0], held[held != 0]
    part = label[owner[segments]]
    order = np.argsort(part, kind="stable")
    segments, held, part = segments[order], held[order], part[order]
    first = np.searchsorted(part, np.arange(count + 1))
    prefix = np.concatenate(([0.0], np.cumsum(prices)))
    fee = np.zeros(count)
    np.add.at(fee, part, held * (prefix[flat.send[segments]] - prefix[flat.sstart[segments]]))
    used, taken = flat.usage(base), np.zeros(count, bool)
    for k in np.argsort(gain + fee, kind="stable").tolist():
        if not gain[k] < 0:
            continue
        own = slice(first[k], first[k + 1])
        delta = np.zeros(len(used) + 1, np.int64)
        np.add.at(delta, flat.sstart[segments[own]], held[own])
        np.add.at(delta, flat.send[segments[own]], -held[own])
        after = used + np.cumsum(delta)[:-1]
        if (after <= np.maximum(flat.capacity, used)).all():
            used, taken[k] = after, True
    return np.where((label >= 0) & taken[label], other, base)

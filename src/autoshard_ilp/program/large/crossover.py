"""Partition crossover: of two assignments, the better parts of each.

The nodes where they differ fall into connected components; each can be taken over on its own, and its change of cost
does not depend on the others. Source: D. Whitley, D. Hains, A. Howe, "Tunneling between optima: partition crossover
for the traveling salesman problem", GECCO 2009. Memory ties the components together: which of them to take is a
knapsack problem over the rows, solved greedily or by CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard_ilp._ortools import load_cp_model
from autoshard_ilp.program.cpsat import CpOptions, run_solver
from autoshard_ilp.program.large.flat import Flat

RESOLUTION = 2**40  # units of the sum of all changes of cost
NEW_ROWS = 4  # per solve
MOST_SOLVES = 6
MOST_CHANGES = 20_000_000  # components times rows, kept as one array
BIGGEST_WEIGHT = 2**24  # bytes are rounded up to units of a row's capacity over this: what fits then, fits


@dataclass(frozen=True, eq=False)
class Parts:
    """The components by which ``other`` differs from ``base``: changes of cost and of segments' bytes."""

    flat: Flat
    base: np.ndarray
    other: np.ndarray
    label: np.ndarray  # component per node, -1 where both agree
    gain: np.ndarray  # change of cost per component
    segments: np.ndarray  # changed segments, grouped by component
    held: np.ndarray  # their change in bytes
    first: np.ndarray  # component -> its segments

    def change(self, k: int) -> np.ndarray:
        """Change of usage per row if component ``k`` is taken."""
        own = slice(self.first[k], self.first[k + 1])
        delta = np.zeros(len(self.flat.base) + 1, np.int64)
        np.add.at(delta, self.flat.sstart[self.segments[own]], self.held[own])
        np.add.at(delta, self.flat.send[self.segments[own]], -self.held[own])
        return np.cumsum(delta)[:-1]

    def child(self, taken: np.ndarray) -> np.ndarray:
        """``base`` with the components ``taken`` (bool) of ``other``."""
        return np.where((self.label >= 0) & taken[self.label], self.other, self.base)


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


def split(flat: Flat, base: np.ndarray, other: np.ndarray) -> Parts | None:
    """The components of the difference of two assignments of finite cost; None when they are the same."""
    differ = np.flatnonzero(base != other)
    if not len(differ):
        return None
    label = np.full(flat.nodes, -1)
    label[differ] = components(flat, differ)
    count = int(label.max()) + 1
    gain = np.zeros(count)
    start = flat.off[differ]
    np.add.at(gain, label[differ], flat.cost[start + other[differ]] - flat.cost[start + base[differ]])
    touched = np.flatnonzero((label[flat.eu] >= 0) | (label[flat.ev] >= 0))
    u, v, kv = flat.eu[touched], flat.ev[touched], flat.counts[flat.ev[touched]]
    place = flat.toff[touched]
    change = flat.table[place + other[u] * kv + other[v]] - flat.table[place + base[u] * kv + base[v]]
    np.add.at(gain, np.maximum(label[u], label[v]), change)
    owner = np.repeat(np.arange(flat.nodes), np.diff(flat.soff))
    segments = np.flatnonzero(label[owner] >= 0)
    home = owner[segments]
    held = flat.use[flat.uoff[segments] + other[home]] - flat.use[flat.uoff[segments] + base[home]]
    segments, held = segments[held != 0], held[held != 0]
    part = label[owner[segments]]
    order = np.argsort(part, kind="stable")
    first = np.searchsorted(part[order], np.arange(count + 1))
    return Parts(flat, base, other, label, gain, segments[order], held[order], first)


def combine(flat: Flat, base: np.ndarray, other: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """``base`` with every component of ``other`` that makes it cheaper and fits, one after the other.

    Args:
        flat: the program; its times are memory rows.
        base: an assignment that fits.
        other: any assignment of finite cost.
        prices: cost per byte and row, which order the components.
    """
    parts = split(flat, base, other)
    if parts is None:
        return base
    prefix = np.concatenate(([0.0], np.cumsum(prices)))
    fee = np.zeros(len(parts.gain))
    part = np.repeat(np.arange(len(parts.gain)), np.diff(parts.first))
    np.add.at(fee, part, parts.held * (prefix[flat.send[parts.segments]] - prefix[flat.sstart[parts.segments]]))
    used, taken = flat.usage(base), np.zeros(len(parts.gain), bool)
    for k in np.argsort(parts.gain + fee, kind="stable").tolist():
        if not parts.gain[k] < 0:
            continue
        after = used + parts.change(k)
        if (after <= np.maximum(flat.capacity, used)).all():
            used, taken[k] = after, True
    return parts.child(taken)


def combine_best(flat: Flat, base: np.ndarray, other: np.ndarray, options: CpOptions) -> np.ndarray:
    """``base`` with the components of ``other`` that together are cheapest and fit; ``base`` if none is found.

    Args:
        flat: the program; its times are memory rows.
        base: an assignment that fits.
        other: any assignment of finite cost, which need not fit.
        options: limits of CP-SAT.
    """
    parts = split(flat, base, other)
    if parts is None or not (parts.gain < 0).any():
        return base
    if len(parts.gain) * len(flat.base) > MOST_CHANGES:
        return combine(flat, base, other, np.zeros(len(flat.base)))
    cp_model = load_cp_model()
    model = cp_model.CpModel()
    take = [model.new_bool_var("") for _ in parts.gain]
    unit = float(np.abs(parts.gain).sum()) / RESOLUTION
    model.minimize(cp_model.LinearExpr.weighted_sum(take, [int(g / unit) for g in parts.gain.tolist()]))
    used = flat.usage(base)
    changes = np.array([parts.change(k) for k in range(len(parts.gain))])
    coarse = max(1, flat.capacity // BIGGEST_WEIGHT)
    for _ in range(MOST_SOLVES):
        run = run_solver(model, options)
        if run.interrupted:
            raise KeyboardInterrupt
        if run.status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return base
        taken = np.array([run.solver.boolean_value(t) for t in take])
        excess = used + changes[taken].sum(axis=0) - flat.capacity
        over = np.flatnonzero(excess > 0)
        if not len(over):
            child = parts.child(taken)
            return child if flat.value(child) < flat.value(base) else base
        pieces = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        peaks = sorted((int(piece[np.argmax(excess[piece])]) for piece in pieces), key=lambda r: -excess[r])
        for r in peaks[:NEW_ROWS]:
            weights = [-(-int(w) // coarse) for w in changes[:, r].tolist()]
            room = (flat.capacity - int(used[r])) // coarse
            model.add(cp_model.LinearExpr.weighted_sum(take, weights) <= room)
    return base

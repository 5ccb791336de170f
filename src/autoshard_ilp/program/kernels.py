"""Compiled inner loops of message passing (Numba); ``bounds`` holds the mathematics and the data they work on.

All nodes, factors and labels lie in flat arrays, see :class:`Flat`. A factor's table is seen from one of its axes as
``(before, labels, after)``. The functions are compiled once per machine and kept in Numba's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

INF = np.inf


class Flat(NamedTuple):
    """A net laid out in flat arrays; ``at`` arrays have one entry more than there are things, as in CSR.

    Attributes:
        theta_at: per node, where its strategies alive begin in ``theta``.
        port_at: per node, its ports (a port joins a node to one factor).
        factor: per port, the factor's number.
        before, labels, after: per port, the table's shape as seen from the node.
        label_at: per port, where its label per strategy alive begins in ``label``.
        label: concatenated labels.
        table_at: per factor, where its cells begin in ``tables``.
        last, first: per port, whether the node is the last, or the first, of the factor's nodes.
        scope_at, scope, port_of: per factor, its nodes and, in the same order, their ports.
    """

    theta_at: np.ndarray
    port_at: np.ndarray
    factor: np.ndarray
    before: np.ndarray
    labels: np.ndarray
    after: np.ndarray
    label_at: np.ndarray
    label: np.ndarray
    table_at: np.ndarray
    last: np.ndarray
    first: np.ndarray
    scope_at: np.ndarray
    scope: np.ndarray
    port_of: np.ndarray


@njit(cache=True)
def _least(tables: np.ndarray, start: int, before: int, labels: int, after: int, out: np.ndarray) -> None:
    """Least cell per label."""
    for a in range(labels):
        out[a] = INF
    if after == 1:
        for b in range(before):
            row = start + b * labels
            for a in range(labels):
                cell = tables[row + a]
                if cell < out[a]:
                    out[a] = cell
        return
    for b in range(before):
        for a in range(labels):
            row = start + (b * labels + a) * after
            low = out[a]
            for c in range(after):
                cell = tables[row + c]
                if cell < low:
                    low = cell
            out[a] = low


@njit(cache=True)
def _add(tables: np.ndarray, start: int, before: int, labels: int, after: int, extra: np.ndarray) -> None:
    """Add one number per label to its cells."""
    if after == 1:
        for b in range(before):
            row = start + b * labels
            for a in range(labels):
                tables[row + a] += extra[a]
        return
    for b in range(before):
        for a in range(labels):
            row = start + (b * labels + a) * after
            more = extra[a]
            if more != 0.0:
                for c in range(after):
                    tables[row + c] += more


@njit(cache=True)
def sweep(
    flat: Flat, theta: np.ndarray, tables: np.ndarray, forward: bool, bound: float, upper: float, margin: float
) -> tuple[float, int, int]:
    """One pass over all nodes; ``theta`` and ``tables`` change in place.

    Args:
        forward: ascending nodes; each keeps nothing for factors of which it is the last node. Else the reverse.
        bound: seconds, before the pass.
        upper: seconds; strategies that cannot be in a cheaper assignment become ``inf``.
        margin: seconds of tolerance added to ``upper``.

    Returns:
        The bound in seconds, strategies removed, and the node left without strategies (-1: none).
    """
    nodes = len(flat.theta_at) - 1
    most = 1
    for p in range(len(flat.labels)):
        most = max(most, flat.labels[p])
    ports = 1
    for v in range(nodes):
        ports = max(ports, flat.port_at[v + 1] - flat.port_at[v])
    moves = np.zeros((ports, most))
    shares = np.zeros((ports, most))
    removed = 0
    for step in range(nodes):
        v = step if forward else nodes - 1 - step
        own = theta[flat.theta_at[v] : flat.theta_at[v + 1]]
        count = len(own)
        begin, end = flat.port_at[v], flat.port_at[v + 1]
        give = 0
        for p in range(begin, end):
            out = not flat.last[p] if forward else not flat.first[p]
            give += out
            move = moves[p - begin]
            _least(tables, flat.table_at[flat.factor[p]], flat.before[p], flat.labels[p], flat.after[p], move)
            at = flat.label_at[p]
            for s in range(count):
                own[s] += move[flat.label[at + s]]
        low = INF
        for s in range(count):
            low = min(low, own[s])
        if low == INF:
            return bound, removed, v
        bound += low
        limit = upper - bound + margin
        if limit < 0:
            return bound, removed, v
        for s in range(count):
            own[s] -= low
            if own[s] > limit and own[s] < INF:
                own[s] = INF
                removed += 1
        weight = 1.0 / max(give, end - begin - give) if give else 0.0
        for p in range(begin, end):
            out = not flat.last[p] if forward else not flat.first[p]
            move, share = moves[p - begin], shares[p - begin]
            for a in range(flat.labels[p]):
                move[a] = -move[a] if move[a] < INF else 0.0
                share[a] = INF if out else 0.0
            if out:
                at = flat.label_at[p]
                for s in range(count):
                    a = flat.label[at + s]
                    share[a] = min(share[a], own[s])
                for a in range(flat.labels[p]):
                    share[a] *= weight
                    move[a] += share[a]
            _add(tables, flat.table_at[flat.factor[p]], flat.before[p], flat.labels[p], flat.after[p], move)
        if give == 0:
            continue
        for p in range(begin, end):
            if not flat.last[p] if forward else not flat.first[p]:
                at = flat.label_at[p]
                share = shares[p - begin]
                for s in range(count):
                    less = share[flat.label[at + s]]
                    if less < INF:
                        own[s] -= less
        for s in range(count):
            own[s] = max(own[s], 0.0)
    return bound, removed, -1


@njit(cache=True)
def _column(flat: Flat, tables: np.ndarray, p: int, v: int, choice: np.ndarray, extra: np.ndarray) -> None:
    """Per label of port ``p``: the factor's cell under the choices of its other nodes (-1: the least of any)."""
    f = flat.factor[p]
    begin, end = flat.scope_at[f], flat.scope_at[f + 1]
    start, labels = flat.table_at[f], flat.labels[p]
    fixed, open_count = 0, 0
    for i in range(begin, end):
        w, q = flat.scope[i], flat.port_of[i]
        if w != v:
            if choice[w] >= 0:
                fixed += flat.label[flat.label_at[q] + choice[w]] * flat.after[q]
            else:
                open_count += 1
    if open_count == 0:
        for a in range(labels):
            extra[a] = tables[start + fixed + a * flat.after[p]]
        return
    for a in range(labels):
        extra[a] = INF
    digits = np.zeros(end - begin, np.int64)
    done = False
    while not done:
        offset, mine = fixed, 0
        for i in range(begin, end):
            offset += digits[i - begin] * flat.after[flat.port_of[i]]
            if flat.scope[i] == v:
                mine = digits[i - begin]
        extra[mine] = min(extra[mine], tables[start + offset])
        done = True
        for back in range(begin, end):
            i = begin + end - 1 - back
            if flat.scope[i] != v and choice[flat.scope[i]] >= 0:
                continue
            digits[i - begin] += 1
            if digits[i - begin] < flat.labels[flat.port_of[i]]:
                done = False
                break
            digits[i - begin] = 0


@njit(cache=True)
def descend(flat: Flat, theta: np.ndarray, tables: np.ndarray, choice: np.ndarray, rounds: int) -> int:
    """Each node in turn takes its best strategy given the others, until none moves or ``rounds`` are over.

    ``choice`` (position among the strategies alive, -1: undecided) changes in place. Returns the rounds made.
    """
    nodes = len(flat.theta_at) - 1
    most = 1
    for p in range(len(flat.labels)):
        most = max(most, flat.labels[p])
    extra = np.zeros(most)
    for turn in range(rounds):
        changed = False
        for v in range(nodes):
            total = theta[flat.theta_at[v] : flat.theta_at[v + 1]].copy()
            for p in range(flat.port_at[v], flat.port_at[v + 1]):
                _column(flat, tables, p, v, choice, extra)
                at = flat.label_at[p]
                for s in range(len(total)):
                    total[s] += extra[flat.label[at + s]]
            best = 0
            for s in range(len(total)):
                if total[s] < total[best]:
                    best = s
            if choice[v] < 0 or total[best] < total[choice[v]]:
                choice[v] = best
                changed = True
        if not changed:
            return turn
    return rounds


@njit(cache=True)
def totals(flat: Flat, theta: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Per strategy alive of every node: its cost and the least cell of each factor (seconds above the bound)."""
    out = theta.copy()
    most = 1
    for p in range(len(flat.labels)):
        most = max(most, flat.labels[p])
    least = np.zeros(most)
    for v in range(len(flat.theta_at) - 1):
        start, stop = flat.theta_at[v], flat.theta_at[v + 1]
        for p in range(flat.port_at[v], flat.port_at[v + 1]):
            _least(tables, flat.table_at[flat.factor[p]], flat.before[p], flat.labels[p], flat.after[p], least)
            at = flat.label_at[p]
            for s in range(stop - start):
                out[start + s] += least[flat.label[at + s]]
    return out

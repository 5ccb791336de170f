"""Compiled inner loops of message passing (Numba); ``bounds`` holds the mathematics and the data they work on.

All nodes, factors and labels lie in flat arrays, see :class:`Flat`. A factor's table is seen from one of its axes as
``(before, labels, after)``. The functions are compiled once per machine and kept in Numba's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

INF = np.inf
LANES = 16
"""Cells of a row whose minima are taken side by side: LLVM makes no vector instructions of a single running minimum."""


class Flat(NamedTuple):
    """A net laid out in flat arrays; ``at`` arrays have one entry more than there are things, as in CSR.

    Attributes:
        theta_at: per node, where its strategies alive begin in ``theta``.
        port_at: per node, its ports (a port joins a node to one factor).
        factor: per port, the factor's number.
        before, labels, after: per port, the table's shape as seen from the node.
        label_at: per port, where its label per strategy alive begins in ``label``.
        label: concatenated labels.
        message_at: per port, where its messages (one per label) begin.
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
    message_at: np.ndarray
    table_at: np.ndarray
    last: np.ndarray
    first: np.ndarray
    scope_at: np.ndarray
    scope: np.ndarray
    port_of: np.ndarray


# No table holds NaN, and +0 and -0 are the same cost: with that said, minima are computed several cells at a time.
ORDERED = {"nnan", "nsz"}


@njit(cache=True, fastmath=ORDERED)
def _least(
    tables: np.ndarray,
    start: int,
    before: int,
    labels: int,
    after: int,
    outer: np.ndarray,
    inner: np.ndarray,
    out: np.ndarray,
) -> None:
    """Least cell per label, with ``outer`` (one number per index before) and ``inner`` (after) added."""
    for a in range(labels):
        out[a] = INF
    if after == 1:
        extra = inner[0]
        for b in range(before):
            row = tables[start + b * labels : start + (b + 1) * labels]
            more = outer[b] + extra
            for a in range(labels):
                out[a] = min(out[a], row[a] + more)
        return
    lanes = np.empty(LANES)
    for b in range(before):
        more = outer[b]
        for a in range(labels):
            begin = start + (b * labels + a) * after
            row = tables[begin : begin + after]
            low = INF
            if after < LANES:
                for c in range(after):
                    low = min(low, row[c] + inner[c])
            else:
                for k in range(LANES):
                    lanes[k] = row[k] + inner[k]
                for block in range(1, after // LANES + 1):
                    c = min(block * LANES, after - LANES)  # the last block overlaps the one before
                    for k in range(LANES):
                        lanes[k] = min(lanes[k], row[c + k] + inner[c + k])
                for k in range(LANES // 2):
                    lanes[k] = min(lanes[k], lanes[k + LANES // 2])
                for k in range(LANES // 2):
                    low = min(low, lanes[k])
            out[a] = min(out[a], low + more)


@njit(cache=True, fastmath=ORDERED)
def _add(tables: np.ndarray, start: int, before: int, labels: int, after: int, extra: np.ndarray) -> None:
    """Add one number per label to its cells."""
    if after == 1:
        for b in range(before):
            row = tables[start + b * labels : start + (b + 1) * labels]
            for a in range(labels):
                row[a] += extra[a]
        return
    for b in range(before):
        for a in range(labels):
            more = extra[a]
            if more != 0.0:
                begin = start + (b * labels + a) * after
                row = tables[begin : begin + after]
                for c in range(after):
                    row[c] += more


@njit(cache=True)
def _beside(
    flat: Flat, message: np.ndarray, p: int, first: int, last: int, left: np.ndarray, right: np.ndarray
) -> None:
    """Sums of the messages of a factor's ports ``first`` to ``last`` (in the order of its axes) but ``p``: per index
    of the axes before p's (``left``) and after it (``right``)."""
    left[0] = 0.0
    right[0] = 0.0
    size = 1
    out = left
    for i in range(first, last):
        q = flat.port_of[i]
        if q == p:
            out, size = right, 1
            continue
        count, at = flat.labels[q], flat.message_at[q]
        if size == 1:
            base = out[0]
            for a in range(count):
                out[a] = base + message[at + a]
        else:
            for k in range(size - 1, -1, -1):  # in place: what is read lies before what is written
                base = out[k]
                for a in range(count):
                    out[k * count + a] = base + message[at + a]
        size *= count


@njit(cache=True)
def sweep(
    flat: Flat, theta: np.ndarray, tables: np.ndarray, count: int, bound: float, upper: float, margin: float
) -> tuple[float, int, int]:
    """``count`` passes forward and back over all nodes; ``theta`` and ``tables`` change in place.

    Forward, nodes come in ascending order and each keeps nothing for factors of which it is the last node; back, the
    reverse. Until the end a table is only read, with what was moved in or out of it beside it, as one number per
    label and port: most of the time goes into reading tables.

    Args:
        count: passes.
        bound: seconds, before the passes.
        upper: seconds; strategies that cannot be in a cheaper assignment become ``inf``.
        margin: seconds of tolerance added to ``upper``.

    Returns:
        The bound in seconds, strategies removed, and the node left without strategies (-1: none).
    """
    nodes = len(flat.theta_at) - 1
    most, left_most, right_most = 1, 1, 1
    for p in range(len(flat.labels)):
        most = max(most, flat.labels[p])
        left_most = max(left_most, flat.before[p])
        right_most = max(right_most, flat.after[p])
    ports = 1
    for v in range(nodes):
        ports = max(ports, flat.port_at[v + 1] - flat.port_at[v])
    moves = np.zeros((ports, most))
    shares = np.zeros((ports, most))
    left, right = np.zeros(left_most), np.zeros(right_most)
    message = np.zeros(flat.message_at[-1])
    settled = np.zeros(len(flat.labels), np.bool_)  # the node took all there was, and nothing came since
    removed, empty = 0, -1
    for step in range(2 * nodes * count):
        turn = step % (2 * nodes)
        forward = turn < nodes
        v = turn if forward else 2 * nodes - 1 - turn
        own = theta[flat.theta_at[v] : flat.theta_at[v + 1]]
        strategies = len(own)
        begin, end = flat.port_at[v], flat.port_at[v + 1]
        give = 0
        for p in range(begin, end):
            give += not flat.last[p] if forward else not flat.first[p]
            f, move, at = flat.factor[p], moves[p - begin], flat.message_at[p]
            if settled[p]:
                continue
            _beside(flat, message, p, flat.scope_at[f], flat.scope_at[f + 1], left, right)
            _least(tables, flat.table_at[f], flat.before[p], flat.labels[p], flat.after[p], left, right, move)
            for a in range(flat.labels[p]):
                move[a] += message[at + a]
            at = flat.label_at[p]
            for s in range(strategies):
                own[s] += move[flat.label[at + s]]
        low = INF
        for s in range(strategies):
            low = min(low, own[s])
        if low == INF:
            empty = v
            break
        bound += low
        limit = upper - bound + margin
        if limit < 0:
            empty = v
            break
        for s in range(strategies):
            own[s] -= low
            if own[s] > limit and own[s] < INF:
                own[s] = INF
                removed += 1
        weight = 1.0 / max(give, end - begin - give) if give else 0.0
        for p in range(begin, end):
            gives = not flat.last[p] if forward else not flat.first[p]
            share = shares[p - begin]
            for a in range(flat.labels[p]):
                share[a] = INF if gives else 0.0
            if gives:
                at = flat.label_at[p]
                for s in range(strategies):
                    a = flat.label[at + s]
                    share[a] = min(share[a], own[s])
                for a in range(flat.labels[p]):
                    share[a] *= weight
            if settled[p] and not gives:
                continue
            move, at = moves[p - begin], flat.message_at[p]
            for a in range(flat.labels[p]):
                if not settled[p] and move[a] < INF:
                    message[at + a] -= move[a]
                message[at + a] += share[a]
            f = flat.factor[p]
            for i in range(flat.scope_at[f], flat.scope_at[f + 1]):
                settled[flat.port_of[i]] = False
            settled[p] = not gives
        if give == 0:
            continue
        for p in range(begin, end):
            if not flat.last[p] if forward else not flat.first[p]:
                at = flat.label_at[p]
                share = shares[p - begin]
                for s in range(strategies):
                    less = share[flat.label[at + s]]
                    if less < INF:
                        own[s] -= less
        for s in range(strategies):
            own[s] = max(own[s], 0.0)
    _settle(flat, tables, message)
    return bound, removed, empty


@njit(cache=True)
def _settle(flat: Flat, tables: np.ndarray, message: np.ndarray) -> None:
    """Add the messages to the tables; what float noise leaves below 0 becomes 0."""
    for p in range(len(flat.labels)):
        at, start = flat.message_at[p], flat.table_at[flat.factor[p]]
        extra = message[at : at + flat.labels[p]]
        _add(tables, start, flat.before[p], flat.labels[p], flat.after[p], extra)
    for i in range(len(tables)):
        tables[i] = max(tables[i], 0.0)


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
    wide = 1
    for p in range(len(flat.labels)):
        wide = max(wide, flat.before[p], flat.after[p])
    nothing = np.zeros(wide)
    for v in range(len(flat.theta_at) - 1):
        start, stop = flat.theta_at[v], flat.theta_at[v + 1]
        for p in range(flat.port_at[v], flat.port_at[v + 1]):
            start_of, shape = flat.table_at[flat.factor[p]], (flat.before[p], flat.labels[p], flat.after[p])
            _least(tables, start_of, shape[0], shape[1], shape[2], nothing, nothing, least)
            at = flat.label_at[p]
            for s in range(stop - start):
                out[start + s] += least[flat.label[at + s]]
    return out

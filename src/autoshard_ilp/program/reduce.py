"""Exact operations on one factor or one node of a net: the vocabulary of presolve.

Each keeps the optimum: the least cost over all assignments is the same before and after, and
:meth:`Net.complete` turns an optimal assignment of what is left into one of what was there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.program.net import Factor, Net, Record, joint_labels

CHUNK_CELLS = 2_000_000  # memory of one vectorised piece of an elimination
DOMINANCE_CELLS = 300_000  # skip comparisons that cost more than this; bounds do the work there
HUGE = 1e300  # inside a difference, never in a result
ROUNDING = 1e-14  # relative; differences below are float noise of sums


def rows_of(table: np.ndarray, axis: int) -> np.ndarray:
    """The table with ``axis`` first and all other axes as one."""
    if table.ndim == 2:
        return table.T if axis else table
    return np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)


def compress(net: Net, number: int) -> bool:
    """Drop labels that no strategy alive carries. True when something changed."""
    f = net.factors[number]
    changed, labels, table, held = False, list(f.labels), f.table, f.held
    for k, v in enumerate(f.scope):
        used = np.zeros(table.shape[k], bool)
        used[labels[k][net.alive[v]]] = True
        if used.all():
            continue
        changed = True
        renumber = np.cumsum(used) - 1
        fresh = np.full(len(labels[k]), -1, np.int64)
        fresh[net.alive[v]] = renumber[labels[k][net.alive[v]]]
        labels[k] = fresh
        table = np.compress(used, table, axis=k)
        held = None if held is None else np.compress(used, held, axis=k)
    if changed:
        net.replace(number, Factor(f.scope, tuple(labels), table, f.edge, held))
    return changed


def normalise(net: Net, number: int) -> list[int]:
    """Move the least entry of every row and column of a factor into the node costs.

    A separable table becomes zero. Returns the nodes whose strategies died (no finite entry).
    """
    f = net.factors[number]
    table, died = f.table, []
    for k, v in enumerate(f.scope):
        others = tuple(i for i in range(table.ndim) if i != k)
        least = table.min(axis=others)
        if not least.any():
            continue
        before = len(net.alive[v])
        net.add_cost(v, least[f.labels[k][net.alive[v]]])
        if len(net.alive[v]) != before:
            died.append(v)
        shift = np.where(np.isfinite(least), least, 0.0)
        shape = [1] * table.ndim
        shape[k] = -1
        table = table - shift.reshape(shape)
        table[np.abs(table) <= ROUNDING * np.abs(shift).reshape(shape)] = 0.0
    if table is not f.table:
        net.replace(number, Factor(f.scope, f.labels, table, f.edge, f.held))
    return died


def merge_equal_labels(net: Net, number: int) -> bool:
    """Give labels with equal slices one number. True when something changed."""
    f = net.factors[number]
    if f.edge is not None:
        return False
    labels, table, changed = list(f.labels), f.table, False
    for k, v in enumerate(f.scope):
        rows = rows_of(table, k)
        keys: dict[bytes, int] = {}
        group = np.array([keys.setdefault(r.tobytes(), len(keys)) for r in np.ascontiguousarray(rows) + 0.0])
        if len(keys) == len(rows):
            continue
        changed = True
        first = np.unique(group, return_index=True)[1]
        fresh = np.full(len(labels[k]), -1, np.int64)
        fresh[net.alive[v]] = group[labels[k][net.alive[v]]]
        labels[k] = fresh
        table = np.take(table, first, axis=k)
    if changed:
        net.replace(number, Factor(f.scope, tuple(labels), table))
    return changed


def merge_parallel(net: Net, numbers: Sequence[int]) -> int:
    """Add factors of one scope (as a set) into one factor over joint labels; its number."""
    factors = [net.remove(n) for n in numbers]
    scope = factors[0].scope
    labels, maps = [], []
    for v in scope:
        axes = [f.axis(v) for f in factors]
        lab, own = joint_labels(
            net.alive[v],
            len(net.cost[v]),
            [f.labels[a] for f, a in zip(factors, axes, strict=True)],
            [f.table.shape[a] for f, a in zip(factors, axes, strict=True)],
        )
        labels.append(lab)
        maps.append(own)
    total: np.ndarray | float = 0.0
    for i, f in enumerate(factors):
        table = np.transpose(f.table, [f.axis(v) for v in scope])
        total = total + table[np.ix_(*(m[i] for m in maps))]
    return net.add(Factor(scope, tuple(labels), np.asarray(total)))


def fold_single(net: Net, v: int) -> list[int]:
    """Take out a node with one strategy: its factors lose an axis. Returns the neighbours touched."""
    choice = int(net.alive[v][0])
    touched = net.neighbours(v)
    net.constant += float(net.cost[v][choice])
    for number in list(net.incident[v]):
        f = net.remove(number)
        k = f.axis(v)
        table = np.take(f.table, int(f.labels[k][choice]), axis=k)
        scope, labels = f.scope[:k] + f.scope[k + 1 :], f.labels[:k] + f.labels[k + 1 :]
        if len(scope) == 1:
            net.add_cost(scope[0], table[labels[0][net.alive[scope[0]]]])
        else:
            net.add(Factor(scope, labels, table))
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], ()))
    return touched


def _worst_difference(rows: np.ndarray) -> np.ndarray:
    """D[a, b] = min over columns of rows[a] - rows[b], where inf - inf counts as +inf."""
    columns = np.ascontiguousarray(rows.T)  # the reduction runs over the first axis: whole planes at a time
    taken = columns if np.isfinite(columns).all() else np.where(np.isfinite(columns), columns, HUGE)
    step = max(1, CHUNK_CELLS // max(1, len(rows) ** 2))
    out = np.full((len(rows), len(rows)), np.inf)
    for begin in range(0, len(columns), step):
        part = slice(begin, begin + step)
        np.minimum(out, (columns[part, :, None] - taken[part, None, :]).min(axis=0), out=out)
    if taken is not columns:
        out[out < -HUGE / 2] = -np.inf
    return out


def dominated(net: Net, v: int) -> np.ndarray:
    """Strategies of ``v`` that another strategy beats whatever the neighbours choose (Goldstein's criterion).

    ``s`` goes when some ``t`` has cost[s] - cost[t] + sum_f min over neighbours (f[s] - f[t]) >= 0 and, where bytes
    count, no more bytes. Source: R. F. Goldstein, Biophysical Journal 66 (1994), "Efficient rotamer elimination
    applied to protein side-chains and related spin glasses".
    """
    alive, cost = net.alive[v], net.cost[v][net.alive[v]]
    work = sum(net.factors[n].table.size * net.factors[n].table.shape[net.factors[n].axis(v)] for n in net.incident[v])
    if len(alive) < 2 or work > DOMINANCE_CELLS:
        return alive[:0]
    worse = cost[:, None] - cost[None, :]
    noise = ROUNDING * (np.abs(cost)[:, None] + np.abs(cost)[None, :])
    for number in net.incident[v]:
        f = net.factors[number]
        k = f.axis(v)
        difference = _worst_difference(rows_of(f.table, k))
        if f.held is not None:
            held = rows_of(f.held, k)
            difference[(held[:, None, :] < held[None, :, :]).any(axis=2)] = -np.inf
        lab = f.labels[k][alive]
        with np.errstate(invalid="ignore"):
            worse = worse + difference[lab[:, None], lab[None, :]]
        worse[np.isnan(worse)] = -np.inf  # +inf of one factor and -inf of another: not comparable
        if int((worse >= -noise).sum()) <= len(alive):  # only the diagonal: no pair is left
            return alive[:0]
    held_bytes = net.bytes[v]
    if held_bytes is not None:
        own = held_bytes[alive]
        worse[own[:, None] < own[None, :]] = -np.inf
    beats = worse >= -noise
    np.fill_diagonal(beats, False)
    out, present = [], np.ones(len(alive), bool)
    for s in np.lexsort((np.arange(len(alive)), cost))[::-1]:
        if (beats[s] & present).any():
            present[s] = False
            out.append(alive[s])
    return np.array(sorted(out), np.int64)


def elimination_scope(net: Net, v: int) -> tuple[list[int], list[np.ndarray], dict[int, dict[int, np.ndarray]]]:
    """Neighbours of ``v``, their joint labels over v's factors, and per factor and neighbour the joint-to-own map."""
    meets: dict[int, list[int]] = {}
    for number in net.incident[v]:
        for w in net.factors[number].scope:
            if w != v:
                meets.setdefault(w, []).append(number)
    labels, maps = [], {n: {} for n in net.incident[v]}  # type: ignore[var-annotated]
    for w, numbers in meets.items():
        factors = [net.factors[n] for n in numbers]
        lab, own = joint_labels(
            net.alive[w],
            len(net.cost[w]),
            [f.labels[f.axis(w)] for f in factors],
            [f.table.shape[f.axis(w)] for f in factors],
        )
        labels.append(lab)
        for n, m in zip(numbers, own, strict=True):
            maps[n][w] = m
    return list(meets), labels, maps


def min_sum(cost: np.ndarray, tables: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Least over the first axis of cost + sum of tables (each broadcastable to ``(len(cost), *shape)``)."""
    cells = math.prod(shape)
    step = max(1, CHUNK_CELLS // max(1, cells))
    out = np.full(shape, np.inf)
    lead = (-1,) + (1,) * len(shape)
    for begin in range(0, len(cost), step):
        part = cost[begin : begin + step].reshape(lead)
        for t in tables:
            part = part + t[begin : begin + step]
        np.minimum(out, part.min(axis=0), out=out)
    return out


def eliminate(net: Net, v: int) -> list[int]:
    """Minimise ``v`` out exactly (bucket elimination over the neighbours' labels). Returns the neighbours.

    Source: R. Dechter, Artificial Intelligence 113 (1999), "Bucket elimination: a unifying framework for reasoning".
    """
    scope, labels, maps = elimination_scope(net, v)
    shape = tuple(int(lab.max()) + 1 for lab in labels)
    alive = net.alive[v]
    tables, factors = [], []
    for number in list(net.incident[v]):
        own = maps[number]
        f = net.remove(number)
        factors.append(f)
        inside = [w for w in scope if w in f.scope]
        table = np.transpose(f.table, [f.axis(v)] + [f.axis(w) for w in inside])
        table = table[np.ix_(f.labels[f.axis(v)][alive], *(own[w] for w in inside))]
        tables.append(table.reshape([len(alive)] + [shape[i] if w in f.scope else 1 for i, w in enumerate(scope)]))
    out = min_sum(net.cost[v][alive], tables, shape)
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], tuple(factors)))
    if not scope:
        net.constant += float(out)
    elif len(scope) == 1:
        net.add_cost(scope[0], out[labels[0][net.alive[scope[0]]]])
    else:
        net.add(Factor(tuple(scope), tuple(labels), out))
    return scope


def determined_by(net: Net, v: int) -> int | None:
    """A factor in which the other node's label leaves at most one strategy of ``v``; None when there is none."""
    for number in net.incident[v]:
        f = net.factors[number]
        if len(f.scope) != 2 or f.edge is not None:
            continue
        k = f.axis(v)
        table = rows_of(f.table, k)
        carried = np.bincount(f.labels[k][net.alive[v]], minlength=len(table))
        if (carried @ np.isfinite(table)).max() <= 1:
            return number
    return None


def substitute(net: Net, v: int, number: int) -> list[int]:
    """Replace ``v`` by the node that determines it through factor ``number``. Returns the neighbours touched."""
    f = net.factors[number]
    k = f.axis(v)
    w = f.scope[1 - k]
    table = rows_of(f.table, k)
    carrier = np.full(len(table), -1, np.int64)
    carrier[f.labels[k][net.alive[v]]] = net.alive[v]  # the strategy that carries a label (unique where finite)
    finite = np.isfinite(table) & (carrier >= 0)[:, None]  # a label may have lost its last strategy
    label_of = np.argmax(finite, axis=0)
    strategy_of = carrier[label_of]  # by label of w
    at_w = f.labels[1 - k][net.alive[w]]
    cost = np.where(finite.any(axis=0), table[label_of, np.arange(table.shape[1])], np.inf) + net.cost[v][strategy_of]
    factors = tuple(net.factors[n] for n in net.incident[v])
    touched = net.neighbours(v)
    for n in list(net.incident[v]):
        g = net.remove(n)
        if n == number:
            continue
        j = g.axis(v)
        fresh = np.full(len(net.cost[w]), -1, np.int64)
        fresh[net.alive[w]] = g.labels[j][strategy_of[at_w]]
        scope, labels = list(g.scope), list(g.labels)
        scope[j], labels[j] = w, fresh
        net.add(Factor(tuple(scope), tuple(labels), g.table, g.edge, g.held))
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], factors))
    net.add_cost(w, cost[at_w])
    return touched

"""Exact operations on one factor or one node of a net: the vocabulary of presolve.

Each keeps the optimum: the least cost over all assignments is the same before and after, and
:meth:`Net.complete` turns an optimal assignment of what is left into one of what was there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.program.kernels import eliminate as kernels_eliminate
from autoshard_ilp.program.nets.net import Factor, Net, Record, joint_labels

NO_BYTES = 2**55  # stands for "no finite cell" inside a minimum, never in a result
DOMINANCE_CELLS = 300_000  # skip comparisons that cost more than this; bounds do the work there
ROUNDING = 1e-14  # relative; differences below are float noise of sums


def rows_of(table: np.ndarray, axis: int) -> np.ndarray:
    """The table with ``axis`` first and all other axes as one."""
    if table.ndim == 2:
        return table.T if axis else table
    return np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)


def compress(net: Net, number: int) -> bool:
    """Drop labels that no strategy alive carries. True when something changed."""
    f = net.factors[number]
    changed, labels, table, held = False, list(f.labels), f.table, f.used
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
        held = None if held is None else np.compress(used, held, axis=k + 1)
    if changed:
        net.replace(number, Factor(f.scope, tuple(labels), table, held))
    return changed


def compress_all(net: Net) -> None:
    """:func:`compress` for every factor: what messages and windows expect of a net."""
    for number in list(net.factors):
        compress(net, number)


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
        net.replace(number, Factor(f.scope, f.labels, table, f.used))
    if f.used is not None:
        _normalise_used(net, number)
    return died


def _normalise_used(net: Net, number: int) -> None:
    """Move the least bytes of every row and column of a factor to the nodes; bytes beside infinite costs are 0."""
    f = net.factors[number]
    assert f.used is not None
    finite = np.isfinite(f.table)[None]
    used = np.where(finite, f.used, NO_BYTES)
    for k, v in enumerate(f.scope):
        least = used.min(axis=tuple(i + 1 for i in range(f.table.ndim) if i != k))
        least[least >= NO_BYTES // 2] = 0  # no finite cell
        if least.any():
            net.add_used(v, least[:, f.labels[k][net.alive[v]]])
            used = used - least.reshape((len(least), *(-1 if i == k else 1 for i in range(f.table.ndim))))
    used = np.where(finite, used, 0)
    net.replace(number, Factor(f.scope, f.labels, f.table, used if used.any() else None))


def _all_different(rows: np.ndarray) -> bool:
    """Whether a sum of each row's bits, which equal rows have in common, already tells all rows apart."""
    bits = rows.view(np.uint64)
    factors = np.arange(1, 2 * bits.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return len(np.unique((bits ^ (bits >> np.uint64(29))) @ factors)) == len(rows)


def merge_equal_labels(net: Net, number: int) -> bool:
    """Give labels with equal slices one number. True when something changed."""
    f = net.factors[number]
    labels, table, used, changed = list(f.labels), f.table, f.used, False
    for k, v in enumerate(f.scope):
        rows = np.ascontiguousarray(rows_of(table, k)) + 0.0
        if used is not None:
            held = np.moveaxis(used, k + 1, 0).reshape(len(rows), -1)
            rows = np.hstack((rows, np.ascontiguousarray(held).view(np.float64)))
        if _all_different(rows):
            continue
        keys: dict[bytes, int] = {}
        group = np.array([keys.setdefault(r.tobytes(), len(keys)) for r in rows])
        if len(keys) == len(rows):
            continue
        changed = True
        first = np.unique(group, return_index=True)[1]
        fresh = np.full(len(labels[k]), -1, np.int64)
        fresh[net.alive[v]] = group[labels[k][net.alive[v]]]
        labels[k] = fresh
        table = np.take(table, first, axis=k)
        used = None if used is None else np.take(used, first, axis=k + 1)
    if changed:
        net.replace(number, Factor(f.scope, tuple(labels), table, used))
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
    used: np.ndarray | None = None
    for i, f in enumerate(factors):
        axes, cells = [f.axis(v) for v in scope], np.ix_(*(m[i] for m in maps))
        total = total + np.transpose(f.table, axes)[cells]
        if f.used is not None:
            more = np.array([np.transpose(own, axes)[cells] for own in f.used])
            used = more if used is None else used + more
    return net.add(Factor(scope, tuple(labels), np.asarray(total), used))


def fold_single(net: Net, v: int) -> list[int]:
    """Take out a node with one strategy: its factors lose an axis. Returns the neighbours touched."""
    choice = int(net.alive[v][0])
    touched = net.neighbours(v)
    net.constant += float(net.cost[v][choice])
    own = net.used[v]
    if own is not None:
        net.base = net.base + own[:, choice]
        net.used[v] = None
    for number in list(net.incident[v]):
        f = net.remove(number)
        k = f.axis(v)
        table = np.take(f.table, int(f.labels[k][choice]), axis=k)
        used = None if f.used is None else np.take(f.used, int(f.labels[k][choice]), axis=k + 1)
        scope, labels = f.scope[:k] + f.scope[k + 1 :], f.labels[:k] + f.labels[k + 1 :]
        if len(scope) == 1:
            if used is not None:
                net.add_used(scope[0], used[:, labels[0][net.alive[scope[0]]]])
            net.add_cost(scope[0], table[labels[0][net.alive[scope[0]]]])
        else:
            net.add(Factor(scope, labels, table, used))
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], ()))
    return touched


def dominated(net: Net, v: int) -> np.ndarray:
    """Strategies of ``v`` that another strategy beats whatever the neighbours choose (Goldstein's criterion).

    ``s`` goes when some ``t`` has cost[s] - cost[t] + sum_f min over neighbours (f[s] - f[t]) >= 0 and the same holds
    for the bytes in every memory row.

    Source: R. F. Goldstein, Biophysical Journal 66 (1994), "Efficient rotamer elimination applied to protein
    side-chains and related spin glasses".
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
        kernels_eliminate.add_worst_difference(np.ascontiguousarray(rows_of(f.table, k)), f.labels[k][alive], worse)
        if int((worse >= -noise).sum()) <= len(alive):  # only the diagonal: no pair is left
            return alive[:0]
    freed = np.zeros((len(net.base), len(alive), len(alive)))  # bytes per row that s holds above t, at least
    if net.used[v] is not None:
        own = net.used[v][:, alive]  # type: ignore[index]
        freed += own[:, :, None] - own[:, None, :]
    for number in net.incident[v]:
        f = net.factors[number]
        if f.used is not None:
            k = f.axis(v)
            held = np.where(np.isfinite(f.table), f.used, np.inf)
            for more, table in zip(freed, held, strict=True):
                rows = np.ascontiguousarray(rows_of(table, k))
                kernels_eliminate.add_worst_difference(rows, f.labels[k][alive], more)
    if len(freed):
        worse[(freed < 0).any(axis=0)] = -np.inf
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
    order = sorted(
        range(len(labels)), key=lambda i: int(labels[i].max())
    )  # the longest last: compiled loops run along it
    nodes = list(meets)
    return [nodes[i] for i in order], [labels[i] for i in order], maps


def _laid_out(tables: Sequence[np.ndarray], lead: int, leading: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Arrays for a compiled loop: all cells, where each table begins, its leading cells, and those of each row.

    The first ``lead`` axes of a table are its own; the others are broadcastable to ``(*leading, last axis)``.
    """
    own = [t.shape[lead:-1] for t in tables]
    leads = np.array([math.prod(n) for n in own], np.int64)
    place = np.empty((len(tables), math.prod(leading)), np.int64)
    for k, n in enumerate(own):
        place[k] = np.broadcast_to(np.arange(leads[k]).reshape(n), leading).ravel()
    at = np.concatenate(([0], np.cumsum([t.size for t in tables]))).astype(np.int64)
    return np.concatenate([t.ravel() for t in tables]), at, leads, place


def min_sum(cost: np.ndarray, tables: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Least over the first axis of cost + sum of tables (each broadcastable to ``(len(cost), *shape)``)."""
    if not shape or 0 in shape:
        return np.asarray(sum(tables, cost).min(axis=0)) if not shape else np.full(shape, np.inf)
    out = np.empty((math.prod(shape[:-1]), shape[-1]))
    cells, at, leads, place = _laid_out(tables, 1, shape[:-1])
    kernels_eliminate.min_sum(cost, cells, at, leads, place, out)
    return out.reshape(shape)


def min_sum_used(
    cost: np.ndarray, tables: Sequence[np.ndarray], used: Sequence[np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray] | None:
    """As :func:`min_sum`, with the bytes per row of the cheapest choice; None where that is not always that of least.

    Args:
        used: int64 bytes, at least one array, each broadcastable to ``(rows, len(cost), *shape)``.
    """
    rows, strategies = used[0].shape[0], len(cost)
    if not shape:  # one cell
        column = min_sum_used(cost, [t[:, None] for t in tables], [u[..., None] for u in used], (1,))
        return None if column is None else (column[0][0], column[1][:, 0])
    wide = tables or [np.zeros((strategies, *[1] * len(shape)))]
    lead = math.prod(shape[:-1])
    out, kept = np.full((lead, shape[-1]), np.inf), np.zeros((rows, lead, shape[-1]), np.int64)
    if 0 not in shape:
        cells, at, leads, place = _laid_out(wide, 1, shape[:-1])
        held, held_at, held_leads, held_place = _laid_out(used, 2, shape[:-1])
        if not kernels_eliminate.min_sum_used(
            cost, cells, at, leads, place, held, held_at, held_leads, held_place, out, kept
        ):
            return None
    return out.reshape(shape), kept.reshape(rows, *shape)


def eliminate(net: Net, v: int) -> list[int] | None:
    """Minimise ``v`` out exactly (bucket elimination over the neighbours' labels). Returns the neighbours.

    Where bytes count, the cheapest choice must also be the one of least bytes in every row, for every choice of the
    neighbours. If it is not, nothing happens, and the answer is None.

    Source: R. Dechter, Artificial Intelligence 113 (1999), "Bucket elimination: a unifying framework for reasoning".
    """
    scope, labels, maps = elimination_scope(net, v)
    shape = tuple(int(lab.max()) + 1 for lab in labels)
    alive, own = net.alive[v], net.used[v]
    tables, used, factors = [], [], []
    if own is not None:
        used.append(own[:, alive].reshape((len(own), -1) + (1,) * len(shape)))
    for number in net.incident[v]:
        at, f = maps[number], net.factors[number]
        factors.append(f)
        inside = [w for w in scope if w in f.scope]
        axes = [f.axis(v)] + [f.axis(w) for w in inside]
        cells = np.ix_(f.labels[f.axis(v)][alive], *(at[w] for w in inside))
        wide = [len(alive)] + [shape[i] if w in f.scope else 1 for i, w in enumerate(scope)]
        tables.append(np.transpose(f.table, axes)[cells].reshape(wide))
        if f.used is not None:
            used.append(np.array([np.transpose(own, axes)[cells] for own in f.used]).reshape([len(f.used), *wide]))
    bytes_left: np.ndarray | None = None
    if used:
        found = min_sum_used(net.cost[v][alive], tables, used, shape)
        if found is None:
            return None
        out, held = found
        bytes_left = held if held.any() else None
    else:
        out = min_sum(net.cost[v][alive], tables, shape)
    for number in list(net.incident[v]):
        net.remove(number)
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], tuple(factors), own))
    net.used[v] = None
    if not scope:
        net.constant += float(out)
        if bytes_left is not None:
            net.base = net.base + bytes_left.reshape(-1)
    elif len(scope) == 1:
        at_w = labels[0][net.alive[scope[0]]]
        if bytes_left is not None:
            net.add_used(scope[0], bytes_left[:, at_w])
        net.add_cost(scope[0], out[at_w])
    else:
        net.add(Factor(tuple(scope), tuple(labels), out, bytes_left))
    return scope


def determined_by(net: Net, v: int) -> int | None:
    """A factor in which the other node's label leaves at most one strategy of ``v``; None when there is none."""
    for number in net.incident[v]:
        f = net.factors[number]
        if len(f.scope) != 2:
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
        net.add(Factor(tuple(scope), tuple(labels), g.table, g.used))
    if f.used is not None:
        net.add_used(w, np.moveaxis(f.used, k + 1, 1)[:, label_of, np.arange(table.shape[1])][:, at_w])
    own = net.used[v]
    if own is not None:
        net.add_used(w, own[:, strategy_of[at_w]])
    net.used[v] = None
    net.gone[v] = True
    net.records.append(Record(v, net.cost[v], factors, own))
    net.add_cost(w, cost[at_w])
    return touched

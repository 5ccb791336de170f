"""Compiled kernels of the exact reductions. Types are explicit, so that importing compiles (or loads) them."""

from __future__ import annotations

import numpy as np
from numba import njit

INT, REAL, BOOL = "i8[::1]", "f8[::1]", "b1[::1]"


@njit(f"i8({INT},{REAL},{INT},{INT},{INT},{REAL},{BOOL})", cache=True, nogil=True, error_model="numpy")
def propagate(off, cost, eu, ev, toff, table, alive):  # type: ignore[no-untyped-def]
    """Arc consistency: clear ``alive`` where a value has no finite partner. Values removed; -1: some node is empty."""
    n, m = len(off) - 1, len(eu)
    removed = 0
    for i in range(len(cost)):
        if alive[i] and cost[i] == np.inf:
            alive[i] = False
            removed += 1
    dirty = np.ones(n, np.bool_)
    while True:
        fresh = np.zeros(n, np.bool_)
        changed = False
        for e in range(m):
            u, v = eu[e], ev[e]
            if not (dirty[u] or dirty[v]):
                continue
            ou, ov = off[u], off[v]
            ku, kv = off[u + 1] - ou, off[v + 1] - ov
            seen = np.zeros(kv, np.bool_)
            for a in range(ku):
                if not alive[ou + a]:
                    continue
                row = toff[e] + a * kv
                any_finite = False
                for b in range(kv):
                    if alive[ov + b] and table[row + b] < np.inf:
                        any_finite = True
                        seen[b] = True
                if not any_finite:
                    alive[ou + a] = False
                    fresh[u] = True
                    changed = True
                    removed += 1
            for b in range(kv):
                if alive[ov + b] and not seen[b]:
                    alive[ov + b] = False
                    fresh[v] = True
                    changed = True
                    removed += 1
        dirty = fresh
        if not changed:
            break
    for v in range(n):
        left = False
        for i in range(off[v], off[v + 1]):
            left = left or alive[i]
        if not left:
            return -1
    return removed


@njit(
    f"Tuple(({INT},{INT},{INT}))({INT},{INT},{INT},{INT},{REAL},{INT},i8)", cache=True, nogil=True, error_model="numpy"
)
def merge_forest(off, eu, ev, toff, table, degree, growth):  # type: ignore[no-untyped-def]
    """Choose nodes determined by a neighbour: per node its root, and the map from the root's values to its own.

    A node with fewer values than its root makes the tables of its edges grow: by at most ``growth`` rows in all.
    Returns ``root``, ``moff``, ``maps``: value s of ``root[i]`` means value ``maps[moff[i] + s]`` of node i.
    """
    n, m = len(off) - 1, len(eu)
    parent = np.full(n, -1)
    via = np.full(n, -1)
    top = np.arange(n)
    for phase in range(2):  # first nodes of equal size (no table grows), then the rest
        for e in range(m):
            u, v = eu[e], ev[e]
            ku, kv = off[u + 1] - off[u], off[v + 1] - off[v]
            if (ku == kv) != (phase == 0):
                continue
            finite = 0
            for i in range(toff[e], toff[e + 1]):
                if table[i] < np.inf:
                    finite += 1
            if finite != max(ku, kv):  # arc consistency: every row and column has a finite cell
                continue
            ru, rv = u, v
            while top[ru] != ru:
                top[ru] = top[top[ru]]
                ru = top[ru]
            while top[rv] != rv:
                top[rv] = top[top[rv]]
                rv = top[rv]
            if ru == rv:
                continue
            p, c = u, v
            if kv > ku or (kv == ku and degree[v] > degree[u]):
                p, c = v, u
            if parent[c] >= 0:
                if ku != kv or parent[p] >= 0:
                    continue
                p, c = c, p
            kp, kc = off[p + 1] - off[p], off[c + 1] - off[c]
            if kp > kc and (kp - kc) * degree[c] > growth:
                continue
            rp = rv if p == v else ru
            if off[rp + 1] - off[rp] > kc and (off[rp + 1] - off[rp] - kc) * degree[c] > growth:
                continue
            rc = ru if p == v else rv
            parent[c] = p
            via[c] = e
            top[rc] = rp
            degree[p] += degree[c]
    stack = np.zeros(n, np.int64)
    filled = 0
    for i in range(n):
        r = i
        while top[r] != r:
            r = top[r]
        filled += off[r + 1] - off[r]
    root, moff, maps = np.full(n, -1), np.zeros(n, np.int64), np.zeros(filled, np.int64)
    filled = 0
    for i in range(n):
        depth = 0
        j = i
        while root[j] < 0 and parent[j] >= 0:
            stack[depth] = j
            depth += 1
            j = parent[j]
        if root[j] < 0:
            root[j] = j
            moff[j] = filled
            for s in range(off[j + 1] - off[j]):
                maps[filled + s] = s
            filled += off[j + 1] - off[j]
        while depth > 0:
            depth -= 1
            c = stack[depth]
            p = parent[c]
            r = root[p]
            root[c] = r
            moff[c] = filled
            e = via[c]
            kr = off[r + 1] - off[r]
            kv = off[ev[e] + 1] - off[ev[e]]
            kc = off[c + 1] - off[c]
            for s in range(kr):
                a = maps[moff[p] + s]
                for b in range(kc):
                    cell = toff[e] + (b * kv + a if eu[e] == c else a * kv + b)
                    if table[cell] < np.inf:
                        maps[filled + s] = b
                        break
            filled += kr
    return root, moff, maps


@njit(
    f"void({INT},{REAL},{INT},{INT},{INT},{REAL},{INT},{INT},{INT},{INT},{INT},{REAL},{INT},{INT},{REAL})",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def substitute(off, cost, eu, ev, toff, table, new, moff, maps, target, noff, ncost, nev, ntoff, ntable):  # type: ignore[no-untyped-def]
    """Add costs and tables of old nodes into those of their roots; ``target[e]``: new edge, or -1 inside a root."""
    for i in range(len(off) - 1):
        r = new[i]
        for s in range(noff[r + 1] - noff[r]):
            ncost[noff[r] + s] += cost[off[i] + maps[moff[i] + s]]
    for e in range(len(eu)):
        u, v = eu[e], ev[e]
        kv = off[v + 1] - off[v]
        ru, rv = new[u], new[v]
        t = target[e]
        if t < 0:
            for s in range(noff[ru + 1] - noff[ru]):
                ncost[noff[ru] + s] += table[toff[e] + maps[moff[u] + s] * kv + maps[moff[v] + s]]
            continue
        kru, krv = noff[ru + 1] - noff[ru], noff[rv + 1] - noff[rv]
        if nev[t] == rv:
            for a in range(kru):
                row = toff[e] + maps[moff[u] + a] * kv
                for b in range(krv):
                    ntable[ntoff[t] + a * krv + b] += table[row + maps[moff[v] + b]]
        else:
            for b in range(krv):
                for a in range(kru):
                    ntable[ntoff[t] + b * kru + a] += table[toff[e] + maps[moff[u] + a] * kv + maps[moff[v] + b]]


@njit(f"void({INT},{REAL},{INT},{INT},{INT},{REAL},f8,{BOOL})", cache=True, nogil=True, error_model="numpy")
def fold_separable(off, cost, eu, ev, toff, table, noise, keep):  # type: ignore[no-untyped-def]
    """Tables that are f[a] + g[b] (all finite) go into the costs; clears ``keep``."""
    for e in range(len(eu)):
        u, v = eu[e], ev[e]
        ku, kv = off[u + 1] - off[u], off[v + 1] - off[v]
        first = table[toff[e]]
        good = first < np.inf
        for a in range(ku):
            if not good:
                break
            row = toff[e] + a * kv
            left = table[row]
            for b in range(kv):
                right = table[toff[e] + b]
                scale = abs(table[row + b]) + abs(left) + abs(right) + abs(first)
                if not scale < np.inf or abs(table[row + b] - left - right + first) > noise * scale:
                    good = False
                    break
        if good:
            keep[e] = False
            for a in range(ku):
                cost[off[u] + a] += table[toff[e] + a * kv]
            for b in range(kv):
                cost[off[v] + b] += table[toff[e] + b] - first


@njit(
    f"i8({INT},{REAL},{INT},{INT},{INT},{REAL},{INT},{INT},{INT},{INT},{INT},{BOOL},{INT},i8)",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def dominate(off, cost, eu, ev, toff, table, ioff, inc, soff, uoff, use, alive, by, work):  # type: ignore[no-untyped-def]
    """Goldstein's criterion with bytes; clears ``alive``. Number of values removed; ``by``: the better values.

    ``work``: comparisons for one node; 20 times that for all. t goes when some s holds no more bytes in any segment
    and, after row minima went into the costs,
    cost[s] + sum_e max_b (T_e[s, b] - T_e[t, b]) <= cost[t].
    """
    removed = 0
    left = 20 * work
    widest = 0
    for v in range(len(off) - 1):
        widest = max(widest, off[v + 1] - off[v])
    total = np.zeros(widest)
    order = np.zeros(widest, np.int64)
    low = np.zeros((1, 1))
    for v in range(len(off) - 1):
        k = off[v + 1] - off[v]
        if k < 2:
            continue
        d = ioff[v + 1] - ioff[v]
        if low.shape[0] < d or low.shape[1] < k:
            low = np.zeros((max(d, low.shape[0]), max(k, low.shape[1])))
        for s in range(k):
            total[s] = cost[off[v] + s] if alive[off[v] + s] else np.inf
        for q in range(d):
            e = inc[ioff[v] + q]
            w = ev[e] if eu[e] == v else eu[e]
            kw = off[w + 1] - off[w]
            for s in range(k):
                least = np.inf
                for b in range(kw):
                    if alive[off[w] + b]:
                        cell = toff[e] + (s * kw + b if eu[e] == v else b * k + s)
                        least = min(least, table[cell])
                low[q, s] = least
                total[s] += least
        for s in range(k):  # insertion sort: stable, and a library sort would double the compile time
            j = s
            while j > 0 and total[order[j - 1]] > total[s]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = s
        budget = min(work, left)
        before = budget
        for j in range(k - 1, -1, -1):
            t = order[j]
            if not alive[off[v] + t]:
                continue
            if total[t] == np.inf:
                alive[off[v] + t] = False
                by[off[v] + t] = order[0]
                removed += 1
                continue
            for i in range(k):
                s = order[i]
                if s == t or not alive[off[v] + s]:
                    continue
                if total[s] > total[t] or budget < 0:
                    break
                fine = True
                for g in range(soff[v], soff[v + 1]):
                    if use[uoff[g] + s] > use[uoff[g] + t]:
                        fine = False
                        break
                budget -= soff[v + 1] - soff[v]
                room = total[t] - total[s]
                slack = 1e-13 * abs(total[t])
                q = 0
                while fine and q < d:
                    e = inc[ioff[v] + q]
                    w = ev[e] if eu[e] == v else eu[e]
                    kw = off[w + 1] - off[w]
                    worst = -np.inf
                    shift = low[q, t] - low[q, s]
                    for b in range(kw):
                        if not alive[off[w] + b]:
                            continue
                        if eu[e] == v:
                            ts, tt = table[toff[e] + s * kw + b], table[toff[e] + t * kw + b]
                        else:
                            ts, tt = table[toff[e] + b * k + s], table[toff[e] + b * k + t]
                        if tt < np.inf:
                            worst = max(worst, ts - tt + shift)
                    budget -= kw
                    room -= max(0.0, worst)
                    if room < -slack:
                        fine = False
                    q += 1
                if fine:
                    alive[off[v] + t] = False
                    by[off[v] + t] = s
                    removed += 1
                    break
        left -= before - budget
    return removed

"""Compiled kernel of the local search: exact dynamic programming over random induced trees.

One trial grows a tree from a random node (a node joins when exactly one of its neighbours is in the tree), finds the
best values of the whole tree with all other nodes fixed, and keeps them if memory allows. A forced trial first moves
the seed node to another value and lets further trees around it repair the damage; it is undone unless it pays.
"""

from __future__ import annotations

import numpy as np
from numba import njit

INT, REAL = "i8[::1]", "f8[::1]"


@njit("i8(u8[::1], i8)", cache=True, nogil=True, error_model="numpy")
def below(state, limit):  # type: ignore[no-untyped-def]
    """A random integer in 0 .. limit - 1 (xorshift64*, G. Marsaglia 2003, S. Vigna 2016)."""
    z = state[0]
    z ^= z >> np.uint64(12)
    z ^= z << np.uint64(25)
    z ^= z >> np.uint64(27)
    state[0] = z
    return np.int64(((z * np.uint64(2685821657736338717)) >> np.uint64(33)) % np.uint64(limit))


@njit(
    f"i8({INT},{REAL},{REAL},{INT},{INT},{INT},{REAL},{INT},{INT},i8,i8,u8[::1],{INT},{INT},{INT},{INT},{INT},{REAL},{INT},{INT})",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def grow(  # type: ignore[no-untyped-def]
    off, cost, theta, ioff, nbr, tb, tab, free, x, seed, target, rng, order, up, mark, stamp, touch, h, back, boff
):
    """Grow a tree from ``seed`` and prepare its costs ``h``; number of nodes (in ``order``, parents first).

    ``up[v]``: incidence of v towards its parent. ``stamp[0]`` numbers the trees; ``mark``: in the tree; ``touch``:
    stamp * 2 for one neighbour in the tree, stamp * 2 + 1 for several. ``boff``: place of the best values in ``back``.
    """
    stamp[0] += 1
    now = stamp[0]
    count = 1
    order[0] = seed
    mark[seed] = now
    up[seed] = -1
    head = 0
    room = len(back)
    skip = below(rng, 4) * 12  # percent
    while head < count:
        v = order[head]
        head += 1
        k = off[v + 1] - off[v]
        for q in range(ioff[v], ioff[v + 1]):
            w = nbr[q]
            if touch[w] < 2 * now:
                touch[w] = 2 * now
            else:
                touch[w] = 2 * now + 1
        # a node queued by an earlier member may now touch two members: it was marked when queued, so it stays a tree
        # only if queued nodes count as members, which is why neighbours are touched when a node is queued (below)
        for q in range(ioff[v], ioff[v + 1]):
            w = nbr[q]
            if count >= target or free[w] == 0 or mark[w] == now or touch[w] != 2 * now:
                continue
            if below(rng, 100) < skip or room < k:
                continue
            fine = True
            for p in range(ioff[w], ioff[w + 1]):
                if mark[nbr[p]] == now and nbr[p] != v:
                    fine = False
                    break
            if not fine:
                continue
            mark[w] = now
            order[count] = w
            boff[w] = len(back) - room
            room -= k
            count += 1
            for p in range(ioff[w], ioff[w + 1]):
                if nbr[p] == v:
                    up[w] = p
    for i in range(count):
        v = order[i]
        o, k = off[v], off[v + 1] - off[v]
        for s in range(k):
            h[o + s] = theta[o + s]
        for q in range(ioff[v], ioff[v + 1]):
            w = nbr[q]
            if mark[w] != now:
                row = tb[q] + x[w] * k
                for s in range(k):
                    h[o + s] += tab[row + s]
    return count


@njit(
    f"f8({INT},{INT},{INT},{INT},{REAL},{INT},i8,{INT},{INT},{REAL},{INT},{INT})",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def best_tree(off, nbr, opp, tb, tab, x, count, order, up, h, back, boff):  # type: ignore[no-untyped-def]
    """Minimise over the tree; writes ``x`` and returns the least cost."""
    for i in range(count - 1, 0, -1):
        v = order[i]
        q = up[v]
        p = nbr[q]
        o, k = off[v], off[v + 1] - off[v]
        op, kp = off[p], off[p + 1] - off[p]
        for a in range(kp):
            row = tb[q] + a * k
            best = np.inf
            at = 0
            for s in range(k):
                cell = h[o + s] + tab[row + s]
                if cell < best:
                    best = cell
                    at = s
            h[op + a] += best
            back[boff[v] + a] = at
    total = 0.0
    for i in range(count):
        v = order[i]
        if i > 0:
            x[v] = back[boff[v] + x[nbr[up[v]]]]
            continue
        best = np.inf
        at = x[v]
        for s in range(off[v + 1] - off[v]):
            cell = h[off[v] + s]
            if cell < best or (cell == best and s == x[v]):
                best = cell
                at = s
        x[v] = at
        total = best
    return total


@njit(
    f"void({INT},{REAL},{REAL},{INT},{INT},{INT},{INT},{REAL},{INT},{INT},{INT},{INT},{INT},{INT},{INT},{INT},{INT},{REAL},u8[::1],i8,i8,i8,f8,"
    f"{INT},{INT},{INT},{INT},{INT},{REAL},{INT},{INT},{INT},{INT},{INT})",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def search(  # type: ignore[no-untyped-def]
    off,
    cost,
    theta,
    ioff,
    nbr,
    opp,
    tb,
    tab,
    soff,
    s0,
    s1,
    uoff,
    use,
    room,
    free,
    x,
    used,
    score,
    rng,
    trials,
    largest,
    forced,
    heat,
    order,
    up,
    mark,
    stamp,
    touch,
    h,
    back,
    boff,
    old,
    log,
    delta,
):
    """``trials`` trials on the assignment ``x`` with ``used`` bytes per row.

    ``theta``: costs with prices; a trial is kept when it does not violate memory more and lowers ``theta``'s total
    (within ``heat``). ``score``: cost, priced cost, violation, best feasible cost; ``best`` is kept by the caller.
    """
    n = len(off) - 1
    rows = len(room)
    for _ in range(trials):
        seed = below(rng, n)
        if free[seed] == 0:
            continue
        target = max(1, largest >> below(rng, 8))
        changed = 0
        steps = 1
        push = below(rng, 100) < forced
        if push:
            steps = 3
        stamp[1] += 1
        tick = stamp[1]
        for step in range(steps):
            root = seed
            if step > 0 and changed > 0:
                root = log[below(rng, changed)]
            count = grow(
                off,
                cost,
                theta,
                ioff,
                nbr,
                tb,
                tab,
                free,
                x,
                root,
                target,
                rng,
                order,
                up,
                mark,
                stamp,
                touch,
                h,
                back,
                boff,
            )
            if push and step == 0:
                k = off[seed + 1] - off[seed]
                at = below(rng, k)
                if at == x[seed]:
                    h[off[seed] + at] = np.inf
                else:
                    for s in range(k):
                        if s != at:
                            h[off[seed] + s] = np.inf
            for i in range(count):
                v = order[i]
                if old[v + n] != tick:
                    old[v + n] = tick
                    old[v] = x[v]
                    log[changed] = v
                    changed += 1
            best_tree(off, nbr, opp, tb, tab, x, count, order, up, h, back, boff)
            kept = 0
            for i in range(changed):
                v = log[i]
                if x[v] != old[v]:
                    log[kept] = v
                    kept += 1
                else:
                    old[v + n] = 0
            changed = kept
            if changed == 0:
                break
        if changed == 0:
            continue
        dcost = 0.0
        dprice = 0.0
        low = rows
        high = 0
        for i in range(changed):
            v = log[i]
            k = off[v + 1] - off[v]
            a, b = old[v], x[v]
            dcost += cost[off[v] + b] - cost[off[v] + a]
            dprice += theta[off[v] + b] - theta[off[v] + a]
            for q in range(ioff[v], ioff[v + 1]):
                w = nbr[q]
                before = x[w]
                if old[w + n] == tick:
                    if w < v:
                        continue
                    before = old[w]
                change = tab[tb[q] + x[w] * k + b] - tab[tb[q] + before * k + a]
                dcost += change
                dprice += change
        limit = 1e-12 * abs(score[1])
        if heat > 0.0:
            limit -= heat * np.log(1e-9 + below(rng, 1000000) * 1e-6)
        keep = dprice <= limit and dprice < np.inf
        worse = 0.0
        if keep:
            for i in range(changed):
                v = log[i]
                a, b = old[v], x[v]
                for g in range(soff[v], soff[v + 1]):
                    d = use[uoff[g] + b] - use[uoff[g] + a]
                    if d != 0:
                        delta[s0[g]] += d
                        delta[s1[g]] -= d
                        low = min(low, s0[g])
                        high = max(high, s1[g])
            run = 0
            for r in range(low, high):
                run += delta[r]
                if run != 0:
                    over = used[r] + run - room[r]
                    if over > 0:
                        worse += over
                    over = used[r] - room[r]
                    if over > 0:
                        worse -= over
            if worse > 0.0 and score[2] < 0.5:  # what fits stays so; what does not may go by prices alone
                keep = False
            run = 0
            for r in range(low, high + 1):
                if r < high:
                    run += delta[r]
                    if keep:
                        used[r] += run
                delta[r] = 0
        if keep:
            score[0] += dcost
            score[1] += dprice
            score[2] += worse
            for i in range(changed):
                old[log[i] + n] = 0
            if score[2] <= 0.5 and score[0] < score[3]:
                score[3] = score[0]
                for v in range(n):
                    old[v + 2 * n] = x[v]
        else:
            for i in range(changed):
                v = log[i]
                x[v] = old[v]
                old[v + n] = 0

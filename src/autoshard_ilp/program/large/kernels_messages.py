"""Compiled kernels of the lower bound: sequential tree-reweighted message passing.

Source: V. Kolmogorov, "Convergent Tree-reweighted Message Passing for Energy Minimization", IEEE TPAMI 28 (2006).

A graph is given by incidences: those of node v are ``ioff[v] .. ioff[v + 1]``; ``nbr`` is the node at the other end,
``opp`` the same edge seen from there, and ``tab[tb[q] + b * K_v + s]`` its cost when the neighbour takes b and v
takes s.
"""

from __future__ import annotations

import numpy as np
from numba import njit

INT, REAL = "i8[::1]", "f8[::1]"


@njit(
    f"f8({INT},{REAL},{INT},{INT},{INT},{INT},{REAL},{INT},{REAL},{REAL},{INT},{REAL})",
    cache=True,
    nogil=True,
    error_model="numpy",
)
def sweep(off, theta, ioff, nbr, opp, tb, tab, moff, msg, hat, x, excess):  # type: ignore[no-untyped-def]
    """One forward and one backward pass over ``msg`` (into v along q: ``msg[moff[q] + s]``); the bound.

    ``hat``: workspace of the largest node twice. ``x`` out: an assignment decoded on the way forward.
    """
    n = len(off) - 1
    bound = 0.0
    for step in range(2 * n):
        forward = step < n
        v = step if forward else 2 * n - 1 - step
        k = off[v + 1] - off[v]
        later = 0
        earlier = 0
        for s in range(k):
            hat[s] = theta[off[v] + s]
        for q in range(ioff[v], ioff[v + 1]):
            if nbr[q] > v:
                later += 1
            else:
                earlier += 1
            start = moff[q]
            for s in range(k):
                hat[s] += msg[start + s]
        if forward:
            best = np.inf
            for s in range(k):
                total = hat[s]
                for q in range(ioff[v], ioff[v + 1]):
                    if nbr[q] < v:
                        total += tab[tb[q] + x[nbr[q]] * k + s] - msg[moff[q] + s]
                if total < best:
                    best = total
                    x[v] = s
        else:
            least = np.inf
            for s in range(k):
                least = min(least, hat[s])
            for s in range(k):
                hat[s] -= least
                excess[off[v] + s] = hat[s]
            bound += least
        share = 1.0 / max(1, later, earlier)
        for q in range(ioff[v], ioff[v + 1]):
            w = nbr[q]
            if (w > v) != forward:
                continue
            kw = off[w + 1] - off[w]
            p = opp[q]
            out = moff[p]
            for b in range(kw):
                msg[out + b] = np.inf
            for s in range(k):
                give = share * hat[s] - msg[moff[q] + s]
                row = tb[p] + s * kw
                for b in range(kw):
                    cell = give + tab[row + b]
                    if cell < msg[out + b]:
                        msg[out + b] = cell
            least = np.inf
            for b in range(kw):
                least = min(least, msg[out + b])
            for b in range(kw):
                msg[out + b] -= least
            if not forward:
                bound += least
    return bound


@njit(f"void({INT},{REAL},{REAL},{INT},{INT},{INT},{INT},{INT},{REAL})", cache=True, nogil=True, error_model="numpy")
def charge(off, cost, prefix, soff, s0, s1, uoff, use, theta):  # type: ignore[no-untyped-def]
    """``theta`` = cost + price of the bytes; ``prefix``: running sums of the prices of the rows."""
    for v in range(len(off) - 1):
        k = off[v + 1] - off[v]
        for s in range(k):
            theta[off[v] + s] = cost[off[v] + s]
        for g in range(soff[v], soff[v + 1]):
            price = prefix[s1[g]] - prefix[s0[g]]
            if price > 0.0:
                for s in range(k):
                    theta[off[v] + s] += price * use[uoff[g] + s]

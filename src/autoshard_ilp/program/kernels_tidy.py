"""Compiled tidying of a factor of two nodes without bytes, by far the most frequent step of presolve (Numba).

The same as :func:`reduce.compress` and :func:`reduce.normalise` one after the other, and the question that
:func:`reduce.merge_equal_labels` begins with, in one call: on tables of a few dozen cells, NumPy's calls take longer
than the work.
"""

from __future__ import annotations

import numpy as np
from numba import njit

COMPRESSED, ROWS, COLUMNS, SOME, ALIKE = 1, 2, 4, 8, 16
"""Labels went; rows, and columns, had a least entry other than 0; some entry is not 0; some labels may be alike."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit(cache=True)
def _renumbered(labels: np.ndarray, alive: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels that strategies alive carry, ascending, and labels numbered anew (-1: not alive)."""
    place = np.full(count, -1, np.int64)
    for s in alive:
        place[labels[s]] = 0
    kept = 0
    for a in range(count):
        if place[a] == 0:
            place[a] = kept
            kept += 1
    left = np.empty(kept, np.int64)
    for a in range(count):
        if place[a] >= 0:
            left[place[a]] = a
    if kept == count:
        return left, labels
    fresh = np.full(len(labels), -1, np.int64)
    for s in alive:
        fresh[s] = place[labels[s]]
    return left, fresh


@njit(cache=True)
def _alike(bits: np.ndarray, across: bool) -> bool:
    """Whether rows, or columns ``across``, may have the same bits: a mixed sum of them is not of its own."""
    rows, columns = bits.shape
    count, length = (columns, rows) if across else (rows, columns)
    sums = np.zeros(count, np.uint64)
    for i in range(count):
        factor, total = _MIX, np.uint64(0)
        for j in range(length):
            cell = bits[j, i] if across else bits[i, j]
            total += (cell ^ (cell >> _SHIFT)) * factor
            factor += _MIX + _MIX
        sums[i] = total
    sums.sort()
    return bool((sums[1:] == sums[:-1]).any())


@njit(cache=True)
def tidy_pair(
    table: np.ndarray,
    u_labels: np.ndarray,
    v_labels: np.ndarray,
    u_alive: np.ndarray,
    v_alive: np.ndarray,
    rounding: float,
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Drop labels that nobody alive carries, and move the least entry of every row, then of every column, out.

    Args:
        table: seconds, (labels of u, labels of v); it is not changed.
        u_labels, v_labels: label per strategy.
        u_alive, v_alive: strategies alive.
        rounding: relative; differences below are noise.

    Returns:
        What happened (a sum of the constants above), the table, labels per strategy, and what was moved out of each
        row, and of each column (``inf`` where a row has no finite entry; it stays infinite).
    """
    rows, u_fresh = _renumbered(u_labels, u_alive, table.shape[0])
    columns, v_fresh = _renumbered(v_labels, v_alive, table.shape[1])
    n, m = len(rows), len(columns)
    flags = 0
    if n < table.shape[0] or m < table.shape[1]:
        flags |= COMPRESSED
    out = np.empty((n, m))
    for a in range(n):
        for b in range(m):
            out[a, b] = table[rows[a], columns[b]]
    of_rows, of_columns = np.full(n, np.inf), np.full(m, np.inf)
    for a in range(n):
        for b in range(m):
            of_rows[a] = min(of_rows[a], out[a, b])
    for a in range(n):
        low = of_rows[a]
        if low != 0.0:
            flags |= ROWS
            if low < np.inf:
                noise = rounding * abs(low)
                for b in range(m):
                    left = out[a, b] - low
                    out[a, b] = 0.0 if abs(left) <= noise else left
    for a in range(n):
        for b in range(m):
            of_columns[b] = min(of_columns[b], out[a, b])
    for b in range(m):
        low = of_columns[b]
        if low != 0.0:
            flags |= COLUMNS
            if low < np.inf:
                noise = rounding * abs(low)
                for a in range(n):
                    left = out[a, b] - low
                    out[a, b] = 0.0 if abs(left) <= noise else left
    for a in range(n):
        for b in range(m):
            if out[a, b] != 0.0:
                flags |= SOME
            else:
                out[a, b] = 0.0  # never -0, whose bits are others
    if flags & SOME:
        bits = out.view(np.uint64)
        if _alike(bits, False) or _alike(bits, True):
            flags |= ALIKE
    return flags, out, u_fresh, v_fresh, of_rows, of_columns

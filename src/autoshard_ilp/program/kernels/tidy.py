"""Compiled tidying of a factor of two nodes without bytes, by far the most frequent step of presolve (Numba).

The same as :func:`reduce.compress` and :func:`reduce.normalise` one after the other, and the question that
:func:`reduce.merge_equal_labels` begins with, in one call: on tables of a few dozen cells, NumPy's calls take longer
than the work.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autoshard_ilp.program.kernels.labels import numbered

COMPRESSED, ROWS, COLUMNS, SOME, ALIKE = 1, 2, 4, 8, 16
"""Labels went; rows, and columns, had a least entry other than 0; some entry is not 0; some labels may be alike."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit(cache=True)
def _renumbered(labels: np.ndarray, alive: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels that strategies alive carry, ascending, and labels numbered anew (-1: not alive)."""
    carried = labels[alive]
    first, numbers = numbered(carried, count)
    left = carried[first]
    if len(left) == count:
        return left, labels
    fresh = np.full(len(labels), -1, np.int64)
    fresh[alive] = numbers
    return left, fresh


@njit(cache=True)
def _move_out(table: np.ndarray, rounding: float) -> tuple[np.ndarray, bool]:
    """Least entry of every row, which is moved out of it where it is finite, and whether one of them is not 0."""
    rows, columns = table.shape
    least, some = np.full(rows, np.inf), False
    for a in range(rows):
        for b in range(columns):
            least[a] = min(least[a], table[a, b])
        low = least[a]
        if low != 0.0:
            some = True
            if low < np.inf:
                noise = rounding * abs(low)
                for b in range(columns):
                    left = table[a, b] - low
                    table[a, b] = 0.0 if abs(left) <= noise else left
    return least, some


@njit(cache=True)
def _alike(bits: np.ndarray) -> bool:
    """Whether rows may have the same bits: a mixed sum of them is not of its own."""
    rows, columns = bits.shape
    sums = np.zeros(rows, np.uint64)
    for a in range(rows):
        factor, total = _MIX, np.uint64(0)
        for b in range(columns):
            total += (bits[a, b] ^ (bits[a, b] >> _SHIFT)) * factor
            factor += _MIX + _MIX
        sums[a] = total
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
    of_rows, moved = _move_out(out, rounding)
    if moved:
        flags |= ROWS
    of_columns, moved = _move_out(out.T, rounding)
    if moved:
        flags |= COLUMNS
    for a in range(n):
        for b in range(m):
            if out[a, b] != 0.0:
                flags |= SOME
            else:
                out[a, b] = 0.0  # never -0, whose bits are others
    if flags & SOME:
        bits = out.view(np.uint64)
        if _alike(bits) or _alike(bits.T):
            flags |= ALIKE
    return flags, out, u_fresh, v_fresh, of_rows, of_columns

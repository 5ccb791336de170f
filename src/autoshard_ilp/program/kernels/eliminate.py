"""Compiled inner loop of bucket elimination (Numba), for :func:`autoshard_ilp.program.nets.reduce.min_sum`."""

from __future__ import annotations

import numpy as np
from numba import njit

from autoshard_ilp.program.kernels.messages import INF, ORDERED


@njit(cache=True, fastmath=ORDERED)
def min_sum(
    cost: np.ndarray, cells: np.ndarray, at: np.ndarray, leads: np.ndarray, place: np.ndarray, out: np.ndarray
) -> None:
    """Least over strategies of their cost and one cell of each table; all but the last axis of ``out`` are one.

    Args:
        cost: per strategy.
        cells: the tables one after the other, each (strategies, leading cells, last axis).
        at: where each table begins in ``cells``, and where the last one ends.
        leads: leading cells of each table.
        place: per table, its leading cell for each row of ``out``.
        out: (rows, last axis), filled in. A table without the last axis has one cell there.
    """
    strategies, (rows, columns) = len(cost), out.shape
    tables = len(leads)
    size = np.empty(tables, np.int64)
    for k in range(tables):
        size[k] = (at[k + 1] - at[k]) // (strategies * leads[k])
    total = np.empty(columns)
    for i in range(rows):
        best = out[i]
        for j in range(columns):
            best[j] = INF
        for s in range(strategies):
            base, wide = cost[s], 0
            for k in range(tables):
                if size[k] == 1:
                    base += cells[at[k] + s * leads[k] + place[k, i]]
                else:
                    wide += 1
            if base == INF:
                continue
            seen = 0
            for k in range(tables):
                if size[k] == 1:
                    continue
                begin = at[k] + (s * leads[k] + place[k, i]) * columns
                row = cells[begin : begin + columns]
                seen += 1
                if seen == wide == 1:
                    for j in range(columns):
                        best[j] = min(best[j], base + row[j])
                elif seen == wide:
                    for j in range(columns):
                        best[j] = min(best[j], total[j] + row[j])
                elif seen == 1:
                    for j in range(columns):
                        total[j] = base + row[j]
                else:
                    for j in range(columns):
                        total[j] += row[j]
            if wide == 0:
                for j in range(columns):
                    best[j] = min(best[j], base)


@njit(cache=True)  # sums in the order in which ``Record.best`` adds them, or equal costs would be told apart
def min_sum_used(
    cost: np.ndarray,
    cells: np.ndarray,
    at: np.ndarray,
    leads: np.ndarray,
    place: np.ndarray,
    held: np.ndarray,
    held_at: np.ndarray,
    held_leads: np.ndarray,
    held_place: np.ndarray,
    out: np.ndarray,
    kept: np.ndarray,
) -> bool:
    """As :func:`min_sum` where bytes count; False as soon as a cheapest choice is not that of least bytes in every row.

    Args:
        held: bytes, arrays one after the other like ``cells``: (memory rows, strategies, leading cells, last axis).
        held_at, held_leads, held_place: as for the tables.
        kept: (memory rows, rows, last axis), filled in: bytes of the cheapest choice, of equals the least.
    """
    strategies, (rows, columns), moments = len(cost), out.shape, len(kept)
    total, least_sum = np.empty(columns), np.empty(columns, np.int64)
    taken, least = np.empty((moments, columns), np.int64), np.empty((moments, columns), np.int64)
    for i in range(rows):
        best = out[i]
        for j in range(columns):
            best[j] = INF
        for s in range(strategies):
            for j in range(columns):
                total[j] = cost[s]
                for r in range(moments):
                    taken[r, j] = 0
            for k in range(len(leads)):
                size = (at[k + 1] - at[k]) // (strategies * leads[k])
                begin = at[k] + (s * leads[k] + place[k, i]) * size
                for j in range(columns):
                    total[j] += cells[begin + (j if size > 1 else 0)]
            for k in range(len(held_leads)):
                size = (held_at[k + 1] - held_at[k]) // (moments * strategies * held_leads[k])
                for r in range(moments):
                    begin = held_at[k] + ((r * strategies + s) * held_leads[k] + held_place[k, i]) * size
                    for j in range(columns):
                        taken[r, j] += held[begin + (j if size > 1 else 0)]
            for j in range(columns):
                if total[j] == INF:
                    continue
                together, fresh = np.int64(0), best[j] == INF
                for r in range(moments):
                    together += taken[r, j]
                    if fresh or taken[r, j] < least[r, j]:
                        least[r, j] = taken[r, j]
                if fresh or total[j] < best[j] or (total[j] == best[j] and together < least_sum[j]):
                    best[j], least_sum[j] = total[j], together
                    for r in range(moments):
                        kept[r, i, j] = taken[r, j]
        for j in range(columns):
            for r in range(moments):
                if best[j] == INF:
                    kept[r, i, j] = 0
                elif kept[r, i, j] != least[r, j]:
                    return False
    return True


@njit(cache=True)
def add_worst_difference(rows: np.ndarray, label: np.ndarray, total: np.ndarray) -> None:
    """Add to ``total[s, t]`` the least of ``rows[label[s]] - rows[label[t]]`` over the columns.

    Columns where the first is infinite do not count; where only the second is, or where infinities of both signs meet,
    the sum becomes minus infinity.
    """
    labels, columns = rows.shape
    known = np.zeros((labels, labels), np.bool_)
    least = np.empty((labels, labels))
    for s in range(len(label)):
        for t in range(len(label)):
            a, b = label[s], label[t]
            if not known[a, b]:
                known[a, b] = True
                low = INF
                for c in range(columns):
                    x = rows[a, c]
                    if x == INF:
                        continue
                    y = rows[b, c]
                    if y == INF:
                        low = -INF
                        break
                    low = min(low, x - y)
                least[a, b] = low
            low = least[a, b]
            if low == -INF or total[s, t] == -INF:
                total[s, t] = -INF
            else:
                total[s, t] += low

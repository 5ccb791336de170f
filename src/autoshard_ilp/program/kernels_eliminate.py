"""Compiled inner loop of bucket elimination (Numba), for :func:`autoshard_ilp.program.reduce.min_sum`."""

from __future__ import annotations

import numpy as np
from numba import njit

from autoshard_ilp.program.kernels import INF, ORDERED


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

"""Compiled inner loops of the window (Numba): joins of sparse tables."""

from __future__ import annotations

import numpy as np
from numba import njit

INF = np.inf


@njit(cache=True)
def fit(left: np.ndarray, i: int, right: np.ndarray, j: int, room: np.ndarray) -> bool:
    """Whether two rows together stay within the room, in every relaxation."""
    for k in range(len(room)):  # noqa: SIM110 - Numba compiles no generators into all()
        if left[i, k] + right[j, k] > room[k]:
            return False
    return True


@njit(cache=True)
def join_rows(
    first: np.ndarray,
    last: np.ndarray,
    order: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    room: np.ndarray,
    most: int,
    work: int,
) -> tuple[bool, np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of rows whose slacks together stay within ``room``.

    Args:
        first, last: per left row, its range of matches in ``order``.
        order: right rows by key.
        left, right: slack, (rows, relaxations).
        room: largest slack, per relaxation.
        most: rows of the result.
        work: pairs looked at.

    Returns:
        False where there are more, else True, the left and the right row of each pair, and its slack.
    """
    relaxations = len(room)
    looked = 0
    for i in range(len(first)):
        looked += last[i] - first[i]
    if looked > work:
        return False, np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, relaxations))
    count = 0
    for i in range(len(first)):
        for at in range(first[i], last[i]):
            j = order[at]
            if fit(left, i, right, j, room):
                count += 1
        if count > most:
            return False, np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, relaxations))
    from_left, from_right = np.empty(count, np.int64), np.empty(count, np.int64)
    slack = np.empty((count, relaxations))
    count = 0
    for i in range(len(first)):
        for at in range(first[i], last[i]):
            j = order[at]
            if fit(left, i, right, j, room):
                from_left[count], from_right[count] = i, j
                for k in range(relaxations):
                    slack[count, k] = left[i, k] + right[j, k]
                count += 1
    return True, from_left, from_right, slack


@njit(cache=True)
def least_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Least of the rows of ``values`` per index, per column; ``inf`` for an index that does not occur."""
    out = np.full((size, values.shape[1]), INF)
    for i in range(len(index)):
        for k in range(values.shape[1]):
            out[index[i], k] = min(out[index[i], k], values[i, k])
    return out


@njit(cache=True)
def labels_together(nodes: np.ndarray, sizes: np.ndarray, own: int, alive: np.ndarray, product: np.ndarray) -> float:
    """Product over nodes, but ``own``, of their labels in all relations together, at most what is alive of each.

    Args:
        nodes, sizes: of all relations one after the other: the nodes of each, and how many labels these have in it.
        own: a node that is left out.
        alive: per node, its strategies.
        product: per node, zeros; they are zeros again afterwards.
    """
    together = 1.0
    for i in range(len(nodes)):
        v = nodes[i]
        product[v] = sizes[i] if product[v] == 0 else product[v] * sizes[i]
    for i in range(len(nodes)):
        v = nodes[i]
        if v != own and product[v] > 0:
            together *= min(product[v], float(alive[v]))
        product[v] = 0
    return together

"""Compiled inner loops of the window (Numba): joins of sparse tables, and fronts of partial plans."""

from __future__ import annotations

import numpy as np
from numba import njit

INF = np.inf
FEW = 8  # partial plans are not worth comparing
WORK = 100  # times as many pairs are looked at as partial plans may be made


@njit(cache=True)
def _fit(left: np.ndarray, i: int, right: np.ndarray, j: int, room: np.ndarray) -> bool:
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
            if _fit(left, i, right, j, room):
                count += 1
        if count > most:
            return False, np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, relaxations))
    from_left, from_right = np.empty(count, np.int64), np.empty(count, np.int64)
    slack = np.empty((count, relaxations))
    count = 0
    for i in range(len(first)):
        for at in range(first[i], last[i]):
            j = order[at]
            if _fit(left, i, right, j, room):
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
def _undominated(cost: np.ndarray, used: np.ndarray, count: int) -> np.ndarray:
    """Of the first ``count`` partial plans, those that none before them, by cost, equals or beats in all bytes."""
    order = np.argsort(cost[:count])
    begin = 0
    for end in range(1, count + 1):  # of equals in cost, those of least bytes first
        if end == count or cost[order[end]] != cost[order[begin]]:
            if end - begin > 1:
                part = order[begin:end].copy()
                held = np.zeros(end - begin, np.int64)
                for at in range(end - begin):
                    for r in range(used.shape[1]):
                        held[at] += used[part[at], r]
                order[begin:end] = part[np.argsort(held)]
            begin = end
    kept = np.empty(count, np.int64)
    found = 0
    for i in order:
        beaten = False
        for at in range(found - 1, -1, -1):
            beaten = True
            for r in range(used.shape[1]):
                if used[kept[at], r] > used[i, r]:
                    beaten = False
                    break
            if beaten:
                break
        if not beaten:
            kept[found] = i
            found += 1
    return kept[:found].copy()


@njit(cache=True)
def _room_for(values: np.ndarray, count: int, wanted: int) -> np.ndarray:
    """The array, or one with room for as many rows as are wanted and the first ``count`` of its rows."""
    if wanted <= len(values):
        return values
    out = np.empty((max(wanted, 2 * len(values)), values.shape[1]), values.dtype)
    for i in range(count):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j]
    return out


@njit(cache=True)
def _copy(
    to_cost: np.ndarray,
    to_used: np.ndarray,
    to_from: np.ndarray,
    to: int,
    cost: np.ndarray,
    used: np.ndarray,
    origin: np.ndarray,
    at: int,
) -> None:
    """One partial plan from one set of arrays to another."""
    to_cost[to, 0] = cost[at, 0]
    for r in range(used.shape[1]):
        to_used[to, r] = used[at, r]
    for c in range(origin.shape[1]):
        to_from[to, c] = origin[at, c]


@njit(cache=True)
def _extend(
    values: np.ndarray, count: int, state_value: np.ndarray, begin: int, end: int, room: np.ndarray
) -> tuple[np.ndarray, int]:
    """Pairs of the first ``count`` partial plans and the states from ``begin`` to ``end`` that stay within the room."""
    pairs, found = np.empty((1024, 2), np.int64), 0
    for a in range(count):
        for s in range(begin, end):
            if _fit(values, a, state_value, s, room):
                pairs = _room_for(pairs, found, found + 1)
                pairs[found, 0], pairs[found, 1] = a, s
                found += 1
    return pairs, found


@njit(cache=True)
def fronts(
    group_at: np.ndarray,
    cost: np.ndarray,
    used: np.ndarray,
    value: np.ndarray,
    children: np.ndarray,
    child_at: np.ndarray,
    state_at: np.ndarray,
    state_cost: np.ndarray,
    state_used: np.ndarray,
    state_value: np.ndarray,
    least: np.ndarray,
    rest: np.ndarray,
    fitting: np.ndarray,
    limits: np.ndarray,
    most: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per group of rows, the partial plans that no other of the group beats in cost and all bytes.

    A partial plan is a row and one state of each of its children. It goes as soon as some relaxation says that no plan
    with it is within that one's limit.

    Args:
        group_at: where each group's rows begin, and where the last one ends.
        cost, used, value: of each row alone: seconds, bytes (rows, memory rows), and in each relaxation.
        children: per row and child, the child's group.
        child_at: per child, where its groups begin in ``state_at`` and ``least``.
        state_at: per group of a child, where its states begin; one entry more per child, as in CSR.
        state_cost, state_used, state_value: of the children's states, one child after the other.
        least: per group of a child (with its extra entry), its least value in each relaxation.
        rest: per row and relaxation, a lower bound of everything but the row: its children and the rest of the plan.
        fitting: per group and memory row, bytes that are never too much: fewer are no advantage.
        limits: of the relaxations.
        most: partial plans made, beyond which it gives up; as it does when it has looked at :data:`WORK` times as many.

    Returns:
        Where each group's states begin (nothing when given up), and per state its cost, bytes, and its row and
        children's states.
    """
    groups, rows, relaxations, n_children = len(group_at) - 1, used.shape[1], len(limits), children.shape[1]
    at = np.zeros(groups + 1, np.int64)
    out_cost, out_used = np.empty((1024, 1)), np.empty((1024, rows), np.int64)
    out_from = np.empty((1024, 1 + n_children), np.int64)
    all_cost, all_used, all_from = out_cost.copy(), out_used.copy(), out_from.copy()
    now_cost, now_used, now_from = out_cost.copy(), out_used.copy(), out_from.copy()
    new_cost, new_used, new_from = out_cost.copy(), out_used.copy(), out_from.copy()
    now_value = np.empty((1024, relaxations))
    room, made, looked, total = np.empty(relaxations), 0, 0, 0
    for g in range(groups):
        count = 0
        for i in range(group_at[g], group_at[g + 1]):
            now = 1
            now_cost[0, 0] = cost[i]
            for r in range(rows):
                now_used[0, r] = used[i, r]
            for k in range(relaxations):
                now_value[0, k] = value[i, k]
                room[k] = limits[k] - rest[i, k]
            now_from[0, 0] = i
            for j in range(n_children):
                child = child_at[j] + children[i, j]
                for k in range(relaxations):
                    room[k] += least[child, k]
                looked += now * (state_at[child + 1] - state_at[child])
                if looked > WORK * most:
                    return at[:0], out_cost[:0, 0], out_used[:0], out_from[:0]
                pairs, new = _extend(now_value, now, state_value, state_at[child], state_at[child + 1], room)
                made += new
                if made > most:
                    return at[:0], out_cost[:0, 0], out_used[:0], out_from[:0]
                new_cost, new_used = _room_for(new_cost, 0, new), _room_for(new_used, 0, new)
                for b in range(new):
                    a, s = pairs[b, 0], pairs[b, 1]
                    new_cost[b, 0] = now_cost[a, 0] + state_cost[s]
                    for r in range(rows):
                        new_used[b, r] = now_used[a, r] + state_used[s, r]
                if j == n_children - 1 or new <= FEW:
                    kept = np.arange(new)
                else:
                    kept = _undominated(new_cost[:, 0], new_used, new)
                new_from = _room_for(new_from, 0, len(kept))
                values = np.empty((len(kept), relaxations))
                for b in range(len(kept)):
                    a, s = pairs[kept[b], 0], pairs[kept[b], 1]
                    for c in range(1 + j):
                        new_from[b, c] = now_from[a, c]
                    new_from[b, 1 + j] = s
                    for k in range(relaxations):
                        values[b, k] = now_value[a, k] + state_value[s, k]
                now, now_value = len(kept), values
                now_cost, now_used = _room_for(now_cost, 0, now), _room_for(now_used, 0, now)
                now_from = _room_for(now_from, 0, now)
                for b in range(now):
                    now_cost[b, 0] = new_cost[kept[b], 0]
                    for r in range(rows):
                        now_used[b, r] = new_used[kept[b], r]
                    for c in range(2 + j):
                        now_from[b, c] = new_from[b, c]
                if now == 0:
                    break
            all_cost, all_used = _room_for(all_cost, count, count + now), _room_for(all_used, count, count + now)
            all_from = _room_for(all_from, count, count + now)
            for a in range(now):
                _copy(all_cost, all_used, all_from, count, now_cost, now_used, now_from, a)
                count += 1
            if len(now_value) == 0:
                now_value = np.empty((1, relaxations))
        held = np.empty((count, rows), np.int64)
        for a in range(count):
            for r in range(rows):
                held[a, r] = max(all_used[a, r], fitting[g, r])
        kept = _undominated(all_cost[:, 0], held, count)
        out_cost = _room_for(out_cost, total, total + len(kept))
        out_used = _room_for(out_used, total, total + len(kept))
        out_from = _room_for(out_from, total, total + len(kept))
        for at_kept in range(len(kept)):
            _copy(out_cost, out_used, out_from, total, all_cost, all_used, all_from, kept[at_kept])
            total += 1
        at[g + 1] = total
    return at, out_cost[:total, 0].copy(), out_used[:total].copy(), out_from[:total].copy()

"""Compiled loops over partial plans (Numba): fronts of limited size.

Loops over numbers, where NumPy would say it in a line: Numba compiles these ten times as fast, once per machine.

A front that is too large is merged: some of its partial plans become one that is as cheap as the cheapest of them and
holds, in every memory row, as little as the smallest. What follows from such a front holds for more than what there is:
its costs are lower bounds, and what it rules out is ruled out.

Source: D. Bergman, A. Cire, W.-J. van Hoeve, J. Hooker, INFORMS Journal on Computing 28 (2016), "Discrete Optimization
with Decision Diagrams" (relaxed diagrams).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from autoshard_ilp.program.window.kernels import INF, fit

NOTHING = -(2**62)  # bytes that are never too much: fewer are always an advantage
FEW = 8  # partial plans are not worth comparing
FIRST_MERGE = 4  # times the size of a front, before what is beaten goes
LATER_MERGE = 16  # times the size of a front, before what was found so far is merged


class States(NamedTuple):
    """Partial plans by group: where each group's begin (the last one's end), seconds, bytes (states, memory rows)."""

    at: np.ndarray
    cost: np.ndarray
    used: np.ndarray


class Rows(NamedTuple):
    """Rows of a bucket by group.

    Attributes:
        at: where each group's rows begin, and where the last one ends.
        cost, used, value: of each row alone: seconds, bytes (rows, memory rows), and in each relaxation.
        children: per row and child, the child's group.
        rest: per row and relaxation, a lower bound of everything but the row: its children and the rest of the plan.
    """

    at: np.ndarray
    cost: np.ndarray
    used: np.ndarray
    value: np.ndarray
    children: np.ndarray
    rest: np.ndarray


class Children(NamedTuple):
    """The fronts of a bucket's children, one after the other.

    Attributes:
        begins: per child, where its groups begin in ``states.at`` and ``least``; each has one entry more than groups.
        states: of all children.
        value: of the states, in each relaxation.
        least: per group, the least value in each relaxation.
    """

    begins: np.ndarray
    states: States
    value: np.ndarray
    least: np.ndarray


class Within(NamedTuple):
    """What a plan wanted stays within.

    Attributes:
        seconds: its cost.
        capacity: its bytes, per memory row.
        limits: its value, per relaxation.
        weights: of cost and bytes, (relaxations, 1 + memory rows).
        scale: seconds that a byte is worth where partial plans are compared, per memory row.
    """

    seconds: float
    capacity: np.ndarray
    limits: np.ndarray
    weights: np.ndarray
    scale: np.ndarray


@njit(cache=True)
def _room_in(cost: np.ndarray, count: int) -> np.ndarray:
    """The array, or a longer one with all of its numbers, so that number ``count`` has a place."""
    if count < len(cost):
        return cost
    out = np.empty(2 * count)
    for i in range(len(cost)):
        out[i] = cost[i]
    return out


@njit(cache=True)
def _room_in_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """The array, or a longer one with all of its rows, so that row ``count`` has a place."""
    if count < len(rows):
        return rows
    out = np.empty((2 * count, rows.shape[1]), np.int64)
    for i in range(len(rows)):
        _copy(rows, i, out, i)
    return out


@njit(cache=True)
def _copy(rows: np.ndarray, i: int, out: np.ndarray, j: int) -> None:
    """Row ``i`` becomes row ``j`` there."""
    for r in range(rows.shape[1]):
        out[j, r] = rows[i, r]


@njit(cache=True)
def _rows_of(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Those rows, in an array of their own."""
    out = np.empty((len(which), rows.shape[1]), np.int64)
    for n in range(len(which)):
        _copy(rows, which[n], out, n)
    return out


@njit(cache=True)
def undominated(cost: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Partial plans that none before them, by cost, equals or beats in all bytes."""
    count = len(cost)
    order = np.argsort(cost)
    begin = 0
    for end in range(1, count + 1):  # of equals in cost, those of least bytes first
        if end == count or cost[order[end]] != cost[order[begin]]:
            if end - begin > 1:
                part, held = np.empty(end - begin, np.int64), np.zeros(end - begin)
                for at in range(end - begin):
                    part[at] = order[begin + at]
                    for r in range(used.shape[1]):
                        held[at] += used[part[at], r]
                by_held = np.argsort(held)
                for at in range(end - begin):
                    order[begin + at] = part[by_held[at]]
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
    return kept[:found]


@njit(cache=True)
def _measure(
    points: np.ndarray, order: np.ndarray, begin: int, end: int, width: np.ndarray, dim: np.ndarray, part: int
) -> float:
    """Notes the width of a part and the dimension it has it in; returns the middle of that dimension."""
    width[part], dim[part], middle = 0.0, 0, 0.0
    for d in range(points.shape[1]):
        low, high = INF, -INF
        for at in range(begin, end):
            low, high = min(low, points[order[at], d]), max(high, points[order[at], d])
        if high - low > width[part]:
            width[part], dim[part], middle = high - low, d, 0.5 * (low + high)
    return middle


@njit(cache=True)
def parts_of(points: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` parts of close points: the widest part is cut in the middle of its widest dimension until then.

    Returns:
        The points in the order of their parts, and where each part begins and the last one ends.
    """
    order = np.arange(len(points))
    begin, end = np.zeros(most, np.int64), np.zeros(most, np.int64)
    width, dim, middle = np.zeros(most), np.zeros(most, np.int64), np.zeros(most)
    end[0], parts = len(points), 1
    middle[0] = _measure(points, order, 0, len(points), width, dim, 0)
    while parts < most:
        p = 0
        for q in range(parts):
            if width[q] > width[p]:
                p = q
        if width[p] <= 0.0:
            break
        i, j = begin[p], end[p] - 1
        while i <= j:
            if points[order[i], dim[p]] <= middle[p]:
                i += 1
            else:
                order[i], order[j] = order[j], order[i]
                j -= 1
        if i == end[p]:  # two numbers with nothing between them
            width[p] = 0.0
            continue
        begin[parts], end[parts] = i, end[p]
        end[p] = i
        middle[p] = _measure(points, order, begin[p], i, width, dim, p)
        middle[parts] = _measure(points, order, i, end[parts], width, dim, parts)
        parts += 1
    starts = np.zeros(len(points) + 1, np.bool_)
    for p in range(parts):
        starts[begin[p]] = True
    begins, found = np.zeros(parts + 1, np.int64), 0
    for at in range(len(points)):
        if starts[at]:
            begins[found] = at
            found += 1
    begins[parts] = len(points)
    return order, begins


@njit(cache=True)
def merged(
    cost: np.ndarray, used: np.ndarray, scale: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At most ``most`` partial plans, each as good in everything as any of a part, and one of the part for each."""
    count, rows = used.shape
    points = np.empty((count, 1 + rows))
    for i in range(count):
        points[i, 0] = cost[i]
        for r in range(rows):
            points[i, 1 + r] = used[i, r] * scale[r]
    order, begins = parts_of(points, most)
    parts = len(begins) - 1
    out_cost, out_used, stands = np.full(parts, INF), np.full((parts, rows), 2**62), np.empty(parts, np.int64)
    for p in range(parts):
        best = INF
        for at in range(begins[p], begins[p + 1]):
            i = order[at]
            total = 0.0
            for d in range(1 + rows):
                total += points[i, d]
            if total < best:
                best, stands[p] = total, i
            out_cost[p] = min(out_cost[p], cost[i])
            for r in range(rows):
                out_used[p, r] = min(out_used[p, r], used[i, r])
    return out_cost, out_used, stands


@njit(cache=True)
def _front(
    cost: np.ndarray, used: np.ndarray, fitting: np.ndarray, scale: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """What no other beats, at most ``most``: cost, bytes, what each stands for, and whether none is merged.

    Args:
        cost, used: partial plans: seconds, bytes (partial plans, memory rows).
        fitting: per memory row, bytes that are never too much: fewer are no advantage.
        scale: seconds per byte, for what is close to what.
        most: partial plans.
    """
    stands, exact = np.arange(len(cost)), True
    if len(cost) > FIRST_MERGE * most:
        cost, used, stands = merged(cost, used, scale, FIRST_MERGE * most)
        exact = False
    counted = np.empty_like(used)
    for i in range(len(cost)):
        for r in range(used.shape[1]):
            counted[i, r] = max(used[i, r], fitting[r])
    kept = undominated(cost, counted)
    some = np.empty(len(kept))
    for n in range(len(kept)):
        some[n] = cost[kept[n]]
    cost, used = some, _rows_of(used, kept)
    if len(kept) > most:
        cost, used, first = merged(cost, used, scale, most)
        for n in range(len(first)):
            first[n] = stands[kept[first[n]]]
        return cost, used, first, False
    for n in range(len(kept)):
        kept[n] = stands[kept[n]]
    return cost, used, kept, exact


@njit(cache=True)
def _completes(cost: float, used: np.ndarray, i: int, rests: States, begin: int, end: int, within: Within) -> bool:
    """Whether one of these rests of the plan, by cost, leaves partial plan ``i`` within its seconds and bytes."""
    for h in range(begin, end):
        if cost + rests.cost[h] > within.seconds:
            return False
        fits = True
        for r in range(used.shape[1]):
            if used[i, r] + rests.used[h, r] > within.capacity[r]:
                fits = False
                break
        if fits:
            return True
    return False


@njit(cache=True)
def _values(cost: np.ndarray, used: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of partial plans, in each relaxation."""
    out = np.empty((len(cost), len(weights)))
    for i in range(len(cost)):
        for k in range(len(weights)):
            out[i, k] = weights[k, 0] * cost[i]
            for r in range(used.shape[1]):
                out[i, k] += weights[k, 1 + r] * used[i, r]
    return out


@njit(cache=True)
def _pairs(
    cost: np.ndarray, used: np.ndarray, value: np.ndarray, children: Children, begin: int, end: int, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Partial plans and the children's states from ``begin`` to ``end`` that together stay within the room."""
    found, pairs = 0, np.empty((64, 2), np.int64)
    for a in range(len(cost)):
        for s in range(begin, end):
            if fit(value, a, children.value, s, room):
                pairs = _room_in_rows(pairs, found)
                pairs[found, 0], pairs[found, 1] = a, s
                found += 1
    both = np.empty((found, used.shape[1]), np.int64)
    seconds = np.empty(found)
    for p in range(found):
        a, s = pairs[p, 0], pairs[p, 1]
        seconds[p] = cost[a] + children.states.cost[s]
        for r in range(used.shape[1]):
            both[p, r] = used[a, r] + children.states.used[s, r]
    return pairs, seconds, both


@njit(cache=True)
def joined(
    rows: Rows, children: Children, rests: States, fitting: np.ndarray, within: Within, most: int, work: int
) -> tuple[bool, bool, np.ndarray, States, np.ndarray]:
    """Per group of rows, a front of the partial plans made of one of them and a state of each of its children.

    A partial plan goes as soon as some relaxation says that no plan with it is within that one's limit, and, with all
    its children, where none of the rests of the plan completes it.

    Args:
        rests: per group, a front of everything else, by cost.
        fitting: per group and memory row, bytes that are never too much.
        most: partial plans of one group.
        work: pairs looked at, at most.

    Returns:
        Whether it came to an end, whether nothing was merged, the rows that are part of something, and the states, by
        cost, with their origin: their row, and their state of each child.
    """
    groups, moments, n_children = len(rows.at) - 1, rows.used.shape[1], rows.children.shape[1]
    at, total = np.zeros(groups + 1, np.int64), 0
    out_cost, out_used = np.empty(64), np.empty((64, moments), np.int64)
    out_from = np.empty((64, 1 + n_children), np.int64)
    all_cost, all_used = np.empty(64), np.empty((64, moments), np.int64)
    all_from = np.empty((64, 1 + n_children), np.int64)
    alive, exact, looked = np.zeros(len(rows.cost), np.bool_), True, 0
    never, free, room = np.full(moments, NOTHING), np.empty(moments, np.int64), np.empty(len(within.limits))
    for g in range(groups):
        count = 0
        for i in range(rows.at[g], rows.at[g + 1]):
            cost, used, value = rows.cost[i : i + 1], rows.used[i : i + 1], rows.value[i : i + 1]
            origin = np.full((1, 1 + n_children), i)
            for k in range(len(room)):
                room[k] = within.limits[k] - rows.rest[i, k]
            for j in range(n_children):
                child = children.begins[j] + rows.children[i, j]
                for k in range(len(room)):
                    room[k] += children.least[child, k]
                begin, end = children.states.at[child], children.states.at[child + 1]
                looked += len(cost) * (end - begin)
                if looked > work:
                    return False, exact, alive, States(at, out_cost[:0], out_used[:0]), out_from[:0]
                pairs, cost, used = _pairs(cost, used, value, children, begin, end, room)
                if len(cost) == 0:
                    break
                if j < n_children - 1 and len(cost) > FEW:
                    cost, used, stands, same = _front(cost, used, never, within.scale, most)
                    exact = exact and same
                else:
                    stands = np.arange(len(cost))
                value = _values(cost, used, within.weights)
                before, origin = origin, np.empty((len(cost), 1 + n_children), np.int64)
                for p in range(len(cost)):
                    _copy(before, pairs[stands[p], 0], origin, p)
                    origin[p, 1 + j] = pairs[stands[p], 1]
            looked += len(cost)
            for a in range(len(cost)):
                if _completes(cost[a], used, a, rests, rests.at[g], rests.at[g + 1], within):
                    all_cost, all_used = _room_in(all_cost, count), _room_in_rows(all_used, count)
                    all_from = _room_in_rows(all_from, count)
                    all_cost[count] = cost[a]
                    _copy(used, a, all_used, count)
                    _copy(origin, a, all_from, count)
                    alive[i] = True
                    count += 1
            if count > LATER_MERGE * most:
                wide = FIRST_MERGE * most
                all_cost, all_used, stands, same = _front(all_cost[:count], all_used[:count], never, within.scale, wide)
                exact, count = exact and same, len(all_cost)
                all_from = _rows_of(all_from, stands)
        if count:
            for r in range(moments):
                free[r] = fitting[g, r]
            cost, used, stands, same = _front(all_cost[:count], all_used[:count], free, within.scale, most)
            exact = exact and same
            by_cost = np.argsort(cost)
            for a in by_cost:
                out_cost, out_used = _room_in(out_cost, total), _room_in_rows(out_used, total)
                out_from = _room_in_rows(out_from, total)
                out_cost[total] = cost[a]
                _copy(used, a, out_used, total)
                _copy(all_from, stands[a], out_from, total)
                total += 1
        at[g + 1] = total
    return True, exact, alive, States(at, out_cost[:total], out_used[:total]), out_from[:total]

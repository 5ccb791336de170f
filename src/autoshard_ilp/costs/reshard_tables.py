"""Resharding prices of all pairs of layouts at once: what :func:`autoshard_ilp.costs.reshard.steps` does to one pair.

A program has hundreds of thousands of pairs. Here each step is taken for every pair of a table together, on arrays with
one row per pair and one column per mesh axis; the sequence of steps, and so every price, is that of ``steps``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.costs.reshard import CollectiveSeconds
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout


class ReshardTables:
    """Resharding costs for one mesh, as tables over (layouts of the producer) x (layouts of the consumer)."""

    def __init__(self, sizes: Sequence[int], costs: CollectiveSeconds) -> None:
        self.sizes = np.array(sizes, np.int64)
        self._prices = _Prices(len(sizes), costs)
        self._tables: dict[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def table(
        self, shape: tuple[int, ...], itemsize: float, starts: tuple[Layout, ...], ends: tuple[Layout, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and bytes of the resharded copy held next to the original; both ``len(starts) x len(ends)``.

        Seconds are infinite from or to partial sums, unless they stay as they are. No copy is made where nothing
        changes. What is gathered whole on the way, since a dimension does not divide, counts in full.
        """
        return self._known(shape, itemsize, starts, ends)[:2]

    def gather_calls(
        self, shape: tuple[int, ...], itemsize: float, starts: tuple[Layout, ...], ends: tuple[Layout, ...]
    ) -> np.ndarray:
        """Of the seconds of :meth:`table`, the fixed ones of all-gathers, which combined ones pay once."""
        return self._known(shape, itemsize, starts, ends)[2]

    def _known(
        self, shape: tuple[int, ...], itemsize: float, starts: tuple[Layout, ...], ends: tuple[Layout, ...]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = (shape, itemsize, starts, ends)
        if key not in self._tables:
            found = self._table(shape, itemsize, np.array(starts, np.int64), np.array(ends, np.int64))
            for x in found:
                x.setflags(write=False)
            self._tables[key] = found
        return self._tables[key]

    def _table(
        self, shape: tuple[int, ...], itemsize: float, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        held = Held(shape, itemsize, self.sizes)
        same = agreeing(starts, ends)
        copies = np.where(same, 0, held(ends)[None, :])
        seconds = np.where(same, 0.0, np.inf)
        calls = np.zeros_like(seconds)
        whole = ~_any(starts == PARTIAL)[:, None] & ~_any(ends == PARTIAL)[None, :]
        i, j = np.nonzero(whole & ~same)
        pairs = _Pairs(starts[i], ends[j], held, self._prices)
        pairs.run(shape)
        seconds[i, j], copies[i, j], calls[i, j] = pairs.seconds, pairs.most, pairs.gather_calls
        return seconds, copies, calls


class Held:
    """Bytes per device of many layouts of one tensor, padding included."""

    def __init__(self, shape: Sequence[int], itemsize: float, sizes: np.ndarray) -> None:
        self.sizes = sizes
        base = len(shape) + 1  # one digit per mesh axis: dimension + 1, and 0 for an axis that shards nothing
        self._weights = base ** np.arange(len(sizes))
        digits = np.arange(base ** len(sizes))[:, None] // self._weights % base
        elements = np.ones(len(digits), np.int64)
        for dim, extent in enumerate(shape):
            elements *= -(-extent // shards_of(digits - 1 == dim, sizes))
        self._bytes = np.ceil(elements * itemsize).astype(np.int64)

    def __call__(self, layouts: np.ndarray) -> np.ndarray:
        """Bytes of each row of ``layouts``, one column per mesh axis."""
        return self._bytes[(np.maximum(layouts, WHOLE) + 1) @ self._weights]


def shards_of(axes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Product of the sizes of the mesh axes marked in each row (bool, one column per mesh axis)."""
    return np.where(axes, sizes, 1).prod(axis=1)


def agreeing(starts: np.ndarray, ends: np.ndarray, anything: int | None = None) -> np.ndarray:
    """Pairs of layouts (one row each) that are equal along every mesh axis, or ``anything`` in the first.

    Axis by axis: NumPy takes long over many short rows.
    """
    found = np.ones((len(starts), len(ends)), bool)
    for a, b in zip(starts.T, ends.T, strict=True):
        same = a[:, None] == b[None, :]
        found &= same if anything is None else same | (a == anything)[:, None]
    return found


def _any(marked: np.ndarray) -> np.ndarray:
    """Whether a row (bool, one column per mesh axis) has any mark."""
    found = np.zeros(len(marked), bool)
    for column in marked.T:
        found |= column
    return found


class _Prices:
    """Collectives by their set of mesh axes, a set being a number with one bit per axis; 0 costs nothing."""

    def __init__(self, n_axes: int, costs: CollectiveSeconds) -> None:
        self.bits = 1 << np.arange(n_axes)
        self._costs = costs
        self._lines: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def seconds(self, kind: str, axes: np.ndarray, payload_bytes: np.ndarray) -> np.ndarray:
        """Seconds of one collective per entry of ``axes`` (sets) and ``payload_bytes``."""
        alpha, beta = self._line(kind)
        return np.where(payload_bytes > 0, alpha[axes] + beta[axes] * payload_bytes, 0.0)

    def call_seconds(self, kind: str, axes: np.ndarray) -> np.ndarray:
        """Fixed seconds of one collective per entry of ``axes`` (sets)."""
        return self._line(kind)[0][axes]

    def _line(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        if kind not in self._lines:
            n = len(self.bits)
            sets = [tuple(a for a in range(n) if bits >> a & 1) for bits in range(1, 1 << n)]
            lines = np.array([(0.0, 0.0), *(self._costs.alpha_beta(kind, axes) for axes in sets)])
            self._lines[kind] = lines[:, 0], lines[:, 1]
        return self._lines[kind]


class _Pairs:
    """Layouts on their way: ``now`` becomes ``end`` step by step, row by row.

    Attributes:
        now, end: int, one row per pair and one column per mesh axis; no partial sums.
        seconds: of the steps taken.
        gather_calls: of these, the fixed seconds of all-gathers.
        most: bytes per device of the largest tensor that a step left.
    """

    def __init__(self, start: np.ndarray, end: np.ndarray, held: Held, prices: _Prices) -> None:
        self.start, self.now, self.end = start, start.copy(), end
        self.held, self.prices = held, prices
        self.seconds = np.zeros(len(end))
        self.gather_calls = np.zeros(len(end))
        self.most = np.zeros(len(end), np.int64)

    def run(self, shape: Sequence[int]) -> None:
        """All steps, in the order that :mod:`autoshard_ilp.costs.reshard` explains."""
        whole_first, last = self._gathered_first(shape)
        dims = [d for d in range(len(shape)) if (self.end == d).any()]
        start, end = self.start, self.end
        for dim in dims:
            self._slice(dim, ~whole_first[:, dim] & ~last[:, dim])
        first = np.take_along_axis(whole_first, start, 1) | np.take_along_axis(whole_first, end, 1)
        moves = (start != end) & (start != WHOLE) & (end != WHOLE) & ~first
        for axis in reversed(range(start.shape[1])):
            self._change("all-to-all", moves & (np.arange(start.shape[1]) == axis), end[:, axis])
        self._gather(whole_first)
        for dim in dims:
            self._slice(dim, np.ones(len(end), bool))

    def _gathered_first(self, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Dimensions gathered whole before they are cut anew, and those that are cut last: one column each, and one for
        WHOLE that is False."""
        found = np.zeros((len(self.end), len(shape) + 1), bool)
        last, before = found.copy(), -1
        dims = [dim for dim, extent in enumerate(shape) if extent % self.held.sizes.prod()]  # others always divide
        every = (self.start != self.end) & (self.start != WHOLE) & (self.end != WHOLE)
        while found.sum() > before:
            before = found.sum()
            kept = np.take_along_axis(found, self.start, 1) | np.take_along_axis(found, self.end, 1)
            for dim in dims:
                here, there = self.start == dim, self.end == dim
                moved = _any(every & (here | there)) | (_any(here) & _any(there))
                cut_last = self._uneven(shape[dim], here, there, every & ~kept)
                cut_first = self._uneven(shape[dim], here | ((self.start == WHOLE) & there), there, every & ~kept)
                found[:, dim] |= cut_last & moved & _any(here != there)
                last[:, dim] = cut_first & ~cut_last
        return found, last

    def _uneven(self, extent: int, now: np.ndarray, there: np.ndarray, changes: np.ndarray) -> np.ndarray:
        """Whether a dimension does not divide at some time, from the axes that split it ``now`` to those of the end."""
        now = now.copy()
        found = np.asarray(extent % shards_of(there, self.held.sizes) != 0) | (
            extent % shards_of(now, self.held.sizes) != 0
        )
        for axis in reversed(range(now.shape[1])):
            now[:, axis] = np.where(changes[:, axis], there[:, axis], now[:, axis])
            found |= extent % shards_of(now, self.held.sizes) != 0
        return found

    def _slice(self, dim: int, allowed: np.ndarray) -> None:
        cut = (self.now == WHOLE) & (self.end == dim) & allowed[:, None]
        self._change("slice", cut, np.full(len(cut), dim))

    def _gather(self, whole_first: np.ndarray) -> None:
        """All-gathers, one per dimension, in the order that takes the least time."""
        n = self.now.shape[1]
        first = np.take_along_axis(whole_first, self.now, 1) | np.take_along_axis(whole_first, self.end, 1)
        gathered = (self.now != WHOLE) & ((self.end == WHOLE) | first)
        groups = np.zeros((len(self.now), n, n), bool)  # pair, number of the group, axis
        count = np.zeros(len(self.now), np.int64)
        for axis in range(n):  # groups are numbered by their first axis
            same = gathered & gathered[:, [axis]] & (self.now == self.now[:, [axis]])
            opens = gathered[:, axis] & ~same[:, :axis].any(axis=1)
            rows = np.flatnonzero(opens)
            groups[rows, count[rows]] = same[rows]
            count += opens
        for number in range(2, n + 1):
            rows = np.flatnonzero(count == number)
            if len(rows):
                groups[rows, :number] = self._ordered(groups[rows, :number], self.held(self.now[rows]))
        for number in range(int(count.max(initial=0))):
            self._change("all-gather", groups[:, number], np.full(len(groups), WHOLE))

    def _ordered(self, groups: np.ndarray, local: np.ndarray) -> np.ndarray:
        """Groups of axes (pair, number, axis) in their best order; ``local`` bytes per device before."""
        orders = list(itertools.permutations(range(groups.shape[1])))
        times = np.zeros((len(orders), len(groups)))
        for k, order in enumerate(orders):
            held = local.astype(np.float64)
            for number in order:
                group = groups[:, number]
                held = held * shards_of(group, self.held.sizes)
                times[k] += self.prices.seconds("all-gather", group @ self.prices.bits, held)
        best = np.array(orders)[times.argmin(axis=0)]
        return np.take_along_axis(groups, best[:, :, None], 1)

    def _change(self, kind: str, moved: np.ndarray, dim: np.ndarray) -> None:
        """One step of the pairs that have a mesh axis in ``moved`` (bool): these axes shard ``dim`` afterwards."""
        rows = np.flatnonzero(_any(moved))
        if not len(rows):
            return
        moved, dim, before = moved[rows], dim[rows], self.now[rows]
        axes = moved @ self.prices.bits
        first = moved.argmax(axis=1)
        source = np.take_along_axis(before, first[:, None], 1)[:, 0]
        after = np.where(moved, dim[:, None], before)
        held_before, held_after = self.held(before), self.held(after)
        if kind != "slice":
            payload = held_before * (shards_of(moved, self.held.sizes) if kind == "all-gather" else 1)
            self.seconds[rows] += self.prices.seconds(kind, axes, payload)
        if kind == "all-gather":
            self.gather_calls[rows] += self.prices.call_seconds(kind, axes)
        later = ~moved & (np.arange(moved.shape[1]) > first[:, None])
        for layout, at in ((before, source), (after, dim)):
            there = (layout == at[:, None]) & (at != WHOLE)[:, None]
            order = np.where(_any(there & later), there @ self.prices.bits, 0)
            if order.any():
                payload = np.minimum(held_before, held_after)
                self.seconds[rows] += self.prices.seconds("collective-permute", order, payload)
        self.now[rows] = after
        self.most[rows] = np.maximum(self.most[rows], held_after)

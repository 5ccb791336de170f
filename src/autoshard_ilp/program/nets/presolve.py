"""Presolve: shrink a net exactly until nothing moves.

Per node, in this order: drop strategies without finite partner, merge parallel factors, move row minima into node
costs (a separable factor vanishes), fold nodes with one strategy, drop dominated strategies, replace nodes that a
neighbour determines, eliminate nodes of low degree by min-sum. Bytes that count in a memory row are carried along
like costs; a node whose cheapest choice is not always that of least bytes stays.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.kernels.tidy import ALIKE, COLUMNS, COMPRESSED, ROWS, SOME, tidy_pair
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net

STEPS = ("parallel", "separable", "labels", "single", "dominance", "determined", "eliminate")

CHEAP_CELLS = 1000


@dataclass
class Presolve:
    """One run over a net, in place.

    Args:
        net: the net to shrink.
        steps: which of ``STEPS`` to use.
        max_cells: largest table that an elimination may create.
        max_degree: most neighbours of an eliminated node.
        deadline: monotonic time after which it stops (what is done stays valid).
        capacity: bytes allowed in every row of the net; None: no limit.
        open_nodes: nodes with neighbours outside the net: they stay, with all strategies that have partners inside.
    """

    net: Net
    steps: frozenset[str] = frozenset(STEPS)
    max_cells: int = 20_000
    max_degree: int = 3
    deadline: float = math.inf
    capacity: int | None = None
    open_nodes: frozenset[int] = frozenset()
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> Net:
        """Shrink until nothing moves; raises EmptyNodeError when no finite assignment exists."""
        net = self.net
        self.whole = {"separable", "labels"} <= self.steps
        self.dirty = dict.fromkeys(net.live)
        self.heap: list[tuple[int, int]] = []
        self.tidied: dict[int, tuple[object, ...]] = {}
        self.kept: dict[int, tuple[object, ...]] = {}  # nodes that cannot be eliminated as they are
        while time.monotonic() < self.deadline:
            if self.dirty:
                v = next(iter(self.dirty))
                del self.dirty[v]
                if not net.gone[v]:
                    self._visit(v)
                continue
            if not self.heap:
                if self._fit():
                    continue
                break
            cells, v = heapq.heappop(self.heap)
            if net.gone[v]:
                continue
            now = self._estimate(v)
            if now is None:
                continue
            if now > cells:
                heapq.heappush(self.heap, (now, v))
                continue
            state = (net.cost[v], net.used[v], *(x for n in net.incident[v] for x in self._state(n)))
            if self._same(self.kept.get(v), state):
                continue
            touched = reduce.eliminate(net, v)
            if touched is None:
                self.kept[v] = state
                self.counts["nodes kept for their bytes"] += 1
                continue
            self._touch(touched)
            self.counts["nodes eliminated"] += 1
        return net

    def _touch(self, nodes: list[int]) -> None:
        for w in nodes:
            if not self.net.gone[w]:
                self.dirty[w] = None

    def _estimate(self, v: int) -> int | None:
        """Cells (an upper estimate) of the table that eliminating ``v`` would create; None when over the limits."""
        net = self.net
        labels: dict[int, int] = {}
        for number in net.incident[v]:
            f = net.factors[number]
            for w, count in zip(f.scope, f.table.shape, strict=True):
                if w != v:
                    labels[w] = labels.get(w, 1) * count
        if len(labels) > self.max_degree:
            return None
        cells = 1
        for w, count in labels.items():
            cells *= min(count, len(net.alive[w]))
        return None if cells > self.max_cells else cells

    def _visit(self, v: int) -> None:
        net, steps = self.net, self.steps
        self._tidy_factors(v)
        self._fix_bytes(v)
        if "parallel" in steps:
            self._merge_parallel(v)
        if v in self.open_nodes:
            return
        if "single" in steps and len(net.alive[v]) == 1:
            self._touch(reduce.fold_single(net, v))
            self.counts["nodes with one strategy"] += 1
            return
        if "eliminate" in steps:
            cells = self._estimate(v)
            if cells is not None and cells <= CHEAP_CELLS:  # what is eliminated at once needs no comparisons
                heapq.heappush(self.heap, (cells, v))
                return
        if "dominance" in steps:
            gone = reduce.dominated(net, v)
            if len(gone):
                self.counts["strategies dominated"] += len(gone)
                cost = net.cost[v].copy()
                cost[gone] = np.inf
                net.set_cost(v, cost)
                self._touch([v, *net.neighbours(v)])
                return
        if "determined" in steps and net.incident[v]:
            number = reduce.determined_by(net, v)
            if number is not None and self._can_substitute(v, number):
                self._touch(reduce.substitute(net, v, number))
                self.counts["nodes determined by a neighbour"] += 1
                return
        if "eliminate" in steps:
            cells = self._estimate(v)
            if cells is not None:
                heapq.heappush(self.heap, (cells, v))

    def _fix_bytes(self, v: int) -> None:
        """Bytes that all strategies alive hold become a constant."""
        own = self.net.used[v]
        if own is not None:
            self.net.used[v] = None
            self.net.add_used(v, own[:, self.net.alive[v]])

    def _fit(self) -> bool:
        """Drop strategies and cells that alone exceed what the rows have left; True when something went."""
        net = self.net
        if self.capacity is None or not len(net.base):
            return False
        room = self.capacity - net.base
        if (room < 0).any():
            raise EmptyNodeError("capacity")
        for v in net.live:
            own = net.used[v]
            if own is not None:
                over = (own > room[:, None]).any(axis=0) & np.isfinite(net.cost[v])
                if over.any():
                    self.counts["strategies that cannot fit"] += int(over.sum())
                    net.set_cost(v, np.where(over, np.inf, net.cost[v]))
                    self._touch([v, *net.neighbours(v)])
        for number, f in list(net.factors.items()):
            if f.used is not None:
                over = (f.used > room.reshape((-1,) + (1,) * f.table.ndim)).any(axis=0) & np.isfinite(f.table)
                if over.any():
                    self.counts["cells that cannot fit"] += int(over.sum())
                    net.replace(number, Factor(f.scope, f.labels, np.where(over, np.inf, f.table), f.used))
                    self._touch(list(f.scope))
        return bool(self.dirty)

    def _can_substitute(self, v: int, number: int) -> bool:
        """The determining node must not share a second factor with ``v``."""
        f = self.net.factors[number]
        w = f.scope[1 - f.axis(v)]
        return sum(1 for n in self.net.incident[v] if w in self.net.factors[n].scope) == 1

    def _tidy_factors(self, v: int) -> None:
        net, steps = self.net, self.steps
        for number in list(net.incident[v]):
            f = net.factors[number]
            if self._unchanged(number):
                continue
            if f.used is None and len(f.scope) == 2 and self.whole:
                self._tidy_pair(number)
                continue
            reduce.compress(net, number)
            if "separable" in steps:
                died = reduce.normalise(net, number)
                if died:
                    self.counts["strategies without partner"] += 1
                    self._touch([*died, *f.scope])
                    reduce.compress(net, number)
                if net.factors[number].used is None and not net.factors[number].table.any():
                    net.remove(number)
                    self.counts["separable factors"] += 1
                    self._touch(list(f.scope))
                    continue
            if "labels" in steps and reduce.merge_equal_labels(net, number):
                self.counts["factors with merged labels"] += 1
            self.tidied[number] = self._state(number)

    def _tidy_pair(self, number: int) -> None:
        """The same for a factor of two nodes without bytes, with all steps, in one compiled call."""
        net = self.net
        f = net.factors[number]
        own, (u, v) = [np.ascontiguousarray(x) for x in (f.table, *f.labels)], f.scope
        found = tidy_pair(own[0], own[1], own[2], net.alive[u], net.alive[v], reduce.ROUNDING)
        flags, table, *labels, of_rows, of_columns = found
        died = False
        for w, fresh, moved, least in zip(f.scope, labels, (ROWS, COLUMNS), (of_rows, of_columns), strict=True):
            if flags & moved:
                before = len(net.alive[w])
                net.add_cost(w, least[fresh[net.alive[w]]])
                died |= len(net.alive[w]) != before
        if flags & (COMPRESSED | ROWS | COLUMNS):
            net.replace(number, Factor(f.scope, tuple(labels), table))
        if died:
            self.counts["strategies without partner"] += 1
            self._touch(list(f.scope))
            reduce.compress(net, number)
        if not flags & SOME:
            net.remove(number)
            self.counts["separable factors"] += 1
            self._touch(list(f.scope))
            return
        if (flags & ALIKE or died) and reduce.merge_equal_labels(net, number):
            self.counts["factors with merged labels"] += 1
        self.tidied[number] = self._state(number)

    def _state(self, number: int) -> tuple[object, ...]:
        """What the result of tidying a factor depends on (arrays and factors are replaced, never changed)."""
        f = self.net.factors[number]
        return (f, *(self.net.alive[w] for w in f.scope))

    def _unchanged(self, number: int) -> bool:
        return self._same(self.tidied.get(number), self._state(number))

    @staticmethod
    def _same(before: tuple[object, ...] | None, now: tuple[object, ...]) -> bool:
        return before is not None and len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))

    def _merge_parallel(self, v: int) -> None:
        groups: dict[frozenset[int], list[int]] = {}
        for number in self.net.incident[v]:
            groups.setdefault(frozenset(self.net.factors[number].scope), []).append(number)
        for numbers in groups.values():
            if len(numbers) > 1:
                reduce.merge_parallel(self.net, numbers)
                self.counts["parallel factors merged"] += len(numbers) - 1

"""Branch and bound over memory decisions, best bound first.

With few large decisions (a repeated layer folded into one) prices leave a gap that no price can close: the best priced
plans either exceed a row or waste room. Branching on the bytes of one such decision closes it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.presolve import Presolve

if TYPE_CHECKING:
    from autoshard_ilp.program.constrained import Constrained, Priced

STEPS = 6
SWEEPS = 4
CELLS = 20_000


class Tree:
    """The tree under one net (true costs) with starting prices; rows are those of ``owner``."""

    def __init__(self, owner: Constrained, net: Net, prices: np.ndarray) -> None:
        self.owner, self.search = owner, owner.search
        self.open: list[tuple[float, int, Net, np.ndarray]] = [(self.search.lower, 0, net, prices)]
        self.count = 0
        self.solved = 0

    def run(self) -> list[int]:
        """Times to add as rows; empty when the tree is finished or time is up."""
        while self.open:
            self.search.prove(min(self.open[0][0], self.search.upper))
            if self.owner.stop():
                return []
            bound, _, net, prices = heapq.heappop(self.open)
            try:
                fresh = self._node(bound, net, prices)
            except EmptyNodeError:
                fresh = []
            self.solved += 1
            self.search.report["tree_nodes"] = self.search.report.get("tree_nodes", 0) + 1
            if fresh:
                return fresh
            if self.owner.stop() and not self.open:
                return []
        raise EmptyNodeError("tree")  # every branch is closed: nothing beats the best plan

    def _node(self, bound: float, net: Net, prices: np.ndarray) -> list[int]:
        from autoshard_ilp.program.constrained import small

        Presolve(net, max_degree=99, max_cells=CELLS, deadline=self.search.deadline).run()
        if not net.live:
            return self.owner.settle(net, whole=False)
        if small(net):
            fresh, closed = self.owner.cpsat_part(net)
            if not closed:
                heapq.heappush(self.open, (bound, self._number(), net, prices))
            return fresh
        priced = self.owner.price(net, prices, STEPS, SWEEPS)
        bound = max(bound, priced.bound)
        if priced.fresh or self.owner.stop():
            heapq.heappush(self.open, (bound, self._number(), priced.net, priced.prices))
            return priced.fresh
        v, left = self._split(priced)
        for side in (left, ~left):
            child = priced.net.copy()
            cost = child.cost[v].copy()
            cost[child.alive[v][~side]] = np.inf
            try:
                child.set_cost(v, cost)
            except EmptyNodeError:
                continue
            heapq.heappush(self.open, (bound, self._number(), child, priced.prices))
        return []

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _split(self, priced: Priced) -> tuple[int, np.ndarray]:
        """A node and a bool mask over its strategies alive (neither empty nor full)."""
        net = priced.net
        weight = self._weights(priced)
        over = [x for x, exceeds in priced.plans if exceeds]
        fits = [x for x, exceeds in priced.plans if not exceeds]
        best, choice = 0.0, None
        for v, per_byte in weight.items():
            held = net.bytes[v]
            if held is None:
                continue
            own = held[net.alive[v]]
            low, high = int(own.min()), int(own.max())
            if low == high:
                continue
            between = (low + high) / 2
            score = 1e-6 * per_byte * (high - low)
            if over and fits:
                a, b = int(held[over[-1][v]]), int(held[fits[-1][v]])
                if a != b and low <= min(a, b) < high:
                    between, score = min(a, b), per_byte * abs(a - b)
            if score > best:
                best, choice = score, (v, own <= between)
        if choice is not None:
            return choice
        v = max(net.live, key=lambda w: (len(net.alive[w]), -w))
        cost = net.cost[v][net.alive[v]]
        half = np.zeros(len(cost), bool)
        half[np.argsort(cost, kind="stable")[: max(1, len(cost) // 2)]] = True
        return v, half

    def _weights(self, priced: Priced) -> dict[int, float]:
        """Seconds per byte of every counted node at the present prices (a little more than zero everywhere)."""
        floor = max(float(priced.prices.max(initial=0.0)), 1e-30) * 1e-3
        weight: dict[int, float] = {}
        for price, row in zip(priced.prices, self.owner.rows, strict=True):
            for v, count in zip(row.nodes.tolist(), row.node_counts.tolist(), strict=True):
                weight[v] = weight.get(v, 0.0) + (float(price) + floor) * count
        return weight

"""Branch and bound over memory decisions, best bound first.

With few large decisions (a repeated layer folded into one) prices leave a gap that no price can close: the best priced
plans either exceed a row or waste room. Branching on the bytes of one such decision closes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.presolve import Presolve

if TYPE_CHECKING:
    from autoshard_ilp.program.constrained import Constrained, Priced

STEPS = 6
SWEEPS = 4
CELLS = 5_000
SHRINK = 0.75  # presolve again when this part of the strategies is left


@dataclass(frozen=True, order=True)
class Branch:
    """An open subproblem; ``size`` is its number of strategies when it was last presolved."""

    bound: float
    number: int
    net: Net = field(compare=False)
    prices: np.ndarray = field(compare=False)
    size: int = field(compare=False)


class Tree:
    """The tree under one net (true costs) with starting prices; rows are those of ``owner``."""

    def __init__(self, owner: Constrained, net: Net, prices: np.ndarray) -> None:
        self.owner, self.search = owner, owner.search
        size = sum(len(net.alive[v]) for v in net.live)
        self.open = [Branch(self.search.lower, 0, net, prices, size)]
        self.count = 0

    def run(self) -> list[int]:
        """Times to add as rows; empty when time is up. EmptyNodeError: finished, nothing beats the best plan."""
        dive: Branch | None = None
        while self.open or dive is not None:
            bounds = [b.bound for b in (self.open[:1] if dive is None else [dive, *self.open[:1]])]
            self.search.prove(min(*bounds, self.search.upper))
            if self.owner.stop():
                return []
            branch = heapq.heappop(self.open) if dive is None else dive
            dive = None
            if branch.bound > self.search.upper * (1 + 1e-10):
                continue
            self.search.report["tree_nodes"] = self.search.report.get("tree_nodes", 0) + 1
            try:
                fresh, dive = self._node(branch)
            except EmptyNodeError:
                continue
            if fresh:
                return fresh
        raise EmptyNodeError("tree")

    def _node(self, branch: Branch) -> tuple[list[int], Branch | None]:
        """Bound one branch and split it. Returns times to add, and the child to look at next."""
        from autoshard_ilp.program.constrained import small

        net, size = branch.net, branch.size
        now = sum(len(net.alive[v]) for v in net.live)
        if now < SHRINK * size:
            Presolve(net, max_degree=99, max_cells=CELLS, deadline=self.search.deadline).run()
            now = sum(len(net.alive[v]) for v in net.live)
            size = now
        if not net.live:
            return self.owner.settle(net, whole=False), None
        if small(net):
            fresh, closed = self.owner.cpsat_part(net)
            if not closed:
                heapq.heappush(self.open, branch)
            return fresh, None
        priced = self.owner.price(net, branch.prices, STEPS, SWEEPS)
        bound = max(branch.bound, priced.bound)
        if priced.fresh or self.owner.stop():
            heapq.heappush(self.open, Branch(bound, self._number(), priced.net, priced.prices, size))
            return priced.fresh, None
        v, left = self._split(priced)
        children = []
        for side in (left, ~left):
            child = priced.net.copy()
            cost = child.cost[v].copy()
            cost[child.alive[v][~side]] = np.inf
            child.set_cost(v, cost)
            children.append(Branch(bound, self._number(), child, priced.prices, size))
        heapq.heappush(self.open, children[1])
        return [], children[0]

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

"""Branch and bound over memory decisions, best bound first.

With few large decisions (a repeated layer folded into one) prices leave a gap that no price can close: the best priced
plans either exceed a row or waste room. Branching on the bytes of one such decision closes it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoshard_ilp.program.dual import Dual
from autoshard_ilp.program.memory import held_by_edge, held_by_node
from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.search import PROOF

if TYPE_CHECKING:
    from autoshard_ilp.program.constrained import Constrained

STEPS = 3
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
        self.least_closed = math.inf  # bound of what was closed within the tolerance

    def run(self) -> list[int]:
        """Times to add as rows; empty when time is up. EmptyNodeError: finished, nothing beats the best plan."""
        dive: Branch | None = None
        while self.open or dive is not None:
            bounds = [b.bound for b in (self.open[:1] if dive is None else [dive, *self.open[:1]])]
            self.search.prove(min(*bounds, self.least_closed, self.search.upper))
            if self.owner.stop():
                return []
            branch = heapq.heappop(self.open) if dive is None else dive
            dive = None
            if self._closed(branch.bound):
                continue
            self.search.report["tree_nodes"] = self.search.report.get("tree_nodes", 0) + 1
            try:
                fresh, dive = self._node(branch)
            except EmptyNodeError:
                continue
            if fresh:
                return fresh
        if self.least_closed < self.search.upper:
            self.search.prove(self.least_closed)
            return []
        raise EmptyNodeError("tree")

    def _node(self, branch: Branch) -> tuple[list[int], Branch | None]:
        """Bound one branch and split it. Returns times to add, and the child to look at next."""
        net, size = branch.net, branch.size
        now = sum(len(net.alive[v]) for v in net.live)
        if now < SHRINK * size:
            self.search.presolve(net, 99, CELLS, self.owner.capacity)
            now = sum(len(net.alive[v]) for v in net.live)
            size = now
        if not net.live:
            return self.owner.settle(net, whole=False), None
        if self.owner.small(net):
            fresh, closed = self.owner.cpsat_part(net)
            if not closed:
                heapq.heappush(self.open, branch)
            return fresh, None
        dual = Dual(self.owner, net, branch.prices, whole=False, steps=STEPS)
        fresh = dual.run()
        net, bound = dual.net, max(branch.bound, dual.bound)
        if fresh or self.owner.stop():
            heapq.heappush(self.open, Branch(bound, self._number(), net, dual.prices, size))
            return fresh, None
        if self._closed(bound):
            return [], None
        if not net.live:
            return self.owner.settle(net, whole=False), None
        v, left = self._split(dual)
        children = []
        for side in (left, ~left):
            child = net.copy()
            cost = child.cost[v].copy()
            cost[child.alive[v][~side]] = np.inf
            child.set_cost(v, cost)
            children.append(Branch(bound, self._number(), child, dual.prices, size))
        heapq.heappush(self.open, children[1])
        return [], children[0]

    def _closed(self, bound: float) -> bool:
        """Nothing below ``bound`` matters: it is within the tolerance of proofs."""
        if bound < self.search.upper * (1 - 0.5 * PROOF):
            return False
        self.least_closed = min(self.least_closed, bound)
        return True

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _split(self, dual: Dual) -> tuple[int, np.ndarray]:
        """A node and a bool mask over its strategies alive (neither empty nor full): the part that holds less."""
        net, pair = dual.net, dual.disagreement()
        if pair is not None:
            over, under = pair
            for v in self._by_bytes(dual, over, under):
                alive, held = net.alive[v], net.used[v]
                own = np.zeros(len(net.cost[v])) if held is None else dual.prices @ held
                low = own[alive] <= min(own[over[v]], own[under[v]])
                if own[over[v]] == own[under[v]] or low.all() or not low.any():
                    low = self._like(net, v, int(under[v]))
                if low.any() and not low.all():
                    return v, low
        v = max(net.live, key=lambda w: (len(net.alive[w]), -w))
        cost = net.cost[v][net.alive[v]]
        half = np.zeros(len(cost), bool)
        half[np.argsort(cost, kind="stable")[: max(1, len(cost) // 2)]] = True
        return v, half

    def _by_bytes(self, dual: Dual, over: np.ndarray, under: np.ndarray) -> list[int]:
        """Open nodes on which two plans differ, those that move most priced bytes first."""
        program, weight = self.owner.program, dict[int, float]()
        floor = max(float(dual.prices.max(initial=0.0)), 1e-30) * 1e-3
        for price, row in zip(dual.prices, self.owner.rows, strict=True):
            each = float(price) + floor
            for v, count in zip(row.nodes.tolist(), row.node_counts.tolist(), strict=True):
                moved = abs(held_by_node(program, v, over) - held_by_node(program, v, under))
                weight[v] = weight.get(v, 0.0) + each * count * moved
            for e, count in zip(row.edges.tolist(), row.edge_counts.tolist(), strict=True):
                moved = abs(held_by_edge(program, e, over) - held_by_edge(program, e, under))
                for v in (program.edges[e].u, program.edges[e].v):
                    weight[v] = weight.get(v, 0.0) + 0.5 * each * count * moved
        found = [v for v in dual.net.live if over[v] != under[v]]
        return sorted(found, key=lambda v: (-weight.get(v, 0.0), v))

    def _like(self, net: Net, v: int, choice: int) -> np.ndarray:
        """Which strategies alive agree with ``choice`` on the labels of most factors."""
        same = np.zeros(len(net.alive[v]))
        for n in net.incident[v]:
            lab = net.factors[n].labels[net.factors[n].axis(v)]
            same += lab[net.alive[v]] == lab[choice]
        return same == same.max()

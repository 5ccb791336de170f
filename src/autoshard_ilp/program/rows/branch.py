"""Branch and bound over memory decisions, best bound first.

With few large decisions (a repeated layer folded into one) prices leave a gap that no price can close: the best priced
plans either exceed a row or waste room. Branching on the bytes of one such decision closes it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net
from autoshard_ilp.program.rows.dual import Dual
from autoshard_ilp.program.rows.under import UnderRows
from autoshard_ilp.program.search import PROOF

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

    def __init__(self, owner: UnderRows, net: Net, prices: np.ndarray) -> None:
        self.owner, self.search = owner, owner.search
        size = net.size()["strategies"]
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
        now = net.size()["strategies"]
        if now < SHRINK * size:
            self.search.presolve(net, 99, CELLS, self.owner.capacity)
            now = net.size()["strategies"]
            size = now
        if not net.live:
            return self.owner.settle(net, whole=False), None
        if self.owner.small(net):
            fresh, closed, bound = self.owner.cpsat_part(net)
            if not closed:
                heapq.heappush(self.open, branch)
            elif not self._closed(bound):
                self.least_closed = min(self.least_closed, max(bound, branch.bound))
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
        children = []
        for child in split(dual):
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


def split(dual: Dual) -> tuple[Net, Net]:
    """Two parts of a net, neither empty, that cover all its assignments.

    The cut goes through the owner of bytes about which the two plans of the dual disagree most: choices that hold no
    more than the one, choices that hold more. Where they disagree about no bytes, through a node's strategies.
    """
    net, pair = dual.net, dual.disagreement()
    if pair is not None:
        found = _heaviest(dual, *pair)
        if found is not None:
            return found
        for v in sorted((v for v in net.live if pair[0][v] != pair[1][v]), key=lambda v: (-len(net.alive[v]), v)):
            like = _like(net, v, int(pair[1][v]))
            if like.any() and not like.all():
                return net.only(v, like), net.only(v, ~like)
    v = max(net.live, key=lambda w: (len(net.alive[w]), -w))
    cost = net.cost[v][net.alive[v]]
    half = np.zeros(len(cost), bool)
    half[np.argsort(cost, kind="stable")[: max(1, len(cost) // 2)]] = True
    return net.only(v, half), net.only(v, ~half)


def _heaviest(dual: Dual, over: np.ndarray, under: np.ndarray) -> tuple[Net, Net] | None:
    """The parts below and above the bytes of the owner that two plans move most, at the dual's prices."""
    net = dual.net
    weight = dual.prices + max(float(dual.prices.max(initial=0.0)), 1e-30) * 1e-3
    best, parts = 0.0, None
    for v in net.live:
        own = net.used[v]
        if own is not None and np.isfinite(net.cost[v][[over[v], under[v]]]).all():
            held = weight @ own
            moved = abs(float(held[over[v]] - held[under[v]]))
            if moved > best:
                best, parts = moved, (v, -1, held[net.alive[v]] <= min(held[over[v]], held[under[v]]))
    for number, f in net.factors.items():
        if f.used is None or any(
            lab[x[w]] < 0 for w, lab in zip(f.scope, f.labels, strict=True) for x in (over, under)
        ):
            continue
        held = np.tensordot(weight, f.used, axes=1)
        ends = [held[tuple(int(lab[x[w]]) for w, lab in zip(f.scope, f.labels, strict=True))] for x in (over, under)]
        if abs(ends[0] - ends[1]) > best:
            best, parts = abs(ends[0] - ends[1]), (-1, number, held <= min(ends))
    if parts is None:
        return None
    v, number, low = parts
    if v >= 0:
        return net.only(v, low), net.only(v, ~low)
    below, above = net.copy(), net.copy()
    f = net.factors[number]
    for part, mask in ((below, low), (above, ~low)):
        part.replace(number, Factor(f.scope, f.labels, np.where(mask, f.table, np.inf), f.used))
    return below, above


def _like(net: Net, v: int, choice: int) -> np.ndarray:
    """Which strategies alive agree with ``choice`` on the labels of most factors."""
    same = np.zeros(len(net.alive[v]))
    for n in net.incident[v]:
        lab = net.factors[n].labels[net.factors[n].axis(v)]
        same += lab[net.alive[v]] == lab[choice]
    return same == same.max()

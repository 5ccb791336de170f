"""A lower bound by message passing, and the strategies it rules out.

Costs are moved between factors and nodes (a reparametrisation: no assignment changes its total) so that the sum of all
minima rises; that sum is the bound. After a sweep every node cost and table entry is >= 0 and says by how much, at
least, an assignment that uses it exceeds the bound; what exceeds the best known plan is removed for good.

Messages live in label space. Sequential order and weights follow TRW-S and its form for factors of any size:
V. Kolmogorov, IEEE PAMI 28 (2006), "Convergent tree-reweighted message passing for energy minimization";
V. Kolmogorov, IEEE PAMI 37 (2015), "A new look at reweighted message passing".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.net import EmptyNodeError, Factor, Net

SAFETY = 1e-10  # relative to the plan's cost: no strategy is removed within float noise of the best plan


@dataclass(eq=False)
class Port:
    """Node side of a factor: how v's strategies alive group into labels of one axis."""

    factor: int
    axis: int
    others: tuple[int, ...]  # the other axes
    shape: tuple[int, ...]  # broadcast shape of a vector along the axis
    lab: np.ndarray  # label per strategy alive
    order: np.ndarray | None  # strategies alive sorted by label; None: one strategy per label, in order
    starts: np.ndarray


class Messages:
    """Reparametrised costs of a net. ``bound`` (seconds) grows with :meth:`sweep` and is valid at every moment."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.nodes = net.live
        self.bound = net.constant
        self.alive = {v: net.alive[v] for v in self.nodes}
        self.theta = {v: net.cost[v][self.alive[v]].copy() for v in self.nodes}
        self.tables = {n: f.table.copy() for n, f in net.factors.items()}
        self.ports = {v: [self._port(v, n) for n in net.incident[v]] for v in self.nodes}
        rank = {v: i for i, v in enumerate(self.nodes)}
        last = {n: max(f.scope, key=rank.__getitem__) for n, f in net.factors.items()}
        first = {n: min(f.scope, key=rank.__getitem__) for n, f in net.factors.items()}
        self.forward = {v: [p for p in self.ports[v] if last[p.factor] != v] for v in self.nodes}
        self.backward = {v: [p for p in self.ports[v] if first[p.factor] != v] for v in self.nodes}
        self.reprice({}, {}, 0.0)  # costs may be below zero here: moved under other prices, or given so

    def _port(self, v: int, number: int) -> Port:
        f = self.net.factors[number]
        k = f.axis(v)
        lab = f.labels[k][self.net.alive[v]]
        shape = tuple(-1 if i == k else 1 for i in range(f.table.ndim))
        others = tuple(i for i in range(f.table.ndim) if i != k)
        if np.array_equal(lab, np.arange(f.table.shape[k])):
            return Port(number, k, others, shape, lab, None, lab)
        order = np.argsort(lab, kind="stable")
        present, starts = np.unique(lab[order], return_index=True)
        if len(present) != f.table.shape[k]:
            raise AssertionError("factors must be compressed before message passing")
        return Port(number, k, others, shape, lab, order, starts)

    def reprice(self, nodes: dict[int, np.ndarray], factors: dict[int, np.ndarray], offset: float) -> None:
        """Add to the costs of nodes (all strategies) and factors, and ``offset`` to the bound; keeps all minima at 0.

        Removing below an upper bound needs every table and node at or above 0, so minima move to the bound at once.
        """
        self.bound += offset
        for v, vector in nodes.items():
            self.theta[v] += vector[self.alive[v]]
        for n, table in factors.items():
            self.tables[n] += table
        for costs in (self.theta, self.tables):
            for key, values in costs.items():
                low = float(values.min())
                if low == math.inf:
                    raise EmptyNodeError(key)
                if low:
                    values -= low
                    self.bound += low

    def remove_cells(self, upper: float) -> int:
        """Entries of pairwise tables that cannot be in a plan cheaper than ``upper`` become ``inf``; their number."""
        limit = upper - self.bound + SAFETY * abs(upper)
        removed = 0
        for n, table in self.tables.items():
            f = self.net.factors[n]
            total = table
            for v in f.scope:
                p = next(p for p in self.ports[v] if p.factor == n)
                theta = self.theta[v]
                least = theta if p.order is None else np.minimum.reduceat(theta[p.order], p.starts)
                total = total + least.reshape(p.shape)
            over = (total > limit) & np.isfinite(table)
            removed += int(over.sum())
            table[over] = np.inf
        return removed

    def improve(self, choices: np.ndarray, rounds: int = 20) -> np.ndarray:
        """Coordinate descent on the present costs: each node its best strategy while the others stay."""
        choices = choices.copy()
        for _ in range(rounds):
            changed = False
            for v in self.nodes:
                total = self.theta[v].copy()
                for p in self.ports[v]:
                    f = self.net.factors[p.factor]
                    index = tuple(
                        slice(None) if w == v else int(lab[choices[w]])
                        for w, lab in zip(f.scope, f.labels, strict=True)
                    )
                    total += self.tables[p.factor][index][p.lab]
                best = int(np.argmin(total))
                if total[best] < total[np.searchsorted(self.alive[v], choices[v])]:
                    choices[v] = self.alive[v][best]
                    changed = True
            if not changed:
                break
        return choices

    def sweep(self, upper: float = math.inf) -> int:
        """One pass forward and one back; strategies that cannot be in a plan cheaper than ``upper`` become ``inf``.

        Returns the number of strategies ruled out. Raises EmptyNodeError when no plan is cheaper than ``upper``.
        """
        removed = self._pass(self.nodes, self.forward, upper)
        return removed + self._pass(self.nodes[::-1], self.backward, upper)

    def _pass(self, nodes: list[int], out: dict[int, list[Port]], upper: float) -> int:
        removed = 0
        margin = SAFETY * abs(upper) if math.isfinite(upper) else 0.0
        tables = self.tables
        for v in nodes:
            theta = self.theta[v]
            ports = self.ports[v]
            for p in ports:
                least = tables[p.factor].min(axis=p.others)
                theta += least[p.lab]
                if not math.isfinite(least.max()):
                    least[np.isinf(least)] = 0.0
                tables[p.factor] -= least.reshape(p.shape)
            low = float(theta.min())
            if low == math.inf:
                raise EmptyNodeError(v)
            theta -= low
            self.bound += low
            limit = upper - self.bound + margin
            if limit < 0:
                raise EmptyNodeError(v)
            over = theta > limit
            if over.any():
                removed += int(np.isfinite(theta[over]).sum())
                theta[over] = np.inf
            give = out[v]
            if not give:
                continue
            weight = 1.0 / max(len(give), len(ports) - len(give))
            shares = []
            for p in give:
                share = theta if p.order is None else np.minimum.reduceat(theta[p.order], p.starts)
                share = share * weight
                tables[p.factor] += share.reshape(p.shape)
                shares.append(share)
            for p, share in zip(give, shares, strict=True):
                if share.max() == math.inf:
                    share = np.where(np.isinf(share), 0.0, share)
                theta -= share[p.lab]
            np.maximum(theta, 0.0, out=theta)
        return removed

    def totals(self, v: int) -> np.ndarray:
        """A lower bound (seconds above ``bound``) per strategy alive of ``v``: its cost and the best of each factor."""
        total = self.theta[v].copy()
        for p in self.ports[v]:
            total += self.tables[p.factor].min(axis=p.others)[p.lab]
        return total

    def decode(self) -> np.ndarray:
        """An assignment: each node in turn takes its best strategy given those before it."""
        choices = np.full(len(self.net.cost), -1, np.int64)
        for v in self.nodes:
            total = self.theta[v].copy()
            for p in self.ports[v]:
                f = self.net.factors[p.factor]
                index: list = [slice(None)] * len(f.scope)
                for i, w in enumerate(f.scope):
                    if w != v and choices[w] >= 0:
                        index[i] = int(f.labels[i][choices[w]])
                part = self.tables[p.factor][tuple(index)]
                if part.ndim > 1:
                    kept = sum(1 for i in range(p.axis) if isinstance(index[i], slice))
                    part = part.min(axis=tuple(i for i in range(part.ndim) if i != kept))
                total += part[p.lab]
            choices[v] = self.alive[v][int(np.argmin(total))]
        return np.where(choices < 0, 0, choices)

    def ruled_out(self) -> dict[int, np.ndarray]:
        """Strategies removed since the start, per node."""
        return {v: self.alive[v][np.isinf(self.theta[v])] for v in self.nodes}

    def apply(self) -> Net:
        """The net with its costs replaced by the reparametrised ones (same assignments below the upper bound)."""
        net = self.net.copy()
        net.constant = self.bound
        for n, table in self.tables.items():
            f = net.factors[n]
            net.replace(n, Factor(f.scope, f.labels, table.copy(), f.edge, f.held))
        for v in self.nodes:
            cost = np.full(len(net.cost[v]), np.inf)
            cost[self.alive[v]] = self.theta[v]
            net.set_cost(v, cost)
        return net

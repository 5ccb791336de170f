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
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.kernels import messages as kernels
from autoshard_ilp.program.kernels.messages import Flat
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net, segment_min

SAFETY = 1e-10  # relative to the plan's cost: no strategy is removed within float noise of the best plan


def _starts(sizes: Iterable[int]) -> np.ndarray:
    """Where consecutive pieces of these sizes begin, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(np.fromiter(sizes, np.int64)))).astype(np.int64)


@dataclass(frozen=True, eq=False)
class State:
    """Costs of :class:`Messages` at one moment."""

    bound: float
    theta: np.ndarray
    tables: np.ndarray


class Messages:
    """Reparametrised costs of a net. ``bound`` (seconds) grows with :meth:`sweep` and is valid at every moment.

    ``theta[v]`` (one entry per strategy alive) and ``tables[n]`` are views of flat arrays that the kernels work on.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.nodes = net.live
        self.bound = net.constant
        self.alive = {v: net.alive[v] for v in self.nodes}
        self._lay_out()
        self.reprice({}, {}, 0.0)  # costs may be below zero here: moved under other prices, or given so

    def _lay_out(self) -> None:
        net, nodes = self.net, self.nodes
        rank = {v: i for i, v in enumerate(nodes)}
        position = {n: i for i, n in enumerate(net.factors)}
        factors = list(net.factors.values())
        theta_at = _starts(len(net.alive[v]) for v in nodes)
        table_at = _starts(f.table.size for f in factors)
        self._theta = np.concatenate([net.cost[v][net.alive[v]] for v in nodes] or [np.zeros(0)])
        self._tables = np.concatenate([f.table.ravel() for f in factors] or [np.zeros(0)])
        self.theta = {v: self._theta[theta_at[i] : theta_at[i + 1]] for i, v in enumerate(nodes)}
        self.tables = {
            n: self._tables[table_at[i] : table_at[i + 1]].reshape(f.table.shape)
            for i, (n, f) in enumerate(net.factors.items())
        }
        owners: list[int] = []  # of the ports, like the next three
        shapes, labels, ends = [], [], []
        port_of: list[list[int]] = [[0] * len(f.scope) for f in factors]
        for v in nodes:
            for n in net.incident[v]:
                f = net.factors[n]
                k = f.axis(v)
                port_of[position[n]][k] = len(owners)
                owners.append(position[n])
                shapes.append((math.prod(f.table.shape[:k]), f.table.shape[k], math.prod(f.table.shape[k + 1 :])))
                labels.append(f.labels[k][net.alive[v]])
                ranks = [rank[w] for w in f.scope]
                ends.append((rank[v] == max(ranks), rank[v] == min(ranks)))
        shape = np.array(shapes, np.int64).reshape(-1, 3)
        end = np.array(ends, bool).reshape(-1, 2)
        self.flat = Flat(
            theta_at=theta_at,
            port_at=_starts(len(net.incident[v]) for v in nodes),
            factor=np.array(owners, np.int64),
            before=shape[:, 0].copy(),
            labels=shape[:, 1].copy(),
            after=shape[:, 2].copy(),
            label_at=_starts(len(lab) for lab in labels),
            label=np.concatenate(labels or [np.zeros(0, np.int64)]).astype(np.int64),
            message_at=_starts(shape[:, 1]),
            table_at=table_at,
            last=end[:, 0].copy(),
            first=end[:, 1].copy(),
            scope_at=_starts(len(f.scope) for f in factors),
            scope=np.array([rank[w] for f in factors for w in f.scope], np.int64),
            port_of=np.array([p for own in port_of for p in own], np.int64),
        )
        if len(self.flat.label) and self.flat.label.min() < 0:
            raise AssertionError("every strategy alive has a label")

    def reprice(
        self, nodes: dict[int, np.ndarray], factors: dict[int, np.ndarray], offset: float, tidy: bool = True
    ) -> None:
        """Add to the costs of nodes (all strategies) and factors, and ``offset`` to the bound.

        Removing below an upper bound needs every table and node at or above 0, so minima move to the bound at once;
        not so with ``tidy=False``, after which only :meth:`apply` makes sense.
        """
        self.bound += offset
        for v, vector in nodes.items():
            self.theta[v] += vector[self.alive[v]]
        for n, table in factors.items():
            self.tables[n] += table
        if not tidy:
            return
        for costs in (self.theta, self.tables):
            for key, values in costs.items():
                low = float(values.min())
                if low == math.inf:
                    raise EmptyNodeError(key)
                if low:
                    values -= low
                    self.bound += low

    def state(self) -> State:
        """A copy of the costs as they are."""
        return State(self.bound, self._theta.copy(), self._tables.copy())

    def restore(self, state: State) -> None:
        """Go back to a state of the same messages."""
        self.bound = state.bound
        self._theta[:] = state.theta
        self._tables[:] = state.tables

    def remove_cells(self, upper: float) -> int:
        """Entries of tables that cannot be in a plan cheaper than ``upper`` become ``inf``; their number."""
        limit = upper - self.bound + SAFETY * abs(upper)
        removed = 0
        for n, table in self.tables.items():
            f = self.net.factors[n]
            total = table
            for k, v in enumerate(f.scope):
                least = segment_min(self.theta[v], f.labels[k][self.alive[v]], table.shape[k])
                total = total + least.reshape(tuple(-1 if i == k else 1 for i in range(table.ndim)))
            over = (total > limit) & np.isfinite(table)
            removed += int(over.sum())
            table[over] = np.inf
        return removed

    def improve(self, choices: np.ndarray, rounds: int = 20) -> np.ndarray:
        """Coordinate descent on the present costs: each node its best strategy while the others stay."""
        own = np.array([np.searchsorted(self.alive[v], choices[v]) for v in self.nodes], np.int64)
        return self._descend(own, rounds)

    def decode(self) -> np.ndarray:
        """An assignment: each node in turn takes its best strategy given those before it."""
        return self._descend(np.full(len(self.nodes), -1, np.int64), 1)

    def _descend(self, own: np.ndarray, rounds: int) -> np.ndarray:
        kernels.descend(self.flat, self._theta, self._tables, own, rounds)
        choices = np.zeros(len(self.net.cost), np.int64)
        for v, s in zip(self.nodes, own.tolist(), strict=True):
            choices[v] = self.alive[v][s]
        return choices

    def cost(self, choices: np.ndarray) -> float:
        """Seconds of an assignment of the net (that of the completed plan, within float noise)."""
        parts = [float(self.theta[v][np.searchsorted(self.alive[v], choices[v])]) for v in self.nodes]
        for n, table in self.tables.items():
            f = self.net.factors[n]
            parts.append(float(table[tuple(lab[choices[v]] for v, lab in zip(f.scope, f.labels, strict=True))]))
        return self.bound + math.fsum(parts)

    def sweep(self, upper: float = math.inf, count: int = 1) -> int:
        """``count`` passes forward and back; strategies that cannot be in a plan cheaper than ``upper`` become ``inf``.

        Returns the number of strategies ruled out. Raises EmptyNodeError when no plan is cheaper than ``upper``.
        """
        margin = SAFETY * abs(upper) if math.isfinite(upper) else 0.0
        self.bound, removed, empty = kernels.sweep(
            self.flat, self._theta, self._tables, count, self.bound, upper, margin
        )
        if empty >= 0:
            raise EmptyNodeError(self.nodes[empty])
        return removed

    def strategies(self) -> int:
        """How many are left."""
        return int(np.isfinite(self._theta).sum())

    def totals(self) -> dict[int, np.ndarray]:
        """A lower bound (seconds above ``bound``) per strategy alive: its cost and the best cell of each factor."""
        every = kernels.totals(self.flat, self._theta, self._tables)
        at = self.flat.theta_at
        return {v: every[at[i] : at[i + 1]] for i, v in enumerate(self.nodes)}

    def ruled_out(self) -> dict[int, np.ndarray]:
        """Strategies removed since the start, per node."""
        return {v: self.alive[v][np.isinf(self.theta[v])] for v in self.nodes}

    def apply(self) -> Net:
        """The net with its costs replaced by the reparametrised ones (same assignments below the upper bound)."""
        net = self.net.copy()
        net.constant = self.bound
        for n, table in self.tables.items():
            f = net.factors[n]
            net.replace(n, Factor(f.scope, f.labels, table.copy(), f.used))
        for v in self.nodes:
            cost = np.full(len(net.cost[v]), np.inf)
            cost[self.alive[v]] = self.theta[v]
            net.set_cost(v, cost)
        return net

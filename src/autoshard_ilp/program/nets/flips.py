"""What a step would cost if one decision of a plan were another one, with bytes at their prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard_ilp.program.model import Edge, Program

CHANGES = 200
"""Nodes looked at, for every node of a plan that is forbidden."""


class Flips:
    """Single changes of the plans of one program.

    Args:
        program: nodes, edges and lifetimes.
        prices: time -> seconds per byte in use then.
    """

    def __init__(self, program: Program, prices: Mapping[int, float]) -> None:
        by_time = np.zeros(max(int(program.lifetimes.end.max(initial=0)), max(prices, default=-1) + 1))
        by_time[list(prices)] = list(prices.values())
        of_nodes, of_edges = program.lifetimes.weights_of_owners(by_time, len(program.nodes), len(program.edges))
        self.costs = [_priced(n.costs, n.bytes, p) for n, p in zip(program.nodes, of_nodes, strict=True)]
        self.tables = [_priced(e.table, e.bytes, p) for e, p in zip(program.edges, of_edges, strict=True)]
        self.edges = program.edges
        self.edges_of: list[list[int]] = [[] for _ in program.nodes]
        for number, edge in enumerate(program.edges):
            self.edges_of[edge.u].append(number)
            self.edges_of[edge.v].append(number)

    def total(self, plan: Sequence[int] | np.ndarray) -> float:
        """Seconds of the whole plan, all its bytes priced."""
        nodes = sum(float(costs[s]) for costs, s in zip(self.costs, plan, strict=True))
        labels = ((e.u_labels[plan[e.u]], e.v_labels[plan[e.v]]) for e in self.edges)
        return nodes + sum(float(table[at]) for table, at in zip(self.tables, labels, strict=True))

    def seconds(self, plan: Sequence[int] | np.ndarray, node: int) -> np.ndarray:
        """Per strategy of a node: what it and its edges cost, the other nodes as in ``plan``."""
        total = self.costs[node].copy()
        for number in self.edges_of[node]:
            total += self._along(self.edges[number], self.tables[number], plan, node)
        return total

    @staticmethod
    def _along(edge: Edge, table: np.ndarray, plan: Sequence[int] | np.ndarray, node: int) -> np.ndarray:
        if edge.u == node:
            return table[edge.u_labels, edge.v_labels[plan[edge.v]]]
        return table[edge.u_labels[plan[edge.u]], edge.v_labels]

    def cheap(self, plan: np.ndarray, node: int, most: float, count: int) -> np.ndarray:
        """At most ``count`` strategies of a node that make the step at most ``most`` seconds dearer."""
        total = self.seconds(plan, node)
        order = np.argsort(total, kind="stable")[:count]
        return order[total[order] <= total[plan[node]] + most]

    def mended(self, plan: np.ndarray) -> tuple[np.ndarray, frozenset[int]]:
        """The plan without what is forbidden at a node, and what else is cheaper then; and the nodes forbidden at."""
        mended = np.array(plan, np.int64)
        wrong = [v for v, s in enumerate(plan) if np.isinf(self.costs[v][s])]
        waiting, left = list(wrong), CHANGES * len(wrong)
        while waiting and left:
            node, left = waiting.pop(0), left - 1
            total = self.seconds(mended, node)
            best = int(np.argmin(total))
            if total[best] < total[mended[node]]:
                mended[node] = best
                waiting += [v for v in self.beside(node) if v not in waiting]
        return mended, frozenset(wrong)

    def beside(self, node: int) -> list[int]:
        """The nodes that share an edge with this one."""
        return [e.v if e.u == node else e.u for e in (self.edges[n] for n in self.edges_of[node])]

    def around(self, nodes: Iterable[int], steps: int) -> set[int]:
        """Nodes within so many edges of some."""
        found, last = set(nodes), set(nodes)
        for _ in range(steps):
            last = {other for node in last for other in self.beside(node)} - found
            found |= last
        return found


def _priced(seconds: np.ndarray, held: np.ndarray | None, price: float) -> np.ndarray:
    return seconds if held is None or price == 0 else seconds + price * held

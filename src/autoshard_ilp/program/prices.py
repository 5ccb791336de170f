"""Prices per byte on memory rows (Lagrange multipliers).

For prices l >= 0 the priced program

    minimise  cost(x) + sum_r l_r (usage_r(x) - capacity)

has no memory rows, and its optimum bounds the true one from below. ``dual`` looks for the best prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.memory import Row
from autoshard_ilp.program.net import Net


@dataclass(eq=False)
class RowTerms:
    """One row over a net: ``constant + sum count * bytes`` of nodes and factors still open, in bytes."""

    constant: int
    nodes: list[tuple[int, int, np.ndarray]]  # node, count, bytes per strategy
    factors: list[tuple[int, int, np.ndarray]]  # factor, count, bytes per cell


def row_terms(net: Net, row: Row) -> RowTerms:
    """The row's usage in terms of what is left in ``net``."""
    constant, nodes, factors = 0, [], []
    by_edge = {f.edge: n for n, f in net.factors.items() if f.edge is not None}
    for v, count in zip(row.nodes.tolist(), row.node_counts.tolist(), strict=True):
        held = net.bytes[v]
        if held is None:
            constant += count * net.fixed_nodes[v]
        else:
            nodes.append((v, count, held))
    for e, count in zip(row.edges.tolist(), row.edge_counts.tolist(), strict=True):
        if e not in by_edge:
            constant += count * net.fixed_edges[e]
        else:
            held_cells = net.factors[by_edge[e]].held
            assert held_cells is not None
            factors.append((by_edge[e], count, held_cells))
    return RowTerms(constant, nodes, factors)


@dataclass(eq=False)
class PricedRows:
    """Rows of one net and their prices in seconds per byte."""

    net: Net
    rows: Sequence[Row]
    capacity: int
    terms: list[RowTerms] = field(init=False)

    def __post_init__(self) -> None:
        self.terms = [row_terms(self.net, r) for r in self.rows]

    def usage(self, choices: np.ndarray) -> np.ndarray:
        """Bytes in use per row (int64)."""
        out = []
        for t in self.terms:
            used = t.constant + sum(count * int(held[choices[v]]) for v, count, held in t.nodes)
            for n, count, held in t.factors:
                f = self.net.factors[n]
                used += count * int(held[tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))])
            out.append(used)
        return np.array(out, np.int64)

    def charge(self, prices: np.ndarray) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], float]:
        """What ``prices`` add to node costs, to tables, and to the constant."""
        nodes: dict[int, np.ndarray] = {}
        factors: dict[int, np.ndarray] = {}
        offset = 0.0
        for price, t in zip(prices, self.terms, strict=True):
            if price == 0.0:
                continue
            offset += float(price) * (t.constant - self.capacity)
            for out, owned in ((nodes, t.nodes), (factors, t.factors)):
                for key, count, held in owned:
                    extra = float(price) * count * held
                    out[key] = out[key] + extra if key in out else extra
        return nodes, factors, offset

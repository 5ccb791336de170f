"""Prices per byte on memory rows (Lagrange multipliers): bounds and plans when memory binds.

For prices l >= 0 the priced program

    minimise  cost(x) + sum_r l_r (usage_r(x) - capacity)

has no memory rows, and its optimum bounds the true one from below. Message passing bounds the priced program. The
prices follow cutting planes: every assignment x seen gives cost(x) + sum_r l_r (usage_r(x) - capacity) as an upper
model of the bound, and the next prices lie between the best so far and the maximiser of that model.
Source of the damping: W. Ben-Ameur and J. Neto, Networks 49 (2007), "Acceleration of cutting-plane and column
generation algorithms".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.bounds import Messages
from autoshard_ilp.program.memory import Row
from autoshard_ilp.program.net import Net

DAMPING = 0.6  # weight of the model's maximiser against the best prices
MOST_CUTS = 120


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


@dataclass(eq=False)
class PriceSearch:
    """Cutting planes over the prices; costs in seconds, excess in bytes."""

    size: int
    capacity: int
    best: np.ndarray = field(init=False)
    best_bound: float = -np.inf
    cuts: list[tuple[float, np.ndarray]] = field(default_factory=list)
    box: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.best = np.zeros(self.size)

    def cut(self, cost: float, excess: np.ndarray) -> None:
        """Learn from an assignment: its cost and usage - capacity per row."""
        if np.isfinite(cost):
            self.cuts.append((cost, np.asarray(excess, np.float64) / max(1, self.capacity)))
            del self.cuts[:-MOST_CUTS]

    def update(self, prices: np.ndarray, bound: float) -> None:
        """Keep the best prices."""
        if bound > self.best_bound:
            self.best, self.best_bound = prices.copy(), bound

    def next(self) -> np.ndarray:
        """Prices to try next (seconds per byte)."""
        from scipy.optimize import linprog

        scale = max(1, self.capacity)
        known = self.best * scale
        if self.box is None:
            spread = max((c for c, _ in self.cuts), default=1.0) or 1.0
            # Around known prices stay near them; without any, let the model speak.
            self.box = 3.0 * known + (0.2 * known.max() if known.any() else 0.5 * spread)
        rows = np.array([np.concatenate(([1.0], -g)) for _, g in self.cuts])
        limits = np.array([c for c, _ in self.cuts])
        unit = max(float(np.abs(limits).max()), 1e-30)
        result = linprog(
            np.concatenate(([-1.0], np.zeros(self.size))),
            A_ub=rows,
            b_ub=limits / unit,
            bounds=[(None, None), *((0.0, float(b) / unit) for b in self.box)],
            method="highs",
        )
        if result.x is None:
            return self.best * 1.1
        target = np.maximum(result.x[1:], 0.0) * unit
        self.box = np.maximum(self.box, np.where(target >= 0.999 * self.box, 3.0 * self.box, self.box))
        return (DAMPING * target + (1 - DAMPING) * self.best * scale) / scale


def repair(messages: Messages, priced: PricedRows, choices: np.ndarray, rounds: int = 8) -> np.ndarray | None:
    """Move nodes to fewer bytes where it costs least per byte until every row fits; None when stuck.

    Works on the present (priced) costs. A move must lower the total excess; among the moves of a round the cheapest
    per byte saved go first.
    """
    choices = choices.copy()
    owners = _owners(priced)
    for _ in range(rounds):
        used = priced.usage(choices)
        excess = np.maximum(used - priced.capacity, 0)
        if not excess.any():
            return choices
        moves = []
        for v in owners:
            move = _best_move(messages, priced, owners[v], choices, v, used)
            if move is not None:
                moves.append((move[0], v, move[1]))
        if not moves:
            return None
        for _, v, _ in sorted(moves):
            move = _best_move(messages, priced, owners[v], choices, v, used)
            if move is None:
                continue
            before = choices[v]
            choices[v] = move[1]
            for r, count, held in owners[v]:
                used[r] += count * (int(held[choices[v]]) - int(held[before]))
            if not (used > priced.capacity).any():
                break
    return choices if not (priced.usage(choices) > priced.capacity).any() else None


def polish(
    messages: Messages, priced: PricedRows, prices: np.ndarray, choices: np.ndarray, rounds: int = 6
) -> np.ndarray:
    """Coordinate descent on true costs from a plan that satisfies all rows, keeping them satisfied."""
    choices = choices.copy()
    owners = _owners(priced)
    charge = priced.charge(prices)[0]
    used = priced.usage(choices)
    by_factor = {n for t in priced.terms for n, _, _ in t.factors}
    for _ in range(rounds):
        changed = False
        for v in messages.nodes:
            if any(p.factor in by_factor for p in messages.ports[v]):
                continue  # its tables hold bytes too
            alive = messages.alive[v]
            total = local_costs(messages, choices, v)
            if v in charge:
                total = total - charge[v][alive]
            for r, count, held in owners.get(v, ()):
                total[used[r] + count * (held[alive] - held[choices[v]]) > priced.capacity] = np.inf
            best = int(np.argmin(total))
            here = total[np.searchsorted(alive, choices[v])]
            lower = math.isfinite(total[best]) and total[best] < here
            if lower and (math.isinf(here) or here - total[best] > 1e-12 * abs(here)):
                before, choices[v] = choices[v], alive[best]
                for r, count, held in owners.get(v, ()):
                    used[r] += count * (int(held[choices[v]]) - int(held[before]))
                changed = True
        if not changed:
            break
    return choices


def _owners(priced: PricedRows) -> dict[int, list[tuple[int, int, np.ndarray]]]:
    owners: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for r, t in enumerate(priced.terms):
        for v, count, held in t.nodes:
            owners.setdefault(v, []).append((r, count, held))
    return owners


def local_costs(messages: Messages, choices: np.ndarray, v: int) -> np.ndarray:
    """Present cost of each strategy alive of ``v`` while the others stay."""
    total = messages.theta[v].copy()
    for p in messages.ports[v]:
        f = messages.net.factors[p.factor]
        index = tuple(slice(None) if w == v else int(lab[choices[w]]) for w, lab in zip(f.scope, f.labels, strict=True))
        total += messages.tables[p.factor][index][p.lab]
    return total


def _best_move(
    messages: Messages,
    priced: PricedRows,
    owned: list[tuple[int, int, np.ndarray]],
    choices: np.ndarray,
    v: int,
    used: np.ndarray,
) -> tuple[float, int] | None:
    """(seconds per byte saved, strategy) of the cheapest move of ``v`` that lowers the total excess."""
    alive = messages.alive[v]
    saved = np.zeros(len(alive))
    for r, count, held in owned:
        after = np.maximum(used[r] + count * (held[alive] - held[choices[v]]) - priced.capacity, 0)
        saved += max(int(used[r]) - priced.capacity, 0) - after
    if saved.max() <= 0:
        return None
    total = local_costs(messages, choices, v)
    here = total[np.searchsorted(alive, choices[v])]
    if not np.isfinite(here):
        here = 0.0
    ratio = np.full(len(alive), np.inf)
    good = saved > 0
    ratio[good] = (total[good] - here) / saved[good]
    best = int(np.argmin(ratio))
    return (float(ratio[best]), int(alive[best])) if np.isfinite(ratio[best]) else None

"""Message passing over relations: higher bounds, and fewer rows.

A relation with many labels and few rows takes part as a node whose strategies are its rows, tied to each of its nodes
by equality of labels; any other as a table. Bound and costs move as in :mod:`autoshard_ilp.program.nets.bounds`, one
relaxation after the other.
"""

from __future__ import annotations

import math
import time

import numpy as np

from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net
from autoshard_ilp.program.window.relations import Relation, Relations

SWEEPS = 10
MOST_SWEEPS = 10  # times SWEEPS
STALL = 1e-3  # of the room: worth more sweeps
TABLE_CELLS = 5_000
SPARSE = 3  # times as many cells as rows: still a table


def tighten(
    relations: Relations, bounds: np.ndarray, limits: np.ndarray, deadline: float
) -> tuple[np.ndarray, dict[int, int] | None]:
    """Raises the bounds of the relaxations and prunes.

    Args:
        relations: changed in place.
        bounds, limits: of each relaxation.
        deadline: monotonic seconds, after which nothing changes any more.

    Returns:
        The new bounds, and what the messages of the first relaxation choose: per live node a strategy, where that is
        possible.

    Raises:
        EmptyNodeError: no plan is wanted.
    """
    graph = _Graph(relations)
    bounds, chosen = bounds.copy(), None
    for k in range(len(bounds)):
        if time.monotonic() > deadline:
            break
        messages = Messages(graph.net(relations, k, float(bounds[k])))
        for _ in range(MOST_SWEEPS):
            before = messages.bound
            messages.sweep(float(limits[k]), SWEEPS)
            if messages.bound - before <= STALL * (limits[k] - messages.bound) or time.monotonic() > deadline:
                break
        graph.read(relations, k, messages)
        bounds[k] = messages.bound
        if k == 0:
            chosen = graph.chosen(messages)
    relations.room = limits - bounds
    if (relations.room < 0).any():
        raise EmptyNodeError(-1)
    relations.prune()
    return bounds, chosen


class _Graph:
    """Numbers for nodes and relations in one order: a relation comes right after the first of its nodes."""

    def __init__(self, relations: Relations) -> None:
        live = relations.live
        place = {v: i for i, v in enumerate(live)}
        self.wide = [n for n, r in relations.relations.items() if _is_wide(r)]
        first = {n: min(place[v] for v in relations.relations[n].scope) for n in self.wide}
        order = sorted([(i, -1, v) for v, i in place.items()] + [(first[n], n, -1) for n in self.wide])
        self.node = {v: i for i, (_, n, v) in enumerate(order) if n < 0}
        self.row = {n: i for i, (_, n, _) in enumerate(order) if n >= 0}
        self.size = len(order)
        self.factors: dict[int, list[int]] = {}

    def net(self, relations: Relations, k: int, bound: float) -> Net:
        """The net of relaxation ``k``."""
        net = Net(self.size)
        net.constant = bound
        for v, i in self.node.items():
            cost = np.full(len(relations.net.cost[v]), math.inf)
            cost[relations.alive[v]] = relations.theta[v][:, k]
            net.set_cost(i, cost)
        for n, i in self.row.items():
            net.set_cost(i, relations.relations[n].slack[:, k])
        for n, r in relations.relations.items():
            if not r.scope:
                net.constant += float(r.slack[0, k])
                continue
            nodes = tuple(self.node[v] for v in r.scope)
            if n in self.row:
                self.factors[n] = [
                    net.add(Factor((self.row[n], w), (column, labels), _equal(size)))
                    for w, column, labels, size in zip(nodes, r.columns, r.labels, r.sizes, strict=True)
                ]
            else:
                table = np.full(r.sizes, math.inf)
                table[tuple(r.columns)] = r.slack[:, k]
                self.factors[n] = [net.add(Factor(nodes, r.labels, table))]
        return net

    def read(self, relations: Relations, k: int, messages: Messages) -> None:
        """Take the costs over."""
        for v, i in self.node.items():
            relations.theta[v][:, k] = messages.theta[i]
        for n, r in relations.relations.items():
            if not r.scope:
                r.slack[:, k] = 0.0
            elif n in self.row:
                slack = messages.theta[self.row[n]].copy()
                for number, column in zip(self.factors[n], r.columns, strict=True):
                    slack += messages.tables[number][column, column]
                r.slack[:, k] = slack
            else:
                r.slack[:, k] = messages.tables[self.factors[n][0]][tuple(r.columns)]

    def chosen(self, messages: Messages) -> dict[int, int] | None:
        """Strategies that go together, found from the messages; None where those do not."""
        choices = messages.improve(messages.decode())
        return {v: int(choices[i]) for v, i in self.node.items()} if math.isfinite(messages.cost(choices)) else None


def _is_wide(r: Relation) -> bool:
    return math.prod(r.sizes) > max(TABLE_CELLS, SPARSE * len(r.slack))


def _equal(size: int) -> np.ndarray:
    table = np.full((size, size), math.inf)
    np.fill_diagonal(table, 0.0)
    return table

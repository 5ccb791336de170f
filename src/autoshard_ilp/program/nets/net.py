"""The solver's working copy of a program: nodes, and factors over any number of nodes.

    minimise  constant + sum_v cost_v[x_v] + sum_f table_f[l_1(x_{v1}), ..., l_k(x_{vk})]

A factor's axes are *labels*: ``labels[k]`` maps the strategies of ``scope[k]`` (numbered as in the program, for ever;
-1 where the strategy is gone) to positions on axis k. Keeping the program's own numbering makes every reduction
invertible without translation: a strategy that is gone costs ``inf`` and nothing is renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard_ilp.program.kernels.labels import numbered
from autoshard_ilp.program.model import Program
from autoshard_ilp.program.rows.memory import Row

Held = tuple[dict[int, np.ndarray], dict[int, np.ndarray]]
"""Per node, and per edge, int64 bytes: (rows, strategies), and (rows, *table.shape)."""

MOST_CODES = 2**62
FEW_CODES = 2**13  # of one number each: looked through faster than sorted


class EmptyNodeError(Exception):
    """Internal: a node has no finite strategy left, so the net has no finite assignment."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost table in seconds over the labels of ``scope``; ``used`` where its bytes count in a memory row."""

    scope: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    table: np.ndarray
    used: np.ndarray | None = None  # int64 bytes, (rows, *table.shape), 0 where the table is infinite

    def axis(self, v: int) -> int:
        """Axis that belongs to node ``v``."""
        return self.scope.index(v)


@dataclass(frozen=True, eq=False)
class Record:
    """Undo data of one eliminated node: its best strategy follows from its neighbours' choices."""

    node: int
    cost: np.ndarray
    factors: tuple[Factor, ...]
    used: np.ndarray | None = None

    def best(self, choices: np.ndarray) -> int:
        """The cheapest strategy given ``choices`` of all neighbours (of equals that of least bytes, then the first)."""
        total, held = self.cost, None if self.used is None else self.used.sum(axis=0)
        for others, own, table, used in self._parts:
            index = tuple([lab[choices[w]] for w, lab in others])
            total = total + table[index][own]
            if used is not None:
                bytes_ = used[index].sum(axis=-1)[own]
                held = bytes_ if held is None else held + bytes_
        if held is None:
            return int(total.argmin())
        return int(np.argmin(np.where(total == total.min(), held, np.iinfo(np.int64).max)))

    @cached_property
    def _parts(self) -> list[tuple[list[tuple[int, np.ndarray]], np.ndarray, np.ndarray, np.ndarray | None]]:
        """Per factor: the other nodes with their labels, the node's own labels, table and bytes with its axis last.

        The axes of the others come first in both; rows of bytes are the very last axis.
        """
        parts = []
        for f in self.factors:
            k = f.axis(self.node)
            others = [(w, lab) for w, lab in zip(f.scope, f.labels, strict=True) if w != self.node]
            used = None if f.used is None else np.moveaxis(np.moveaxis(f.used, 0, -1), k, -2)
            parts.append((others, f.labels[k], np.moveaxis(f.table, k, -1), used))
        return parts


class Net:
    """Mutable factor graph with undo records. Build with :func:`build_net`; copy with :meth:`copy`."""

    def __init__(self, size: int, rows: int = 0) -> None:
        self.cost: list[np.ndarray] = [np.zeros(0)] * size
        self.alive: list[np.ndarray] = [np.zeros(0, np.int64)] * size
        self.used: list[np.ndarray | None] = [None] * size  # int64 bytes, (rows, strategies), least alive is 0
        self.base = np.zeros(rows, np.int64)  # bytes per memory row that no choice changes
        self.factors: dict[int, Factor] = {}
        self.incident: list[dict[int, None]] = [{} for _ in range(size)]  # ordered sets
        self.gone = np.zeros(size, bool)
        self.constant = 0.0
        self.records: list[Record] = []
        self.next_factor = 0

    def copy(self) -> Net:
        """A copy that shares the (never mutated) arrays."""
        other = Net(len(self.cost))
        other.cost, other.alive, other.used = list(self.cost), list(self.alive), list(self.used)
        other.base = self.base.copy()
        other.factors = dict(self.factors)
        other.incident = [dict(i) for i in self.incident]
        other.gone = self.gone.copy()
        other.constant, other.records, other.next_factor = self.constant, list(self.records), self.next_factor
        return other

    @property
    def live(self) -> list[int]:
        """Nodes still to be decided, ascending."""
        return [int(v) for v in np.flatnonzero(~self.gone)]

    def add(self, factor: Factor) -> int:
        """Insert a factor; its number."""
        number = self.next_factor
        self.next_factor += 1
        self.factors[number] = factor
        for v in factor.scope:
            self.incident[v][number] = None
        return number

    def remove(self, number: int) -> Factor:
        """Take a factor out."""
        factor = self.factors.pop(number)
        for v in factor.scope:
            del self.incident[v][number]
        return factor

    def replace(self, number: int, factor: Factor) -> None:
        """Exchange a factor for another of the same scope."""
        self.factors[number] = factor

    def neighbours(self, v: int) -> list[int]:
        """Nodes that share a factor with ``v``, in order of first meeting."""
        seen: dict[int, None] = {}
        for f in self.incident[v]:
            for w in self.factors[f].scope:
                if w != v:
                    seen[w] = None
        return list(seen)

    def add_cost(self, v: int, extra: np.ndarray) -> None:
        """Add ``extra`` (one entry per strategy alive) to the cost of ``v``; raises when nothing stays finite."""
        cost = np.full(len(self.cost[v]), np.inf)
        alive = self.alive[v]
        cost[alive] = self.cost[v][alive] + extra
        self.set_cost(v, cost)

    def set_cost(self, v: int, cost: np.ndarray) -> None:
        """Replace the cost of ``v`` (all strategies; ``inf`` removes)."""
        self.cost[v] = cost
        alive = np.flatnonzero(cost < np.inf)
        if len(alive) != len(self.alive[v]):
            self.alive[v] = alive
        if not len(alive):
            raise EmptyNodeError(v)

    def add_used(self, v: int, extra: np.ndarray) -> None:
        """Add ``extra`` (int64 bytes, rows x strategies alive) to what ``v`` uses; what all use is constant."""
        alive, own = self.alive[v], self.used[v]
        out = np.zeros((len(self.base), len(self.cost[v])), np.int64)
        part = extra if own is None else extra + own[:, alive]
        low = part.min(axis=1)
        self.base = self.base + low
        out[:, alive] = part - low[:, None]
        self.used[v] = out if out.any() else None

    def value(self, choices: np.ndarray) -> float:
        """Cost in seconds of ``choices`` over what is still in the net, ``constant`` included."""
        total = self.constant + sum(float(self.cost[v][choices[v]]) for v in self.live)
        for f in self.factors.values():
            total += float(f.table[tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))])
        return total

    def contains(self, choices: np.ndarray) -> bool:
        """Whether ``choices`` are finite in all that is still in the net."""
        if not all(np.isfinite(self.cost[v][choices[v]]) for v in self.live):
            return False
        for f in self.factors.values():
            at = tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))
            if min(at) < 0 or not np.isfinite(f.table[at]):
                return False
        return True

    def complete(self, choices: np.ndarray) -> np.ndarray:
        """Fill in every eliminated node, last eliminated first."""
        full = np.array(choices, np.int64)
        for record in reversed(self.records):
            full[record.node] = record.best(full)
        return full

    def size(self) -> dict[str, int]:
        """Nodes, strategies, factors and table cells still there."""
        live = self.live
        return {
            "nodes": len(live),
            "strategies": int(sum(len(self.alive[v]) for v in live)),
            "factors": len(self.factors),
            "cells": int(sum(f.table.size for f in self.factors.values())),
        }

    def forbid(self, v: int, strategies: np.ndarray) -> None:
        """Take strategies out of a node; raises when nothing stays finite."""
        if len(strategies):
            cost = self.cost[v].copy()
            cost[strategies] = np.inf
            self.set_cost(v, cost)

    def forbid_cells(self, number: int, cells: np.ndarray) -> None:
        """Make cells of a factor infinite (bool, as its table); what is infinite holds no bytes."""
        f = self.factors[number]
        if (cells & np.isfinite(f.table)).any():
            used = None if f.used is None else np.where(cells, 0, f.used)
            self.replace(number, Factor(f.scope, f.labels, np.where(cells, np.inf, f.table), used))

    def only(self, v: int, mask: np.ndarray) -> Net:
        """A copy in which ``v`` has only those of its strategies alive (bool)."""
        part = self.copy()
        part.forbid(v, part.alive[v][~mask])
        return part


def build_net(
    program: Program,
    keep: Sequence[np.ndarray] | None = None,
    rows: Sequence[Row] = (),
    cells: Sequence[np.ndarray] | None = None,
) -> Net:
    """The net of a program.

    Args:
        program: the integer program.
        keep: per node a bool array of the strategies allowed; None: all.
        rows: memory rows whose bytes are wanted.
        cells: per edge a bool array of the cells allowed; None: all.

    Raises:
        EmptyNodeError: a node has no finite strategy.
    """
    net = Net(len(program.nodes), len(rows))
    nodes, edges = bytes_in_rows(program, rows)
    for v, node in enumerate(program.nodes):
        cost = np.asarray(node.costs, np.float64).copy()
        if keep is not None:
            cost[~keep[v]] = np.inf
        net.set_cost(v, cost)
        if v in nodes:
            net.add_used(v, nodes[v][:, net.alive[v]])
    for e, edge in enumerate(program.edges):
        table = np.asarray(edge.table, np.float64)
        net.add(
            Factor(
                (edge.u, edge.v),
                (np.asarray(edge.u_labels, np.int64), np.asarray(edge.v_labels, np.int64)),
                table if cells is None else np.where(cells[e], table, np.inf),
                edges.get(e),
            )
        )
    return net


def bytes_in_rows(program: Program, rows: Sequence[Row]) -> Held:
    """Bytes per row and choice of the nodes and of the edges that count in a row."""
    found: Held = ({}, {})
    for r, row in enumerate(rows):
        for out, things, owners, counts in (
            (found[0], program.nodes, row.nodes, row.node_counts),
            (found[1], program.edges, row.edges, row.edge_counts),
        ):
            for i, count in zip(owners.tolist(), counts.tolist(), strict=True):
                held = np.asarray(things[i].bytes, np.int64)
                if i not in out:
                    out[i] = np.zeros((len(rows), *held.shape), np.int64)
                out[i][r] = count * held
    return found


def joint_labels(
    alive: np.ndarray, size: int, labels: Sequence[np.ndarray], counts: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Number the distinct tuples of labels that occur among the strategies ``alive``.

    Args:
        alive: strategies alive.
        size: number of strategies in all.
        labels: label arrays over all strategies.
        counts: number of labels of each.

    Returns:
        The joint label of every strategy (-1 where not alive), and per input the joint-to-own label map.
    """
    code, most = labels[0][alive], counts[0]
    for lab, count in zip(labels[1:], counts[1:], strict=True):
        if most * count > MOST_CODES:
            code = np.unique(code, return_inverse=True)[1]
            most = int(code.max(initial=0)) + 1
        code, most = code * count + lab[alive], most * count
    if most <= FEW_CODES:
        first, inverse = numbered(code, most)
    else:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    joint = np.full(size, -1, np.int64)
    joint[alive] = inverse
    return joint, [lab[alive[first]] for lab in labels]


def segment_min(values: np.ndarray, labels: np.ndarray, count: int, axis: int = 0) -> np.ndarray:
    """Minimum of ``values`` over the positions of ``axis`` that share a label; ``inf`` for labels that do not occur."""
    if len(labels) == count and np.array_equal(labels, np.arange(count)):
        return values
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    reduced = np.minimum.reduceat(np.take(values, order, axis=axis), starts, axis=axis)
    if len(present) == count:
        return reduced
    shape = list(values.shape)
    shape[axis] = count
    out = np.full(shape, np.inf)
    index: list = [slice(None)] * values.ndim
    index[axis] = present
    out[tuple(index)] = reduced
    return out

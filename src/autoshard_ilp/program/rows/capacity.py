"""What cannot fit: strategies and cells whose bytes exceed what the least usage of everything else leaves.

    least(t)  = sum over owners of count_o(t) x (least bytes of owner o)                 bytes per device
    room(o)   = min over t of (capacity - least(t)) / count_o(t)                         bytes per device

A choice of owner ``o`` that holds more than its least bytes plus ``room(o)`` is in no plan. What it takes along (labels
without finite partner) lowers the room of others, so the two alternate until nothing changes. Exact for any costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.model import Program
from autoshard_ilp.program.nets.net import EmptyNodeError

ROUNDS = 20


@dataclass(frozen=True, eq=False)
class Spans:
    """Per owner the stretches of time over which the number of its running lifetimes is constant and above zero."""

    owner: np.ndarray  # nodes first, then edges
    start: np.ndarray
    end: np.ndarray
    count: np.ndarray
    horizon: int

    @staticmethod
    def of(program: Program) -> Spans:
        """The spans of a program's lifetimes."""
        lt = program.lifetimes
        if not len(lt.owner):
            zero = np.zeros(0, np.int64)
            return Spans(zero, zero, zero, zero, 0)
        number = np.asarray(lt.owner, np.int64) + np.where(lt.is_edge, len(program.nodes), 0)
        owner = np.concatenate([number, number])
        time = np.concatenate([lt.start, lt.end]).astype(np.int64)
        change = np.repeat([1, -1], len(number))
        order = np.lexsort((time, owner))
        owner, time, change = owner[order], time[order], change[order]
        count = np.cumsum(change)  # zero again at the end of each owner
        same = (owner[1:] == owner[:-1]) & (time[1:] > time[:-1]) & (count[:-1] > 0)
        at = np.flatnonzero(same)
        return Spans(owner[at], time[at], time[at + 1], count[at], int(np.max(lt.end)))


def least_over_spans(values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Least of ``values`` over each half-open, non-empty range (a table of powers of two)."""
    levels = [values]
    while 2 ** len(levels) <= len(values):
        last, half = levels[-1], 2 ** (len(levels) - 1)
        levels.append(np.minimum(last[:-half], last[half:]))
    level = np.floor(np.log2(end - start)).astype(np.int64)
    out = np.empty(len(start), values.dtype)
    for k, table in enumerate(levels):
        own = level == k
        out[own] = np.minimum(table[start[own]], table[end[own] - 2**k])
    return out


@dataclass(eq=False)
class Room:
    """Removal of what cannot fit, in place on ``keep``.

    Args:
        program: with a capacity in bytes per device.
        keep: per node, the strategies still possible (bool); changed in place.
    """

    program: Program
    keep: list[np.ndarray]

    @staticmethod
    def of(program: Program) -> Room:
        """With every finite strategy still possible."""
        return Room(program, [np.isfinite(np.asarray(n.costs, np.float64)) for n in program.nodes])

    def run(self) -> dict[str, int]:
        """Removes until nothing changes; counts of what went. EmptyNodeError: no plan fits."""
        program = self.program
        assert program.capacity is not None
        for v, possible in enumerate(self.keep):
            if not possible.any():
                raise EmptyNodeError(v)
        self.cells = [np.isfinite(np.asarray(e.table)) for e in program.edges]
        self.spans = Spans.of(program)
        before = sum(int(k.sum()) for k in self.keep)
        cells = sum(int(c.sum()) for c in self.cells)
        changed: Sequence[int] = range(len(program.edges))
        self.touching: list[list[int]] = [[] for _ in program.nodes]
        for e, edge in enumerate(program.edges):
            self.touching[edge.u].append(e)
            self.touching[edge.v].append(e)
        for _ in range(ROUNDS):
            self._partners(changed)
            changed = self._too_large()
            if not changed:
                break
        return {
            "strategies that cannot fit": before - sum(int(k.sum()) for k in self.keep),
            "cells that cannot fit": cells - sum(int(c.sum()) for c in self.cells),
        }

    def allows(self, choices: np.ndarray) -> bool:
        """Whether a plan uses nothing that was removed (in ``keep`` since, too)."""
        if not all(k[s] for k, s in zip(self.keep, choices.tolist(), strict=True)):
            return False
        edges = zip(self.cells, self.program.edges, strict=True)
        return all(bool(c[e.u_labels[choices[e.u]], e.v_labels[choices[e.v]]]) for c, e in edges)

    def _partners(self, edges: Sequence[int]) -> None:
        """Drop strategies without a finite cell on one of ``edges``, and what follows from that."""
        queue = dict.fromkeys(edges)
        while queue:
            e = next(iter(queue))
            del queue[e]
            edge, cells = self.program.edges[e], self.cells[e]
            rows, columns = np.zeros(cells.shape[0], bool), np.zeros(cells.shape[1], bool)
            rows[edge.u_labels[self.keep[edge.u]]] = True
            columns[edge.v_labels[self.keep[edge.v]]] = True
            cells &= rows[:, None]
            cells &= columns[None, :]
            for v, alive in ((edge.u, cells.any(axis=1)[edge.u_labels]), (edge.v, cells.any(axis=0)[edge.v_labels])):
                if (self.keep[v] & ~alive).any():
                    self.keep[v] = self.keep[v] & alive
                    if not self.keep[v].any():
                        raise EmptyNodeError(v)
                    queue.update(dict.fromkeys(self.touching[v]))

    def _too_large(self) -> list[int]:
        """Drop choices above the room of their owner; the edges concerned."""
        program, spans = self.program, self.spans
        assert program.capacity is not None
        nodes = len(program.nodes)
        least = np.zeros(nodes + len(program.edges), np.int64)
        largest = least.copy()
        for o in np.unique(spans.owner).tolist():
            held, possible = self._bytes(o)
            if held is not None:
                own = held[possible]
                least[o], largest[o] = own.min(), own.max()
        change = np.zeros(spans.horizon + 1, np.int64)
        np.add.at(change, spans.start, spans.count * least[spans.owner])
        np.add.at(change, spans.end, -spans.count * least[spans.owner])
        left = program.capacity - np.cumsum(change)[:-1]
        if len(left) and left.min() < 0:
            raise EmptyNodeError("capacity")
        open_ = largest[spans.owner] > least[spans.owner]
        room = np.full(len(least), np.iinfo(np.int64).max)
        owners = spans.owner[open_]
        if not len(owners):
            return []
        within = least_over_spans(left, spans.start[open_], spans.end[open_]) // spans.count[open_]
        np.minimum.at(room, owners, within)
        changed: dict[int, None] = {}
        for o in np.flatnonzero(largest - least > room).tolist():
            held, possible = self._bytes(o)
            assert held is not None
            possible = possible & (held <= least[o] + room[o])
            if o < nodes:
                self.keep[o] = possible
                changed.update(dict.fromkeys(self.touching[o]))
            else:
                self.cells[o - nodes] = possible
                changed[o - nodes] = None
        return list(changed)

    def _bytes(self, owner: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Bytes per choice of an owner, and which choices are possible."""
        nodes = self.program.nodes
        if owner < len(nodes):
            return nodes[owner].bytes, self.keep[owner]
        return self.program.edges[owner - len(nodes)].bytes, self.cells[owner - len(nodes)]

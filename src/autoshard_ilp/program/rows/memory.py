"""Memory rows: at time t, the bytes of everything alive stay within the capacity.

Rows are generated lazily: a plan is checked over all times, and the worst moments that exceed the capacity join the
program, at most a few at once and far from each other. All bytes are exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.program.model import Program


@dataclass(frozen=True, eq=False)
class Row:
    """The owners alive at ``time``, each with the number of its lifetimes that are running."""

    time: int
    nodes: np.ndarray
    node_counts: np.ndarray
    edges: np.ndarray
    edge_counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Owners:
    """Lifetimes grouped for fast use: one byte vector per owner, one sweep over time."""

    program: Program

    def row(self, time: int) -> Row:
        """The row of one moment; owners whose bytes are all zero are left out."""
        lt = self.program.lifetimes
        running = (np.asarray(lt.start) <= time) & (time < np.asarray(lt.end))
        is_edge = np.asarray(lt.is_edge, bool)
        nodes, node_counts = np.unique(np.asarray(lt.owner)[running & ~is_edge], return_counts=True)
        edges, edge_counts = np.unique(np.asarray(lt.owner)[running & is_edge], return_counts=True)
        keep_n = np.array([self._has_bytes(self.program.nodes[v].bytes) for v in nodes], bool)
        keep_e = np.array([self._has_bytes(self.program.edges[e].bytes) for e in edges], bool)
        return Row(int(time), nodes[keep_n], node_counts[keep_n], edges[keep_e], edge_counts[keep_e])

    @staticmethod
    def _has_bytes(held: np.ndarray | None) -> bool:
        return held is not None and bool(np.any(held))


def usage(program: Program, row: Row, choices: np.ndarray) -> int:
    """Bytes in use at the row's time under ``choices``."""
    total = 0
    for v, count in zip(row.nodes, row.node_counts, strict=True):
        total += int(count) * held_by_node(program, int(v), choices)
    for e, count in zip(row.edges, row.edge_counts, strict=True):
        total += int(count) * held_by_edge(program, int(e), choices)
    return total


def held_by_node(program: Program, v: int, choices: np.ndarray) -> int:
    """Bytes that node ``v`` holds under ``choices``."""
    held: Any = program.nodes[v].bytes
    return int(held[choices[v]])


def held_by_edge(program: Program, e: int, choices: np.ndarray) -> int:
    """Bytes that edge ``e`` holds under ``choices``."""
    edge = program.edges[e]
    held: Any = edge.bytes
    return int(held[edge.u_labels[choices[edge.u]], edge.v_labels[choices[edge.v]]])


def violated_times(program: Program, choices: np.ndarray, limit: int, known: set[int], most: int = 4) -> list[int]:
    """The worst moments at which ``choices`` exceed ``limit`` bytes, one per separate excess, worst first.

    Args:
        program: the program.
        choices: one strategy per node.
        limit: bytes allowed.
        known: times that are rows already.
        most: how many to return.
    """
    used = program.usage_over_time(choices)
    over = np.flatnonzero(used > limit)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = [int(run[np.argmax(used[run])]) for run in runs]
    peaks.sort(key=lambda t: (-int(used[t]), t))
    fresh = [t for t in peaks if t not in known]
    if not fresh:  # float-free arithmetic: a known row is exact, so only other moments of the same run are left
        fresh = [int(t) for t in over[np.argsort(-used[over], kind="stable")] if int(t) not in known]
    return fresh[:most]

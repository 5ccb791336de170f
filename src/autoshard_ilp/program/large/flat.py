"""A program as flat arrays, which compiled kernels read.

    minimise    constant + sum_v cost[off[v] + x_v] + sum_e table[toff[e] + x_u * K_v + x_v]
    subject to  base[t] + sum of use of all segments that cover t  <=  capacity, for every time t

Values of node v are ``0 .. K_v - 1`` with ``K_v = off[v + 1] - off[v]``. A *segment* is a lifetime of a node:
``use[uoff[k] + x_v]`` bytes during ``[sstart[k], send[k])``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Flat:
    """Nodes, pairwise tables (row-major) and segments (grouped by node); costs float64, everything else int64."""

    off: np.ndarray
    cost: np.ndarray
    eu: np.ndarray
    ev: np.ndarray
    toff: np.ndarray
    table: np.ndarray
    soff: np.ndarray  # node -> its segments
    sstart: np.ndarray
    send: np.ndarray
    uoff: np.ndarray  # segment -> its bytes per value
    use: np.ndarray
    base: np.ndarray  # bytes at every time whatever is chosen
    capacity: int  # bytes; negative when no assignment can fit

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.off) - 1

    @property
    def counts(self) -> np.ndarray:
        """Values per node."""
        return np.diff(self.off)

    def size(self) -> dict[str, int]:
        """Nodes, values, edges, table cells and segments."""
        return {
            "nodes": self.nodes,
            "strategies": len(self.cost),
            "edges": len(self.eu),
            "cells": len(self.table),
            "segments": len(self.sstart),
        }

    def value(self, x: np.ndarray, table: np.ndarray | None = None) -> float:
        """Cost of the assignment ``x`` (with ``table`` in the place of the tables)."""
        own = self.cost[self.off[:-1] + x]
        pair = (self.table if table is None else table)[self.toff[:-1] + x[self.eu] * self.counts[self.ev] + x[self.ev]]
        return float(own.sum() + pair.sum())

    def usage(self, x: np.ndarray) -> np.ndarray:
        """Bytes at every time."""
        owner = np.repeat(np.arange(self.nodes), np.diff(self.soff))
        held = self.use[self.uoff[:-1] + x[owner]]
        delta = np.zeros(len(self.base) + 1, np.int64)
        np.add.at(delta, self.sstart, held)
        np.add.at(delta, self.send, -held)
        return self.base + np.cumsum(delta)[:-1]


def offsets(sizes: np.ndarray) -> np.ndarray:
    """Running start positions, with the total at the end."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)

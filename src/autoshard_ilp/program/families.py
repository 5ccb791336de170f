"""Plans within families of strategies, which leave a much smaller program each.

Prices decode plans node by node, and where the budget binds, changing a few nodes does not lead from one good plan to
another. A family (:attr:`autoshard_ilp.program.model.Program.families`) is chosen by what strategies mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard_ilp.program.model import Edge, Program
from autoshard_ilp.program.search import Search

SHARE = 0.3  # of the time left, for all families ..
RATE = 6000  # .. of so many strategies a second, all families together; less time rarely leads to a good plan
LEAST_PART = 0.3  # of a program's strategies: its families have that many together or more
SAME = 1e-9  # relative difference of the sums of two programs that are the same but for the order of mesh axes


def restricted(program: Program, kept: Sequence[np.ndarray]) -> Program:
    """The program with some strategies of every node (bool), in the same order."""

    def labels(edge: Edge) -> Edge:
        rows, u_labels = np.unique(edge.u_labels[kept[edge.u]], return_inverse=True)
        columns, v_labels = np.unique(edge.v_labels[kept[edge.v]], return_inverse=True)
        cells = np.ix_(rows, columns)
        held = None if edge.bytes is None else edge.bytes[cells]
        return Edge(edge.u, edge.v, u_labels, v_labels, edge.table[cells], held)

    nodes = tuple(
        replace(node, costs=node.costs[k], bytes=None if node.bytes is None else node.bytes[k])
        for node, k in zip(program.nodes, kept, strict=True)
    )
    return replace(program, nodes=nodes, edges=tuple(map(labels, program.edges)), families=None)


class Families:
    """The families of one program, which are looked into once.

    Args:
        search: of the whole program; ``search.solver`` solves the small ones.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.whole = sum(len(n.costs) for n in search.program.nodes)
        self.all: list[Sequence[np.ndarray]] | None = None  # once they were asked for
        self.sizes: list[int] = []

    def affordable(self) -> bool:
        """Whether they have not been looked into, and there is time enough for all of them."""
        most, program = RATE * self._seconds(), self.search.program
        if program.families is None or self.search.solver is None or LEAST_PART * self.whole > most:
            return False
        if self.all is None:
            self.all = list(program.families())
            self.sizes = [sum(int(kept.sum()) for kept in family) for family in self.all]
        return bool(self.all) and sum(self.sizes) <= most

    def _seconds(self) -> float:
        return SHARE * (self.search.deadline - time.monotonic())

    def look(self) -> list[np.ndarray]:
        """Offer the best plan of every family.

        Returns:
            the plans found that were better than the best one known.

        Raises:
            KeyboardInterrupt: as the solver was told; what it had found is offered.
        """
        search, seconds, total = self.search, self._seconds(), sum(self.sizes)
        plans, seen = list[np.ndarray](), list[np.ndarray]()
        families, self.all = self.all or [], []
        for size, kept in zip(self.sizes, families, strict=True):
            if search.done() or time.monotonic() > search.deadline:
                break
            small = restricted(search.program, kept)
            sums = _sums(small)
            if any(np.allclose(sums, other, rtol=SAME, atol=0.0) for other in seen):
                continue
            seen.append(sums)
            assert search.solver is not None
            options = replace(search.options, time_limit=seconds * size / total)
            found = search.solver(small, options, cutoff=search.upper)
            if found.choices is not None:
                plans.append(np.array([np.flatnonzero(k)[s] for k, s in zip(kept, found.choices, strict=True)]))
                search.offer(plans[-1])
            if found.report.get("interrupted"):
                raise KeyboardInterrupt
        return plans


def _sums(program: Program) -> np.ndarray:
    """Numbers that are the same for two programs that differ in the names of equal mesh axes."""
    costs = [n.costs[np.isfinite(n.costs)] for n in program.nodes] or [np.zeros(0)]
    tables = [e.table[np.isfinite(e.table)] for e in program.edges] or [np.zeros(0)]
    held = [b for b in (*(n.bytes for n in program.nodes), *(e.bytes for e in program.edges)) if b is not None]
    totals = [math.fsum(float(part.sum()) for part in parts) for parts in (costs, tables, held)]
    return np.array([*totals, sum(map(len, costs)), sum(map(np.size, tables))])

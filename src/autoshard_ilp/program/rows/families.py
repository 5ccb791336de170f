"""Plans within families of strategies, which leave a much smaller program each.

Prices decode plans node by node, and where the budget binds, or nodes have many strategies, changing a few nodes does
not lead from one good plan to another. A family (:attr:`autoshard_ilp.program.model.Program.families`) is chosen by
what strategies mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.program.model import Edge, Program
from autoshard_ilp.program.search import Search

LEAST_PART = 0.3  # of a program's strategies: its families have that many together or more
SAME = 1e-9  # relative difference of the sums of two programs that are the same but for the order of mesh axes


@dataclass(frozen=True)
class Pace:
    """How much time families get.

    Attributes:
        share: of the time left, for all families.
        rate: strategies a second; less time rarely leads to a good plan.
        first: of what is left of that share, for each next family, those most like the best plan known first. 0: all
            families have their part of it, by their strategies.
        misses: families in a row without a better plan, after which the others are left.
    """

    share: float
    rate: int
    first: float = 0.0
    misses: int = 1 << 30

    def enough(self, seconds: float, sizes: Sequence[float]) -> bool:
        """Whether so much time left is enough for families of so many strategies."""
        most = self.rate * self.share * seconds
        return bool(sizes) and (sizes[0] <= self.first * most if self.first else sum(sizes) <= most)


ALL = Pace(share=0.3, rate=6000)
"""Under memory rows, where windows take long."""

FREE = Pace(share=0.3, rate=30_000, first=0.5, misses=2)
"""Without memory, before limits are widened and nodes branched on, which find better plans."""

NEAREST = Pace(share=0.7, rate=3000, first=0.9)
"""Under memory rows in wide nets, where no other way proves or finds much."""


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
        known: the best plan, if any, and what a better one must cost less than, in seconds; those of ``search`` unless
            given.
        offer: takes every plan found; ``search.offer`` unless given.
        memory: whether plans are to fit.
    """

    def __init__(
        self,
        search: Search,
        known: Callable[[], tuple[np.ndarray | None, float]] | None = None,
        offer: Callable[[np.ndarray], Any] | None = None,
        *,
        memory: bool = True,
    ) -> None:
        self.search = search
        self.known = known or (lambda: (search.best, search.upper))
        self.offer = offer or search.offer
        self.program = search.program if memory else replace(search.program, capacity=None)
        self.whole = sum(len(n.costs) for n in self.program.nodes)
        self.all: list[tuple[int, Sequence[np.ndarray]]] | None = (
            None  # with their strategies, once they were asked for
        )

    def affordable(self, pace: Pace = ALL) -> bool:
        """Whether they have not been looked into, and there is time enough."""
        seconds, program = self.search.deadline - time.monotonic(), self.program
        if program.families is None or self.search.solver is None:
            return False
        if not pace.first and not pace.enough(seconds, [LEAST_PART * self.whole]):
            return False
        if self.all is None:
            self.all = [(sum(int(kept.sum()) for kept in family), family) for family in program.families()]
        return pace.enough(seconds, [size for size, _ in self.sorted()])

    def sorted(self) -> list[tuple[int, Sequence[np.ndarray]]]:
        """The families that the best plan is most like, by the nodes whose strategies it takes from them, first."""
        (plan, _), families = self.known(), self.all or []
        if plan is None:
            return families
        return sorted(families, key=lambda one: -sum(bool(kept[s]) for kept, s in zip(one[1], plan, strict=True)))

    def look(self, pace: Pace = ALL) -> list[np.ndarray]:
        """Offer the best plan of every family.

        Args:
            pace: how much time they get.

        Returns:
            the plans found that were better than those before.

        Raises:
            KeyboardInterrupt: as the solver was told; what it had found is offered.
        """
        search, now = self.search, time.monotonic()
        until = now + pace.share * (search.deadline - now)
        plans, seen, missed = list[np.ndarray](), list[np.ndarray](), 0
        families, self.all = self.sorted(), []
        total = sum(size for size, _ in families)
        for size, kept in families:
            if search.done() or time.monotonic() > until or missed >= pace.misses:
                break
            small = restricted(self.program, kept)
            sums = _sums(small)
            share, total = size / total, total - size
            if any(np.allclose(sums, other, rtol=SAME, atol=0.0) for other in seen):
                continue
            seen.append(sums)
            assert search.solver is not None
            seconds = max(share, pace.first) * (until - time.monotonic())
            options = replace(search.options, time_limit=max(0.0, seconds))
            found = search.solver(small, options, cutoff=self.known()[1])
            missed = 0 if found.choices is not None else missed + 1
            if found.choices is not None:
                plans.append(np.array([np.flatnonzero(k)[s] for k, s in zip(kept, found.choices, strict=True)]))
                self.offer(plans[-1])
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

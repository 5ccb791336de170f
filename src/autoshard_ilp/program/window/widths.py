"""How wide the bucket of a node would be: what says which node is eliminated next."""

from __future__ import annotations

import numpy as np

from autoshard_ilp.program.window import kernels
from autoshard_ilp.program.window.relations import Relations


class Widths:
    """The widths of the buckets of live nodes, while nodes are eliminated but nothing is pruned.

    What depends on one relation alone is kept, since each elimination asks for the widths of all neighbours.
    """

    def __init__(self, relations: Relations) -> None:
        self.relations = relations
        self.alive = np.zeros(len(relations.net.cost), np.int64)
        for v, strategies in relations.alive.items():
            self.alive[v] = len(strategies)
        self.product = np.zeros(len(self.alive))  # scratch of the kernel
        self.scopes: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by relation: nodes, labels of each
        self.matches: dict[tuple[int, int], np.ndarray] = {}  # by relation and node: rows that match each strategy

    def of(self, v: int) -> float:
        """Groups of the bucket of ``v``, at most: labels of its neighbours together, or rows that the join can have."""
        numbers = self.relations.incident[v]
        if not numbers:
            return float(min(1, self.alive[v]))
        parts = [self._scope(n) for n in numbers]
        nodes, sizes = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        together = kernels.labels_together(nodes, sizes, v, self.alive, self.product)
        matches = np.ones(self.alive[v])
        for number in numbers:
            matches *= self._matches(number, v)
        return min(together, float(matches.sum()))

    def _scope(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self.scopes:
            r = self.relations.relations[number]
            self.scopes[number] = np.array(r.scope, np.int64), np.array(r.sizes, np.int64)
        return self.scopes[number]

    def _matches(self, number: int, v: int) -> np.ndarray:
        if (number, v) not in self.matches:
            r = self.relations.relations[number]
            k = r.scope.index(v)
            rows = np.bincount(r.columns[k], minlength=r.sizes[k])
            self.matches[number, v] = rows[r.labels[k][self.relations.alive[v]]]
        return self.matches[number, v]

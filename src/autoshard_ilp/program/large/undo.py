"""What undoes a reduction: from an assignment of what is left to one of what was there, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Substitution:
    """Old node i takes value ``maps[moff[i] + x]``, where x is the value of new node ``new[i]``.

    ``better`` (per old value, positions in ``off``) names, for dominated values, a value that is at least as good.
    """

    new: np.ndarray
    moff: np.ndarray
    maps: np.ndarray
    off: np.ndarray | None = None
    better: np.ndarray | None = None

    def expand(self, x: np.ndarray) -> np.ndarray:
        """Assignment of the old nodes."""
        return self.maps[self.moff + x[self.new]]

    def project(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Assignment of the new nodes (``counts`` values each) that expands to ``x`` or better.

        Where the values are gone, one that agrees with ``x`` in most old nodes: the result may then be worse.
        """
        if self.off is not None and self.better is not None:
            x = x.copy()
            for _ in range(int(np.diff(self.off).max(initial=1))):
                other = self.better[self.off[:-1] + x]
                if (other < 0).all():
                    break
                x = np.where(other >= 0, other, x)
        size = counts[self.new]
        owner = np.repeat(np.arange(len(self.new)), size)
        value = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
        start = np.cumsum(counts) - counts
        same = self.maps[self.moff[owner] + value] == x[owner]
        score = np.zeros(int(counts.sum()), np.int64)
        np.add.at(score, start[self.new[owner[same]]] + value[same], 1)
        home = np.repeat(np.arange(len(counts)), counts)
        order = np.lexsort((-score, home))
        return order[start] - start


@dataclass(frozen=True, eq=False)
class Elimination:
    """Old nodes ``node`` follow from old neighbours ``left`` and ``right`` (-1: none), both of which stay.

    The best value of node i is ``best[boff[i] + x_left * width[i] + x_right]``; ``kept`` lists the old nodes that stay.
    """

    size: int
    kept: np.ndarray
    node: np.ndarray
    left: np.ndarray
    right: np.ndarray
    width: np.ndarray  # values of the right neighbour, 1 without one
    boff: np.ndarray
    best: np.ndarray

    def expand(self, x: np.ndarray) -> np.ndarray:
        """Assignment of the old nodes."""
        full = np.zeros(self.size, np.int64)
        full[self.kept] = x
        a = np.where(self.left >= 0, full[self.left], 0)
        b = np.where(self.right >= 0, full[self.right], 0)
        full[self.node] = self.best[self.boff + a * self.width + b]
        return full

    def project(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The values of the nodes that stay; those eliminated may only get cheaper."""
        return x[self.kept]


Undo = Substitution | Elimination

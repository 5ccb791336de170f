"""Local search on one assignment: a workspace for the compiled search, with prices on the memory rows."""

from __future__ import annotations

import time

import numpy as np

from autoshard_ilp.program.large import kernels_messages, kernels_search
from autoshard_ilp.program.large.graph import Graph

BACK = 1 << 20  # entries for the best values of one tree
FIRST_TRIAL_SECONDS = 2e-4


def priced(graph: Graph, prices: np.ndarray) -> np.ndarray:
    """Node costs with what the bytes of each value cost at ``prices`` (per byte and row)."""
    f = graph.flat
    theta = np.empty(len(f.cost))
    prefix = np.concatenate(([0.0], np.cumsum(prices)))
    kernels_messages.charge(f.off, f.cost, prefix, f.soff, f.sstart, f.send, f.uoff, f.use, theta)
    return theta


def softened(graph: Graph) -> np.ndarray:
    """The tables with a finite cost for what is impossible, more than any possible assignment costs in all.

    With infinite costs a search that starts from an impossible assignment could not tell better from worse.
    """
    tab = graph.tab
    if np.isfinite(tab).all():
        return tab
    f = graph.flat
    finite = np.where(np.isfinite(f.table), f.table, -np.inf)
    spread = np.maximum.reduceat(f.cost, f.off[:-1]).sum() - np.minimum.reduceat(f.cost, f.off[:-1]).sum()
    least = np.minimum.reduceat(f.table, f.toff[:-1])
    spread += (np.maximum.reduceat(finite, f.toff[:-1]) - least).sum()
    return np.where(np.isfinite(tab), tab, float(finite.max()) + 2.0 * float(spread) + 1.0)


class LocalSearch:
    """Improves ``x`` in place; ``best`` is the cheapest assignment met that fits (None: none yet).

    Args:
        graph: the program.
        x: where to start.
        seed: of the random numbers.
    """

    def __init__(self, graph: Graph, x: np.ndarray, seed: int) -> None:
        f = self.flat = graph.flat
        self.graph = graph
        n = f.nodes
        self.x = np.array(x, np.int64)
        self.free = (f.counts > 1).astype(np.int64)
        self.rng = np.array([(seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64 or 1], np.uint64)
        self.order, self.up, self.mark = (np.zeros(n, np.int64) for _ in range(3))
        self.touch, self.boff, self.log = (np.zeros(n, np.int64) for _ in range(3))
        self.stamp = np.zeros(2, np.int64)
        self.h = np.zeros(len(f.cost))
        self.back = np.zeros(max(BACK, int(f.counts.max(initial=1))), np.int64)
        self.old = np.zeros(3 * n, np.int64)  # values before the trial, trial numbers, best assignment
        self.delta = np.zeros(len(graph.room) + 1, np.int64)
        self.score = np.array([np.inf, np.inf, np.inf, np.inf])  # cost, priced cost, bytes too many, best cost
        self.trial_seconds = FIRST_TRIAL_SECONDS
        self.tab = softened(graph)
        self.theta = f.cost
        self.set_prices(np.zeros(len(graph.room)))

    def set_prices(self, prices: np.ndarray) -> None:
        """Use ``prices`` (cost per byte and row) from now on."""
        self.theta = priced(self.graph, prices)
        self._measure()

    def move_to(self, x: np.ndarray) -> None:
        """Go on from another assignment."""
        self.x[:] = x
        self._measure()

    def _measure(self) -> None:
        f = self.flat
        self.used = f.usage(self.x) - f.base
        self.score[0] = f.value(self.x, self.tab)
        self.score[1] = self.score[0] + float((self.theta - f.cost)[f.off[:-1] + self.x].sum())
        self.score[2] = float(np.maximum(0, self.used - self.graph.room).sum(dtype=np.float64))
        if self.score[2] == 0 and self.score[0] < self.score[3]:
            self.score[3] = self.score[0]
            self.old[2 * f.nodes :] = self.x

    @property
    def best(self) -> np.ndarray | None:
        """The cheapest assignment that fits."""
        return self.old[2 * self.flat.nodes :].copy() if np.isfinite(self.score[3]) else None

    @property
    def fits(self) -> bool:
        """True when the present assignment satisfies all rows."""
        return bool(self.score[2] == 0)

    def over(self) -> np.ndarray:
        """Bytes too many per row (0 where it fits)."""
        return np.maximum(0, self.used - self.graph.room)

    def run(self, seconds: float, largest: int, forced: int, heat: float = 0.0, free: bool = False) -> None:
        """Trials for about ``seconds``.

        Args:
            seconds: wall-clock.
            largest: nodes of the largest trees.
            forced: percent of trials that force a move.
            heat: how much dearer (in cost) an accepted trial may typically be.
            free: regard prices only, not the rows.
        """
        f, g = self.flat, self.graph
        trials = int(max(20, min(1_000_000, seconds / self.trial_seconds)))
        began = time.perf_counter()
        room = self.graph.room
        if free:
            room = np.full(len(room), np.iinfo(np.int64).max // 4)
            self.score[2] = 1.0  # does not count as fitting: neither kept as the best nor guarded
        kernels_search.search(
            *(f.off, f.cost, self.theta, g.ioff, g.nbr, g.opp, g.tb, self.tab, f.soff, f.sstart, f.send, f.uoff, f.use),
            *(room, self.free, self.x, self.used, self.score, self.rng, trials, largest, forced, float(heat)),
            *(self.order, self.up, self.mark, self.stamp, self.touch, self.h, self.back, self.boff, self.old),
            *(self.log, self.delta),
        )
        if free:
            self._measure()
        self.trial_seconds = max(1e-7, 0.5 * self.trial_seconds + 0.5 * (time.perf_counter() - began) / trials)

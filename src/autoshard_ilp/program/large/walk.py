"""A walk through prices, for plans: every price vector decodes into an assignment, and many of those fit.

Unlike the dual, which prices the few rows that bind, the walk prices all rows that any assignment exceeds, and moves
all prices together: up where more is used than there is room, down elsewhere (multiplicative updates). It starts
over, from shaken prices, when its steps have become small.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard_ilp.program.large import kernels_messages
from autoshard_ilp.program.large.graph import Graph
from autoshard_ilp.program.large.local import priced

SWEEPS = 2
FIRST_RATE = 2.0
STEPS = 250  # from the first rate to a tenth of it
MEMORY = 0.7  # of the running mean of the usage


class PriceWalk:
    """``step`` moves the prices and decodes an assignment."""

    def __init__(self, graph: Graph, seed: int) -> None:
        f = graph.flat
        self.graph = graph
        self.random = np.random.default_rng(seed)
        self.prices = np.zeros(len(graph.room))
        self.mean: np.ndarray | None = None
        self.messages = np.zeros(graph.moff[-1])
        self.hat = np.zeros(int(f.counts.max(initial=1)))
        self.x = np.zeros(f.nodes, np.int64)
        self.excess = np.zeros(len(f.cost))
        self.value_bounds = np.full(len(f.cost), -np.inf)
        self.bound = -math.inf
        self.best_prices = self.prices
        self.steps = 0
        self.room = graph.room.astype(np.float64)
        self.scale = float(max(1, f.capacity))

    def step(self) -> np.ndarray:
        """Sweep at the present prices, decode, move the prices. The assignment need not fit."""
        f, g = self.graph.flat, self.graph
        theta = priced(g, self.prices)
        before = bound = -math.inf
        for _ in range(SWEEPS):
            before = bound
            bound = kernels_messages.sweep(
                *(f.off, theta, g.ioff, g.nbr, g.opp, g.tb, g.tab, g.moff, self.messages, self.hat, self.x),
                self.excess,
            )
        offset = float(self.prices @ self.room)
        np.maximum(self.value_bounds, before - offset + self.excess, out=self.value_bounds)
        if bound - offset > self.bound:
            self.bound, self.best_prices = bound - offset, self.prices.copy()
        self._move(bound)
        return self.x.copy()

    def _move(self, bound: float) -> None:
        f = self.graph.flat
        excess = (f.usage(self.x) - f.capacity) / self.scale
        self.mean = excess if self.mean is None else MEMORY * self.mean + (1 - MEMORY) * excess
        over = np.maximum(0.0, self.mean)
        total = float(self.prices.sum())
        phase = self.steps % STEPS
        rate = FIRST_RATE / (1 + 10 * phase / STEPS)
        self.steps += 1
        if total > 0.0:
            if phase == 0:
                self.prices *= np.exp(self.random.normal(0.0, 0.3, len(self.prices)))
            self.prices *= np.exp(np.clip(rate * self.mean, -1.0, 1.0))
            if over.sum() > 0.0:
                self.prices += 0.02 * rate * over / over.sum() * max(total, 1e-3 * abs(bound) / self.scale)
        elif over.sum() > 0.0:
            self.prices = 0.1 * max(abs(bound), 1e-9 * self.scale) / self.scale * over / over.sum()

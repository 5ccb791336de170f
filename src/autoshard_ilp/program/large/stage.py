"""One reduced program with what its searches share."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.large.dual import Dual
from autoshard_ilp.program.large.graph import Graph
from autoshard_ilp.program.large.reduce import Reduced


class Pool:
    """The best assignment found on one graph; searches in several threads share it."""

    def __init__(self, graph: Graph) -> None:
        self._flat = graph.flat
        self._lock = threading.Lock()
        self.best: np.ndarray | None = None
        self.cost = math.inf

    def offer(self, x: np.ndarray, cost: float) -> None:
        """Keep ``x``, which fits, if it is cheaper than the best and possible."""
        if not cost < self.cost or not math.isfinite(self._flat.value(x)):
            return
        with self._lock:
            if cost < self.cost:
                self.best, self.cost = np.array(x, np.int64), cost


@dataclass(eq=False)
class Stage:
    """One reduced program with what its searches share; ``way`` leads back to the original."""

    way: tuple[Reduced, ...]
    graph: Graph
    times: np.ndarray
    dual: Dual
    pool: Pool
    starts: deque = field(default_factory=lambda: deque(maxlen=8))  # assignments decoded by the dual

    def expand(self, x: np.ndarray) -> np.ndarray:
        """The assignment of the original nodes."""
        for reduced in reversed(self.way):
            x = reduced.expand(x)
        return x

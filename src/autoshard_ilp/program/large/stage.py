"""One reduced program with its searches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.large.dual import Dual
from autoshard_ilp.program.large.graph import Graph
from autoshard_ilp.program.large.local import LocalSearch
from autoshard_ilp.program.large.reduce import Reduced


@dataclass(eq=False)
class Stage:
    """One reduced program with its searches; ``way`` leads back to the original."""

    way: tuple[Reduced, ...]
    graph: Graph
    times: np.ndarray
    dual: Dual
    local: LocalSearch
    starts: deque = field(default_factory=lambda: deque(maxlen=8))

    def expand(self, x: np.ndarray) -> np.ndarray:
        """The assignment of the original nodes."""
        for reduced in reversed(self.way):
            x = reduced.expand(x)
        return x

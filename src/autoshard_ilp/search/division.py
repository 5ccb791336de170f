"""Where to divide the repeated layers, read off the plans that prices per byte have shown.

At the best prices two ways to lay out a layer cost the same: one holds more bytes, the other takes more time. The plans
met there, mixed so that they fit (``report["mixture"]`` of :func:`autoshard_ilp.program.solve`), say which share of the
layers has which. Divided there, the layers hold the mixture as a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.costs.fold import LEAST_SPLIT, in_first_layers

HALF = 0.5
SLACK = 0.35  # of a layer: so little is made room for elsewhere


@dataclass(frozen=True, eq=False)
class Division:
    """A division of the layers, and two plans in which all of them are alike.

    Attributes:
        first_share: of the layers, those that decide apart from the others.
        first, others: strategies per class of the table that is divided, for the first layers and for the others.
    """

    first_share: float
    first: np.ndarray
    others: np.ndarray

    def start(self, old: Any, new: Any) -> np.ndarray:
        """Choices for the classes of ``new``, the table ``old`` divided; what repeats little is as in the first layers.

        They mean what the mixture means, but need not fit together, nor into memory.
        """
        backward = [op.phase == "backward" for op in new.graph.ops]
        first = in_first_layers(new.alike, backward, self.first_share)
        ops = np.array([c.members[0] for c in new.classes])
        classes = old.class_of[ops]
        return np.where(first[ops], self.first[classes], self.others[classes])


def division_of(table: Any, mixture: Sequence[tuple[float, float, np.ndarray]]) -> Division | None:
    """The division that a mixture of plans asks for; None where it is one plan, or the layers are too few.

    Args:
        table: cost table whose layers share their decisions.
        mixture: of plans, their weights, 1 in all, their seconds, and choices for the table's classes.
    """
    sizes = np.array([len(c.members) for c in table.classes])
    repeated = sizes >= LEAST_SPLIT
    if len(mixture) < 2 or not repeated.any():
        return None
    plans = [np.asarray(choices, np.int64) for _, _, choices in mixture]

    def apart(a: int, b: int) -> int:
        return int(np.count_nonzero((plans[a] != plans[b])[repeated]))

    def weight(a: int) -> float:
        return sum(w for b, (w, _, _) in enumerate(mixture) if not apart(a, b))

    numbers = range(len(plans))
    one = max(numbers, key=weight)
    two = max(numbers, key=lambda b: weight(b) * apart(one, b))
    if not apart(one, two):
        return None
    share = sum(mixture[a][0] for a in numbers if apart(one, a) <= apart(two, a))
    layers = Counter(sizes[repeated].tolist()).most_common(1)[0][0]
    # Rounded towards what takes more time, since it holds less, unless little more than the mixture is to fit.
    faster = mixture[one][1] < mixture[two][1]
    first = math.floor(share * layers + SLACK) if faster else math.ceil(share * layers - SLACK)
    first = min(max(first, 1), layers - 1)
    return Division(first / layers, plans[one], plans[two])

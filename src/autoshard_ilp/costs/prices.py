"""What has been priced before, on one mesh under one profile: shared by all the steps that one request compares.

A request may price dozens of variants of one step: rematerialisation policies, halved layers, other pins. Most of their
operations and tensors are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from autoshard_ilp.costs.reshard import CollectiveSeconds
from autoshard_ilp.costs.reshard_tables import ReshardTables

T = TypeVar("T")


@dataclass(eq=False)
class Prices:
    """Prices of one mesh under one profile, each computed once.

    Attributes:
        reshard: seconds and copies of resharding.
        classes: what all operations that look the same cost: strategies, seconds, labels.
        held: bytes per strategy, by the identity of a class's strategies (which ``classes`` keeps) and what is held.
    """

    reshard: ReshardTables
    classes: dict[Hashable, Any] = field(default_factory=dict)
    held: dict[Hashable, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(axis_sizes: tuple[int, ...], collectives: CollectiveSeconds) -> Prices:
        """Nothing priced yet."""
        return Prices(ReshardTables(axis_sizes, collectives))


def once(known: dict[Hashable, T], key: Hashable, compute: Callable[[], T]) -> T:
    """The value of a key, computed the first time."""
    if key not in known:
        known[key] = compute()
    return known[key]

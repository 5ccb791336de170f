"""The buffers of a step: which tensors have one, and from when to when it is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of a graph, per tensor id; times are half-open steps of program order.

    Attributes:
        stored: whether the tensor has a buffer of its own.
        start, end: when that buffer is held (meaningful where stored).
        root: the tensor whose buffer a view reads.
        reads: per op, positions of operands counted as read from memory, as often as they are.
        last_use: last time any consumer, through views and fusions, needs the tensor.
        time: time of each op.
        horizon: number of time steps; at the last one only arguments and results are left.
        begins, ends: region -> time of its first operation, and of its last.
        sliced: loop slice -> (tensor, until when): buffers of which nothing but one loop reads slices. ``end`` is when
            that loop begins, as if they were gathered for it; as they are, they are held until it ends.
        beside: gradient of a weight -> time of the product that XLA:TPU computes before it, and that comes later in the
            program: the cotangent of the layer's input. Copies gathered for the one are held during the other.
    """

    stored: np.ndarray
    start: np.ndarray
    end: np.ndarray
    root: np.ndarray
    reads: tuple[tuple[int, ...], ...]
    last_use: np.ndarray
    time: np.ndarray
    horizon: int
    begins: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, int] = field(default_factory=dict)
    sliced: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    beside: Mapping[int, int] = field(default_factory=dict)

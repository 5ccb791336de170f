"""Mesh axes that always go together, where a mesh has so many that all of their combinations are too many.

An operation whose rule has f factors has (f + 1) ** n assignments of n mesh axes, and what passes between two
operations is priced for every pair: GPT-2 has 6.5 million of these on 2x2x2, DenseNet-201 76 million. Two axes that
always split the same dimension count as one. That is a restriction of the plan: of all others only what their
arithmetic takes is known (:func:`least_seconds`), and plans say so. Axes whose links are alike go first, of these the
ones that are few devices together: there is least to lose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from autoshard_ilp.costs.reshard import CollectiveSeconds
from autoshard_ilp.sharding import WHOLE, Layout, Together, keeps_together

FEW_AXES = 2
"""So many decide for themselves on any model."""

MOST_ASSIGNMENTS = 100_000
"""Of all decisions in all: fewer are left as they are, on meshes of any number of axes."""

MOST_OF_THREE = 400_000
"""The same of three axes: transformers have 70,000, ResNet-50 240,000, and DenseNet-201 more than a million."""

ALIKE = 3.0
"""Ratio of seconds per byte up to which the links of two axes are alike: rings of a torus are, a network is not."""


def axes_together(
    choices: Sequence[int],
    axis_sizes: Sequence[int],
    collectives: CollectiveSeconds,
    allowed: Iterable[frozenset[Layout]] = (),
) -> Together:
    """Groups of mesh axes that go together; none where every axis can decide for itself.

    Args:
        choices: per decision, what one mesh axis can choose from (:func:`autoshard_ilp.strategies.choices_per_axis`).
        axis_sizes: devices along each mesh axis.
        collectives: says how fast the links of an axis are.
        allowed: layouts that pins leave, of every pinned tensor: some of each set stays possible.
    """
    groups: list[tuple[int, ...]] = [(axis,) for axis, size in enumerate(axis_sizes) if size > 1]
    pinned = list(allowed)
    while len(groups) > FEW_AXES and sum(n ** len(groups) for n in choices) > _most(len(groups)):
        pairs = [(a, b) for a, b in itertools.pairwise(groups) if _possible(pinned, [*groups, (*a, *b)])]
        if not pairs:
            break
        first, second = min(pairs, key=lambda pair: _loss(pair[0], pair[1], axis_sizes, collectives))
        at = groups.index(first)
        groups[at : at + 2] = [(*first, *second)]
    return tuple(group for group in groups if len(group) > 1)


def _most(axes: int) -> int:
    return MOST_OF_THREE if axes == 3 else MOST_ASSIGNMENTS


def _possible(pinned: Sequence[frozenset[Layout]], groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether every pinned tensor has a layout left."""
    wide = tuple(group for group in groups if len(group) > 1)
    return all(any(keeps_together(layout, wide) for layout in layouts) for layouts in pinned)


def _loss(
    first: tuple[int, ...], second: tuple[int, ...], axis_sizes: Sequence[int], collectives: CollectiveSeconds
) -> tuple[bool, int]:
    """Whether the links of two groups differ, and the devices of both: the less of these, the less is lost."""
    slow, fast = (collectives.alpha_beta("all-gather", group)[1] for group in (first, second))
    differ = max(slow, fast) > ALIKE * min(slow, fast)
    return differ, math.prod(axis_sizes[axis] for axis in (*first, *second))


def least_seconds(table: Any, weight: float = 1.0) -> float:
    """Seconds that no plan falls short of: the work of every operation, shared by all devices.

    Args:
        table: a :class:`~autoshard_ilp.costs.table.CostTable`; what pins leave no whole strategy of counts nothing.
        weight: what a second of compute counts (:func:`autoshard_ilp.costs.build.weight_of`).
    """
    total = 0.0
    for cls in table.classes:
        whole = [i for i, s in enumerate(cls.strategies) if _is_whole(s)]
        total += cls.count * min((float(cls.compute_seconds[i]) for i in whole), default=0.0)
    return weight * total / math.prod(table.axis_sizes)


def _is_whole(strategy: Any) -> bool:
    layouts = (*strategy.operands, *strategy.results)
    return all(layout is not None and set(layout) <= {WHOLE} for layout in layouts)

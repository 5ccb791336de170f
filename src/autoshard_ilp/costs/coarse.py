"""Families of strategies that are those of a coarser mesh: two axes are one, or an axis is left alone.

Under a tight budget the best plan is often one of few axes, or one in which two axes go together throughout. No step
that changes one decision at a time leads there from another plan, but among these strategies alone it is found soon.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.sharding import WHOLE
from autoshard_ilp.strategies import Strategy

Family = list[np.ndarray]


def coarser(strategies: Sequence[Sequence[Strategy]], axis_sizes: Sequence[int]) -> list[Family]:
    """What is left of every decision on coarser meshes, the coarsest first.

    Args:
        strategies: of every decision.
        axis_sizes: of the mesh.

    Returns:
        families, each with one boolean array per decision; none for a mesh of one axis.
    """
    axes = [a for a, size in enumerate(axis_sizes) if size > 1]
    layouts = [_layouts(of_node, len(axis_sizes)) for of_node in strategies]
    found: list[Family] = []
    if len(axes) < 2:
        return found
    pairs = list(itertools.combinations(axes, 2))
    if len(axes) > 2:
        found.append([_together(at, axes) for at in layouts])
        found += [[_without(at, [b for b in axes if b != a]) for at in layouts] for a in axes]
    found += [[_together(at, pair) for at in layouts] for pair in pairs]
    found += [[_without(at, [a]) for at in layouts] for a in axes]
    return [family for family in found if all(kept.any() for kept in family) and not all(kept.all() for kept in family)]


def _layouts(strategies: Sequence[Strategy], n_axes: int) -> np.ndarray:
    """Per strategy, array it reads or makes, and mesh axis, the dimension that the axis splits."""
    rows = [[x for x in (*s.operands, *s.results, s.partial) if x is not None] for s in strategies]
    width = max(map(len, rows))
    filled = [[*row, *[(WHOLE,) * n_axes] * (width - len(row))] for row in rows]
    return np.array(filled, np.int64).reshape(len(rows), width, n_axes)


def _together(layouts: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Strategies in which some axes always split the same dimension."""
    return np.asarray((layouts[:, :, axes] == layouts[:, :, axes[:1]]).all((1, 2)))


def _without(layouts: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Strategies in which some axes split nothing."""
    return np.asarray((layouts[:, :, axes] == WHOLE).all((1, 2)))

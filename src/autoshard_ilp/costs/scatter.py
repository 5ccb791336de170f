"""Reduce-scatters over a whole TPU slice, in two stages.

XLA:TPU has an all-reduce that uses all dimensions of a torus at once, and prefers it, followed by a slice, to a
reduce-scatter over every chip of a slice of three dimensions, or of two equal ones from 4 x 4 on: twice the bytes, and
the unscattered sum is held. Over fewer chips it makes reduce-scatters. So the plan scatters over all mesh axes but the
smallest first, and over that one then, which sends the same bytes; where one mesh axis spans the slice, over two parts
of it. Of equal axes the last comes last: what is scattered then lies in front each time. Where it had to be moved
there, XLA:TPU kept the order in memory and all-reduced (GPT-2 on v5e 4x4, 5 % of the bytes). Found by compiling for v4,
v5e, v5p, v6e and 7x (libtpu 0.0.42; ``tests/test_scatter.py`` repeats some of it); 7x, with two devices per chip,
scatters by itself.
"""

from __future__ import annotations

from collections.abc import Sequence


def all_reduces(slice_shape: Sequence[int]) -> bool:
    """Whether XLA:TPU makes an all-reduce and a slice of a reduce-scatter over all chips of a slice.

    Args:
        slice_shape: chips along each axis of the torus, one device each; empty: no such slice.
    """
    lengths = [n for n in slice_shape if n > 1]
    return len(lengths) > 2 or (len(lengths) == 2 and lengths[0] == lengths[1] > 2)


def stages(axes: Sequence[int], axis_sizes: Sequence[int], slice_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Mesh axes of each reduce-scatter that together scatter over ``axes``.

    Args:
        axes: indices of mesh axes, ascending.
        axis_sizes: devices along every mesh axis.
        slice_shape: as in :func:`all_reduces`.

    Returns:
        One entry for each reduce-scatter, in order; just ``axes`` where one does.
    """
    real = [a for a in axes if axis_sizes[a] > 1]
    if len(real) < 2 or not spans_slice(axes, axis_sizes, slice_shape):
        return (tuple(axes),)
    last = min(real, key=lambda a: (axis_sizes[a], -a))
    return tuple(a for a in real if a != last), (last,)


def spans_slice(axes: Sequence[int], axis_sizes: Sequence[int], slice_shape: Sequence[int]) -> bool:
    """Whether the groups along mesh axes are all devices of a slice over which XLA:TPU would all-reduce."""
    return all_reduces(slice_shape) and all(size == 1 or a in axes for a, size in enumerate(axis_sizes))

"""Values brought from one layout to the next by the one collective that was priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard_ilp._jax_compat import platform_of
from autoshard_ilp.costs.tpu.tile_shape import ROWS, SHORT_ROWS
from autoshard_ilp.enforce import parts
from autoshard_ilp.enforce.parts import grown, mapped, reordered
from autoshard_ilp.sharding import (
    WHOLE,
    Layout,
    divides,
    shards_of_dims,
)

SENT_IN_PIECES = frozenset({"cpu"})
"""Platforms that cut the operand of an all-to-all into slices before arrays have layouts in memory. A slice of padding
then becomes a constant, one beside it what a transposition made, and XLA:CPU refuses operands laid out differently."""


def move(value: Any, before: Layout, after: Layout, mesh: Any, axis_names: Sequence[str]) -> Any | None:
    """A value brought from one layout to the next by one all-gather or all-to-all, its shards reordered where need be.

    Args:
        value: laid out as ``before`` says.
        before, after: layouts that differ in one step of :func:`autoshard_ilp.costs.reshard.steps`.
        mesh: ``jax.sharding.Mesh`` or ``AbstractMesh``.
        axis_names: the mesh axis behind each entry of a layout.

    Returns:
        The value in the layout ``after``; None where this is no such step, or a dimension does not divide.
    """
    import jax

    changed = [a for a, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    olds, news = {before[a] for a in changed}, {after[a] for a in changed}
    sizes = [mesh.shape[name] for name in axis_names]
    shape = tuple(value.shape)
    if len(olds) != 1 or len(news) != 1 or min(*olds, *(d for d in news if d != WHOLE), 0) < 0:
        return None
    old, new = olds.pop(), news.pop()
    if not divides(shape, before, sizes) or not divides(shape, after, sizes):
        shards = shards_of_dims(before, len(shape), sizes)
        larger = tuple(
            n if d in (old, new) else -(-n // k) * k for d, (n, k) in enumerate(zip(shape, shards, strict=True))
        )
        even = divides(larger, before, sizes) and divides(larger, after, sizes)
        if not even or platform_of(mesh) not in parts.FILLED_UP:
            return None
        moved = move(grown(value, larger), before, after, mesh, axis_names)
        return None if moved is None else moved[tuple(slice(n) for n in shape)]
    names = tuple(axis_names[a] for a in changed)
    n_devices, filled_up = math.prod(sizes[a] for a in changed), platform_of(mesh) in parts.FILLED_UP

    def orders(dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes on a dimension besides the changed ones: those last, as the collective needs it, and in mesh order."""
        stay = [a for a, d in enumerate(before) if d == dim and a not in changed]
        return (*stay, *changed), tuple(sorted((*stay, *changed)))

    def one_device(part: Any) -> Any:
        last, sorted_ = orders(old)
        part = reordered(part, sorted_, last, axis_names, sizes)
        if new == WHOLE:
            return _gathered(part, names, old, filled_up)
        if platform_of(mesh) in SENT_IN_PIECES:
            part = jax.lax.optimization_barrier(part)
        part = _exchanged(part, names, (old, new), n_devices, filled_up)
        last, sorted_ = orders(new)
        return reordered(part, last, sorted_, axis_names, sizes)

    return mapped(one_device, [value], [shape], [before], shape, after, mesh, axis_names)


def _in_tiles(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """A shape of which some dimensions are filled up to whole tiles: those of ``MANY_ROWS`` that fill no sublanes."""
    uneven = [d for d in dims if shape[d] >= parts.MANY_ROWS and shape[d] % ROWS]
    return [-(-n // SHORT_ROWS) * SHORT_ROWS if d in uneven else n for d, n in enumerate(shape)]


def _joined(pieces: Any, shape: Sequence[int], dim: int) -> Any:
    """Pieces of a shape, each one entry of the first dimension and perhaps filled up, joined along one of their own.

    A loop puts one after the other: cut and concatenated at once, XLA:TPU holds all of them once more.
    """
    import jax

    def put(i: Any, joined: Any) -> Any:
        piece = jax.lax.dynamic_index_in_dim(pieces, i, 0, keepdims=False)[tuple(slice(n) for n in shape)]
        return jax.lax.dynamic_update_slice_in_dim(joined, piece, i * shape[dim], axis=dim)

    whole = [len(pieces) * n if d == dim else n for d, n in enumerate(shape)]
    return jax.lax.fori_loop(0, len(pieces), put, jax.numpy.zeros(whole, pieces.dtype))


def _gathered(part: Any, names: tuple[str, ...], dim: int, filled_up: bool) -> Any:
    """All devices' parts joined along a dimension; ``filled_up``: sent in whole tiles where they have many rows."""
    import jax

    sent = _in_tiles(part.shape, [dim]) if filled_up else part.shape
    if tuple(sent) == part.shape:
        return jax.lax.all_gather(part, names, axis=dim, tiled=True)
    return _joined(jax.lax.all_gather(grown(part, sent), names, axis=0, tiled=False), part.shape, dim)


def _exchanged(part: Any, names: tuple[str, ...], dims: tuple[int, int], n_devices: int, filled_up: bool) -> Any:
    """One device's part cut along a dimension, and all devices' pieces for it joined along another.

    Args:
        part: what is cut.
        names: the mesh axes over which pieces go.
        dims: along which pieces are joined, and along which the part is cut.
        n_devices: along these axes.
        filled_up: whether pieces of many rows are sent in whole tiles.
    """
    import jax

    join, cut = dims
    piece = [n // n_devices if d == cut else n for d, n in enumerate(part.shape)]
    sent = _in_tiles(piece, dims) if filled_up else piece
    if sent == piece:
        return jax.lax.all_to_all(part, names, split_axis=cut, concat_axis=join, tiled=True)
    pieces = jax.numpy.stack([grown(p, sent) for p in jax.numpy.split(part, n_devices, axis=cut)])
    return _joined(jax.lax.all_to_all(pieces, names, split_axis=0, concat_axis=0, tiled=True), piece, join)

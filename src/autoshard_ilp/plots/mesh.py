"""Which part of a tensor lies on which device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Rectangle

from autoshard_ilp.arguments import string
from autoshard_ilp.display.records import find_leaf, itemsize, spec_text
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.plots import base, colours
from autoshard_ilp.plots.svg import short, shown_dims
from autoshard_ilp.sharding import Layout, local_bytes, local_shape, shards_of_dims

MAX_LABELLED = 64


def shard_index(device: Sequence[int], layout: Layout, rank: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Which shard of every dimension a device holds; the earlier of several mesh axes on a dimension is the major one.

    Args:
        device: its coordinate along every mesh axis.
    """
    index = [0] * rank
    for at, dim, size in zip(device, layout, axis_sizes, strict=True):
        if dim >= 0:
            index[dim] = index[dim] * size + at
    return tuple(index)


def mesh(plan: Any, path: str) -> base.PlanFigure:
    """See :meth:`autoshard_ilp.plots.Plots.mesh`."""
    string("path", path)
    leaf = find_leaf(plan, path)
    if not leaf.shape:
        raise InputShapeError(f"A scalar lies whole on every device. Received: {leaf.path!r}.")
    sizes, names = plan.mesh.axis_sizes, plan.mesh.axis_names
    shards = shards_of_dims(leaf.layout, len(leaf.shape), sizes)
    numbers = {index: i for i, index in enumerate(itertools.product(*map(range, shards)))}
    figure = base.new(9.0, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    held = local_bytes(leaf.shape, itemsize(leaf.dtype), leaf.layout, sizes)
    text = spec_text(leaf.layout, len(leaf.shape), names)
    part = "x".join(map(str, local_shape(leaf.shape, leaf.layout, sizes)))
    whole = "x".join(map(str, leaf.shape))
    base.heading(figure, f"{base.shortened(leaf.path, 70)}  {text}: {part} of {whole}, {short(held)} per device")
    _devices(left, leaf, plan.mesh, numbers)
    _tensor(right, leaf, shards, numbers)
    return figure


def _cell(axes: Any, x: float, y: float, w: float, h: float, number: int, count: int, label: str) -> None:
    colour = colours.shard(number, count)
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=colours.INK, linewidth=0.6))
    if label:
        size = base.FONT - 1
        axes.text(x + w / 2, y + h / 2, label, ha="center", va="center", fontsize=size, color="white")


def _devices(axes: Any, leaf: Any, mesh: Any, numbers: dict[tuple[int, ...], int]) -> None:
    """Devices by their coordinates: the last axis across, all others down, a gap where an outer one advances."""
    sizes, names = mesh.axis_sizes, mesh.axis_names
    columns = sizes[-1]
    rows = mesh.size // columns
    base.plain(axes, f"{mesh.size} devices, each with the part it holds", frame=())
    gap = 0.5
    inner = sizes[-2] if len(sizes) > 2 else rows
    labelled = mesh.size <= MAX_LABELLED
    for device in itertools.product(*map(range, sizes)):
        row = 0
        for at, size in zip(device[:-1], sizes[:-1], strict=True):
            row = row * size + at
        number = numbers[shard_index(device, leaf.layout, len(leaf.shape), sizes)]
        y = row + gap * (row // inner)
        _cell(axes, device[-1], y, 0.92, 0.92, number, len(numbers), str(number) if labelled else "")
    axes.set_xlim(-0.1, columns)
    axes.set_ylim(rows + gap * ((rows - 1) // inner) + 0.05, -0.15)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(f"{names[-1]} = {sizes[-1]}")
    axes.set_ylabel(", ".join(f"{n} = {s}" for n, s in zip(names[:-1], sizes[:-1], strict=True)))


def _tensor(axes: Any, leaf: Any, shards: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> None:
    """The tensor's one or two dimensions that are cut most, in the colours of the devices that hold the parts."""
    dims = shown_dims(leaf.shape, shards)
    rows, columns = (1, shards[dims[0]]) if len(dims) == 1 else (shards[dims[0]], shards[dims[1]])
    count = math.prod(shards)
    hidden = count // (rows * columns)
    title = "the tensor, whole" if count == 1 else f"the tensor, cut into {count} parts"
    base.plain(axes, title + (f" ({hidden} of them behind each)" if hidden > 1 else ""), frame=())
    for r, c in itertools.product(range(rows), range(columns)):
        index = [0] * len(shards)
        index[dims[-1]] = c
        if len(dims) == 2:
            index[dims[0]] = r
        number = numbers[tuple(index)]
        label = str(number) if rows * columns <= MAX_LABELLED and rows <= 16 and columns <= 16 else ""
        _cell(axes, c / columns, r / rows, 1 / columns, 1 / rows, number, len(numbers), label)
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(1.02 if len(dims) == 2 else 2.5, -0.02)
    axes.set_xticks([])
    axes.set_yticks([])
    if len(dims) == 2:
        axes.set_ylabel(f"dimension {dims[0]} ({leaf.shape[dims[0]]})")
    axes.set_xlabel(f"dimension {dims[-1]} ({leaf.shape[dims[-1]]})")

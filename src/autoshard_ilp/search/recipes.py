"""Storage as people write it by hand: which layouts each variable and each input may have.

What happens inside the step is left to the solver. :mod:`autoshard_ilp.baselines` describes the recipes and plans by
one of them; :mod:`autoshard_ilp.search.kinds` looks for first plans among them where memory binds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.pins import Allowed
from autoshard_ilp.sharding import WHOLE, Layout, divides, divisible_layouts, replicated

Shape = tuple[int, ...]

SMALL_ELEMENTS = 1024
SMALL_VECTOR_ELEMENTS = 1 << 16

WEIGHTS = ("parameter", "non_trainable")
_BATCH = ("input", "target", "sample_weight")


@dataclass(frozen=True)
class Restriction:
    """Allowed layouts per path, and what of the strategy could not be kept."""

    allowed: Allowed
    notes: tuple[str, ...] = ()

    def of_paths(self, shapes: Mapping[str, Shape]) -> Allowed:
        """The restriction as the planner asks for it: only paths that exist in the step."""
        return {path: layouts for path, layouts in self.allowed.items() if path in shapes}


def is_small(shape: Shape) -> bool:
    """Whether gathering a tensor costs more latency than sharding it saves memory: biases, scales, tiny kernels."""
    elements = math.prod(shape)
    vector = sum(n > 1 for n in shape) < 2
    return elements < (SMALL_VECTOR_ELEMENTS if vector else SMALL_ELEMENTS)


def widest(shape: Shape, axes: Sequence[int], axis_sizes: tuple[int, ...], dims: Iterable[int]) -> frozenset[Layout]:
    """Layouts that put as many of ``axes`` as divide jointly on one of ``dims``: the largest such dimension.

    Args:
        axes: mesh axes to use, by index; a subset with the most devices is used where all of them do not divide.
        dims: dimensions to choose from; equally large ones are all allowed.
    """
    dims = [d for d in dims if shape[d] > 1]
    usable = [a for a in axes if axis_sizes[a] > 1]
    best: tuple[int, int] = (1, 0)
    found = {replicated(len(axis_sizes))}
    for count in range(len(usable), 0, -1):
        for chosen in itertools.combinations(usable, count):
            for dim in dims:
                layout = tuple(dim if a in chosen else WHOLE for a in range(len(axis_sizes)))
                rank = (math.prod(axis_sizes[a] for a in chosen), shape[dim])
                if rank < best or not divides(shape, layout, axis_sizes):
                    continue
                found = {layout} if rank > best else found | {layout}
                best = rank
    return frozenset(found)


def restrict(
    traced: Any,
    mesh: MeshSpec,
    *,
    batch_axes: Sequence[int],
    weight: Callable[[Any], frozenset[Layout]],
    slot: Callable[[Any], frozenset[Layout]],
    notes: tuple[str, ...] = (),
) -> Restriction:
    """Weights by ``weight``, optimizer slots by ``slot``, the batch over ``batch_axes``, everything else whole."""
    sizes = mesh.axis_sizes
    whole = frozenset({replicated(len(sizes))})
    allowed: dict[str, frozenset[Layout]] = {}
    for info in traced.arguments:
        if info.role in WEIGHTS:
            allowed[info.path] = weight(info)
        elif info.role == "optimizer":
            allowed[info.path] = slot(info)
        elif info.role in _BATCH:
            # An input without the batch in front (a lookup table, say) belongs to no strategy: it stays free.
            if not info.shape or info.shape[0] == traced.batch_size:
                allowed[info.path] = widest(info.shape, batch_axes, sizes, range(min(1, len(info.shape))))
        else:
            allowed[info.path] = whole
    return Restriction(allowed, notes)


def _all_axes(mesh: MeshSpec) -> range:
    return range(len(mesh.axis_sizes))


def other_axes(mesh: MeshSpec) -> range:
    """All axes but the last, the "model" axis."""
    return range(len(mesh.axis_sizes) - 1)


def _whole(mesh: MeshSpec) -> Callable[[Any], frozenset[Layout]]:
    return lambda info: frozenset({replicated(len(mesh.axis_sizes))})


def _fully_sharded(mesh: MeshSpec) -> Callable[[Any], frozenset[Layout]]:
    def layouts(info: Any) -> frozenset[Layout]:
        if is_small(info.shape):
            return frozenset({replicated(len(mesh.axis_sizes))})
        return widest(info.shape, _all_axes(mesh), mesh.axis_sizes, range(len(info.shape)))

    return layouts


def data_parallel(traced: Any, mesh: MeshSpec) -> Restriction:
    return restrict(traced, mesh, batch_axes=_all_axes(mesh), weight=_whole(mesh), slot=_whole(mesh))


def fsdp(traced: Any, mesh: MeshSpec) -> Restriction:
    sharded = _fully_sharded(mesh)
    return restrict(traced, mesh, batch_axes=_all_axes(mesh), weight=sharded, slot=sharded)


def zero1(traced: Any, mesh: MeshSpec) -> Restriction:
    return restrict(traced, mesh, batch_axes=_all_axes(mesh), weight=_whole(mesh), slot=_fully_sharded(mesh))


def megatron(traced: Any, mesh: MeshSpec) -> Restriction:
    others = other_axes(mesh)

    def layouts(info: Any) -> frozenset[Layout]:
        options = divisible_layouts(tuple(info.shape), mesh.axis_sizes)
        return frozenset(lay for lay in options if all(lay[a] == WHOLE for a in others))

    return restrict(traced, mesh, batch_axes=others, weight=layouts, slot=layouts)


def fsdp_megatron(traced: Any, mesh: MeshSpec) -> Restriction:
    others = other_axes(mesh)

    def spread(layout: Layout) -> int:
        return math.prod(mesh.axis_sizes[a] for a in others if layout[a] != WHOLE)

    def layouts(info: Any) -> frozenset[Layout]:
        options = divisible_layouts(tuple(info.shape), mesh.axis_sizes)
        if is_small(info.shape):
            return frozenset(options)
        most = max(spread(lay) for lay in options)
        return frozenset(lay for lay in options if spread(lay) == most)

    return restrict(traced, mesh, batch_axes=others, weight=layouts, slot=layouts)


Recipe = Callable[[Any, MeshSpec], Restriction]
"""Of a traced step and a mesh."""

RECIPES: Mapping[str, Recipe] = {
    "data_parallel": data_parallel,
    "fsdp": fsdp,
    "zero1": zero1,
    "megatron": megatron,
    "fsdp+megatron": fsdp_megatron,
}

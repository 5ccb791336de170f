"""Strategies: every way to lay one operation over all mesh axes jointly.

A strategy assigns each mesh axis to at most one factor of the operation's rule. Sharding a pass-through factor shards
the dimensions it leads. Sharding a reduction factor leaves partial results, resolved over that axis either by
all-reduce or by reduce-scatter onto a dimension of the result; both are strategies. Halo exchange (permutation factors)
is not planned: such dimensions stay whole.

A sum may read partial results and reduce them in one go, and what only a sum reads may stay partial; which operations
that concerns is told by :mod:`autoshard_ilp.deferral`.

Several axes on one dimension are always major to minor in mesh order, so a reduce-scatter that lands where a later axis
already shards the dimension leaves the shards in another order; a permute of the scattered shards follows, which only
operations that run device by device can make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.deferral import NONE, Deferral
from autoshard_ilp.rules.rule import Kind, Rule
from autoshard_ilp.sharding import PARTIAL, WHOLE, Layout, Together, divides, jointly, reordered_axes

UNEVEN_WASTE = 1.125
"""A dimension that does not divide may still be sharded inside the step when padding adds at most this factor."""


_SUMMED = "+"
"""Stands for a factor in an assignment: over this mesh axis every operand arrives as partial sums."""


@dataclass(frozen=True)
class Resolution:
    """How partial results over ``axes`` are combined: "all-reduce", or "reduce-scatter" onto dimension ``dim``.

    A "collective-permute" puts the shards of ``dim`` in the order of the mesh after a scatter onto it.
    """

    kind: str
    axes: tuple[int, ...]
    dim: int = WHOLE


@dataclass(frozen=True)
class Strategy:
    """One way to run an operation.

    Attributes:
        operands: layout each operand must have; None where the operand is not read (a hub that reuses a copy).
        results: layout of each result once partial results are resolved.
        partials: layout of the first result before that (equal to ``results[0]`` when nothing is partial).
        resolutions: collectives that resolve partial results, in order.
        fraction: share of the operation's whole work done by one device, padding included.
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    partial: Layout | None = None
    resolutions: tuple[Resolution, ...] = ()
    fraction: float = 1.0


def strategies_of(
    rule: Rule,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    axis_sizes: tuple[int, ...],
    *,
    even: bool = False,
    deferral: Deferral = NONE,
    together: Together = (),
) -> list[Strategy]:
    """All strategies of an operation, without duplicates, the replicated one first.

    Args:
        rule: its sharding rule.
        operand_shapes, result_shapes: whole shapes.
        axis_sizes: devices along each mesh axis.
        even: only layouts whose dimensions divide (arguments and results of ``jax.jit``).
        deferral: whether operands may arrive as partial sums and the result may stay partial.
        together: groups of mesh axes that are assigned to the same factor, and scattered onto the same dimension.
    """
    places = _places(rule)
    found: dict[tuple, Strategy] = {}
    for assignment in _assignments(rule, places, axis_sizes, even, deferral.reads, together):
        operands = tuple(_layout(dims, assignment, PARTIAL) for dims in rule.operands)
        results = tuple(_layout(dims, assignment) for dims in rule.results)
        fraction = _fraction(rule, assignment, axis_sizes)
        partial_axes = [a for a, f in enumerate(assignment) if f is not None and _is_partial(rule, f)]
        fits = all(divides(n, lay, axis_sizes) for n, lay in zip(operand_shapes, operands, strict=True))
        after: tuple[Any, ...]
        if deferral.resolves or _SUMMED not in assignment:
            for resolutions, first in _resolutions(
                rule, assignment, partial_axes, results, result_shapes, axis_sizes, deferral.local and fits, together
            ):
                after = (first, *results[1:]) if results else results
                key = (operands, after, resolutions)
                if key not in found:
                    found[key] = Strategy(operands, after, results[0] if results else None, resolutions, fraction)
        if deferral.leaves and fits and partial_axes and _all_add(rule, assignment, partial_axes):
            left = tuple(PARTIAL if a in partial_axes else dim for a, dim in enumerate(results[0]))
            after = (left, *results[1:])
            found.setdefault((operands, after, ()), Strategy(operands, after, left, (), fraction))
    return list(found.values())


def _is_partial(rule: Rule, factor: str) -> bool:
    return factor == _SUMMED or rule.factors[factor].kind is Kind.REDUCTION


def _all_add(rule: Rule, assignment: Sequence[str | None], axes: Sequence[int]) -> bool:
    factors = [assignment[a] or "" for a in axes]
    return all(f == _SUMMED or rule.factors[f].combine == "add" for f in factors)


def choices_per_axis(rule: Rule, deferral: Deferral = NONE) -> int:
    """What one mesh axis can be assigned to in the strategies of an operation, nothing included."""
    return 1 + len(_places(rule)) + deferral.reads


def hub_strategies(
    shape: tuple[int, ...], axis_sizes: tuple[int, ...], *, may_reuse: bool, together: Together = ()
) -> list[Strategy]:
    """Strategies of a hub: a fresh copy in any layout, or (``may_reuse``) the copy the forward pass already made."""
    layouts = layouts_of(shape, axis_sizes, together)
    fresh = [Strategy((layout,), (layout,), layout) for layout in layouts]
    return fresh + [Strategy((None,), (layout,), layout) for layout in layouts] if may_reuse else fresh


def layouts_of(shape: tuple[int, ...], axis_sizes: tuple[int, ...], together: Together = ()) -> tuple[Layout, ...]:
    """Every layout a tensor may have inside the step: divisible ones and those worth their padding."""
    choices = [(WHOLE,) if size == 1 else (WHOLE, *range(len(shape))) for size in axis_sizes]
    found = jointly(choices, together)
    return tuple(x for x in found if divides(shape, x, axis_sizes) or _worth_padding(shape, x, axis_sizes))


def _worth_padding(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    shards = [1] * len(shape)
    for dim, size in zip(layout, axis_sizes, strict=True):
        if dim != WHOLE:
            shards[dim] *= size
    return all(_size_fits(n, s, True) for n, s in zip(shape, shards, strict=True))


def _size_fits(size: int, shards: int, uneven: bool) -> bool:
    if size % shards == 0:
        return True
    return uneven and -(-size // shards) * shards <= UNEVEN_WASTE * size


def _places(rule: Rule) -> dict[str, bool]:
    """Shardable factors, each with whether it may be padded: alone in every dimension and not to be even."""
    alone = {
        name: not f.even for name, f in rule.factors.items() if f.kind in (Kind.PASS, Kind.REDUCTION) and f.size > 1
    }
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for position, name in enumerate(dim):
                if position > 0:
                    alone.pop(name, None)
                elif len(dim) > 1 and name in alone:
                    alone[name] = False
    return alone


def _assignments(
    rule: Rule, places: dict[str, bool], axis_sizes: Sequence[int], even: bool, summed: bool, together: Together
) -> Iterator[tuple[str | None, ...]]:
    names = (None, *places, _SUMMED) if summed else (None, *places)
    choices = [(None,) if size == 1 else names for size in axis_sizes]
    for assignment in jointly(choices, together):
        shards: dict[str, int] = {}
        for name, size in zip(assignment, axis_sizes, strict=True):
            if name is not None and name != _SUMMED:
                shards[name] = shards.get(name, 1) * size
        if all(_size_fits(rule.factors[f].size, n, places[f] and not even) for f, n in shards.items()):
            yield assignment


def _layout(dims: Sequence[tuple[str, ...]], assignment: Sequence[str | None], summed: int = WHOLE) -> Layout:
    where = {dim[0]: i for i, dim in enumerate(dims) if dim}
    where[_SUMMED] = summed
    return tuple(WHOLE if f is None else where.get(f, WHOLE) for f in assignment)


def _fraction(rule: Rule, assignment: Sequence[str | None], axis_sizes: Sequence[int]) -> float:
    shards: dict[str, int] = {}
    for name, size in zip(assignment, axis_sizes, strict=True):
        if name is not None and name != _SUMMED:
            shards[name] = shards.get(name, 1) * size
    return math.prod(-(-rule.factors[f].size // n) / rule.factors[f].size for f, n in shards.items())


def _resolutions(
    rule: Rule,
    assignment: Sequence[str | None],
    partial_axes: Sequence[int],
    results: Sequence[Layout],
    result_shapes: Sequence[tuple[int, ...]],
    axis_sizes: Sequence[int],
    local: bool = False,
    together: Together = (),
) -> Iterator[tuple[tuple[Resolution, ...], Layout | None]]:
    """Every way to resolve partial results, with the first result's layout afterwards.

    Where the operation runs device by device (``local``), several dimensions may be scattered onto, and one that a
    later axis shards already; else XLA would all-reduce.
    """
    if not partial_axes or not results:
        yield (), results[0] if results else None
        return
    adds = _all_add(rule, assignment, partial_axes)
    rank = len(result_shapes[0])
    targets: tuple[int, ...] = (WHOLE, *range(rank)) if adds and len(results) == 1 else (WHOLE,)
    groups = [[partial_axes.index(a) for a in group] for group in together if group[0] in partial_axes]
    for choice in jointly([targets] * len(partial_axes), groups):
        layout = list(results[0])
        for axis, dim in zip(partial_axes, choice, strict=True):
            layout[axis] = dim
        if len(set(choice) - {WHOLE}) > 1 and not (local and divides(result_shapes[0], tuple(layout), axis_sizes)):
            continue
        scattered = [a for a in partial_axes if layout[a] != WHOLE]
        if not _scatter_fits(tuple(layout), scattered, result_shapes[0], axis_sizes):
            continue
        by_dim: dict[int, list[int]] = {}
        for axis, dim in zip(partial_axes, choice, strict=True):
            by_dim.setdefault(dim, []).append(axis)
        scatters: list[Resolution] = []
        for dim in sorted(by_dim.keys() - {WHOLE}):
            scatters.append(Resolution("reduce-scatter", tuple(by_dim[dim]), dim))
            order = reordered_axes(by_dim[dim], tuple(layout), dim)
            scatters += [Resolution("collective-permute", order, dim)] if order else []
        if not local and any(r.kind == "collective-permute" for r in scatters):
            continue
        reduce = [Resolution("all-reduce", tuple(by_dim[WHOLE]))] if WHOLE in by_dim else []
        yield (*scatters, *reduce), tuple(layout)


def _scatter_fits(layout: Layout, scattered: Sequence[int], shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """A reduce-scatter needs an evenly divided dimension."""
    if not scattered:
        return True
    onto = {layout[a] for a in scattered}
    return divides(shape, tuple(d if d in onto else WHOLE for d in layout), axis_sizes)

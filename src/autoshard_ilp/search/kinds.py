"""Plans of coarser meshes, and of the kinds that people write by hand: starts where memory binds.

The best plan within a budget is often like one of a coarser mesh, most so of that which the best plan without a budget
is most like. Or else, once it is settled how weights and optimizer slots are stored, little is left of what memory has
to choose between. Either program is solved in a part of the time: prices alone may need minutes to find a plan that is
as good. The best plan lies elsewhere as a rule, but close to one of these, and is looked for from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.pins import class_masks, path_shapes
from autoshard_ilp.program.rows.families import restricted
from autoshard_ilp.search.recipes import RECIPES

Kept = Sequence[np.ndarray]
"""Per decision, the strategies that are left (bool)."""

KINDS = ("fsdp+megatron", "megatron", "fsdp", "zero1")
"""Recipes, in the order in which they are tried."""

PART = 0.6
"""Of the time left: what one kind may take."""

LEAST_SECONDS = 1.5
"""In less, no kind shows anything."""

NEARLY = 0.95
"""Share of a plan's choices that are those of a coarser mesh, from which on it is nearly one."""

GAP = 0.01
"""Relative gap to its bound of a plan of some kind that will do."""


@dataclass(frozen=True)
class Kind:
    """A program with some of the strategies, solved as one of its own."""

    program: Any


def kinds_of(table: Any, program: Any, infos: Any, mesh: Any) -> Iterator[Kept]:
    """The kinds of a training step, each once; what pins leave nothing of stays free.

    Args:
        table: cost table of the step.
        program: built from it.
        infos: the trace, with ``arguments`` and ``batch_size``; of a function, there are no kinds.
        mesh: its :class:`~autoshard_ilp.mesh.MeshSpec`.
    """
    if not getattr(infos, "batch_size", 0) or not any(info.role == "optimizer" for info in infos.arguments):
        return
    shapes, seen = path_shapes(table.graph), set[bytes]()
    whole = [np.ones(len(node.costs), bool) for node in program.nodes]
    for name in KINDS:
        masks = class_masks(table, RECIPES[name](infos, mesh).of_paths(shapes))
        if masks is None:
            continue
        kept = [*whole]
        for index, mask in masks.items():
            kept[index] = mask if mask.any() else whole[index]
        key = b"".join(np.packbits(mask).tobytes() for mask in kept)
        if key not in seen:
            seen.add(key)
            yield kept


def kinds_like(
    table: Any, program: Any, infos: Any, mesh: Any, like: np.ndarray | None, least: float
) -> Iterator[Kept]:
    """Plans of coarser meshes, of which at least so large a share of the choices of a plan ``like`` them is, and those
    of :func:`kinds_of`, whose other arguments these are.

    Of coarser meshes that are to be like the plan the first goes ahead: the recipes, which are next, take little time
    each, since memory is settled by them. All coarser meshes go ahead where any will do (``least`` 0): of a program
    that has so many strategies, recipes leave too many.
    """
    coarser = [] if like is None else list(of_coarser_meshes(program, like, least))
    ahead = 1 if least else len(coarser)
    yield from coarser[:ahead]
    yield from kinds_of(table, program, infos, mesh)
    yield from coarser[ahead:]


def of_coarser_meshes(program: Any, choices: np.ndarray, least: float = 0.0) -> Iterator[Kept]:
    """What coarser meshes leave (:mod:`autoshard_ilp.costs.coarse`), those first that a plan is most like.

    Args:
        program: the whole one.
        choices: of the plan; it need not fit.
        least: share of its choices that are also those of the coarser mesh.
    """

    def share(kept: Kept) -> float:
        return sum(bool(mask[s]) for mask, s in zip(kept, choices, strict=True)) / len(choices)

    families = [] if program.families is None else program.families()
    known = sorted(((share(kept), -number) for number, kept in enumerate(families)), reverse=True)
    yield from (families[-number] for part, number in known if part >= least)


def better_of_its_kind(
    program: Any, kinds: Iterator[Kept], solve: Callable[..., Any], choices: np.ndarray, seconds: float
) -> tuple[np.ndarray, bool]:
    """A plan of some kind, or a better one of the first kind that it is of, and whether that was interrupted.

    Args:
        program: the whole one.
        kinds: what each leaves of it.
        solve: (problem, start, seconds, further keywords) -> solution.
        choices: of the plan.
        seconds: most of them.
    """
    for kept in kinds:
        if all(mask[s] for mask, s in zip(kept, choices, strict=True)):
            start = np.array([int(mask[:s].sum()) for mask, s in zip(kept, choices, strict=True)])
            found = solve(Kind(restricted(program, kept)), start, seconds, relative_gap=GAP)
            better = choices if found.choices is None else whole_choices(kept, found.choices)
            return better, bool(found.report.get("interrupted"))
    return choices, False


def whole_choices(kept: Kept, choices: np.ndarray) -> np.ndarray:
    """Choices among the strategies that are left, as ones among all."""
    return np.array([np.flatnonzero(k)[s] for k, s in zip(kept, choices, strict=True)])


def starts_of_kinds(
    program: Any,
    kinds: Iterator[Kept],
    solve: Callable[..., Any],
    seconds: float,
    clock: Callable[[], float],
    cutoff: float,
    one: bool = False,
    good: float = -math.inf,
) -> tuple[list[np.ndarray], bool]:
    """The best plans of some kinds, each better than those before, and whether that was interrupted.

    Args:
        program: the whole one.
        kinds: what each leaves of it.
        solve: (problem, start, seconds, further keywords) -> solution.
        seconds: for all of them.
        clock: seconds that only grow.
        cutoff: objective, in seconds, that plans have to be below.
        one: the first such plan will do.
        good: objective, in seconds, of a plan that will do.
    """
    until, plans = clock() + seconds, list[np.ndarray]()
    for kept in kinds:
        part = PART * (until - clock())
        if part < LEAST_SECONDS:
            break
        found = solve(Kind(restricted(program, kept)), None, part, cutoff=cutoff, relative_gap=GAP)
        if found.choices is not None and found.objective < cutoff:
            cutoff = float(found.objective)
            plans.append(whole_choices(kept, found.choices))
        if found.report.get("interrupted"):
            return plans, True
        if plans and (one or cutoff <= good):
            break
    return plans, False

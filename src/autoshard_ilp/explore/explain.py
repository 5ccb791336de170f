"""``plan.explain``: why a tensor lies as it does.

For every layout that the tensor could have, the integer program is solved again with that layout demanded: the cost of
the best plan that uses it (its *min-marginal*). The chosen layout is right because no other has a cheaper one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard_ilp.arguments import number, string
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.again import (
    Known,
    Problem,
    adapted,
    known_from,
    need_paths,
    problem_of,
    reprice,
    solved,
)
from autoshard_ilp.explore.differences import Difference, collective_differences
from autoshard_ilp.explore.soon import put_together
from autoshard_ilp.pins import class_masks, path_shapes
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.axes import joined_names
from autoshard_ilp.sharding import Layout, divisible_layouts, keeps_together, to_partition_spec

SHOWN_DIFFERENCES = 2


NEARLY_FULL = 0.9
"""Of the budget: a plan that takes more may be slower than one that recomputes more, or less."""


@dataclass(frozen=True, eq=False)
class Alternative:
    """One layout of the tensor, and the best plan that uses it.

    Attributes:
        spec: as ``jax.sharding.PartitionSpec``.
        chosen: whether it is the plan's own.
        total_s: predicted seconds of a step of the best plan found, in which other repeated layers share decisions as
            in the plan; inf when none was.
        lower_bound_s: no plan with this layout is faster.
        proof: "exact": ``total_s`` is proved; "bounded": it lies between ``lower_bound_s`` and ``total_s``;
            "infeasible": no plan with this layout fits the budget and the other pins.
        compute_s, communication_s: the two parts of ``total_s``.
        peak_bytes: per device.
        differences: collectives that this plan has more (or fewer) of than the plan explained.
    """

    spec: Any
    layout: Layout
    chosen: bool
    total_s: float
    lower_bound_s: float
    proof: str
    compute_s: float = math.nan
    communication_s: float = math.nan
    peak_bytes: int = 0
    differences: tuple[Difference, ...] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a tensor (or several that are laid out together) lies as it does.

    Attributes:
        paths: what is explained; all lie the same way in every alternative.
        shape, dtype: of each.
        total_s, communication_s, peak_bytes: of the plan.
        objective: what the plan minimises.
        alternatives: every layout, the plan's own first, then the cheapest first.
        notes: what else to know.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    total_s: float
    communication_s: float
    peak_bytes: int
    objective: str
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Alternative:
        """The plan's own layout."""
        return next(a for a in self.alternatives if a.chosen)

    def rows(self) -> list[dict[str, Any]]:
        """One record per alternative; times in seconds, ``extra_s`` against the plan."""
        return [
            {
                "layout": show.spec_text(a.spec, len(self.shape)),
                "chosen": a.chosen,
                "total_s": a.total_s,
                "extra_s": a.total_s - self.total_s,
                "lower_bound_s": a.lower_bound_s,
                "proof": a.proof,
                "compute_s": a.compute_s,
                "communication_s": a.communication_s,
                "peak_bytes": a.peak_bytes,
                "why": "; ".join(map(str, a.differences[:SHOWN_DIFFERENCES])),
            }
            for a in self.alternatives
        ]

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        return show.dataframe(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; every difference is listed."""
        records = []
        for row, a in zip(self.rows(), self.alternatives, strict=True):
            numbers = {k: show.finite(v) if isinstance(v, float) else v for k, v in row.items() if k != "why"}
            differences = [d.__dict__ | {"mesh_axes": list(d.mesh_axes)} for d in a.differences]
            records.append({**numbers, "spec": show.plain_spec(a.spec), "differences": differences})
        return {
            "paths": list(self.paths),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "objective": self.objective,
            "total_s": self.total_s,
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
            "alternatives": records,
        }

    def text(self, width: int | None = None, *, only_ascii: bool = False) -> str:
        """The explanation as plain text."""
        from autoshard_ilp.explore.explain_text import text

        return text(self, width or 100, only_ascii=only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(120))


def explain(plan: Plan, path: str, *, time_limit: float = 60.0, progress: Any = None) -> Explanation:
    """Why a tensor lies as it does: every layout that it could have, with the cost of the best plan that uses it.

    The answer for a layout is that of ``plan.what_if(pins={path: layout})``, under the plan's own rematerialisation
    policy. A pin on the tensor itself is lifted, so that its price shows.

    Args:
        plan: made by this process, or bound to its model.
        path: of a variable, an input or an output; or a regular expression, whose finds are then laid out together.
        time_limit: seconds for all layouts together. One that is not proved in its share is "bounded".
        progress: as for ``optimize``.

    Raises:
        InputShapeError: nothing is found, or tensors of different shapes.
        UnsupportedModelError: the plan came from a file and is not bound to its model.
    """
    from autoshard_ilp.explore.whatif import with_trail

    string("path", path)
    number("time_limit", time_limit, 0.0, math.inf)
    plan = with_trail(plan)
    problem = problem_of(plan)
    leaves = matching_leaves(plan, path)
    paths = tuple(leaf.path for leaf in leaves)
    layouts = divisible_layouts(leaves[0].shape, plan.mesh.axis_sizes)
    own = leaves[0].layout
    with Progress(progress).running() as shown:
        base, notes = _base(problem, paths, layouts, shown)
        together = base.table.together
        if together:
            layouts = tuple(x for x in layouts if x == own or keeps_together(x, together))
            notes = (*notes, f"Not looked at: layouts that use only one of {joined_names(base.table)}.")
        known = _translated(plan, base)
        order = sorted(layouts, key=lambda layout: layout != own)
        deadline = clock() + time_limit
        found = []
        for position, layout in enumerate(order):
            share = max(0.0, deadline - clock()) / (len(order) - position)
            try:
                found.append(_alternative(plan, base, known, paths, layout, layout == own, share, shown))
            except KeyboardInterrupt:
                if not found:  # the plan's own layout comes first
                    raise
                notes = (*notes, f"Interrupted: {len(order) - position} other layouts were not looked at.")
                break
    room = problem.request.capacity
    short = room is not None and any(a.proof == "infeasible" or a.peak_bytes > NEARLY_FULL * room for a in found)
    if short and len(plan.trail.policies) > 1:  # type: ignore[union-attr]
        policy = f"All lines recompute what the plan does ({plan.remat_policy}); another policy may be faster with one."
        notes = (*notes, f"{policy} plan.what_if(pins=...) tries them.")
    found.sort(key=lambda a: (not a.chosen, a.proof == "infeasible", a.total_s))
    return Explanation(
        paths,
        leaves[0].shape,
        leaves[0].dtype,
        plan.cost.total_s,
        plan.cost.communication_s,
        plan.memory.peak_bytes,
        plan.objective,
        tuple(found),
        notes,
    )


def matching_leaves(plan: Plan, path: str) -> list[Any]:
    """Arguments and results that a path names or a regular expression finds, once each, all of one shape.

    Raises:
        InputShapeError: none, or of different shapes.
    """
    by_path = {leaf.path: leaf for leaf in (*plan.results, *plan.arguments)}
    if path in by_path:
        return [by_path[path]]
    try:
        pattern = re.compile(path)
    except (re.error, TypeError) as error:
        raise InputShapeError(f"A path or a regular expression names a tensor. Received: {path!r} ({error}).") from None
    found = [leaf for name, leaf in by_path.items() if pattern.search(name)]
    if not found:
        raise need_paths(path, list(by_path))
    shapes = sorted({leaf.shape for leaf in found})
    if len(shapes) > 1:
        names = ", ".join(next(leaf.path for leaf in found if leaf.shape == s) for s in shapes[:4])
        raise InputShapeError(
            f"Tensors explained together have one shape. Received: {path!r}, which finds {len(found)} of shapes "
            f"{', '.join(map(str, shapes[:4]))}, such as {names}. Narrow it; $ ends a path."
        )
    return found


def _base(
    problem: Problem, paths: Sequence[str], layouts: Sequence[Layout], progress: Progress
) -> tuple[Problem, tuple[str, ...]]:
    """The problem with these tensors free, and with decisions of their own where they shared one with others."""
    notes = []
    allowed = {p: a for p, a in problem.allowed.items() if p not in paths}
    if len(allowed) < len(problem.allowed):
        notes.append("A pin on it is lifted for the alternatives.")
    request = _restricted(problem.request, allowed)
    base = adapted(problem, request, progress)
    every = dict.fromkeys(paths, frozenset(layouts))
    if class_masks(base.table, every) is None:
        notes.append("Other layers share its decision in the plan; here they decide for themselves.")
        base = reprice(problem.step, problem.infos, _restricted(problem.request, {**allowed, **every}), progress)
    return base, tuple(notes)


def _restricted(request: Any, allowed: Any) -> Any:
    return replace(request, pins=None, restriction=lambda shapes: allowed)


def _translated(plan: Plan, base: Problem) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The plan's assignment in the base problem's table, and the best one without a budget where that is known.

    None where a strategy is not found again.
    """
    trail = plan.trail
    assert trail is not None
    old, relaxed = trail.costs, trail.solution.report.get("relaxed")
    if relaxed is not None and len(relaxed) != len(old.classes):
        relaxed = None
    if base.table is old:
        return trail.solution.choices, relaxed

    def again(choices: np.ndarray) -> np.ndarray | None:
        chosen = []
        for cls in base.table.classes:
            before = int(old.class_of[cls.members[0]])
            strategy = old.classes[before].strategies[choices[before]]
            if strategy not in cls.strategies:
                return None
            chosen.append(cls.strategies.index(strategy))
        return np.array(chosen, np.int64)

    return again(trail.solution.choices), None if relaxed is None else again(relaxed)


def _alternative(
    plan: Plan,
    base: Problem,
    known_plans: tuple[np.ndarray | None, np.ndarray | None],
    paths: Sequence[str],
    layout: Layout,
    chosen: bool,
    seconds: float,
    progress: Progress,
) -> Alternative:
    from autoshard_ilp.report import planned_collectives, total_cost

    trail = plan.trail
    assert trail is not None
    allowed = {**base.allowed, **dict.fromkeys(paths, frozenset({layout}))}
    request = _restricted(base.request, allowed)
    request = replace(request, solver=replace(request.solver, time_limit=seconds, relative_gap=0.0))
    problem = adapted(base, request, progress)
    same_table = base.table is trail.costs
    start, relaxed = known_plans if problem.table is base.table else (None, None)
    known = Known(() if start is None else (start,))
    if same_table and problem.table is base.table:
        known = known_from(trail.solution, problem_of(plan), problem)
    prices = trail.solution.report.get("prices")
    if prices and start is not None and relaxed is not None:
        found, _ = put_together(problem, [relaxed, start], prices, progress)
        known = known if found is None else replace(known, plans=(*known.plans, found))
    solution = solved(problem, progress, known)
    spec = to_partition_spec(layout, _rank(base, paths[0]), plan.mesh.axis_names)
    if solution.choices is None:
        proof = "infeasible" if solution.status == "infeasible" else "bounded"
        bound = math.inf if proof == "infeasible" else max(solution.lower_bound, known.lower_bound)
        return Alternative(spec, layout, chosen, math.inf, bound, proof)
    collectives = planned_collectives(problem.table, solution.choices)
    cost = total_cost(problem.table, solution.choices, collectives)
    return Alternative(
        spec,
        layout,
        chosen,
        cost.total_s,
        cost.total_s if solution.status == "optimal" else solution.lower_bound,
        "exact" if solution.status == "optimal" else "bounded",
        cost.compute_s,
        cost.communication_s,
        solution.peak_bytes,
        tuple(collective_differences(plan.collectives, collectives)),
    )


def _rank(problem: Problem, path: str) -> int:
    return len(path_shapes(problem.step.graph)[path])

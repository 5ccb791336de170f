"""What a plan says of its proof where mesh axes go together (:mod:`autoshard_ilp.costs.together`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard_ilp.costs.build import weight_of
from autoshard_ilp.costs.together import least_seconds
from autoshard_ilp.plan import Plan


def joined_names(table: Any) -> str:
    """Mesh axes that go together, by name."""
    return ", and ".join(" and ".join(table.axis_names[axis] for axis in group) for group in table.together)


def bound_of_all(table: Any, bound: float, objective: str) -> float:
    """Seconds that no plan falls short of, from those that no plan does whose axes go together, if any do."""
    if table is None or not table.together:
        return bound
    return min(bound, least_seconds(table, weight_of(objective)))


def of_all_axes(plan: Plan) -> Plan:
    """A plan as it was found, with what is proved of all plans, and a note of what is proved of those like it."""
    trail = plan.trail
    if trail is None or not trail.costs.together:
        return plan
    bound, total = bound_of_all(trail.costs, plan.lower_bound, plan.objective), trail.solution.objective
    proved = plan.status == "optimal" and plan.gap <= 0
    best = "none of these plans is faster" if proved else f"the best of these plans is at most {plan.gap:.2%} faster"
    note = (
        f"The mesh has too many axes for all of their combinations: {joined_names(trail.costs)} split the same "
        f"dimension of every tensor, and {best}. Of all others the bound is that of their arithmetic alone. A pin that "
        "uses one of these axes alone parts them."
    )
    gap = max(0.0, (total - bound) / total) if total > 0 else 0.0
    status = plan.status if bound == plan.lower_bound else "feasible"
    return replace(plan, lower_bound=bound, gap=gap, status=status, notes=(*plan.notes, note))

"""The best plan among those that can be put together from a few known ones.

What prices per byte have shown are plans that hold too much and plans that hold more room than is needed. Where each
decision keeps only what one of them chose, and what would cost next to nothing more at these prices, a program is left
that is solved in about a second. Its optimum is within a few ten-thousandths of the best plan as a rule: an answer
where there is no time, and else a start from which the best plan is soon proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard_ilp.program.nets.flips import Flips
from autoshard_ilp.program.rows.families import restricted
from autoshard_ilp.search.kinds import Kept, Kind, whole_choices

FLIP = 1e-4
"""Relative: what a single change of the best plan may cost, bytes at their prices, to be among the choices ..."""

FLIPS = 3
"""... of which every decision has so many at most, the plan's own included."""

STEPS = 3
"""Edges from a decision that is not free any more, within which there are more choices ..."""

WIDE_FLIP, WIDE_FLIPS = 2e-3, 12
"""... of which this holds."""


def best_between(
    program: Any,
    plans: Sequence[np.ndarray],
    solve: Callable[..., Any],
    start: np.ndarray | None,
    seconds: float,
    prices: Mapping[int, float] | None,
) -> tuple[np.ndarray | None, bool]:
    """The best plan that chooses much as one of ``plans`` at every decision, and whether that was interrupted.

    Args:
        program: the whole one.
        plans: assignments, none of which needs to fit, the first one much like the best without a capacity; where they
            use what is forbidden by now, they are mended.
        solve: (problem, start, seconds, further keywords) -> solution.
        start: one that fits, if any; the answer where nothing better is found.
        seconds: most of them.
        prices: time -> seconds per byte in use then.
    """
    flips = Flips(program, prices or {})
    mended = [flips.mended(plan) for plan in plans]
    known, forbidden = [plan for plan, _ in mended], frozenset[int]().union(*(nodes for _, nodes in mended))
    kept: Kept = [np.zeros(len(node.costs), bool) for node in program.nodes]
    for plan in known if start is None else [*known, start]:
        for mask, strategy in zip(kept, plan, strict=True):
            mask[strategy] = True
    if prices:
        total, nearest = min(((flips.total(plan), plan) for plan in known), key=lambda priced: priced[0])
        wide = flips.around(forbidden, STEPS)
        for node, mask in enumerate(kept):
            share, count = (WIDE_FLIP, WIDE_FLIPS) if node in wide else (FLIP, FLIPS)
            mask[flips.cheap(nearest, node, share * abs(total), count)] = True

    def among(plan: np.ndarray) -> np.ndarray:
        return np.array([int(mask[:s].sum()) for mask, s in zip(kept, plan, strict=True)])

    first, more = None if start is None else among(start), {"relaxed": among(known[0]), "prices": prices}
    found = solve(Kind(restricted(program, kept)), first, seconds, dear=1.0, **more)
    better = start if found.choices is None else whole_choices(kept, found.choices)
    return better, bool(found.report.get("interrupted"))

"""How many layers recompute their activations: as few as the budget allows.

Which layers recompute is one number per policy: the first ``k`` blocks do (:mod:`autoshard_ilp.remat` shows why the
first). Every ``k`` is an integer program of its own, solved with its own bound: layouts, gathers and collectives are
decided anew for it, and its copies are priced by their FLOP, bytes and collectives. The search

1. plans without recomputation; if that fits, it is the best, since copies only add cost;
2. else recomputes all blocks, selectively, and in full where that does not fit;
3. halves the interval between the smallest ``k`` known to fit and the largest known not to.

The second step is enough where recomputation takes next to nothing and planning takes long. Of everything that fits,
the plan with the shortest step is taken; fewer recomputed blocks leave less room for copies of weights, so the smallest
``k`` need not be it. ``plan.notes`` says what was searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard_ilp.plan import Plan
from autoshard_ilp.remat import Policy

LEAST_SHARE = 0.005
"""Recomputation that takes less of the step than this is not worth a long search for fewer blocks."""

QUICK_SECONDS = 10.0
"""A search is long when one plan takes more than this."""

FIRST_PART = 0.9
"""Of the time left: what a plan that recomputes all blocks may take, when fewer are tried after it. One that takes all
of this has a gap still open, which is worth more than fewer blocks."""

LEAST_PART = 0.25
"""Of the time limit: what every policy may take at least."""


def recomputed_share(plan: Plan) -> float:
    """Share of a plan's predicted step that recomputed operations take, their collectives included."""
    trail = plan.trail
    if trail is None or not plan.cost.total_s:
        return 0.0
    seconds = 0.0
    for cls, s in zip(trail.costs.classes, trail.solution.choices, strict=True):
        if trail.graph.ops[cls.members[0]].params.get("recomputed"):
            seconds += cls.count * float(cls.compute_seconds[s] + cls.communication_seconds[s])
    return seconds / plan.cost.total_s


@dataclass
class Found:
    """What a search found: the best plan that fits, or none, and the failures on the way."""

    plan: Plan | None = None
    failures: list[Any] = field(default_factory=list)


def search(
    policies: Sequence[str],
    tried: Callable[[str, float], Any],
    blocks_of: Callable[[Any], int],
    time_limit: float,
    clock: Callable[[], float] = time.monotonic,
    share: Callable[[Plan], float] = lambda plan: 1.0,
) -> Found:
    """Plans under as little rematerialisation as fits.

    Args:
        policies: allowed ones, from the fastest to the smallest; with "never" among them, the number of recomputed
            blocks is searched for.
        tried: policy text and most seconds to solve -> plan, or a failure where none fits.
        blocks_of: number of blocks, from the failure of "never".
        time_limit: seconds of solving, of all policies together; a first plan that fits is looked for in any case.
        clock: seconds that only grow.
        share: share of a plan's step that recomputation takes; where planning takes long and this is below
            :data:`LEAST_SHARE` or below the plan's gap, fewer blocks are not tried.
    """
    found = Found()
    smaller, deadline = "never", clock() + time_limit
    for policy in policies:
        fewer = policy != "never" and bool(found.failures) and policies[0] == "never"
        began = clock()
        left = max(deadline - began, LEAST_PART * time_limit)
        answer = tried(policy, FIRST_PART * left if fewer else left)
        took = clock() - began
        if not isinstance(answer, Plan):
            found.failures.append(answer)
            smaller = policy
            continue
        found.plan = answer
        if fewer:
            n_blocks = blocks_of(found.failures[0])
            # A gap left open after a long solve is more than all that fewer blocks could save.
            if took <= QUICK_SECONDS or share(answer) >= max(LEAST_SHARE, answer.gap):
                _fewer_blocks(found, policy, smaller, tried, n_blocks, deadline, clock)
            else:
                note = (
                    f"Recomputation ({policy}): it takes {share(answer):.1%} of the step, fewer blocks were not tried."
                )
                found.plan = replace(answer, notes=(*answer.notes, note))
        break
    return found


def _proved(failure: Any) -> bool:
    """Whether it is proved that nothing fits, rather than that nothing was found in time."""
    solution = getattr(failure, "solution", None)
    return solution is None or solution.status == "infeasible"


def _fewer_blocks(
    found: Found,
    policy: str,
    rest: str,
    tried: Callable[[str, float], Any],
    n_blocks: int,
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Bisection over the number of blocks under ``policy``; the others follow ``rest``, which alone does not fit."""
    assert found.plan is not None
    best, low, high = found.plan, 0, n_blocks
    while high - low > 1 and clock() < deadline:
        middle = (low + high) // 2
        answer = tried(str(Policy(policy, middle, rest)), deadline - clock())
        if isinstance(answer, Plan):
            high = middle
            best = min(best, answer, key=lambda p: p.cost.total_s)
        elif _proved(answer):
            low = middle
            found.failures.append(answer)
        else:
            break  # out of time
    searched = "fewer do not fit" if high - low == 1 else f"{low} do not fit, what lies between was not tried in time"
    note = f"Recomputation ({best.remat_policy}): {high} of {n_blocks} blocks fit, {searched}."
    found.plan = replace(best, notes=(*best.notes, note))

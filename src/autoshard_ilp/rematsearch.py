"""How many layers recompute their activations: as few as the budget allows.

Which layers recompute is one number per policy: the first ``k`` blocks do (:mod:`autoshard_ilp.remat` shows why the
first). Every ``k`` is an integer program of its own, solved with its own bound: layouts, gathers and collectives are
decided anew for it, and its copies are priced by their FLOP, bytes and collectives. The search

1. plans without recomputation; if that fits and costs next to no more than it would without a budget, it is the best,
   since copies only add cost;
2. if it fits but the budget makes it dear, recomputes all blocks, selectively or in full, and takes the fastest;
3. if it does not fit, recomputes all blocks, selectively, and in full where that does not fit;
4. then halves the interval between the smallest ``k`` known to fit and the largest known not to, or not to be faster;
   where the budget binds although all blocks recompute, it goes on only if an eighth of them less is faster.

The third step is enough where recomputation takes next to nothing and planning takes long. Of everything that fits,
the plan with the shortest step is taken; fewer recomputed blocks leave less room for copies of weights, so the smallest
``k`` need not be it. ``plan.notes`` says what was searched.
"""

from __future__ import annotations

import math
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

NEVER_PART = 0.8
"""Of the time limit: what a plan that recomputes nothing may take, when others may be tried after it."""

DEAR_SHARE = 0.05
"""Where the budget adds more than this share of the step, recomputation may be cheaper than layouts that hold less."""

GAIN = 1e-3
"""Relative gain from which a plan with other recomputation is taken instead of a good one: what saves less is not worth
the proof that it does not."""

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


def memory_share(plan: Plan) -> float:
    """Share of a plan's step that the memory budget adds to the best step without one (at most: its bound is used)."""
    if plan.trail is None:
        return 0.0
    solution = plan.trail.solution
    bound = solution.report.get("without_memory", -math.inf)
    if not math.isfinite(bound) or solution.objective <= 0:
        return 0.0
    return max(0.0, 1.0 - bound / solution.objective)


Tried = Callable[[str, float, float], Any]


def worth(plan: Plan) -> float:
    """The objective, in seconds, below which another plan is worth more; infinite where a plan's is not known."""
    return math.inf if plan.trail is None else float(plan.trail.solution.objective) * (1 - GAIN)


@dataclass
class Found:
    """What a search found: the best plan that fits, or none, and the failures on the way."""

    plan: Plan | None = None
    failures: list[Any] = field(default_factory=list)


def search(
    policies: Sequence[str],
    tried: Tried,
    blocks_of: Callable[[Any], int],
    time_limit: float,
    clock: Callable[[], float] = time.monotonic,
    share: Callable[[Plan], float] = lambda plan: 1.0,
    dear: Callable[[Plan], float] = lambda plan: 0.0,
) -> Found:
    """Plans under as little rematerialisation as fits.

    Args:
        policies: allowed ones, from the fastest to the smallest; with "never" among them, the number of recomputed
            blocks is searched for.
        tried: policy text, most seconds to solve, and the objective that only a better plan is wanted for -> plan, or a
            failure where none fits or none is better.
        blocks_of: number of blocks, from the failure of "never".
        time_limit: seconds of solving, of all policies together; a first plan that fits is looked for in any case.
        clock: seconds that only grow.
        share: share of a plan's step that recomputation takes; where planning takes long and this is below
            :data:`LEAST_SHARE` or below the plan's gap, fewer blocks are not tried.
        dear: share of a plan's step that the budget adds; above :data:`DEAR_SHARE`, a plan that recomputes nothing is
            compared with plans that do.
    """
    found = Found()
    smaller, deadline = "never", clock() + time_limit
    for policy in policies:
        fewer = policy != "never" and bool(found.failures) and policies[0] == "never"
        began = clock()
        left = max(deadline - began, LEAST_PART * time_limit)
        part = FIRST_PART if fewer else NEVER_PART if policy == "never" and len(policies) > 1 else 1.0
        answer = tried(policy, part * left, math.inf)
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
                _fewer_blocks(found, policy, smaller, tried, n_blocks, deadline, clock, dear(answer) > 0)
            else:
                note = (
                    f"Recomputation ({policy}): it takes {share(answer):.1%} of the step, fewer blocks were not tried."
                )
                found.plan = replace(answer, notes=(*answer.notes, note))
        elif policy == "never" and len(policies) > 1 and dear(answer) > DEAR_SHARE:
            _recomputed_instead(found, policies[1:], tried, lambda: deadline - clock(), dear)
        break
    return found


def _recomputed_instead(
    found: Found, policies: Sequence[str], tried: Tried, left: Callable[[], float], dear: Callable
) -> None:
    """The fastest of a plan that recomputes nothing, under a budget that makes it dear, and of plans that recompute.

    The policies share the seconds that are ``left``.
    """
    assert found.plan is not None
    best = first = found.plan
    for number, policy in enumerate(policies):
        if left() <= 0:
            break
        answer = tried(policy, left() / (len(policies) - number), worth(best))
        if isinstance(answer, Plan) and answer.cost.total_s < best.cost.total_s:
            best = answer
            if dear(best) <= DEAR_SHARE:
                break
    if best is first:
        note = f"The budget adds up to {dear(first):.0%} to the step; with recomputation no faster plan was found."
    else:
        note = (
            f"Recomputation ({best.remat_policy}) although a plan without any fits: that one's step would take "
            f"{first.cost.total_s / best.cost.total_s:.2f} times as long."
        )
    found.plan = replace(best, notes=(*best.notes, note))


def _infeasible(failure: Any) -> bool:
    """Whether it is proved that nothing fits, rather than that nothing was found in time."""
    solution = getattr(failure, "solution", None)
    return solution is None or solution.status == "infeasible"


def _fewer_blocks(
    found: Found,
    policy: str,
    rest: str,
    tried: Tried,
    n_blocks: int,
    deadline: float,
    clock: Callable[[], float],
    binds: bool,
) -> None:
    """Bisection over the number of blocks under ``policy``; the others follow ``rest``, which alone does not fit.

    A number with which no plan is faster than the best one counts as one that does not fit: fewer leave less room.
    Where the budget ``binds`` already, recomputed blocks make room that layouts would pay for; if an eighth of them
    less is no faster, that room is worth more than the recomputation, which ends the search.
    """
    assert found.plan is not None
    best, low, high, slower = found.plan, 0, n_blocks, False
    probe = n_blocks - max(1, n_blocks // 8) if binds else None
    while high - low > 1 and low != probe and clock() < deadline:
        middle = probe if probe is not None and high == n_blocks else (low + high) // 2
        answer = tried(str(Policy(policy, middle, rest)), deadline - clock(), worth(best))
        if isinstance(answer, Plan):
            high = middle
            best = min(best, answer, key=lambda p: p.cost.total_s)
        elif _infeasible(answer):
            low = middle
            found.failures.append(answer)
        elif answer.solution.lower_bound >= worth(best):
            low, slower = middle, True
        else:
            break  # out of time
    fewer = "fewer are no faster or do not fit" if slower else "fewer do not fit"
    if low == probe:
        searched = f"{low} are no faster or do not fit"
    else:
        searched = fewer if high - low == 1 else f"{low} do not fit, what lies between was not tried in time"
    note = f"Recomputation ({best.remat_policy}): {high} of {n_blocks} blocks fit, {searched}."
    found.plan = replace(best, notes=(*best.notes, note))

"""How many layers recompute their activations: as few as the budget allows.

Which layers recompute is one number per policy: the first ``k`` blocks do (:mod:`autoshard_ilp.remat` shows why the
first). Every ``k`` is an integer program of its own, solved with its own bound: layouts, gathers and collectives are
decided anew for it, and its copies are priced by their FLOP, bytes and collectives. The search

1. plans without recomputation; if that fits, it is the best, since copies only add cost;
2. else recomputes all blocks, selectively, and in full where that does not fit;
3. halves the interval between the smallest ``k`` known to fit and the largest known not to.

Of everything that fits, the plan with the shortest step is taken; fewer recomputed blocks leave less room for copies of
weights, so the smallest ``k`` need not be it. ``plan.notes`` says what was searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard_ilp.plan import Plan
from autoshard_ilp.remat import Policy


@dataclass
class Found:
    """What a search found: the best plan that fits, or none, and the failures on the way."""

    plan: Plan | None = None
    failures: list[Any] = field(default_factory=list)


def search(
    policies: Sequence[str],
    tried: Callable[[str], Any],
    blocks_of: Callable[[Any], int],
    time_limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Plans under as little rematerialisation as fits.

    Args:
        policies: allowed ones, from the fastest to the smallest; with "never" among them, the number of recomputed
            blocks is searched for.
        tried: policy text -> plan, or a failure where none fits.
        blocks_of: number of blocks, from the failure of "never".
        time_limit: seconds after the first plan that fits during which fewer blocks are tried.
        clock: seconds that only grow.
    """
    found = Found()
    smaller = "never"
    for policy in policies:
        answer = tried(policy)
        if not isinstance(answer, Plan):
            found.failures.append(answer)
            smaller = policy
            continue
        found.plan = answer
        if policy != "never" and found.failures and policies[0] == "never":
            _fewer_blocks(found, policy, smaller, tried, blocks_of(found.failures[0]), clock() + time_limit, clock)
        break
    return found


def _fewer_blocks(
    found: Found,
    policy: str,
    rest: str,
    tried: Callable[[str], Any],
    n_blocks: int,
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Bisection over the number of blocks under ``policy``; the others follow ``rest``, which alone does not fit."""
    assert found.plan is not None
    best, low, high = found.plan, 0, n_blocks
    while high - low > 1 and clock() < deadline:
        middle = (low + high) // 2
        answer = tried(str(Policy(policy, middle, rest)))
        if isinstance(answer, Plan):
            high = middle
            best = min(best, answer, key=lambda p: p.cost.total_s)
        else:
            low = middle
            found.failures.append(answer)
    searched = "fewer do not fit" if high - low == 1 else f"{low} do not fit, what lies between was not tried in time"
    note = f"Recomputation ({best.remat_policy}): {high} of {n_blocks} blocks fit, {searched}."
    found.plan = replace(best, notes=(*best.notes, note))

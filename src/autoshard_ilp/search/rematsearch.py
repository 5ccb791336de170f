"""How many layers recompute their activations: as many as make the fastest step that the budget allows.

Which layers recompute is one number per policy: the first ``k`` blocks do (:mod:`.graph.remat` shows why the
first). Every ``k`` is an integer program of its own, solved with its own bound: layouts, gathers and collectives are
decided anew for it, and its copies are priced by their FLOP, bytes and collectives. The search

1. plans without recomputation; if that fits and costs next to no more than it would without a budget, it is the best,
   since copies only add cost (and so it is taken where it costs little more, is proved, and took long);
2. if it fits but the budget makes it dear, recomputes all blocks, selectively or in full, and takes the fastest: each
   policy is left once it is proved dear; then fewer blocks are looked for, and at last what was left without proof is
   taken up again, where it may be faster;
3. if it does not fit, recomputes all blocks, selectively, and in full where that does not fit, and some of them in full
   and the others selectively where that does not fit either;
4. then looks for a smaller ``k`` that is faster (:mod:`autoshard_ilp.search.fewerblocks`).

The third step is enough where recomputation takes next to nothing and planning takes long. Of everything that fits,
the plan with the shortest step is taken. ``plan.notes`` says what was searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp.graph.remat import Policy
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.search.fewerblocks import (
    GAIN,
    LONG_GAIN,
    QUICK_SECONDS,
    FewerBlocks,
    Found,
    Means,
    Tried,
    is_infeasible,
    recomputation_is_short,
    worth,
)
from autoshard_ilp.search.halving import BINDS, HARDLY

FIRST_PART = 0.9
"""Of the time left: what a plan that recomputes all blocks may take, when fewer are tried after it."""

NEVER_PART = 0.8
"""Of the time limit: what a plan that recomputes nothing may take, when others may be tried after it."""

DEAR_SHARE = 0.05
"""Where the budget adds more than this share of the step, recomputation may be cheaper than layouts that hold less."""

SOME_SHARE = 0.01
"""Where it adds more than this, recomputation is tried too if that is quick, or if the plan could not be proved."""

FREE_TIMES = 2.0
"""So many times what a plan that fits took without a budget is the least time for a policy instead of it ..."""

FREE_SHARE = 0.5
"""... which is not tried where that is more than this share of the time left and the plan is not proved."""

LEAST_PART = 0.25
"""Of the time limit: what every policy may take at least."""


MIXTURES = (0.5, 0.75, 0.25)
"""Shares of the blocks that recompute in full, and the others selectively, where neither fits for all blocks ..."""

LONG_MIXTURES = 1
"""... and so many of these where one plan takes long."""

PROVE_PART = 0.4
"""Of the time left: what the best number of blocks is solved with, where others are only looked at."""


def found_by_kind(plan: Plan) -> bool:
    """Whether a plan was found from one of a known kind (:mod:`.search.kinds`), as other numbers of blocks are
    looked at."""
    return plan.trail is not None and bool(plan.trail.solution.report.get("by_kind"))


def blocks_of(answer: Any) -> int:
    """Blocks of the forward pass that may recompute, of a plan or a failure of this step."""
    step = answer.executable if isinstance(answer, Plan) else answer.step
    return 1 if step is None else int(step.blocks)


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


def hardly_dear(plan: Plan) -> bool:
    """Whether memory binds, and a plan is hardly slower than the best one without a budget."""
    return 0.0 < memory_share(plan) <= HARDLY


def free_seconds(plan: Plan) -> float:
    """Seconds that solving a plan's program without a budget took; 0 where memory does not bind."""
    return 0.0 if plan.trail is None else float(plan.trail.solution.report.get("free_seconds", 0.0))


def search(
    policies: Sequence[str],
    tried: Tried,
    blocks_of: Callable[[Any], int],
    time_limit: float,
    clock: Callable[[], float] = clock,
    share: Callable[[Plan], float] = lambda plan: 1.0,
    dear: Callable[[Plan], float] = lambda plan: 0.0,
    need: Callable[[Any], float] = lambda answer: math.nan,
    some: float = SOME_SHARE,
) -> Found:
    """Plans under as little rematerialisation as fits.

    An interrupt ends the search with the best plan found; it goes on to the caller where there is none.

    Args:
        policies: allowed ones, from the fastest to the smallest; with "never" among them, the number of recomputed
            blocks is searched for.
        tried: policy text, most seconds to solve, the objective that only a better plan is wanted for, and the share of
            the step from which on a budget that adds more is left without proof -> plan, or a failure where none fits
            or none is better.
        blocks_of: number of blocks, from the failure or the plan of "never".
        time_limit: seconds of solving, of all policies together; a first plan that fits is looked for in any case.
        clock: seconds that only grow.
        share: share of a plan's step that recomputation takes; where planning takes long and this is small, or below
            the plan's gap, fewer blocks are not tried.
        dear: share of a plan's step that the budget adds; above :data:`DEAR_SHARE`, a plan that recomputes nothing is
            compared with plans that do.
        need: of a plan or a failure, the share of the budget that the fastest plan without a budget would take; NaN
            where that is not known.
        some: above this share, it is so compared where it was found quickly, or could not be proved.
    """
    found = Found()

    def asked(policy: str, seconds: float, cutoff: float, share_of_budget: float) -> Any:
        answer = tried(policy, seconds, cutoff, share_of_budget)
        if policy in policies:
            found.open[policy] = max(found.open.get(policy, -math.inf), _not_below(answer, cutoff))
        if isinstance(answer, Plan) and _was_interrupted(answer):
            found.offer(answer)
            raise KeyboardInterrupt
        return answer

    try:
        _search(found, policies, Means(asked, clock, share, dear, need), blocks_of, time_limit, some)
    except KeyboardInterrupt:
        if found.plan is None:
            raise
        found.add_note(f"Interrupted: the best plan found until then; it recomputes {found.plan.remat_policy!r}.")
    return found


def _not_below(answer: Any, cutoff: float) -> float:
    """Seconds that no plan of a policy that was not found falls short of; ``cutoff``: what only better plans were
    wanted than."""
    solution = _solution_of(answer)
    if solution is None:
        return math.inf
    known = max(0.0, float(solution.lower_bound))
    if isinstance(answer, Plan):
        return math.inf if solution.status == "optimal" else known
    return cutoff if is_infeasible(answer) else known


def _solution_of(answer: Any) -> Any:
    """Of a plan or a failure; None where it is not known."""
    if isinstance(answer, Plan):
        return None if answer.trail is None else answer.trail.solution
    return getattr(answer, "solution", None)


def _was_interrupted(plan: Plan) -> bool:
    return plan.trail is not None and bool(plan.trail.solution.report.get("interrupted"))


def _search(
    found: Found,
    policies: Sequence[str],
    means: Means,
    blocks_of: Callable[[Any], int],
    time_limit: float,
    some: float,
) -> None:
    """:func:`search`, which keeps in ``found`` what it has."""
    tried, clock = means.tried, means.clock
    smaller, deadline, took = "never", clock() + time_limit, 0.0
    for policy in policies:
        fewer = policy != "never" and bool(found.failures) and policies[0] == "never"
        began = clock()
        left = max(deadline - began, LEAST_PART * time_limit)
        part = FIRST_PART if fewer else NEVER_PART if policy == "never" and len(policies) > 1 else 1.0
        alone = policy != "never" or len(policies) == 1
        answer = tried(policy, part * left, math.inf, 1.0 if alone else DEAR_SHARE)
        open_ = not isinstance(answer, Plan) and not is_infeasible(answer)
        if fewer and open_ and clock() < deadline and clock() - began <= deadline - clock():
            answer = tried(policy, deadline - clock(), math.inf, 1.0)
        took = clock() - began
        if not isinstance(answer, Plan):
            found.failures.append(answer)
            smaller = policy
            continue
        found.plan = answer
        if fewer:
            if recomputation_is_short(answer, took, means.share):
                note = f"it takes {means.share(answer):.1%} of the step, fewer blocks were not tried"
                found.add_note(f"Recomputation ({policy}): {note}.")
            else:
                n_blocks, none, now = blocks_of(found.failures[0]), found.failures[-1], clock()
                until = now + (1 - PROVE_PART * found_by_kind(answer)) * (deadline - now)
                FewerBlocks(found, means, policy, smaller, n_blocks, until, none, answer).run(took)
            same = found.plan.trail is answer.trail  # notes make another plan of it
            _prove(found, means.tried, took if same else 0.0, deadline - clock())
        elif policy == "never" and len(policies) > 1 and _may_be_beaten(answer, took, means.dear(answer), some):
            _recomputed_instead(found, policies[1:], means, blocks_of(answer), deadline, took)
        elif policy == "never" and len(policies) > 1:
            _prove(found, means.tried, took, deadline - clock())
        break
    else:
        if tuple(policies[-2:]) == ("selective", "full"):
            _mixed(found, means, blocks_of(found.failures[0]), took, deadline)


def _may_be_beaten(plan: Plan, took: float, dear: float, some: float) -> bool:
    """Whether plans that recompute are to be compared with one that does not, which ``took`` so many seconds."""
    return dear > DEAR_SHARE or (dear > some and (took <= QUICK_SECONDS or _Open.of(plan) is not None))


def _mixed(found: Found, means: Means, n_blocks: int, took: float, deadline: float) -> None:
    """A plan that recomputes some blocks in full and the others selectively, where neither fits for all of them.

    What is recomputed in full is there at once, so a mixture may hold less than either. ``took`` are the seconds of the
    last failure.
    """
    blocks = (min(n_blocks - 1, max(1, round(share * n_blocks))) for share in MIXTURES)
    tries = list(dict.fromkeys(blocks)) if n_blocks > 1 else []
    for k in tries[:LONG_MIXTURES] if took > QUICK_SECONDS else tries:
        left = deadline - means.clock()
        if left <= 0:
            break
        answer = means.tried(str(Policy("full", k, "selective")), left, math.inf, 1.0)
        if isinstance(answer, Plan):
            found.plan = answer
            found.add_note(
                f"Recomputation ({answer.remat_policy}): neither policy fits for all of the {n_blocks} blocks."
            )
            break
        found.failures.append(answer)


def _prove(found: Found, tried: Tried, took: float, left: float) -> None:
    """Where the best plan was left early, and unproved: solve it to the end.

    Not where less time is ``left`` than it ``took`` (seconds): it would end as before. Nor where the budget adds hardly
    anything and one plan takes long: the bound of the step without ties says as much (:mod:`.search.untied`).
    """
    plan = found.plan
    assert plan is not None
    unproved = _Open.of(plan)
    tied = plan.trail is not None and plan.trail.costs.tied
    if unproved is None or left <= took or (tied and took > QUICK_SECONDS and hardly_dear(plan)):
        return
    answer = tried(plan.remat_policy, left, math.inf, 1.0)
    if not isinstance(answer, Plan) or answer.cost.total_s > plan.cost.total_s:
        return
    if answer.cost.total_s < plan.cost.total_s or answer.lower_bound > unproved.bound:
        own = [note for note in plan.notes if note not in answer.notes and not note.startswith(BINDS)]
        found.plan = replace(answer, notes=(*answer.notes, *own))


def _recomputed_instead(
    found: Found, policies: Sequence[str], means: Means, n_blocks: int, deadline: float, took: float
) -> None:
    """The fastest of a plan that recomputes nothing, under a budget that makes it dear, and of plans that recompute.

    The policies, and what is taken up again, share the time that is left. Of its part each spends what is left on fewer
    blocks. What was left without proof is taken up again, the best first: that one is solved to the end, and the others
    need only be proved to be no faster, if they may be so (by much, where one plan takes long). ``took`` are the
    seconds of the plan that recomputes nothing.
    """
    tried, clock, dear = means.tried, means.clock, means.dear

    def best() -> Plan:
        assert found.plan is not None
        return found.plan

    def good() -> bool:
        """Whether the policies not tried yet need not be."""
        return best() is not first and dear(best()) <= DEAR_SHARE

    first = best()
    unproved, untried = [_Open.of(first)], list[str]()
    quick = {"never"} if took <= QUICK_SECONDS else set[str]()
    least = FREE_TIMES * free_seconds(first)
    for number, policy in enumerate(policies):
        began = clock()
        if began >= deadline:
            break
        last = number == len(policies) - 1
        again = unproved[0] is not None
        if least > (FREE_SHARE if again else 1.0) * (deadline - began):
            untried.append(policy)
            continue
        seconds = max(least, (deadline - began) / (len(policies) - number + again))
        answer = tried(policy, seconds, worth(best()), 1.0 if last else DEAR_SHARE)
        unproved.append(_Open.of(answer))
        if isinstance(answer, Plan):
            found.offer(answer)
        took, until = clock() - began, began + seconds
        if took <= QUICK_SECONDS:
            quick.add(policy)
        if good() and (unproved[0] is None or unproved[0].bound >= best().cost.total_s):
            until = deadline
        FewerBlocks(found, means, policy, "never", n_blocks, until, first, answer).run(took)
        if good():
            break
    for one in sorted((x for x in unproved if x is not None), key=lambda x: x.seconds):
        own, gain = one.policy == best().remat_policy, 0.0 if one.policy in quick else LONG_GAIN
        if clock() >= deadline or not (own or one.bound < best().cost.total_s * (1 - gain)):
            continue
        wanted = math.inf if own else worth(best(), GAIN if gain else 0.0)
        answer = tried(one.policy, deadline - clock(), wanted, 1.0)
        if isinstance(answer, Plan) and answer.cost.total_s <= best().cost.total_s:
            found.plan = answer
    _explain(found, first, dear, untried)


def _explain(found: Found, first: Plan, dear: Callable[[Plan], float], untried: Sequence[str]) -> None:
    """Says why the best plan recomputes although ``first`` does not, or why not, and what there was no time for."""
    best = found.plan
    assert best is not None
    if best.remat_policy == first.remat_policy:
        note = f"The budget adds up to {dear(best):.0%} to the step; with recomputation no faster plan was found."
    elif _Open.of(first) is None:
        note = (
            f"Recomputation ({best.remat_policy}) although a plan without any fits: that one's step would take "
            f"{first.cost.total_s / best.cost.total_s:.2f} times as long."
        )
    elif found.least() >= worth(best):
        note = f"Recomputation ({best.remat_policy}) although a plan without any fits: none of those is faster."
    else:
        note = (
            f"Recomputation ({best.remat_policy}) although a plan without any fits: no faster one of those was found, "
            f"but it is not proved that there is none; the gap says how much faster it could be."
        )
    if untried:
        note = f"{note[:-1]} (not tried, for lack of time: {', '.join(untried)})."
    found.add_note(note)


@dataclass(frozen=True)
class _Open:
    """A policy left without proof: the step of its plan in seconds, infinite without one, and its bound."""

    policy: str
    seconds: float
    bound: float

    @staticmethod
    def of(answer: Any) -> _Open | None:
        """None where there is nothing to be proved."""
        solution = _solution_of(answer)
        if isinstance(answer, Plan):
            policy, seconds = answer.remat_policy, answer.cost.total_s
        else:
            policy, seconds = getattr(getattr(answer, "step", None), "remat", ""), math.inf
        if solution is None or solution.status != "feasible" or solution.report.get("enough"):
            return None
        return _Open(policy, seconds, float(solution.lower_bound))

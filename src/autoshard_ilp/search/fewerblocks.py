"""Recomputing fewer blocks than all of them: the part of a search in which only the number of blocks changes.

Fewer recomputed blocks cost less but leave layouts and copies of weights less room, so the smallest number that fits
need not be the fastest, and the fastest may lie between two that were tried. What is known between two numbers is
where the plans that are best *without* a budget go: their seconds and their bytes grow evenly with the blocks. So

1. the first number tried is the one at which those bytes, as of all blocks and of none, meet the budget; from there
   the search goes by growing steps until past the answer, and then half-way between the smallest number known to fit
   and the largest known not to, or not to be faster;
2. where the budget binds although all blocks recompute, recomputed blocks make room that layouts would pay for. If an
   eighth of them less is no faster, that room is worth more than the recomputation; the search goes down in steps of an
   eighth, each twice the one before, and back, and ends within an eighth. Where recomputing takes by far more than the
   budget adds, half of the blocks come first, unless one plan takes long. No number takes more than a part of the time,
   and the best one is solved to the end afterwards;
3. at last the middles of the gaps wider than an eighth are tried, where what the step would take without a budget (in
   between: the mean) leaves a gain.

Where one plan takes long, fewer blocks are tried only if they may save :data:`LONG_GAIN` of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from autoshard_ilp.graph.remat import Policy
from autoshard_ilp.plan import Plan

Tried = Callable[[str, float, float, float], Any]
"""Policy, most seconds, objective that a plan has to be below, share that a budget may add -> plan or failure."""

LEAST_SHARE = 0.005
"""Recomputation that takes less of the step than this is not worth a long search for fewer blocks."""

QUICK_SECONDS = 4.0
"""A search is long when one plan takes more than this."""

LONG_GAIN = 0.01
"""Share of the step that fewer blocks may have to save where one plan takes long."""

LITTLE = 0.1
"""Of the time that the plan of all blocks took: in less, another number of them shows nothing."""

LITTLE_ADDED = 0.5
"""Of what recomputing all blocks takes: if the budget adds less than this, half of the blocks are tried first."""

TRY_PART = 0.5
"""Of the time left: what one number of blocks may take where memory binds with all of them, and a proof is long ..."""

TRY_SECONDS = 10.0
"""... or so much, if less is left; the best is taken up again at last."""

GAIN = 1e-3
"""Relative gain from which a plan with other recomputation is taken instead of a good one: what saves less is not worth
the proof that it does not."""


def worth(plan: Plan, gain: float = GAIN) -> float:
    """The objective, in seconds, below which another plan is worth more; infinite where a plan's is not known."""
    return math.inf if plan.trail is None else float(plan.trail.solution.objective) * (1 - gain)


def recomputation_is_short(plan: Plan, took: float, share: Callable[[Plan], float]) -> bool:
    """Whether fewer blocks could not save what another plan takes to find.

    A gap left open after a long solve is more than all that fewer blocks could save.
    """
    return took > QUICK_SECONDS and share(plan) < max(LEAST_SHARE, plan.gap)


@dataclass(frozen=True)
class Means:
    """How a search asks for plans and judges them; the fields are arguments of
    :func:`autoshard_ilp.search.rematsearch.search`."""

    tried: Tried
    clock: Callable[[], float]
    share: Callable[[Plan], float]
    dear: Callable[[Plan], float]
    need: Callable[[Any], float]


@dataclass
class Found:
    """What a search found.

    Attributes:
        plan: the best one that fits, or none.
        failures: on the way.
        open: bound in seconds of every policy for all blocks that was tried, of plans that were not found.
    """

    plan: Plan | None = None
    failures: list[Any] = field(default_factory=list)
    open: dict[str, float] = field(default_factory=dict)

    def offer(self, plan: Plan) -> None:
        """Takes the plan if it is faster than the one there is."""
        if self.plan is None or plan.cost.total_s < self.plan.cost.total_s:
            self.plan = plan

    def least(self) -> float:
        """No plan under another policy that was tried is faster than this, in seconds."""
        others = (bound for policy, bound in self.open.items() if self.plan is None or policy != self.plan.remat_policy)
        return min(others, default=math.inf)

    def proved(self, plan: Plan) -> Plan:
        """``plan``, the found one or one made of it, with what is proved of all policies tried together."""
        least, total = self.least(), plan.cost.total_s if plan.trail is None else plan.trail.solution.objective
        if not least < plan.lower_bound:
            return plan
        gap = 1.0 - least / total
        return replace(plan, lower_bound=least, gap=gap, status="feasible" if gap > 1.01 * GAIN else plan.status)

    def add_note(self, note: str) -> None:
        """Says more of the plan."""
        assert self.plan is not None
        self.plan = replace(self.plan, notes=(*self.plan.notes, note))


def is_infeasible(failure: Any) -> bool:
    """Whether it is proved that nothing fits, rather than that nothing was found in time."""
    solution = getattr(failure, "solution", None)
    return solution is None or solution.status == "infeasible"


class FewerBlocks:
    """One search between ``none``, of which no block follows ``policy``, and ``every``, of which all do.

    Args:
        found: plan and failures so far; holds the answer after :meth:`run`.
        means: how plans are asked for and judged.
        policy, rest: names of policies; blocks that do not follow the one follow the other.
        n_blocks: all blocks.
        deadline: time of the clock after which nothing is tried.
        none: the failure of ``rest`` alone, or its plan where that is worth less than one that recomputes may be.
        every: the plan of all blocks or, where it is known to be no faster than ``none``, the failure to be so.
    """

    def __init__(
        self,
        found: Found,
        means: Means,
        policy: str,
        rest: str,
        n_blocks: int,
        deadline: float,
        none: Any,
        every: Any,
    ) -> None:
        self.found, self.means, self.policy, self.rest = found, means, policy, rest
        self.n_blocks, self.deadline = n_blocks, deadline
        self.low, self.high = 0, n_blocks
        self.none, self.every = none, every
        self.binds = isinstance(every, Plan) and means.dear(every) > 0
        self.eighth = max(1, n_blocks // 8)
        self.least = {n_blocks: self._without_budget(every)}  # seconds; -inf where not known
        self.took, self.long = 0.0, False  # seconds of the plan of all blocks, and whether one plan takes long
        self.slower = False  # a number of blocks fits, or may, but is no faster
        self.impossible = 0  # the largest number known not to fit
        if isinstance(none, Plan):
            self.least[0], self.slower = self._without_budget(none), True
        self.recomputed_s = means.share(every) * every.cost.total_s if isinstance(every, Plan) else self._added_s()

    @property
    def best(self) -> Plan:
        """The fastest plan so far."""
        assert self.found.plan is not None
        return self.found.plan

    def run(self, took: float) -> None:
        """Search; ``took`` are the seconds of the plan that recomputes all blocks."""
        self.took, self.long, saves_little = took, took > QUICK_SECONDS, None
        if isinstance(self.every, Plan):
            saves_little = self._narrow()
        else:  # neither end is the better one
            if self.means.clock() + 2 * took >= self.deadline:
                return  # a guess takes as long, and so does its plan
            guess = self._guess()
            if guess is not None:
                self._attempt(guess)
        if saves_little is None:
            self._look_between()
        if self.best is not self.none and isinstance(self.every, Plan):
            fit = f"{self.high} of {self.n_blocks} blocks fit"
            self.found.add_note(f"Recomputation ({self.best.remat_policy}): {fit}, {self._searched(saves_little)}.")

    def _in_time(self) -> bool:
        """Whether enough time is left for another number of blocks to show anything."""
        return self.means.clock() + LITTLE * self.took < self.deadline

    def _searched(self, saves_little: tuple[int, float] | None) -> str:
        """What is known of fewer blocks."""
        if saves_little is not None:
            blocks, part = saves_little
            return f"{blocks} could save {part:.1%} of the step at most and were not tried"
        if self.high - self.low <= self.eighth and self.binds:
            return f"{self.low} are no faster or do not fit"
        if self.high - self.low == 1:
            return "fewer are no faster or do not fit" if self.slower else "fewer do not fit"
        return f"{self.low} are too few, what lies between was not tried in time"

    def _narrow(self) -> tuple[int, float] | None:
        """Raise ``low`` and lower ``high``. A number of blocks that is not worth a long try, and what it may save."""
        fine = self.eighth if self.binds else 1
        steps = self._down() if self.binds else self._around_guess()
        while self.high - self.low > fine and self._in_time():
            middle = next(steps)
            part = self.recomputed_s * (self.high - middle) / (self.n_blocks * self.best.cost.total_s)
            if self.long and part < LONG_GAIN:
                return middle, part
            answer = self._attempt(middle)
            if isinstance(answer, Plan):
                self.high = middle
            elif is_infeasible(answer):
                self.low = self.impossible = middle
                self.found.failures.append(answer)
            elif answer.solution.lower_bound >= worth(self.best):
                self.low, self.slower = middle, True
            else:
                break  # out of time
        return None

    def _down(self) -> Any:
        """By an eighth, two, four, ...; half-way once a number is known that is too small, and from the beginning
        where recomputation takes by far more than the budget adds, and one plan is quick. Where it takes long, the
        first step is then as small as may save enough: of many blocks less, memory shows no plan in time."""
        added = self.means.dear(self.every) * self.every.cost.total_s
        little = added < LITTLE_ADDED * self.recomputed_s
        half = little and not self.long
        jump = max(self.eighth, self._worth_blocks() if little and self.long else 0)
        while True:
            yield self._middle() if self.low or half else max(1, self.high - jump)
            jump *= 2

    def _worth_blocks(self) -> int:
        """So many blocks less may save :data:`LONG_GAIN` of the step."""
        share = self.recomputed_s / self.best.cost.total_s
        return math.ceil(LONG_GAIN * self.n_blocks / share) if share > 0 else self.n_blocks

    def _around_guess(self) -> Any:
        """The guess; from there by small steps, each twice the one before, until past the answer; then half-way."""
        guess = self._guess()
        if guess is not None:
            yield guess
            jump = self.eighth if self.long else max(1, self.n_blocks // 64)
            while guess in (self.low, self.high):
                guess = guess - jump if guess == self.high else guess + jump
                if not self.low < guess < self.high:
                    break
                yield guess
                jump *= 2
        while True:
            yield self._middle()

    def _guess(self) -> int | None:
        """Where what the fastest plans need without a budget, evenly between none and all blocks, meets the budget."""
        if self.n_blocks <= 8:
            return None
        of_all = self.means.need(self.every)
        of_none = self.means.need(self.none) if of_all <= 1 else math.nan
        if not of_none > 1 >= of_all:
            return None
        guess = math.ceil(self.n_blocks * (of_none - 1) / (of_none - of_all))
        if self.long:  # a budget that binds by little takes longest
            guess += max(1, self.n_blocks // 64)
        return min(self.n_blocks - 1, max(1, guess))

    def _middle(self) -> int:
        return (self.low + self.high) // 2

    def _look_between(self) -> None:
        """Try the middles of wide gaps between the numbers tried.

        Below one that is no faster, others may be: what they recompute less may be more than what they pay for room.
        Where one plan takes long, that is left alone.
        """
        while self._in_time():
            least = dict(self.least)
            least.setdefault(self.impossible, self._line(self.impossible))
            inside = sorted(k for k in least if k >= (self.low if self.long else self.impossible))
            wanted = worth(self.best) * (1 - LONG_GAIN * self.long)
            gaps = [
                (a - b, (a + b) // 2)
                for a, b in pairwise(inside)
                if b - a > self.eighth and 0.5 * (least[a] + least[b]) < wanted
            ]
            if not gaps:
                break
            middle = min(gaps)[1]
            answer = self._attempt(middle)
            if not isinstance(answer, Plan) and is_infeasible(answer):
                self.impossible = max(self.impossible, middle)

    def _line(self, blocks: int) -> float:
        """Seconds without a budget on the line through the least and the largest number known; -inf without two."""
        known = sorted(k for k, seconds in self.least.items() if math.isfinite(seconds))
        if len(known) < 2:
            return -math.inf
        a, b = known[0], known[-1]
        return self.least[a] + (blocks - a) * (self.least[b] - self.least[a]) / (b - a)

    def _attempt(self, blocks: int) -> Any:
        """A plan or a failure; the best plan is kept."""
        policy = str(Policy(self.policy, blocks, self.rest))
        began = self.means.clock()
        left = self.deadline - began
        seconds = max(TRY_SECONDS, TRY_PART * left) if self.binds else left
        answer = self.means.tried(policy, min(seconds, left), worth(self.best), 1.0)
        self.long = self.means.clock() - began > QUICK_SECONDS
        self.least[blocks] = -math.inf
        if isinstance(answer, Plan):
            self.least[blocks] = self._without_budget(answer)
            self.found.offer(answer)
        return answer

    def _without_budget(self, answer: Any) -> float:
        """Seconds that a plan's step would take without a budget, or at least where there is no plan."""
        if isinstance(answer, Plan):
            return answer.cost.total_s * (1 - self.means.dear(answer))
        solution = getattr(answer, "solution", None)
        if solution is None or solution.status == "infeasible":
            return -math.inf
        return float(getattr(solution, "report", {}).get("without_memory", solution.lower_bound))

    def _added_s(self) -> float:
        """Seconds that recomputing all blocks adds to a step without a budget, where that is known."""
        added = self.least[self.n_blocks] - self.least.get(0, math.nan)
        return added if math.isfinite(added) else math.inf

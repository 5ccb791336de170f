"""Two decisions for the repeated layers, or one for each, where one is too coarse: where memory binds.

A decision that all layers share moves the memory of all of them at once, so a plan may have to leave gigabytes unused.
Let the first layers decide for themselves, and the others: if as many are the first as the prices of bytes ask for
(:mod:`.search.division`), a plan fits that is close to the bound, and although that program is larger, it is the
easier one. In a small step every layer decides for itself then. Whether memory binds is known once the program with one
decision for all is solved without memory; what fits then is the answer, and nothing is divided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from autoshard_ilp.costs.fold import LEAST_SPLIT
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.search.between import best_between
from autoshard_ilp.search.division import HALF, Division, division_of
from autoshard_ilp.search.kinds import NEARLY, Kept, better_of_its_kind, starts_of_kinds

BINDS = "Memory binds: "
"""How the note begins that says how far repeated layers decide for themselves."""

HALVED = BINDS + "each half of the repeated layers decides for itself."
DIVIDED = BINDS + "the first {:.2g}% of the repeated layers decide for themselves, and so do the others."
APART = BINDS + "every repeated layer decides for itself."

WIDE_CELLS = 3_000_000
"""Table cells of a program with one decision per repeated layer: of two mesh axes less, of three more. Of more, prices
take long, and the plans met with them are poor: plans of known kinds are where to begin."""

MIXED = 0.005
"""Relative distance to the bound from which on a mixture of plans says nothing."""

FREE = 1e-3
"""Relative distance to the bound of a plan that fits, with which bytes that cost nothing do not bind."""

MIXING_SHARE = 0.4
"""Of the time left: what looking for a mixture may take ..."""

MIXING_TIMES, MIXING_MOST = 8.0, 0.5
"""... and at least so many times what the program took without a budget, since cut off it shows nothing, but no more
than this share of all the time left."""

ALONE_SHARE = 0.4
"""Of the time left: what a large program whose layers are not divided may take without a plan; kinds are next."""

POOR = 0.05
"""Relative distance to the bound of a plan met on the way that is no good start: plans of known kinds come next."""

GOOD = 0.01
"""Relative distance to the bound of a start put together from what was met that needs no plans of known kinds."""

KINDS_SHARE = 0.5
"""Of the time left then: what these may take ..."""

KINDS_TIMES, KINDS_MOST = 10.0, 0.45
"""... with the same two limits, since cut off they show nothing either ..."""

KINDS_ALONE = 0.9
"""... and where one step of many is looked at: the best is taken up again."""

FEW_PLANS = 6
"""Met with prices, of which a first plan is put together."""

FREE_SHARE = 0.5
"""Of the time left: what the bound of all plans without a budget may take."""

BETWEEN_SHARE = 0.2
"""Of the time left: what putting a plan together from those of a mixture may take."""

KIND_AGAIN = 0.5
"""Of the time left where that is taken up again: what its kind may take before all plans do."""

FAR = 0.3
"""Share of the step that the budget adds at least, from which on other plans are surely better where they are allowed:
recomputing a whole forward pass adds less."""

HARDLY = 3e-3
"""Share of the step that a budget adds: less is not worth a long proof of how much exactly ..."""

LONG_CELLS = 200_000
"""... of a program with more table cells than this."""

FREE_FAR = 0.12
"""Share of a plan's seconds that the bound without a budget is below it, from which on more of a proof shows little."""

PLAN_SHARE = 0.6
"""Of the time left: what the larger program may take to find a plan before the smaller one is tried."""

BOUND_SECONDS = 8.0
"""What a part of the time is not to be smaller than where memory binds, since less shows little ..."""

BOUND_TIMES = 2.0
"""... nor than so many times what the program took without a budget ..."""

BOUND_SHARE = 0.5
"""... as long as that is no larger share of what is left; so long a part may get while plans go on getting better."""


class Priced(Protocol):
    """What is solved."""

    @property
    def table(self) -> Any:
        """A :class:`~autoshard_ilp.costs.table.CostTable`."""

    @property
    def program(self) -> Any:
        """The :class:`~autoshard_ilp.program.model.Program` built from it."""

    def kinds(self, like: np.ndarray | None, least: float) -> Iterator[Kept]:
        """Restrictions of the program that leave plans of a known kind each (:mod:`autoshard_ilp.search.kinds`)."""


@dataclass(frozen=True, eq=False)
class Left:
    """Where a solve was left under a budget that binds, without proof, so that it can go on from there.

    Attributes:
        first_share: of the repeated layers, those that decide apart from the others; 0 in the smaller program.
        choices: of the best plan found, if any.
        relaxed: of the best plan without a budget, nearly.
        lower_bound, without_memory: seconds, with and without a budget.
        free_seconds: what solving it without a budget took.
        prices: time -> seconds per byte in use then, where some are known.
        by_kind: the plan was found from one of a known kind, in little time.
    """

    first_share: float
    choices: np.ndarray | None
    relaxed: np.ndarray
    lower_bound: float
    without_memory: float
    free_seconds: float
    prices: Mapping[int, float] | None = None
    by_kind: bool = False

    @staticmethod
    def of(first_share: float, solution: Any) -> Left | None:
        """None where nothing is left to do, or where it was not the budget that took long."""
        report = solution.report
        relaxed = report.get("relaxed")
        if solution.status != "feasible" or relaxed is None:
            return None
        known = report["without_memory"], report["free_seconds"]
        more = report.get("prices"), bool(report.get("by_kind"))
        return Left(first_share, solution.choices, relaxed, _bound(solution), *known, *more)


@dataclass(frozen=True, eq=False)
class Tied:
    """A program with one decision for all repeated layers, and what it has shown that holds under other budgets.

    Attributes:
        problem: as ``make`` makes it.
        relaxed, without_memory, free_seconds: as in :class:`Left`.
        mixed: ``report["mixed"]`` of :func:`autoshard_ilp.program.solve`, if there was a look at prices.
    """

    problem: Any
    relaxed: np.ndarray
    without_memory: float
    free_seconds: float
    mixed: Any


def _bound(solution: Any) -> float:
    """Seconds: what a solution proves, rounding aside."""
    return float(solution.lower_bound - solution.report.get("rounding_error_seconds", 0.0))


P = TypeVar("P", bound=Priced)
Answer = tuple[P, Any, tuple[str, ...]]
"""The problem whose plan is taken (or that has none), its solution, and notes for the user."""

Q = TypeVar("Q", contravariant=True)


class Solve(Protocol[Q]):
    """How a program is solved; the keywords are those of :func:`autoshard_ilp.program.solve`."""

    def __call__(self, problem: Q, start: np.ndarray | None, seconds: float, **keywords: Any) -> Any:
        """Solves within ``seconds``, from a known assignment if there is one."""


def solve_divided(
    make: Callable[[float], P],
    solve: Solve[P],
    time_limit: float,
    clock: Callable[[], float] = clock,
    cutoff: float = math.inf,
    surely: bool = False,
    free_part: float = 1.0,
    bound_part: float = 1.0,
    divided_part: float = 1.0,
    left_before: Left | None = None,
    by_kind: bool = False,
    tied: Tied | None = None,
    enough: float = 0.0,
    free_bound: Callable[[P, np.ndarray, float], float] | None = None,
) -> Answer[P]:
    """Solves a program and, where memory binds, the one with two decisions per repeated layer instead.

    Args:
        make: makes the program in which so large a share of the repeated layers decides apart from the others; 0: with
            one decision for all.
        solve: (problem, start, seconds, further keywords) -> solution.
        time_limit: seconds for everything.
        clock: seconds that only grow.
        cutoff: objective, in seconds, that ``solve`` only wants a better plan for.
        surely: memory binds; the program is not solved without it first.
        free_part: of the time left, what the proof may take as long as memory does not bind.
        bound_part: of the time left then, what it may take where memory binds (a little time is not divided so much).
        divided_part: the same, for programs whose layers are divided and whose prices are soon found only.
        left_before: where an earlier call for the same step ended; it goes on from there.
        by_kind: of a similar step it is known that prices find no good start, and plans of known kinds do; the report
            says so (``by_kind``).
        tied: what ``make(0.0)`` has shown under another budget; ``report["tied"]`` of an earlier answer.
        enough: relative gap that will do where memory binds; the report says so (``enough``).
        free_bound: (problem, plan, seconds) -> lower bound in seconds of all plans without a budget, whatever layers
            share; the report says so (``free_bound``).

    Returns:
        The problem whose plan is taken (or that has none), its solution, and notes for the user.
    """
    parts = _Parts(free_part, bound_part, divided_part)
    limits = clock() + time_limit, clock, parts, cutoff
    search = _Divided(functools.cache(make), solve, *limits, by_kind, enough, free_bound)
    if left_before is not None:
        return search.taken_up(left_before)
    if not splittable(search.one):
        return search.alone()
    return search.without_budget(surely, tied) or search.with_prices(tied) or search.divided(surely)


@dataclass(frozen=True)
class _Parts:
    """Shares of the time left, as :func:`solve_divided` takes them."""

    free: float
    bound: float
    divided: float


class _Divided(Generic[P]):
    """The steps of :func:`solve_divided`; each has an answer, or leaves what it has found to the next.

    Attributes:
        one: the problem with one decision for all repeated layers.
        known: what is known of it: of the best plan without a budget, at first.
        bound: seconds, a lower bound of it under its budget.
        first: its solution without a budget, if it was asked for one.
        keywords: further ones for solving the divided problem.
        ends: when that is over.
        plans: of ``one``, to begin from.
        prices: time -> seconds per byte in use then.
        mixed, division: what a mixture of plans has shown, and how it divides the layers.
        looked: for plans of known kinds.
        stopped: interrupted; the best plan is taken as soon as may be.
    """

    def __init__(
        self,
        make: Callable[[float], P],
        solve: Solve[P],
        deadline: float,
        clock: Callable[[], float],
        parts: _Parts,
        cutoff: float,
        by_kind: bool,
        enough: float,
        free_bound: Callable[[P, np.ndarray, float], float] | None,
    ) -> None:
        self.make, self.solve, self.deadline, self.clock = make, solve, deadline, clock
        self.parts, self.cutoff, self.by_kind, self.enough = parts, cutoff, by_kind, enough
        self.free_bound = free_bound
        self.known: Left | None = None
        self.bound = -math.inf
        self.first: Any = None
        self.keywords: dict[str, float] = {}
        self.ends = deadline
        self.plans: list[np.ndarray | None] = []
        self.prices: Mapping[int, float] | None = None
        self.mixed: Any = None
        self.division: Division | None = None
        self.looked = self.stopped = False

    @functools.cached_property
    def one(self) -> P:
        return self.make(0.0)

    def left(self) -> float:
        """Seconds, of the whole limit."""
        return max(0.0, self.deadline - self.clock())

    def until_end(self) -> float:
        """Seconds, of what the divided problem may take."""
        return max(0.0, self.ends - self.clock())

    def taken_up(self, known: Left) -> Answer[P]:
        """Goes on from where an earlier call was left."""
        same = self.make(known.first_share)
        if known.by_kind and math.isinf(known.without_memory):
            known = self._bounded(same, known)
        if known.by_kind and known.choices is not None and not self.stopped:
            seconds = KIND_AGAIN * self.left()
            kinds = same.kinds(known.choices, 1.0)
            better, self.stopped = better_of_its_kind(same.program, kinds, self.solve, known.choices, seconds)
            known = replace(known, choices=better)
        return same, self._go_on(same, known), (_note(same),) if known.first_share else ()

    def _bounded(self, problem: P, known: Left) -> Left:
        """The same with a bound, in a part of the time: one of many steps was looked at for its plan alone."""
        first = self.solve(problem, known.choices, FREE_SHARE * self.left(), rows=False)
        self.stopped = bool(first.report.get("interrupted"))
        bound = _bound(first)
        better = known.choices if first.choices is None else first.choices
        found = {"choices": better, "relaxed": first.report.pop("relaxed", known.relaxed)}
        bounds = {"lower_bound": max(known.lower_bound, bound), "without_memory": bound, "free_seconds": first.seconds}
        return replace(known, **found, **bounds)

    def alone(self) -> Answer[P]:
        """Solves the one program there is; where memory binds, within its part of the time left then."""
        one, solve = self.one, self.solve
        if one.program.capacity is None:
            return one, solve(one, None, self.left()), ()
        if self.parts.bound >= 1:
            return one, self._alone_with_memory() if wide(one.program) else solve(one, None, self.left()), ()
        first = solve(one, None, self.left(), rows=False)
        relaxed = first.report.pop("relaxed", None)
        if relaxed is None or self._over(first):
            return one, first, ()
        known = Left(0.0, first.choices, relaxed, _bound(first), _bound(first), first.seconds)
        return one, _with_memory(one, solve, known, **self._part(first)), ()

    def _alone_with_memory(self) -> Any:
        """The solution of the one program; where a part of the time shows no plan, one of a known kind is the start."""
        one, solve = self.one, self.solve
        first = solve(one, None, self.left(), plan_seconds=ALONE_SHARE * self.left())
        if first.choices is not None or self._over(first):
            return first
        self._of_kinds(math.inf)
        start = best_of(one.program, [plan for plan in self.plans if plan is not None])
        bound, report = _bound(first), first.report
        free = report.get("without_memory", bound), first.seconds
        return self._go_on(one, Left(0.0, start, cheapest(one.program), bound, *free, report.get("prices")))

    def _go_on(self, problem: P, known: Left) -> Any:
        """The solution from what is known, where memory binds; at once after an interrupt."""
        found = _with_memory(problem, self.solve, known, 0.0 if self.stopped else self.left())
        if self.stopped:
            found.report["interrupted"] = True
        return found

    def without_budget(self, surely: bool, tied: Tied | None) -> Answer[P] | None:
        """Solves the tied program without memory, unless it is known what that would show; an answer where it fits."""
        one = self.one
        if surely:
            self.known = Left(0.0, None, cheapest(one.program), -math.inf, -math.inf, 0.0)
        elif tied is not None and one.program.peak(tied.relaxed) > one.program.capacity:
            self.known = Left(0.0, None, tied.relaxed, -math.inf, tied.without_memory, tied.free_seconds)
        else:
            first = self.first = self.solve(one, None, self.parts.free * self.left(), rows=False)
            relaxed = first.report.pop("relaxed", None)
            if relaxed is None or self._over(first):
                return one, first, ()
            self.known = Left(0.0, first.choices, relaxed, -math.inf, _bound(first), first.seconds)
            self.keywords = self._part(first)
            if not self._short(first):
                self.keywords["plan_seconds"] = PLAN_SHARE * min(self.keywords.values())
        self.bound = self.known.without_memory
        self.ends = self.clock() + self.keywords.pop("seconds", self.left())
        return None

    def with_prices(self, tied: Tied | None) -> Answer[P] | None:
        """Looks at prices of bytes, and then at plans of known kinds where that has shown no good start."""
        one, known = self.one, self._known()
        self.plans = [known.choices]
        best = poor = math.inf
        large = wide(one.program)
        if not large and not self.by_kind:
            before = True if tied is None or tied.mixed is None else tied.mixed
            seconds = self._of_what_follows(MIXING_SHARE, MIXING_TIMES, MIXING_MOST)
            more = {"relaxed": known.relaxed, "without_memory": known.without_memory}
            shown = self.solve(one, None, seconds, mixing=before, **more)
            if shown.report.get("interrupted"):
                return one, shown, ()
            self.bound = max(self.bound, _bound(shown))
            mixture, self.prices, self.mixed = (shown.report.get(what) for what in ("mixture", "prices", "mixed"))
            far = (1 - FAR) * shown.lower_bound >= known.without_memory > 0
            if far and self.parts.bound < 1 and shown.choices is not None:
                return one, _told(shown, known), ()
            near = shown.choices is not None and shown.objective - shown.lower_bound <= FREE * abs(shown.objective)
            if near and not any((self.prices or {}).values()):
                return one, self.solve(one, shown.choices, self.until_end(), proved=self.bound), ()  # it does not bind
            cost = sum(weight * plan_cost for weight, plan_cost, _ in mixture or ())
            if mixture and cost - shown.lower_bound <= MIXED * abs(cost):
                self.division = division_of(one.table, mixture)
            self.plans.append(shown.choices)
            best = math.inf if shown.choices is None else float(shown.objective)
            poor = (1 + POOR) * shown.lower_bound
        if self.by_kind or large or (best > poor and self.division is None):
            self._of_kinds(best)
        return None

    def _of_what_follows(self, share: float, times: float, most: float) -> float:
        """Seconds: a share of the time left, or as many ``times`` what the program took without a budget, if that is at
        most so large a share of the whole limit's; what is more than its share is added to what follows."""
        part = share * self.until_end()
        seconds = max(part, min(times * self._known().free_seconds, most * self.left()))
        self.ends = min(self.deadline, self.ends + seconds - part)
        return seconds

    def _of_kinds(self, best: float) -> None:
        """Plans of known kinds, that cost less than the ``best`` so far; the first one will do where that is long."""
        if self.by_kind or self.known is None:
            seconds = (KINDS_ALONE if self.by_kind else KINDS_SHARE) * self.until_end()
        else:
            seconds = self._of_what_follows(KINDS_SHARE, KINDS_TIMES, KINDS_MOST)
        least, one = min(best, self.cutoff), self.one
        large = wide(one.program)
        first, like = self.by_kind or large, None if self.known is None else self.known.relaxed
        kinds = one.kinds(like, 0.0 if large else NEARLY)
        good, self.looked = (1 + GOOD) * self.bound, True
        limits = seconds, self.clock, least
        more, self.stopped = starts_of_kinds(one.program, kinds, self.solve, *limits, one=first, good=good)
        if self.stopped or (self.by_kind and more):  # one of many similar steps: the best of them is taken up again
            self.ends = self.clock()
        self.plans, self.by_kind = [*self.plans, *more], self.by_kind or bool(more)

    def divided(self, surely: bool) -> Answer[P]:
        """Solves the program whose layers are divided, from what was found; the tied one where that finds nothing."""
        one, known = self.one, self._known()
        fine = self.make((0.0 if self.by_kind else HALF) if self.division is None else self.division.first_share)
        relaxed = start_of(one.table, fine.table, known.relaxed)
        start = self._start(fine, relaxed)
        cost = _cost_if_it_fits(fine.program, start)
        if not (self.looked or self.stopped) and cost > (1 + GOOD) * self.bound:
            met = len(self.plans)
            self._of_kinds(cost)
            start = self._start(fine, relaxed) if len(self.plans) > met else start
        free = self._without_ties(fine, start, known)
        if free is not None:
            known = replace(known, lower_bound=max(known.lower_bound, free), without_memory=free)
        if fine.table.first_share == one.table.first_share:
            known = replace(known, lower_bound=max(known.lower_bound, self.bound))
        of_fine = replace(known, first_share=fine.table.first_share, choices=start, relaxed=relaxed, prices=self.prices)
        long = wide(fine.program) or (free is not None and fine.program.cells() > LONG_CELLS)
        enough = max(self.enough, HARDLY) if long else self.enough
        keywords = self.keywords | ({"relative_gap": enough} if enough else {})
        found = _with_memory(fine, self.solve, of_fine, self.until_end(), **keywords)
        found.report.update(by_kind=self.by_kind, enough=bool(enough) and found.gap <= enough)
        if free is not None:
            found.report["free_bound"] = free
        if self.mixed is not None:
            found.report["tied"] = Tied(one, known.relaxed, known.without_memory, known.free_seconds, self.mixed)
        if self.stopped:
            found.report["interrupted"] = True
        if found.choices is None and not surely and not self._over(found):
            known = replace(known, lower_bound=max(self.bound, _bound(found)))
            part = {"seconds": self.left()} if self.first is None else self._part(self.first)
            return one, _with_memory(one, self.solve, known, **part), ()
        return fine, found, (_note(fine),) if fine.table.first_share else ()

    def _start(self, fine: P, relaxed: np.ndarray) -> np.ndarray | None:
        """The best plan of the divided problem that can be put together from plans of the tied one."""
        met = [] if self.mixed is None or self.stopped else self.mixed.nearest(FEW_PLANS)
        tables = self.one.table, fine.table
        starts = [start_of(*tables, plan) for plan in self.plans if plan is not None]
        starts += [] if self.division is None else [self.division.start(*tables)]
        start = best_of(fine.program, starts)
        if met:
            few = [relaxed, *(start_of(*tables, plan) for plan in met), *starts]
            seconds = BETWEEN_SHARE * self.until_end()
            start, self.stopped = best_between(fine.program, few, self.solve, start, seconds, self.prices)
            self.ends = self.clock() if self.stopped else self.ends
        return start

    def _without_ties(self, fine: P, start: np.ndarray | None, known: Left) -> float | None:
        """Lower bound in seconds of all plans without a budget; None where that cannot show that memory hardly costs.

        The program without a budget is left as soon as its best plan does not fit, often long before it is proved.
        Where that plan costs next to what one costs that fits, its proof is worth more than a search for a better one.
        """
        if self.free_bound is None or start is None or self.stopped or self.first is None or not fine.table.tied:
            return None
        cost, best = fine.program.cost(start), self.one.program.cost(known.relaxed)
        least = (1 - HARDLY) * cost
        hopeless = least > best or known.without_memory < (1 - FREE_FAR) * cost
        if hopeless or fine.program.peak(start) > fine.program.capacity:
            return None
        try:
            free = self.free_bound(fine, start, FREE_SHARE * self.left())
        except KeyboardInterrupt:
            self.stopped, self.ends = True, self.clock()
            return None
        return free if free >= least else None

    def _known(self) -> Left:
        assert self.known is not None, "without_budget comes first"
        return self.known

    def _over(self, found: Any) -> bool:
        """Whether a solution leaves nothing to do, or no time."""
        known = found.status in ("infeasible", "optimal") or found.lower_bound >= self.cutoff
        ended = found.report.get("interrupted") or found.report.get("too_dear")
        return bool(known or ended or self.left() <= 0)

    def _short(self, first: Any) -> bool:
        """Whether half of the time left would show little, so that there is none for anything else."""
        return bool(BOUND_TIMES * first.seconds > BOUND_SHARE * self.left())

    def _part(self, first: Any) -> dict[str, float]:
        """Seconds for what comes where memory binds, after a solution without a budget."""
        left = self.left()
        if self._short(first):
            return {"seconds": left}
        least = max(BOUND_SECONDS, BOUND_TIMES * first.seconds)
        share = self.parts.bound if wide(self.one.program) else min(self.parts.bound, self.parts.divided)
        steady = max(share * left, min(least, BOUND_SHARE * left))
        longer = max(steady, BOUND_SHARE * left)
        return {"seconds": longer, **({"steady_seconds": steady} if longer > steady else {})}


def best_of(program: Any, starts: Sequence[np.ndarray]) -> np.ndarray | None:
    """The cheapest of some assignments that fits; else the one that is nearest to fit, None of none."""
    ranked = []
    for position, choices in enumerate(starts):
        cost = program.cost(choices)
        if math.isfinite(cost):
            ranked.append((max(0, program.peak(choices) - program.capacity), cost, position))
    return starts[min(ranked)[2]] if ranked else None


def _cost_if_it_fits(program: Any, choices: np.ndarray | None) -> float:
    """Seconds; infinite where a plan does not fit, or there is none."""
    fits = choices is not None and program.peak(choices) <= program.capacity
    return float(program.cost(choices)) if fits else math.inf


def _note(problem: Priced) -> str:
    """What the larger program lets decide for itself."""
    if not problem.table.tied:
        return APART
    share = problem.table.first_share
    return HALVED if share == HALF else DIVIDED.format(100 * share)


def _with_memory(problem: P, solve: Solve[P], known: Left, seconds: float, **more: Any) -> Any:
    """Solves where memory binds, from what is known."""
    more |= {"relaxed": known.relaxed, "without_memory": known.without_memory}
    if known.prices:
        more["prices"] = known.prices
    return _told(solve(problem, known.choices, seconds, proved=known.lower_bound, **more), known)


def _told(found: Any, known: Left) -> Any:
    """A solution whose report has what :meth:`Left.of` asks for."""
    without_budget = {"without_memory": known.without_memory, "free_seconds": known.free_seconds}
    found.report.update(without_budget, relaxed=known.relaxed)
    return found


def wide(program: Any) -> bool:
    """Whether a program has so many cells that prices take long."""
    return program.cells() > WIDE_CELLS


def splittable(problem: Priced) -> bool:
    """Whether there is a capacity, and repeated layers whose decision is, or may be, divided."""
    enough = problem.table.first_share or any(len(c.members) >= LEAST_SPLIT for c in problem.table.classes)
    return enough and problem.program.capacity is not None


def cheapest(program: Any) -> np.ndarray:
    """Each node's cheapest strategy by itself: no plan, but it holds most when plans do."""
    return np.array([int(np.argmin(node.costs)) for node in program.nodes], np.int64)


def start_of(tied: Any, fine: Any, choices: np.ndarray) -> np.ndarray:
    """Choices for the classes of the table ``fine`` that mean the same as ``choices`` for those of ``tied``."""
    return np.array([choices[tied.class_of[c.members[0]]] for c in fine.classes], np.int64)


def within(options: Any, seconds: float) -> Any:
    """Solver options with less time; what a stage overran leaves none."""
    return replace(options, time_limit=max(0.0, min(options.time_limit, seconds)))


def for_any_plan(keywords: Mapping[str, Any], ends: float) -> dict[str, Any]:
    """Keywords of a solve that is over at the time ``ends`` of its clock if no plan is known by then.

    Only where memory is known to bind: the best plan without a budget, and prices, take the time that they take.
    """
    if keywords.get("mixing") or "relaxed" not in keywords:
        return dict(keywords)
    left = max(0.0, ends - clock())
    return {**keywords, "plan_seconds": min(left, keywords.get("plan_seconds", math.inf))}

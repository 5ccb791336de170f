"""Two decisions for the repeated layers, or one for each, where one is too coarse: where memory binds.

A decision that all layers share moves the memory of all of them at once, so a plan may have to leave gigabytes unused.
With one decision for the first half of the layers and one for the second, a mixture fits, and the bound is close to the
best plan: although it is larger, that program is the easier one. In a small step every layer decides for itself then.
Whether memory binds is known once the program with one decision for all is solved without memory; what fits then is the
answer, and nothing is halved.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np

from autoshard_ilp.costs.fold import LEAST_HALVED

HALVED = "Memory binds: each half of the repeated layers decides for itself."
APART = "Memory binds: every repeated layer decides for itself."

LOOK_SHARE = 0.2
"""Of the time limit: what it may take to see that memory binds in the larger program, where that is expected ..."""

LOOK_TIMES = 3.0
"""... where that is at least so many times what making it took: less shows nothing."""

WIDE_CELLS = 3_000_000
"""Table cells of a program with one decision per repeated layer: of two mesh axes less, of three more."""

PLAN_SHARE = 0.6
"""Of the time left: what the larger program may take to find a plan before the smaller one is tried."""

BOUND_SECONDS = 8.0
"""What a part of the time is not to be smaller than where memory binds, since less shows little ..."""

BOUND_TIMES = 2.0
"""... nor than so many times what the program took without a budget ..."""

BOUND_SHARE = 0.5
"""... as long as that is no larger share of what is left; so long a part may get while plans go on getting better."""


class Binds(Enum):
    """Whether memory binds, as far as is known beforehand."""

    PERHAPS = 0
    LIKELY = 1
    SURELY = 2


class Priced(Protocol):
    """What is solved."""

    @property
    def table(self) -> Any:
        """A :class:`~autoshard_ilp.costs.table.CostTable`."""

    @property
    def program(self) -> Any:
        """The :class:`~autoshard_ilp.program.model.Program` built from it."""


@dataclass(frozen=True, eq=False)
class Left:
    """Where a solve was left under a budget that binds, without proof, so that it can go on from there.

    Attributes:
        halved: whether it was that of the larger program.
        choices: of the best plan found, if any.
        relaxed: of the best plan without a budget, nearly.
        lower_bound, without_memory: seconds, with and without a budget.
        free_seconds: what solving it without a budget took.
    """

    halved: bool
    choices: np.ndarray | None
    relaxed: np.ndarray
    lower_bound: float
    without_memory: float
    free_seconds: float

    @staticmethod
    def of(halved: bool, solution: Any) -> Left | None:
        """None where nothing is left to do, or where it was not the budget that took long."""
        report = solution.report
        relaxed = report.get("relaxed")
        if solution.status != "feasible" or relaxed is None:
            return None
        known = report["without_memory"], report["free_seconds"]
        return Left(halved, solution.choices, relaxed, _bound(solution), *known)


def _bound(solution: Any) -> float:
    """Seconds: what a solution proves, rounding aside."""
    return float(solution.lower_bound - solution.report.get("rounding_error_seconds", 0.0))


P = TypeVar("P", bound=Priced)
Q = TypeVar("Q", contravariant=True)


class Solve(Protocol[Q]):
    """How a program is solved; the keywords are those of :func:`autoshard_ilp.program.solve`."""

    def __call__(self, problem: Q, start: np.ndarray | None, seconds: float, **keywords: Any) -> Any:
        """Solves within ``seconds``, from a known assignment if there is one."""


def solve_halved(
    make: Callable[[bool], P],
    solve: Solve[P],
    time_limit: float,
    clock: Callable[[], float] = time.monotonic,
    cutoff: float = math.inf,
    binds: Binds = Binds.PERHAPS,
    free_part: float = 1.0,
    bound_part: float = 1.0,
    left_before: Left | None = None,
) -> tuple[P, Any, tuple[str, ...]]:
    """Solves a program and, where memory binds, the one with two decisions per repeated layer instead.

    Args:
        make: makes the program, with two decisions per repeated layer (True) or with one.
        solve: (problem, start, seconds, further keywords) -> solution.
        time_limit: seconds for everything.
        clock: seconds that only grow.
        cutoff: objective, in seconds, that ``solve`` only wants a better plan for.
        binds: where memory is likely to bind, the larger program is looked at first, if there is time; where it surely
            does, it is solved at once.
        free_part: of the time left, what the proof may take as long as memory does not bind.
        bound_part: of the time left then, what it may take where memory binds (a little time is not divided so much).
        left_before: where an earlier call for the same step ended; it goes on from there.

    Returns:
        The problem whose plan is taken (or that has none), its solution, and notes for the user.
    """
    began, make = clock(), functools.cache(make)

    def left() -> float:
        return max(0.0, time_limit - (clock() - began))

    def short(first: Any) -> bool:
        """Whether half of the time left would show little, so that there is none for anything else."""
        return bool(BOUND_TIMES * first.seconds > BOUND_SHARE * left())

    def part(first: Any) -> dict[str, float]:
        if short(first):
            return {"seconds": left()}
        least = max(BOUND_SECONDS, BOUND_TIMES * first.seconds)
        steady = max(bound_part * left(), min(least, BOUND_SHARE * left()))
        longer = max(steady, BOUND_SHARE * left())
        return {"seconds": longer, **({"steady_seconds": steady} if longer > steady else {})}

    def over(found: Any) -> bool:
        known = found.status in ("infeasible", "optimal") or found.lower_bound >= cutoff
        ended = found.report.get("interrupted") or found.report.get("too_dear")
        return bool(known or ended or left() <= 0)

    if left_before is not None:
        same = make(left_before.halved)
        found = _with_memory(same, solve, left_before, left())
        return same, found, (_note(same),) if left_before.halved else ()
    for halved in (False,) if binds is Binds.PERHAPS else (True, False):
        since = clock()
        one = make(halved)
        made_seconds, look_seconds = clock() - since, LOOK_SHARE * time_limit
        if not splittable(one):
            return one, _alone(one, solve, left, over, part if bound_part < 1 else None), ()
        if binds is Binds.SURELY:
            return one, solve(one, None, left(), relaxed=cheapest(one.program)), (_note(one),)
        if halved and look_seconds < LOOK_TIMES * made_seconds:
            continue
        first = solve(one, None, look_seconds if halved else free_part * left(), rows=False)
        relaxed = first.report.pop("relaxed", None)
        if relaxed is not None or over(first):
            break
    if relaxed is None or over(first):
        return one, first, ()
    fine = one if one.table.halved else make(True)
    start = None if first.choices is None else start_of(one.table, fine.table, first.choices)
    parts = part(first)
    if not short(first):
        parts["plan_seconds"] = PLAN_SHARE * min(parts.values())
    proved = _bound(first) if one.table.halved else -math.inf  # the larger program may be cheaper
    known = Left(True, start, start_of(one.table, fine.table, relaxed), proved, _bound(first), first.seconds)
    second = _with_memory(fine, solve, known, **parts)
    if second.choices is None and not over(second) and not one.table.halved:
        known = Left(False, first.choices, relaxed, _bound(second), _bound(first), first.seconds)
        return one, _with_memory(one, solve, known, **part(first)), ()
    return fine, second, (_note(fine),)


def _note(problem: Priced) -> str:
    """What the larger program lets decide for itself."""
    return HALVED if any(len(c.members) > 1 for c in problem.table.classes) else APART


def _alone(
    one: P,
    solve: Solve[P],
    left: Callable[[], float],
    over: Callable[[Any], bool],
    part: Callable[[Any], dict[str, float]] | None,
) -> Any:
    """Solves the one program there is; where memory binds, within a ``part`` of the time left then, in seconds."""
    if part is None or one.program.capacity is None:
        return solve(one, None, left())
    first = solve(one, None, left(), rows=False)
    relaxed = first.report.pop("relaxed", None)
    if relaxed is None or over(first):
        return first
    known = Left(False, first.choices, relaxed, _bound(first), _bound(first), first.seconds)
    return _with_memory(one, solve, known, **part(first))


def _with_memory(problem: P, solve: Solve[P], known: Left, seconds: float, **more: Any) -> Any:
    """Solves where memory binds, from what is known."""
    of_relaxed = {"relaxed": known.relaxed, "without_memory": known.without_memory}
    found = solve(problem, known.choices, seconds, proved=known.lower_bound, **of_relaxed, **more)
    found.report.update(of_relaxed, free_seconds=known.free_seconds)
    return found


def wide(program: Any) -> bool:
    """Whether a program is so large that looking at the halved one first may take longer than solving this one."""
    return sum(edge.table.size for edge in program.edges) > WIDE_CELLS


def splittable(problem: Priced) -> bool:
    """Whether there is a capacity, and repeated layers whose decision is, or may be, halved."""
    enough = problem.table.halved or any(len(c.members) >= LEAST_HALVED for c in problem.table.classes)
    return enough and problem.program.capacity is not None


def cheapest(program: Any) -> np.ndarray:
    """Each node's cheapest strategy by itself: no plan, but it holds most when plans do."""
    return np.array([int(np.argmin(node.costs)) for node in program.nodes], np.int64)


def start_of(tied: Any, fine: Any, choices: np.ndarray) -> np.ndarray:
    """Choices for the classes of the table ``fine`` that mean the same as ``choices`` for those of ``tied``."""
    return np.array([choices[tied.class_of[c.members[0]]] for c in fine.classes], np.int64)


def within(options: Any, seconds: float) -> Any:
    """Solver options with less time."""
    return replace(options, time_limit=min(options.time_limit, seconds))

"""The search for every breakpoint of the least step time as a function of the memory budget.

Let f(B) be the least step time within budget B. f falls in steps. One solve at budget B gives a plan of cost c and peak
p <= B with f(b) = c for all b in [p, B], since no plan within B is cheaper and this one fits p. What is left open is
the gap between one such plateau and the next. A gap closes when it is empty, or when the costs at its ends are equal
(f is monotone). Its next probe is its upper end, "the peak of the looser plan minus one byte", which finds the next
breakpoint for certain; where that gets on too slowly for the points allowed, its middle, for as long as something new
is found there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.explore.again import Known, Problem, solved
from autoshard_ilp.program.kernels.loading import clock
from autoshard_ilp.search.axes import bound_of_all

INTERRUPTED = "interrupted"
SAME = 1e-9
"""Relative difference of costs that counts as none: proofs are not exact below it."""


@dataclass(frozen=True, eq=False)
class Probe:
    """The best plan found within one budget, over all rematerialisation policies.

    Attributes:
        budget: bytes per device; None: unlimited.
        problem, solution: of the best policy.
        lower_bound: seconds; no plan within the budget is faster, under any policy.
        proved: whether the plan is.
    """

    budget: int | None
    problem: Problem
    solution: Any
    lower_bound: float
    proved: bool

    @property
    def cost(self) -> float:
        """Objective in seconds."""
        return float(self.solution.objective)

    @property
    def peak(self) -> int:
        """Bytes per device: the smallest budget that this plan fits."""
        return int(self.solution.peak_bytes)


class Policy:
    """Everything known of one rematerialisation policy: plans by peak, bounds by budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plans: list[np.ndarray] = []
        self.met: list[tuple[int, float]] = []  # of plans: peak in bytes and seconds
        self.bounds: list[tuple[float, float]] = []  # (budget, lower bound): holds for every smaller budget too
        self.impossible = -1.0  # no plan within this budget

    def bound(self, budget: float) -> float:
        """Proved lower bound in seconds within a budget."""
        if budget <= self.impossible:
            return math.inf
        return max((b for at, b in self.bounds if at >= budget), default=-math.inf)

    def known(self, budget: float) -> float:
        """Seconds of the cheapest plan met that fits a budget; infinite without one."""
        program = self.problem.program
        while len(self.met) < len(self.plans):
            plan = self.plans[len(self.met)]
            self.met.append((int(program.peak(plan)), float(program.cost(plan))))
        return min((cost for peak, cost in self.met if peak <= budget), default=math.inf)

    def solve(self, budget: int | None, seconds: float, progress: Any, cutoff: float) -> Any:
        """The best plan within a budget that is faster than ``cutoff`` seconds; what is known already is used."""
        options = self.problem.request.solver
        request = replace(self.problem.request, solver=replace(options, time_limit=min(options.time_limit, seconds)))
        problem = replace(self.problem, request=request, program=replace(self.problem.program, capacity=budget))
        limit = math.inf if budget is None else float(budget)
        solution = solved(problem, progress, Known(tuple(self.plans), self.bound(limit)), cutoff=cutoff)
        if solution.status == "infeasible":
            self.impossible = max(self.impossible, limit)
            least = solution.report.get("minimum_capacity_bound", 0)
            self.impossible = max(self.impossible, float(least) - 1)
            return None
        self.bounds.append((limit, solution.lower_bound))
        if solution.choices is None:
            return None
        self.plans.append(solution.choices)
        return solution


@dataclass
class Gap:
    """Budgets between two plateaus: above ``low.budget``, below ``high.peak``."""

    low: Probe
    high: Probe
    halve: bool

    @property
    def width(self) -> int:
        """Bytes."""
        return self.high.peak - 1 - int(self.low.budget or 0)

    @property
    def open(self) -> bool:
        """Whether something may hide in it."""
        return self.width > 0 and self.low.cost > self.high.cost * (1 + SAME)

    @property
    def weight(self) -> float:
        """How much there is to find: the area in byte seconds."""
        return self.width * (self.low.cost - self.high.cost)


class Frontier:
    """The search.

    Args:
        policies: one per rematerialisation policy, in order of preference.
        most: probes allowed.
        deadline: seconds of :func:`autoshard_ilp.program.kernels.loading.clock`.
        progress: an :class:`autoshard_ilp.progress.Progress`.
    """

    def __init__(self, policies: list[Policy], most: int, deadline: float, progress: Any) -> None:
        self.policies, self.most, self.deadline, self.progress = policies, most, deadline, progress
        self.probes: list[Probe] = []
        self.minimum = (0, 0)  # proved bound, smallest budget known to suffice
        self.stopped = ""

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.deadline - clock())

    def probe(self, budget: int | None) -> Probe | None:
        """The best plan within a budget over all policies; None when none is found.

        The policy with the cheapest plan known comes first: the others then need a bound, not an optimum.
        """
        limit = math.inf if budget is None else float(budget)
        best: tuple[float, Policy, Any] | None = None
        for policy in sorted(self.policies, key=lambda p: p.known(limit)):
            cutoff = math.inf if best is None else best[0] * (1 - SAME / 2)
            if policy.bound(limit) >= cutoff:
                continue  # it cannot be faster
            solution = policy.solve(budget, self.left(), self.progress, cutoff)
            if solution is None:
                continue
            if solution.report.get("interrupted"):
                self.stopped = INTERRUPTED
            if best is None or solution.objective < best[0] * (1 - SAME):
                best = (solution.objective, policy, solution)
        if best is None:
            return None
        cost, chosen, solution = best
        bound = min(cost, *(p.bound(limit) for p in self.policies))
        bound = bound_of_all(chosen.problem.table, bound, chosen.problem.request.objective)
        slack = SAME * abs(cost) + float(solution.report.get("rounding_error_seconds", 0.0))
        found = Probe(budget, chosen.problem, solution, bound, cost - bound <= slack)
        self.probes.append(found)
        self.progress.tell({"stage": "pareto", "points": len(self.probes), "objective": cost})
        return found

    def least(self) -> Probe | None:
        """The plan of the smallest budget; sets :attr:`minimum`."""
        from autoshard_ilp.program import minimum_capacity

        found = []
        with self.progress.stage("solve"):
            for policy in self.policies:
                options = replace(policy.problem.request.solver, time_limit=max(1.0, self.left()))
                try:
                    lower, upper, choices = minimum_capacity(policy.problem.program, options)
                except InfeasibleError:
                    policy.impossible = math.inf
                    continue
                if getattr(policy.problem.table, "together", ()):
                    lower = 0  # plans whose mesh axes do not go together may need less
                policy.impossible = max(policy.impossible, lower - 1)
                policy.plans.append(choices)
                found.append((lower, upper))
        if not found:
            return None
        self.minimum = (min(x for x, _ in found), min(x for _, x in found))
        return self.probe(self.minimum[1])

    def run(self) -> None:
        """Finds the ends, then closes gaps, the largest first. Ctrl-C ends that, and what is found is kept."""
        try:
            self._close_gaps()
        except KeyboardInterrupt:
            self._interrupted()

    def at(self, budget: int) -> Probe | None:
        """As :meth:`probe`; None from Ctrl-C on."""
        try:
            return None if self._stop() else self.probe(budget)
        except KeyboardInterrupt:
            self._interrupted()
            return None

    def _interrupted(self) -> None:
        """Raises the interrupt again where there is nothing to keep."""
        self.stopped = INTERRUPTED
        if not self.probes:
            raise KeyboardInterrupt

    def _close_gaps(self) -> None:
        high = self.probe(None)
        if high is None:
            return
        low = self.least()
        gaps = [] if low is None else [Gap(low, high, False)]
        while gaps := [g for g in gaps if g.open]:
            if self._stop():
                return
            gap = max(gaps, key=lambda g: g.weight)
            gaps.remove(gap)
            top = gap.high.peak - 1
            budget = (int(gap.low.budget or 0) + top + 1) // 2 if gap.halve else top
            found = self.probe(budget)
            if found is None or not (gap.low.cost * (1 + SAME) >= found.cost):
                self.stopped = self.stopped or "some budgets have no plan in the time allowed"
                continue
            slow = (gap.high.peak - found.peak) * max(1, self.most - len(self.probes)) < gap.width
            halve = slow or (gap.halve and found.cost < gap.low.cost * (1 - SAME))
            gaps += [Gap(gap.low, found, halve), Gap(found, gap.high, halve)]

    def _stop(self) -> bool:
        if not self.stopped and len(self.probes) >= self.most:
            self.stopped = f"max_points={self.most} reached (more of them find more)"
        if not self.stopped and not self.left():
            self.stopped = "time limit reached"
        return bool(self.stopped)

"""What one solve knows so far: the best plan, the best bound, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard_ilp.program.kernels.loading import loaded_seconds
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.nets.net import Net
from autoshard_ilp.program.nets.presolve import Presolve

PROOF = 1e-9  # relative; float64 sums of thousands of costs are not exact below this
ROUGHLY = 0.1  # relative gap, to a plan or a cutoff, that is as good as needed where memory is too dear
BETTER = 5e-3  # relative: a plan that is better by this is a step ..
STEP_SHARE = 0.25  # .. and the next one may take so much of the time that the last one was found in


@dataclass
class Search:
    """What one solve knows so far: the best plan, the best bound, the report."""

    program: Program
    options: SolverOptions
    began: float
    on_progress: Callable[[dict], None] | None
    cutoff: float = math.inf  # seconds: only cheaper plans are wanted
    plan_seconds: float = math.inf  # for any plan
    steady_seconds: float = math.inf  # after which it ends unless plans are getting better
    dear: float = 1.0  # share of the objective: enough is known once memory is proved to add more than this
    without_memory: float = -math.inf  # seconds: a bound of the optimum without memory
    proved: float = -math.inf  # seconds: a lower bound, memory included, from before
    best: np.ndarray | None = None
    solver: Callable[..., Solution] | None = None  # of smaller programs
    upper: float = field(init=False)  # of the best plan, or the cutoff
    lower: float = -math.inf
    loaded: float = field(default_factory=loaded_seconds)  # when the search began
    step: tuple[float, float] = (math.inf, 0.0)  # the last plan that was better by much: its cost, when it was found
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.upper = self.cutoff
        least = sum(float(np.min(n.costs)) for n in self.program.nodes)
        least += sum(float(np.min(e.table)) for e in self.program.edges)
        if math.isfinite(least):  # of no use but to be a number, should time run out at once
            self.lower = min(least, self.cutoff)

    @property
    def deadline(self) -> float:
        """Monotonic time at which the limit is reached: that for any plan, until one is known.

        Compiling puts it off: ask again after what may have compiled.
        """
        if self.best is None:
            return self._start + min(self.options.time_limit, self.plan_seconds, self.steady_seconds)
        return min(self.last_deadline, self._start + max(self.steady_seconds, (1 + STEP_SHARE) * self.step[1]))

    @property
    def last_deadline(self) -> float:
        """The deadline if plans go on getting better."""
        return self._start + self.options.time_limit

    @property
    def seconds(self) -> float:
        """Of this search so far, compiling aside."""
        return time.monotonic() - self._start

    @property
    def _start(self) -> float:
        return self.began + loaded_seconds() - self.loaded

    def tell(self, stage: str) -> None:
        """Report progress."""
        if self.on_progress is not None:
            self.on_progress(
                {
                    "stage": stage,
                    "seconds": self.seconds,
                    "objective": self.upper,
                    "lower_bound": self.lower,
                    "choices": self.best,
                }
            )

    def offer(self, choices: np.ndarray) -> bool:
        """Keep ``choices`` if they are the best plan so far that satisfies everything."""
        cost = self.program.cost(choices)
        if not cost < self.upper:
            return False
        if self.program.capacity is not None and self.program.peak(choices) > self.program.capacity:
            return False
        self.best, self.upper = np.array(choices, np.int64), cost
        if cost <= (1 - BETTER) * self.step[0]:
            self.step = cost, self.seconds
        return True

    def prove(self, bound: float) -> None:
        """A valid lower bound of the whole program."""
        self.lower = max(self.lower, bound)

    def nothing_below(self) -> bool:
        """No plan is cheaper than :attr:`upper`: proves that, or returns True where that means that there is none."""
        if math.isinf(self.upper):
            return True
        self.prove(self.upper)
        return False

    def add_seconds(self, stage: str, since: float) -> None:
        """Book the time since a monotonic moment to a stage of the report ("presolve" is part of the other stages)."""
        self.book(stage, time.monotonic() - since)

    def book(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage of the report."""
        stages = self.report.setdefault("seconds", {})
        stages[stage] = stages.get(stage, 0.0) + seconds

    def presolve(self, net: Net, max_degree: int, max_cells: int, capacity: int | None = None) -> Presolve:
        """Shrink ``net`` in place within the time left; the time counts as presolve in the report.

        Raises:
            EmptyNodeError: no finite assignment exists, or none within ``capacity`` bytes in the net's rows.
        """
        since = time.monotonic()
        presolve = Presolve(net, max_degree=max_degree, max_cells=max_cells, deadline=self.deadline, capacity=capacity)
        try:
            presolve.run()
        finally:
            self.add_seconds("presolve", since)
        return presolve

    @property
    def too_dear(self) -> bool:
        """Whether memory is proved to add more than the share :attr:`dear` of the objective."""
        return self.without_memory > 0 and self.lower * (1.0 - self.dear) >= self.without_memory

    def done(self) -> bool:
        """Proved to the gap asked for, or too dear and roughly known.

        A cutoff is no plan: what is cheaper, if only a little, is still looked for.
        """
        if math.isinf(self.upper):
            return False
        gap = 0.0 if self.best is None else max(self.options.relative_gap, PROOF) * abs(self.upper) + self.rounding
        if self.too_dear:
            gap = max(gap, ROUGHLY * abs(self.upper))
        return self.upper - self.lower <= gap

    @property
    def rounding(self) -> float:
        """Seconds lost to integer costs so far."""
        return float(self.report.get("rounding_error_seconds", 0.0))

    def finish(self, infeasible: bool) -> Solution:
        """The answer."""
        if infeasible:
            return Solution("infeasible", None, math.inf, math.inf, 0, self.seconds, self.report)
        self.prove(self.proved)
        if self.too_dear:
            self.report["too_dear"] = True
        if self.best is None:
            return Solution("feasible", None, math.inf, min(self.lower, self.cutoff), 0, self.seconds, self.report)
        proved = self.upper - self.lower <= PROOF * abs(self.upper) + self.rounding
        lower = min(self.lower, self.upper)
        status = "optimal" if proved else "feasible"
        return Solution(status, self.best, self.upper, lower, self.program.peak(self.best), self.seconds, self.report)

"""What searches under memory rows share: rows, prices, what is ruled out, plans seen, and steps all of them take."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program.cpsat import CpOptions, CpResult, solve_rows
from autoshard_ilp.program.infeasible import minimum_capacity
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.families import ALL, Families, Pace
from autoshard_ilp.program.rows.memory import Owners, Row, violated_times
from autoshard_ilp.program.search import Search

CELLS = 20_000  # largest table that presolve makes
SMALL = 3000  # strategies and cells
MUCH = 0.3  # of the largest excess over the capacity
FIRST_PRICE = 0.1  # of the relaxed cost per capacity


class UnderRows:
    """One program under rows: what every part of the search reads and adds to.

    Args:
        search: shared state; ``search.program.capacity`` is set.
        relaxed: an assignment that exceeds the capacity where memory binds, such as the optimum without memory.
        room: what the capacity leaves of each node and edge by itself (has run).
        prices: time -> seconds per byte in use then, to start from.
    """

    def __init__(
        self, search: Search, relaxed: np.ndarray, room: Room, prices: Mapping[int, float] | None = None
    ) -> None:
        assert search.program.capacity is not None
        self.search, self.program, self.capacity = search, search.program, search.program.capacity
        self.owners = Owners(self.program)
        self.rows: list[Row] = []
        self.prices = dict(prices or {})  # by time
        self.keep, self.room = room.keep, room
        self.relaxed = relaxed
        self.seen: list[np.ndarray] = []
        self.asked = False  # for any plan
        self.freed = False  # solved without a capacity to the end
        self.families: Families | None = None
        self.neighbourhood: Any = None  # the :class:`.neighbourhood.Neighbourhood` that goes on where it ended
        self.log: list[dict[str, Any]] = []
        search.report["memory"] = self.log
        search.without_memory = max(search.without_memory, search.lower)
        search.report["without_memory"] = search.lower
        search.prove(search.proved)

    @staticmethod
    def small(net: Net) -> bool:
        """Few enough variables for CP-SAT to finish quickly."""
        size = net.size()
        return size["cells"] + size["strategies"] < SMALL

    def remember(self, choices: np.ndarray) -> None:
        """Keep a plan for cuts and combinations, unless one of its choices alone can never fit."""
        if self.room.allows(choices) and not any(np.array_equal(choices, x) for x in self.seen):
            self.seen.append(choices)

    def first_price(self) -> float:
        """Seconds per byte: a price of the right order."""
        cost = self.program.cost(self.relaxed)
        return FIRST_PRICE * max(abs(cost if math.isfinite(cost) else self.search.lower), 1e-30) / max(1, self.capacity)

    def drop(self, ruled_out: dict[int, np.ndarray]) -> None:
        """Leave strategies out for good: no plan cheaper than the best known uses them."""
        for v, gone in ruled_out.items():
            self.keep[v] = self.keep[v].copy()
            self.keep[v][gone] = False

    def first_times(self) -> list[int]:
        """The worst moments of the relaxed plan: what exceeds by little vanishes with what exceeds by much."""
        times = violated_times(self.program, self.relaxed, self.capacity, set())
        excess = self.program.usage_over_time(self.relaxed) - self.capacity
        return [t for t in times if excess[t] >= MUCH * excess[times[0]]]

    def first_plan(self) -> list[int]:
        """Look for any plan that fits, by least peak, once; times to add as rows.

        Raises:
            EmptyNodeError: proved that none fits.
        """
        if self.asked:
            return []
        self.asked = True
        left = self.search.deadline - time.monotonic()
        options = dataclasses.replace(self.search.options, time_limit=max(0.1, left / 4))
        try:
            lower, _, choices = minimum_capacity(self.program, options, enough=self.capacity)
        except InfeasibleError:  # nothing found in so short a time: ``relaxed`` is finite
            return []
        self.search.report["minimum_capacity_bound"] = lower
        if lower > self.capacity:
            raise EmptyNodeError("capacity")
        self.remember(choices)
        return self.offer(choices)

    def may_look(self, pace: Pace = ALL) -> bool:
        """Whether plans within families of strategies have not been looked for yet, and there is time for that."""
        if self.families is None:
            self.families = Families(self.search)
        return self.families.affordable(pace)

    def within_families(self, pace: Pace = ALL) -> None:
        """Look for plans within families of strategies; once."""
        assert self.families is not None
        since = time.monotonic()
        for plan in self.families.look(pace):
            self.remember(plan)
        self.search.add_seconds("families", since)

    def stop(self) -> bool:
        return self.search.done() or time.monotonic() > self.search.deadline

    def _violations(self, choices: np.ndarray) -> list[int]:
        return violated_times(self.program, choices, self.capacity, {r.time for r in self.rows})

    def offer(self, choices: np.ndarray) -> list[int]:
        """Offer a plan that satisfies all rows; times to add as rows when it does not fit elsewhere."""
        if not self.program.cost(choices) < self.search.upper:
            return []
        if self.search.offer(choices):
            self.search.tell("memory")
            return []
        return self._violations(choices)

    def settle(self, net: Net, whole: bool = True) -> list[int]:
        """Everything is decided: the plan left is the best under the rows, if it satisfies them."""
        choices = net.complete(np.zeros(len(net.cost), np.int64))
        if (net.base > self.capacity).any():
            raise EmptyNodeError("rows")
        if whole:
            self.search.prove(min(net.constant, self.search.upper))
        return self.offer(choices)

    def excess(self, choices: np.ndarray) -> np.ndarray:
        """Usage minus capacity at every row, in bytes (float64)."""
        used = self.program.usage_over_time(choices)
        return np.array([int(used[r.time]) - self.capacity for r in self.rows], np.float64)

    def cpsat_part(self, net: Net) -> tuple[list[int], bool, float]:
        """Finish a branch with CP-SAT. Returns times to add, whether the branch is closed, and its bound in seconds.

        CP-SAT is done with a branch once it is within the gap asked for, so a closed branch may hold cheaper plans.
        """
        result = self._run_cpsat(net)
        fresh = [] if result.choices is None else self.offer(net.complete(result.choices))
        return fresh, result.status == "optimal" and not fresh, result.bound

    def _run_cpsat(self, net: Net) -> CpResult:
        """CP-SAT under the rows; EmptyNodeError when nothing beats the best plan."""
        search, options = self.search, self.search.options
        since = time.monotonic()
        reduce.compress_all(net)
        gap = options.relative_gap * abs(search.upper) if math.isfinite(search.upper) else 0.0
        result = solve_rows(
            net,
            self.program,
            self.rows,
            self.capacity,
            CpOptions(search.deadline, options.seed, options.workers, gap),
            upper=search.upper,
            hint=search.best,
            on_progress=search.on_progress,
        )
        search.add_seconds("cp-sat", since)
        search.report["rounding_error_seconds"] = max(search.rounding, result.rounding_error_seconds)
        if result.status == "infeasible":
            raise EmptyNodeError("rows")
        if result.choices is not None:
            plan = net.complete(result.choices)
            self.remember(plan)
            if result.interrupted:
                self.offer(plan)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

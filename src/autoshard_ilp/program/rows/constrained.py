"""Solve under memory rows: the dual, then branching or CP-SAT for the rest; more rows until the plan fits always."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program.cpsat import CpOptions, CpResult, solve_rows
from autoshard_ilp.program.infeasible import least_cost, minimum_capacity, weighted_usage
from autoshard_ilp.program.kernels.compiled import load_windows
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.rows.branch import Tree
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.closing import NEAR, Closing
from autoshard_ilp.program.rows.dual import Dual
from autoshard_ilp.program.rows.families import ALL, Families, Pace
from autoshard_ilp.program.rows.memory import Owners, Row, violated_times
from autoshard_ilp.program.rows.neighbourhood import Neighbourhood
from autoshard_ilp.program.search import Search

CELLS = 20_000
SMALL = 3000
MUCH = 0.3  # of the largest excess over the capacity
FIRST_PRICE = 0.1  # of the relaxed cost per capacity

HARDLY = 1e-3
"""Relative distance of a plan to the bound without a capacity from which on the best plan without one may fit ..."""

FREE_NODES = 300
"""... in programs of at most so many nodes: no whole model, for which a budget is met faster than that is shown ..."""

FREE_SHARE = 0.4
"""... and what of the time left it is looked for in."""


class Constrained:
    """The search under rows for one program.

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
        self.neighbourhood: Neighbourhood | None = None
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

    def run(self) -> bool:
        """True when proved infeasible."""
        fresh = self.first_times()
        fresh += [t for t, price in self.prices.items() if price > 0 and t not in fresh]
        if fresh and math.isinf(self.search.upper):
            # What the worst moment needs at least, costs aside: often proves at once that nothing fits.
            weights = np.zeros(int(np.max(self.program.lifetimes.end)))
            weights[fresh[0]] = 1.0
            least, bound = least_cost(weighted_usage(self.program, weights), self.search.deadline)
            if bound > self.capacity + 0.5:
                self.search.report["minimum_capacity_bound"] = math.ceil(bound * (1 - 1e-12) - 1e-6)
                return True
            if least is not None:
                self.remember(least)
                fresh += [t for t in self.offer(least)[:1] if t not in fresh]  # where a plan gets into other trouble
        if fresh:
            load_windows()
        while fresh and not self.stop():
            if self._hardly_dear():
                fresh += [t for t in self._without_rows() if t not in fresh]
                if self.stop():
                    break
            self.rows += [self.owners.row(t) for t in fresh]
            self.search.report["rows"] = len(self.rows)
            try:
                fresh = self._round()
            except EmptyNodeError:
                return self.search.nothing_below()
        return False

    def first_times(self) -> list[int]:
        """The worst moments of the relaxed plan: what exceeds by little vanishes with what exceeds by much."""
        times = violated_times(self.program, self.relaxed, self.capacity, set())
        excess = self.program.usage_over_time(self.relaxed) - self.capacity
        return [t for t in times if excess[t] >= MUCH * excess[times[0]]]

    def _hardly_dear(self) -> bool:
        """Whether the best plan costs hardly more than any without a capacity, in a program that is soon solved so."""
        search = self.search
        if self.freed or search.best is None or len(self.program.nodes) > FREE_NODES:
            return False
        return search.upper - search.without_memory <= HARDLY * abs(search.upper)

    def _without_rows(self) -> list[int]:
        """Solve without a capacity, once; times to add as rows. Of plans that cost next to the same, one may fit.

        The relaxation is left as soon as its best plan does not fit (:func:`autoshard_ilp.program.solve.descend`).
        """
        self.freed, since = True, time.monotonic()
        share = FREE_SHARE * (self.search.deadline - since)
        free = dataclasses.replace(self.program, capacity=None)
        choices, bound = least_cost(free, since + share)
        self.search.add_seconds("descent", since)
        self.search.prove(bound)
        self.search.without_memory = max(self.search.without_memory, bound)
        self.search.report["without_memory"] = max(self.search.report["without_memory"], bound)
        if choices is None:
            return []
        self.remember(choices)
        return self.offer(choices)

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

    def look_around(self) -> None:
        """Improve the best plan, where there is one, a region at a time, for as long as that is worth its time."""
        since, known = time.monotonic(), self.search.best
        if known is None:
            return
        if self.neighbourhood is None:
            self.neighbourhood = Neighbourhood(self)
        self.neighbourhood.run()
        if self.search.best is not None and self.search.best is not known:
            self.remember(self.search.best)
        self.search.add_seconds("neighbourhood", since)

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

    def _round(self) -> list[int]:
        """Solve under the present rows. Returns times to add (empty: finished, proved or out of time)."""
        search = self.search
        net = build_net(self.program, self.keep, self.rows, self.room.cells)
        entry: dict[str, Any] = {"rows": len(self.rows), "before": net.size()}
        self.log.append(entry)
        since = time.monotonic()
        presolve = search.presolve(net, 3, CELLS, self.capacity)
        entry.update(removed=dict(presolve.counts), after=net.size(), presolve_seconds=time.monotonic() - since)
        if not net.live:
            return self.settle(net)
        if self.stop():
            return []
        for name, kind in (("closing", Closing), ("dual", Dual), ("again", Closing)):
            if name == "again" and not self._closer(entry):
                break
            since = time.monotonic()
            part = kind(self, net, self._prices_of_rows())
            fresh = part.run()
            net = part.net
            self.prices = {r.time: float(p) for r, p in zip(self.rows, part.prices, strict=True)}
            search.report["prices"] = self.prices
            seconds = time.monotonic() - since
            entry.update({f"{name}_seconds": seconds, f"{name}_bound": part.bound, f"{name}_upper": search.upper})
            if fresh or self.stop():
                return fresh
            if not net.live:
                return self.settle(net)
        if self.small(net):
            return self.cpsat(net)
        return Tree(self, net, self._prices_of_rows()).run()

    def _prices_of_rows(self) -> np.ndarray:
        """Seconds per byte, of each row."""
        return np.array([self.prices.get(row.time, 0.0) for row in self.rows])

    def _closer(self, entry: dict[str, Any]) -> bool:
        """Whether the dual found a plan so good that guesses, which left too much before it, may leave little now."""
        upper = self.search.upper
        return upper < entry["closing_upper"] and upper - self.search.lower < NEAR * abs(upper)

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

    def cpsat(self, net: Net) -> list[int]:
        """Finish the whole program with CP-SAT. Returns times to add."""
        result = self._run_cpsat(net)
        self.search.prove(min(result.bound, self.search.upper))
        return [] if result.choices is None else self.offer(net.complete(result.choices))

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

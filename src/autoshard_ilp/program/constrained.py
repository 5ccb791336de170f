"""Solve under memory rows: prices, removal, presolve in turn; CP-SAT for the rest; more rows until all fits."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.program import reduce
from autoshard_ilp.program.bounds import Messages
from autoshard_ilp.program.branch import Tree
from autoshard_ilp.program.core import ROUNDS
from autoshard_ilp.program.cpsat import CpOptions, CpResult, solve_net
from autoshard_ilp.program.infeasible import minimum_capacity
from autoshard_ilp.program.memory import Owners, Row, counted, violated_times
from autoshard_ilp.program.net import EmptyNodeError, Factor, Net, build_net
from autoshard_ilp.program.presolve import Presolve
from autoshard_ilp.program.prices import PricedRows, PriceSearch, polish, repair
from autoshard_ilp.program.search import Search

FIRST_SWEEPS = 15
STEP_SWEEPS = 4
STEPS = 30
PATIENCE = 6  # price steps without progress
PROGRESS = 0.02  # of the gap
SMALL = 3000


@dataclass(frozen=True, eq=False)
class Priced:
    """Result of pricing one net: the reduced net (true costs), prices, bound, rows to add, removals, plans seen."""

    net: Net
    prices: np.ndarray
    bound: float
    fresh: list[int]
    ruled_out: dict[int, np.ndarray]
    plans: list[tuple[np.ndarray, bool]]  # choices, exceeds a row


def small(net: Net) -> bool:
    """Few enough variables for CP-SAT to finish quickly."""
    return sum(f.table.size for f in net.factors.values()) + sum(len(net.alive[v]) for v in net.live) < SMALL


class Constrained:
    """The search under rows for one program.

    Args:
        search: shared state; ``search.program.capacity`` is set.
        relaxed: the optimum without memory (or the best found), which exceeds the capacity somewhere.
    """

    def __init__(self, search: Search, relaxed: np.ndarray) -> None:
        assert search.program.capacity is not None
        self.search, self.program, self.capacity = search, search.program, search.program.capacity
        self.owners = Owners(self.program)
        self.rows: list[Row] = []
        self.prices: dict[int, float] = {}  # by time
        self.keep = [np.isfinite(np.asarray(n.costs, np.float64)) for n in self.program.nodes]
        self.seen = [relaxed]
        self.log: list[dict[str, Any]] = []
        search.report["memory"] = self.log

    def run(self) -> bool:
        """True when proved infeasible."""
        if self.search.best is None and not self._first_plan():
            return True
        fresh = violated_times(self.program, self.seen[0], self.capacity, set())
        while fresh and not self.stop():
            self.rows += [self.owners.row(t) for t in fresh]
            self.search.report["rows"] = len(self.rows)
            try:
                fresh = self._round()
            except EmptyNodeError:  # no plan cheaper than the best known
                if self.search.best is None:
                    return True
                self.search.prove(self.search.upper)
                return False
        return False

    def _first_plan(self) -> bool:
        """Look for any plan that fits, by least peak. False when proved that there is none."""
        left = self.search.deadline - time.monotonic()
        options = dataclasses.replace(self.search.options, time_limit=max(0.1, left / 4))
        lower, _, choices = minimum_capacity(self.program, options, enough=self.capacity)
        self.search.report["minimum_capacity_bound"] = lower
        self._offer(choices)
        return lower <= self.capacity

    def stop(self) -> bool:
        return self.search.done() or time.monotonic() > self.search.deadline

    def _violations(self, choices: np.ndarray) -> list[int]:
        return violated_times(self.program, choices, self.capacity, {r.time for r in self.rows})

    def _offer(self, choices: np.ndarray) -> list[int]:
        """Offer a plan that satisfies all rows; times to add as rows when it does not fit elsewhere."""
        if self.search.offer(choices):
            self.search.tell("memory")
            return []
        return self._violations(choices)

    def _round(self) -> list[int]:
        """Solve under the present rows. Returns times to add (empty: finished, proved or out of time)."""
        nodes, edges = counted(self.program, self.rows)
        net = build_net(self.program, self.keep, nodes, edges)
        prices = np.array([self.prices.get(r.time, 0.0) for r in self.rows])
        for degree, cells in ROUNDS[:4]:
            entry: dict[str, Any] = {"rows": len(self.rows), "before": net.size()}
            self.log.append(entry)
            since = time.monotonic()
            presolve = Presolve(net, max_degree=degree, max_cells=cells, deadline=self.search.deadline)
            presolve.run()
            entry.update(removed=dict(presolve.counts), after=net.size(), presolve_seconds=time.monotonic() - since)
            if not net.live:
                return self.settle(net)
            if self.stop():
                return []
            since = time.monotonic()
            net, prices, fresh, closed = self._price_root(net, prices)
            entry.update(message_seconds=time.monotonic() - since, lower_bound=self.search.lower)
            self.prices = {r.time: float(p) for r, p in zip(self.rows, prices, strict=True)}
            if fresh or self.stop():
                return fresh
            if closed < 0.3:  # branching does more than wider elimination
                break
        if small(net):
            return self.cpsat(net)
        return Tree(self, net, prices).run()

    def settle(self, net: Net, whole: bool = True) -> list[int]:
        """Everything is decided: the plan left is the best under the rows, if it satisfies them."""
        choices = net.complete(np.zeros(len(net.cost), np.int64))
        if (PricedRows(net, self.rows, self.capacity).usage(choices) > self.capacity).any():
            raise EmptyNodeError("rows")
        if whole:
            self.search.prove(min(net.constant, self.search.upper))
        return self._offer(choices)

    def _price_root(self, net: Net, prices: np.ndarray) -> tuple[Net, np.ndarray, list[int], float]:
        """Price the whole program: also global bounds and removals. The last result is the part of the gap closed."""
        search = self.search
        gap = search.upper - search.lower
        result = self.price(net, prices, STEPS, FIRST_SWEEPS)
        search.prove(result.bound)
        for v, gone in result.ruled_out.items():
            self.keep[v] = self.keep[v].copy()
            self.keep[v][gone] = False
        after = search.upper - search.lower
        closed = 1.0 if math.isinf(gap) and math.isfinite(after) else (gap - after) / gap if gap > 0 else 0.0
        return result.net, result.prices, result.fresh, closed

    def price(self, net: Net, prices: np.ndarray, steps: int, sweeps: int) -> Priced:
        """Improve prices and messages of one net, look for plans, remove what cannot beat the best plan.

        Raises:
            EmptyNodeError: the net has no plan cheaper than the best known.
        """
        for number in list(net.factors):
            reduce.compress(net, number)
        search, priced, messages = self.search, PricedRows(net, self.rows, self.capacity), Messages(net)
        planes = PriceSearch(len(self.rows), self.capacity)
        messages.reprice(*priced.charge(prices))
        current, fresh = prices, list[int]()
        plans: list[tuple[np.ndarray, bool]] = []
        for x in self.seen[-1:] + ([] if search.best is None else [search.best]):
            planes.cut(self.program.cost(x), self._excess(x))
        for _ in range(sweeps):
            messages.sweep(search.upper)
        planes.update(current, messages.bound)
        stale, best_gap = 0, search.upper - planes.best_bound
        for _ in range(steps):
            fresh = self._try_plans(net, messages, priced, planes, plans, current)
            if fresh or self.stop():
                break
            target = planes.next()
            if np.allclose(target, current, rtol=1e-3, atol=1e-6 * float(target.max(initial=0.0))):
                break
            current = self._move(messages, priced, current, target, STEP_SWEEPS)
            planes.update(current, messages.bound)
            now = search.upper - planes.best_bound
            stale = 0 if now < (1 - PROGRESS) * best_gap or math.isinf(now) else stale + 1
            best_gap = min(best_gap, now)
            if stale >= min(PATIENCE, steps // 3 + 1):
                break
        if not fresh and not self.stop():
            current = self._move(messages, priced, current, planes.best, sweeps)
            fresh = self._try_plans(net, messages, priced, planes, plans, current)
            messages.remove_cells(search.upper)
        bound = max(messages.bound, planes.best_bound)
        return Priced(self._unprice(messages, priced, current), planes.best, bound, fresh, messages.ruled_out(), plans)

    def _excess(self, choices: np.ndarray) -> np.ndarray:
        used = self.program.usage_over_time(choices)
        return np.array([int(used[r.time]) - self.capacity for r in self.rows], np.float64)

    def _move(
        self, messages: Messages, priced: PricedRows, old: np.ndarray, new: np.ndarray, sweeps: int
    ) -> np.ndarray:
        """Change the prices and let the messages settle."""
        nodes, factors, offset = priced.charge(new)
        old_nodes, old_factors, old_offset = priced.charge(old)
        for extra, before in ((nodes, old_nodes), (factors, old_factors)):
            for key, values in before.items():
                extra[key] = extra[key] - values if key in extra else -values
        messages.reprice(nodes, factors, offset - old_offset)
        for _ in range(sweeps):
            messages.sweep(self.search.upper)
            if time.monotonic() > self.search.deadline:
                break
        return new

    def _try_plans(
        self,
        net: Net,
        messages: Messages,
        priced: PricedRows,
        planes: PriceSearch,
        plans: list[tuple[np.ndarray, bool]],
        prices: np.ndarray,
    ) -> list[int]:
        """Decode, learn a cut, offer the plan or its repair. Times at which a plan that fits the rows does not fit."""
        choices = messages.improve(messages.decode())
        excess = priced.usage(choices) - self.capacity
        planes.cut(net.value(choices), excess)
        plans.append((choices, bool((excess > 0).any())))
        if (excess > 0).any():
            repaired = repair(messages, priced, choices)
            if repaired is None:
                return []
            choices = repaired
        choices = polish(messages, priced, prices, choices)
        plans.append((choices, False))
        planes.cut(net.value(choices), priced.usage(choices) - self.capacity)
        return self._offer(net.complete(choices))

    def _unprice(self, messages: Messages, priced: PricedRows, prices: np.ndarray) -> Net:
        """The net with moved costs but without the charge: again the true costs of every plan that is left."""
        net = messages.apply()
        nodes, factors, offset = priced.charge(prices)
        net.constant -= offset
        for v, extra in nodes.items():
            net.set_cost(v, net.cost[v] - extra)
        for n, table in factors.items():
            f = net.factors[n]
            net.replace(n, Factor(f.scope, f.labels, f.table - table, f.edge, f.held))
        return net

    def cpsat(self, net: Net) -> list[int]:
        """Finish the whole program with CP-SAT. Returns times to add."""
        result = self._run_cpsat(net)
        self.search.prove(min(result.bound, self.search.upper))
        return [] if result.choices is None else self._offer(net.complete(result.choices))

    def cpsat_part(self, net: Net) -> tuple[list[int], bool]:
        """Finish a branch with CP-SAT. Returns times to add, and whether the branch is closed."""
        result = self._run_cpsat(net)
        fresh = [] if result.choices is None else self._offer(net.complete(result.choices))
        return fresh, result.status == "optimal" and not fresh

    def _run_cpsat(self, net: Net) -> CpResult:
        """CP-SAT under the rows; EmptyNodeError when nothing beats the best plan."""
        search, options = self.search, self.search.options
        since = time.monotonic()
        for number in list(net.factors):
            reduce.compress(net, number)
        gap = options.relative_gap * abs(search.upper) if math.isfinite(search.upper) else 0.0
        result = solve_net(
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
            self.seen.append(net.complete(result.choices))
        return result

"""Descent under memory rows: presolve that carries bytes, message passing on priced costs, prices by cutting planes.

For prices l >= 0 a plan that fits costs at least its priced cost (see ``prices``), so what message passing rules out
below the best plan known is in no better plan, and is removed from the program itself, whatever the prices. Messages
stay when prices move: only the change of prices is charged. Each assignment met, fitting or not, is a cutting plane
of the dual function; the next prices lie halfway to the maximiser of these planes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard_ilp.program import reduce
from autoshard_ilp.program.bounds import Messages
from autoshard_ilp.program.cpsat import CpOptions, solve_rows
from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.prices import PricedRows

if TYPE_CHECKING:
    from autoshard_ilp.program.constrained import Constrained

ROUNDS = ((99, 20_000), (99, 50_000), (99, 150_000), (99, 500_000), (99, 2_000_000))
STEPS = 14  # prices per round
SWEEPS = 60  # most sweeps at one price
CHECK = 10  # sweeps between two looks at the bound
STALL = 0.02  # at one price: go on while CHECK sweeps close this part of the gap
FIRST_PRICE = 0.05  # of the relaxed cost per capacity
PATIENCE = 4  # prices without a better bound that end a round
WORTH = 0.8  # a further round pays when this part of the strategies, at most, is left
POOL = 8  # plans combined
CORE = 2  # strategies per node of least bound combined with them
POOL_CELLS = 60_000  # larger combinations are left alone
POOL_SECONDS = 2.0


@dataclass(eq=False)
class Dual:
    """One descent over ``net`` (true costs, bytes of ``owner.rows``).

    Args:
        owner: rows, plans, the search.
        net: the program or, when ``whole`` is False, one branch of it; changed in place, then replaced.
        prices: seconds per byte to start from.
        whole: bounds and removals hold for the whole program.
        rounds: most neighbours and most table cells of an eliminated node, round by round.
        steps: most prices per round.
    """

    owner: Constrained
    net: Net
    prices: np.ndarray  # best so far, seconds per byte
    whole: bool = True
    rounds: Sequence[tuple[int, int]] = ROUNDS
    steps: int = STEPS
    bound: float = -math.inf
    cuts: list[tuple[float, np.ndarray]] = field(default_factory=list)  # cost, usage - capacity (bytes per row)
    plans: list[np.ndarray] = field(default_factory=list)  # of the cuts
    log: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[int]:
        """Improve prices, bound and plans; times at which a plan that satisfies the rows does not fit.

        Raises:
            EmptyNodeError: nothing beats the best plan.
        """
        owner, search = self.owner, self.owner.search
        for x in owner.seen:
            if self.whole or all(math.isfinite(self.net.cost[v][x[v]]) for v in self.net.live):
                self._cut(x)
        for degree, cells in self.rounds:
            before = _strategies(self.net)
            if self.whole:
                search.report.setdefault("presolve_rows", []).append(self.net.size())
            presolve = search.presolve(self.net, degree, cells, owner.capacity)
            entry: dict[str, Any] = {"removed": dict(presolve.counts), "after": self.net.size()}
            self.log.append(entry)
            if not self.net.live or owner.stop():
                break
            since = time.monotonic()
            fresh = self._round()
            entry.update(lower_bound=self.bound, upper=search.upper, message_seconds=time.monotonic() - since)
            if fresh or owner.stop():
                return fresh
            if owner.small(self.net) or (not self.whole and _strategies(self.net) > WORTH * before):
                break
        return []

    def _cut(self, choices: np.ndarray) -> list[int]:
        """A plane of the dual function; if the plan satisfies the rows, the times where it does not fit."""
        excess = self.owner.excess(choices)
        self.cuts.append((self.owner.program.cost(choices), excess))
        self.plans.append(choices)
        return self.owner.offer(choices) if (excess <= 0).all() else []

    def _round(self) -> list[int]:
        """Messages and prices on the present net; what they rule out is removed from it."""
        owner, search = self.owner, self.owner.search
        for number in list(self.net.factors):
            reduce.compress(self.net, number)
        priced = PricedRows(self.net, owner.capacity)
        messages = Messages(self.net)
        charged = np.zeros(len(self.prices))
        unit = FIRST_PRICE * max(abs(search.lower), 1e-30) / max(1, owner.capacity)
        box = np.maximum(4.0 * self.prices, unit)
        current, best, idle = self.prices, -math.inf, 0
        for step in range(self.steps):
            recharge(messages, priced, charged, current)
            charged = current
            self._sweep(messages, SWEEPS if step else 2 * SWEEPS)
            choices = self.net.complete(messages.improve(messages.decode()))
            fresh = self._cut(choices)
            idle = 0 if messages.bound > best + STALL * (search.upper - best) else idle + 1
            if messages.bound > best:
                best, self.prices = messages.bound, current
            self._prove(messages.bound)
            if fresh or owner.stop():
                return fresh
            if self.whole and step % 4 == 3:
                fresh = self._combine(messages)
                if not fresh and search.best is None and step == 3:
                    fresh = owner.first_plan()
                if fresh or owner.stop():
                    return fresh
            target, box = self._next(box)
            if idle >= PATIENCE or np.allclose(target, self.prices, rtol=1e-3, atol=1e-9 * unit):
                break
            current = 0.5 * (self.prices + target)
        recharge(messages, priced, charged, self.prices)
        self._sweep(messages, SWEEPS)
        self._prove(messages.bound)
        if self.whole:
            fresh = self._combine(messages)
            if fresh:
                return fresh
            messages.sweep(search.upper)
        if math.isfinite(search.upper):
            messages.remove_cells(search.upper)
            if self.whole:
                owner.drop(messages.ruled_out())
        recharge(messages, priced, self.prices, np.zeros(len(self.prices)), tidy=False)
        self.net = messages.apply()
        return []

    def _prove(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        if self.whole:
            self.owner.search.prove(min(self.bound, self.owner.search.upper))

    def _sweep(self, messages: Messages, most: int) -> None:
        """Sweep until the bound stalls."""
        search = self.owner.search
        for _ in range(0, most, CHECK):
            before = messages.bound
            for _ in range(CHECK):
                messages.sweep(search.upper)
                if time.monotonic() > search.deadline:
                    return
            gap = (search.upper if math.isfinite(search.upper) else 1.05 * abs(messages.bound)) - messages.bound
            if messages.bound - before < STALL * gap:
                return

    def _next(self, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maximiser of the planes (seconds per byte), and the box, wider where the maximiser touches it."""
        from scipy.optimize import linprog

        scale = max(1, self.owner.capacity)
        unit = max(abs(c) for c, _ in self.cuts) or 1.0
        result = linprog(
            np.concatenate(([-1.0], np.zeros(len(box)))),
            A_ub=np.array([np.concatenate(([1.0], -g / scale)) for _, g in self.cuts]),
            b_ub=np.array([c for c, _ in self.cuts]) / unit,
            bounds=[(None, None), *((0.0, float(b) * scale / unit) for b in box)],
            method="highs",
        )
        if result.x is None:
            return self.prices, box
        prices = np.maximum(result.x[1:], 0.0) * unit / scale
        return prices, np.where(prices >= 0.999 * box, 4.0 * box, box)

    def disagreement(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The two plans, one above and one within the rows (at the best prices), whose mixture the bound is."""
        total = [c + float(self.prices @ g) for c, g in self.cuts]
        order = np.argsort(total, kind="stable")
        over = [i for i in order if float(self.prices @ self.cuts[i][1]) > 0]
        under = [i for i in order if float(self.prices @ self.cuts[i][1]) <= 0]
        return (self.plans[over[0]], self.plans[under[0]]) if over and under else None

    def _combine(self, messages: Messages) -> list[int]:
        """The best plan within the strategies of the plans seen and those of least bound; times to add as rows."""
        owner, search = self.owner, self.owner.search
        pool = self.plans[-POOL:] + ([] if search.best is None else [search.best])
        net = self.net.copy()
        totals = messages.totals()
        deadline = min(search.deadline, time.monotonic() + POOL_SECONDS)
        try:
            for v in net.live:
                keep = np.zeros(len(net.cost[v]), bool)
                keep[net.alive[v][np.argsort(totals[v], kind="stable")[:CORE]]] = True
                keep[[int(x[v]) for x in pool]] = True
                net.set_cost(v, np.where(keep, net.cost[v], np.inf))
            search.presolve(net, 99, 5000, owner.capacity)
            if not net.live:
                return owner.settle(net, whole=False)
            if sum(f.table.size for f in net.factors.values()) > POOL_CELLS:
                return []
            options = CpOptions(deadline, search.options.seed, search.options.workers)
            result = solve_rows(
                net, owner.program, owner.rows, owner.capacity, options, upper=search.upper, hint=search.best
            )
        except EmptyNodeError:
            return []
        fresh: list[int] = []
        if result.choices is not None:
            plan = net.complete(result.choices)
            owner.remember(plan)
            fresh = self._cut(plan)
        if result.interrupted:
            raise KeyboardInterrupt
        return fresh


def recharge(messages: Messages, priced: PricedRows, before: np.ndarray, after: np.ndarray, tidy: bool = True) -> None:
    """Move from one set of prices to another; the messages stay as they are."""
    nodes, factors, offset = priced.charge(after - before)
    messages.reprice(nodes, factors, offset, tidy)


def _strategies(net: Net) -> int:
    return sum(len(net.alive[v]) for v in net.live)

"""The Lagrangian dual by exact priced optima: good prices, good plans, a good bound, before anything is enumerated.

The priced program (see ``prices``) has no memory rows, so presolve and message passing solve it exactly. Each optimum
is a cutting plane of the dual function; with few rows a few steps suffice. What the optima disagree about is little,
so the best plan *within the strategies seen so far* is a small program (see ``combining``).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.core import Descent
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.combining import combine
from autoshard_ilp.program.rows.prices import PricedRows, model_maximiser
from autoshard_ilp.program.rows.under import UnderRows

STEPS = 12
CLOSE = 0.05  # of the gap: an optimum, or the dual, that near is good enough
ROUGH = 0.003  # relative gap of a priced optimum before any plan is known
SWEEPS = 40  # before removing


@dataclass(eq=False)
class Dual:
    """Cutting planes over the prices of ``owner.rows``; ``net`` holds their bytes (presolved, true costs).

    Args:
        owner: rows, plans, the search.
        net: the program or, when ``whole`` is False, one branch of it.
        prices: seconds per byte to start from.
        steps: most priced programs solved.
    """

    owner: UnderRows
    net: Net
    prices: np.ndarray  # best so far, seconds per byte
    whole: bool = True
    steps: int = STEPS
    bound: float = -math.inf
    cuts: list[tuple[float, np.ndarray]] = field(default_factory=list)  # cost, usage - capacity (bytes per row)
    plans: list[np.ndarray] = field(default_factory=list)  # of the cuts

    def run(self) -> list[int]:
        """Improve prices, bound and plans; times at which a plan that satisfies the rows does not fit."""
        owner, search = self.owner, self.owner.search
        for x in owner.seen:
            if self.net.contains(x):
                self._cut(x, owner.program.cost(x), owner.excess(x))
        current, fresh = self.prices, list[int]()
        unit = owner.first_price()
        if self.whole and not current.any():
            current = np.zeros(len(owner.rows))
            current[int(np.argmax(owner.excess(owner.relaxed)))] = unit
        box = np.maximum(4.0 * current, unit)
        for _ in range(self.steps):
            before = self.bound
            fresh = self._step(current)
            if self.whole and math.isinf(search.upper) and not fresh and not owner.stop():
                fresh = owner.first_plan()
            if fresh or owner.stop():
                break
            target, value, box = self._next(box)
            gap = search.upper - self.bound
            if value - self.bound <= CLOSE * gap and math.isfinite(gap):
                break
            if np.allclose(target, current, rtol=1e-4, atol=1e-9 * unit) and self.bound <= before:
                break
            current = 0.5 * (self.prices + target)
        if not fresh and not owner.stop():
            self._remove()
        return fresh

    def _cut(self, choices: np.ndarray, cost: float, excess: np.ndarray) -> None:
        if not math.isfinite(cost):  # decoded on the way, but no plan
            return
        self.cuts.append((cost, excess))
        self.plans.append(choices)

    def _step(self, prices: np.ndarray) -> list[int]:
        """Solve the priced program; times at which one of the plans met satisfies the rows but does not fit."""
        owner, search = self.owner, self.owner.search
        plans: list[np.ndarray] = []
        fresh: list[int] = []
        upper = min((c + float(prices @ g) for c, g in self.cuts), default=math.inf)
        lower = -math.inf

        def offer(choices: np.ndarray) -> float:
            nonlocal upper
            excess, cost = owner.excess(choices), owner.program.cost(choices)
            self._cut(choices, cost, excess)
            if (excess <= 0).all():
                fresh.extend(owner.offer(choices))
            if cost + float(prices @ excess) < upper:
                upper = cost + float(prices @ excess)
                plans.append(choices)
            return min(upper, search.upper)

        def prove(bound: float) -> None:
            nonlocal lower
            lower = max(lower, bound)

        def done() -> bool:
            if math.isinf(upper) or math.isinf(lower):
                return lower > search.upper * (1 + 1e-10)
            near = CLOSE / 2 * (search.upper - lower) if math.isfinite(search.upper) else ROUGH * abs(upper)
            return upper - lower <= max(1e-9 * abs(upper), near) or lower > search.upper * (1 + 1e-10)

        descent = Descent(offer, prove, done, search.deadline)
        try:
            descent.run(PricedRows(self.net, owner.capacity).priced(prices), min(upper, search.upper))
        except EmptyNodeError:
            if upper > search.upper or math.isinf(upper):
                raise  # nothing beats the best plan, or nothing is finite
            prove(upper)
        finally:
            search.book("presolve", descent.presolve_seconds)
        if lower > self.bound:
            self.bound, self.prices = lower, prices
            if self.whole:
                search.prove(min(self.bound, search.upper))
        for plan in plans[-1:]:
            owner.remember(plan)
            if self.whole:
                fresh = fresh or combine(owner, self.prices)
        return fresh

    def _remove(self) -> None:
        """Take out what cannot be in a plan that beats the best one: its priced bound is above that plan's cost.

        Dominance at other nodes does not matter: the partner is no dearer and leaves this node's strategy as it is.
        """
        owner, search = self.owner, self.owner.search
        if not math.isfinite(search.upper) or not self.net.live or time.monotonic() > search.deadline:
            return
        reduce.compress_all(self.net)
        messages = Messages(PricedRows(self.net, owner.capacity).priced(self.prices))
        messages.sweep(search.upper, SWEEPS)
        self._drop(messages.ruled_out())
        search.presolve(self.net, 3, 20_000, owner.capacity)

    def _drop(self, ruled_out: dict[int, np.ndarray]) -> None:
        """Take strategies out of the net and of the program for good."""
        if self.whole:
            self.owner.drop(ruled_out)
        for v, gone in ruled_out.items():
            self.net.forbid(v, gone)

    def _next(self, box: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
        """Maximiser of the model (seconds per byte), its value, and the box, wider where the maximiser touches it."""
        found = model_maximiser(self.cuts, box, self.owner.capacity)
        return (self.prices, math.inf, box) if found is None else found

    def disagreement(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The two plans, one above and one within the rows (at the best prices), whose mixture the bound is."""
        total = [c + float(self.prices @ g) for c, g in self.cuts]
        order = np.argsort(total, kind="stable")
        over = [i for i in order if float(self.prices @ self.cuts[i][1]) > 0]
        under = [i for i in order if float(self.prices @ self.cuts[i][1]) <= 0]
        return (self.plans[over[0]], self.plans[under[0]]) if over and under else None

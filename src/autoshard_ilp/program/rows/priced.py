"""A net under memory rows with prices on them: the bound that message passing finds, and the search for good prices.

Two ways take turns at the prices, since each is good where the other is poor. Cutting planes start from nothing and
need only sweeps, but close in slowly. The linear relaxation of a few strategies per node, those of least bound, knows
the best prices for these at once; with every better price other strategies are the few, as columns are generated.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import numpy as np

from autoshard_ilp.program.milp import Milp, Relaxation
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.prices import PricedRows, model_maximiser
from autoshard_ilp.program.rows.under import UnderRows

STEPS = 3  # of cutting planes, at most
WIDE_STEPS = 2  # .. of a net whose sweeps take long
WARM_STEPS = 1  # .. where prices are known for some rows
LONE_STEPS = 6  # .. where no plan is known, so that a few strategies per node may hold nothing
SCALES = 12  # of the first prices tried, at most ..
PLAN_SCALES = 4  # .. and dearer ones after that, until a plan fits
SCALE_STEP = 2.0  # from one price to the next, and twice as much from there, until it has been too low and too high ..
NEAR_SCALE = 1.1  # .. and then the root of it; such a step is small enough
FRESH_SCALE = 0.3  # of the largest price, at a row that proves too small
PLAN_STEP = 2.0
LACKING = 0.7  # relative gap of a plan that is as good as none
MOST_SCALE = 1e6  # of a first price: costs still count beside so dear bytes, in float64
REPAIRED = 2  # plans met
REPAIRS = 16  # times their prices are raised, at most ..
REPAIR_STEP = 1.5  # .. to so many times as much
ENOUGH = 5e-4  # relative gap from which on other prices leave little less than the best plan known rules out
ASKED = 2.0  # .. or, of a net whose relaxations take long, so many times the gap that is asked for
ROUNDS = 3  # of relaxations of a few strategies per node, at most
CLOSE = 0.05  # of the gap: prices that near to the best are good enough
CLOSED = 0.1  # of the gap: worth another round
ROUGH = 0.003  # relative gap, before any plan is known
SWEEPS = 10
SETTLE = 6  # times SWEEPS, at most, after prices have changed
LONG_SETTLE = 40  # .. where nothing else is left to try
STALL = 1e-5  # relative rise of the bound that is worth more sweeps
RISE = 0.02  # of the gap: the same, while prices are still looked for ..
ROUGH_GAP = 0.02  # .. and of a gap that is at most this large
GAIN = 1e-4  # relative rise of the bound that is worth a guess of its own, if it is as much of the gap as CLOSED
TABLE_CELLS = 5_000  # largest table that presolve makes of what is left
BEFORE_PRESOLVE = 3.0  # times as many cells as are wanted are worth a presolve
RELAX_CELLS = 30_000  # of a program whose linear relaxation is quickly solved
PRICES_SHARE = 0.2  # of the time left, for the first prices ..
SHORT_SECONDS = 3.0  # .. or as much as this ..
SHORT_SHARE = 0.6  # .. but no larger share
RELAX_SHARE = 0.4  # .. and for one linear relaxation
WIDE_CELLS = 2_000_000
FEW = (8, 4, 2)  # strategies per node
PLANS = 4  # of the plans met, the last ones


class PricedNet:
    """One net under the rows of ``owner``; ``net`` has been presolved, its costs are true costs.

    Attributes:
        prices: best found, seconds per byte and row.
        bound: seconds, for plans of the net.
        fresh: times at which a plan that satisfies the rows does not fit.
    """

    def __init__(self, owner: UnderRows, net: Net, prices: np.ndarray) -> None:
        self.owner, self.search = owner, owner.search
        self.net, self.prices = net, prices
        self.bound = -math.inf
        self.cuts: list[tuple[float, np.ndarray]] = []  # of plans: seconds, usage - capacity in bytes per row
        self.met: list[np.ndarray] = []  # the plans
        self.fresh: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Messages for the net as it is, at the best prices."""
        reduce.compress_all(self.net)
        self.rows = PricedRows(self.net, self.owner.capacity)
        self.messages = Messages(self.rows.priced(self.prices))

    def wide(self) -> bool:
        """Whether the net is so large that sweeps take long, and guesses rarely leave little."""
        return self.net.size()["cells"] > WIDE_CELLS

    def gap(self) -> float:
        """Seconds between the bound and the best plan; a guess before any is known."""
        if not math.isfinite(self.bound):
            return 0.0
        return self.search.upper - self.bound if math.isfinite(self.search.upper) else ROUGH * abs(self.bound)

    def deadline(self, share: float) -> float:
        """Monotonic seconds at which a share of the time left has passed."""
        now = time.monotonic()
        return now + share * (self.search.deadline - now)

    def improve_prices(self, share: float = PRICES_SHARE, exact: bool = False) -> None:
        """Looks for the prices of the best bound, until they hardly raise it, for a share of the time left at most.

        ``exact``: priced optima come next, which know better where messages prove less than is known without memory.
        """
        if self.prices.any():
            steps = WARM_STEPS
        elif self.search.best is None and math.isfinite(self.search.upper):
            steps = LONE_STEPS
        else:
            steps = WIDE_STEPS if self.wide() else STEPS
        # Without good prices nothing that follows finds much, however little time there is.
        short = min(time.monotonic() + SHORT_SECONDS, self.deadline(SHORT_SHARE))
        deadline = max(self.deadline(share), short)
        for x in (self.owner.relaxed, *self.owner.seen):
            self._cut(x)
        if not self.prices.any():
            self._scale(self._first_prices(), deadline)
        elif self.lacking():
            self._scale(self.prices, deadline)
        self._cut_planes(steps, deadline, SETTLE, RISE)
        enough = max(ENOUGH, ASKED * self.search.options.relative_gap) if self.wide() else ENOUGH
        for _ in range(ROUNDS):
            before, gap = self.bound, self.gap()
            if gap <= enough * abs(before) and self.search.best is not None:
                break
            if exact and before < self.search.without_memory:
                break  # what messages prove says little of any prices
            if self.fresh or self.owner.stop() or time.monotonic() > deadline or not self._price_few():
                break
            if self.bound - before < CLOSED * gap:
                break

    def lacking(self) -> bool:
        """Whether no plan is known, or only one that costs a multiple of the bound, as that of least memory may."""
        search = self.search
        return search.best is None or search.upper - search.lower > LACKING * abs(search.upper)

    def _first_prices(self) -> np.ndarray:
        """One price, on the row that the relaxed plan exceeds most: where that plan costs as much as one that fits."""
        owner = self.owner
        cost, excess = owner.program.cost(owner.relaxed), owner.excess(owner.relaxed)
        first = np.zeros(len(self.prices))
        row = int(np.argmax(excess))
        equal = [(c - cost) / (excess[row] - e[row]) for c, e in self.cuts if c > cost and e[row] < 0 < excess[row]]
        first[row] = min(equal, default=owner.first_price())
        return first

    def _scale(self, prices: np.ndarray, deadline: float) -> None:
        """Prices of about the right order, row by row, and plans that fit met on the way.

        What is decoded holds too much at a row whose price is too low, and room is left where it is too high. Prices
        wrong by orders of magnitude prove little, and cutting planes take many steps to mend that.

        Args:
            prices: seconds per byte, some above 0.
            deadline: monotonic seconds.
        """
        most = MOST_SCALE * self.owner.first_price()
        step, sign, crossed = np.full(len(prices), SCALE_STEP), np.zeros(len(prices)), np.zeros(len(prices), bool)
        with self._trying():
            for tried in range(SCALES + PLAN_SCALES):
                before = len(self.cuts)
                prices = np.minimum(prices, most)
                self._settle_at(prices, RISE, 1)
                late = self.owner.stop() or time.monotonic() > deadline
                near = bool((step[prices > 0] <= NEAR_SCALE).all())
                if self.fresh or late or ((near or tried >= SCALES) and not self.lacking()):
                    break
                if near or tried >= SCALES or len(self.cuts) == before:
                    prices = PLAN_STEP * prices  # dear enough that plans fit
                    continue
                now = np.sign(self.cuts[-1][1])
                fresh = (prices == 0) & (now > 0)
                crossed |= (now * sign < 0) & (prices > 0)
                step = np.where(crossed, np.sqrt(step), np.where(now == sign, 2.0 * step, step))
                prices = np.where(fresh, prices.max() * FRESH_SCALE, prices * step**now)
                sign = now

    def _cut_planes(self, steps: int, deadline: float, most: int, rise: float) -> None:
        """Cutting planes over prices: at each, a bound by message passing and a decoded plan, which is a cut.

        Args:
            steps: prices tried, the best known first.
            deadline: monotonic seconds.
            most: times sweeps are repeated at each.
            rise: part of the gap by which the bound must rise for more of them.
        """
        current = self.prices
        box = np.maximum(4.0 * current, current.max(initial=0.0) or self.owner.first_price())
        with self._trying():
            for _ in range(steps):
                self._settle_at(current, rise, most)
                late = self.owner.stop() or time.monotonic() > deadline
                found = None if self.fresh or late else model_maximiser(self.cuts, box, self.owner.capacity)
                if found is None:
                    break
                target, value, box = found
                if value - self.bound <= CLOSE * self.gap():
                    break
                current = 0.5 * (self.prices + target)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Inside, :meth:`_settle_at` may be called; at the end, messages are those of the best bound met."""
        self._charged, self._best = self.prices, self.messages.state()
        yield
        self.messages.restore(self._best)

    def _settle_at(self, prices: np.ndarray, rise: float, most: int) -> None:
        """Charges these prices and settles; the bound is kept if it is the best, with its prices and messages."""
        self._move(self._charged, prices)
        self._charged = prices
        # The gap of a poor plan says little; what is decoded from messages that still change much is poor too.
        self.settle(rise * min(self.gap(), ROUGH_GAP * abs(self.bound)), most)
        if self.messages.bound > self.bound:
            self.bound, self.prices, self._best = self.messages.bound, prices, self.messages.state()
            self.search.prove(min(self.bound, self.search.upper))

    def repair(self) -> None:
        """Plans met that hold too much, changed node by node at ever higher prices until they fit."""
        owner, start = self.owner, self.messages.state()
        for plan in [x for x in owner.seen[-REPAIRED:] if self.net.contains(x)]:
            prices = self.prices
            for _ in range(REPAIRS):
                excess = owner.excess(plan)
                if (excess <= 0).all():
                    owner.remember(plan)
                    self.fresh += [t for t in owner.offer(plan)[:1] if t not in self.fresh]  # where each does not fit
                    break
                higher = np.maximum(prices, FRESH_SCALE * prices.max(initial=0.0)) * REPAIR_STEP
                higher = np.where(excess > 0, higher, prices)
                self._move(prices, higher)
                prices = higher
                plan = self.net.complete(self.messages.improve(plan))
            self.messages.restore(start)
            if owner.stop():
                break

    def _price_few(self) -> bool:
        """One relaxation of a few strategies per node; False where it says nothing.

        Its prices may ask too much of what is not among the few. Half the way to them is then tried: the bound is
        concave in the prices.
        """
        net = self.few(RELAX_CELLS)
        if net is None or not net.live or not len(net.base):
            return False
        try:
            _, found = self.relaxed(net)
        except EmptyNodeError:  # the few cannot beat what is known; others may
            return False
        if found is None:
            return False
        before = self.bound
        self.better_prices(found.prices)
        if self.bound <= before:
            self.better_prices(0.5 * (self.prices + found.prices))
        return True

    def relaxed(self, net: Net) -> tuple[Milp, Relaxation | None]:
        """The integer program of a net and its linear relaxation, None where that takes too long.

        Raises:
            EmptyNodeError: even fractions of strategies do not fit.
        """
        since = time.monotonic()
        try:
            milp = Milp(net, self.owner.capacity, self.search.upper)
            return milp, milp.relax(self.deadline(RELAX_SHARE), self.search.options.seed)
        finally:
            self.search.add_seconds("highs", since)

    def raise_bound(self, steps: int) -> None:
        """Sweep for long, at the best prices and at those that plans met on the way ask for."""
        self._cut_planes(steps, self.search.deadline, LONG_SETTLE, 0.0)

    def better_prices(self, prices: np.ndarray) -> bool:
        """Takes these prices if their bound is better; False when it did not gain much."""
        start, before, gap = self.messages.state(), self.bound, self.gap()
        self._move(self.prices, prices)
        self.settle()
        if self.messages.bound <= before:
            self.messages.restore(start)
            return False
        self.prices, self.bound = prices, self.messages.bound
        self.search.prove(min(self.bound, self.search.upper))
        return self.bound - before > max(GAIN * abs(before), CLOSED * gap)

    def settle(self, rough: float = 0.0, most: int = SETTLE) -> None:
        """Sweep until the bound hardly rises, or by less than ``rough`` seconds, then decode a plan."""
        before = -math.inf
        for _ in range(most):
            self.messages.sweep(count=SWEEPS)
            least = max(rough, STALL * abs(self.messages.bound))
            if self.messages.bound - before < least or self.owner.stop():
                break
            before = self.messages.bound
        choices = self.net.complete(self.messages.improve(self.messages.decode()))
        self._cut(choices)
        if math.isfinite(self.owner.program.cost(choices)):
            self.owner.remember(choices)
            if (self.owner.excess(choices) <= 0).all():
                self.fresh = self.owner.offer(choices)

    def few(self, most: int) -> Net | None:
        """The net with a few strategies per node, those of least bound and of the plans met, and presolved.

        As many as leave at most ``most`` cells; None where even the fewest leave more, or hold no plan.
        """
        totals = self.messages.totals()
        plans = [x for x in (*self.owner.seen[-PLANS:], self.search.best) if x is not None and self.net.contains(x)]
        for count in FEW:
            if self.owner.stop():
                break
            net = self.net.copy()
            for v in self.messages.nodes:
                alive = self.messages.alive[v]
                kept = alive[np.argsort(totals[v], kind="stable")[:count]]
                cost = np.full(len(net.cost[v]), np.inf)
                for s in (kept, [int(x[v]) for x in plans]):
                    cost[s] = net.cost[v][s]
                net.set_cost(v, cost)
            reduce.compress_all(net)
            if net.size()["cells"] > BEFORE_PRESOLVE * most:
                continue
            try:
                self.presolve(net)
            except EmptyNodeError:  # the few do not fit, or cannot beat what is known; others may
                return None
            if net.size()["cells"] <= most:
                return net
        return None

    def presolve(self, net: Net) -> None:
        """What is left gets smaller still, and its tables lose what nothing alive refers to."""
        self.search.presolve(net, 3, TABLE_CELLS, self.owner.capacity)
        reduce.compress_all(net)

    def _move(self, old: np.ndarray, new: np.ndarray) -> None:
        """Charge other prices."""
        self.messages.reprice(*self.rows.charge(new - old))

    def _cut(self, choices: np.ndarray) -> None:
        cost = self.owner.program.cost(choices)
        if math.isfinite(cost):
            self.cuts.append((cost, self.owner.excess(choices)))
            self.met.append(choices)

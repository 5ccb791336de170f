"""Close the gap that memory rows leave: guess the optimum, and solve exactly what could be that good.

Prices make every strategy's excess over the bound a matter of message passing, without solving anything exactly. For a
guess ``limit`` of the optimum, strategies and cells whose excess exceeds ``limit - bound`` cannot be in a plan that
good; what is left is a small integer program (:mod:`autoshard_ilp.program.milp`), and its answer is exact either way:

    a plan at or below ``limit``   is the optimum of the whole program,
    none                           proves that ``limit`` is a lower bound of the whole program.

A guess close to the bound leaves so little that the plan found, though above the guess, is within a thousandth of the
optimum; its cost is the next guess, with prices as good as the gap is now small.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard_ilp.program import reduce
from autoshard_ilp.program.bounds import Messages
from autoshard_ilp.program.milp import Milp, MilpResult
from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.prices import PricedRows, model_maximiser

if TYPE_CHECKING:
    from autoshard_ilp.program.constrained import Constrained

STEPS = 6  # of the prices, at most
WIDE_STEPS = 2  # .. of a net whose sweeps take long: the relaxation within a few strategies knows more
WARM_STEPS = 1  # .. where prices are known for some rows
CLOSE = 0.05  # of the gap: prices that near to the best are good enough
ROUGH = 0.003  # relative gap, before any plan is known
SWEEPS = 10
SETTLE = 6  # times SWEEPS, at most, after prices have changed
NEAR = 0.01  # relative gap from which a better plan rules out much
LONG_SWEEPS = 60  # with such a plan known
SHRUNK = 0.8  # of the cells: worth another round
CLOSED = 0.1  # of the gap: the same
STALL = 1e-5  # relative rise of the bound that is worth more sweeps
RISE = 0.02  # of the gap: the same, while prices are still looked for
GAIN = 1e-4  # relative rise of the bound that is worth a guess of its own
FIRST_GUESS = 1e-4  # relative, above the bound
WIDEN = 3.0  # of the next guess
NARROW_SWEEPS = 20
MOST_CELLS = 60_000  # of a program that the simplex method gets, where its answer is the last
GUESS_CELLS = 30_000  # .. and where it is not
BEFORE_PRESOLVE = 3.0  # times as many are worth a presolve
ENOUGH_CELLS = 10_000  # a program smaller than this is not worth its run: the guess may be wider
TABLE_CELLS = 5_000  # largest table that presolve makes of what is left
SHARE = 0.4  # of the time left, for one integer program
PRICES_SHARE = 0.1  # .. and for the first prices
GUESSES = 12
WIDE_CELLS = 2_000_000
FEW = (8, 4, 2)  # strategies per node where no guess leaves little
MARGIN = 2e-3  # of the capacity, left free by a plan of few strategies per node
PLANS = 4  # of the plans met, the last ones
TRIES = 8  # of a limit, per guess


NOTHING = MilpResult("infeasible", None, math.inf, 0.0)


class Closing:
    """The search for one net under the rows of ``owner``; ``net`` has been presolved, its costs are true costs.

    Attributes:
        prices: best found, seconds per byte and row.
        bound: seconds, for plans of the net.
        proved: nothing in the net is better than ``owner.search.upper``.
    """

    def __init__(self, owner: Constrained, net: Net, prices: np.ndarray) -> None:
        self.owner, self.search = owner, owner.search
        self.net, self.prices = net, prices
        self.bound, self.proved = -math.inf, False
        self.cuts: list[tuple[float, np.ndarray]] = []  # of plans: seconds, usage - capacity in bytes per row
        self.fresh: list[int] = []
        self.few_tried: float | None = None  # the best plan, in seconds, when few strategies per node were last tried
        self.tried = -math.inf  # the widest limit solved so far, in seconds
        self._begin()

    def run(self) -> list[int]:
        """Times at which a plan that satisfies the rows does not fit; none when proved, given up or out of time.

        Raises:
            EmptyNodeError: nothing beats the best plan.
        """
        self._improve_prices()
        above = FIRST_GUESS
        for _ in range(GUESSES):
            if self.fresh or self.proved or self.owner.stop():
                break
            known = self.search.upper
            wide = self._wide()
            found = (self._few(known) if wide else None) or self._guess(above) or self._few(known)
            if found is None:
                break
            net, limit = found
            few = limit <= self.bound  # a plan is wanted, no proof
            try:
                net, again = self._relax(net, limit)
                if again and limit > self.bound:
                    continue  # the same guess leaves less now
                self._learn(net, limit, self._solve(net, limit, few))
            except EmptyNodeError:
                self._learn(net, limit, NOTHING)
            if wide and few and known - self.search.upper < CLOSED * (known - self.bound):
                break  # the good plan is not among few strategies per node
            near = self.search.upper - self.bound < NEAR * abs(self.search.upper)
            if near and self.search.upper < known and not (self.fresh or self.proved):
                self._shrink()
            bound = max(self.bound, self.search.lower)
            above = WIDEN * max(above, limit / bound - 1) if bound > 0 and math.isfinite(limit) else WIDEN * above
        return self.fresh

    def _wide(self) -> bool:
        """Whether the net is so large that guesses rarely leave little."""
        return self.net.size()["cells"] > WIDE_CELLS

    def _begin(self) -> None:
        """Messages for the net as it is, at the best prices."""
        for number in list(self.net.factors):
            reduce.compress(self.net, number)
        self.rows = PricedRows(self.net, self.owner.capacity)
        self.messages = Messages(self.rows.priced(self.prices))

    def _shrink(self) -> None:
        """Take out for good what cannot beat the best plan, as long as that leaves less and less.

        Raises:
            EmptyNodeError: nothing can.
        """
        upper = self.search.upper
        while not self.owner.stop():
            before, bound = self.net.size()["cells"], self.bound
            self.messages.sweep(upper, LONG_SWEEPS)
            self.messages.remove_cells(upper)
            self.bound = max(self.bound, self.messages.bound)
            self.search.prove(min(self.bound, upper))
            self.owner.drop(self.messages.ruled_out())
            _take_out(self.net, self.messages)
            self.search.presolve(self.net, 3, TABLE_CELLS, self.owner.capacity)
            self._begin()
            self._settle()
            if self.net.size()["cells"] > SHRUNK * before and self.bound - bound < CLOSED * (upper - bound):
                break

    def _improve_prices(self) -> None:
        """Cutting planes over prices: at each, a bound by message passing and a decoded plan, which is a cut."""
        owner, search = self.owner, self.search
        unit = owner.first_price()
        now, best = self.prices, self.messages.state()
        current = now
        if not current.any():
            current = np.zeros(len(now))
            current[int(np.argmax(owner.excess(owner.relaxed)))] = unit
        box = np.maximum(4.0 * current, unit)
        for x in (owner.relaxed, *owner.seen):
            self._cut(x)
        deadline = self._deadline(PRICES_SHARE)
        steps = WARM_STEPS if self.prices.any() else WIDE_STEPS if self._wide() else STEPS
        for _ in range(steps):
            self._move(now, current)
            now = current
            self._settle(RISE * self._gap())
            if self.messages.bound > self.bound:
                self.bound, self.prices, best = self.messages.bound, now, self.messages.state()
                search.prove(min(self.bound, search.upper))
            late = owner.stop() or time.monotonic() > deadline
            found = None if self.fresh or late else model_maximiser(self.cuts, box, owner.capacity)
            if found is None:
                break
            target, value, box = found
            if value - self.bound <= CLOSE * self._gap():
                break
            current = 0.5 * (self.prices + target)
        self.messages.restore(best)

    def _gap(self) -> float:
        """Seconds between the bound and the best plan; a guess before any is known."""
        if not math.isfinite(self.bound):
            return 0.0
        return self.search.upper - self.bound if math.isfinite(self.search.upper) else ROUGH * abs(self.bound)

    def _cut(self, choices: np.ndarray) -> None:
        cost = self.owner.program.cost(choices)
        if math.isfinite(cost):
            self.cuts.append((cost, self.owner.excess(choices)))

    def _relax(self, net: Net, limit: float) -> tuple[Net, bool]:
        """The net without what the linear relaxation rules out below ``limit``, and whether a new guess is worth more.

        The relaxation's prices are the best for this net, and often better than those known for all.
        """
        if not net.live or not len(net.base):
            return net, False
        search, since = self.search, time.monotonic()
        try:
            milp = Milp(net, self.owner.capacity, search.upper)
            found = milp.relax(self._deadline(SHARE), search.options.seed)
        except EmptyNodeError:
            return net, False  # the integer program says so too
        finally:
            search.add_seconds("highs", since)
        if found is None or self.owner.stop():
            return net, False
        search.prove(min(found.bound - found.margin_seconds, limit, search.upper))
        if self._better_prices(found.prices) and limit < search.upper:
            return net, True
        if math.isfinite(limit) and limit >= search.upper:  # below it, what is ruled out may be part of a good plan
            cells = net.size()["cells"]
            net = milp.without(found, limit)
            if net.size()["cells"] < SHRUNK * cells:
                self._presolve(net)
        return net, False

    def _better_prices(self, prices: np.ndarray) -> bool:
        """Takes these prices if their bound is better; False when it did not gain much."""
        start, before = self.messages.state(), self.bound
        self._move(self.prices, prices)
        self._settle()
        if self.messages.bound <= before:
            self.messages.restore(start)
            return False
        self.prices, self.bound = prices, self.messages.bound
        self.search.prove(min(self.bound, self.search.upper))
        return self.bound - before > GAIN * abs(before)

    def _presolve(self, net: Net) -> None:
        """What is left gets smaller still, and its tables lose what nothing alive refers to."""
        self.search.presolve(net, 3, TABLE_CELLS, self.owner.capacity)
        for number in list(net.factors):
            reduce.compress(net, number)

    def _settle(self, rough: float = 0.0) -> None:
        """Sweep until the bound hardly rises, or by less than ``rough`` seconds, then decode a plan."""
        before = -math.inf
        for _ in range(SETTLE):
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

    def _deadline(self, share: float) -> float:
        now = time.monotonic()
        return now + share * (self.search.deadline - now)

    def _move(self, old: np.ndarray, new: np.ndarray) -> None:
        """Charge other prices."""
        self.messages.reprice(*self.rows.charge(new - old))

    def _guess(self, above: float) -> tuple[Net, float] | None:
        """What may beat the widest limit that leaves a small program, and the limit; None when even that is large."""
        upper = self.search.upper
        net = self._within(upper, MOST_CELLS)
        if net is not None:
            return net, upper
        found: tuple[Net, float] | None = None
        small, large = max(self.bound, self.search.lower), upper
        step = above * abs(small)
        for _ in range(TRIES):
            limit = small + step if small + step < large else 0.5 * (small + large)
            if not small < limit < large or self.owner.stop():
                break
            try:
                net = self._within(limit, GUESS_CELLS)
            except EmptyNodeError:
                self.search.prove(limit)
                small = limit
            else:
                if net is None:
                    large = limit
                else:
                    small, found = limit, (net, limit)
                    if net.size()["cells"] > ENOUGH_CELLS:
                        break
            step *= WIDEN
        return found if found is not None and found[1] > self.tried else None

    def _few(self, known: float) -> tuple[Net, float] | None:
        """A few strategies per node, those of least bound and of the plans met: no proof, but often a good plan.

        The limit is the bound, which the answer cannot change. None where that has been tried with no better plan.
        """
        if self.few_tried is not None and known >= self.few_tried:
            return None
        self.few_tried = known
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
            for number in list(net.factors):
                reduce.compress(net, number)
            if net.size()["cells"] > BEFORE_PRESOLVE * GUESS_CELLS:
                continue
            self._presolve(net)
            if net.size()["cells"] <= GUESS_CELLS:
                return net, self.bound
        return None

    def _within(self, limit: float, most: int) -> Net | None:
        """The net without what cannot be in a plan cheaper than ``limit`` seconds; None if more than ``most`` cells.

        Raises:
            EmptyNodeError: no plan is.
        """
        net, messages = self.net.copy(), self.messages
        if math.isfinite(limit):
            start = messages.state()
            try:
                messages.sweep(limit, NARROW_SWEEPS)
                messages.remove_cells(limit)
                if sum(int(np.isfinite(t).sum()) for t in messages.tables.values()) > BEFORE_PRESOLVE * most:
                    return None
                _take_out(net, messages)
            finally:
                messages.restore(start)
        elif net.size()["cells"] > most:
            return None
        self._presolve(net)
        return net if net.size()["cells"] <= most else None

    def _solve(self, net: Net, limit: float, few: bool) -> MilpResult:
        """The best plan of a net; of a ``few`` strategies, with room that lets it fit at moments that are no rows."""
        if not net.live:
            choices = np.zeros(len(net.cost), np.int64)
            if (net.base > self.owner.capacity).any():
                return NOTHING
            return MilpResult("optimal", choices, net.constant, 0.0)
        since, deadline = time.monotonic(), self._deadline(SHARE if limit < self.search.upper else 1.0)
        result = self._run(net, int(MARGIN * self.owner.capacity) if few else 0, deadline)
        bound, over = result.bound, self._excess(net, result)
        if over > 0:  # within the tolerance of a row, which is wide in bytes
            result = replace(self._run(net, 2 * over, deadline), bound=bound)
        self.search.add_seconds("highs", since)
        return result

    def _run(self, net: Net, spare: int, deadline: float) -> MilpResult:
        search, options = self.search, self.search.options
        gap = options.relative_gap * abs(search.upper) if math.isfinite(search.upper) else 0.0
        return Milp(net, self.owner.capacity, search.upper, spare).solve(deadline, options.seed, gap)

    def _excess(self, net: Net, result: MilpResult) -> int:
        """Bytes by which the answer exceeds the worst row of the net."""
        if result.choices is None or not len(net.base):
            return 0
        return int(PricedRows(net, self.owner.capacity).usage(result.choices).max()) - self.owner.capacity

    def _learn(self, net: Net, limit: float, result: MilpResult) -> None:
        """Take over plan and proof of the program within ``limit``."""
        search = self.search
        if result.choices is not None:
            plan = net.complete(result.choices)
            self.owner.remember(plan)
            self.fresh = self.owner.offer(plan)
        self.tried = max(self.tried, limit)
        search.report["rounding_error_seconds"] = max(search.rounding, result.error_seconds)
        search.prove(min(result.bound, limit, search.upper))
        if result.interrupted:
            raise KeyboardInterrupt
        if result.status == "infeasible" and math.isinf(limit):
            raise EmptyNodeError("rows")
        self.proved = not self.fresh and search.done()


def _take_out(net: Net, messages: Messages) -> None:
    """Remove from the net what the messages have ruled out."""
    for v, gone in messages.ruled_out().items():
        net.forbid(v, gone)
    for number, table in messages.tables.items():
        net.forbid_cells(number, np.isinf(table))

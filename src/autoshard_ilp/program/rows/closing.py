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

import numpy as np

from autoshard_ilp.program.milp import Milp, MilpResult
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.rows.combining import combine
from autoshard_ilp.program.rows.families import NEAREST
from autoshard_ilp.program.rows.neighbourhood import look_around
from autoshard_ilp.program.rows.priced import BEFORE_PRESOLVE, CLOSED, TABLE_CELLS, PricedNet
from autoshard_ilp.program.rows.prices import PricedRows
from autoshard_ilp.program.rows.under import UnderRows
from autoshard_ilp.program.window.window import Window

NEAR = 0.01  # relative gap from which a better plan rules out much
LONG_SWEEPS = 60  # with such a plan known
LOOK_SWEEPS = 10  # that may show how much that is ..
MOST = 0.5  # .. of the strategies: worth a smaller net
SHRUNK = 0.8  # of the cells: worth another round
FIRST_GUESS = 1e-4  # relative, above the bound
WIDEN = 3.0  # of the next guess
NARROW_SWEEPS = 20
LONG_STEPS = 5  # prices of a wide net at which messages settle for good
MOST_CELLS = 60_000  # of a program that the simplex method gets, where its answer is the last
DECIDE_CELLS = 120_000  # .. and where a window has left nothing but what may be part of a plan
GUESS_CELLS = 30_000  # .. and where it is not
ENOUGH_CELLS = 10_000  # a program smaller than this is not worth its run: the guess may be wider
SHARE = 0.4  # of the time left, for one integer program
FEW_SHARE = 0.1  # .. of a few strategies per node
GUESSES = 12
MARGIN = 2e-3  # of the capacity, left free by a plan of few strategies per node
TRIES = 8  # of a limit, per guess
WINDOW_CELLS = 1_200_000  # of a net whose windows are tried first
FIRST_STEP = 1e-3  # relative, of the first window above the bound
WIDE_STEP = 1e-4  # .. of a net with more cells
PART_OF_GAP = 0.6  # .. where a plan is known ..
SMALL_GAP = 1e-4  # .. or all of it, where it is no larger, relative: one window holds it
LAST_STEP = 100.0  # the same, of the last one: after it, any plan will do
WIDER = 0.6  # of the distance between bound and window: the next step ..
QUICK_SECONDS = 0.3  # .. but after a window that took no longer ..
SAME_SECONDS = 1.0  # .. or no longer than this ..
SAME = 1.5  # .. and than so many times the quickest ..
QUICK_GROWTH = 4.0  # .. so many times the last one
WINDOW_SHARE = 0.4  # of the time left, for one window
NARROWER = 4  # windows that hold too much, before it gives up
PLAN_ROUND = 2  # of rows, without a plan: one is looked for by its memory
LONG_SECONDS = 2.0  # of a window ..
POOR_GAP = 0.03  # .. above which relative gap a better plan is looked for first
MANY_NODES = 1500  # of a net that windows rarely get far with: a poor plan is made better before them
ANY_PLAN = 0.2  # relative gap of a plan that will do, where only some plan is wanted


NOTHING = MilpResult("infeasible", None, math.inf, 0.0)


class Closing(PricedNet):
    """The search for one net under the rows of ``owner``.

    Attributes:
        proved: nothing in the net is better than ``owner.search.upper``.
    """

    def __init__(self, owner: UnderRows, net: Net, prices: np.ndarray) -> None:
        super().__init__(owner, net, prices)
        self.proved = False
        self.few_tried: float | None = None  # the best plan, in seconds, when few strategies per node were last tried
        self.tried = -math.inf  # the widest limit solved so far, in seconds
        self.step = 0.0  # seconds from one window to the next, once some were solved

    def run(self) -> list[int]:
        """Times at which a plan that satisfies the rows does not fit; none when proved, given up or out of time.

        Raises:
            EmptyNodeError: nothing beats the best plan.
        """
        many = len(self.net.live) > MANY_NODES
        if many and self._poor():
            look_around(self.owner)
        self.improve_prices()
        if self._rules_out_most():
            self._shrink()
            if not self.net.live:
                return self.fresh
        narrow = self.net.size()["cells"] <= WINDOW_CELLS
        near = self.search.best is not None and not self._far()  # no better plan is looked for between windows
        each = math.inf if near else QUICK_SECONDS
        if narrow and not (self.fresh or self.search.done()) and self._windows(each):
            return self.fresh
        self._better_plan()
        if self.wide() and not (self.fresh or self.search.done()) and self._far() and self.owner.may_look(NEAREST):
            self.owner.within_families(NEAREST)
        if many and not self.fresh and self._poor():
            look_around(self.owner)
        if narrow and not (near or self.fresh or self.search.done()) and self._windows():
            return self.fresh
        if self.bound < self.search.without_memory and not self.search.done():
            return self.fresh  # messages prove less with memory than is known without: little could be ruled out
        above = FIRST_GUESS
        for _ in range(GUESSES):
            if self.fresh or self.proved or self.owner.stop():
                break
            known = self.search.upper
            wide = self.wide() or self.search.too_dear
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
            if not (self.fresh or self.proved) and self._poor():
                look_around(self.owner)
            near = self.search.upper - self.bound < NEAR * abs(self.search.upper) or self.search.too_dear
            if near and self.search.upper < known and not (self.fresh or self.proved):
                self._shrink()
                if not self.net.live:
                    return self.fresh
                if not self.owner.stop() and self.net.size()["cells"] <= WINDOW_CELLS and self._windows():
                    break
            bound = max(self.bound, self.search.lower)
            above = WIDEN * max(above, limit / bound - 1) if bound > 0 and math.isfinite(limit) else WIDEN * above
        if not (narrow or self.fresh or self.proved or self.owner.stop()):
            if self.wide():
                self.raise_bound(LONG_STEPS)
            else:
                self._windows()
        return self.fresh

    def _better_plan(self) -> None:
        """A plan, where none is known, or a better one, from those met."""
        search, owner = self.search, self.owner
        lacking = self.lacking()
        if owner.stop() or not (lacking or (not self.fresh and self._far())):
            return
        found: list[int] = []
        if math.isinf(search.upper) and len(owner.log) >= PLAN_ROUND:
            found = owner.first_plan()
        if not self.fresh:
            self.repair()
        elif search.best is None:
            return  # where none fits, none of their combinations does, as a rule
        found = combine(owner, self.prices) or found
        self.fresh = self.fresh or found

    def _windows(self, each: float = math.inf) -> bool:
        """The optimum within ever wider limits; False where these hold too much, or one takes ``each`` seconds."""
        search, owner = self.search, self.owner
        if self.wide():
            return False
        settled = self.messages if self.prices.any() else None
        window = Window(self.net, owner.capacity, self._prices_to_try(), search.deadline, settled)
        known = max(self.bound, search.lower, search.without_memory, window.bound)
        unit = max(abs(known), owner.first_price() * owner.capacity)
        first = unit * (WIDE_STEP if self.net.size()["cells"] > WINDOW_CELLS else FIRST_STEP)
        if search.best is not None:
            part = 1.0 if search.upper - known <= SMALL_GAP * abs(search.upper) else PART_OF_GAP
            first = min(first, part * (search.upper - known))
        step, failed, tries, quickest = max(first, self.step), math.inf, 0, SAME_SECONDS / SAME
        while not (owner.stop() or (search.too_dear and math.isinf(search.upper))):  # first a plan of any kind
            limit = min(known + step, search.upper) if step < LAST_STEP * unit else search.upper
            if limit >= failed:
                limit = 0.5 * (known + failed)
            since, alone = time.monotonic(), time.thread_time()
            early = math.isinf(each) and self._poor() and owner.may_look()
            found = window.solve(limit, min(self.deadline(WINDOW_SHARE), since + (LONG_SECONDS if early else each)))
            search.add_seconds("window", since)
            took = time.thread_time() - alone
            if found.choices is not None:
                self._offer(self.net, found.choices)
            search.prove(min(found.bound, search.upper))
            if found.left is not None and self._decide(found.left, limit):
                if self.fresh or self.proved:
                    return True
                known = limit
            elif found.status == "unknown":
                if math.isfinite(each):
                    return False
                if early:
                    owner.within_families()
                    continue
                if self._poor():
                    look_around(owner)
                failed, tries = limit, tries + 1
                if tries > NARROWER:
                    return False
            elif found.status == "optimal" or limit >= search.upper:
                if math.isinf(limit):
                    raise EmptyNodeError("rows")
                self.proved = not self.fresh
                return True
            elif took > each:
                return False
            else:
                known, self.step = limit, step  # what a window holds grows fast with its distance from the bound
                quickest = min(quickest, took)
                quick = took <= max(QUICK_SECONDS, SAME * quickest)
                step = QUICK_GROWTH * step if quick else min(2.0 * step, max(first, WIDER * (known - found.relaxed)))
        return owner.stop()

    def _far(self) -> bool:
        """Whether the best plan is not near the bound yet."""
        return self.gap() > NEAR * abs(self.search.upper)

    def _poor(self) -> bool:
        """Whether the best plan is so far from the bound that a better one is looked for first."""
        upper = self.search.upper
        return math.isinf(upper) or upper - max(self.bound, self.search.lower) > POOR_GAP * abs(upper)

    def _decide(self, left: dict[int, np.ndarray], limit: float) -> bool:
        """Solve what a window left of each node as an integer program; False where it is too large, or not solved."""
        net = self.net.copy()
        try:
            for v, strategies in left.items():
                net.forbid(v, np.setdiff1d(net.alive[v], strategies))
            self.presolve(net)
            if net.size()["cells"] > DECIDE_CELLS:
                return False
            result = self._solve(net, limit, few=False)
        except EmptyNodeError:
            net, result = self.net, NOTHING
        self._learn(net, limit, result)
        return result.bound >= limit or result.status == "optimal"

    def _prices_to_try(self) -> list[np.ndarray]:
        """The best prices known or, where messages know of none, some of the right order."""
        if self.prices.any():
            return [self.prices]
        rows, unit = len(self.prices), self.owner.first_price()
        return [np.full(rows, unit), np.full(rows, unit / rows)]

    def _rules_out_most(self) -> bool:
        """Whether the best plan is so good that a few messages rule out most strategies.

        Raises:
            EmptyNodeError: they rule out all of a node.
        """
        if self.fresh or self.owner.stop() or self.search.best is None or self._far():
            return False
        start, before = self.messages.state(), self.messages.strategies()
        self.messages.sweep(self.search.upper, LOOK_SWEEPS)
        if self.messages.strategies() <= MOST * before:
            return True
        self.messages.restore(start)
        return False

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
            if not self.net.live:
                break
            self.begin()
            self.settle()
            if self.net.size()["cells"] > SHRUNK * before and self.bound - bound < CLOSED * (upper - bound):
                break

    def _relax(self, net: Net, limit: float) -> tuple[Net, bool]:
        """The net without what the linear relaxation rules out below ``limit``, and whether a new guess is worth more.

        The relaxation's prices are the best for this net, and often better than those known for all.
        """
        if not net.live or not len(net.base):
            return net, False
        search = self.search
        try:
            milp, found = self.relaxed(net)
        except EmptyNodeError:
            return net, False  # the integer program says so too
        if found is None or self.owner.stop():
            return net, False
        search.prove(min(found.bound - found.margin_seconds, limit, search.upper))
        if self.better_prices(found.prices) and limit < search.upper:
            return net, True
        if math.isfinite(limit) and limit >= search.upper:  # below it, what is ruled out may be part of a good plan
            cells = net.size()["cells"]
            net = milp.without(found, limit)
            if net.size()["cells"] < SHRUNK * cells:
                self.presolve(net)
        return net, False

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
        """A few strategies per node: no proof, but often a good plan.

        The limit is the bound, which the answer cannot change. None where that has been tried with no better plan.
        """
        if self.few_tried is not None and known >= self.few_tried:
            return None
        self.few_tried = known
        net = self.few(GUESS_CELLS)
        return None if net is None else (net, self.bound)

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
        self.presolve(net)
        return net if net.size()["cells"] <= most else None

    def _solve(self, net: Net, limit: float, few: bool) -> MilpResult:
        """The best plan of a net; of a ``few`` strategies, with room that lets it fit at moments that are no rows."""
        if not net.live:
            choices = np.zeros(len(net.cost), np.int64)
            if (net.base > self.owner.capacity).any():
                return NOTHING
            return MilpResult("optimal", choices, net.constant, 0.0)
        share = FEW_SHARE if few else SHARE if limit < self.search.upper else 1.0
        since, deadline = time.monotonic(), self.deadline(share)
        result = self._run(net, int(MARGIN * self.owner.capacity) if few else 0, deadline)
        bound, over = result.bound, self._excess(net, result)
        if over > 0:  # within the tolerance of a row, which is wide in bytes
            result = replace(self._run(net, 2 * over, deadline), bound=bound)
        self.search.add_seconds("highs", since)
        return result

    def _run(self, net: Net, spare: int, deadline: float) -> MilpResult:
        search, options = self.search, self.search.options
        gap = options.relative_gap * abs(search.upper) if math.isfinite(search.upper) else 0.0
        if search.too_dear:
            gap = max(gap, ANY_PLAN * abs(search.lower))
        return Milp(net, self.owner.capacity, search.upper, spare).solve(deadline, options.seed, gap)

    def _excess(self, net: Net, result: MilpResult) -> int:
        """Bytes by which the answer exceeds the worst row of the net."""
        if result.choices is None or not len(net.base):
            return 0
        return int(PricedRows(net, self.owner.capacity).usage(result.choices).max()) - self.owner.capacity

    def _offer(self, net: Net, choices: np.ndarray) -> None:
        """Take over a plan of a net."""
        plan = net.complete(choices)
        self.owner.remember(plan)
        self.fresh = self.owner.offer(plan)

    def _learn(self, net: Net, limit: float, result: MilpResult) -> None:
        """Take over plan and proof of the program within ``limit``."""
        search = self.search
        if result.choices is not None:
            self._offer(net, result.choices)
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

"""The best prices of bytes, and the plans that would meet the capacity at least cost if they could be mixed.

The best bound by prices per byte is the cost of the best *mixture* of assignments that fits (linear programming
duality). Where a step repeats, a mixture is nearly a plan: some of the repetitions are as in one assignment, the others
as in another. Quick prices by message passing come first. As long as what was decoded with them, mixed, is dearer than
the bound, cutting planes go on with priced optima that are nearly exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp.program.nets.core import Descent
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.priced import PricedNet
from autoshard_ilp.program.rows.prices import PricedRows, mixture, model_maximiser
from autoshard_ilp.program.rows.under import CELLS, UnderRows
from autoshard_ilp.program.search import Search

CLOSE = 1e-3
"""Relative distance of the mixture to the bound that is good enough ..."""

EXACT = 0.3
"""... and the part of it that a priced optimum may be off."""

PRICES_SHARE = 0.6
"""Of the time left: what prices by messages may take; cut off by time, they would depend on what else the machine does.
"""

STEPS = 8
"""Priced optima, at most."""

LEAST_WEIGHT = 1e-6
"""Of a plan in a mixture."""


@dataclass(frozen=True, eq=False)
class Mixed:
    """What was met on the way, which holds for the same program under any capacity.

    Attributes:
        times: moments that prices were looked for at.
        net: the program under these rows, presolved.
        capacity: bytes, the one that bounds and cuts are told for.
        bounds: prices (seconds per byte and moment), and the lower bound that they prove.
        cuts: of plans, their seconds, and usage - capacity in bytes per moment.
        met: the plans.
    """

    times: tuple[int, ...]
    net: Net
    capacity: int
    bounds: tuple[tuple[np.ndarray, float], ...]
    cuts: tuple[tuple[float, np.ndarray], ...]
    met: tuple[np.ndarray, ...]

    def under(self, capacity: int) -> Mixed:
        """The same, told for another capacity: each byte of it costs its price."""
        more = capacity - self.capacity
        bounds = tuple((prices, bound - more * float(prices.sum())) for prices, bound in self.bounds)
        cuts = tuple((cost, excess - more) for cost, excess in self.cuts)
        return Mixed(self.times, self.net, capacity, bounds, cuts, self.met)

    def nearest(self, count: int) -> list[np.ndarray]:
        """So many of the plans, those that cost least at the best prices: the best plans are much like them."""
        prices, _ = max(self.bounds, key=lambda known: known[1])
        priced = [cost + float(prices @ excess) for cost, excess in self.cuts]
        return [self.met[i] for i in np.argsort(priced, kind="stable")[:count]]


class Mixing:
    """Looks for prices and for a mixture of plans, none of which needs to fit by itself.

    Args:
        search: ``search.program.capacity`` is set; its report gets ``prices`` (time -> seconds per byte), ``mixture``
            (weight, seconds and choices of each plan) and ``mixed`` (:class:`Mixed`).
        relaxed: an assignment that exceeds the capacity where memory binds.
        room: what is possible at all; what cannot fit by itself stays.
    """

    def __init__(self, search: Search, relaxed: np.ndarray, room: Room) -> None:
        search.dear = 1.0  # what a plan is worth is asked later
        self.search, self.owner = search, UnderRows(search, relaxed, room)
        self.prices, self.bound = np.zeros(0), -math.inf
        self.cuts: list[tuple[float, np.ndarray]] = []
        self.met: list[np.ndarray] = []
        self.bounds: list[tuple[np.ndarray, float]] = []

    def run(self, before: Mixed | None = None) -> None:
        """Prices by messages, or those that were met ``before``, then by priced optima."""
        owner = self.owner
        fresh = owner.first_times()
        if before is not None and set(fresh) <= set(before.times):
            net: Net | None = self._take_up(before.under(owner.capacity))
        else:
            net = self._by_messages(fresh)
        if net is None:
            return
        self._sharpen(net)
        weights, report = mixture(self.cuts, owner.capacity), self.search.report
        report["prices"] = self._by_time()
        if weights is not None:
            mixed = zip(weights.tolist(), self.cuts, self.met, strict=True)
            report["mixture"] = [(w, cost, plan) for w, (cost, _), plan in mixed if w > LEAST_WEIGHT]
        times = tuple(r.time for r in owner.rows)
        report["mixed"] = Mixed(times, net, owner.capacity, tuple(self.bounds), tuple(self.cuts), tuple(self.met))

    def _take_up(self, before: Mixed) -> Net:
        """What was met before, told for this capacity."""
        owner = self.owner
        owner.rows = [owner.owners.row(t) for t in before.times]
        self.cuts, self.met, self.bounds = list(before.cuts), list(before.met), list(before.bounds)
        for plan in self.met:
            owner.offer(plan)
        self.prices, self.bound = max(self.bounds, key=lambda known: known[1])
        self.search.prove(min(self.bound, self.search.upper))
        return before.net

    def _by_messages(self, fresh: list[int]) -> Net | None:
        """The net under rows at these moments and those that come up; None where there are none."""
        owner = self.owner
        net: Net | None = None
        while fresh and not owner.stop():
            owner.rows += [owner.owners.row(t) for t in fresh]
            net = build_net(owner.program, owner.keep, owner.rows, owner.room.cells)
            self.search.presolve(net, 3, CELLS)
            part = PricedNet(owner, net, np.array([owner.prices.get(r.time, 0.0) for r in owner.rows]))
            part.improve_prices(PRICES_SHARE, exact=True)
            self.prices, self.bound, self.cuts, self.met = part.prices, part.bound, part.cuts, part.met
            owner.prices = self._by_time()
            fresh = part.fresh
        self.bounds = [(self.prices, self.bound)]
        return net

    def _by_time(self) -> dict[int, float]:
        return {r.time: float(p) for r, p in zip(self.owner.rows, self.prices, strict=True)}

    def _sharpen(self, net: Net) -> None:
        """Cutting planes by priced optima, until the mixture of what was met is close to the bound."""
        owner = self.owner
        box = np.maximum(4.0 * self.prices, self.prices.max(initial=0.0) or owner.first_price())
        for _ in range(STEPS):
            found = model_maximiser(self.cuts, box, owner.capacity)
            if found is None or owner.stop():
                break
            prices, value, wider = found  # the value is that of the mixture, unless the box is in the way
            if value - self.bound <= CLOSE * abs(value) and np.array_equal(box, wider):
                break
            box = wider
            bound = self._priced_optimum(net, prices)
            self.bounds.append((prices, bound))
            if bound > self.bound:
                self.bound, self.prices = bound, prices
                self.search.prove(min(bound, self.search.upper))

    def _priced_optimum(self, net: Net, prices: np.ndarray) -> float:
        """A lower bound in seconds at these prices; the best assignment there joins the cuts."""
        owner, plans = self.owner, list[np.ndarray]()
        upper = min((c + float(prices @ g) for c, g in self.cuts), default=math.inf)
        lower = -math.inf

        def offer(choices: np.ndarray) -> float:
            nonlocal upper
            cost = owner.program.cost(choices) + float(prices @ owner.excess(choices))
            if cost < upper:
                upper = cost
                plans.append(choices)
            return upper

        def prove(bound: float) -> None:
            nonlocal lower
            lower = max(lower, bound)

        def done() -> bool:
            return upper - lower <= EXACT * CLOSE * abs(upper)

        try:
            Descent(offer, prove, done, self.search.deadline).run(PricedRows(net, owner.capacity).priced(prices), upper)
        except EmptyNodeError:  # nothing is cheaper than what was met before
            prove(upper)
        self._keep(plans[-1:])
        return min(lower, upper)

    def _keep(self, plans: Sequence[np.ndarray]) -> None:
        for choices in plans:
            self.cuts.append((self.owner.program.cost(choices), self.owner.excess(choices)))
            self.met.append(choices)
            self.owner.offer(choices)

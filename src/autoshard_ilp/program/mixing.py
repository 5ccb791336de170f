"""The best prices of bytes, and the plans that would meet the capacity at least cost if they could be mixed.

The best bound by prices per byte is the cost of the best *mixture* of assignments that fits (linear programming
duality). Where a step repeats, a mixture is nearly a plan: some of the repetitions are as in one assignment, the others
as in another. Quick prices by message passing come first. As long as what was decoded with them, mixed, is dearer than
the bound, cutting planes go on with priced optima that are nearly exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.program.capacity import Room
from autoshard_ilp.program.constrained import CELLS, Constrained
from autoshard_ilp.program.core import Descent
from autoshard_ilp.program.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.priced import PricedNet
from autoshard_ilp.program.prices import PricedRows, mixture, model_maximiser
from autoshard_ilp.program.search import Search

CLOSE = 1e-3
"""Relative distance of the mixture to the bound that is good enough ..."""

EXACT = 0.3
"""... and the part of it that a priced optimum may be off."""

STEPS = 8
"""Priced optima, at most."""

LEAST_WEIGHT = 1e-6
"""Of a plan in a mixture."""


class Mixing:
    """Looks for prices and for a mixture of plans, none of which needs to fit by itself.

    Args:
        search: ``search.program.capacity`` is set; its report gets ``prices`` (time -> seconds per byte) and
            ``mixture`` (weight, seconds and choices of each plan).
        relaxed: an assignment that exceeds the capacity where memory binds.
        room: what is possible at all; what cannot fit by itself stays.
    """

    def __init__(self, search: Search, relaxed: np.ndarray, room: Room) -> None:
        search.dear = 1.0  # what a plan is worth is asked later
        self.search, self.owner = search, Constrained(search, relaxed, room)
        self.prices, self.bound = np.zeros(0), -math.inf
        self.cuts: list[tuple[float, np.ndarray]] = []
        self.met: list[np.ndarray] = []

    def run(self) -> None:
        """Prices by messages, then by priced optima."""
        owner = self.owner
        fresh = owner.first_times()
        net: Net | None = None
        while fresh and not owner.stop():
            owner.rows += [owner.owners.row(t) for t in fresh]
            net = build_net(owner.program, owner.keep, owner.rows, owner.room.cells)
            self.search.presolve(net, 3, CELLS)
            part = PricedNet(owner, net, np.array([owner.prices.get(r.time, 0.0) for r in owner.rows]))
            part.improve_prices()
            self.prices, self.bound, self.cuts, self.met = part.prices, part.bound, part.cuts, part.met
            owner.prices = self._by_time()
            fresh = part.fresh
        if net is None:
            return
        self._sharpen(net)
        weights = mixture(self.cuts, owner.capacity)
        self.search.report["prices"] = self._by_time()
        if weights is not None:
            mixed = zip(weights.tolist(), self.cuts, self.met, strict=True)
            self.search.report["mixture"] = [(w, cost, plan) for w, (cost, _), plan in mixed if w > LEAST_WEIGHT]

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

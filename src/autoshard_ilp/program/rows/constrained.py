"""Solve under memory rows: the dual, then branching or CP-SAT for the rest; more rows until the plan fits always."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from autoshard_ilp.program.infeasible import least_cost, weighted_usage
from autoshard_ilp.program.kernels.compiled import load_windows
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.rows.branch import Tree
from autoshard_ilp.program.rows.closing import NEAR, Closing
from autoshard_ilp.program.rows.dual import Dual
from autoshard_ilp.program.rows.under import CELLS, UnderRows

HARDLY = 1e-3
"""Relative distance of a plan to the bound without a capacity from which on the best plan without one may fit ..."""

FREE_NODES = 300
"""... in programs of at most so many nodes: no whole model, for which a budget is met faster than that is shown ..."""

FREE_SHARE = 0.4
"""... and what of the time left it is looked for in."""


class Constrained(UnderRows):
    """The search under rows for one program, which begins as :class:`UnderRows` does."""

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

    def cpsat(self, net: Net) -> list[int]:
        """Finish the whole program with CP-SAT. Returns times to add."""
        result = self._run_cpsat(net)
        self.search.prove(min(result.bound, self.search.upper))
        return [] if result.choices is None else self.offer(net.complete(result.choices))

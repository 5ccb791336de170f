"""The smallest capacity that has a plan at all: proved, or bounded from both sides.

For weights w >= 0 over times that sum to one, the least weighted usage is at most the least peak, so it bounds it from
below; it is a program without memory rows and solved exactly. Two sorts of weights take turns: multiplicative ones
over all times, which give good plans at once (no moment is free, so nothing is wasted at any), and cutting planes over
the worst moments, which give the bound. CP-SAT closes what is left. Costs do not matter, only which choices are finite.

Multiplicative weights: Arora, Hazan, Kale, Theory of Computing 8 (2012), "The multiplicative weights update method".
"""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np

from autoshard_ilp._ortools import load_cp_model
from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program.cpsat import CpOptions, minimise_peak
from autoshard_ilp.program.kernels.compiled import load_kernels, load_windows
from autoshard_ilp.program.kernels.loading import load
from autoshard_ilp.program.model import Lifetimes, Program, SolverOptions
from autoshard_ilp.program.nets.core import Descent
from autoshard_ilp.program.nets.net import EmptyNodeError, build_net
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.rows.memory import Owners, Row
from autoshard_ilp.program.rows.onchip import shifted

SECONDS = 10.0  # most for the whole search: its answer is a message, or the start of a larger search
STEPS = 40  # with prices
PRICED = 0.5  # part of the time for them before CP-SAT is asked; the bound of prices alone need not meet the optimum
RATE = 20.0  # of multiplicative weights, per usage relative to the least peak known
CLIP = 1.5  # most of that relative usage that counts: plans of one moment alone are wild elsewhere
SPREAD = 1e-5  # part of the cutting planes' weights given to all times, so that ties are decided well
NEAR = 1e-3  # relative gap below which that part is left out, for the exact bound
POOL = 10  # plans combined
POOL_SECONDS = 2.0
WHOLE_SECONDS = 4.0  # CP-SAT over all strategies


def weighted_usage(program: Program, weights: np.ndarray) -> Program:
    """The program whose cost is the weighted usage in bytes; what was forbidden stays forbidden.

    Args:
        program: nodes, edges and lifetimes.
        weights: one per time step, none negative (dimensionless); empty: every finite assignment costs nothing.
    """
    node_cost = [np.where(np.isfinite(n.costs), 0.0, np.inf) for n in program.nodes]
    edge_cost = [np.where(np.isfinite(e.table), 0.0, np.inf) for e in program.edges]
    lt = program.lifetimes
    if len(weights) and weights.any():
        of_nodes, of_edges = lt.weights_of_owners(weights, len(node_cost), len(edge_cost))
        for held, costs, owners in ((of_nodes, node_cost, program.nodes), (of_edges, edge_cost, program.edges)):
            for i, weight in enumerate(held):
                own = owners[i].bytes
                if weight > 0 and own is not None:
                    costs[i] = costs[i] + weight * np.asarray(own, np.float64)
    nodes = tuple(dataclasses.replace(n, costs=c, bytes=None) for n, c in zip(program.nodes, node_cost, strict=True))
    edges = tuple(dataclasses.replace(e, table=t, bytes=None) for e, t in zip(program.edges, edge_cost, strict=True))
    return Program(nodes, edges, Lifetimes.empty())


def least_cost(program: Program, deadline: float) -> tuple[np.ndarray | None, float]:
    """Best assignment found and a valid lower bound for a program without memory; EmptyNodeError: none is finite."""
    best: list[np.ndarray] = []
    upper, lower = math.inf, -math.inf

    def offer(choices: np.ndarray) -> float:
        nonlocal upper
        cost = program.cost(choices)
        if cost < upper:
            upper = cost
            best[:] = [choices]
        return upper

    def prove(bound: float) -> None:
        nonlocal lower
        lower = max(lower, bound)

    descent = Descent(offer, prove, lambda: upper - lower <= 1e-12 * abs(upper), deadline)
    try:
        descent.run(build_net(program), math.inf)
    except EmptyNodeError:
        if not best:
            raise
        lower = upper
    return (best[0] if best else None), min(lower, upper)


def minimum_capacity(
    program: Program,
    options: SolverOptions,
    *,
    enough: int | None = None,
    beyond: int | None = None,
    seconds: float = SECONDS,
) -> tuple[int, int, np.ndarray]:
    """Smallest capacity in bytes per device for which a plan exists.

    Args:
        program: its own ``capacity`` is ignored.
        options: time limit, seed, workers.
        enough: stop as soon as this capacity is known to suffice, or known not to.
        beyond: stop as soon as no capacity below this one is known to suffice.
        seconds: most to search once some plan is known, where the time limit leaves them.

    Returns:
        A proved lower bound in bytes, the peak in bytes of the best plan found (equal when proved), and that plan.

    Raises:
        InfeasibleError: no assignment is finite, whatever the capacity.
    """
    size = program.on_chip_bytes
    if size:
        whole, above = (None if n is None else n + size for n in (enough, beyond))
        lower, upper, choices = minimum_capacity(shifted(program), options, enough=whole, beyond=above, seconds=seconds)
        return max(0, lower - size), upper - size, choices
    try:
        return _Minimum(program, options, seconds, enough, beyond).run()
    except EmptyNodeError:
        raise InfeasibleError(
            "A plan needs one finite strategy per node that fits its neighbours. Received: a program with none at any "
            "memory capacity. Remove a pin."
        ) from None


class _Minimum:
    def __init__(
        self, program: Program, options: SolverOptions, seconds: float, enough: int | None, beyond: int | None
    ) -> None:
        load_kernels()
        load_windows()
        began = time.monotonic()
        self.program, self.options = program, options
        self.begin_deadline = began + options.time_limit
        self.deadline = began + min(options.time_limit, seconds)
        self.enough, self.beyond = enough, beyond
        self.owners, self.rows = Owners(program), list[Row]()
        self.lower, self.upper = program.least_peak(), -1
        self.priced = 0  # steps with prices so far
        self.best: np.ndarray | None = None
        self.used: list[np.ndarray] = []
        self.plans: list[np.ndarray] = []

    def run(self) -> tuple[int, int, np.ndarray]:
        start, _ = least_cost(weighted_usage(self.program, np.zeros(0)), self.begin_deadline)
        if start is None:
            raise InfeasibleError(
                "No finite assignment was found within the time limit. Received: "
                f"time_limit={self.options.time_limit}. Raise it."
            )
        self._see(start)
        now = time.monotonic()
        self._price(now + PRICED * (self.deadline - now))
        while not self._finished() and self._cpsat(self._pool(), POOL_SECONDS):
            pass
        while not self._finished():
            if not self._cpsat(seconds=WHOLE_SECONDS):
                break
        self._price(self.deadline)
        assert self.best is not None
        return min(self.lower, self.upper), self.upper, self.best

    def _price(self, until: float) -> None:
        """Steps with prices, at most ``STEPS`` in all, begun before ``until`` (of the monotonic clock)."""
        while self.priced < STEPS and self.rows and time.monotonic() < until and not self._finished():
            weights = self._next_weights(self.priced)
            self.priced += 1
            choices, bound = least_cost(weighted_usage(self.program, weights), self.deadline)
            if math.isfinite(bound):  # no bound, and no plan, when time ran out at once
                self.lower = max(self.lower, math.ceil(bound * (1 - 1e-12) - 1e-6))
            if choices is not None:
                self._see(choices)

    def _finished(self) -> bool:
        if self.enough is not None and (self.upper <= self.enough or self.lower > self.enough):
            return True
        if self.beyond is not None and self.lower >= self.beyond:
            return True
        return self.lower >= self.upper or time.monotonic() > self.deadline

    def _see(self, choices: np.ndarray) -> None:
        """Keep the lowest peak; its moment becomes a row."""
        used = self.program.usage_over_time(choices)
        peak = int(used.max()) if len(used) else 0
        if self.best is None or peak < self.upper:
            self.best, self.upper = choices, peak
        self.used.append(used)
        self.plans.append(choices)
        moment = int(np.argmax(used)) if len(used) else 0
        if peak > self.lower and all(r.time != moment for r in self.rows):
            self.rows.append(self.owners.row(moment))

    def _next_weights(self, step: int) -> np.ndarray:
        """One weight per time, of sum one: multiplicative weights and those of cutting planes in turn."""
        total = self.used[0] / max(1, int(self.used[0].max()))
        for used in self.used[1:]:
            total = total + np.minimum(used / max(1, self.upper), CLIP)
        spread = np.exp(RATE * (total - total.max()))
        spread /= spread.sum()
        if step % 2 == 0:
            return np.asarray(spread)
        part = SPREAD if self.upper - self.lower > NEAR * self.upper else 0.0
        weights = part * spread
        for row, w in zip(self.rows, self._weights(), strict=True):
            weights[row.time] += (1 - part) * w
        return np.asarray(weights)

    def _weights(self) -> np.ndarray:
        """Weights that maximise the least weighted usage over the plans seen (a linear program)."""
        from scipy.optimize import linprog

        usage = np.array([[int(u[r.time]) for r in self.rows] for u in self.used], np.float64)
        scale = max(1.0, usage.max())
        count = len(self.rows)
        result = linprog(
            np.concatenate(([-1.0], np.zeros(count))),
            A_ub=np.hstack((np.ones((len(usage), 1)), -usage / scale)),
            b_ub=np.zeros(len(usage)),
            A_eq=np.array([[0.0] + [1.0] * count]),
            b_eq=[1.0],
            bounds=[(None, None)] + [(0.0, 1.0)] * count,
            method="highs",
        )
        return np.full(count, 1.0 / count) if result.x is None else np.maximum(result.x[1:], 0.0) / result.x[1:].sum()

    def _pool(self) -> list[np.ndarray]:
        """Per node, the strategies of the plans seen with the least peaks (bool)."""
        keep = [np.zeros(len(n.costs), bool) for n in self.program.nodes]
        order = sorted(range(len(self.used)), key=lambda i: (int(self.used[i].max(initial=0)), i))
        for i in order[:POOL]:
            for v, s in enumerate(self.plans[i].tolist()):
                keep[v][s] = True
        return keep

    def _cpsat(self, keep: list[np.ndarray] | None = None, seconds: float = math.inf) -> bool:
        """One exact run under the present rows, over all strategies or those of ``keep``. False: no progress."""
        self.deadline += load(load_cp_model)
        net = build_net(without_costs(self.program), keep, self.rows)
        deadline = min(self.deadline, time.monotonic() + seconds)
        Presolve(net, deadline=deadline).run()
        if net.live:
            options = CpOptions(deadline, self.options.seed, self.options.workers)
            choices, bound = minimise_peak(net, self.program, self.rows, options, self.lower, self.upper, self.best)
        else:
            choices = np.zeros(len(net.cost), np.int64)
            bound = int(net.base.max())  # no row has a cheaper choice left
        before = (self.lower, self.upper, len(self.rows))
        if keep is None:
            self.lower = max(self.lower, min(bound, self.upper))
        if choices is not None:
            self._see(net.complete(choices))
        return before != (self.lower, self.upper, len(self.rows))


def without_costs(program: Program) -> Program:
    """The same program with every finite cost set to zero (bytes kept)."""
    nodes = tuple(dataclasses.replace(n, costs=np.where(np.isfinite(n.costs), 0.0, np.inf)) for n in program.nodes)
    edges = tuple(dataclasses.replace(e, table=np.where(np.isfinite(e.table), 0.0, np.inf)) for e in program.edges)
    return Program(nodes, edges, program.lifetimes)

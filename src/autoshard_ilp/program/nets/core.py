"""Presolve and message passing in turn, then branching: the exact descent that solves most programs without OR-Tools.

Each round shrinks the net exactly, raises the bound, finds plans and removes what cannot be in a better plan. Most
programs are solved after a few. What is left is branched on (:mod:`.program.nets.strong`); where nodes have
many strategies and tables many cells, plans within ever wider limits are looked for first
(:mod:`autoshard_ilp.program.nets.widening`), and what that leaves is eliminated with ever larger tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard_ilp.program.kernels.compiled import load_windows
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.nets.strong import DEAR, StrongBranching, trial_cells
from autoshard_ilp.program.nets.widening import Widening

# Most neighbours and most table cells of an eliminated node, round by round.
ROUNDS = (
    (3, 20_000),
    (99, 20_000),
    (99, 50_000),
    (99, 100_000),
    (99, 300_000),
    (99, 1_000_000),
    (99, 3_000_000),
    (99, 8_000_000),
)
BEFORE_BRANCHING = 2  # rounds
TOO_DEAR = 5e9  # table cells times strategies of a node, beyond which wider elimination is cheaper than trying them;
# where they are more than strong.DEAR, limits are widened first ..
WINDOW_SECONDS = 1.5  # .. until a window may take longer than this, and ..
FAR = 0.01  # .. with a better plan than one of so large a relative gap, if one can be had
BRANCH_SHARE = 0.5  # of the time left, before limits are widened
SWEEPS = 400  # most sweeps in a round
CHECK = 10  # sweeps between two plans
CORE = 3  # strategies per node of a core
CORE_CELLS = 100_000
CORE_SWEEPS = 10
STALL = 0.05  # a round ends when CHECK sweeps close less than this part of the gap ..
SHRINK = 0.7  # .. or leave less than this part of the strategies; then it is repeated before tables may grow


def core_plan(messages: Messages, plans: list[np.ndarray], deadline: float) -> np.ndarray | None:
    """The best assignment (exactly, where elimination stays narrow) within few strategies per node.

    Kept are the strategies of ``plans`` and the ``CORE`` with the least bounds; None: nothing finite is left.
    """
    net = messages.net.copy()
    totals = messages.totals()
    for v in messages.nodes:
        alive = messages.alive[v]
        keep = np.zeros(len(net.cost[v]), bool)
        total = totals[v]
        keep[alive[np.argsort(total, kind="stable")[:CORE]]] = True
        keep[[int(x[v]) for x in plans]] = True
        cost = np.full(len(keep), np.inf)
        keep[np.setdiff1d(np.arange(len(keep)), alive[np.isfinite(total)])] = False
        cost[alive] = messages.theta[v]
        cost[~keep] = np.inf
        try:
            net.set_cost(v, cost)
        except EmptyNodeError:
            return None
    for n, table in messages.tables.items():
        f = net.factors[n]
        net.replace(n, Factor(f.scope, f.labels, table, f.used))
    try:
        Presolve(net, max_degree=99, max_cells=CORE_CELLS, deadline=deadline).run()
        if not net.live:
            return net.complete(np.zeros(len(net.cost), np.int64))
        reduce.compress_all(net)
        inner = Messages(net)
        inner.sweep(count=CORE_SWEEPS)
        return net.complete(inner.improve(inner.decode()))
    except EmptyNodeError:
        return None


@dataclass
class Descent:
    """One descent; ``offer`` takes a full assignment and returns the best known cost in seconds.

    Args:
        offer: callback for plans found.
        prove: callback for lower bounds in seconds.
        done: True when the gap asked for is reached.
        deadline: monotonic seconds.
        worth: whether a plan of that many seconds is worth completing and offering.
        rounds: most neighbours and most table cells of an eliminated node, round by round.
        least_sweeps: of a round, before it may end because little changes.
        better: looks for a plan in other ways, once, and returns the best known cost in seconds.
        presolved: the net is as the first round's presolve leaves it.
    """

    offer: Callable[[np.ndarray], float]
    prove: Callable[[float], None]
    done: Callable[[], bool]
    deadline: float
    worth: Callable[[float], bool] = lambda seconds: True
    rounds: Sequence[tuple[int, int]] = ROUNDS
    least_sweeps: Callable[[], int] = lambda: 2 * CHECK
    better: Callable[[], float] | None = None
    presolved: bool = False
    branching: StrongBranching | None = field(default=None, init=False)
    widening: Widening | None = field(default=None, init=False)
    log: list[dict[str, Any]] = field(default_factory=list)
    presolve_seconds: float = 0.0  # of all rounds

    def run(self, net: Net, upper: float) -> Net:
        """Descend until solved, out of time or of branches; what is left has reparametrised costs.

        Raises:
            EmptyNodeError: no plan is cheaper than ``upper`` (with no upper bound: no plan at all).
        """
        level = 0
        while level < len(self.rounds):
            degree, cells = self.rounds[level]
            if level >= BEFORE_BRANCHING:
                upper, ended = self._close(net, upper)
                if ended:
                    return net
            since = time.monotonic()
            before = net.size()
            presolve = Presolve(net, max_degree=degree, max_cells=cells, deadline=self.deadline)
            try:
                if not self.presolved or self.log:
                    presolve.run()
            finally:
                self.presolve_seconds += time.monotonic() - since
            entry: dict[str, Any] = {"before": before, "removed": dict(presolve.counts), "after": net.size()}
            entry["presolve_seconds"] = time.monotonic() - since
            self.log.append(entry)
            if not net.live:
                self.offer(net.complete(np.zeros(len(net.cost), np.int64)))
                self.prove(net.constant)
                return net
            if time.monotonic() > self.deadline:
                self._any_plan(net, upper)
                return net
            since = time.monotonic()
            strategies = net.size()["strategies"]
            net, upper, sweeps = self._messages(net, upper)
            entry.update(sweeps=sweeps, lower_bound=net.constant, message_seconds=time.monotonic() - since)
            if self.done():
                return net
            level += net.size()["strategies"] > SHRINK * strategies
        return net

    def _close(self, net: Net, upper: float) -> tuple[float, bool]:
        """Widen limits and branch, what promises more first. The best plan's cost, and whether this is the end."""
        cells, start = trial_cells(net), net
        if cells > DEAR and self.widening is None:
            if self.better is not None and upper - net.constant > FAR * abs(upper):
                upper = min(upper, self.better())
            upper = self._widen(net, upper, WINDOW_SECONDS)
            assert self.widening is not None
            start = self.widening.net.copy()  # its messages are settled
        if self._over() or cells > TOO_DEAR:
            return upper, self._over()
        self.branching = StrongBranching(self.offer, self.prove, self.done, self.deadline)
        self.branching.deadline = time.monotonic() + BRANCH_SHARE * (self.deadline - time.monotonic())
        self.branching.run(start, upper)
        if not self._over():
            self.branching.upper = self._widen(net, self.branching.upper)
            self.branching.deadline = self.deadline
            self.branching.resume()
        return upper, True

    def _widen(self, net: Net, upper: float, most_seconds: float = math.inf) -> float:
        self.deadline += load_windows()
        began = self.widening is not None
        widening = self.widening = self.widening or Widening(self.offer, self.prove, self.done, self.deadline)
        known = len(widening.windows)
        try:
            return widening.resume(upper, most_seconds) if began else widening.run(net, upper, most_seconds)
        finally:
            self.log.append({"windows": widening.windows[known:]})

    def _any_plan(self, net: Net, upper: float) -> None:
        """Out of time without a plan: what a few messages choose is one."""
        if math.isfinite(upper):
            return
        reduce.compress_all(net)
        messages = Messages(net)
        messages.sweep(count=CHECK)
        self.offer(net.complete(messages.improve(messages.decode())))
        self.prove(messages.bound)

    def _over(self) -> bool:
        return self.done() or time.monotonic() > self.deadline

    def _messages(self, net: Net, upper: float) -> tuple[Net, float, int]:
        reduce.compress_all(net)
        messages = Messages(net)
        before, sweeps, plans = messages.bound, 0, list[np.ndarray]()
        for sweeps in range(CHECK, SWEEPS + 1, CHECK):
            messages.sweep(upper, CHECK)
            plans.append(messages.improve(messages.decode()))
            if self.worth(messages.cost(plans[-1])):
                upper = self.offer(net.complete(plans[-1]))
            self.prove(messages.bound)
            stalled = messages.bound - before < STALL * (upper - messages.bound)
            stalled |= messages.strategies() < SHRINK * net.size()["strategies"]
            if self.done() or time.monotonic() > self.deadline or (stalled and sweeps >= self.least_sweeps()):
                break
            before = messages.bound
        if not self.done():
            core = core_plan(messages, plans[-3:], self.deadline)
            if core is not None:
                upper = self.offer(core)
                messages.sweep(upper)
                self.prove(messages.bound)
        return messages.apply(), upper, sweeps

"""The optimum of a net without memory rows: the best plan within a limit, for ever wider limits.

Where nodes have many strategies, message passing and branching close the last tenths of a percent slowly, while few
combinations of strategies cost as little as that: a window (:mod:`autoshard_ilp.program.window`) holds them all. The
limit grows from the bound, in steps that grow as long as windows take little, and ends at the best plan known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.nets.strong import settle
from autoshard_ilp.program.window.window import Window

FIRST_PART = 1 / 16  # of the gap: the first step ..
FIRST_STEP = 1e-3  # .. and the largest one, relative
SWEEPS, STALL = 200, 0.002  # before the first window: at most, and the part of the gap that a few of them must close
QUICK_SECONDS = 0.5  # a window that took no longer is followed by one of twice the step ..
GROWTH = 2.5  # .. and else by one that takes about as many times as long, if seconds grow as before
PATIENCE_SECONDS = 10.0  # for a window; twice as much after each that took longer ..
SHARE = 0.5  # .. but at most this part of the time left
FAILURES = 3  # windows that may be too wide before this is given up
LEAST_STEP = 1e-6  # relative
LEAST_SECONDS = 0.01  # of a window, as far as its growth is concerned
LEAST_SHARE = 0.25  # of the last step, that the next one is at least


class Widening:
    """The search in one net; the callbacks are those of :class:`autoshard_ilp.program.nets.core.Descent`."""

    def __init__(
        self,
        offer: Callable[[np.ndarray], float],
        prove: Callable[[float], None],
        done: Callable[[], bool],
        deadline: float,
    ) -> None:
        self.offer, self.prove, self.done, self.deadline = offer, prove, done, deadline
        self.windows: list[dict[str, Any]] = []

    def run(self, net: Net, upper: float, most_seconds: float = math.inf) -> float:
        """Widen the limit until the optimum is known, or windows get too wide. Returns the cost of the best plan known.

        Args:
            net: without memory rows.
            upper: seconds; only cheaper plans are wanted.
            most_seconds: of a window, after which :meth:`resume` would go on.

        Raises:
            EmptyNodeError: no plan is cheaper than ``upper``.
        """
        net = net.copy()
        self.began, self.began_alone = time.monotonic(), time.thread_time()
        reduce.compress_all(net)
        messages = Messages(net)
        settle(messages, upper, SWEEPS, STALL, self.deadline)
        self.net = net = messages.apply()
        self.prove(net.constant)
        reduce.compress_all(net)
        self.window = Window(net, 0, [np.zeros(0)], self.deadline)
        self.known, self.too_wide = max(self.window.bound, net.constant), math.inf
        self.step = min(FIRST_PART * (upper - self.known), FIRST_STEP * abs(self.known))
        return self.resume(upper, most_seconds)

    def resume(self, upper: float, most_seconds: float = math.inf) -> float:
        """Go on from the limit that was proved last; as :meth:`run`."""
        failures, patience = 0, min(PATIENCE_SECONDS, most_seconds)
        while not self.done() and failures < FAILURES and self.step > LEAST_STEP * abs(self.known):
            now, since = time.monotonic(), time.thread_time()
            if now > self.deadline:
                break
            limit = upper if self.known + 1.5 * self.step > upper else self.known + self.step
            if limit >= self.too_wide:
                limit = 0.5 * (self.known + self.too_wide)
            # What a window may take, and steps, shall not depend on what else a machine does.
            waits = max(1.0, (now - self.began) / max(since - self.began_alone, LEAST_SECONDS))
            found = self.window.solve(limit, now + min(patience * waits, SHARE * (self.deadline - now)))
            took = time.thread_time() - since
            self.windows.append({"limit": limit, "status": found.status, "seconds": took})
            if found.choices is not None:
                upper = self.offer(self.net.complete(found.choices))
            self.prove(min(found.bound, upper))
            if found.status == "unknown":
                failures, self.too_wide, self.step = failures + 1, limit, 0.5 * (limit - self.known)
                patience *= 2.0
            elif found.status == "optimal":
                break
            elif limit >= upper:
                raise EmptyNodeError("limit")
            else:
                self.known, self.too_wide = limit, math.inf
                self.step *= 2.0
                if took > QUICK_SECONDS:
                    self.step = min(self.step, self._next_step(0.5 * self.step))
            if GROWTH * took > most_seconds:
                break
        return upper

    def _next_step(self, step: float) -> float:
        """By how much to widen the last limit, were it proved: seconds of windows grow exponentially with the limit."""
        proved = [w for w in self.windows if w["status"] == "infeasible"][-2:]
        if len(proved) < 2:
            return step
        before, last = proved
        rate = math.log(max(last["seconds"], LEAST_SECONDS) / max(before["seconds"], LEAST_SECONDS))
        rate /= last["limit"] - before["limit"]
        return max(LEAST_SHARE * step, math.log(GROWTH) / rate) if rate > 0 else step

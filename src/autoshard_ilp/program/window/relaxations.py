"""Several relaxations of one net under memory rows, each with a limit that every plan wanted stays within.

    relaxation k    minimise  w_k cost(x) + sum_r p_kr usage_r(x)          w_k in {0, 1}, p_kr >= 0
    wanted          cost(x) <= limit and usage_r(x) <= capacity, so its value is at most w_k limit + sum_r p_kr capacity

One with the best prices known proves most; others rule out what is cheap but too large, or small but too dear. Message
passing gives each a bound and reparametrised costs: what a strategy or cell adds to the bound, at least (its slack).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard_ilp.program.nets.bounds import SAFETY, Messages
from autoshard_ilp.program.nets.net import Factor, Net
from autoshard_ilp.program.rows.prices import PricedRows

SWEEPS = 10
MOST_SWEEPS = 6  # times SWEEPS
STALL = 1e-3  # relative to the bound: worth more sweeps
SINGLE = 3  # memory rows, up to which each has a relaxation with its own price alone
BYTES = 0.5  # less than one byte: bounds of bytes are sums of floats


class Relaxations:
    """The relaxations of ``net``.

    Args:
        net: presolved, true costs, with bytes in at least one memory row.
        capacity: bytes of every row.
        prices: seconds per byte and row: those to try, the best known first.
        deadline: monotonic seconds, after which bounds rise no more.
        settled: messages of the net under the first prices, whose constant counts the capacity, where some are known.

    Attributes:
        weights: of cost and of bytes per row, (relaxations, 1 + rows).
        messages: per relaxation.

    Raises:
        EmptyNodeError: a node has no finite strategy.
    """

    def __init__(
        self,
        net: Net,
        capacity: int,
        prices: Sequence[np.ndarray],
        deadline: float = math.inf,
        settled: Messages | None = None,
    ) -> None:
        self.net, self.capacity = net, capacity
        self.weights = _weights(prices, len(net.base))
        costless = _costless(net)  # values count the capacity in their limits: here it is 0
        self.messages = [Messages(PricedRows(net if w[0] else costless, 0).priced(w[1:])) for w in self.weights]
        if settled is not None:
            known = settled.state()
            self.messages[0].restore(replace(known, bound=known.bound + float(prices[0].sum()) * capacity))
        for messages in self.messages:
            _settle(messages, deadline)

    def limits(self, limit: float) -> np.ndarray:
        """What plans of at most ``limit`` seconds stay within, per relaxation, and a little for float noise."""
        priced = self.weights[:, 0] > 0
        out = self.weights[:, 1:].sum(axis=1) * self.capacity
        out[priced] += limit
        out[priced] += SAFETY * np.abs(out[priced])
        return np.where(priced, out, out + BYTES)

    def bounds(self) -> np.ndarray:
        """Lower bounds of the relaxations' values."""
        return np.array([m.bound for m in self.messages])

    def seconds(self, bounds: np.ndarray) -> float:
        """The lower bound of the cost of plans that fit which these bounds of the relaxations prove."""
        priced = self.weights[:, 0] > 0
        return float((bounds - self.weights[:, 1:].sum(axis=1) * self.capacity)[priced].max())

    @property
    def constant(self) -> np.ndarray:
        """What all plans have in common, per relaxation."""
        return self.weights[:, 0] * self.net.constant + self.weights[:, 1:] @ self.net.base.astype(np.float64)

    def value(self, cost: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Of things of this cost (seconds) and bytes (things, rows): (things, relaxations)."""
        return cost[:, None] * self.weights[:, 0] + used.astype(np.float64) @ self.weights[:, 1:].T


def _weights(prices: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Cost with each of the prices, with those of one row alone, and with none; each row's bytes. None twice."""
    own = np.eye(rows)
    found = [np.concatenate(([1.0], p)) for p in prices]
    if rows <= SINGLE:
        found += [np.concatenate(([1.0], prices[0] * one)) for one in own]
    found += [np.concatenate(([1.0], np.zeros(rows))), *(np.concatenate(([0.0], one)) for one in own)]
    return np.array([w for i, w in enumerate(found) if not any(np.array_equal(w, x) for x in found[:i])])


def _costless(net: Net) -> Net:
    """A copy of the net in which everything that is possible costs nothing."""
    out = net.copy()
    out.constant = 0.0
    for v in net.live:
        out.set_cost(v, np.where(np.isfinite(net.cost[v]), 0.0, math.inf))
    for n, f in net.factors.items():
        out.replace(n, Factor(f.scope, f.labels, np.where(np.isfinite(f.table), 0.0, math.inf), f.used))
    return out


def _settle(messages: Messages, deadline: float) -> None:
    """Sweep until the bound hardly rises."""
    for _ in range(MOST_SWEEPS):
        if time.monotonic() > deadline:
            break
        before = messages.bound
        messages.sweep(count=SWEEPS)
        if messages.bound - before <= STALL * abs(messages.bound):
            break

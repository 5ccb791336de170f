"""Prices per byte on memory rows (Lagrange multipliers).

For prices l >= 0 the priced program

    minimise  cost(x) + sum_r l_r (usage_r(x) - capacity)

has no memory rows, and its optimum bounds the true one from below. ``dual`` looks for the best prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard_ilp._ortools import load_mathopt
from autoshard_ilp.program.nets.net import Factor, Net


@dataclass(eq=False)
class PricedRows:
    """The memory rows of one net under one capacity (bytes per device); prices in seconds per byte."""

    net: Net
    capacity: int

    def usage(self, choices: np.ndarray) -> np.ndarray:
        """Bytes in use per row (int64) under choices of the nodes still there."""
        net = self.net
        total = net.base.copy()
        for v in net.live:
            own = net.used[v]
            if own is not None:
                total += own[:, choices[v]]
        for f in net.factors.values():
            if f.used is not None:
                at = tuple(int(lab[choices[v]]) for v, lab in zip(f.scope, f.labels, strict=True))
                total += np.array([own[at] for own in f.used])
        return total

    def fits(self, choices: np.ndarray) -> bool:
        """Whether choices of the nodes still there stay within the capacity in every row."""
        return bool((self.usage(choices) <= self.capacity).all())

    def charge(self, prices: np.ndarray) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], float]:
        """What ``prices`` add to node costs, to tables, and to the constant."""
        net = self.net
        nodes: dict[int, np.ndarray] = {}
        factors: dict[int, np.ndarray] = {}
        if prices.any():
            for v in net.live:
                own = net.used[v]
                if own is not None:
                    nodes[v] = prices @ own
            for n, f in net.factors.items():
                if f.used is not None:
                    factors[n] = np.tensordot(prices, f.used, axes=1)
        return nodes, factors, float(prices @ (net.base - self.capacity))

    def priced(self, prices: np.ndarray) -> Net:
        """A copy of the net with the prices in its costs, and without bytes."""
        out = self.net.copy()
        nodes, factors, offset = self.charge(prices)
        out.constant += offset
        out.used = [None] * len(out.used)
        out.base = out.base[:0]
        for v, extra in nodes.items():
            out.set_cost(v, out.cost[v] + extra)
        for n, f in list(out.factors.items()):
            if f.used is not None:
                out.replace(n, Factor(f.scope, f.labels, f.table + factors.get(n, 0.0)))
        return out


def mixture(cuts: Sequence[tuple[float, np.ndarray]], capacity: int) -> np.ndarray | None:
    """Weights of plans, 1 in all, whose mixture fits in every row and costs least: a linear program.

    Its value is what the best prices prove with these plans alone; few plans have a weight, one more than rows bind.

    Args:
        cuts: of plans, their cost in seconds and usage - capacity in bytes per row.
        capacity: bytes.

    Returns:
        A weight per plan, or None where no mixture fits.
    """
    if not cuts:
        return None
    unit = max(abs(c) for c, _ in cuts) or 1.0
    mathopt = load_mathopt()
    model = mathopt.Model()
    weights = [model.add_variable(lb=0.0) for _ in cuts]
    model.add_linear_constraint(mathopt.fast_sum(weights) == 1.0)
    for row in range(len(cuts[0][1])):
        excess = [float(g[row]) / max(1, capacity) for _, g in cuts]
        model.add_linear_constraint(mathopt.fast_sum(e * w for e, w in zip(excess, weights, strict=True)) <= 0.0)
    model.minimize(mathopt.fast_sum(c / unit * w for (c, _), w in zip(cuts, weights, strict=True)))
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return None
    return np.array(result.variable_values(weights))


def model_maximiser(
    cuts: Sequence[tuple[float, np.ndarray]], box: np.ndarray, capacity: int
) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Prices at which the cutting-plane model of the dual function is largest.

    Args:
        cuts: of plans, their cost in seconds and usage - capacity in bytes per row.
        box: largest price per row, seconds per byte.
        capacity: bytes.

    Returns:
        The prices in seconds per byte, the model's value there in seconds (no prices within the box have a larger
        bound), and the box, wider where the prices touch it; None without cuts.
    """
    if not cuts:
        return None
    scale = max(1, capacity)
    unit = max(abs(c) for c, _ in cuts) or 1.0
    mathopt = load_mathopt()
    model = mathopt.Model()
    value = model.add_variable(lb=-math.inf)
    found = [model.add_variable(lb=0.0, ub=float(b) * scale / unit) for b in box]
    for c, g in cuts:
        gained = mathopt.fast_sum(float(x) * p for x, p in zip(g / scale, found, strict=True))
        model.add_linear_constraint(value - gained <= float(c) / unit)
    model.maximize(value)
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return None
    prices = np.maximum(np.array(result.variable_values(found)), 0.0) * unit / scale
    return prices, result.objective_value() * unit, np.where(prices >= 0.999 * box, 4.0 * box, box)

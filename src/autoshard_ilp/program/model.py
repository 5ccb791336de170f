"""The integer program as plain data: the one object that solver, brute force and notebooks read.

    minimise    sum_v c_v[x_v]  +  sum_{e=(u,v)} C_e[p_e[x_u], q_e[x_v]]
    subject to  for every time t:  sum of bytes of all lifetimes alive at t  <=  capacity

``x_v`` is the strategy chosen at node v. An edge's table is indexed by *labels*: ``p_e`` maps the strategies of u, and
``q_e`` those of v, to rows and columns (many strategies share one tensor layout, so tables stay small).
A forbidden choice costs ``inf``; no finite number stands for "impossible".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard_ilp.arguments import flag, integer, number, real, whole_number


@dataclass(frozen=True, eq=False)
class Node:
    """A decision. ``costs[s]`` in seconds (float64; ``inf`` forbids); ``bytes[s]`` held during its lifetimes."""

    name: str
    costs: np.ndarray
    bytes: np.ndarray | None = None  # int64, one per strategy


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost that depends on two decisions, with ``u != v``; ``bytes`` (same shape as ``table``) is held likewise."""

    u: int
    v: int
    u_labels: np.ndarray  # int, strategies of u -> rows
    v_labels: np.ndarray  # int, strategies of v -> columns
    table: np.ndarray  # float64 seconds, rows x columns
    bytes: np.ndarray | None = None  # int64, rows x columns


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Half-open intervals of time during which a node's or an edge's bytes are held; parallel integer arrays.

    One owner may have many lifetimes (a repeated layer folded into one node has one per repetition).
    """

    is_edge: np.ndarray  # bool: owner indexes edges, else nodes
    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @staticmethod
    def empty() -> Lifetimes:
        zero = np.zeros(0, np.int64)
        return Lifetimes(np.zeros(0, bool), zero, zero, zero)

    def weights_of_owners(self, weights: np.ndarray, nodes: int, edges: int) -> tuple[np.ndarray, np.ndarray]:
        """What a byte of each of ``nodes`` and ``edges`` weighs while it is held, by weights per time step."""
        total = np.concatenate(([0.0], np.cumsum(weights)))
        held = total[np.asarray(self.end)] - total[np.asarray(self.start)]
        # A difference of sums leaves noise where all weights are zero, which would cost presolve its zeros.
        held[held <= 1e-14 * total[-1]] = 0.0
        is_edge, owner = np.asarray(self.is_edge, bool), np.asarray(self.owner)
        sides = ((~is_edge, nodes), (is_edge, edges))
        of_nodes, of_edges = (np.bincount(owner[side], held[side], count) for side, count in sides)
        return of_nodes, of_edges

    def followed_by(self, is_edge: np.ndarray, owner: np.ndarray, start: np.ndarray, end: np.ndarray) -> Lifetimes:
        """These, and then further ones."""
        more = {"is_edge": is_edge, "owner": owner, "start": start, "end": end}
        return Lifetimes(**{name: np.concatenate([getattr(self, name), column]) for name, column in more.items()})


@dataclass(frozen=True, eq=False)
class Program:
    """An integer program; ``capacity`` in bytes per device (``None``: no memory constraint).

    ``on_chip_bytes`` of each of the first ``on_chip_instants`` instants do not count; the instants after them hold what
    cannot be on the chip (:mod:`autoshard_ilp.costs.tpu.onchip`).

    ``families`` gives, where they are wanted, restrictions of all nodes at once among which good plans are likely: for
    each, the strategies that it leaves every node (bool).
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    lifetimes: Lifetimes = field(default_factory=Lifetimes.empty)
    capacity: int | None = None
    on_chip_bytes: int = 0
    on_chip_instants: int = 0
    families: Callable[[], Sequence[Sequence[np.ndarray]]] | None = None

    def cells(self) -> int:
        """Entries of the tables of all edges: what solving takes time for."""
        return sum(edge.table.size for edge in self.edges)

    def cost(self, choices: Sequence[int] | np.ndarray) -> float:
        """Objective in seconds of one strategy per node."""
        total = sum(float(n.costs[s]) for n, s in zip(self.nodes, choices, strict=True))
        for e in self.edges:
            total += float(e.table[e.u_labels[choices[e.u]], e.v_labels[choices[e.v]]])
        return total

    def usage_over_time(self, choices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes held at each time step under ``choices`` (int64; empty without lifetimes).

        Bytes on the chip are left out, also where they are more than what is held: the largest value is the peak.
        """
        node_bytes = [0 if n.bytes is None else n.bytes[s] for n, s in zip(self.nodes, choices, strict=True)]
        edge_bytes = [
            0 if e.bytes is None else e.bytes[e.u_labels[choices[e.u]], e.v_labels[choices[e.v]]] for e in self.edges
        ]
        return self._held_over_time(node_bytes, edge_bytes)

    def least_peak(self) -> int:
        """Bytes that no choices hold less than at some time: those of every owner's own least, together."""
        usage = self._held_over_time(
            [_least(n.bytes, n.costs) for n in self.nodes], [_least(e.bytes, e.table) for e in self.edges]
        )
        return max(0, int(usage.max())) if len(usage) else 0

    def _held_over_time(self, node_bytes: Sequence[int], edge_bytes: Sequence[int]) -> np.ndarray:
        lt = self.lifetimes
        if not len(lt.owner):
            return np.zeros(0, np.int64)
        held = np.empty(len(lt.owner), np.int64)
        held[~lt.is_edge] = np.array(node_bytes, np.int64)[lt.owner[~lt.is_edge]]
        held[lt.is_edge] = np.array(edge_bytes, np.int64)[lt.owner[lt.is_edge]]
        delta = np.zeros(int(lt.end.max()) + 1, np.int64)
        np.add.at(delta, lt.start, held)
        np.add.at(delta, lt.end, -held)
        usage = np.cumsum(delta)[:-1]
        usage[: self.on_chip_instants] -= self.on_chip_bytes
        return usage

    def peak(self, choices: Sequence[int] | np.ndarray) -> int:
        """Largest usage over time in bytes."""
        usage = self.usage_over_time(choices)
        return int(usage.max()) if len(usage) else 0


def _least(held: np.ndarray | None, costs: np.ndarray) -> int:
    """The least of some bytes among finite costs."""
    if held is None:
        return 0
    allowed = np.asarray(held)[np.isfinite(costs)]
    return int(allowed.min()) if allowed.size else 0


@dataclass(frozen=True)
class SolverOptions:
    """How to solve.

    Args:
        time_limit: seconds; the best plan found so far is returned when they run out.
        relative_gap: stop once (objective - bound) / objective is at most this; 0.0 proves optimality.
        seed: same seed, same program, same plan.
        workers: solver threads; None: 8, so that plans do not depend on the machine.
        fold_layers: tie repeated layers (structurally equal neighbourhoods) to one decision.
        strict: an unknown primitive is an error instead of being kept whole.

    Raises:
        InputShapeError: a value that is none of these.
    """

    time_limit: float = 60.0
    relative_gap: float = 0.0
    seed: int = 0
    workers: int | None = None
    fold_layers: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        number("time_limit", self.time_limit, 0.0, math.inf)
        number("relative_gap", self.relative_gap, 0.0, 1.0)
        whole_number("seed", self.seed, 0)
        whole_number("workers", self.workers, none="8")
        for name, kind in (("time_limit", real), ("relative_gap", real), ("seed", integer), ("workers", integer)):
            object.__setattr__(self, name, kind(getattr(self, name)))  # of NumPy's numbers, too
        flag("fold_layers", self.fold_layers)
        flag("strict", self.strict)


@dataclass(frozen=True, eq=False)
class Solution:
    """Answer of a solver. ``status`` is "optimal", "feasible" or "infeasible"; bound and objective in seconds."""

    status: str
    choices: np.ndarray | None
    objective: float
    lower_bound: float
    peak_bytes: int
    seconds: float
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, 0.0 when proved optimal or free."""
        if self.status == "optimal" or self.objective <= 0:
            return 0.0
        return max(0.0, (self.objective - self.lower_bound) / self.objective)

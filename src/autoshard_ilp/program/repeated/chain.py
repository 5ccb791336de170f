"""A lower bound for a chain of equal layers that takes no longer for more of them.

Edges between two layers are taken apart: ``C[a, b] >= p[a] + q[b]`` for potentials p and q, which are added to the
costs at either end instead. Then nothing connects the layers any more, and each has its own minimum; so has what is
around them. The sum of the minima is a lower bound, whatever the potentials are (a Lagrangian decomposition). With the
same q for all layers, p follows from q and the edge's table, so equal layers stay equal: one of them is solved,
exactly, and its minimum counts as often as there are layers.

Good potentials are those of a ring, where no layer is the first: the messages between a few layers in a circle
(:mod:`.program.nets.bounds`), averaged over the circle. Since a layer is solved exactly, the bound may be far
above that of the messages, which is that of a linear relaxation.

The cheapest layers, and the cheapest surroundings, together are a plan as well, often the best one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoshard_ilp.program.model import Edge, Program
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.minimum import minimum
from autoshard_ilp.program.nets.net import EmptyNodeError, Factor, Net
from autoshard_ilp.program.repeated.repeats import Copies
from autoshard_ilp.program.repeated.stamping import factor_of, piece_net

SWEEPS = 200
"""Most sweeps over the ring."""

CHECK = 10
"""Sweeps after which it is asked ..."""

STEADY = 1e-7
"""... whether the bound has risen by this part of it; else that is all."""

HARDLY = 1e-6
"""Relative gap from which on a bound is the answer: no price has so many digits."""

ENOUGH = 1e-8, HARDLY / 2
"""Of the cost: how far the minima of all layers, and of the surroundings, may be from what is proved of them."""

REST_TIMES, REST_SECONDS = 1.0, 5.0
"""What the surroundings may take, of the time that everything before them took, and at least: they take 1 to 3 s as a
rule, and where they are not solved, the whole step is (80 layers: 13 s)."""

Position = tuple[int, int, int, int]
"""Kind of an edge between layers, its ends among the nodes of a layer, and how many layers on the second one is."""


@dataclass(frozen=True, eq=False)
class ChainBound:
    """What is known of a program.

    Attributes:
        lower_bound: seconds.
        choices: a strategy per node: the minima together.
        layers: number of equal pieces.
        solved: number of pieces that were solved.
    """

    lower_bound: float
    choices: np.ndarray
    layers: int
    solved: int


def chain_bound(
    program: Program,
    kinds: np.ndarray,
    repeated: Sequence[Copies],
    known: np.ndarray | None,
    deadline: Callable[[int], float] = lambda cells: math.inf,
) -> ChainBound | None:
    """The bound of a program with a chain of equal pieces; None where there is none, or no time.

    Args:
        program: without a capacity.
        kinds: per edge, its kind.
        repeated: equal pieces of the program; those of the largest chain are the layers.
        known: a finite assignment, good for a start, if there is one.
        deadline: monotonic seconds, given the table cells of all layers together, each shrunk by itself.
    """
    if not repeated:
        return None
    size: dict[int, int] = defaultdict(int)
    for copies in repeated:
        size[copies.chain] += copies.nodes.size
    largest = max(size, key=lambda number: size[number])
    chain = _Chain(program, kinds, [c for c in repeated if c.chain == largest], known)
    try:
        chain.deadline = deadline(chain.cells)
        return chain.run()
    except EmptyNodeError:
        return None


@dataclass(eq=False)
class _Chain:
    program: Program
    kinds: np.ndarray
    groups: Sequence[Copies]  # of equal layers
    known: np.ndarray | None
    deadline: float = math.inf
    between: dict[Position, list[int]] = field(default_factory=lambda: defaultdict(list))  # edge numbers
    around: dict[tuple[int, int, int], list[int]] = field(default_factory=lambda: defaultdict(list))  # -1: outside
    outside: list[int] = field(default_factory=list)
    potentials: dict[tuple[int, bytes], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.program
        order = np.argsort(np.concatenate([g.layers for g in self.groups]), kind="stable")
        self.nodes = np.concatenate([g.nodes for g in self.groups])[order]  # of each layer
        self.group = np.repeat(np.arange(len(self.groups)), [len(g.nodes) for g in self.groups])[order]
        self.main = int(np.bincount(self.group).argmax())
        self.layer = np.full(len(program.nodes), -1, np.int64)
        self.place = np.full(len(program.nodes), -1, np.int64)
        self.layer[self.nodes] = np.arange(len(self.nodes))[:, None]
        self.place[self.nodes] = np.arange(self.nodes.shape[1])
        beyond = np.ones(len(program.edges), bool)
        for copies in self.groups:
            beyond[copies.edges] = False
        for e in np.flatnonzero(beyond).tolist():
            edge = program.edges[e]
            first, second = int(self.layer[edge.u]), int(self.layer[edge.v])
            ends = int(self.place[edge.u]), int(self.place[edge.v])
            if first >= 0 and second >= 0:
                self.between[(int(self.kinds[e]), *ends, second - first)].append(e)
            elif first >= 0 or second >= 0:
                self.around[(int(self.kinds[e]), *ends)].append(e)
            else:
                self.outside.append(e)

    @cached_property
    def pieces(self) -> list[Net]:
        """A layer of each group by itself."""
        ends = {x for _, a, b, _ in self.between for x in (a, b)} | {x for _, a, b in self.around for x in (a, b)}
        open_nodes = frozenset(ends - {-1})
        return [piece_net(self.program, copies, open_nodes, self.deadline) for copies in self.groups]

    @property
    def cells(self) -> int:
        """Of the tables of all layers."""
        return sum(piece.size()["cells"] * len(own.nodes) for piece, own in zip(self.pieces, self.groups, strict=True))

    def _usual(self, edges: Sequence[int]) -> Edge:
        """Of edges in one position, one of layers of the largest group, if there is one."""
        found = [self.program.edges[e] for e in edges]
        return next((e for e in found if {self._group(e.u), self._group(e.v)} <= {self.main, -1}), found[0])

    def _group(self, v: int) -> int:
        return -1 if self.layer[v] < 0 else int(self.group[self.layer[v]])

    def run(self) -> ChainBound | None:
        began = time.monotonic()
        second, shared, in_ring = self._ring()
        if time.monotonic() > self.deadline:
            return None
        rest = self._surroundings()
        added: list[list[tuple[int, np.ndarray, np.ndarray]]] = [[] for _ in self.nodes]  # place, labels, seconds

        def to_node(v: int, labels: np.ndarray, seconds: np.ndarray) -> None:
            if self.layer[v] < 0:
                rest.add_cost(v, seconds[labels[rest.alive[v]]])
            else:
                added[self.layer[v]].append((int(self.place[v]), labels, seconds))

        for position, edges in self.between.items():
            for e in edges:
                edge = self.program.edges[e]
                to_node(edge.u, edge.u_labels, self._left(edge, second[position]))
                to_node(edge.v, edge.v_labels, second[position])
        for (kind, a, b), edges in self.around.items():
            for e in edges:
                edge = self.program.edges[e]
                if a < 0:  # into a layer
                    known = shared.get((kind, a, b))
                    q = self._as_between(second, edge, b, 1) if known is None else known
                    to_node(edge.v, edge.v_labels, q)
                    to_node(edge.u, edge.u_labels, self._left(edge, q))
                else:
                    known = shared.get((kind, a, b))
                    p = self._as_between(second, edge, a, 0) if known is None else known
                    to_node(edge.u, edge.u_labels, p)
                    to_node(edge.v, edge.v_labels, self._left(edge, p, axis=0))
        cost = in_ring if self.known is None else self.program.cost(self.known)
        return self._sum(rest, added, began, cost)

    # -- potentials --------------------------------------------------------------------------------------------------

    def _ring(self) -> tuple[dict[Position, np.ndarray], dict[tuple[int, int, int], np.ndarray], float]:
        """Potentials of second ends between layers, and of the layer's end of edges from all layers to one node; and
        about how many seconds all layers take."""
        (layers, size), piece = self.nodes.shape, self.pieces[self.main]
        length = 1 + max([1, *(abs(step) for _, _, _, step in self.between)])
        hubs = {key: edges for key, edges in self.around.items() if len(edges) == layers and self._one_node(key, edges)}
        ring = Net(length * size + len(hubs))
        for i in range(length):
            for x in range(size):
                v = i * size + x
                ring.cost[v], ring.alive[v], ring.gone[v] = piece.cost[x], piece.alive[x], piece.gone[x]
            for f in piece.factors.values():
                ring.add(Factor(tuple(i * size + x for x in f.scope), f.labels, f.table))
        numbers: dict[tuple[int, ...], list[int]] = {}
        for (kind, a, b, step), edges in self.between.items():
            edge = self._usual(edges)
            scopes = [(i * size + a, (i + step) % length * size + b) for i in range(length)]
            numbers[kind, a, b, step] = [ring.add(factor_of(edge, scope)) for scope in scopes]
        for at, ((kind, a, b), edges) in enumerate(hubs.items(), length * size):
            edge = self._usual(edges)
            node = self.program.nodes[edge.u if a < 0 else edge.v]
            ring.set_cost(at, node.costs * (length / layers))
            scopes = [(at, i * size + b) if a < 0 else (i * size + a, at) for i in range(length)]
            numbers[kind, a, b] = [ring.add(factor_of(edge, scope)) for scope in scopes]
        before = {n: ring.factors[n].table for own in numbers.values() for n in own}
        messages = Messages(ring)
        known = messages.bound
        for _ in range(0, SWEEPS, CHECK):
            messages.sweep(math.inf, CHECK)
            if messages.bound - known <= STEADY * abs(messages.bound) or time.monotonic() > self.deadline:
                break
            known = messages.bound
        second: dict[Position, np.ndarray] = {}
        shared: dict[tuple[int, int, int], np.ndarray] = {}
        for key, own in numbers.items():
            moved = [_potentials(before[n], messages.tables[n].reshape(before[n].shape)) for n in own]
            p, q = (np.mean([m[end] for m in moved], axis=0) for end in (0, 1))
            if len(key) == 4:
                second[key] = q
            else:
                shared[key] = q if key[1] < 0 else p  # type: ignore[index]
        return second, shared, messages.bound * layers / length

    def _one_node(self, key: tuple[int, int, int], edges: Sequence[int]) -> bool:
        ends = {self.program.edges[e].u if key[1] < 0 else self.program.edges[e].v for e in edges}
        return len(ends) == 1

    def _left(self, edge: Edge, seconds: np.ndarray, axis: int = 1) -> np.ndarray:
        """The largest potential of an edge's other end, given that of the end whose labels are on ``axis``."""
        key = id(edge.table), seconds.tobytes() + bytes([axis])
        if key not in self.potentials:
            with np.errstate(invalid="ignore"):
                left = (edge.table - np.expand_dims(seconds, 1 - axis)).min(axis=axis)
            self.potentials[key] = np.where(np.isfinite(left), left, 0.0)
        return self.potentials[key]

    def _as_between(self, second: dict[Position, np.ndarray], edge: Edge, place: int, end: int) -> np.ndarray:
        """The potential that an end has in the layers where this edge comes from, or leads to, another layer."""
        labels = edge.v_labels if end else edge.u_labels
        for position, edges in self.between.items():
            other = self._usual(edges)
            if position[1 + end] == place and np.array_equal(labels, other.v_labels if end else other.u_labels):
                here = {int(self.layer[self.program.edges[e].v if end else self.program.edges[e].u]) for e in edges}
                if int(self.layer[edge.v if end else edge.u]) not in here:
                    return second[position] if end else self._left(other, second[position])
        return np.zeros(edge.table.shape[end])

    # -- minima ------------------------------------------------------------------------------------------------------

    def _surroundings(self) -> Net:
        """What belongs to no layer."""
        program = self.program
        net = Net(len(program.nodes))
        net.gone[self.layer >= 0] = True
        for v in np.flatnonzero(self.layer < 0).tolist():
            net.set_cost(v, np.asarray(program.nodes[v].costs, np.float64))
        for e in self.outside:
            net.add(factor_of(program.edges[e], (program.edges[e].u, program.edges[e].v)))
        return net

    def _sum(
        self, rest: Net, added: Sequence[list[tuple[int, np.ndarray, np.ndarray]]], began: float, cost: float
    ) -> ChainBound:
        """The minima of all layers, and of the ``rest``; ``cost``: of all together, in seconds, more or less."""
        choices = np.zeros(len(self.program.nodes), np.int64)
        of_layer, of_rest = ENOUGH[0] * cost / len(added), ENOUGH[1] * cost
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for layer, own in enumerate(added):
            moved = sorted((x, labels.tobytes(), seconds.tobytes()) for x, labels, seconds in own)
            alike[int(self.group[layer]), *moved].append(layer)
        bounds: list[float] = []
        for at, layers in enumerate(sorted(alike.values(), key=len, reverse=True)):
            net = self.pieces[int(self.group[layers[0]])].copy()
            for x, labels, seconds in added[layers[0]]:
                net.add_cost(x, seconds[labels[net.alive[x]]])
            now = time.monotonic()
            until = now + (self.deadline - now) / (len(alike) - at)  # each kind has its part of the time
            known = None if self.known is None else self.known[self.nodes[layers[0]]]
            bound, found = minimum(net, known, until, of_layer)
            bounds += [bound] * len(layers)
            choices[self.nodes[layers]] = found
        now = time.monotonic()
        limit = now + max(REST_SECONDS, REST_TIMES * (now - began))
        bound, found = minimum(rest, self.known, min(self.deadline, limit), of_rest)
        outside = self.layer < 0
        choices[outside] = found[outside]
        return ChainBound(math.fsum([*bounds, bound]), choices, len(bounds), len(alike))


def _potentials(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What messages have moved out of a table, to its first and to its second end: ``before - after = p + q``.

    Where no finite entry says how much, it is 0.
    """
    finite = np.isfinite(before) & np.isfinite(after)
    moved = np.where(finite, before, 0.0) - np.where(finite, after, 0.0)
    p, q = np.zeros(len(before)), np.zeros(before.shape[1])
    know_p, know_q = np.zeros(len(p), bool), np.zeros(len(q), bool)
    know_q[finite.sum(axis=0).argmax()] = True
    while True:
        fresh_p = ~know_p & (finite & know_q).any(axis=1)
        at = (finite & know_q)[fresh_p].argmax(axis=1)
        p[fresh_p] = moved[fresh_p, at] - q[at]
        know_p |= fresh_p
        fresh_q = ~know_q & (finite & know_p[:, None]).any(axis=0)
        at = (finite & know_p[:, None])[:, fresh_q].argmax(axis=0)
        q[fresh_q] = moved[at, fresh_q] - p[at]
        know_q |= fresh_q
        if not (fresh_p.any() or fresh_q.any()):
            return p, q

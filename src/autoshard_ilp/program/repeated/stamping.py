"""The net of a program that repeats itself: one copy of every repeated piece is shrunk, the others are stamped from it.

Presolve works on one node at a time, in Python; in a network of 80 equal layers it would find the same 80 times over.
A piece is shrunk by itself. Its nodes with edges that lead out of it stay as they are, since what is best for them
depends on the other side of these edges; all other steps look only at neighbours, so they are as valid in the whole as
in the piece. What is left of one copy is written down for all, with the records that undo it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.program.model import Edge, Program
from autoshard_ilp.program.nets.net import Factor, Net, Record
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.repeated.repeats import Copies

ROUNDS = ((3, 20_000), (99, 20_000))
"""Most neighbours and most table cells of an eliminated node, in turn."""


def stamped_net(program: Program, repeated: Sequence[Copies], deadline: float = math.inf) -> Net:
    """The net of ``program``, its repeated pieces shrunk.

    Args:
        program: without memory rows.
        repeated: its equal pieces.
        deadline: monotonic seconds, after which pieces stay as they are.

    Raises:
        EmptyNodeError: no finite assignment exists.
    """
    net = Net(len(program.nodes))
    outside = np.ones(len(program.edges), bool)
    stamped = np.zeros(len(program.nodes), bool)
    for copies in repeated:
        outside[copies.edges] = False
        stamped[copies.nodes] = True
    looked_at = np.zeros(len(program.nodes), bool)
    beyond = np.flatnonzero(outside).tolist()
    for e in beyond:
        looked_at[program.edges[e].u] = looked_at[program.edges[e].v] = True
    for copies in repeated:
        open_nodes = frozenset(np.flatnonzero(looked_at[copies.nodes].any(axis=0)).tolist())
        _stamp(net, piece_net(program, copies, open_nodes, deadline), copies.nodes)
    for v in np.flatnonzero(~stamped).tolist():
        net.set_cost(v, np.asarray(program.nodes[v].costs, np.float64))
    for e in beyond:
        edge = program.edges[e]
        net.add(factor_of(edge, (edge.u, edge.v)))
    return net


def factor_of(edge: Edge, scope: tuple[int, int]) -> Factor:
    """An edge as a factor over two nodes of a net."""
    labels = np.asarray(edge.u_labels, np.int64), np.asarray(edge.v_labels, np.int64)
    return Factor(scope, labels, np.asarray(edge.table, np.float64))


def piece_net(program: Program, copies: Copies, open_nodes: frozenset[int], deadline: float = math.inf) -> Net:
    """The first of equal pieces by itself, shrunk; its nodes are numbered as in ``copies``.

    Args:
        program: the whole.
        copies: the pieces.
        open_nodes: of a piece, those with edges that lead out of it; they stay.
        deadline: monotonic seconds.
    """
    nodes = copies.nodes[0].tolist()
    place = {v: i for i, v in enumerate(nodes)}
    piece = Net(len(nodes))
    for i, v in enumerate(nodes):
        piece.set_cost(i, np.asarray(program.nodes[v].costs, np.float64))
    for e in copies.edges[0].tolist():
        edge = program.edges[e]
        piece.add(factor_of(edge, (place[edge.u], place[edge.v])))
    for degree, cells in ROUNDS:
        Presolve(piece, max_degree=degree, max_cells=cells, deadline=deadline, open_nodes=open_nodes).run()
    return piece


def _stamp(net: Net, piece: Net, copies: np.ndarray) -> None:
    """Write what is left of a piece, and how to undo it, into the net for every copy."""
    for copy in copies.tolist():

        def here(factor: Factor, at: list[int] = copy) -> Factor:
            return Factor(tuple([at[v] for v in factor.scope]), factor.labels, factor.table)

        for i, v in enumerate(copy):
            net.cost[v], net.alive[v], net.gone[v] = piece.cost[i], piece.alive[i], piece.gone[i]
        for factor in piece.factors.values():
            net.add(here(factor))
        for record in piece.records:
            net.records.append(Record(copy[record.node], record.cost, tuple([here(f) for f in record.factors])))
    net.constant += len(copies) * piece.constant

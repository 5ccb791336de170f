"""Plans of strategies drawn at random: whatever the layouts are, the numbers must be those of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import autoshard_ilp.costs.build
import autoshard_ilp.program
from autoshard_ilp.program.model import Edge, Node, Program


@contextlib.contextmanager
def at_random(seed: int, beyond_batch: bool = False) -> Iterator[None]:
    """Plans made here take strategies drawn at random; what the program forbids stays forbidden.

    With ``beyond_batch``, every operation takes one of its strategies that shard most of its tensors along another
    dimension than the first.
    """
    rng = np.random.default_rng(seed)
    really_solve, really_build = autoshard_ilp.program.solve, autoshard_ilp.costs.build.build_program
    tables: list[Any] = []

    def build_program(table: Any, *rest: Any, **more: Any) -> Any:
        tables.append(table)
        return really_build(table, *rest, **more)

    def drawn(number: int, node: Node) -> np.ndarray:
        costs = rng.random(len(node.costs))
        if beyond_batch and number < len(tables[-1].classes):
            costs = 0.1 * costs + 1.0 - np.array([_beyond(s) for s in tables[-1].classes[number].strategies])
        return np.where(np.isfinite(node.costs), costs, np.inf)

    def solve(program: Program, solver: Any, **more: Any) -> Any:
        nodes = tuple(Node(n.name, drawn(i, n)) for i, n in enumerate(program.nodes))
        edges = tuple(
            Edge(e.u, e.v, e.u_labels, e.v_labels, np.where(np.isfinite(e.table), 0.0, np.inf), e.bytes)
            for e in program.edges
        )
        return really_solve(Program(nodes, edges, program.lifetimes, None), solver, **more)

    autoshard_ilp.program.solve = solve  # type: ignore[assignment]
    autoshard_ilp.costs.build.build_program = build_program
    try:
        yield
    finally:
        autoshard_ilp.program.solve = really_solve
        autoshard_ilp.costs.build.build_program = really_build


def _beyond(strategy: Any) -> float:
    """The share of a strategy's (tensor, mesh axis) pairs that shard another dimension than the first."""
    layouts = [x for x in (*strategy.operands, *strategy.results) if x is not None]
    pairs = [dim for layout in layouts for dim in layout]
    return sum(dim >= 1 for dim in pairs) / max(1, len(pairs))


def sharded_beyond_batch(plan: Any, layer: str) -> int:
    """How many operations of a layer read or write a tensor that is sharded along another dimension than the first."""
    graph = plan.trail.graph
    count = 0
    for op in graph.ops:
        if layer in op.scope.split("/"):
            operands, results = plan.placement.of(op.id)
            count += any(dim >= 1 for layout in (*operands, *results) if layout is not None for dim in layout)
    return count

"""Plans of strategies drawn at random: whatever the layouts are, the numbers must be those of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import autoshard_ilp.program
from autoshard_ilp.program.model import Edge, Node, Program


@contextlib.contextmanager
def at_random(seed: int) -> Iterator[None]:
    """Plans made here take strategies drawn at random; what the program forbids stays forbidden."""
    rng, really = np.random.default_rng(seed), autoshard_ilp.program.solve

    def solve(program: Program, solver: Any, **more: Any) -> Any:
        nodes = tuple(
            Node(n.name, np.where(np.isfinite(n.costs), rng.random(len(n.costs)), np.inf)) for n in program.nodes
        )
        edges = tuple(
            Edge(e.u, e.v, e.u_labels, e.v_labels, np.where(np.isfinite(e.table), 0.0, np.inf), e.bytes)
            for e in program.edges
        )
        return really(Program(nodes, edges, program.lifetimes, None), solver, **more)

    autoshard_ilp.program.solve = solve  # type: ignore[assignment]
    try:
        yield
    finally:
        autoshard_ilp.program.solve = really

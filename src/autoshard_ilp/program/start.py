"""A good plan for a relaxation that does not close: the large route's local search, memory aside.

Message passing decodes one node after the other, which on programs of thousands of nodes with many cycles (deep
convolutional networks) stays a few percent above the optimum; then hardly a strategy is ruled out.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autoshard_ilp.program.capacity import Room
from autoshard_ilp.program.large.route import MOST_CELLS, cells
from autoshard_ilp.program.large.solver import LargeSolver
from autoshard_ilp.program.model import Lifetimes, Program, SolverOptions
from autoshard_ilp.program.search import Search

SHARE = 0.25
"""Of the time left, for the search."""


def without_memory(program: Program, room: Room | None) -> Program:
    """The program without bytes, and without the strategies that can never fit."""
    keep = [np.ones(len(n.costs), bool) for n in program.nodes] if room is None else room.keep
    nodes = tuple(
        replace(n, costs=np.where(k, n.costs, np.inf), bytes=None) for n, k in zip(program.nodes, keep, strict=True)
    )
    edges = tuple(replace(e, bytes=None) for e in program.edges)
    return Program(nodes, edges, Lifetimes.empty(), None)


def local_start(
    program: Program, room: Room | None, options: SolverOptions, best: np.ndarray | None, deadline: float
) -> np.ndarray | None:
    """A plan of low cost that may exceed the memory; None when none was found, or the program is too large for it.

    Args:
        program: the whole program.
        room: what the capacity leaves, if there is one.
        options: seed and workers.
        best: where to start.
        deadline: monotonic seconds of the whole solve.
    """
    seconds = SHARE * (deadline - time.monotonic())
    free = without_memory(program, room)
    if seconds <= 0 or cells(free) > MOST_CELLS:
        return None
    search = Search(free, replace(options, time_limit=seconds), time.monotonic(), None)
    if best is not None:
        search.offer(best)
    LargeSolver(search).run()
    return search.best

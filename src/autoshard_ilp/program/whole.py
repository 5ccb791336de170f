"""Solve a program that repeats itself, without memory: a step whose layers all decide for themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autoshard_ilp.program.compiled import load_kernels
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.net import EmptyNodeError, Net
from autoshard_ilp.program.repeats import Alike, copies_in
from autoshard_ilp.program.search import Search
from autoshard_ilp.program.solve import descend
from autoshard_ilp.program.stamping import stamped_net


def solve_repeated(
    program: Program,
    alike: Alike,
    known: np.ndarray,
    options: SolverOptions,
    on_progress: Callable[[dict], None] | None = None,
) -> Solution:
    """The cheapest assignment of a program without a capacity, whose repeated pieces are shrunk once for all.

    Args:
        program: of no capacity.
        alike: its kinds of nodes and edges.
        known: a finite assignment to start from.
        options: limits and seed.
        on_progress: as for :func:`autoshard_ilp.program.solve`.

    Returns:
        As :func:`autoshard_ilp.program.solve` does; ``report["repeated"]`` has, per group of equal pieces, how many
        there are and how many nodes each has.
    """
    load_kernels()
    search = Search(program, options, time.monotonic(), on_progress)
    search.offer(known)

    def make() -> Net:
        since = time.monotonic()
        repeated = copies_in(program, alike)
        search.report["repeated"] = [copies.nodes.shape for copies in repeated]
        net = stamped_net(program, repeated, search.deadline)
        search.add_seconds("stamping", since)
        return net

    try:
        _, bound = descend(search, None, make)
        search.prove(bound)
    except KeyboardInterrupt:
        search.report["interrupted"] = True
    except EmptyNodeError:
        search.nothing_below()
    return search.finish(False)

"""Which solver gets a program, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard_ilp.errors import AutoshardError
from autoshard_ilp.program.model import Program
from autoshard_ilp.program.search import Search

LARGE_NODES = 5000  # from here on, the exact route's work per node in Python takes longer than the large route's all
PLAN_NODES = 20_000  # the same where edges hold bytes
MOST_CELLS = 60_000_000  # tables over strategies beyond this do not fit in memory twice
EXACT_SHARE = 0.3  # of the time limit, for the exact route alone


def cells(program: Program) -> int:
    """Table cells over strategies, which is how the large route keeps them."""
    sizes = np.array([len(n.costs) for n in program.nodes], np.int64)
    total = 0
    for e in program.edges:
        if e.bytes is None:
            total += int(sizes[e.u] * sizes[e.v])
        else:
            total += int(np.size(e.table) * (sizes[e.u] + sizes[e.v]))
    return total


def solve_in_turn(search: Search, exact: Callable[[Search], bool]) -> bool:
    """Large programs by the large route; others by ``exact`` first, and by the large route if that takes too long.

    Programs of plans, whose edges hold bytes, stay with ``exact`` unless they are large.

    Args:
        search: the program; plan and bound are kept in it.
        exact: the exact route; True when it proved that no plan exists. May raise EmptyNodeError for the same.

    Returns:
        True when proved infeasible.
    """
    program = search.program
    tied_bytes = any(e.bytes is not None for e in program.edges)  # the large route spells them out, which takes long
    if cells(program) > MOST_CELLS or (tied_bytes and len(program.nodes) < PLAN_NODES):
        return exact(search)
    if len(program.nodes) < LARGE_NODES:
        whole = search.options
        search.options = replace(whole, time_limit=whole.time_limit * EXACT_SHARE)
        infeasible = False
        try:
            infeasible = exact(search)
        except AutoshardError as error:  # such as: nothing found in so short a time
            search.report["exact_route"] = str(error)
        finally:
            search.options = whole
        if infeasible or search.done():
            return infeasible
    from autoshard_ilp.program.large.solver import LargeSolver

    return LargeSolver(search).run()

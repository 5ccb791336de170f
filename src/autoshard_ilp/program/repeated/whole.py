"""A program that repeats itself, without memory: a step whose layers all decide for themselves.

First the bound of its chain of layers (:mod:`.program.repeated.chain`), which takes as long for 80 layers as for 8.
Where that leaves a gap that says anything, and the program is small enough, it is solved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard_ilp.program.kernels.compiled import load_kernels
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.repeated.chain import HARDLY, ChainBound, chain_bound
from autoshard_ilp.program.repeated.repeats import Alike, copies_in
from autoshard_ilp.program.repeated.stamping import stamped_net
from autoshard_ilp.program.search import Search
from autoshard_ilp.program.solve import descend

CELLS = 60_000_000
"""Table cells, its repeated pieces shrunk, of a program that is solved: of more, messages take long."""

SOLVE_SECONDS = 3.0
"""What solving it may take in any case; what is not solved by then is a hard program ..."""

SOLVE_PART = 0.5
"""... and may take this part of the time left, as long as its bound rises fast enough to meet the plan by then ..."""

MEANT = 5e-4
"""... and the relative gap is more than this."""

LATELY = 0.5
"""Of the time since it began: how fast the bound has risen in that last part of it counts."""

FAR = 0.01
"""Relative gap of a larger program from which on messages are passed for so long, for their bound alone ..."""

MOST_CELLS = 60_000_000
"""... if it has no more cells."""

SWEEPS = 2
"""At once, between two looks at the clock and at ..."""

STALL = 1e-5
"""... the relative rise of the bound that they are worth."""

BOUND_PART = 0.5
"""Of the time: what the bound of the chain may take of a program that is solved after it."""

MANY_NODES, MANY_CELLS = 15_000, 20_000_000
"""A program of more nodes, or table cells, is not solved where the bound of the chain leaves less than ``HARDLY``; a
smaller one is, which takes little."""


def solve_repeated(
    program: Program,
    alike: Alike,
    known: np.ndarray,
    options: SolverOptions,
    *,
    most_cells: int = CELLS,
    chain: ChainBound | None = None,
    on_progress: Callable[[dict], None] | None = None,
) -> Solution:
    """The cheapest assignment of a program without a capacity, or a bound of it.

    Args:
        program: of no capacity.
        alike: its kinds of nodes and edges.
        known: a finite assignment to start from.
        options: limits and seed.
        most_cells: of tables, its repeated pieces shrunk; a program of more is not solved where the bound leaves a gap.
        chain: what its chain of layers has shown before, if anything.
        on_progress: as for :func:`autoshard_ilp.program.solve`.

    Returns:
        As :func:`autoshard_ilp.program.solve` does. ``report["chain"]`` has the number of layers, the number of those
        that were solved, and the bound in seconds, where there is a chain.
    """
    load_kernels()
    search = Search(program, options, time.monotonic(), on_progress)
    search.offer(known)
    try:
        since = time.monotonic()
        repeated = copies_in(program, alike) if chain is None else None

        def until(cells: int) -> float:
            return since + (BOUND_PART if cells <= most_cells else 1.0) * (search.deadline - since)

        if repeated is not None:
            chain = chain_bound(program, alike.edges, repeated, known, until)
        if chain is not None:
            search.report["chain"] = {"layers": chain.layers, "solved": chain.solved, "bound": chain.lower_bound}
            search.prove(chain.lower_bound)
            search.offer(chain.choices)
            search.tell("proof")
        search.add_seconds("chain", since)
        far = search.upper - search.lower > FAR * abs(search.upper)
        known_well = _long(program) and search.upper - search.lower <= HARDLY * abs(search.upper)
        if (most_cells or far) and not (search.done() or known_well) and time.monotonic() < search.deadline:
            since = time.monotonic()
            repeated = copies_in(program, alike) if repeated is None else repeated
            net = stamped_net(program, repeated, search.deadline)
            search.add_seconds("stamping", since)
            if net.size()["cells"] <= most_cells:
                left = search.deadline - time.monotonic()
                longest = search.seconds + max(min(SOLVE_SECONDS, left), SOLVE_PART * left)
                search.options = replace(options, time_limit=min(options.time_limit, longest))
                _, bound = descend(search, None, lambda: net, Sight(search).lost)
                search.prove(bound)
            elif far and net.size()["cells"] <= MOST_CELLS:
                search.prove(_swept(net, min(search.deadline, time.monotonic() + SOLVE_SECONDS)))
    except KeyboardInterrupt:
        search.report["interrupted"] = True
    except EmptyNodeError:
        search.nothing_below()
    return search.finish(False)


def _long(program: Program) -> bool:
    """Whether solving a program takes long."""
    return len(program.nodes) > MANY_NODES or program.cells() > MANY_CELLS


class Sight:
    """Whether a proof is in sight: whether the bound, rising as it did lately, meets the best plan in time.

    Args:
        search: whose bound and plan they are.
        clock: seconds that only grow.
    """

    def __init__(self, search: Search, clock: Callable[[], float] = time.monotonic) -> None:
        self.search, self.clock = search, clock
        self.began = clock()
        self.gaps = [(self.began, math.inf)]  # since when the gap is what it is, in seconds

    def lost(self) -> bool:
        """Asked often; False for the first seconds."""
        now, search = self.clock(), self.search
        gap = search.upper - search.lower
        if gap < self.gaps[-1][1]:
            self.gaps.append((now, gap))
        if now - self.began <= SOLVE_SECONDS:
            return False
        if gap <= MEANT * abs(search.upper):
            return True
        since = now - LATELY * (now - self.began)
        before = next(then for at, then in reversed(self.gaps) if at <= since)
        return (before - gap) * (search.deadline - now) < gap * (now - since)


def _swept(net: Net, deadline: float) -> float:
    """Lower bound of a net in seconds by messages alone."""
    reduce.compress_all(net)
    messages = Messages(net)
    before = -math.inf
    while time.monotonic() < deadline and messages.bound - before > STALL * abs(messages.bound):
        before = messages.bound
        messages.sweep(count=SWEEPS)
    return float(messages.bound)

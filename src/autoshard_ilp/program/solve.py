"""Solve a program to proved optimality.

What can never fit goes first. Then without memory rows (a relaxation: when its optimum fits at all times, it is the
optimum); only when it does not fit, rows for the worst moments are added, a few at a time, until the plan fits
everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.program.cpsat import CpOptions, solve_net
from autoshard_ilp.program.kernels.compiled import load_kernels
from autoshard_ilp.program.large.route import solve_in_turn
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.nets.core import Descent
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.rows.capacity import Room
from autoshard_ilp.program.rows.constrained import Constrained
from autoshard_ilp.program.rows.families import FREE, Families
from autoshard_ilp.program.rows.mixing import Mixed, Mixing
from autoshard_ilp.program.rows.onchip import chip_aside
from autoshard_ilp.program.search import PROOF, Search


def check(program: Program, hint: np.ndarray | None) -> None:
    """Refuse arrays that do not fit together; the messages name the node or edge."""
    for v, node in enumerate(program.nodes):
        costs = np.asarray(node.costs)
        if costs.ndim != 1 or not len(costs) or np.isnan(costs).any() or (costs == -np.inf).any():
            raise InputShapeError(
                f"A node's costs are a non-empty vector of seconds (inf forbids, NaN and -inf are refused). "
                f"Received: {costs!r} at node {v} ({node.name})."
            )
        if node.bytes is not None and (len(node.bytes) != len(costs) or np.any(np.asarray(node.bytes) < 0)):
            raise InputShapeError(f"A node's bytes are non-negative, one per strategy. Check node {v} ({node.name}).")
    checked: set[tuple[int, int, int]] = set()  # label arrays seen before, with their length and number of labels
    for e, edge in enumerate(program.edges):
        table = np.asarray(edge.table)
        fits = edge.u != edge.v and table.ndim == 2 and table.size > 0 and bool(table.min() > -np.inf)  # nor NaN
        for v, lab, count in ((edge.u, edge.u_labels, table.shape[0]), (edge.v, edge.v_labels, table.shape[-1])):
            fits = fits and 0 <= v < len(program.nodes) and len(lab) == len(program.nodes[v].costs)
            if (id(lab), len(lab), count) not in checked:
                fits = fits and np.min(lab) >= 0 and np.max(lab) < count
                checked.add((id(lab), len(lab), count))
        fits = fits and (edge.bytes is None or (np.shape(edge.bytes) == table.shape and np.min(edge.bytes) >= 0))
        if not fits:
            raise InputShapeError(
                "An edge joins two different nodes, has one label per strategy and a table over the labels (no NaN, "
                f"no -inf). Received: edge {e} between {edge.u} and {edge.v}, table {table.shape}."
            )
    if hint is not None:
        sizes = np.array([len(n.costs) for n in program.nodes])
        if np.shape(hint) != sizes.shape or np.any(np.asarray(hint) < 0) or np.any(np.asarray(hint) >= sizes):
            raise InputShapeError(f"A hint is one valid strategy per node. Received: shape {np.shape(hint)}.")


@chip_aside
def solve(
    program: Program,
    options: SolverOptions,
    *,
    hint: np.ndarray | None = None,
    rows: bool = True,
    relaxed: np.ndarray | None = None,
    plan_seconds: float = math.inf,
    steady_seconds: float = math.inf,
    cutoff: float = math.inf,
    mixing: bool | Mixed = False,
    dear: float = 1.0,
    without_memory: float = -math.inf,
    proved: float = -math.inf,
    prices: Mapping[int, float] | None = None,
    on_progress: Callable[[dict], None] | None = None,
) -> Solution:
    """Find the cheapest assignment within the memory capacity, with proof.

    Args:
        program: nodes, edges, lifetimes, capacity (seconds and bytes).
        options: limits and seed.
        hint: a known assignment, used as a start when it is feasible.
        rows: False ends the search where memory binds; ``report["relaxed"]`` is then an assignment that is the best
            without a capacity, or close to it, and does not fit.
        relaxed: such an assignment, where it is known, or any other that shows at which moments memory binds.
        plan_seconds: seconds after which the search ends unless a plan is known.
        steady_seconds: seconds after which the search ends unless the plan known is getting better by much.
        cutoff: seconds; only a cheaper assignment is wanted. Where none is, the answer has ``choices=None`` and a bound
            of ``cutoff``.
        mixing: look for the best prices of bytes alone, and for which plans, mixed, would fit and cost least:
            ``report["prices"]``, ``report["mixture"]``. None of them needs to fit; ``relaxed`` is known. Another look
            at the same program, under another capacity, goes on from ``report["mixed"]`` of the first.
        dear: share of the objective; once memory is proved to add more than this to the optimum without it, the search
            ends with any plan, or where only better ones than ``cutoff`` are wanted, without, and says so in
            ``report["too_dear"]``. 1: it does not.
        without_memory: seconds, a lower bound of that optimum, where one is known.
        proved: seconds, a lower bound of the objective, where one is known.
        prices: time -> seconds per byte in use then, of a program much like this one.
        on_progress: called with ``{"stage", "seconds", "objective", "lower_bound", "choices"}``.

    Returns:
        A solution. ``lower_bound`` (seconds) is valid in every status; "optimal" means proved within 1e-9 relative plus
        ``report["rounding_error_seconds"]``; "feasible" may have ``choices=None`` when time ran out before any plan.

    Raises:
        InputShapeError: malformed arrays.
    """
    check(program, hint)
    parts: dict[str, Any] = {"plan_seconds": plan_seconds, "steady_seconds": steady_seconds, "dear": dear}
    known: dict[str, Any] = {"cutoff": cutoff, "without_memory": without_memory, "proved": proved}
    search = Search(program, options, time.monotonic(), on_progress, solver=solve, **parts, **known)
    if hint is not None:
        search.offer(np.asarray(hint, np.int64))
    infeasible = False
    try:
        if mixing:
            _look_for_prices(search, relaxed, mixing if isinstance(mixing, Mixed) else None)
        else:
            infeasible = solve_in_turn(search, lambda s: _solve_with_rows(s, rows, relaxed, prices))
    except KeyboardInterrupt:
        search.report["interrupted"] = True
    except EmptyNodeError:
        infeasible = search.nothing_below()
    return search.finish(infeasible)


UNLIMITED = 1 << 62
"""Bytes."""

CLOSE = 5e-2
"""Relative gap at which the relaxation without memory is left, once its best plan does not fit .."""

LOOK_SWEEPS = 80
"""Sweeps that may show that, before plans are looked for in ways that take longer ..."""

FEW_SWEEPS = 40
"""... and where the best plan known fits."""

ENOUGH_ROUNDS = 2
"""Rounds after which the relaxation is left in any case, once its best plan does not fit."""


def _room(search: Search) -> Room | None:
    """What the capacity leaves of each node and edge by itself, noted in the report; None without a capacity.

    Raises:
        EmptyNodeError: nothing fits.
    """
    if search.program.capacity is None:
        return None
    room = Room.of(search.program)
    since = time.monotonic()
    try:
        search.report["room"] = room.run()
    finally:
        search.add_seconds("memory", since)
    return room


def descend(
    search: Search,
    room: Room | None,
    make_net: Callable[[], Net] | None = None,
    lost: Callable[[], bool] = lambda: False,
) -> tuple[np.ndarray | None, float]:
    """Optimum without memory: choices (or the best found) and a lower bound. EmptyNodeError: no finite assignment.

    Args:
        search: the program, and what is known of it.
        room: what the capacity leaves of each node and edge by itself, where there is one.
        make_net: makes the program's net, where something is known that makes it smaller.
        lost: whether to leave it, though there is time.
    """
    since = time.monotonic()
    program = search.program
    state: dict[str, Any] = {"best": None, "upper": search.upper, "lower": -math.inf, "fits": True}

    def offer(choices: np.ndarray) -> float:
        cost = program.cost(choices)
        if cost < state["upper"]:
            state["best"], state["upper"] = choices, cost
            state["fits"] = program.capacity is None or program.peak(choices) <= program.capacity
        search.offer(choices)
        search.tell("descent")
        return float(state["upper"])

    def prove(bound: float) -> None:
        state["lower"] = max(state["lower"], bound)
        search.prove(bound)

    def done() -> bool:
        # What matters of a relaxation whose optimum is almost known, and does not fit, is only where to go on from.
        if not state["fits"] and (len(descent.log) > ENOUGH_ROUNDS or descent.branching or descent.widening):
            return True
        if state["best"] is None:  # a cutoff is no plan
            return bool(state["lower"] >= state["upper"])
        if lost():
            return True
        least = PROOF if state["fits"] else CLOSE
        gap = max(search.options.relative_gap, least) * abs(state["upper"])
        return bool(state["upper"] - state["lower"] <= gap)

    if search.best is not None:
        state["best"] = search.best

    def worth(seconds: float) -> bool:  # a dearer plan may fit where the best one does not
        return not state["fits"] or seconds < state["upper"]

    def better() -> float:
        if state["fits"] and families.affordable(FREE):  # else prices are next, and know better
            began = time.monotonic()
            families.look(FREE)
            search.add_seconds("families", began)
        return float(state["upper"])

    families = Families(search, lambda: (state["best"], state["upper"]), offer, memory=False)
    descent = Descent(offer, prove, done, search.deadline, worth, better=better)
    if program.capacity is not None:
        descent.least_sweeps = lambda: FEW_SWEEPS if state["best"] is not None and state["fits"] else LOOK_SWEEPS
    search.report["descent"] = descent.log
    try:
        if make_net is not None:
            start = make_net()
        else:
            start = build_net(program) if room is None else build_net(program, room.keep, cells=room.cells)
        net = descent.run(start, state["upper"])
        if net.live and not done() and time.monotonic() < search.deadline:
            search.add_seconds("descent", since)
            since = time.monotonic()
            _finish_with_cpsat(search, net, offer, prove, state["upper"], state["best"])
            search.add_seconds("cp-sat", since)
            since = time.monotonic()
    except EmptyNodeError:
        if math.isinf(state["upper"]):
            raise
        prove(state["upper"])
    finally:
        search.report["branches"] = descent.branching.nodes if descent.branching else 0
        search.book("presolve", descent.presolve_seconds)
        search.add_seconds("descent", since)
    return state["best"], state["lower"]


def _finish_with_cpsat(
    search: Search,
    net: Net,
    offer: Callable[[np.ndarray], float],
    prove: Callable[[float], None],
    upper: float,
    hint: np.ndarray | None,
) -> None:
    """Close what the descent left open."""
    gap = search.options.relative_gap * abs(upper) if math.isfinite(upper) else 0.0
    options = CpOptions(search.deadline, search.options.seed, search.options.workers, gap)
    result = solve_net(net, search.program, (), None, options, upper=upper, hint=hint, on_progress=search.on_progress)
    search.report["rounding_error_seconds"] = max(search.rounding, result.rounding_error_seconds)
    search.report["cp-sat"] = {"variables": result.variables, "constraints": result.constraints}
    if result.choices is not None:
        upper = offer(net.complete(result.choices))
    prove(min(result.bound, upper))
    if result.interrupted:
        raise KeyboardInterrupt


def _solve_with_rows(
    search: Search, rows: bool, relaxed: np.ndarray | None, prices: Mapping[int, float] | None
) -> bool:
    """Solve without memory; when the plan does not fit, solve with memory rows. True when proved infeasible."""
    load_kernels()
    room = _room(search)
    if room is None or relaxed is None or not _too_large(search.program, relaxed):
        relaxed, bound = descend(search, room if rows else None)
        search.prove(bound)
        if relaxed is None:
            return False
        search.offer(relaxed)
        if room is None or search.done() or time.monotonic() > search.deadline:
            return False
        if not rows and _too_large(search.program, relaxed):
            search.report["relaxed"] = relaxed
            return False
    since = time.monotonic()
    infeasible = Constrained(search, relaxed, room, prices).run()
    search.add_seconds("memory", since)
    return infeasible


def _look_for_prices(search: Search, relaxed: np.ndarray | None, before: Mixed | None) -> None:
    """Prices and a mixture of plans, in the report; single ones of them need not fit."""
    assert relaxed is not None
    load_kernels()
    room = Room.of(replace(search.program, capacity=UNLIMITED))
    room.run()
    Mixing(search, relaxed, room).run(before)


def _too_large(program: Program, choices: np.ndarray) -> bool:
    """Whether an assignment exceeds the capacity."""
    return program.capacity is not None and program.peak(choices) > program.capacity

"""The minimum of a net without memory, part by part.

Presolve often leaves parts that nothing connects any more, such as the layers around a chain of others. The windows
and branches of two parts together are products of those of each, so each is minimised by itself.
"""

from __future__ import annotations

import math
import time

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from autoshard_ilp.program.nets import reduce
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.core import CHECK, ROUNDS, Descent
from autoshard_ilp.program.nets.net import EmptyNodeError, Net
from autoshard_ilp.program.nets.presolve import Presolve


def minimum(net: Net, known: np.ndarray | None, deadline: float, enough: float) -> tuple[float, np.ndarray]:
    """Lower bound in seconds of a net, which it changes, and the best assignment found.

    Args:
        net: to be minimised.
        known: a finite assignment, if there is one; the answer is one then.
        deadline: monotonic seconds.
        enough: seconds that the bound may be off.
    """
    degree, cells = ROUNDS[0]
    whole = net.copy()
    Presolve(net, max_degree=degree, max_cells=cells, deadline=deadline).run()
    before = math.inf if known is None else whole.value(known)
    bound, choices = net.constant, np.zeros(len(net.cost), np.int64) if known is None else known.copy()
    parts = parts_of(net)
    for at, part in enumerate(parts):
        nodes, now = part.live, time.monotonic()
        until = now + (deadline - now) / (len(parts) - at)
        most = before - net.constant if len(parts) == 1 else math.inf
        least, found = _least(part, known, most, until, enough / len(parts))
        bound += least
        if found is not None:
            choices[nodes] = found[nodes]
    if known is not None and not net.contains(choices):  # nor is ``known``, and no time was left for another
        return min(bound, before), known
    choices = net.complete(choices)
    cost = whole.value(choices)
    return (min(bound, cost), choices) if known is None or cost < before else (min(bound, before), known)


def parts_of(net: Net) -> list[Net]:
    """What nothing connects, as nets of the same numbers and without a constant; the one of most cells is the last."""
    live = net.live
    ends = [(f.scope[0], v) for f in net.factors.values() for v in f.scope[1:]]
    first, second = np.array(ends, np.int64).reshape(-1, 2).T
    size = len(net.cost)
    part = connected_components(coo_matrix((np.ones(len(first)), (first, second)), (size, size)), directed=False)[1]
    found = {int(number): Net(size) for number in np.unique(part[live])}
    for v in live:
        own = found[int(part[v])]
        own.cost[v], own.alive[v] = net.cost[v], net.alive[v]
    for number, own in found.items():
        own.gone = net.gone | (part != number)
    for f in net.factors.values():
        found[int(part[f.scope[0]])].add(f)
    return sorted(found.values(), key=lambda own: own.size()["cells"])


def _least(
    net: Net, known: np.ndarray | None, most: float, deadline: float, enough: float
) -> tuple[float, np.ndarray | None]:
    """As :func:`minimum`, of a connected part; no assignment where ``known`` is none of it and no better one was found.

    ``most``: seconds; of no assignment that costs as much is anything to be known.
    """
    whole = net.copy()
    best = known if known is not None and net.contains(known) else None
    upper, lower = most if best is None else whole.value(best), -math.inf

    def offer(choices: np.ndarray) -> float:
        nonlocal best, upper
        value = whole.value(choices)
        if value < upper:
            best, upper = choices, value
        return upper

    def prove(bound: float) -> None:
        nonlocal lower
        lower = max(lower, bound)

    try:
        Descent(offer, prove, lambda: upper - lower <= enough, deadline, presolved=True).run(net, upper)
    except EmptyNodeError:  # nothing is cheaper
        lower = upper
    if lower == -math.inf:  # out of time before anything was proved
        reduce.compress_all(whole)
        messages = Messages(whole)
        messages.sweep(count=CHECK)
        lower = messages.bound
    return min(lower, upper), best

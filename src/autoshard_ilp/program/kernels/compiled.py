"""The compiled kernels, ready before a clock starts: compiling them takes seconds, once per machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from autoshard_ilp.program.kernels.ahead import STAGES, wait_for
from autoshard_ilp.program.kernels.alone import alone
from autoshard_ilp.program.kernels.loading import load
from autoshard_ilp.program.nets.bounds import Messages
from autoshard_ilp.program.nets.net import Factor, Net
from autoshard_ilp.program.nets.presolve import Presolve
from autoshard_ilp.program.nets.reduce import dominated
from autoshard_ilp.program.window.window import Window


def load_kernels() -> float:
    """Compile the kernels that every solve needs, or read them from Numba's cache, by solving something very small.

    Returns:
        The seconds that took, which a limit of time does not count; nothing is done twice in a process.
    """
    return load(_load_kernels)


def load_windows() -> float:
    """The same for the kernels of windows, as many again, which many a program does not need."""
    return load(_load_windows)


def compile_all() -> Iterator[str]:
    """Compile everything, and say after each stage that it is done: what :mod:`ahead` runs in a process of its own."""
    for stage, do in zip(STAGES, (_load_kernels, _load_windows), strict=True):
        do()
        yield stage


@functools.cache
def _load_kernels() -> None:
    wait_for("kernels")
    with alone("kernels"):
        for rows in (0, 1):
            net = _two_nodes(rows)
            dominated(net, 0)
            Presolve(net.copy()).run()
            messages = Messages(net)
            messages.sweep(1.0)
            messages.improve(messages.decode())
            messages.totals()


@functools.cache
def _load_windows() -> None:
    wait_for("windows")
    with alone("windows"):
        for net, capacity, limit in ((_two_nodes(1), 2, 10.0), (_many_plans(), 10, 20.0)):
            Window(net, capacity, [np.ones(1)]).solve(limit, math.inf)


def _two_nodes(rows: int) -> Net:
    """Two nodes of which none beats another, so that nothing is done before the kernels are reached."""
    net = Net(2, rows)
    for v in (0, 1):
        net.set_cost(v, np.zeros(2))
        if rows:
            net.add_used(v, np.array([[0, 1]]))
    table = 1.0 - np.eye(2)
    net.add(Factor((0, 1), (np.arange(2), np.arange(2)), table, np.ones((rows, 2, 2), np.int64) if rows else None))
    return net


def _many_plans() -> Net:
    """Two nodes with more choices between seconds and bytes than the window's first fronts hold."""
    net = Net(2, 1)
    for v in (0, 1):
        net.set_cost(v, np.arange(10.0))
        net.add_used(v, np.arange(10, 0, -1)[None])
    return net

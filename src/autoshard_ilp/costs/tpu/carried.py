"""What XLA:TPU counts twice: around loops, and of what is gathered ahead.

XLA:TPU reports as temporary bytes its heap H and what it takes for fragmentation of it: H less the most that is live at
any instant. That account loses sight of a buffer once a loop has taken it over: what a loop stacks up is counted before
the loop, when it is filled with zeros, and not from then on. A step that stacks activations for the backward pass is
therefore reported as

    temporary = 2 H - N,    N = max over t of n(t),

where n(t) is what is live at t but for the stacks of loops that began before. (Compiled for v5e, two stacked scans: a
heap of 739 MB, of which 336 MB are seen before the first loop, reported as 1142 MB.) N is a maximum, so each of the
following is an upper bound at every instant, with h(t) the bytes that are live:

    A    h(t) + stacks of earlier loops at t              (N is no less than n(t))
    B    h(t) + what is live at t, but not part of n(t0)  (N is no less than n(t0), for any t0)

Both are written as second lifetimes of the same bytes. At each instant the smaller is taken, by the bytes of whole
tensors, since no layout is known yet; t0 is the instant of the largest n by the same measure.

What an all-gather collects while something else is computed is lost to that account as well: each of the steps that
collect it takes the buffer over from the one before. So weights that are gathered ahead are counted twice, as bound A
has it, where the copy is in device memory. (Compiled for v5e, two layers of GPT-2: a heap of 544 MB, of which 532 are
live at the most, 455 but for the gathered table of 77 MB; reported as 633.) Small ones are gathered into vector memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from autoshard_ilp.costs.tpu.onchip import LargeParts
from autoshard_ilp.graph import Graph
from autoshard_ilp.program.model import Lifetimes, Program

Label = TypeVar("Label")


def count_twice(
    program: Program, categories: Sequence[str], labels: Sequence[Label], stacks: Sequence[int], horizon: int
) -> tuple[Program, tuple[str, ...], tuple[Label, ...]]:
    """The program with second lifetimes of what XLA:TPU counts twice.

    Args:
        program: lifetimes that end at ``horizon`` are arguments and results, which are counted once.
        categories, labels: of the lifetimes; labels are whatever the caller calls them.
        stacks: lifetimes of what loops stack up, each from its loop's start on.
        horizon: number of instants.

    Returns:
        The program, and categories and labels of all its lifetimes.
    """
    lt = program.lifetimes
    if not len(stacks):
        return program, tuple(categories), tuple(labels)
    stacked = np.zeros(len(lt.owner), bool)
    stacked[list(stacks)] = True
    whole = np.array([0 if n.bytes is None else int(np.max(n.bytes)) for n in program.nodes], np.int64)
    size = np.where(lt.is_edge, 0, whole[np.where(lt.is_edge, 0, lt.owner)])
    passing = lt.end < horizon
    live, taken = _over_time(lt, size, passing, horizon), _over_time(lt, size, passing & stacked, horizon, after=1)
    known = live - taken
    t0 = horizon - 1 - int(np.argmax(known[::-1]))  # of several the last: the copies of more layers are held then
    seen = passing & (lt.start <= t0) & (t0 < lt.end) & ~(stacked & (lt.start < t0))
    unseen = live - _over_time(lt, size, seen, horizon)
    by_stack = _over_time(lt, size, passing & stacked, horizon) <= unseen
    more = []
    for i in np.flatnonzero(passing):
        doubled = (by_stack if stacked[i] else False) | (~by_stack if not seen[i] else False)
        more += [(i, a, b) for a, b in _runs(np.broadcast_to(doubled, horizon), int(lt.start[i]), int(lt.end[i]))]
    if not more:  # what loops stack up is all handed out
        return program, tuple(categories), tuple(labels)
    of, start, end = (np.array(column, np.int64) for column in zip(*more, strict=True))
    lifetimes = lt.followed_by(lt.is_edge[of], lt.owner[of], start, end)
    more_categories, more_labels = (categories[i] for i in of), (labels[i] for i in of)
    return replace(program, lifetimes=lifetimes), (*categories, *more_categories), (*labels, *more_labels)


def is_stacked(graph: Graph, root: np.ndarray, tensor: int) -> bool:
    """Whether a loop stacks a tensor up that it computes.

    XLA:TPU writes it straight into its place in the stack, and what else reads it finds it in vector memory, where it
    fits. (Compiled for v5e, a scanned transformer: one kernel computes the activations of a feed-forward layer and
    writes six stacks, ``bf16[4,2,1024,8192]``, and ``bf16[2,1024,8192]`` in vector memory.)

    Args:
        root: per tensor, the tensor whose buffer a view reads.
        tensor: that has a buffer of its own.
    """
    region = graph.ops[graph.tensors[tensor].producer or 0].region
    stacks = graph.regions[region].stacks if region else ()
    return any(int(root[graph.ops[op_id].inputs[0]]) == tensor for op_id in stacks)


def count_gathers_twice(
    program: Program, categories: Sequence[str], labels: Sequence[Label], gathers: Sequence[int], vector_bytes: int
) -> tuple[Program, tuple[str, ...], tuple[Label, ...]]:
    """The program with second lifetimes of what is gathered ahead into device memory.

    Args:
        program: see :func:`count_twice`.
        categories, labels: of the lifetimes; labels are whatever the caller calls them.
        gathers: lifetimes of gathered copies of what the step starts with; all are copies of edges.
        vector_bytes: of the chip. What takes more than half of it is gathered into device memory, since what is
            computed meanwhile is in vector memory too: 77 MB were, 5 MB were not. 0: unknown, nothing is added.

    Returns:
        The program, and categories and labels of all its lifetimes.
    """
    lt, large = program.lifetimes, LargeParts(program, vector_bytes // 2)
    numbered = [(i, large.edge(True, int(lt.owner[i]))) for i in gathers] if vector_bytes else []
    found = [(i, edge) for i, edge in numbered if edge is not None]
    if not found:
        return program, tuple(categories), tuple(labels)
    of, owners = (np.array(column, np.int64) for column in zip(*found, strict=True))
    lifetimes = lt.followed_by(np.ones(len(of), bool), owners, lt.start[of], lt.end[of])
    more = replace(program, edges=tuple(large.edges), lifetimes=lifetimes)
    return more, (*categories, *(categories[i] for i in of)), (*labels, *(labels[i] for i in of))


def _over_time(lt: Lifetimes, size: np.ndarray, which: np.ndarray, horizon: int, after: int = 0) -> np.ndarray:
    """Bytes of some lifetimes at each instant; from ``after`` instants after their start on."""
    delta = np.zeros(horizon + 1, np.int64)
    np.add.at(delta, np.minimum(lt.start[which] + after, lt.end[which]), size[which])
    np.add.at(delta, lt.end[which], -size[which])
    return np.cumsum(delta)[:-1]


def _runs(mask: np.ndarray, start: int, end: int) -> list[tuple[int, int]]:
    """The intervals between ``start`` and ``end`` at which a mask holds."""
    padded = np.concatenate([[False], mask[start:end], [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)) + start
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

"""What a TPU keeps in the vector memory of its chip instead of device memory.

XLA's memory space assignment gives short-lived buffers a place in vector memory, as far as it is free. Steps compiled
for v5e hold, at every instant, as many bytes less in device memory as the profile's ``vector_bytes`` tells, and never
fewer than arguments, results, the buffers that do not fit into vector memory, and those that nobody reads for long
(:mod:`autoshard_ilp.costs.tpu.idle`):

    device memory(t) = max(sum of all - V, arguments + results + large buffers(t) + idle buffers(t))

In the integer program the first side counts V less at the instants of the step, and the second are instants of their
own after it: one if no buffer can be that large, else one for each instant of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from autoshard_ilp.program.model import Edge, Program

Label = TypeVar("Label")

USUAL, MOST, WHOLE = 10, 13, 16
"""Sixteenths of the vector memory: what short-lived buffers take as a rule, what one alone may take, and all of it.
Compiled steps have at most 117 MB of 128 MiB there, and MobileNet-V2 a single buffer of 103 MB, but no step one of 117;
and some are copies of what is in device memory as well, on its way there or back."""

FORWARD = 1.17
"""How many times the usual share it is in a step without a backward pass. There are few buffers at once then, which
leave few holes: two images of 51 MB each (ResNet-50, MobileNet-V2), logits of 103 MB (GPT-2), or one of 103 MB less 13
of program and holes (ResNet-50 at twice the batch)."""


def vector_bytes(profile: Any, backward: bool = True) -> int:
    """Bytes of short-lived buffers that a step holds on the chip, with a backward pass or without."""
    usual = int(getattr(profile, "vector_memory_bytes", 0))
    return usual if backward else round(usual * FORWARD)


def largest_bytes(profile: Any) -> int:
    """Bytes of the largest buffer that may be on the chip."""
    return vector_bytes(profile) * MOST // USUAL


def idle_limit_seconds(profile: Any) -> float:
    """How long a buffer that nobody reads stays on the chip; 0: the profile has no vector memory."""
    whole = vector_bytes(profile) * WHOLE / USUAL
    return float(profile.vector_idle_copies) * whole / float(profile.memory_bytes_per_s) if whole else 0.0


def keep_on_chip(
    program: Program,
    categories: Sequence[str],
    labels: Sequence[Label],
    size: int,
    largest: int,
    horizon: int,
    waits: Mapping[int, int] | None = None,
    unwritten: Collection[int] = (),
) -> tuple[Program, tuple[str, ...], tuple[Label, ...]]:
    """The program with ``size`` bytes of every instant on the chip, but for what does not fit there.

    Args:
        program: lifetimes that end at ``horizon`` are arguments and results; at its last instant only these are left.
        categories, labels: of the lifetimes; labels are whatever the caller calls them.
        size: bytes of vector memory that short-lived buffers take.
        largest: bytes that one of them may have.
        horizon: number of instants.
        waits: lifetime -> until when it is in device memory, since nobody reads it for long.
        unwritten: lifetimes of what is written as a result of the step, and counted as that.

    Returns:
        The program with the further instants, and categories and labels of all its lifetimes.
    """
    lt = program.lifetimes
    if not size or len(program.nodes) < 2 or not len(lt.owner):
        return program, tuple(categories), tuple(labels)
    stays = lt.end >= horizon
    parts = LargeParts(program, largest)
    off_chip: list[tuple[int, bool, int, int, int]] = []  # lifetime; edge or node; number; start; end
    for i in (i for i in map(int, np.flatnonzero(~stays)) if i not in unwritten):
        is_edge, owner, start, end = bool(lt.is_edge[i]), int(lt.owner[i]), int(lt.start[i]), int(lt.end[i])
        until = (waits or {}).get(i, start)
        if until > start:
            off_chip.append((i, is_edge, owner, start, until))
        edge = parts.edge(is_edge, owner) if until < end else None
        if edge is not None:
            off_chip.append((i, True, edge, until, end))
    of, is_edges, owners, starts, ends = np.array(off_chip, np.int64).reshape(-1, 5).T
    held = replace(lt, end=np.where(stays, 2 * horizon if off_chip else horizon, lt.end))
    lifetimes = held.followed_by(is_edges.astype(bool), owners, horizon + starts, horizon + ends)
    if lifetimes.end.max() < horizon:  # nothing stays: the last instant holds nothing, but there is one
        nothing = (np.array([x]) for x in (True, len(parts.edges), horizon - 1, horizon))
        lifetimes, off_chip = lifetimes.followed_by(*nothing), [(0, True, parts.empty(), 0, 0)]
    edges = tuple(parts.edges)
    more = replace(program, edges=edges, lifetimes=lifetimes, on_chip_bytes=size, on_chip_instants=horizon - 1)
    return more, (*categories, *(categories[i] for i in of)), (*labels, *(labels[i] for i in of))


class LargeParts:
    """The bytes of owners where they are more than ``size``, as further edges of a program that cost nothing.

    Attributes:
        edges: the program's, and those asked for so far.
    """

    def __init__(self, program: Program, size: int) -> None:
        self.program, self.size = program, size
        self.edges = list(program.edges)
        self._known: dict[tuple[bool, int], int | None] = {}

    def edge(self, is_edge: bool, owner: int) -> int | None:
        """Number of the edge for one owner; None where it holds so much under no choice."""
        key = is_edge, owner
        if key not in self._known:
            edge = _large_only(self.program, is_edge, owner, self.size)
            self._known[key] = None if edge is None else len(self.edges)
            self.edges += [] if edge is None else [edge]
        return self._known[key]

    def empty(self) -> int:
        """Number of a new edge that holds nothing."""
        first, second = (np.zeros(len(node.costs), np.int64) for node in self.program.nodes[:2])
        self.edges.append(Edge(0, 1, first, second, np.zeros((1, 1)), np.zeros((1, 1), np.int64)))
        return len(self.edges) - 1


def _large_only(program: Program, is_edge: bool, owner: int, size: int) -> Edge | None:
    """The bytes of one owner where they are more than ``size``, as an edge that costs nothing; None: nowhere."""
    if is_edge:
        e = program.edges[owner]
        if e.bytes is None or e.bytes.max(initial=0) <= size:
            return None
        return replace(e, table=np.zeros_like(e.table), bytes=np.where(e.bytes > size, e.bytes, 0))
    held = program.nodes[owner].bytes
    if held is None or np.max(held, initial=0) <= size:
        return None
    other = 0 if owner else 1
    zeros = np.zeros(len(program.nodes[other].costs), np.int64)
    large = np.where(held > size, held, 0)[:, None]
    return Edge(owner, other, np.arange(len(large)), zeros, np.zeros((len(large), 1)), large)

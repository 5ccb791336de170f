"""A flat program as compiled searches read it: incidences per node, tables in both orientations, memory rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard_ilp.program.large.flat import Flat, offsets


@dataclass(frozen=True, eq=False)
class Graph:
    """Incidences of ``flat`` (see ``kernels_messages``); ``flat``'s times are memory rows, ``room``: their bytes."""

    flat: Flat
    ioff: np.ndarray
    nbr: np.ndarray
    opp: np.ndarray
    tb: np.ndarray
    tab: np.ndarray
    moff: np.ndarray  # incidence -> start of its message
    room: np.ndarray  # capacity - base, int64 per row


def with_rows(flat: Flat) -> tuple[Flat, np.ndarray]:
    """Replace times by memory rows: maximal live sets that can exceed the capacity. Also returns the rows' times.

    Between a start and the next end the live set only grows, so the last moment before an end implies those before.
    """
    horizon = len(flat.base)
    most = np.maximum.reduceat(flat.use, flat.uoff[:-1]) if len(flat.sstart) else np.zeros(0, np.int64)
    delta = np.zeros(horizon + 1, np.int64)
    np.add.at(delta, flat.sstart, most)
    np.add.at(delta, flat.send, -most)
    largest = flat.base + np.cumsum(delta)[:-1]
    change = np.zeros(horizon + 1, bool)
    change[flat.send] = True
    change[1:-1] |= flat.base[1:] < flat.base[:-1]
    change[-1] = True
    starts = np.zeros(horizon + 1, bool)
    starts[flat.sstart] = True
    starts[1:-1] |= flat.base[1:] > flat.base[:-1]
    starts[0] = True
    ends = np.flatnonzero(change[1:]) + 1
    begun = np.concatenate(([0], np.cumsum(starts)))
    previous = np.concatenate(([0], ends[:-1]))
    grown = begun[ends] > begun[previous]
    times = ends[grown] - 1
    times = times[largest[times] > flat.capacity]
    s0, s1 = np.searchsorted(times, flat.sstart), np.searchsorted(times, flat.send)
    return replace(flat, sstart=s0, send=s1, base=flat.base[times]), times


def build_graph(flat: Flat) -> Graph:
    """Incidences and both orientations of every table."""
    n, m = flat.nodes, len(flat.eu)
    ends = np.concatenate((flat.eu, flat.ev))
    others = np.concatenate((flat.ev, flat.eu))
    order = np.lexsort((others, ends))
    place = np.empty(2 * m, np.int64)
    place[order] = np.arange(2 * m)
    ioff = offsets(np.bincount(ends, minlength=n))
    opp = place[(order + m) % max(1, 2 * m)]
    counts = flat.counts
    sizes = np.diff(flat.toff)
    owner = np.repeat(np.arange(m), sizes)
    cell = np.arange(len(flat.table)) - np.repeat(flat.toff[:-1], sizes)
    ku, kv = counts[flat.eu][owner], counts[flat.ev][owner]
    turned = np.empty(len(flat.table))
    turned[flat.toff[:-1][owner] + (cell % kv) * ku + cell // kv] = flat.table
    # rows are the neighbour's values: from v's side that is the table itself, from u's side the transposed one
    tb = np.concatenate((flat.toff[:-1] + len(flat.table), flat.toff[:-1]))[order]
    return Graph(
        flat=flat,
        ioff=ioff,
        nbr=others[order],
        opp=opp,
        tb=tb,
        tab=np.concatenate((flat.table, turned)),
        moff=offsets(counts[ends[order]]),
        room=flat.capacity - flat.base,
    )

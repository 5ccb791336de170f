"""From a program to flat arrays.

Labels are written out: a table over labels becomes one over strategies. An edge that holds bytes becomes a node of its
own, whose values are the finite cells of the table, tied to both ends by tables of 0 and ``inf``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard_ilp.program.large.flat import Flat, offsets
from autoshard_ilp.program.model import Program


def flatten(program: Program) -> Flat:
    """The arrays of ``program``; its nodes come first, in their order, then one node per edge that holds bytes."""
    costs = [np.asarray(n.costs, np.float64) for n in program.nodes]
    held: list[np.ndarray | None] = [n.bytes for n in program.nodes]
    ends: list[tuple[int, int]] = []
    tables: list[np.ndarray] = []
    carrier: dict[int, int] = {}  # edge with bytes -> its node
    for number, e in enumerate(program.edges):
        if e.bytes is not None and np.any(e.bytes):
            rows, columns = np.nonzero(np.isfinite(e.table))
            carrier[number] = len(costs)
            for node, labels, cells in ((e.u, e.u_labels, rows), (e.v, e.v_labels, columns)):
                ends.append((node, len(costs)))
                tables.append(np.where(np.asarray(labels)[:, None] == cells[None, :], 0.0, np.inf))
            costs.append(np.asarray(e.table, np.float64)[rows, columns] if len(rows) else np.array([np.inf]))
            held.append(np.asarray(e.bytes)[rows, columns])
            continue
        table = np.asarray(e.table, np.float64)
        ends.append((e.u, e.v))
        tables.append(table if _plain(e.u_labels, e.v_labels, table) else table[np.ix_(e.u_labels, e.v_labels)])
    pairs = np.array(ends, np.int64).reshape(-1, 2)
    return Flat(
        off=offsets(np.array([len(c) for c in costs], np.int64)),
        cost=_join(costs, np.float64),
        eu=np.ascontiguousarray(pairs[:, 0]),
        ev=np.ascontiguousarray(pairs[:, 1]),
        toff=offsets(np.array([t.size for t in tables], np.int64)),
        table=_join([t.ravel() for t in tables], np.float64),
        capacity=program.capacity if program.capacity is not None else 0,
        **_segments(program, held, carrier),
    )


def _plain(u_labels: np.ndarray, v_labels: np.ndarray, table: np.ndarray) -> bool:
    """True when strategies and labels are the same numbers (the usual case, made cheap)."""
    rows, columns = table.shape
    return (
        len(u_labels) == rows
        and len(v_labels) == columns
        and np.array_equal(u_labels, np.arange(rows))
        and np.array_equal(v_labels, np.arange(columns))
    )


def _join(parts: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)


def _segments(program: Program, held: list[np.ndarray | None], carrier: dict[int, int]) -> dict[str, np.ndarray]:
    """The lifetimes of everything that holds bytes, grouped by node."""
    lt = program.lifetimes
    counted = program.capacity is not None
    owner = [carrier.get(int(o), -1) if is_edge else int(o) for o, is_edge in zip(lt.owner, lt.is_edge, strict=True)]
    node = np.array(owner, np.int64)
    has = np.array([h is not None and bool(np.any(h)) for h in held], bool)
    alive = np.flatnonzero((node >= 0) & (np.asarray(lt.end) > np.asarray(lt.start)) & counted)
    alive = alive[has[node[alive]]]
    alive = alive[np.argsort(node[alive], kind="stable")]
    used = [np.asarray(held[v], np.int64) for v in node[alive].tolist()]
    starts, ends = np.asarray(lt.start, np.int64)[alive], np.asarray(lt.end, np.int64)[alive]
    origin = int(starts.min()) if len(starts) else 0
    return {
        "soff": offsets(np.bincount(node[alive], minlength=len(held))),
        "sstart": starts - origin,
        "send": ends - origin,
        "uoff": offsets(np.array([len(u) for u in used], np.int64)),
        "use": _join(used, np.int64),
        "base": np.zeros(int(ends.max()) - origin if len(ends) else 0, np.int64),
    }

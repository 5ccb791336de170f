"""Of equally fast plans the one whose arguments take less memory.

Solvers stop at the first optimum. What an operation only cuts out of an argument costs the same whether devices hold
the rest of it or not, and a table that lies whole on every device may take gigabytes for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard_ilp.sharding import local_bytes

ROUNDING = 1e-12
"""Relative, of a sum of the same seconds in other terms."""


def lighter(table: Any, program: Any, choices: np.ndarray) -> np.ndarray:
    """Choices of equal cost, some of whose arguments take fewer bytes; no more is held at any instant's peak.

    Args:
        table: the :class:`~autoshard_ilp.costs.table.CostTable` of a step.
        program: built from it; node i is class i of the table.
        choices: one strategy per node.
    """
    found = np.array(choices, np.int64)
    arguments = [v for v, c in enumerate(table.classes) if table.graph.ops[c.members[0]].primitive == "argument"]
    edges: dict[int, list[Any]] = {v: [] for v in arguments}
    for e in program.edges:
        for end in (e.u, e.v):
            if end in edges:
                edges[end].append(e)
    for v in arguments:
        seconds = program.nodes[v].costs.astype(float)
        for e in edges[v]:
            if e.u == v:
                seconds = seconds + e.table[e.u_labels, e.v_labels[found[e.v]]]
            else:
                seconds = seconds + e.table[e.u_labels[found[e.u]], e.v_labels]
        held = _held(table, v)
        equal = np.flatnonzero(seconds <= seconds[found[v]])
        found[v] = min(map(int, equal), key=lambda s: (held[s], s != found[v], s))
    same = program.cost(found) <= program.cost(choices) * (1 + ROUNDING)
    return found if same and program.peak(found) <= program.peak(choices) else np.asarray(choices)


def _held(table: Any, v: int) -> list[int]:
    """Bytes on one device of an argument, per strategy."""
    cls = table.classes[v]
    tensor = table.graph.tensors[table.graph.ops[cls.members[0]].outputs[0]]
    return [local_bytes(tensor.shape, tensor.itemsize, s.results[0], table.axis_sizes) for s in cls.strategies]

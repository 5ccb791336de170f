"""What the heap of XLA:TPU loses between buffers.

Buffers of many sizes and lifetimes leave holes: the heap H of a training step is larger than the most that is live at
any instant, N, and XLA:TPU reports 2 H - N (:mod:`.costs.tpu.carried`), so that every hole counts twice. Which
holes there will be cannot be told from a plan; a profile may say what share of N they are as a rule
(``memory.heap_loss``). Steps without a backward pass hold few buffers at once, and lose next to nothing. Where loops
stack something up, what is counted twice for them stands for this, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard_ilp.graph import Graph
from autoshard_ilp.program.model import Program

REPORTED = 2
"""How often a hole counts."""


def loses(graph: Graph) -> bool:
    """Whether the heap of a step has holes to speak of."""
    return graph.has_backward() and not any(op.primitive == "loop_stack" for op in graph.ops)


def with_holes(program: Program, share: float) -> Program:
    """The program with everything that is held for a part of the step, and what of it is on the chip, larger by holes.

    Args:
        program: arguments and results are what is held to its last instant.
        share: of what is live, that holes take.
    """
    lt = program.lifetimes
    if not share or not len(lt.owner):
        return program
    factor = 1.0 + REPORTED * share
    known: dict[int, np.ndarray] = {}

    def grown(held: np.ndarray) -> np.ndarray:
        return known.setdefault(id(held), np.ceil(held * factor).astype(np.int64))

    stays = lt.end >= lt.end.max()
    nodes, edges = list(program.nodes), list(program.edges)
    for is_edge, items in ((False, nodes), (True, edges)):
        mine = lt.is_edge == is_edge
        for owner in np.setdiff1d(lt.owner[mine & ~stays], lt.owner[mine & stays]):
            item = items[owner]
            if item.bytes is not None:
                items[owner] = replace(item, bytes=grown(item.bytes))  # type: ignore[type-var]
    on_chip = round(program.on_chip_bytes * factor)
    return replace(program, nodes=tuple(nodes), edges=tuple(edges), on_chip_bytes=on_chip)

"""How often a kernel of XLA:GPU computes what is fused into it, and the branches that this makes of its code.

A kernel that reads an array at several places, as ``x[:-1]`` and ``x[1:]`` do, computes what it fuses for each of them
anew, and an associative scan doubles that with every level. Padding, concatenating and reducing are branches in the
code, as many as there are copies. XLA fuses nothing into a kernel that would have more than ten of them
(``ProducerConsumerMergedTooLarge`` and ``kMaxBasicBlockSplitsPerFusion`` in openxla/xla,
xla/service/gpu/model/gpu_hlo_cost_analysis.cc). (A linear recurrence of 128 steps by an associative scan, compiled for
H100: the levels of 16, 8, 7 and 2 steps are written, those between are computed anew. Which ones is not told exactly
here.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard_ilp.costs.primitives import REDUCTIONS
from autoshard_ilp.graph import Graph, Op

MOST_BRANCHES = 10

BRANCHES = frozenset({"concatenate", "pad", "dynamic_update_slice"})
"""Operations that make a branch, besides reductions."""

ELSEWHERE = BRANCHES | {"slice", "dynamic_slice", "rev", "split"}
"""Operations that may read other places than they write although the shape is the same."""

_WRITTEN = -1
"""The place that a kernel computes; other places are numbered by the operations that ask for them."""

Places = dict[int, int]
"""Place -> how often a kernel comes there."""


class Branches:
    """The branches in the code of kernels, while more is fused into them.

    Args:
        graph: of the step.
        root: per tensor, the tensor whose buffer a view reads.
        held: per tensor, whether it has a buffer, or one for now.
        inside: per operation, the kernels that it is computed in: operation ids, or ``~t`` for tensor t.
    """

    def __init__(
        self, graph: Graph, root: Sequence[int], held: Sequence[bool], inside: Sequence[frozenset[int]]
    ) -> None:
        self._graph, self._root, self._held = graph, root, held
        self.count: dict[int, int] = {}  # per kernel
        self.reads: dict[tuple[int, int], Places] = {}  # kernel and buffer -> where it is read
        self.repeated: set[int] = set()  # tensors computed at several places of a kernel that has too many branches
        members: dict[int, list[Op]] = {}
        if any(op.primitive in BRANCHES and inside[op.id] for op in graph.ops):  # or nothing comes near the limit
            for op in reversed(graph.ops):
                for kernel in inside[op.id]:
                    members.setdefault(kernel, []).append(op)
        for kernel, ops in members.items():
            self._look_at(kernel, ops)

    def _look_at(self, kernel: int, ops: Iterable[Op]) -> None:
        """Goes through a kernel from its end on."""
        places: dict[int, Places] = {~kernel: {_WRITTEN: 1}} if kernel < 0 else {}
        total = 0
        for op in ops:
            own: Places = {_WRITTEN: 1} if op.id == kernel else {}
            for t in op.outputs if op.id != kernel else ():
                _join(own, places.get(t, {}))
            times = sum(own.values())
            total += times * _is_branch(op)
            for t in op.inputs:
                source = self._root[t]
                _join(places.setdefault(source, {}), own if self._in_place(op, t) else {op.id: times})
                if self._held[source]:
                    self.reads[kernel, source] = places[source]
        self.count[kernel] = total
        if total > MOST_BRANCHES:
            self.repeated |= {t for t, at in places.items() if sum(at.values()) > 1 and not self._held[t]}

    def _in_place(self, op: Op, operand: int) -> bool:
        """Whether an operation reads each element where it writes one."""
        same = bool(op.outputs) and self._graph.tensors[operand].shape == self._graph.tensors[op.outputs[0]].shape
        reduces = op.primitive.startswith(REDUCTIONS)
        return reduces or (same and op.primitive not in ELSEWHERE)

    def allow(self, tensor: int, kernels: Iterable[int]) -> bool:
        """Whether a tensor may be computed inside these kernels, which read it now."""
        own = self.count.get(~tensor, 0)
        return not own or all(self.count.get(k, 0) + self._times(k, tensor) * own <= MOST_BRANCHES for k in kernels)

    def fuse(self, tensor: int, kernels: Iterable[int], buffers: Iterable[int]) -> None:
        """Computes a tensor inside these kernels, from ``buffers``."""
        if not self.count:
            return
        own = self.count.get(~tensor, 0)
        for k in kernels:
            times, where = self._times(k, tensor), self.reads.get((k, tensor), {})
            self.count[k] = self.count.get(k, 0) + times * own
            for b in buffers:
                known = self.reads.setdefault((k, b), {})
                for place, count in self.reads.get((~tensor, b), {}).items():
                    _join(known, where) if place == _WRITTEN else _join(known, {place: times * count})

    def _times(self, kernel: int, tensor: int) -> int:
        return sum(self.reads.get((kernel, tensor), {}).values())


def _is_branch(op: Op) -> bool:
    return op.primitive in BRANCHES or op.primitive.startswith(REDUCTIONS)


def _join(places: Places, more: Places) -> None:
    """Adds places; who comes to one of them from several sides computes it once."""
    for place, count in more.items():
        places[place] = max(places.get(place, 0), count)

"""Rematerialisation: backward operations read recomputed activations instead of kept ones.

A rewrite of the graph, before hubs: every forward tensor that the backward pass needs and that is not *saved* is
computed again, from saved tensors and arguments, right before its first use. What the copies read first passes a
``recompute`` identity, which :mod:`autoshard_ilp.apply` ties to the backward pass (:mod:`autoshard_ilp.ties`), so that
XLA can neither merge the copy with the original nor run it early. Copies are ordinary operations: their compute,
collectives and memory are priced like any other's.

Two policies (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, gives the principle):

``full``       saves only what is alive where the forward pass is narrowest: the residual stream between blocks.
``selective``  saves the results of matrix products without batch dimensions and of convolutions as well; attention
               scores and elementwise chains are recomputed (Korthikanti et al., "Reducing Activation Recomputation in
               Large Transformer Models", 2022).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard_ilp.graph import Graph, Op, Tensor, assemble

POLICIES = ("never", "selective", "full")
"""From the fastest to the smallest."""

NARROW_OPS = 12
"""A dip is a minimum of the forward pass's width among this many operations on either side."""

NEIGHBOURHOOD_OPS = 200
"""A cut is a dip about as narrow as the usual one this far around (a layer or two)."""

NARROW_RATIO = 1.05


def rematerialise(graph: Graph, policy: str) -> Graph:
    """The graph with activations recomputed under ``policy``; the same graph under "never"."""
    if policy == "never":
        return graph
    saved = _saved(graph, policy)
    return _Rewriter(graph, saved).run()


def recomputed_scopes(graph: Graph) -> tuple[str, ...]:
    """Layer paths whose activations are recomputed in a rewritten graph."""
    return tuple(dict.fromkeys(op.scope for op in graph.ops if op.params.get("recomputed") and op.scope))


def _is_forward(op: Op) -> bool:
    return op.phase == "forward" and op.region == 0


def _copyable(graph: Graph, op: Op) -> bool:
    if op.eqn is None or not _is_forward(op):
        return False
    inside = (graph.ops[c].region for t in op.outputs for c, _ in graph.tensors[t].consumers)
    return not op.primitive.startswith(("loop_", "branch_", "while")) and all(r == 0 for r in inside)


def _saved(graph: Graph, policy: str) -> set[int]:
    """Forward tensors that are kept for the backward pass."""
    saved = _narrow_tensors(graph)
    if policy == "selective":
        for op in graph.ops:
            if not _is_forward(op):
                continue
            product = op.primitive == "dot_general" and not op.params["dimension_numbers"][1][0]
            if product or op.primitive == "conv_general_dilated":
                saved.update(op.outputs)
    return saved


def _narrow_tensors(graph: Graph) -> set[int]:
    """Tensors alive at the narrow places of the forward pass, counting forward consumers only."""
    forward = [op for op in graph.ops if _is_forward(op) and op.primitive not in ("argument", "constant", "result")]
    place = {op.id: i for i, op in enumerate(forward)}
    width = np.zeros(len(forward) + 1)
    spans: list[tuple[int, int, int]] = []
    for op in forward:
        for t in op.outputs:
            uses = [place[c] for c, _ in graph.tensors[t].consumers if c in place]
            if uses and max(uses) > place[op.id]:
                spans.append((t, place[op.id] + 1, max(uses)))
                width[place[op.id] + 1] += graph.tensors[t].bytes
                width[max(uses) + 1 if max(uses) + 1 < len(width) else -1] -= graph.tensors[t].bytes
    width = np.cumsum(width)[: len(forward)]
    cuts = _narrow_places(width)
    kept = set()
    for t, start, end in spans:
        inside = np.searchsorted(cuts, start)
        if inside < len(cuts) and cuts[inside] <= end:
            kept.add(t)
    return kept


def _narrow_places(width: np.ndarray) -> list[int]:
    """Dips of the width that are no wider than the usual dip around them."""
    dips = [
        p
        for p in range(1, len(width) - 1)
        if width[p] > 0 and width[p] <= width[max(0, p - NARROW_OPS) : p + NARROW_OPS + 1].min()
    ]
    return [
        p
        for p in dips
        if width[p] <= NARROW_RATIO * np.median([width[q] for q in dips if abs(q - p) <= NEIGHBOURHOOD_OPS])
    ]


_ARITHMETIC = frozenset({"float", "bfloat", "int", "uint", "bool"})
"""Dtypes (without their size) that a select takes."""


class _Rewriter:
    """Builds the new order of operations; new ids start after the old ones."""

    def __init__(self, graph: Graph, saved: set[int]) -> None:
        self.graph = graph
        self.saved = saved
        self.tensors: dict[int, Tensor] = dict(enumerate(graph.tensors))
        self.next_op = len(graph.ops)
        self.order: list[Op] = []
        self.copies: dict[int, int] = {}  # tensor -> its recomputed copy
        self.barred: dict[int, int] = {}  # tensor -> the same behind a ``recompute``
        self.waiting: set[int] = set()  # tensors that cannot exist before the backward pass

    def run(self) -> Graph:
        for op in self.graph.ops:
            if op.phase == "forward" or op.region or op.primitive in ("argument", "constant", "result"):
                self.order.append(op)
                continue
            inputs = tuple(self.recomputed(t, op) if self.is_dropped(t) else t for t in op.inputs)
            self.order.append(replace(op, inputs=inputs))
        return assemble(self.graph, self.order, self.tensors)

    def is_dropped(self, tensor: int) -> bool:
        """A forward tensor that the backward pass may not keep."""
        producer = self.graph.tensors[tensor].producer
        if producer is None or tensor in self.saved or self.graph.tensors[tensor].literal is not None:
            return False
        return _copyable(self.graph, self.graph.ops[producer])

    def recomputed(self, tensor: int, user: Op) -> int:
        """The copy of ``tensor``, its operations placed here if they were not before (deep chains, so no recursion)."""
        waiting = [tensor]
        while waiting:
            t = waiting[-1]
            if t in self.copies:
                waiting.pop()
                continue
            op = self.graph.ops[self.graph.tensors[t].producer or 0]
            missing = [i for i in op.inputs if self.is_dropped(i) and i not in self.copies]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            self.place_copy(op, user)
        return self.copies[tensor]

    def place_copy(self, op: Op, user: Op) -> None:
        """Places a copy of ``op``. It waits for the backward pass if one of its operands does; one is enough."""
        inputs = [self.copies[t] if self.is_dropped(t) else t for t in op.inputs]
        if not any(t in self.waiting for t in inputs):
            fit = [i for i, t in enumerate(inputs) if self.can_wait(t)]
            if fit:  # the smallest: what is read by a matrix product is written once more when it has to wait
                i = min(fit, key=lambda i: (self.tensors[inputs[i]].bytes, i))
                inputs[i] = self.behind_barrier(inputs[i], user)
        outputs = tuple(self.new_tensor(t) for t in op.outputs)
        if any(t in self.waiting for t in inputs):
            self.waiting.update(outputs)
        params = {**op.params, "recomputed": True}
        self.order.append(
            replace(op, id=self.new_id(), inputs=tuple(inputs), outputs=outputs, phase="backward", params=params)
        )
        self.copies.update(zip(op.outputs, outputs, strict=True))

    def can_wait(self, tensor: int) -> bool:
        """Whether a ``recompute`` may stand behind a tensor: not behind literals and typed random keys."""
        t = self.tensors[tensor]
        return t.literal is None and t.dtype.rstrip("0123456789_") in _ARITHMETIC

    def behind_barrier(self, tensor: int, user: Op) -> int:
        """A kept tensor as the backward pass reads it: not to be merged with what the forward pass reads."""
        if tensor not in self.barred:
            out = self.new_tensor(tensor)
            self.order.append(
                Op(
                    id=self.new_id(),
                    primitive="recompute",
                    inputs=(tensor,),
                    outputs=(out,),
                    scope=user.scope,
                    phase="backward",
                    name_stack=user.name_stack,
                )
            )
            self.barred[tensor] = out
            self.waiting.add(out)
        return self.barred[tensor]

    def new_tensor(self, like: int) -> int:
        number = len(self.tensors)
        self.tensors[number] = replace(self.tensors[like], id=number)
        return number

    def new_id(self) -> int:
        self.next_op += 1
        return self.next_op - 1

"""Rematerialisation: backward operations read recomputed activations instead of kept ones.

A rewrite of the graph, before hubs: every forward tensor that the backward pass needs and that is not *saved* is
computed again, from saved tensors and arguments, right before its first use. What the copies read first passes a
``recompute`` identity, which :mod:`.apply` ties to the backward pass (:mod:`.enforce.ties`), so that
XLA can neither merge the copy with the original nor run it early. Copies are ordinary operations: their compute,
collectives and memory are priced like any other's.

Two policies (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, gives the principle):

``full``       saves only what is alive where the forward pass is narrowest: the residual stream between blocks.
``selective``  saves the results of matrix products without batch dimensions and of convolutions as well; attention
               scores and elementwise chains are recomputed (Korthikanti et al., "Reducing Activation Recomputation in
               Large Transformer Models", 2022).

Neither recomputes statistics of the batch (a batch normalisation's: they are small, and another collective), nor what
the forward pass computes with its last such product or after it: the backward pass begins with that, so it would be
dropped and made again at once (of the logits, XLA:GPU would hold both: the loss and its gradient become one kernel,
which reads the one and the other).

The narrow places cut the forward pass into *blocks* (half a transformer layer each, say; :mod:`.graph.blocks`
chooses them), and each block has its own policy: ``"full:6"`` recomputes the first six and keeps the others, with
``"full:6+selective"`` selectively. The first blocks are the ones to recompute: the activations of an earlier block are
alive for longer, from before those of a later one are made until after they are freed, so dropping the earlier of two
equal blocks relieves every moment that dropping the later one does. How many, :mod:`.search.rematsearch` decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.graph import BOUNDARY, Graph, Op, Tensor, assemble, changed
from autoshard_ilp.graph.blocks import Blocks, is_dear, is_forward, tail

POLICIES = ("never", "selective", "full")
"""From the fastest to the smallest."""

_TEXT = re.compile(r"(never|selective|full)(?::(\d+)(?:\+(selective))?)?")


@dataclass(frozen=True)
class Policy:
    """What is recomputed: ``first`` in the first ``blocks`` blocks of the forward pass (None: all), then ``rest``."""

    first: str
    blocks: int | None = None
    rest: str = "never"

    def __str__(self) -> str:
        if self.blocks is None:
            return self.first
        return f"{self.first}:{self.blocks}" + ("" if self.rest == "never" else f"+{self.rest}")

    def of(self, block: int) -> str:
        """The policy of one block."""
        return self.first if self.blocks is None or block < self.blocks else self.rest


def parse_policy(text: str) -> Policy:
    """Reads "never", "selective", "full", "full:6" or "full:6+selective".

    Raises:
        InputShapeError: anything else.
    """
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[2] and match[1] == "never") or (match[3] and match[1] != "full"):
        raise InputShapeError(
            "remat is one of ('auto', 'never', 'selective', 'full'), or a policy for the first blocks of the forward "
            f"pass, such as 'full:6' or 'full:6+selective'. Received: {text!r}."
        )
    return Policy(match[1], None if match[2] is None else int(match[2]), match[3] or "never")


BY_PARTS = frozenset({"pad", "concatenate", "dynamic_update_slice", "scatter"})
"""Operations with parts of their result from one operand alone: a reader of that part waits for no other operand."""

STATISTIC = 1 / 64
"""What is summed over the examples, and has at most this share of their bytes, is never computed again."""


def rematerialise(graph: Graph, policy: str, blocks: Blocks | None = None) -> Graph:
    """The graph with activations recomputed under ``policy`` (see :func:`parse_policy`); the same under "never".

    ``blocks`` are the graph's, where they are known.
    """
    chosen = parse_policy(policy)
    if chosen.first == "never" or (chosen.blocks == 0 and chosen.rest == "never"):
        return graph
    return _Rewriter(graph, _saved(graph, blocks or Blocks(graph), chosen)).run()


def recomputed_layers(graph: Graph) -> tuple[str, ...]:
    """Layers with activations that are recomputed in a rewritten graph: paths up to the first numbered name."""
    scopes = (op.scope for op in graph.ops if op.params.get("recomputed") and op.scope)
    return tuple(dict.fromkeys(_layer(scope) for scope in scopes))


def _layer(scope: str) -> str:
    """``backbone/transformer_layer_3/attention/query`` -> ``backbone/transformer_layer_3``."""
    parts = scope.split("/")
    for i, part in enumerate(parts):
        if re.search(r"_\d+$", part):
            return "/".join(parts[: i + 1])
    return scope


def _copyable(graph: Graph, op: Op) -> bool:
    if op.eqn is None or not is_forward(op):
        return False
    inside = (graph.ops[c].region for t in op.outputs for c, _ in graph.tensors[t].consumers)
    return not op.primitive.startswith(("loop_", "branch_", "while")) and all(r == 0 for r in inside)


def _saved(graph: Graph, blocks: Blocks, policy: Policy) -> set[int]:
    """Forward tensors that are kept for the backward pass."""
    saved = blocks.kept([policy.of(block) for block in range(blocks.count)])
    end = tail(graph)
    for op in graph.ops:
        if not is_forward(op):
            continue
        chosen = policy.of(blocks.of(op))
        dear = chosen == "selective" and is_dear(op)
        if chosen == "never" or dear or op.id >= end or _is_statistic(graph, op):
            saved.update(op.outputs)
    return saved


def _is_statistic(graph: Graph, op: Op) -> bool:
    """Whether an operation sums over the examples: small, and dear, since examples lie on many devices."""
    if not op.primitive.startswith("reduce_") or 0 not in op.params.get("axes", ()):
        return False
    return sum(graph.tensors[t].bytes for t in op.outputs) <= STATISTIC * graph.tensors[op.inputs[0]].bytes


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
            if op.phase == "forward" or op.region or op.primitive in BOUNDARY:
                self.order.append(op)
                continue
            inputs = tuple(self.recomputed(t, op) if self.is_dropped(t) else t for t in op.inputs)
            self.order.append(changed(op, inputs=inputs))
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
        """Places a copy of ``op``. It waits for the backward pass if one of its operands does; one is enough, but where
        parts of the result are copies of one operand each (of padding: all but the edges)."""
        inputs = [self.copies[t] if self.is_dropped(t) else t for t in op.inputs]
        by_parts = op.primitive in BY_PARTS
        if by_parts or not any(t in self.waiting for t in inputs):
            fit = [i for i, t in enumerate(inputs) if t not in self.waiting and self.can_wait(t)]
            if by_parts:
                fit = [i for i in fit if self.tensors[inputs[i]].shape]
            else:  # the smallest: what is read by a matrix product is written once more when it has to wait
                fit = sorted(fit, key=lambda i: (self.tensors[inputs[i]].bytes, i))[:1]
            for i in fit:
                inputs[i] = self.behind_barrier(inputs[i], user)
        outputs = tuple(self.new_tensor(t) for t in op.outputs)
        if any(t in self.waiting for t in inputs):
            self.waiting.update(outputs)
        params = {**op.params, "recomputed": True}
        self.order.append(
            changed(op, id=self.new_id(), inputs=tuple(inputs), outputs=outputs, phase="backward", params=params)
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
        self.tensors[number] = changed(self.tensors[like], id=number)
        return number

    def new_id(self) -> int:
        self.next_op += 1
        return self.next_op - 1

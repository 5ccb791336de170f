"""What the operations of a graph are, whatever the layouts: rules, buffers, precision, and which share a decision.

Operations that look alike (of one *kind*: primitive, types, parameters) share what is asked of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard_ilp.costs.buffers import Buffers
from autoshard_ilp.costs.fold import ARGUMENT_WINDOW, FEW_OPERATIONS, WINDOW, fold, split
from autoshard_ilp.costs.gpu.combining import Shares, shares
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.costs.precision import Precision, precision
from autoshard_ilp.deferral import Deferral, deferrals
from autoshard_ilp.graph import BOUNDARY, Graph, Op, is_batch
from autoshard_ilp.rules.rule import OpView, Rule
from autoshard_ilp.strategies import choices_per_axis


def buffers_under(graph: Graph, profile: Any, devices: int) -> Buffers:
    """The buffers of a graph on hardware of a profile, on so many devices."""
    family, fused = getattr(profile, "family", ""), getattr(profile, "fused_kernels", "more")
    return analyse(graph, family, fused == "more", devices)


@dataclass(frozen=True, eq=False)
class Facts:
    """See the module docstring; one entry per op where there are several.

    Attributes:
        restriction_key: tells apart ops that pins treat differently.
        fold_layers: tie repeated layers to one decision.
        devices: of the mesh.
    """

    graph: Graph
    profile: Any
    buffers: Buffers
    precision: Precision
    kinds: tuple[int, ...]
    rules: tuple[Rule, ...]
    deferred: Sequence[Deferral]
    shares: Shares
    restriction_key: Callable[[Op], Any]
    fold_layers: bool
    devices: int

    @staticmethod
    def of(
        graph: Graph,
        rule_of: Callable[[OpView], Rule],
        profile: Any,
        restriction_key: Callable[[Op], Any] = lambda op: None,
        fold_layers: bool = True,
        devices: int = 1,
        buffers: Buffers | None = None,
    ) -> Facts:
        """Everything about a graph under a profile, on so many devices; its ``buffers``, where they are known."""
        family = getattr(profile, "family", "")
        buffers = buffers_under(graph, profile, devices) if buffers is None else buffers
        kinds, rules = _rules(graph, rule_of)
        return Facts(
            graph,
            profile,
            buffers,
            precision(graph, profile),
            tuple(kinds),
            tuple(rules),
            deferrals(graph, rules, kinds),
            shares(graph, buffers, family),
            restriction_key,
            fold_layers,
            devices,
        )

    def told_apart(self, restriction_key: Callable[[Op], Any], fold_layers: bool) -> Facts:
        """The same facts where pins treat ops differently."""
        return replace(self, restriction_key=restriction_key, fold_layers=fold_layers)

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """Primitives without a rule, with their source lines."""
        ops = (op for op in self.graph.ops if not self.rules[op.id].known)
        return tuple(sorted({f"{op.primitive} at {op.source or 'unknown source'}" for op in ops}))

    @cached_property
    def choices_per_axis(self) -> tuple[int, ...]:
        """What one mesh axis can choose from, of each decision that repeated layers share."""
        first = dict(zip(reversed(self._tied), reversed(self.graph.ops), strict=True))
        return tuple(
            1 + len(self.graph.tensors[op.outputs[0]].shape)
            if op.primitive == "hub"
            else choices_per_axis(self.rules[op.id], self.deferred[op.id])
            for op in first.values()
        )

    def classes(self, first_share: float) -> np.ndarray:
        """Class of each op, results of donated arguments sharing the argument's class.

        Of the repeated layers, ``first_share`` decide apart from the others (:func:`~autoshard_ilp.costs.fold.split`;
        of a small step all do); 0: they all share their decisions.
        """
        classes = self._tied
        if first_share and len(classes) <= FEW_OPERATIONS:
            classes = list(range(len(classes)))
        elif first_share:
            classes = split(classes, [op.phase == "backward" for op in self.graph.ops], first_share)
        classes = list(classes)
        for result, argument in self.graph.aliases:
            classes[result] = classes[argument]
        names: dict[int, int] = {}
        return np.array([names.setdefault(c, len(names)) for c in classes], np.int64)

    @cached_property
    def _tied(self) -> list[int]:
        """Class of each op by :func:`~autoshard_ilp.costs.fold.fold`."""
        graph, buffers = self.graph, self.buffers
        stored, held = buffers.stored.tolist(), self.precision.held.tolist()
        alike: dict[int, int] = {}  # kind -> the first one of its primitive, types and rule
        first: dict[Any, int] = {}
        signatures: list[Any] = []
        for op, kind, rule in zip(graph.ops, self.kinds, self.rules, strict=True):
            if not self.fold_layers:
                signatures.append(op.id)
                continue
            if kind not in alike:
                outs = [graph.tensors[t] for t in op.outputs]
                ins = [graph.tensors[t] for t in op.inputs]
                types = (*((t.shape, t.dtype) for t in ins), None, *((t.shape, t.dtype) for t in outs))
                alike[kind] = first.setdefault((op.primitive, types, str(rule)), kind)
            signatures.append(
                (
                    alike[kind],
                    *(op.phase, op.count),
                    tuple([stored[t] for t in op.outputs]),
                    buffers.reads[op.id],
                    *(self.restriction_key(op), op.params.get("first") is None, is_batch(op)),
                    self.deferred[op.id],
                    self.precision.rounds[op.id],
                    tuple([held[t] for t in op.outputs]),
                )
            )
        return fold(signatures, [ARGUMENT_WINDOW if op.primitive in BOUNDARY else WINDOW for op in graph.ops])


def _rules(graph: Graph, rule_of: Callable[[OpView], Rule]) -> tuple[list[int], list[Rule]]:
    """Kind and rule of each operation; those of one kind share one rule."""
    numbers: dict[Any, int] = {}
    known: list[Rule] = []
    kinds: list[int] = []
    types = [(t.shape, t.dtype) for t in graph.tensors]
    for op in graph.ops:
        ins, outs = [types[t] for t in op.inputs], [types[t] for t in op.outputs]
        params = () if op.primitive == "hub" else op.params.items()  # a hub's say which tensor's it is
        key: Any = (op.primitive, *ins, None, *outs, None, *params)
        try:
            kind = numbers.setdefault(key, len(known))
        except TypeError:  # a parameter that cannot be hashed
            kind = len(known)
        if kind == len(known):
            known.append(rule_of(graph.view(op)))
        kinds.append(kind)
    return kinds, [known[kind] for kind in kinds]

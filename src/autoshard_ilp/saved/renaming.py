"""A plan under the names of the model that it is bound to.

Keras numbers the layers of every instance anew: the ``dense`` of a saved plan is ``dense_2`` where two layers were
built before, and ``dense_1`` may be another layer than it was. A plan is a layout per variable in order, so it fits
all the same; but whoever asks about it names variables as they are called now. So everything that goes by names takes
the new ones: arguments and results, pins, what fills the memory, and what the plan was solved from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.step import Step

if TYPE_CHECKING:
    from autoshard_ilp.plan import Leaf, Plan, Trail


def named_as(plan: Plan, step: Step) -> Plan:
    """``plan`` with the names of ``step``, which is the planned one but for them."""
    graph = step.graph
    names = Names(
        zip(
            (leaf.path for leaf in (*plan.arguments, *plan.results)),
            (graph.ops[i].path for i in (*graph.arguments, *graph.results)),
            strict=True,
        )
    )
    if not names:
        return plan
    origin = dict(plan.origin)
    if isinstance(origin.get("pins"), Mapping):
        origin["pins"] = names.of_pins(origin["pins"])
    ran = tuple(replace(s, layer=names.of_label(s.layer)) for s in plan.course.segments)
    held = tuple((names.of_label(label), size) for label, size in plan.memory.contributors)
    return replace(
        plan,
        arguments=_named(plan.arguments, graph, graph.arguments),
        results=_named(plan.results, graph, graph.results),
        collectives=tuple(
            replace(c, tensor=names.of_label(c.tensor), operation=names.of_label(c.operation)) for c in plan.collectives
        ),
        memory=replace(plan.memory, contributors=held),
        remat=tuple(map(names.of_label, plan.remat)),
        course=replace(plan.course, segments=ran),
        origin=origin,
        trail=None if plan.trail is None else _trail(plan.trail, step, names),
    )


def _named(leaves: Sequence[Leaf], graph: Graph, ops: Sequence[int]) -> tuple[Leaf, ...]:
    return tuple(replace(leaf, path=graph.ops[i].path) for leaf, i in zip(leaves, ops, strict=True))


class Names:
    """What is called otherwise now; false where nothing is.

    Args:
        pairs: old and new path of every argument and result.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._paths: dict[str, str] = {}
        parts: dict[str, set[str]] = {}
        for old, new in pairs:
            self._paths.setdefault(old, new)
            before, after = old.split("/"), new.split("/")
            for a, b in zip(before, after, strict=False) if len(before) == len(after) else ():
                parts.setdefault(a, set()).add(b)
        self._parts = {a: next(iter(found)) for a, found in parts.items() if len(found) == 1}

    def __bool__(self) -> bool:
        return any(old != new for old, new in self._paths.items())

    def of_path(self, old: str) -> str:
        """The new path of an argument or result."""
        return self._paths.get(old, old)

    def of_label(self, old: str) -> str:
        """The new name of a path or of a layer's scope, part by part; a layer without variables keeps its old one."""
        return self._paths.get(old) or "/".join(self._parts.get(part, part) for part in old.split("/"))

    def of_pins(self, pins: Mapping[str, Any]) -> dict[str, Any]:
        """Pins of the same tensors; a regular expression that finds others now becomes a list of paths."""
        found: dict[str, Any] = {}
        for text, spec in pins.items():
            try:
                meant = [new for old, new in self._paths.items() if re.search(text, old)]
                same = meant == [new for new in self._paths.values() if re.search(text, new)]
            except re.error:  # of an edited file; whoever asks is told
                meant, same = [], True
            found[text if same or not meant else f"^({'|'.join(map(re.escape, dict.fromkeys(meant)))})$"] = spec
        return found

    def of_shapes(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """What is known by new paths, by the old ones."""
        return {old: shapes[new] for old, new in self._paths.items() if new in shapes}


def _trail(trail: Trail, step: Step, names: Names) -> Trail:
    infos = step.traced if step.traced is not None else trail.infos
    return replace(
        trail,
        jaxpr=getattr(infos, "closed_jaxpr", trail.jaxpr),
        graph=step.graph,
        costs=replace(trail.costs, graph=step.graph, facts=None),
        built=replace(trail.built, labels=tuple(map(names.of_label, trail.built.labels))),
        infos=infos,
        request=_request(trail.request, names),
        priced=_request(trail.priced, names),
    )


def _request(request: Any, names: Names) -> Any:
    if request is None:
        return None
    allowed = request.restriction

    def restriction(shapes: Mapping[str, tuple[int, ...]]) -> Any:
        return {names.of_path(path): layouts for path, layouts in allowed(names.of_shapes(shapes)).items()}

    pins = None if request.pins is None else names.of_pins(request.pins)
    return replace(request, pins=pins, restriction=None if allowed is None else restriction)

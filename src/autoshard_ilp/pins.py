"""Pins: what a user (or a baseline) demands of arguments and results, as sets of allowed layouts per path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard_ilp.errors import InfeasibleError, InputShapeError
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.sharding import (
    WHOLE,
    Layout,
    divides,
    divisible_layouts,
    from_partition_spec,
    replicated,
    shards_of_dims,
)
from autoshard_ilp.strategies import Strategy

Allowed = Mapping[str, frozenset[Layout]]
"""path -> layouts it may have; paths that are absent are free."""


@dataclass(frozen=True)
class Pinned:
    """Pins resolved against a step: allowed layouts per path, and which regex texts demanded them."""

    allowed: Allowed
    sources: Mapping[str, tuple[str, ...]]

    def restrict(self, op: Op, strategies: list[Strategy]) -> list[Strategy]:
        """Strategies of an argument or result that its pins allow."""
        allowed = self.allowed.get(op.path) if op.primitive in ("argument", "result") else None
        if allowed is None:
            return strategies
        return [s for s in strategies if (s.results[0] if s.results else s.operands[0]) in allowed]

    def key(self, op: Op) -> Any:
        """Tells apart operations whose strategies the pins restrict differently."""
        return self.allowed.get(op.path) if op.primitive in ("argument", "result") else None


def path_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Shape of everything that can be pinned: arguments and results by path."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in graph.results:
        shapes[graph.ops[i].path] = graph.tensors[graph.ops[i].inputs[0]].shape
    for i in graph.arguments:
        shapes[graph.ops[i].path] = graph.tensors[graph.ops[i].outputs[0]].shape
    return shapes


def class_masks(table: Any, allowed: Allowed) -> dict[int, np.ndarray] | None:
    """Strategies that are allowed, per class (bool); None when the tensors of one class are treated differently."""
    graph = table.graph
    by_class: dict[int, set[frozenset[Layout] | None]] = {}
    for op_id in (*graph.arguments, *graph.results):
        by_class.setdefault(int(table.class_of[op_id]), set()).add(allowed.get(graph.ops[op_id].path))
    masks = {}
    for index, found in by_class.items():
        if len(found) > 1:
            return None
        layouts = found.pop()
        if layouts is not None:
            masks[index] = np.array([layout in layouts for layout in boundary_layouts(table, index)])
    return masks


def masked(program: Any, masks: Mapping[int, np.ndarray]) -> Any:
    """The program with all strategies forbidden that a mask leaves out."""
    nodes = list(program.nodes)
    for index, mask in masks.items():
        nodes[index] = replace(nodes[index], costs=np.where(mask, nodes[index].costs, np.inf))
    return replace(program, nodes=tuple(nodes))


def boundary_layouts(table: Any, index: int) -> list[Layout]:
    """Layout of the argument or result that a class decides, per strategy."""
    return [s.results[0] if s.results else s.operands[0] for s in table.classes[index].strategies]


def whole_seeds(graph: Graph, n_axes: int) -> dict[str, frozenset[Layout]]:
    """Every seed stays whole: 8 bytes, which JAX refuses to take sharded wherever no step is compiled."""
    return {
        graph.ops[i].path: frozenset({replicated(n_axes)})
        for i in graph.arguments
        if graph.ops[i].path.partition("#")[0].endswith("seed_generator_state")
    }


def resolve_pins(
    pins: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    axis_names: Sequence[str],
    axis_sizes: tuple[int, ...],
) -> Pinned:
    """Resolves ``{regex: PartitionSpec or tuple}`` against the paths of a step.

    Raises:
        InputShapeError: a regex is invalid or matches nothing, an axis is unknown, or a dimension cannot take it.
        InfeasibleError: two pins demand different layouts of one tensor.
    """
    allowed: dict[str, frozenset[Layout]] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for text, spec in (pins or {}).items():
        for path in _matches(text, shapes):
            layout = _layout(text, spec, path, shapes[path], axis_names, axis_sizes)
            before = allowed.get(path)
            if before is not None and layout not in before:
                raise InfeasibleError(
                    f"Pins may not contradict each other. Received: {sources[path][-1]!r} and {text!r} demand "
                    f"different layouts of {path!r}. Narrow one of the two regular expressions.",
                    conflicts=[sources[path][-1], text],
                )
            allowed[path] = frozenset({layout})
            sources[path] = (*sources.get(path, ()), text)
    return Pinned(allowed, sources)


def _matches(text: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    try:
        pattern = re.compile(text)
        if not isinstance(pattern.pattern, str):
            raise TypeError("of bytes, and paths are text")
    except (re.error, TypeError) as error:
        raise InputShapeError(f"A pin's key is a regular expression. Received: {text!r} ({error}).") from None
    found = [path for path in shapes if pattern.search(path)]
    if not found:
        examples = ", ".join(sorted(shapes)[:4])
        raise InputShapeError(
            f"Every pin must match at least one path. Received: {text!r}, which matches none of {len(shapes)} paths "
            f"(such as {examples}). plan.specs lists all of them."
        )
    return found


def _layout(
    text: str,
    spec: Any,
    path: str,
    shape: tuple[int, ...],
    axis_names: Sequence[str],
    axis_sizes: tuple[int, ...],
) -> Layout:
    if spec is None or isinstance(spec, str):
        spec = (spec,)
    try:
        entries = tuple(spec)
        if isinstance(spec, Mapping | Set | bytes) or not all(
            isinstance(e, str | tuple | list | None) for e in entries
        ):
            raise TypeError  # an empty mapping or set would count as no axis, and a set has no order
        layout = from_partition_spec(entries, axis_names)
    except TypeError:
        instead = "its .spec" if hasattr(spec, "spec") else 'for instance PartitionSpec(None, "model")'
        raise InputShapeError(
            f"A pin's value is a PartitionSpec: per dimension None, one of the mesh axes {tuple(axis_names)}, or a "
            f"tuple of them. Received: {text!r}: {spec!r} of type {type(spec).__name__}. Pass {instead}."
        ) from None
    except ValueError as error:
        raise InputShapeError(
            f"A pin's value is a PartitionSpec of mesh axes {tuple(axis_names)}. Received: {text!r}: {spec!r}. {error}."
        ) from None
    if len(entries) > len(shape):
        raise InputShapeError(
            f"A pin has at most one entry per dimension. Received: {text!r}: {spec!r} for {path!r} of shape {shape}."
        )
    layout = tuple(WHOLE if size == 1 else dim for dim, size in zip(layout, axis_sizes, strict=True))
    if not divides(shape, layout, axis_sizes):
        shards = shards_of_dims(layout, len(shape), axis_sizes)
        bad = next(d for d, (n, s) in enumerate(zip(shape, shards, strict=True)) if n % s or (not n and s > 1))
        raise InputShapeError(
            f"An argument or result of a jitted step must divide evenly over its mesh axes. Received: {text!r}: "
            f"{spec!r} for {path!r}, whose dimension {bad} of size {shape[bad]} does not divide by {shards[bad]}. "
            "Pin another dimension, or leave this one free."
        )
    return layout


def restrict_paths(
    paths: Mapping[str, tuple[int, ...]],
    axis_sizes: tuple[int, ...],
    allows: Callable[[str, Layout], bool],
) -> Allowed:
    """Allowed layouts of each path by a predicate; a path with no admissible layout keeps the replicated one."""
    allowed = {}
    for path, shape in paths.items():
        layouts = divisible_layouts(shape, axis_sizes)
        allowed[path] = frozenset(lay for lay in layouts if allows(path, lay)) or frozenset({layouts[0]})
    return allowed

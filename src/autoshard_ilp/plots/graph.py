"""The operations of one layer, their layouts, and the collectives between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from autoshard_ilp.arguments import is_one_of, string
from autoshard_ilp.costs.primitives import VIEWS, fusible
from autoshard_ilp.course import layers_of
from autoshard_ilp.display.records import spec_text
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.plots import base, colours
from autoshard_ilp.plots.svg import short
from autoshard_ilp.report import PlannedCollective, collective_sites

MAX_NODES = 60
LETTER, LINE = 0.073, 0.145
"""Inches of a letter and of a line of the boxes' text."""
OUTSIDE = ("argument", "constant")


@dataclass(frozen=True)
class Box:
    """One node of the drawing: lines of text, and the kind of collective that colours it ("" for none).

    ``role`` is "operation", "variable" or "outside" (an activation of another layer).
    """

    lines: tuple[str, ...]
    role: str
    kind: str = ""

    @property
    def width(self) -> float:
        """Inches."""
        return max(map(len, self.lines)) * LETTER + 0.18

    @property
    def height(self) -> float:
        """Inches."""
        return len(self.lines) * LINE + 0.12


def graph(plan: Any, layer: str | None, phase: str) -> base.PlanFigure:
    """See :meth:`autoshard_ilp.plots.Plots.graph`."""
    source = _graph_of(plan)
    if layer is not None:
        string("layer", layer)
    members, full = _members(source, layer, phase) if layer is not None else _dearest(plan, source, phase)
    boxes, edges, hidden = layer_graph(plan, source, members)
    return _draw(boxes, edges, f"{full}, {phase}, on {plan.mesh}" + (f"; {hidden} more not shown" if hidden else ""))


def _graph_of(plan: Any) -> Graph:
    if plan.trail is not None:
        return plan.trail.graph
    if plan.executable is not None:
        return plan.executable.graph
    raise InputShapeError(
        "The graph of a layer needs the model's step. Received: a plan from a file, which holds layouts only. Load it "
        'with autoshard.load("plan.json", model), or call plan.bind(model).'
    )


def _dearest(plan: Any, graph: Graph, phase: str) -> tuple[list[Op], str]:
    """Operations of the layer that takes most time in this phase, and its name."""
    phases = sorted({op.phase for op in graph.ops})
    if not is_one_of(phase, phases):
        raise InputShapeError(f"The phases of this step are {phases}. Received: phase={phase!r}.")
    seconds: dict[str, float] = defaultdict(float)
    for s in plan.course.segments:
        if s.layer and s.phase == phase:
            seconds[s.layer] += s.seconds
    if not seconds:
        raise InputShapeError("A layer is named where a step has none of its own. Received: layer=None. Name a scope.")
    dearest = max(seconds, key=seconds.__getitem__)
    layer_of = layers_of((op.scope for op in graph.ops), (op.scope for op in graph.ops if op.phase == "forward"))
    of_phase = [op for op in graph.ops if op.phase == phase and op.primitive not in OUTSIDE]
    return [op for op in of_phase if layer_of[op.scope] == dearest], dearest


def _members(graph: Graph, layer: str, phase: str) -> tuple[list[Op], str]:
    """Operations of the first layer whose path holds ``layer``, and that path."""
    wanted = tuple(layer.strip("/").split("/"))
    scopes = list(dict.fromkeys(op.scope for op in graph.ops))
    ends = {s: _end_of(tuple(s.split("/")), wanted) for s in scopes}
    first = next(("/".join(s.split("/")[:end]) for s, end in ends.items() if end), "")
    chosen = {s for s in scopes if first and (s == first or s.startswith(f"{first}/"))}
    found = [op for op in graph.ops if op.scope in chosen and op.phase == phase and op.primitive not in OUTSIDE]
    if found:
        return found, first
    phases = sorted({op.phase for op in graph.ops if op.scope in chosen})
    if phases:
        raise InputShapeError(f"Layer {layer!r} works in the phases {phases}. Received: phase={phase!r}.")
    import difflib

    names = sorted({part for s in scopes for part in s.split("/") if part})
    near = difflib.get_close_matches(wanted[-1], names, 5, 0.3) or names[:5]
    raise InputShapeError(f"layer is a layer of the model. Received: {layer!r}. Did you mean {', '.join(near)}?")


def _end_of(scope: tuple[str, ...], wanted: tuple[str, ...]) -> int:
    """Where in a scope the wanted parts end; 0: they are not in it."""
    starts = range(len(scope) - len(wanted) + 1)
    return next((i + len(wanted) for i in starts if scope[i : i + len(wanted)] == wanted), 0)


# -- what to draw ------------------------------------------------------------------------------------------------------


def layer_graph(plan: Any, graph: Graph, members: Sequence[Op]) -> tuple[dict[int, Box], list[tuple[int, int]], int]:
    """Boxes by op id, edges between them, and the number of operations left out for their number.

    Operations that are views or fuse into others are looked through, unless something is communicated at them.
    """
    before, after = _collectives(plan)
    here = {op.id for op in members}
    kept = [op for op in members if op.id in before or op.id in after or not (fusible(op) or op.primitive in VIEWS)]
    if not kept:
        kept = [op for op in members if op.primitive not in VIEWS] or list(members)
    hidden, kept = max(0, len(kept) - MAX_NODES), kept[:MAX_NODES]
    shown = {op.id for op in kept}
    boxes = {op.id: _box(plan, graph, op, before.get(op.id, ()), after.get(op.id, ())) for op in kept}
    edges: set[tuple[int, int]] = set()
    for op in kept:
        for producer in _sources(graph, op, here, shown):
            if producer not in boxes:
                boxes[producer] = _outside(plan, graph, graph.ops[producer])
            edges.add((producer, op.id))
    return boxes, sorted(edges), hidden


def _collectives(plan: Any) -> tuple[dict[int, list[PlannedCollective]], dict[int, list[PlannedCollective]]]:
    before: dict[int, list[PlannedCollective]] = defaultdict(list)
    after: dict[int, list[PlannedCollective]] = defaultdict(list)
    if plan.trail is not None:
        for collective, sites in collective_sites(plan.trail.costs, plan.trail.solution.choices):
            for op_id, comes_first in sites:
                (before if comes_first else after)[op_id].append(collective)
    return before, after


def _sources(graph: Graph, op: Op, here: set[int], shown: set[int]) -> Iterable[int]:
    """Nearest producers worth a box: shown operations, variables, or operations of other layers."""
    found: dict[int, None] = {}
    queue = [op.id]
    seen = {op.id}
    while queue:
        for t in graph.ops[queue.pop()].inputs:
            producer = graph.tensors[t].producer
            if producer is None or producer in seen or not graph.tensors[t].shape:
                continue
            seen.add(producer)
            if producer in shown or (producer not in here and graph.ops[producer].primitive not in VIEWS):
                found[producer] = None
            else:
                queue.append(producer)
    return found


def _box(
    plan: Any, graph: Graph, op: Op, before: Sequence[PlannedCollective], after: Sequence[PlannedCollective]
) -> Box:
    lines = [f"{c.kind} over {'+'.join(c.mesh_axes)}, {short(c.bytes_per_device)}" for c in before]
    lines.append(op.primitive if op.primitive not in VIEWS else f"({op.primitive})")
    lines.append(_tensor_line(plan, graph, op))
    lines += [f"then {c.kind} over {'+'.join(c.mesh_axes)}, {short(c.bytes_per_device)}" for c in after]
    dearest = max([*before, *after], key=lambda c: c.seconds * c.count, default=None)
    return Box(tuple(line for line in lines if line), "operation", dearest.kind if dearest else "")


def _tensor_line(plan: Any, graph: Graph, op: Op) -> str:
    if not op.outputs:
        return ""
    tensor = graph.tensors[op.outputs[0]]
    layouts = plan.placement.of(op.id)[1]
    spec = spec_text(layouts[0], len(tensor.shape), plan.mesh.axis_names) if layouts and tensor.shape else ""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}] {spec}".strip()


def _outside(plan: Any, graph: Graph, op: Op) -> Box:
    if op.primitive in OUTSIDE:
        name = op.path or op.primitive
        return Box((base.shortened("/".join(name.split("/")[-3:]), 40), _tensor_line(plan, graph, op)), "variable")
    where = "/".join(op.scope.split("/")[-2:]) or op.primitive
    return Box((f"from {base.shortened(where, 36)}", _tensor_line(plan, graph, op)), "outside")


# -- drawing -----------------------------------------------------------------------------------------------------------


def positions(boxes: dict[int, Box], edges: Sequence[tuple[int, int]]) -> dict[int, tuple[float, float]]:
    """Centres of the boxes in inches, rows from the top (y grows downwards); every edge leads downwards."""
    above: dict[int, list[int]] = defaultdict(list)
    below: dict[int, list[int]] = defaultdict(list)
    for a, b in edges:
        above[b].append(a)
        below[a].append(b)
    level: dict[int, int] = {}
    for n in sorted(boxes):  # op ids are in program order, so producers come first
        level[n] = max((level[p] + 1 for p in above[n]), default=0)
    for n in sorted(boxes, reverse=True):  # what comes from outside stands right above its first reader
        if not above[n] and below[n]:
            level[n] = max(0, min(level[c] for c in below[n]) - 1)
    rows: dict[int, list[int]] = defaultdict(list)
    for n in sorted(boxes):
        rows[level[n]].append(n)
    at: dict[int, float] = {}
    for _ in range(4):
        for down in (True, False):
            for row in sorted(rows, reverse=not down):
                near = above if down else below
                rows[row].sort(key=lambda n: (_mean([at[m] for m in near[n] if m in at], at.get(n, 0.0)), n))
                _spread(rows[row], boxes, at)
    found: dict[int, tuple[float, float]] = {}
    y = 0.0
    for row in sorted(rows):
        height = max(boxes[n].height for n in rows[row])
        y += height / 2
        found |= {n: (at[n], y) for n in rows[row]}
        y += height / 2 + 0.34
    return found


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _spread(row: Sequence[int], boxes: dict[int, Box], at: dict[int, float]) -> None:
    """Boxes of a row side by side in the given order, the row centred on zero."""
    gap = 0.22
    x = -(sum(boxes[n].width for n in row) + gap * (len(row) - 1)) / 2
    for n in row:
        at[n] = x + boxes[n].width / 2
        x += boxes[n].width + gap


def _draw(boxes: dict[int, Box], edges: Sequence[tuple[int, int]], title: str) -> base.PlanFigure:
    at = positions(boxes, edges)
    left = min(x - boxes[n].width / 2 for n, (x, _) in at.items()) - 0.1
    right = max(x + boxes[n].width / 2 for n, (x, _) in at.items()) + 0.1
    bottom = max(y + boxes[n].height / 2 for n, (_, y) in at.items()) + 0.1
    figure = base.PlanFigure(dpi=base.DPI)
    figure.patch.set_alpha(0.0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    style: dict[str, Any] = {"fontsize": base.FONT + 1, "color": colours.INK, "fontweight": "bold", "va": "center"}
    heading = axes.text(left + 0.1, -0.25, title, **style)
    right = max(right, left + 0.2 + heading.get_window_extent().width / base.DPI)
    figure.set_size_inches(right - left, bottom + 0.45)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, -0.45)
    for a, b in edges:
        (xa, ya), (xb, yb) = at[a], at[b]
        ends = (xa, ya + boxes[a].height / 2), (xb, yb - boxes[b].height / 2)
        shape = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=8, shrinkA=0, shrinkB=0)
        shape.set(color=colours.INK, linewidth=0.8)
        axes.add_patch(shape)
    for n, box in boxes.items():
        _draw_box(axes, box, *at[n])
    return figure


def _draw_box(axes: Any, box: Box, x: float, y: float) -> None:
    edge = colours.kind(box.kind) if box.kind else colours.INK
    fill = {"variable": colours.PARTS["optimizer"], "outside": colours.PALE}.get(box.role, edge)
    axes.add_patch(
        FancyBboxPatch(
            (x - box.width / 2, y - box.height / 2),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.6 if box.kind else 0.8,
            linestyle="--" if box.role == "outside" else "-",
            zorder=2,
        )
    )
    ink = colours.ON_PALE if box.role == "outside" else "white"
    for i, line in enumerate(box.lines):
        top = y - box.height / 2 + 0.06 + (i + 0.5) * LINE
        axes.text(x, top, line, fontsize=8, family="monospace", ha="center", va="center", color=ink, zorder=3)

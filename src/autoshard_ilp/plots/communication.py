"""What is communicated, and for what."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from autoshard_ilp.course import COMPUTE
from autoshard_ilp.display import records
from autoshard_ilp.plots import base, colours
from autoshard_ilp.units import format_seconds

MAX_ROWS = 10
LETTERS = 56
"""Of a row's name, at most."""


def communication(plan: Any) -> base.PlanFigure:
    """See :meth:`autoshard_ilp.plots.Plots.communication`."""
    axes_of_mesh = sorted(plan.cost.per_axis, key=lambda a: -plan.cost.per_axis[a])[:MAX_ROWS]
    layers = _layers(plan)
    dearest = records.collective_rows(plan)[:MAX_ROWS]
    rows = max(len(plan.cost.per_kind), len(axes_of_mesh), 1), max(len(layers), len(dearest), 1)
    figure = base.new(10.5, 1.7 + 0.24 * sum(rows))
    grid = figure.subplots(2, 2, height_ratios=[r + 1.5 for r in rows])
    share = plan.cost.communication_s / plan.cost.total_s if plan.cost.total_s else 0.0
    spent = f"{format_seconds(plan.cost.communication_s)} of communication, {share:.0%} of the step"
    base.heading(figure, f"{spent}: {records.headline(plan)}")
    kinds = sorted(plan.cost.per_kind.items(), key=lambda x: -x[1])
    _panel(grid[0, 0], "By kind", [(k, {k: s}) for k, s in kinds])
    by_axis: dict[str, dict[str, float]] = {a: {} for a in axes_of_mesh}
    for c in plan.collectives:
        kind_seconds = by_axis.get("+".join(c.mesh_axes))
        if kind_seconds is not None:
            kind_seconds[c.kind] = kind_seconds.get(c.kind, 0.0) + c.seconds * c.count
    _panel(grid[0, 1], "By mesh axis", list(by_axis.items()))
    _panel(grid[1, 0], "By layer (those that differ in numbers only together)", layers)
    _panel(grid[1, 1], "Dearest collectives", [(_label(r.what), {r.kind: r.seconds}) for r in dearest])
    return figure


def _layers(plan: Any) -> list[tuple[str, dict[str, float]]]:
    found = []
    for layer, kinds in plan.course.by_layer().items():
        sent = {k: s for k, s in kinds.items() if k != COMPUTE}
        if sent:
            found.append((layer or "other", sent))
    return sorted(found, key=lambda x: -sum(x[1].values()))[:MAX_ROWS]


def _label(what: str) -> str:
    """What a collective moves: the end of its path and its shape tell collectives apart, so the start goes first."""
    path, _, array = what.partition(" ")
    shape = f" {array[array.find('[') :]}" if "[" in array else ""
    parts = path.split("/")
    first = next((i for i in range(len(parts)) if len("/".join(parts[i:])) + len(shape) <= LETTERS), len(parts) - 1)
    return ("…/" if first else "") + "/".join(parts[first:]) + shape


def _panel(axes: Any, title: str, rows: list[tuple[str, dict[str, float]]]) -> None:
    """Bars stacked by kind; a panel without rows says so."""
    base.plain(axes, title)
    if not rows:
        axes.set_axis_off()
        axes.text(0.0, 0.8, "nothing is communicated", color=colours.INK, fontsize=base.FONT, transform=axes.transAxes)
        return
    used = dict.fromkeys(k for k in colours.KINDS if any(k in kinds for _, kinds in rows))
    stacks = {k: ([kinds.get(k, 0.0) for _, kinds in rows], colours.kind(k)) for k in used}
    base.bars(axes, [name for name, _ in rows], stacks, LETTERS + 2)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(x)))

"""Figures of the predicted step: memory over time, and the timeline."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from autoshard_ilp.course import COMPUTE, Course, Segment, repeated_names
from autoshard_ilp.display import records
from autoshard_ilp.display.pictures import phase_spans
from autoshard_ilp.plots import base, colours
from autoshard_ilp.plots.svg import short
from autoshard_ilp.units import format_seconds

HIDDEN_ALPHA = 0.45
PHASE: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": base.FONT - 1, "color": colours.INK}


def _time_axis(axes: Any, course: Course) -> None:
    axes.set_xlim(0, course.seconds)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(x)))


def _phases(axes: Any, course: Course, top: float) -> None:
    """Dotted borders of the phases, their names on top where they fit."""
    for phase, start, end in phase_spans(course):
        axes.axvline(start, color=colours.INK, linewidth=0.8, linestyle=":", alpha=0.7)
        if end - start > 0.012 * len(phase) * course.seconds:
            axes.text((start + end) / 2, top, phase, **PHASE)


def memory(plan: Any) -> base.PlanFigure:
    """See :meth:`autoshard_ilp.plots.Plots.memory`."""
    course, budget = plan.course, plan.memory.budget_bytes
    most = records.contributors(plan, 10)
    figure = base.new(10.5, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(2.6, 1))
    base.plain(left, f"Memory per device, {plan.mesh} of {plan.hardware}\n")
    edges = [0.0, *course.at_s[1:], course.seconds]
    names = [n for n in [*colours.PARTS, *course.held] if any(course.held.get(n, ()))]
    low = [0] * len(course.at_s)
    for name in dict.fromkeys(names):
        high = [a + b for a, b in zip(low, course.held[name], strict=True)]
        left.stairs(high, edges, baseline=low, fill=True, color=colours.part(name), label=name, linewidth=0)
        low = high
    peak = max(low)
    near = budget is not None and budget <= 2.5 * peak
    top = max(peak, budget if near else 0) * 1.04
    left.set_ylim(0, top)
    _time_axis(left, course)
    left.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))  # of which the labels' one decimal is all
    left.yaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    _phases(left, course, top)
    i = course.peak_index()
    left.plot([(edges[i] + edges[i + 1]) / 2], [peak], "o", mfc="none", color=colours.INK, label=f"peak {short(peak)}")
    if near:
        left.axhline(budget, color=colours.INK, linestyle="--", linewidth=1.2, label=f"budget {short(budget)}")
    elif budget is not None:
        left.plot([], [], " ", label=f"budget {short(budget)}, {budget / max(peak, 1):.1f} x the peak")
    base.legend(left)
    base.plain(right, "Largest at the peak\n")
    base.bars(right, [n for n, _ in most], {"": ([n for _, n in most], colours.part("activations"))}, 34)
    right.xaxis.set_major_locator(MaxNLocator(3))
    right.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    return figure


def timeline(plan: Any) -> base.PlanFigure:
    """See :meth:`autoshard_ilp.plots.Plots.timeline`; pale: what runs behind compute."""
    course = plan.course
    names = repeated_names(dict.fromkeys(s.layer for s in course.segments))
    groups = {g: colours.LAYERS[i % len(colours.LAYERS)] for i, g in enumerate(dict.fromkeys(names.values()))}
    lanes = [f"over {a}" for a in dict.fromkeys(s.axes for s in course.segments if s.kind != COMPUTE)]
    lanes = ["layer", COMPUTE, *lanes]
    figure = base.new(10.5, 1.5 + 0.38 * len(lanes))
    axes = base.plain(figure.subplots(), f"{records.headline(plan)}\n", frame=("bottom",))
    seen: set[str] = set()
    for row, lane in enumerate(lanes):
        chosen = [s for s in course.segments if row == 0 or lane == (s.kind if row == 1 else f"over {s.axes}")]
        together: dict[str, list[tuple[float, float]]] = {}
        for s in chosen:
            colour = (groups[names[s.layer]] if s.layer else colours.OTHER) if row == 0 else colours.kind(s.kind)
            together.setdefault(s.kind if row else colour, []).append((s.start_s, s.seconds))
        for key, spans in together.items():
            fill = key if row == 0 else colours.kind(key)
            label = _label(key, seen) if row else "_"
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=fill, linewidth=0, label=label)
    hidden: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for s in course.hidden():
        hidden.setdefault((s.axes, s.kind), []).append((s.start_s, s.seconds))
    for (over, kind), spans in hidden.items():
        style: dict[str, Any] = {"facecolors": colours.kind(kind), "alpha": HIDDEN_ALPHA, "linewidth": 0}
        axes.broken_barh(spans, (lanes.index(f"over {over}") - 0.4, 0.8), label=_label(kind, seen), **style)
    if hidden:
        axes.plot([], [], "s", color=colours.OTHER, alpha=HIDDEN_ALPHA, markersize=9, label="pale: behind compute")
    for name, start, end in layer_spans(course.segments, names, course.seconds):
        if end - start > 0.0085 * len(name) * course.seconds:
            axes.text((start + end) / 2, 0, name, ha="center", va="center", fontsize=base.FONT - 2, color="white")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    _time_axis(axes, course)
    _phases(axes, course, -0.5)
    base.legend(axes)
    return figure


def _label(kind: str, seen: set[str]) -> str:
    """The kind, for the legend, where it is drawn first."""
    label = "_" if kind in seen else kind
    seen.add(kind)
    return label


def layer_spans(segments: tuple[Segment, ...], names: dict[str, str], seconds: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of stretches of one layer, or of repeated layers; what is very short joins its neighbour."""
    spans: list[tuple[str, float, float]] = []
    for s in segments:
        name = names[s.layer] or "other"
        if spans and (spans[-1][0] == name or s.seconds < 1e-3 * seconds):
            spans[-1] = (spans[-1][0], spans[-1][1], s.end_s)
        else:
            spans.append((name, s.start_s, s.end_s))
    return spans

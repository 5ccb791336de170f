"""Figures of frontiers, mesh searches and sweeps (matplotlib), on a transparent ground for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.plots.colours import INK, LAYERS, OTHER

SIZE_INCHES = (7.0, 4.0)


def axes(ax: Any = None, size: tuple[float, float] = SIZE_INCHES) -> tuple[Any, Any]:
    """A figure and axes to draw into; ImportError says what to install.

    Raises:
        InputShapeError: ``ax`` is given, but is none of matplotlib's.
    """
    if ax is not None:
        if not (hasattr(ax, "plot") and hasattr(ax, "figure")):
            raise InputShapeError(f"ax is a matplotlib Axes, or None for a new figure. Received: {ax!r}.")
        return ax.figure, ax
    try:
        from autoshard_ilp.plots.base import PlanFigure
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "autoshard-ilp[notebook]".') from error
    figure = PlanFigure(figsize=size, layout="constrained")  # no pyplot: it would look for a display
    made = figure.subplots()
    figure.patch.set_alpha(0.0)
    made.patch.set_alpha(0.0)
    for spine in made.spines.values():
        spine.set_color(INK)
    for side in ("top", "right"):
        made.spines[side].set_visible(False)
    made.tick_params(colors=INK)
    made.grid(color=INK, alpha=0.2, linewidth=0.6)
    for text in (made.xaxis.label, made.yaxis.label, made.title):
        text.set_color(INK)
    return figure, made


def scale_of_seconds(values: Sequence[float]) -> tuple[float, str]:
    """A unit that suits some times: (seconds per unit, its name)."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=1.0)
    return next(((s, n) for s, n in ((1.0, "s"), (1e-3, "ms")) if largest >= s), (1e-6, "us"))


def scale_of_bytes(values: Sequence[float]) -> tuple[float, str]:
    """A decimal unit that suits some sizes: (bytes per unit, its name)."""
    largest = max(values, default=1.0)
    return next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB")) if largest >= s), (1e3, "kB"))


def legend(ax: Any, **options: Any) -> None:
    """A legend without a frame, when there is something to name."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, labelcolor=INK, **options)


def legend_below(ax: Any) -> None:
    """A legend below the axes, where it covers nothing; inside them in a figure of the user's own layout."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if not unique:
        return
    from autoshard_ilp.plots.base import PlanFigure

    shared: dict[str, Any] = {
        "handles": list(unique.values()),
        "labels": list(unique),
        "frameon": False,
        "labelcolor": INK,
    }
    if isinstance(ax.get_figure(), PlanFigure):
        ax.get_figure().legend(loc="outside lower center", ncols=4, **shared)
    else:
        ax.legend(loc="best", **shared)


def pareto_figure(frontier: Any, ax: Any = None) -> Any:
    """Step time against memory budget: a staircase with one mark per plan, the hardware's memory as a line."""
    figure, ax = axes(ax)
    points = [p for p in frontier.points if math.isfinite(p.total_s)]
    unit, name = scale_of_seconds([p.total_s for p in points])
    per, size_name = scale_of_bytes([p.budget_bytes for p in points])
    budgets = [p.budget_bytes / per for p in points]
    times = [p.total_s / unit for p in points]
    if points:
        end = max(budgets[-1] * 1.08, budgets[-1] + 1e-9)
        ax.step([*budgets, end], [*times, times[-1]], where="post", color=LAYERS[0], linewidth=1.6)
    for status, label, fill in (("optimal", "proved", LAYERS[0]), ("feasible", "not proved", "none")):
        chosen = [(b, t) for b, t, p in zip(budgets, times, points, strict=True) if p.status == status]
        if chosen:
            ax.scatter(*zip(*chosen, strict=True), s=28, zorder=3, facecolors=fill, edgecolors=LAYERS[0], label=label)
    usable = frontier.usable_bytes / per
    if points and usable <= 2.5 * max(budgets):
        ax.axvline(usable, color=LAYERS[1], linestyle="--", linewidth=1.2, label=f"usable on {frontier.hardware}")
    least = frontier.minimum_bytes
    if least and points and least >= 0.2 * min(p.budget_bytes for p in points):
        ax.axvspan(0.97 * least / per, least / per, color=OTHER, alpha=0.35, linewidth=0, label="no plan fits")
    ax.set_xlabel(f"memory budget per device ({size_name})")
    ax.set_ylabel(f"predicted step ({name})")
    ax.set_title(f"{frontier.mesh} of {frontier.hardware}", fontsize=10)
    legend_below(ax)
    return figure


def mesh_figure(search: Any, ax: Any = None) -> Any:
    """Step time by mesh, compute and communication stacked; pruned meshes as their lower bound."""
    shown = [c for c in search.candidates if c.make is not None or c.status == "pruned"]
    figure, ax = axes(ax, (7.0, 0.8 + 0.32 * max(3, len(shown))))
    several = len({c.hardware for c in shown}) > 1
    unit, name = scale_of_seconds([c.total_s if c.make is not None else c.lower_bound_s for c in shown])
    for position, c in enumerate(shown):
        if c.make is None:
            ax.barh(position, c.lower_bound_s / unit, color="none", edgecolor=OTHER, linestyle="--")
            continue
        ax.barh(position, c.compute_s / unit, color=OTHER, label="compute")
        ax.barh(position, c.communication_s / unit, left=c.compute_s / unit, color=LAYERS[0], label="communication")
    ax.set_yticks(range(len(shown)), [f"{c.mesh} ({c.hardware})" if several else str(c.mesh) for c in shown])
    ax.invert_yaxis()
    ax.set_xlabel(f"predicted step ({name}); dashed: lower bound of what was pruned")
    legend_below(ax)
    return figure


def sweep_figure(sweep: Any, x: str, y: str, color: str | None, ax: Any = None) -> Any:
    """One quantity of a sweep against an input: points joined where the input is a number, bars where it is a name."""
    figure, ax = axes(ax)
    rows = [r for r in sweep.rows if r[y] is not None and r[x] is not None]
    unit, name = scale_of_seconds([r[y] for r in rows]) if y.endswith("_s") else (1.0, "")
    if y.endswith("_bytes"):
        unit, name = scale_of_bytes([r[y] for r in rows])
    series = list(dict.fromkeys(r[color] if color else "" for r in rows))
    numeric = all(isinstance(r[x], int | float) for r in rows)
    places = sorted({r[x] for r in rows}) if numeric else list(dict.fromkeys(r[x] for r in rows))
    width = 0.8 / max(1, len(series))
    for number, label in enumerate(series):
        own = [r for r in rows if not color or r[color] == label]
        shade = LAYERS[number % len(LAYERS)]
        if numeric:
            own.sort(key=lambda r: r[x])
            ax.plot([r[x] for r in own], [r[y] / unit for r in own], "o-", color=shade, label=str(label), markersize=4)
            continue
        best = {p: min((r[y] for r in own if r[x] == p), default=math.nan) / unit for p in places}
        at = [i - 0.4 + width * (number + 0.5) for i in range(len(places))]
        ax.bar(at, [best[p] for p in places], width * 0.92, color=shade, label=str(label))
    if not numeric:
        turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(places) > 3 else {"ha": "center"}
        ax.set_xticks(range(len(places)), [str(p) for p in places], **turned)
    ax.set_xlabel(x.replace("_", " "))
    label = y.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    ax.set_ylabel(f"{label} ({name})" if name else label)
    if not numeric and (others := [n for n in sweep.varying() if n not in (x, color, "devices")]):
        ax.set_title(f"least over {', '.join(others)}".replace("_", " "), fontsize=9, color=INK, loc="left")
    if color:
        legend_below(ax)
    return figure

"""Pictures of benchmark results: one function per kind, from tables of text to matplotlib figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard_ilp.plots import base, colours

STAGES = ("trace", "graph", "strategies", "costs", "presolve", "solve", "proof")
_NUMBER = re.compile(r"^-?[\d,]*\.?\d+(?:e-?\d+)?")


@dataclass(frozen=True)
class Table:
    """A table of a result file, the cells as text."""

    heading: str
    note: str
    rows: tuple[Mapping[str, str], ...]
    columns: tuple[str, ...]


def number(cell: str) -> float | None:
    """The number a cell starts with; a share as a fraction; None where there is none."""
    found = _NUMBER.match(cell)
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    return value / 100 if cell.endswith("%") else value


def write(figure: Any, path: Path) -> None:
    """As SVG that is the same in every run."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "autoshard_ilp", "svg.fonttype": "path"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def nothing(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """No picture: results of a kind that has none."""
    yield from ()


def quality(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Predicted time over the optimum: one line per case, one dot per kind of plan, on a scale cut at five times."""
    cases = [t for t in tables if "x optimum" in t.columns and t.heading]
    plans = list(dict.fromkeys(r["plan"] for t in cases for r in t.rows if r["plan"] != "optimize"))
    if not plans:
        return
    figure = base.new(8.5, 1.4 + 0.26 * len(cases))
    axes = base.plain(figure.subplots(), "Predicted step time over the plan's (1 is the plan; dots end at 5)")
    for number_of_plan, plan in enumerate(plans):
        at = [
            (number(r.get("x optimum", "")), line) for line, t in enumerate(cases) for r in t.rows if r["plan"] == plan
        ]
        dots = [(min(factor, 5.0), line) for factor, line in at if factor]
        if dots:
            colour = colours.LAYERS[number_of_plan % len(colours.LAYERS)]
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=6, alpha=0.8, label=plan)
    axes.axvline(1.0, color=colours.INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(cases)), [t.heading for t in cases])
    axes.set_ylim(-0.7, len(cases) - 0.3)
    axes.invert_yaxis()
    axes.set_xlim(0.8, 5.2)
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.06), "ncols": 4}
    axes.legend(frameon=False, fontsize=base.FONT - 2, labelcolor=colours.INK, **place)
    yield name, figure


def layout_maps(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Megabytes that one device sends per step, by model and program."""
    rows = [r for t in tables for r in t.rows if "program" in r and number(r.get("sent MB", ""))]
    if not rows:
        return
    models, programs = (list(dict.fromkeys(r[key] for r in rows)) for key in ("model", "program"))
    figure = base.new(8.5, 1.2 + 0.22 * len(models) * (len(programs) + 1))
    axes = base.plain(figure.subplots(), "Sent by one device per step, MB")
    for row in rows:
        kind = programs.index(row["program"])
        at = models.index(row["model"]) * (len(programs) + 1) + kind
        sent = number(row["sent MB"]) or 0.0
        axes.plot(sent, at, "o", color=colours.LAYERS[kind], markersize=6)
        text = f"{row['program']}: {sent:,.0f}"
        axes.text(sent * 1.08, at, text, va="center", fontsize=base.FONT - 2, color=colours.INK)
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max(number(r["sent MB"]) or 0.0 for r in rows))
    middles = [i * (len(programs) + 1) + (len(programs) - 1) / 2 for i in range(len(models))]
    axes.set_yticks(middles, [m.removeprefix("hub:") for m in models])
    axes.invert_yaxis()
    yield name, figure


def fidelity(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Every case's ratio of compiled to predicted, sorted, by target."""
    rows = [r for t in tables for r in t.rows if number(r.get("bytes ratio", "")) is not None]
    if not rows:
        return
    measures = [m for m in ("bytes ratio", "peak ratio", "FLOP ratio") if any(r.get(m) for r in rows)]
    targets = list(dict.fromkeys(r["case"].split(" / ")[1] if r["case"].count(" / ") else "all" for r in rows))
    figure = base.new(8.5, 3.4)
    for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
        base.plain(axes, measure)
        start = 0
        for i, target in enumerate(targets):
            mine = [r for r in rows if f" / {target} / " in r["case"] or len(targets) == 1]
            values = sorted(v for r in mine if (v := number(r.get(measure, ""))) is not None)
            label = target if measure == measures[0] else "_"
            at = range(start, start + len(values))
            shown = [min(max(v, 0.4), 2.5) for v in values]
            axes.plot(at, shown, ".", color=colours.LAYERS[i % len(colours.LAYERS)], markersize=5, label=label)
            start += len(values)
        axes.axhspan(0.95, 1.05, color=colours.INK, alpha=0.25, linewidth=0)
        axes.set_ylim(0.35, 2.6)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 0.8, 1.0, 1.25, 2.0], ["0.5", "0.8", "1", "1.25", "2"])
        axes.minorticks_off()
        axes.set_xticks([])
        axes.set_xlabel("cases by target, sorted")
    base.heading(figure, "Compiled over predicted; the band is within 5 %")
    base.legend(figure.axes[0])
    yield name, figure


def measured(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Measured against predicted milliseconds, where a table has both."""
    pairs = []
    for table in tables:
        predicted = next((c for c in table.columns if c.startswith("predicted") and "ms" in c), None)
        observed = next((c for c in table.columns if c.startswith("measured") and "ms" in c), None)
        if predicted and observed:
            found = [
                (number(r[predicted]), number(r[observed])) for r in table.rows if predicted in r and observed in r
            ]
            pairs += [(a, b) for a, b in found if a and b]
    if not pairs:
        return
    figure = base.new(5.0, 4.2)
    axes = base.plain(figure.subplots(), "A step in milliseconds")
    low, high = min(min(p) for p in pairs) / 1.3, max(max(p) for p in pairs) * 1.3
    axes.plot([low, high], [low, high], color=colours.INK, linewidth=1, linestyle="--")
    axes.plot([a for a, _ in pairs], [b for _, b in pairs], "o", color=colours.LAYERS[0], markersize=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured")
    yield name, figure


def speed(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Seconds of every stage, stacked by case."""
    rows = [r for t in tables for r in t.rows if number(r.get("solve s", "")) is not None]
    if rows:
        figure = base.new(8.5, 1.2 + 0.34 * len(rows))
        axes = base.plain(figure.subplots(), "Seconds of planning")
        labels = [f"{r.get('case', '')}{_mesh(r)}: {r.get('status', '')}, gap {r.get('gap', '')}" for r in rows]
        base.bars(axes, labels, _stages(rows), 60)
        axes.set_xlabel("seconds")
        base.legend(axes)
        yield name, figure


def _mesh(row: Mapping[str, str]) -> str:
    mesh = row.get("mesh", "")
    return "" if not mesh or mesh in row.get("case", "") else f" {mesh}"


def _stages(rows: Sequence[Mapping[str, str]]) -> dict[str, tuple[list[float], str]]:
    return {
        stage: ([number(r.get(f"{stage} s", "")) or 0.0 for r in rows], colours.LAYERS[i])
        for i, stage in enumerate(STAGES)
    }


def questions(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Seconds of wall clock of every question, one colour per case, on a scale of powers of ten."""
    rows = [r for t in tables for r in t.rows if number(r.get("wall s", "")) is not None]
    names = list(dict.fromkeys(re.sub(r"=\d+", "", r["question"]) for r in rows))
    if not names:
        return
    figure = base.new(8.5, 1.4 + 0.26 * len(names))
    axes = base.plain(figure.subplots(), "Seconds until the answer")
    for shade, case in zip(colours.LAYERS, dict.fromkeys(r["case"] for r in rows), strict=False):
        mine = [r for r in rows if r["case"] == case]
        at = [names.index(re.sub(r"=\d+", "", r["question"])) for r in mine]
        axes.scatter([max(number(r["wall s"]) or 0.0, 0.1) for r in mine], at, s=30, color=shade, label=case)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    base.legend(axes)
    yield name, figure


def growth(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Seconds by stage, one panel for everything that grows."""
    rows = [r for t in tables for r in t.rows if number(r.get("solve s", "")) is not None]
    kinds = list(dict.fromkeys(r["grows"] for r in rows))
    if not kinds:
        return
    figure = base.new(8.5, 3.2)
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        mine = [r for r in rows if r["grows"] == kind]
        base.plain(axes, kind)
        low = [0.0] * len(mine)
        for stage, (values, colour) in _stages(mine).items():
            label = stage if kind == kinds[0] else "_"
            axes.bar(range(len(mine)), values, bottom=low, color=colour, width=0.7, label=label)
            low = [a + b for a, b in zip(low, values, strict=True)]
        axes.set_xticks(range(len(mine)), [r["size"] for r in mine])
        axes.set_ylim(0, max(low) * 1.1 or 1.0)
    panels[0].set_ylabel("seconds")
    base.legend(panels[0])
    yield name, figure


def iopddl(name: str, tables: Sequence[Table]) -> Iterator[tuple[str, Any]]:
    """Cost over the best known, where a table has such a column."""
    for table in tables:
        column = next((c for c in table.columns if "best" in c.lower() and ("x" in c.split() or "/" in c)), None)
        rows = [r for r in table.rows if column and number(r.get(column, "")) is not None]
        if column and rows:
            figure = base.new(8.0, 1.0 + 0.3 * len(rows))
            axes = base.plain(figure.subplots(), column)
            names = [r[table.columns[0]] for r in rows]
            base.bars(axes, names, {"": ([number(r[column]) or 0.0 for r in rows], colours.LAYERS[0])})
            yield name, figure
            return

"""A plan in words and tables (rendered by rich)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard_ilp.display import pictures, records
from autoshard_ilp.display.pictures import share
from autoshard_ilp.display.render import rendered, room, size, table, titled, wrapped
from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.units import format_seconds

# -- tables ------------------------------------------------------------------------------------------------------------


def _layout_table(plan: Any, width: int, only_ascii: bool) -> Any:
    found = records.layouts(plan)
    sizes = plan.mesh.axis_sizes
    lines = []
    for r in found.rows:
        shape = "x".join(map(str, r["shape"])) + ("" if r["dtype"] == found.dtype else f" {r['dtype']}")
        extra = [f"+{r['slots']}" if r["slots"] else ""] if found.slots else []
        picture = pictures.held(r["shape"], r["layout"], sizes, only_ascii=only_ascii)
        lines.append([r["path"], picture, r["spec"], shape, str(r["count"]), *extra, size(r["bytes_per_device"])])
    columns = ["variable or input", "one device", "layout", "shape", "n", *(["slots"] if found.slots else [])]
    columns.append("per device")
    narrow = room(width, columns, lines) < 36
    if narrow:  # picture and layout go below the path, on two lines where one is too short
        columns, lines = [columns[0], *columns[4:]], [[f"{x[0]}\n{x[1]}\t{x[2]}", *x[4:]] for x in lines]
        space = room(width, columns, [["", *x[1:]] for x in lines]) - 6
        longest = max((len(x[0].partition("\n")[2]) for x in lines), default=0)
        lines = [[x[0].replace("\t", "  " if longest < space else "\n"), *x[1:]] for x in lines]
    bar = "#" if only_ascii else "█"
    notes = [f"one device: its part ({bar}) of every dimension."]
    notes += ["slots: optimizer variables laid out alike, their bytes counted here."] if found.slots else []
    notes += [f"{found.hidden} small variables are not shown."] if found.hidden else []
    title = f"Layouts ({found.dtype} unless said; - stands for a whole dimension)"
    lines = _as_tree(lines, room(width, columns, lines) if not narrow else max(20, width - 30))
    return table(title, columns, lines, left=1 if narrow else 3, note=" ".join(notes))


def _as_tree(lines: Sequence[list[str]], width: int) -> list[list[str]]:
    """Lines of one layer under its name. The first cell is a path, perhaps with more below it."""
    result: list[list[str]] = []
    layers = Counter(line[0].partition("/")[0] for line in lines)
    current = None
    for cells in lines:
        path, *below = cells[0].split("\n")
        layer, _, rest = path.partition("/")
        inside = bool(rest) and layers[layer] > 1
        if inside and layer != current:
            result.append([layer, *[""] * (len(cells) - 1)])
        current = layer if inside else None
        indent = "  " if inside else ""
        first = [wrapped(rest if inside else path, width, indent), *(f"{indent}  {text}" for text in below)]
        result.append(["\n".join(first), *cells[1:]])
    return result


def _cost_table(plan: Any, width: int, only_ascii: bool) -> Any:
    cells = min(24, max(0, width - 50))
    lines = [
        (name, format_seconds(s), f"{part:.1%}", "" if name == "total" else share(part, cells, only_ascii=only_ascii))
        for name, s, part in records.cost_rows(plan)
    ]
    return table("Predicted step", ("cost", "time", "share", ""), lines, after=1)


def _layer_table(plan: Any, width: int, only_ascii: bool) -> Any:
    rows = records.layer_rows(plan)
    if not rows:
        return None
    total = plan.cost.total_s or 1.0
    columns = ["layer", "compute", "communication", "share"]
    lines = [[name, format_seconds(a), format_seconds(b), f"{(a + b) / total:.1%}"] for name, a, b in rows]
    space = room(width, columns, lines)
    lines = [[wrapped(x[0], space), *x[1:]] for x in lines]
    return table("Cost by layer (those that differ in numbers only together)", columns, lines)


def _timeline(plan: Any, width: int, only_ascii: bool) -> Any:
    lines = pictures.timeline(plan.course, min(width, 100), only_ascii=only_ascii)
    return titled("Predicted timeline of one device", lines) if lines else None


def _collective_table(plan: Any, width: int, only_ascii: bool) -> Any:
    """The dearest collectives, those of the same kind, size and place together."""
    order = records.collective_rows(plan)
    if not order:
        return "No collectives"
    shown, more = order[: records.MAX_COLLECTIVES], order[records.MAX_COLLECTIVES :]
    lines = [[r.what, r.kind, r.axes, size(r.bytes_each), f"{r.count:g}", format_seconds(r.seconds)] for r in shown]
    columns = ["collective of", "kind", "over", "bytes each", "n", "time"]
    if narrow := room(width, columns, lines) < 36:
        columns = [columns[0], *columns[4:]]
        lines = [[f"{x[0]}\n  {x[1]} {x[2]} {x[3]}", *x[4:]] for x in lines]
    space = max(20, width - 24) if narrow else room(width, columns, lines)
    for cells in lines:
        path, *below = cells[0].split("\n")
        cells[0] = "\n".join([wrapped(path, space), *below])
    rest = sum(r.seconds for r in more)
    note = f"{len(more)} more take {format_seconds(rest)} together." if rest else ""
    return table("Dearest collectives", columns, lines, left=1 if narrow else 3, note=note)


def _memory_curve(plan: Any, width: int, only_ascii: bool) -> Any:
    lines = pictures.memory_curve(plan.course, plan.memory.budget_bytes, min(width, 100), only_ascii=only_ascii)
    return titled("Memory per device over the step", lines) if lines else None


def _memory_table(plan: Any, width: int, only_ascii: bool) -> Any:
    cells = min(24, max(0, width - 50))
    lines = [
        (name, records.readable(name, held), "" if part is None else f"{part:.1%}", bar)
        for name, held, part in records.memory_rows(plan)
        for bar in ["" if name == "budget" else share(part or 0.0, cells, only_ascii=only_ascii)]
    ]
    return table("Memory per device at the peak", ("part", "bytes", "of budget", ""), lines, after=1)


def _contributors(plan: Any, width: int, only_ascii: bool) -> Any:
    lines = [[wrapped(name, width - 16), size(held)] for name, held in records.contributors(plan)]
    return table("Largest at the peak", ("tensor, or layer of activations", "per device"), lines) if lines else None


def _proof(plan: Any, width: int, only_ascii: bool) -> str:
    return "\n".join(records.proof_lines(plan))


MAKERS = (
    _layout_table,
    *(_cost_table, _layer_table, _timeline, _collective_table),
    *(_memory_curve, _memory_table, _contributors),
    _proof,
)
"""Sections in order, each (plan, width, only_ascii) -> something to print, or None."""


# -- whole documents ---------------------------------------------------------------------------------------------------


def text(plan: Any, width: int | None = None, *, only_ascii: bool = False) -> str:
    """The whole summary as plain text.

    Args:
        plan: an :class:`~autoshard_ilp.plan.Plan`.
        width: in columns; None: 120.
        only_ascii: draw lines with ASCII characters, for locales that have no others.
    """
    columns = width or 120
    parts = [records.headline(plan), *(make(plan, columns, only_ascii) for make in MAKERS)]
    return rendered([part for part in parts if part is not None], columns, only_ascii)


def comparison(plans: Mapping[str, Any], width: int | None = None, *, only_ascii: bool = False) -> str:
    """Plans side by side.

    Args:
        plans: name -> plan, or the :class:`~autoshard_ilp.errors.InfeasibleError` that its search ended in. Times are
            compared with the first.
        width, only_ascii: see :func:`text`.
    """
    lines = []
    first: float | None = None
    for name, plan in plans.items():
        if isinstance(plan, InfeasibleError):
            needs = f"needs {size(plan.minimum_budget)}" if plan.minimum_budget else ""
            lines.append([name, "does not fit", "", "", "", needs])
            continue
        cost = plan.cost
        first = cost.total_s if first is None else first
        times = [format_seconds(s) for s in (cost.total_s, cost.compute_s, cost.communication_s)]
        ratio = f"{cost.total_s / first:.2f} x" if first else ""
        lines.append([name, times[0], ratio, *times[1:], size(plan.memory.peak_bytes)])
    columns = ["plan", "step", "of first", "compute", "communication", "peak memory"]
    if lines and room(width or 120, columns, lines) < max(len(line[0]) for line in lines):
        columns, lines = [*columns[:3], columns[5]], [[*line[:3], line[5]] for line in lines]
    return rendered([table("Comparison", columns, lines)], width or 120, only_ascii)

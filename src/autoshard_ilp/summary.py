"""A plan in words and tables (rendered by rich)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\d+")


def rows(plan: Any) -> list[dict[str, Any]]:
    """One record per argument and per result that is not state."""
    state = {leaf.path for leaf in plan.arguments}
    found = []
    for leaf in [*plan.arguments, *(r for r in plan.results if r.path not in state)]:
        held = local_bytes(leaf.shape, _itemsize(leaf.dtype), leaf.layout, plan.mesh.axis_sizes)
        found.append(
            {
                "path": leaf.path,
                "role": leaf.role,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "spec": _spec_text(leaf.layout, len(leaf.shape), plan.mesh.axis_names),
                "bytes_per_device": held,
            }
        )
    return found


def dataframe(plan: Any) -> Any:
    """:func:`rows` as a pandas DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError('to_dataframe() needs pandas: pip install "autoshard-ilp[notebook]".') from error
    return pandas.DataFrame(rows(plan))


def _itemsize(dtype: str) -> float:
    digits = re.search(r"(\d+)", dtype)
    if dtype == "bool" or digits is None:
        return 1
    return max(int(digits.group(1)), 4) / 8


def _spec_text(layout: Sequence[int], rank: int, axis_names: Sequence[str]) -> str:
    per_dim = [[n for n, d in zip(axis_names, layout, strict=True) if d == dim] for dim in range(rank)]
    return "(" + ", ".join("-" if not names else "+".join(names) for names in per_dim) + ")"


def grouped(plan: Any) -> list[dict[str, Any]]:
    """Rows with repeated layers merged: paths that differ in numbers only, with equal shape and layout."""
    groups: dict[tuple, dict[str, Any]] = {}
    for row in rows(plan):
        key = (_NUMBER.sub("*", row["path"]), row["role"], row["shape"], row["dtype"], row["spec"])
        if key in groups:
            groups[key]["count"] += 1
            groups[key]["bytes_per_device"] += row["bytes_per_device"]
        else:
            groups[key] = {**row, "count": 1}
    for key, row in groups.items():
        if row["count"] > 1:
            row["path"] = key[0]
    return list(groups.values())


def _document(plan: Any) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    headline = Text(
        f"{plan.mode} step on {plan.mesh} ({plan.mesh.size} x {plan.hardware})"
        + (f", global batch {plan.batch_size}" if plan.batch_size else ""),
        style="bold",
    )
    layouts = Table("variable or input", "count", "shape", "dtype", "layout", "per device", title="Layouts")
    hidden = 0
    for row in grouped(plan):
        if row["role"] in ("seed", "metric") or not row["shape"] or row["bytes_per_device"] < 4096:
            hidden += row["count"]
            continue
        layouts.add_row(
            row["path"],
            str(row["count"]),
            "x".join(map(str, row["shape"])),
            row["dtype"],
            row["spec"],
            format_bytes(row["bytes_per_device"]),
        )
    if hidden:
        layouts.caption = f"and {hidden} small variables, seeds and metrics"
    return [headline, layouts, _cost_table(plan), _collective_table(plan), _memory_table(plan), _proof(plan)]


def _cost_table(plan: Any) -> Any:
    from rich.table import Table

    table = Table("cost", "time", "share", title="Predicted step")
    total = plan.cost.total_s or 1.0
    items = [("compute", plan.cost.compute_s)]
    items += [(f"{kind}", s) for kind, s in sorted(plan.cost.per_kind.items(), key=lambda x: -x[1])]
    items += [(f"  over {axis}", s) for axis, s in sorted(plan.cost.per_axis.items(), key=lambda x: -x[1])]
    for name, seconds in [*items, ("total", plan.cost.total_s)]:
        table.add_row(name, format_seconds(seconds), f"{seconds / total:.1%}")
    return table


def _collective_table(plan: Any, limit: int = 12) -> Any:
    from rich.table import Table

    table = Table("collective", "axes", "bytes each", "count", "time", "tensor", "for", title="Dearest collectives")
    for c in plan.collectives[:limit]:
        table.add_row(
            c.kind,
            "+".join(c.mesh_axes),
            format_bytes(int(c.bytes_per_device)),
            f"{c.count:g}",
            format_seconds(c.seconds * c.count),
            c.tensor,
            c.operation,
        )
    if not plan.collectives:
        table.caption = "none"
    elif len(plan.collectives) > limit:
        table.caption = f"and {len(plan.collectives) - limit} more kinds"
    return table


def _memory_table(plan: Any) -> Any:
    from rich.table import Table

    budget = plan.memory.budget_bytes
    table = Table("memory per device", "bytes", "of budget", title="Memory at the peak")
    for name, size in [*plan.memory.parts.items(), ("peak", plan.memory.peak_bytes)]:
        if size:
            table.add_row(name, format_bytes(size), f"{size / budget:.1%}" if budget else "")
    if budget:
        table.add_row("budget", format_bytes(budget), "100.0%")
    return table


def _proof(plan: Any) -> Any:
    from rich.text import Text

    bound = format_seconds(plan.lower_bound) if math.isfinite(plan.lower_bound) else "none"
    lines = [f"{plan.status}: total {format_seconds(plan.cost.total_s)}, lower bound {bound}, gap {plan.gap:.2%}"]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"kept whole, no rule: {name}" for name in plan.unknown]
    if plan.timings:
        lines.append("planned in " + ", ".join(f"{stage} {s:.2f} s" for stage, s in plan.timings.items()))
    return Text("\n".join(lines))


def text(plan: Any, width: int | None = None) -> str:
    """The whole summary as plain text; ``width`` in columns, default 120."""
    import io

    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width or 120, color_system=None)
    for part in _document(plan):
        console.print(part)
    return out.getvalue()


def html(plan: Any) -> str:
    """The summary for a notebook: one preformatted block that follows the page's own colours."""
    from html import escape

    return f'<pre style="line-height:1.2">{escape(text(plan, 140))}</pre>'

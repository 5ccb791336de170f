"""A plan in words and tables (rendered by rich)."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\d+")
MAX_LAYOUTS = 40
"""Kinds of variables that the table of layouts shows, the largest first to stay."""
MAX_COLLECTIVES = 8


# -- records -----------------------------------------------------------------------------------------------------------


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
    """Rows with repeated layers merged: paths that differ in numbers only, with equal shape and layout.

    An optimizer variable of the shape and layout of its own variable is merged into that one's row, which counts it
    under ``slots`` and adds its bytes.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    for row in _with_slots(rows(plan)):
        name = _NUMBER.sub("*", row["path"])
        key = (name, row["role"], row["shape"], row["dtype"], row["spec"], row["slots"])
        if key in groups:
            groups[key]["count"] += 1
            groups[key]["bytes_per_device"] += row["bytes_per_device"]
        else:
            groups[key] = {**row, "count": 1}
    for key, row in groups.items():
        if row["count"] > 1:
            row["path"] = key[0]
    return list(groups.values())


def _with_slots(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the optimizer variables that are laid out as their variable. Keras names such a variable
    ``<optimizer>/<path of the variable, with _ for />_<slot>``."""
    result: list[dict[str, Any]] = [{**row, "slots": 0} for row in found]
    owners = {row["path"].replace("/", "_"): row for row in result if row["role"] == "parameter"}
    merged = set()
    for position, row in enumerate(result):
        if row["role"] != "optimizer":
            continue
        slot = row["path"].rpartition("/")[2]
        ends = [i for i, letter in enumerate(slot) if letter == "_"]
        owner = next((owners[slot[:end]] for end in reversed(ends) if slot[:end] in owners), None)
        if owner is not None and (row["shape"], row["spec"]) == (owner["shape"], owner["spec"]):
            owner["slots"] += 1
            owner["bytes_per_device"] += row["bytes_per_device"]
            merged.add(position)
    return [row for position, row in enumerate(result) if position not in merged]


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, left: int = 1) -> Any:
    """A table without vertical lines; the first ``left`` columns are text, the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for position, name in enumerate(columns):
        text = position < left
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def _size(n_bytes: float) -> str:
    """Bytes in one decimal unit."""
    return format_bytes(n_bytes).partition(" (")[0]


def _headline(plan: Any) -> Any:
    from rich.text import Text

    batch = f", global batch {plan.batch_size}" if plan.batch_size else ""
    return Text(f"{plan.mode} step on {plan.mesh} ({plan.mesh.size} x {plan.hardware}){batch}", style="bold")


def _layout_table(plan: Any) -> Any:
    found = grouped(plan)
    worth = [r for r in found if r["role"] not in ("seed", "metric") and r["shape"]]
    small = 1e-4 * sum(r["bytes_per_device"] for r in worth)
    shown = [r for r in worth if r["bytes_per_device"] >= small or r["role"] in ("input", "target")]
    largest = sorted(shown, key=lambda r: -r["bytes_per_device"])[:MAX_LAYOUTS]
    keep = {id(r) for r in largest}
    shown = [r for r in shown if id(r) in keep]
    common = Counter(r["dtype"] for r in shown).most_common(1)
    dtype = common[0][0] if common else ""
    slots = any(r["slots"] for r in shown)
    columns = ["variable or input", "layout", "shape", "n", *(["slots"] if slots else []), "per device"]
    table = _table(f"Layouts ({dtype} unless said; - is whole)", *columns, left=2)
    for r in shown:
        shape = "x".join(map(str, r["shape"])) + ("" if r["dtype"] == dtype else f" {r['dtype']}")
        extra = [f"+{r['slots']}" if r["slots"] else ""] if slots else []
        table.add_row(r["path"], r["spec"], shape, str(r["count"]), *extra, _size(r["bytes_per_device"]))
    hidden = sum(r["count"] * (1 + r["slots"]) for r in found if id(r) not in keep)
    notes = ["+slots: optimizer variables laid out alike, counted in the bytes."] if slots else []
    if hidden:
        notes.append(f"{hidden} smaller variables not shown.")
    table.caption, table.caption_justify = " ".join(notes) or None, "left"
    return table


def _cost_table(plan: Any) -> Any:
    table = _table("Predicted step", "cost", "time", "share")
    total = plan.cost.total_s or 1.0
    items = [("compute", plan.cost.compute_s)]
    items += [(f"{kind}", s) for kind, s in sorted(plan.cost.per_kind.items(), key=lambda x: -x[1])]
    items += [(f"  over {axis}", s) for axis, s in sorted(plan.cost.per_axis.items(), key=lambda x: -x[1])]
    for name, seconds in [*items, ("total", plan.cost.total_s)]:
        table.add_row(name, format_seconds(seconds), f"{seconds / total:.1%}")
    return table


def _collective_table(plan: Any) -> Any:
    """The dearest collectives, those of the same kind, size and place together."""
    together: dict[tuple, list[float]] = {}
    for c in plan.collectives:
        named = "/" in c.tensor
        what = c.tensor if named else f"{c.tensor} in {c.operation}"
        key = (c.kind, "+".join(c.mesh_axes), _size(int(c.bytes_per_device)), _NUMBER.sub("*", what) if named else what)
        entry = together.setdefault(key, [0.0, 0.0])
        entry[0] += c.count
        entry[1] += c.seconds * c.count
    order = sorted(together.items(), key=lambda item: -item[1][1])
    table = _table("Dearest collectives", "collective of", "kind", "over", "bytes each", "n", "time", left=3)
    for (kind, axes, size, what), (count, seconds) in order[:MAX_COLLECTIVES]:
        table.add_row(what, kind, axes, size, f"{count:g}", format_seconds(seconds))
    rest = sum(seconds for _, (_, seconds) in order[MAX_COLLECTIVES:])
    caption = f"and {len(order) - MAX_COLLECTIVES} more, {format_seconds(rest)} together" if rest else None
    table.caption, table.caption_justify = caption if order else "none", "left"
    return table


def _memory_table(plan: Any) -> Any:
    budget = plan.memory.budget_bytes
    table = _table("Memory per device at the peak", "part", "bytes", "of budget")
    for name, size in [*plan.memory.parts.items(), ("peak", plan.memory.peak_bytes), ("budget", budget or 0)]:
        if size:
            total = name in ("peak", "budget")
            table.add_row(name, (format_bytes if total else _size)(size), f"{size / budget:.1%}" if budget else "")
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


# -- whole documents ---------------------------------------------------------------------------------------------------


class _Ascii(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]  # rich draws its lines with what this can hold


def _rendered(parts: Iterable[Any], width: int, only_ascii: bool) -> str:
    from rich.console import Console

    out = _Ascii() if only_ascii else io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def text(plan: Any, width: int | None = None, *, only_ascii: bool = False) -> str:
    """The whole summary as plain text.

    Args:
        plan: an :class:`~autoshard_ilp.plan.Plan`.
        width: in columns; None: 120.
        only_ascii: draw lines with ASCII characters, for locales that have no others.
    """
    tables = (_layout_table, _cost_table, _collective_table, _memory_table)
    return _rendered([_headline(plan), *(make(plan) for make in tables), _proof(plan)], width or 120, only_ascii)


def html(plan: Any) -> str:
    """The summary for a notebook: one preformatted block that follows the page's own colours."""
    from html import escape

    return f'<pre style="line-height:1.2">{escape(text(plan, 140))}</pre>'


def comparison(plans: Mapping[str, Any], width: int | None = None, *, only_ascii: bool = False) -> str:
    """Plans side by side.

    Args:
        plans: name -> plan, or the :class:`~autoshard_ilp.errors.InfeasibleError` that its search ended in. Times are
            compared with the first.
        width, only_ascii: see :func:`text`.
    """
    table = _table("Comparison", "plan", "step", "of first", "compute", "communication", "peak memory")
    first: float | None = None
    for name, plan in plans.items():
        if isinstance(plan, InfeasibleError):
            needs = f"needs {_size(plan.minimum_budget)}" if plan.minimum_budget else ""
            table.add_row(name, "does not fit", "", "", "", needs)
            continue
        cost = plan.cost
        first = cost.total_s if first is None else first
        times = [format_seconds(s) for s in (cost.total_s, cost.compute_s, cost.communication_s)]
        ratio = f"{cost.total_s / first:.2f} x" if first else ""
        table.add_row(name, times[0], ratio, *times[1:], _size(plan.memory.peak_bytes))
    return _rendered([table], width or 120, only_ascii)


def profile_table(profiles: Iterable[Any], width: int | None = None, *, only_ascii: bool = False) -> str:
    """Main figures of hardware profiles (:class:`~autoshard_ilp.costs.profile.HardwareProfile`), one line each."""
    table = _table("Hardware profiles, per device", "profile", "bf16 matmul", "memory", "bandwidth", "link", "domain")
    for p in profiles:
        peak = p.peak_flops_per_s("bfloat16") / p.matmul_efficiency
        torus = f"{p.torus.dims}D torus" if p.torus else p.link_kind
        table.add_row(
            p.name,
            f"{peak / 1e12:.4g} TFLOP/s",
            _size(p.memory_bytes),
            f"{p.memory_bytes_per_s / 1e9:.4g} GB/s",
            f"{torus}, {p.link_bytes_per_s / 1e9:.4g} GB/s",
            str(p.domain_devices),
        )
    note = "Links: one way, nominal; one link of a torus, else all of a device. Domain: devices on fast links."
    return _rendered([table, note], width or 120, only_ascii)

"""A plan in words and tables (rendered by rich)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.render import rendered, room, size, table, wrapped
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
    under ``slots`` and adds its bytes. Others follow as ``<path of the variable> slots``.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    for row in _with_slots(rows(plan)):
        name = _NUMBER.sub("*", row["path"])
        key = (name, row["role"], row["shape"], row["dtype"], row["spec"], row["slots"])
        if key in groups:
            groups[key]["count"] += 1
            groups[key]["bytes_per_device"] += row["bytes_per_device"]
            groups[key]["paths"].add(row["path"])
        else:
            groups[key] = {**row, "count": 1, "paths": {row["path"]}}
    for key, row in groups.items():
        if len(row.pop("paths")) > 1:
            row["path"] = key[0]
    return list(groups.values())


def _with_slots(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with optimizer variables next to their variable. Keras names such a variable
    ``<optimizer>/<path of the variable, with _ for />_<slot>``."""
    own: list[dict[str, Any]] = [{**row, "slots": 0} for row in found]
    owners = {row["path"].replace("/", "_"): row for row in own if row["role"] == "parameter"}
    below: dict[int, list[dict[str, Any]]] = {}
    placed = set()
    for row in own:
        if row["role"] != "optimizer":
            continue
        slot = row["path"].rpartition("/")[2]
        ends = [i for i, letter in enumerate(slot) if letter == "_"]
        owner = next((owners[slot[:end]] for end in reversed(ends) if slot[:end] in owners), None)
        if owner is None:
            continue
        placed.add(id(row))
        if (row["shape"], row["spec"]) == (owner["shape"], owner["spec"]):
            owner["slots"] += 1
            owner["bytes_per_device"] += row["bytes_per_device"]
        else:
            below.setdefault(id(owner), []).append({**row, "path": f"{owner['path']} slots"})
    return [line for row in own if id(row) not in placed for line in (row, *below.get(id(row), ()))]


# -- tables ------------------------------------------------------------------------------------------------------------


def _headline(plan: Any) -> str:
    batch = f", global batch {plan.batch_size}" if plan.batch_size else ""
    return f"{plan.mode} step on {plan.mesh} ({plan.mesh.size} x {plan.hardware}){batch}"


def _layout_table(plan: Any, width: int) -> Any:
    found = grouped(plan)
    worth = [r for r in found if r["role"] not in ("seed", "metric") and r["shape"]]
    small = 1e-4 * sum(r["bytes_per_device"] for r in worth)
    worth = [r for r in worth if r["bytes_per_device"] >= small or r["role"] in ("input", "target")]
    kept = {id(r) for r in sorted(worth, key=lambda r: -r["bytes_per_device"])[:MAX_LAYOUTS]}
    shown = [r for r in worth if id(r) in kept]
    common = Counter(r["dtype"] for r in shown).most_common(1)
    dtype = common[0][0] if common else ""
    slots = any(r["slots"] for r in shown)
    lines = [_layout_cells(r, dtype, slots) for r in shown]
    columns = ["variable or input", "layout", "shape", "n", *(["slots"] if slots else []), "per device"]
    if narrow := room(width, columns, lines) < 36:  # the layout goes below its path
        columns, lines = [columns[0], *columns[3:]], [[f"{x[0]}\n{x[1]}", *x[3:]] for x in lines]
    hidden = sum(r["count"] * (1 + r["slots"]) for r in found if id(r) not in kept)
    notes = ["slots: optimizer variables laid out alike, their bytes counted here."] if slots else []
    notes += [f"{hidden} small variables are not shown."] if hidden else []
    title = f"Layouts ({dtype} unless said; - stands for a whole dimension)"
    lines = _as_tree(lines, room(width, columns, lines) if not narrow else max(20, width - 30))
    return table(title, columns, lines, left=1 if narrow else 2, note=" ".join(notes))


def _layout_cells(row: Mapping[str, Any], dtype: str, slots: bool) -> list[str]:
    shape = "x".join(map(str, row["shape"])) + ("" if row["dtype"] == dtype else f" {row['dtype']}")
    extra = [f"+{row['slots']}" if row["slots"] else ""] if slots else []
    return [row["path"], row["spec"], shape, str(row["count"]), *extra, size(row["bytes_per_device"])]


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


def _cost_table(plan: Any, width: int) -> Any:
    total = plan.cost.total_s or 1.0
    items = [("compute", plan.cost.compute_s)]
    items += sorted(plan.cost.per_kind.items(), key=lambda x: -x[1])
    items += [(f"  over {axis}", s) for axis, s in sorted(plan.cost.per_axis.items(), key=lambda x: -x[1])]
    items.append(("total", plan.cost.total_s))
    lines = [(name, format_seconds(seconds), f"{seconds / total:.1%}") for name, seconds in items]
    return table("Predicted step", ("cost", "time", "share"), lines)


def _collective_table(plan: Any, width: int) -> Any:
    """The dearest collectives, those of the same kind, size and place together."""
    if not plan.collectives:
        return "No collectives"
    scopes = Counter(c.operation.partition("/")[0] for c in plan.collectives if c.operation.count("/") > 1)
    top = f"{scopes.most_common(1)[0][0]}/" if scopes else ""  # the model's own name says nothing
    together: dict[tuple[str, ...], tuple[float, float]] = {}
    for c in plan.collectives:
        named = c.tensor if "/" in c.tensor else f"{c.operation.removeprefix(top).removesuffix('/hub')} {c.tensor}"
        path, _, rest = named.partition(" ")
        what = f"{_NUMBER.sub('*', path) if c.count > 1 else path} {rest}".rstrip()
        key = (what, c.kind, "+".join(c.mesh_axes), size(int(c.bytes_per_device)))
        count, seconds = together.get(key, (0.0, 0.0))
        together[key] = (count + c.count, seconds + c.seconds * c.count)
    order = sorted(together.items(), key=lambda item: -item[1][1])
    lines = [[*key, f"{n:g}", format_seconds(s)] for key, (n, s) in order[:MAX_COLLECTIVES]]
    columns = ["collective of", "kind", "over", "bytes each", "n", "time"]
    if narrow := bool(lines) and room(width, columns, lines) < 36:
        columns = [columns[0], *columns[4:]]
        lines = [[f"{x[0]}\n  {x[1]} {x[2]} {x[3]}", *x[4:]] for x in lines]
    space = max(20, width - 24) if narrow else room(width, columns, lines)
    for cells in lines:
        path, *below = cells[0].split("\n")
        cells[0] = "\n".join([wrapped(path, space), *below])
    rest = sum(seconds for _, (_, seconds) in order[MAX_COLLECTIVES:])
    note = f"{len(order) - MAX_COLLECTIVES} more take {format_seconds(rest)} together." if rest else ""
    return table("Dearest collectives", columns, lines, left=1 if narrow else 3, note=note)


def _memory_table(plan: Any, width: int) -> Any:
    budget = plan.memory.budget_bytes
    lines = []
    for name, held in [*plan.memory.parts.items(), ("peak", plan.memory.peak_bytes), ("budget", budget or 0)]:
        if held:
            readable = format_bytes(held) if name in ("peak", "budget") else size(held)
            lines.append((name, readable, f"{held / budget:.1%}" if budget else ""))
    return table("Memory per device at the peak", ("part", "bytes", "of budget"), lines)


def _proof(plan: Any, width: int) -> str:
    bound = format_seconds(plan.lower_bound) if math.isfinite(plan.lower_bound) else "none"
    lines = [f"{plan.status}: total {format_seconds(plan.cost.total_s)}, lower bound {bound}, gap {plan.gap:.2%}"]
    if plan.remat:
        where = f"policy {plan.remat_policy!r}; plan.remat names the {len(plan.remat)} scopes"
        lines.append(f"activations are recomputed in the backward pass ({where})")
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"kept whole, no rule: {name}" for name in plan.unknown]
    if plan.timings:
        lines.append("planned in " + ", ".join(f"{stage} {s:.2f} s" for stage, s in plan.timings.items()))
    return "\n".join(lines)


# -- whole documents ---------------------------------------------------------------------------------------------------


def text(plan: Any, width: int | None = None, *, only_ascii: bool = False) -> str:
    """The whole summary as plain text.

    Args:
        plan: an :class:`~autoshard_ilp.plan.Plan`.
        width: in columns; None: 120.
        only_ascii: draw lines with ASCII characters, for locales that have no others.
    """
    columns = width or 120
    makers = (_layout_table, _cost_table, _collective_table, _memory_table, _proof)
    return rendered([_headline(plan), *(make(plan, columns) for make in makers)], columns, only_ascii)


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


def profile_table(profiles: Iterable[Any], width: int | None = None, *, only_ascii: bool = False) -> str:
    """Main figures of hardware profiles (:class:`~autoshard_ilp.costs.profile.HardwareProfile`), one line each."""
    lines = []
    for p in profiles:
        peak = p.peak_flops_per_s("bfloat16") / p.matmul_efficiency
        link = f"{p.torus.dims}D torus" if p.torus else p.link_kind
        lines.append(
            [
                p.name,
                f"{peak / 1e12:.4g} TFLOP/s",
                size(p.memory_bytes),
                f"{p.memory_bytes_per_s / 1e9:.4g} GB/s",
                f"{link}, {p.link_bytes_per_s / 1e9:.4g} GB/s",
                str(p.domain_devices),
            ]
        )
    note = "Links: one way, nominal; one link of a torus, else all of a device. Domain: devices on fast links."
    columns = ["profile", "bf16 matmul", "memory", "bandwidth", "link", "domain"]
    if lines and room(width or 120, columns, lines) < max(len(line[0]) for line in lines):
        columns, lines = [*columns[:3], columns[4]], [[*line[:3], line[4]] for line in lines]
    made = table("Hardware profiles, figures per device", columns, lines, note=note)
    return rendered([made], width or 120, only_ascii)

"""A plan as a notebook shows it: one block of HTML with its own style and drawings.

Nothing is fetched and nothing runs: no script, no font, no image from elsewhere. Colours follow the theme of the
notebook or the site (the variables of JupyterLab, of VS Code, and of MkDocs Material), else the reader's own preference
for light or dark; ground and text always come from the same source, so that neither is ever left alone on the other's
ground.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from autoshard_ilp.display import records
from autoshard_ilp.display.render import size
from autoshard_ilp.plots import colours, svg
from autoshard_ilp.units import format_bytes, format_seconds

STYLE = """
.autoshard-plan{--ap-g:#ffffff;--ap-t:#1f2328;
--ap-ground:var(--jp-layout-color1,var(--vscode-editor-background,var(--md-default-bg-color,var(--ap-g))));
--ap-text:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--md-default-fg-color,var(--ap-t))));
background:var(--ap-ground);color:var(--ap-text);font:13px/1.45 system-ui,sans-serif;max-width:1000px;padding:2px 8px}
@media (prefers-color-scheme:dark){.autoshard-plan{--ap-g:#16181d;--ap-t:#dfe3e8}}
.autoshard-plan h3{font-size:15px;margin:8px 0 6px}
.autoshard-plan h4{font-size:13px;margin:16px 0 4px}
.autoshard-plan .ap-tiles{display:flex;flex-wrap:wrap;gap:8px}
.autoshard-plan .ap-tile{border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:4px 12px}
.autoshard-plan .ap-tile b{display:block;font-size:17px;font-weight:600}
.autoshard-plan .ap-wide{overflow-x:auto}
.autoshard-plan table.ap{border-collapse:collapse;border:0;color:inherit;background:none;margin:0;font-size:12px}
.autoshard-plan table.ap th{font-weight:600;border:0;border-bottom:1px solid rgba(128,128,128,.6)}
.autoshard-plan table.ap tr,.autoshard-plan table.ap thead{background:none;border:0;color:inherit}
.autoshard-plan table.ap td,.autoshard-plan table.ap th{padding:2px 14px 2px 0;text-align:right;vertical-align:middle;
color:inherit;background:none;border-left:0;border-right:0;border-top:0}
.autoshard-plan table.ap td{border-bottom:0;white-space:nowrap}
.autoshard-plan table.ap .ap-l{text-align:left}
.autoshard-plan table.ap td.ap-p{white-space:normal;overflow-wrap:anywhere;min-width:150px}
.autoshard-plan table.ap .ap-in{padding-left:16px}
.autoshard-plan code{font:12px ui-monospace,monospace;color:inherit;background:none;padding:0}
.autoshard-plan table.ap td:last-child:has(.ap-bar){text-align:left}
.autoshard-plan .ap-bar{display:inline-block;height:9px;border-radius:2px;vertical-align:middle}
.autoshard-plan .ap-key{margin:2px 0;font-size:12px}.autoshard-plan .ap-key span{margin-right:14px;white-space:nowrap}
.autoshard-plan .ap-key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.autoshard-plan .ap-two{display:flex;flex-wrap:wrap;gap:0 40px}.autoshard-plan .ap-two>div{min-width:0;max-width:100%}
.autoshard-plan .ap-note{opacity:.8;font-size:12px;margin:4px 0}
.autoshard-plan .ap-wide>svg{min-width:640px}
.autoshard-plan svg{display:block;font:11px system-ui,sans-serif;background:none}
.autoshard-plan svg text{fill:currentColor}.autoshard-plan svg text.ap-on{fill:#fff;font-size:10px}
""".replace("\n", "")


def html(plan: Any) -> str:
    """The page of a plan: the content of :meth:`~autoshard_ilp.plan.Plan.summary` with drawings."""
    sections = (_tiles, _layouts, _cost, _timeline, _collectives, _memory, _proof)
    body = "".join(make(plan) for make in sections)
    return f'<div class="autoshard-plan"><style>{STYLE}</style><h3>{escape(records.headline(plan))}</h3>{body}</div>'


# -- pieces ------------------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1, wraps: bool = True) -> str:
    """A table of cells that are HTML already; the first ``left`` columns are text."""
    head = "".join(f"<th{_class(i < left)}>{escape(c)}</th>" for i, c in enumerate(columns))
    rows = "".join(
        "<tr>" + "".join(f"<td{_class(i < left, wraps and not i)}>{c}</td>" for i, c in enumerate(cells)) + "</tr>"
        for cells in lines
    )
    return f'<div class="ap-wide"><table class="ap"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _class(left: bool, wraps: bool = False) -> str:
    names = [*(["ap-l"] if left else []), *(["ap-p"] if wraps else [])]
    return f' class="{" ".join(names)}"' if names else ""


def _bar(fraction: float, colour: str) -> str:
    width = 130 * min(max(fraction, 0.0), 1.0)
    return f'<span class="ap-bar" style="width:{max(width, 1.5):.1f}px;background:{colour}"></span>' if fraction else ""


def _key(items: Mapping[str, str]) -> str:
    spans = "".join(f'<span><i style="background:{colour}"></i>{escape(n)}</span>' for n, colour in items.items())
    return f'<div class="ap-key">{spans}</div>'


def _breakable(path: str) -> str:
    return escape(path).replace("/", "/<wbr>")


# -- sections ----------------------------------------------------------------------------------------------------------


def _tiles(plan: Any) -> str:
    total = plan.cost.total_s or 1.0
    budget = plan.memory.budget_bytes
    of_budget = f" of {format_bytes(budget).partition(' (')[0]}" if budget else ""
    items = [
        ("predicted step", format_seconds(plan.cost.total_s)),
        ("communication", f"{plan.cost.communication_s / total:.0%}"),
        ("peak memory per device", size(plan.memory.peak_bytes) + of_budget),
        ("gap to the bound", f"{plan.gap:.2%}, {plan.status}"),
    ]
    tiles = "".join(f'<div class="ap-tile">{escape(name)}<b>{escape(value)}</b></div>' for name, value in items)
    return f'<div class="ap-tiles">{tiles}</div>'


def _layouts(plan: Any) -> str:
    found = records.layouts(plan)
    largest = max((r["bytes_per_device"] for r in found.rows), default=1) or 1
    lines, layer = [], None
    inside_of: dict[str, int] = {}
    for r in found.rows:
        head, _, rest = r["path"].partition("/")
        inside_of[head] = inside_of.get(head, 0) + bool(rest)
    for r in found.rows:
        head, _, rest = r["path"].partition("/")
        inside = bool(rest) and inside_of[head] > 1
        if inside and head != layer:
            lines.append([f"<b>{escape(head)}</b>"] + [""] * (6 + found.slots))
        layer = head if inside else None
        path = f'<span class="ap-in"></span>{_breakable(rest)}' if inside else _breakable(r["path"])
        shape = "×".join(map(str, r["shape"])) + ("" if r["dtype"] == found.dtype else f" {escape(r['dtype'])}")
        picture = svg.tensor(r["shape"], r["layout"], plan.mesh.axis_names, plan.mesh.axis_sizes)
        slots = [f"+{r['slots']}" if r["slots"] else ""] if found.slots else []
        held = r["bytes_per_device"]
        cells = [path, picture, f"<code>{escape(r['spec'])}</code>", shape, str(r["count"]), *slots, size(held)]
        lines.append([*cells, _bar(held / largest, svg.ACCENT)])
    columns = ["variable or input", "on the mesh", "layout", "shape", "n", *(["slots"] if found.slots else [])]
    notes = [f"{found.dtype} unless said; - stands for a whole dimension."]
    notes.append("Filled: the part of the first device; xN: copies; /N: cut in a third dimension as well.")
    notes += ["slots: optimizer variables laid out alike, their bytes counted here."] if found.slots else []
    notes += [f"{found.hidden} small variables are not shown."] if found.hidden else []
    made = _table([*columns, "per device", ""], lines, left=3)
    return f'<h4>Layouts</h4>{made}<div class="ap-note">{escape(" ".join(notes))}</div>'


def _cost(plan: Any) -> str:
    lines = []
    for name, seconds, part in records.cost_rows(plan):
        bar = "" if name == "total" else _bar(part, colours.kind(name) if not name.startswith(" ") else svg.ACCENT)
        pad = '<span class="ap-in"></span>' if name.startswith(" ") else ""
        name = f"<b>{name}</b>" if name == "total" else pad + escape(name.strip())
        lines.append([name, format_seconds(seconds), f"{part:.1%}", bar])
    by_cost = f"<div><h4>Predicted step</h4>{_table(['cost', 'time', 'share', ''], lines)}</div>"
    rows = records.layer_rows(plan)
    if not rows:
        return by_cost
    most = max(a + b for _, a, b in rows) or 1.0
    layers = [
        [
            _breakable(name),
            format_seconds(a),
            format_seconds(b),
            _bar(a / most, colours.kind("compute")) + _bar(b / most, svg.ACCENT),
        ]
        for name, a, b in rows
    ]
    made = _table(["layer", "compute", "communication", ""], layers)
    note = '<div class="ap-note">Layers that differ in numbers only are one.</div>'
    return f'<div class="ap-two">{by_cost}<div><h4>By layer</h4>{made}{note}</div></div>'


def _timeline(plan: Any) -> str:
    drawn = svg.timeline(plan.course)
    if not drawn:
        return ""
    kinds = {s.kind for s in plan.course.segments}
    note = '<div class="ap-note">Pale: runs behind compute.</div>' if plan.course.hidden() else ""
    key = _key({k: c for k, c in colours.KINDS.items() if k in kinds})
    return f'<h4>Timeline of one device</h4><div class="ap-wide">{drawn}</div>{key}{note}'


def _collectives(plan: Any) -> str:
    order = records.collective_rows(plan)
    if not order:
        return "<h4>Collectives</h4>None."
    shown, more = order[: records.MAX_COLLECTIVES], order[records.MAX_COLLECTIVES :]
    lines = [
        [
            _breakable(r.what),
            *map(escape, (r.kind, r.axes, size(r.bytes_each), f"{r.count:g}", format_seconds(r.seconds))),
        ]
        for r in shown
    ]
    rest = sum(r.seconds for r in more)
    note = f'<div class="ap-note">{len(more)} more take {format_seconds(rest)} together.</div>' if rest else ""
    made = _table(["collective of", "kind", "over", "bytes each", "n", "time"], lines, left=3)
    return f"<h4>Dearest collectives</h4>{made}{note}"


def _memory(plan: Any) -> str:
    drawn = svg.memory(plan.course, plan.memory.budget_bytes)
    held = {n: colours.part(n) for n in [*colours.PARTS] if any(plan.course.held.get(n, ()))}
    curve = f"<h4>Memory per device over the step</h4><div class='ap-wide'>{drawn}</div>{_key(held)}" if drawn else ""
    lines = [
        [
            f"<b>{name}</b>" if name in ("peak", "budget") else escape(name),
            records.readable(name, n),
            "" if part is None else f"{part:.1%}",
            "" if part is None or name in ("peak", "budget") else _bar(part, colours.part(name)),
        ]
        for name, n, part in records.memory_rows(plan)
    ]
    parts = f"<div><h4>At the peak</h4>{_table(['part', 'bytes', 'of budget', ''], lines)}</div>"
    most = [[_breakable(name), size(n)] for name, n in records.contributors(plan)]
    made = _table(["tensor, or layer of activations", "per device"], most)
    largest = f"<div><h4>Largest at the peak</h4>{made}</div>" if most else ""
    return f'{curve}<div class="ap-two">{parts}{largest}</div>'


def _proof(plan: Any) -> str:
    return "<h4>Proof</h4>" + "".join(f"<div>{escape(line)}</div>" for line in records.proof_lines(plan))

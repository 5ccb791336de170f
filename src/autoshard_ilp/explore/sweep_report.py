"""The HTML report of a sweep: one page without scripts or links, for light and dark screens."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from autoshard_ilp.errors import SweepFileError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.results import VERSIONS
from autoshard_ilp.files import write_whole
from autoshard_ilp.units import format_bytes

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #8884; vertical-align: top; }
td, th { white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
tr.failed, tr.infeasible { opacity: .65; }
svg { display: block; min-width: 560px; max-width: 100%; height: auto; }
figure { margin: 1rem 0; }
li { overflow-wrap: anywhere; }
"""
FIGURES = (("total_s", "Predicted step"), ("peak_bytes", "Peak memory per device"))


def write(sweep: Any, path: Path) -> Path:
    """Writes the page; see :meth:`autoshard_ilp.explore.sweep_result.Sweep.report`."""
    try:
        write_whole(path, page(sweep).encode())
    except OSError as error:
        raise SweepFileError(
            f"A report is written to a file that can be written. Received: {path} ({error})."
        ) from error
    return path


def page(sweep: Any) -> str:
    """The page as text."""
    counts = ", ".join(f"{n} {status}" for status, n in sorted(sweep.counts.items())) or "none"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>Sweep: {len(sweep)} cases</title><style>{STYLE}</style>",
        f"<h1>Sweep</h1><p>{len(sweep)} of {sweep.total} cases finished: {counts}.</p>",
        *(_figure(sweep, y, title) for y, title in FIGURES),
        "<h2>Results</h2>",
        _table(sweep),
        _failures(sweep),
        _made_by(sweep),
        "</html>",
    ]
    return "\n".join(p for p in parts if p)


def _figure(sweep: Any, y: str, title: str) -> str:
    if not any(r[y] is not None for r in sweep.rows):
        return ""
    try:
        figure = sweep.plot(y=y)
    except ImportError:
        return "<p>Figures need matplotlib.</p>"
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    drawing = out.getvalue()
    return f"<h2>{title}</h2><figure class='wide'>{drawing[drawing.index('<svg') :]}</figure>"


def _table(sweep: Any) -> str:
    inputs = [n for n in sweep.varying() if n != "devices"] or ["model", "mesh"]
    heads = [*inputs, "step", "compute", "communication", "gap", "peak", "recompute", "status"]
    ordered = sorted(sweep.rows, key=lambda r: (r["total_s"] is None, r["total_s"] or 0.0))
    lines = []
    for r in ordered:
        cells = [f"<td>{escape(str(r[n] if r[n] is not None else ''))}</td>" for n in inputs]
        times = [show.seconds(r[n]) for n in ("total_s", "compute_s", "communication_s")]
        gap = "" if r["gap"] is None else f"{r['gap']:.2%}"
        held = format_bytes(r["peak_bytes"]) if r["peak_bytes"] else ""
        if r["minimum_budget_bytes"]:
            held = f"needs {format_bytes(r['minimum_budget_bytes'])}"
        cells += [f"<td class='n'>{x}</td>" for x in (*times, gap, held)]
        cells += [f"<td>{escape(str(r[n] or ''))}</td>" for n in ("recomputation", "status")]
        lines.append(f"<tr class='{escape(r['status'])}'>{''.join(cells)}</tr>")
    figures = range(len(inputs), len(inputs) + 5)
    head = "".join(f"<th{' class=n' if i in figures else ''}>{escape(h)}</th>" for i, h in enumerate(heads))
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _failures(sweep: Any) -> str:
    if not sweep.failed:
        return ""
    names = [n for n in sweep.varying() if n != "devices"] or ["model", "mesh"]
    cases: dict[str, list[str]] = {}
    for r in sweep.failed:
        inputs = ", ".join(str(r[n]) for n in names if r[n] is not None)
        cases.setdefault(f"{r['error_type']}: {r['error']}", []).append(inputs)
    items = [
        f"<li><b>{escape(error)}</b> ({len(found)} x)<br>{'<br>'.join(map(escape, found))}</li>"
        for error, found in cases.items()
    ]
    return f"<h2>Failed</h2><ul>{''.join(items)}</ul>"


def _made_by(sweep: Any) -> str:
    sets = {tuple(f"{n} {r[n]}" for n in (*VERSIONS, "python")) for r in sweep.rows}
    lines = "".join(f"<li>{escape(', '.join(s))}</li>" for s in sorted(sets))
    source = f"<p>Results file: {escape(sweep.path.name)}</p>" if sweep.path else ""
    return f"<h2>Made by</h2><ul>{lines}</ul>{source}" if lines else source

"""An explanation in words and a table."""

from __future__ import annotations

import math
from typing import Any

from autoshard_ilp.display.render import rendered, room, size, table, wrapped
from autoshard_ilp.explore import show

LISTED_PATHS = 4


def text(explanation: Any, width: int, *, only_ascii: bool = False) -> str:
    """The explanation as plain text; see :class:`autoshard_ilp.explore.explain.Explanation`."""
    e = explanation
    chosen = e.chosen
    paths = ", ".join(e.paths[:LISTED_PATHS]) + (f" and {len(e.paths) - LISTED_PATHS} more" if len(e.paths) > 4 else "")
    shape = "x".join(map(str, e.shape)) or "scalar"
    head = f"{paths} ({e.dtype} {shape}) lies as {show.spec_text(chosen.spec, len(e.shape))}"
    others = [a for a in e.alternatives if not a.chosen and math.isfinite(a.total_s)]
    parts: list[Any] = [wrapped(head, width), _verdict(e, others), _table(e, width)]
    why = _why(e, others, width)
    if why:
        parts.append(why)
    parts += [f"note: {note}" for note in e.notes]
    return rendered(parts, width, only_ascii)


def _verdict(e: Any, others: list[Any]) -> str:
    if not others:
        late = any(a.proof == "bounded" for a in e.alternatives if not a.chosen)
        return f"No other layout {'had a plan in time: raise time_limit' if late else 'has a plan'}."
    best = min(others, key=lambda a: a.total_s)
    rank, extra = len(e.shape), best.total_s - e.total_s
    named = show.spec_text(best.spec, rank)
    if e.objective == "communication":
        extra = best.communication_s - e.communication_s
    if abs(extra) <= 1e-9 * abs(e.total_s):
        return f"{named} is exactly as good: the choice between them is free."
    if extra > 0:
        return f"The next best layout, {named}, costs {show.signed_seconds(extra)} per step."
    return f"{named} would save {show.seconds(-extra)} per step if only this tensor used it."


def _table(e: Any, width: int) -> Any:
    lines = []
    for a in e.alternatives:
        layout = ("* " if a.chosen else "  ") + show.spec_text(a.spec, len(e.shape))
        if not math.isfinite(a.total_s):
            late = a.proof == "bounded"
            sure = f">= {show.seconds(a.lower_bound_s)}" if late and a.lower_bound_s > 0 else a.proof
            lines.append([layout, "no plan in time" if late else "does not fit", "", "", "", sure])
            continue
        sure = a.proof if a.proof == "exact" else f">= {show.seconds(a.lower_bound_s)}"
        extra = show.signed_seconds(a.total_s - e.total_s)
        lines.append(
            [layout, show.seconds(a.total_s), extra, show.seconds(a.communication_s), size(a.peak_bytes), sure]
        )
    columns = ["layout", "best plan", "extra", "communication", "peak", "proof"]
    if room(width, columns, lines) < max(len(line[0]) for line in lines):
        columns, lines = [*columns[:3], columns[5]], [[*line[:3], line[5]] for line in lines]
    return table("Best plan under each layout (* the plan's own)", columns, lines)


def _why(e: Any, others: list[Any], width: int) -> str:
    lines = []
    for a in sorted(others, key=lambda a: a.total_s)[:4]:
        if not a.differences:
            continue
        lines.append(f"{show.spec_text(a.spec, len(e.shape))} instead:")
        lines += [wrapped(str(d), width, "  ") for d in a.differences[:3]]
        rest = a.compute_s - (e.total_s - e.communication_s)
        if abs(rest) > 1e-9 * e.total_s:
            lines.append(f"  {show.signed_seconds(rest)}: compute")
    return "\n".join(lines)

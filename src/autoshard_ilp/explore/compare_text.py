"""A comparison of two plans in tables."""

from __future__ import annotations

import math
from typing import Any

from autoshard_ilp.display.render import rendered, room, size, table, wrapped
from autoshard_ilp.explore import show

SHOWN = 30
SHOWN_COLLECTIVES = 8


def text(comparison: Any, width: int, *, only_ascii: bool = False) -> str:
    """The comparison as plain text; see :class:`autoshard_ilp.explore.compare.Comparison`."""
    c = comparison
    parts: list[Any] = [_verdict(c), _totals(c)]
    if c.tensors:
        parts.append(_tensors(c, width))
    if c.collectives:
        lines = [wrapped(str(d), width) for d in c.collectives[:SHOWN_COLLECTIVES]]
        rest = len(c.collectives) - SHOWN_COLLECTIVES
        lines += [f"and {rest} smaller differences"] if rest > 0 else []
        parts.append("Collectives, second minus first\n" + "\n".join(lines))
    parts += [f"note: {note}" for note in c.notes]
    return rendered(parts, width, only_ascii)


def _verdict(c: Any) -> str:
    count = sum(len(t.paths) for t in c.tensors)
    few = ("Every tensor lies the same way", "1 tensor lies differently")
    lies = few[count] if count < len(few) else f"{count} tensors lie differently"
    if abs(c.seconds) <= 1e-9 * c.first.cost.total_s:
        return f"{lies}; both plans take {show.seconds(c.first.cost.total_s)} per step."
    how = "slower" if c.seconds > 0 else "faster"
    return f"{lies}; the second plan is {show.seconds(abs(c.seconds))} per step {how} than the first."


def _totals(c: Any) -> Any:
    lines = []
    for name, a, b in c.totals():
        if not a and not b:
            continue
        is_time = name.endswith("_s")
        label = name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        cell = show.seconds if is_time else size
        change = show.signed_seconds(b - a) if is_time else show.signed_bytes(b - a)
        lines.append([label if is_time else f"memory: {label}", cell(a), cell(b), change])
    return table("Both plans", ("", "first", "second", "difference"), lines)


def _tensors(c: Any, width: int) -> Any:
    priced = any(t.best_s is not None for t in c.tensors)
    lines = []
    for t in c.tensors[:SHOWN]:
        rank = len(t.shape)
        layouts = [show.spec_text(t.spec, rank), show.spec_text(t.other_spec, rank)]
        price = _best(t) if priced else show.signed_seconds(t.alone_s)
        lines.append([t.name, *layouts, str(len(t.paths)), show.signed_bytes(t.bytes_per_device), price])
    columns = ["tensor", "first", "second", "n", "bytes", "this alone"]
    left = 3
    if room(width, columns, lines) < 30:
        lines = [[f"{x[0]}\n  {x[1]} -> {x[2]}", *x[3:]] for x in lines]
        columns, left = [columns[0], *columns[3:]], 1
    meaning = (
        "this alone: the best plan with just this difference, against the first plan."
        if priced
        else "this alone: only this changes and no other decision follows; price=True solves for the best plan."
    )
    if not priced and all(t.alone_s is None for t in c.tensors):
        columns, lines, meaning = columns[:-1], [x[:-1] for x in lines], ""
    rest = len(c.tensors) - SHOWN
    note = " ".join(x for x in (meaning, f"{rest} more differ." if rest > 0 else "") if x)
    return table("Tensors that lie differently", columns, lines, left=left, note=note)


def _best(t: Any) -> str:
    if t.best_s is None:
        return ""
    if math.isinf(t.best_s):
        return "does not fit"
    return show.signed_seconds(t.best_s) if t.proved else f"<= {show.signed_seconds(t.best_s)}"

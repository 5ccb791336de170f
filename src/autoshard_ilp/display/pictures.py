"""Small pictures of a plan in characters: how a tensor lies on a device, memory and work over the step.

Every picture has two alphabets, block elements and ASCII, for terminals and locales of either kind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from autoshard_ilp.course import COMPUTE, Course, Segment
from autoshard_ilp.sharding import Layout, shards_of_dims
from autoshard_ilp.units import format_bytes, format_seconds

KIND_LETTERS = {
    "all-gather": "g",
    "reduce-scatter": "s",
    "all-reduce": "r",
    "all-to-all": "t",
    "collective-permute": "p",
}
_LEFT = " ▏▎▍▌▋▊▉█"
_BELOW = " ▁▂▃▄▅▆▇█"
CELLS = 4
"""Characters per dimension of a tensor's picture."""


def held(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int], *, only_ascii: bool = False) -> str:
    """One bar per dimension: the part of it that one device holds, ``████ █░░░`` or ``#### #...``.

    Args:
        shape: of the whole tensor; a scalar has no picture.
        layout: see :mod:`autoshard_ilp.sharding`.
        axis_sizes: of the mesh.
    """
    bars = []
    for n in shards_of_dims(layout, len(shape), axis_sizes):
        eighths = max(1, round(8 * CELLS / n))
        if only_ascii:
            full, rest = divmod(eighths, 8)
            bars.append(
                (("#" * full or ":") + "." * CELLS)[:CELLS] if rest or not full else "#" * full + "." * (CELLS - full)
            )
        else:
            bars.append(_bar(eighths, CELLS, "░"))
    return " ".join(bars)


def _bar(eighths: int, cells: int, empty: str) -> str:
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_LEFT[rest] if rest else "")
    return text + empty * (cells - len(text))


def share(fraction: float, cells: int, *, only_ascii: bool = False) -> str:
    """A bar of at most ``cells`` characters; anything above zero shows."""
    fraction = min(max(fraction, 0.0), 1.0)
    if only_ascii:
        n = round(fraction * cells)
        return "#" * n or (":" if fraction > 0 else "")
    return _bar(max(round(fraction * 8 * cells), int(fraction > 0)), cells, "").rstrip()


def _columns(course: Course, values: Sequence[int], width: int) -> list[int]:
    """The largest value in each of ``width`` equal stretches of the step; an empty one goes on as the one before."""
    found: list[int | None] = [None] * width
    for at, value in zip(course.at_s, values, strict=True):
        i = min(int(at / course.seconds * width + 1e-6), width - 1) if course.seconds else 0
        found[i] = max(found[i] or 0, value)
    result: list[int] = []
    for stretch in found:
        result.append(stretch if stretch is not None else (result[-1] if result else 0))
    return result


def memory_curve(
    course: Course, budget: int | None, width: int, *, height: int = 8, only_ascii: bool = False
) -> list[str]:
    """Lines of a curve of bytes per device over the step, the budget a line across where it is near the peak.

    Args:
        course: of the plan; one without samples gives no lines.
        budget: bytes per device.
        width: columns, labels included.
        height: lines of the curve.
    """
    total = course.total_bytes()
    if not total or width < 24:
        return []
    peak = max(total)
    near = budget is not None and peak <= budget <= 2 * peak
    top = max(budget if near and budget else peak, 1)
    labels = {0: _short(top), height - 1: "0"}
    margin = max(map(len, labels.values()))
    columns = _columns(course, total, width - margin - 2)
    rule, corner = ("|", "+") if only_ascii else ("│", "└")
    lines = []
    for row in range(height):
        text = "".join(_cell(value / top * height - (height - 1 - row), only_ascii) for value in columns)
        if near and row == 0:
            text = "".join(c if c != " " else ("-" if only_ascii else "─") for c in text)
        lines.append(f"{labels.get(row, ''):>{margin}} {rule}{text}".rstrip())
    lines.append(" " * margin + f" {corner}" + phases(course, len(columns), only_ascii=only_ascii))
    return lines


def _short(n_bytes: int) -> str:
    return format_bytes(n_bytes).partition(" (")[0]


def _cell(level: float, only_ascii: bool) -> str:
    if level <= 0:
        return " "
    if only_ascii:
        return "#" if level >= 0.5 else "."
    return _BELOW[min(8, max(1, round(level * 8)))]


def phase_spans(course: Course) -> list[tuple[str, float, float]]:
    """(phase, start, end) in seconds, interleaved pieces of another phase within a long one left out."""
    spans: list[tuple[str, float, float]] = []
    small = 0.01 * course.seconds
    for s in course.segments:
        if spans and spans[-1][0] == s.phase:
            spans[-1] = (s.phase, spans[-1][1], s.end_s)
        else:
            spans.append((s.phase, s.start_s, s.end_s))
    merged: list[tuple[str, float, float]] = []
    for phase, start, end in spans:
        if len(merged) == 1 and merged[0][2] - merged[0][1] < small:
            merged = [(phase, merged[0][1], end)]
        elif merged and (merged[-1][0] == phase or end - start < small):
            merged[-1] = (merged[-1][0], merged[-1][1], end)
        else:
            merged.append((phase, start, end))
    return merged


def phases(course: Course, width: int, *, only_ascii: bool = False) -> str:
    """The phases of the step below a picture of ``width`` columns: ``forward────┴backward────``."""
    line, tick = ("-", "+") if only_ascii else ("─", "┴")
    cells = [line] * width
    for number, (phase, start, end) in enumerate(phase_spans(course)):
        i, j = (min(round(x / course.seconds * width), width) for x in (start, end))
        room = j - i - 1
        if number and i < width:
            cells[i] = tick
        if room >= len(phase):
            at = i + (1 if number else 0)
            cells[at : at + len(phase)] = phase
    return "".join(cells[:width])


def timeline(course: Course, width: int, *, only_ascii: bool = False) -> list[str]:
    """Lines of compute and of communication over the step.

    Compute is a bar per stretch, as high as its share of the stretch. Communication is the letter of the kind that
    takes most of it (:data:`KIND_LETTERS`), a dot where it takes less than a tenth; a capital where most of it runs
    behind compute.
    """
    margin = len("communication")
    n = width - margin - 2
    if not course.segments or n < 16:
        return []
    step = course.seconds / n
    spent, hidden = _spent(course.segments, n, step), _spent(course.hidden(), n, step)
    compute = "".join(_height(x.get(COMPUTE, 0.0) / step, only_ascii) for x in spent)
    letters = "".join(
        _letter(x, step) if _seconds(x) >= _seconds(y) else _letter(y, step).upper()
        for x, y in zip(spent, hidden, strict=True)
    )
    rule, corner = ("|", "+") if only_ascii else ("│", "└")
    used = {k for x in (*spent, *hidden) for k in x if k in KIND_LETTERS}
    behind = ["capitals: behind compute"] if any(hidden) else []
    legend = textwrap.wrap(", ".join([*(f"{KIND_LETTERS[k]} {k}" for k in KIND_LETTERS if k in used), *behind]), width)
    lines = [
        f"{'compute':>{margin}} {rule}{compute}",
        f"{'communication':>{margin}} {rule}{letters}",
        f"{format_seconds(course.seconds):>{margin}} {corner}{phases(course, n, only_ascii=only_ascii)}",
    ]
    return [*lines, *legend]


def _spent(segments: Sequence[Segment], n: int, step: float) -> list[dict[str, float]]:
    """Seconds by kind in each of ``n`` columns of ``step`` seconds."""
    spent: list[dict[str, float]] = [{} for _ in range(n)]
    for s in segments:
        i = min(int(s.start_s / step), n - 1)
        while i < n and s.end_s > i * step:
            overlap = min(s.end_s, (i + 1) * step) - max(s.start_s, i * step)
            if overlap > 1e-3 * step:
                spent[i][s.kind] = spent[i].get(s.kind, 0.0) + overlap
            i += 1
    return spent


def _seconds(spent: Mapping[str, float]) -> float:
    return sum(seconds for kind, seconds in spent.items() if kind in KIND_LETTERS)


def _height(fraction: float, only_ascii: bool) -> str:
    if fraction < 0.02:
        return " "
    return "_.:#"[min(3, int(fraction * 4))] if only_ascii else _BELOW[min(8, max(1, round(fraction * 8)))]


def _letter(seconds: Mapping[str, float], step: float) -> str:
    kinds = {k: s for k, s in seconds.items() if k in KIND_LETTERS}
    if not kinds:
        return " "
    kind = max(kinds, key=kinds.__getitem__)
    return KIND_LETTERS[kind] if sum(kinds.values()) >= 0.1 * step else "."

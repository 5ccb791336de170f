"""Drawings of the notebook page as inline SVG: no script, no font, no file from elsewhere.

Text and lines take the page's own colour (``currentColor``); only data has colours of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from autoshard_ilp.course import COMPUTE, Course, Segment, repeated_names
from autoshard_ilp.display.pictures import phase_spans
from autoshard_ilp.plots import colours
from autoshard_ilp.sharding import Layout, shards_of_dims
from autoshard_ilp.units import format_bytes, format_seconds

WIDTH = 840
"""Units of the wide drawings; the page scales them to its width."""
LEFT, RIGHT = 118, 12
ACCENT = colours.PARTS["parameters"]
MAX_CELLS = 16
CHARACTER = 6.6
"""Width of a letter of the drawings' font, at most."""


def short(n_bytes: float) -> str:
    """Bytes in one decimal unit."""
    return format_bytes(n_bytes).partition(" (")[0]


def _rect(x: float, y: float, w: float, h: float, fill: str, title: str = "", extra: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"{extra}>{inside}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor"{extra}/>'


def _svg(width: float, height: float, parts: Iterable[str], label: str, css: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg"'
        f' style="{css or f"width:100%;max-width:{width:g}px;height:auto"}">{"".join(parts)}</svg>'
    )


# -- one tensor --------------------------------------------------------------------------------------------------------


def shown_dims(shape: Sequence[int], shards: Sequence[int]) -> tuple[int, ...]:
    """The one or two dimensions to draw: sharded ones first, then large ones; in their own order."""
    order = sorted(range(len(shape)), key=lambda d: (-shards[d], -shape[d], d))
    return tuple(sorted(order[:2]))


def tensor(shape: Sequence[int], layout: Layout, axis_names: Sequence[str], axis_sizes: Sequence[int]) -> str:
    """A tensor cut into shards, the part of the first device filled; sheets behind it stand for copies.

    Args:
        shape: of the whole tensor, of rank 1 or more.
        layout: see :mod:`autoshard_ilp.sharding`.
    """
    shards = shards_of_dims(layout, len(shape), axis_sizes)
    dims = shown_dims(shape, shards)
    rows, columns = (1, shards[dims[0]]) if len(dims) == 1 else (shards[dims[0]], shards[dims[1]])
    rows, columns = min(rows, MAX_CELLS), min(columns, MAX_CELLS)
    other = math.prod(n for d, n in enumerate(shards) if d not in dims)
    copies = math.prod(axis_sizes) // math.prod(shards)
    width, height = 44.0, 12.0 if len(dims) == 1 else 26.0
    behind = min(2, copies - 1) if copies > 1 else 0
    parts = [
        _rect(1 + 3 * i, 7 - 3 * i, width, height, "none", extra=f' stroke="{ACCENT}" stroke-opacity="0.6"')
        for i in range(behind, 0, -1)
    ]
    for r in range(rows):
        for c in range(columns):
            opacity = ' fill-opacity="0.18"' if r or c else ""
            w, h = width / columns, height / rows
            parts.append(
                _rect(1 + c * w, 7 + r * h, w, h, ACCENT, extra=f'{opacity} stroke="{ACCENT}" stroke-width="0.6"')
            )
    cuts = zip(axis_names, axis_sizes, layout, strict=True)
    said = [f"{name} cuts dimension {dim} into {n}" for name, n, dim in cuts if dim >= 0]
    said.append(f"{copies} copies" if copies > 1 else "no copies")
    note = f"x{copies}" if copies > 1 else ""
    if other > 1:
        note += f" /{other}"
    if note:
        parts.append(_text(50 + 3 * behind, 7 + height / 2 + 3.5, note.strip(), extra=' font-size="10"'))
    parts.append(f"<title>{escape(', '.join(said))}</title>")
    box = 52 + 3 * behind + (CHARACTER * len(note) if note else 0)
    return _svg(box, 9 + height, parts, ", ".join(said), f"width:{box:.0f}px;max-width:none;height:{9 + height:.0f}px")


# -- the step ----------------------------------------------------------------------------------------------------------


class _Axis:
    """Seconds -> horizontal position, with ticks below."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds or 1.0

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.seconds

    def ticks(self, y: float) -> Iterator[str]:
        raw = self.seconds / 6
        power = 10 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        for i in range(int(self.seconds / step * 1.0001) + 1):
            x = self.x(i * step)
            yield _line(x, y, x, y + 4)
            anchor = "end" if x > WIDTH - RIGHT - 30 else "middle"
            yield _text(x, y + 16, format_seconds(i * step), anchor)

    def phases(self, course: Course, y: float, height: float) -> Iterator[str]:
        for phase, start, end in phase_spans(course):
            a, b = self.x(start), self.x(end)
            yield _line(a, y, a, y + height, ' stroke-opacity="0.35" stroke-dasharray="2 3"')
            if b - a > CHARACTER * len(phase):
                yield _text((a + b) / 2, y - 5, phase, "middle")


def memory(course: Course, budget: int | None) -> str:
    """Bytes per device over the step, stacked by part, with the budget and the peak; "" without samples."""
    total = course.total_bytes()
    if not total:
        return ""
    peak = max(total)
    near = budget is not None and peak <= budget <= 2.5 * peak
    top = 1.06 * max(budget if near and budget else peak, 1)
    axis, y0, height = _Axis(course.seconds), 24.0, 170.0

    def y(value: float) -> float:
        return y0 + height * (1 - value / top)

    parts: list[str] = []
    edges = [axis.x(t) for t in (*course.at_s, course.seconds)]
    edges[0] = axis.x(0.0)
    base = [0] * len(total)
    for name in [*colours.PARTS, *(n for n in course.held if n not in colours.PARTS)]:
        values = course.held.get(name)
        if values is None or not any(values):
            continue
        upper = [b + v for b, v in zip(base, values, strict=True)]
        there = [f"{edges[i + k]:.1f},{y(v):.1f}" for i, v in enumerate(upper) for k in (0, 1)]
        back = [f"{edges[i + k]:.1f},{y(v):.1f}" for i, v in reversed(list(enumerate(base))) for k in (1, 0)]
        title = f"<title>{escape(name)}, at most {short(max(values))}</title>"
        parts.append(f'<polygon points="{" ".join([*there, *back])}" fill="{colours.part(name)}">{title}</polygon>')
        base = upper
    parts += axis.phases(course, y0, height)
    at = (edges[course.peak_index()] + edges[course.peak_index() + 1]) / 2
    parts.append(f'<circle cx="{at:.1f}" cy="{y(peak):.1f}" r="3.5" fill="none" stroke="currentColor"/>')
    parts.append(_text(LEFT - 6, y(peak) + 4, short(peak), "end"))
    if near and budget:
        parts.append(_line(LEFT, y(budget), WIDTH - RIGHT, y(budget), ' stroke-dasharray="6 4"'))
        gap = y(peak) - y(budget)
        parts.append(_text(LEFT - 6, y(budget) + (4 if gap > 14 else gap - 10), f"budget {short(budget)}", "end"))
    parts += [_text(LEFT - 6, y0 + height, "0", "end"), _line(LEFT, y0 + height, WIDTH - RIGHT, y0 + height)]
    parts += axis.ticks(y0 + height)
    return _svg(WIDTH, y0 + height + 22, parts, f"memory over the step, peak {short(peak)}")


def timeline(course: Course) -> str:
    """What runs when: layers, compute, and communication by mesh axis, pale behind compute; "" without work."""
    if not course.segments:
        return ""
    axis, y0, lane, gap = _Axis(course.seconds), 24.0, 20.0, 7.0
    parts = []
    hidden = course.hidden()
    names = repeated_names(dict.fromkeys(s.layer for s in course.segments))
    groups = {g: colours.LAYERS[i % len(colours.LAYERS)] for i, g in enumerate(dict.fromkeys(names.values()))}
    lanes: list[tuple[str, list[Segment], Callable[[Segment], str]]] = [
        ("layer", list(course.segments), lambda s: groups[names[s.layer]] if s.layer else colours.OTHER),
        (COMPUTE, [s for s in course.segments if s.kind == COMPUTE], lambda s: colours.kind(s.kind)),
    ]
    for axes in dict.fromkeys(s.axes for s in course.segments if s.kind != COMPUTE):
        lanes.append((f"over {axes}", [s for s in course.segments if s.axes == axes], lambda s: colours.kind(s.kind)))
    height = len(lanes) * (lane + gap) - gap
    for number, (label, segments, colour) in enumerate(lanes):
        y = y0 + number * (lane + gap)
        cut = int((LEFT - 8) / CHARACTER)
        parts.append(_text(LEFT - 6, y + lane - 6, label if len(label) <= cut else label[: cut - 1] + "…", "end"))
        by_layer = number == 0
        for a, b, fill, title in _boxes(segments, axis, colour, by_layer):
            parts.append(_rect(a, y, b - a, lane, fill, title if b - a > 2.5 else ""))
        for a, b, fill, title in _boxes([s for s in hidden if label == f"over {s.axes}"], axis, colour, False):
            parts.append(_rect(a, y, b - a, lane, fill, f"{title}, behind compute", ' fill-opacity="0.45"'))
    parts += _layer_names(course.segments, names, axis, y0 + lane - 6)
    parts += axis.phases(course, y0, height)
    parts.append(_line(LEFT, y0 + height + 2, WIDTH - RIGHT, y0 + height + 2))
    parts += axis.ticks(y0 + height + 2)
    return _svg(WIDTH, y0 + height + 24, parts, f"timeline of the step, {format_seconds(course.seconds)}")


def _layer_names(segments: Iterable[Segment], names: dict[str, str], axis: _Axis, y: float) -> Iterator[str]:
    """Names over stretches of one layer, or of repeated layers, that are wide enough."""
    spans: list[tuple[str, float, float]] = []
    for s in segments:
        name, right = names[s.layer] or "other", axis.x(s.end_s)
        if spans and (spans[-1][0] == name or right - axis.x(s.start_s) < 1):
            spans[-1] = (spans[-1][0], spans[-1][1], right)
        else:
            spans.append((name, axis.x(s.start_s), right))
    for name, left, right in spans:
        if right - left > CHARACTER * len(name) + 4:
            yield _text((left + right) / 2, y, name, "middle", ' class="ap-on"')


def _boxes(
    segments: Iterable[Segment], axis: _Axis, colour: Callable[[Segment], str], by_layer: bool
) -> Iterator[tuple[float, float, str, str]]:
    """(left, right, fill, title) per run of equal segments; what is narrower than a pixel joins its neighbour."""
    a = b = 0.0
    fill = title = ""
    for s in segments:
        left, right = axis.x(s.start_s), axis.x(s.end_s)
        text = s.layer or "other" if by_layer else f"{s.kind} {s.layer}".strip()
        touches = bool(fill) and left - b < 0.7
        if touches and ((text == title or (not by_layer and colour(s) == fill and b - a < 2)) or right - left < 0.5):
            b = max(b, right)
            continue
        if fill:
            yield a, max(b, a + 0.5), fill, title
        a, b, fill, title = left, right, colour(s), text
    if fill:
        yield a, max(b, a + 0.5), fill, title

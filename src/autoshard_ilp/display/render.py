"""Tables as plain text, for terminals of any width and locale (rendered by rich)."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from autoshard_ilp.units import format_bytes

GAP = 3
"""Columns between two cells of a table."""


def table(
    title: str,
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    left: int = 1,
    after: int = 0,
    note: str = "",
) -> Any:
    """A table without vertical lines.

    Args:
        title: above the table.
        columns: their headings.
        lines: cells.
        left: that many first columns are text, the others figures.
        after: that many last columns are text as well.
        note: below the table.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(columns):
        made.add_column(name, justify="right" if left <= position < len(columns) - after else "left", overflow="fold")
    for cells in lines:
        made.add_row(*cells)
    return Group(Text(title, style="bold"), made, *([Text(note)] if note else []))  # a caption would wrap early


def titled(title: str, lines: Iterable[str]) -> Any:
    """Lines of characters that must not be wrapped or folded, under a title."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), Text(""), *(Text(line, no_wrap=True, overflow="crop") for line in lines))


def room(width: int, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Columns that are left for the first cell of a table of this width."""
    widest = [max(len(text) for text in texts) for texts in list(zip(columns, *lines, strict=True))[1:]]
    return width - sum(widest) - GAP * len(widest) - 2


def wrapped(path: str, width: int, indent: str = "") -> str:
    """A path in lines of at most ``width`` columns, broken after ``/`` or a space, or ``_`` where a part is longer."""
    limit = max(width, 16)
    lines = [indent]
    for part in re.findall(r".+?(?:[/ ]|$)", path):
        pieces = re.findall(r".+?(?:_|$)", part) if len(part) + len(indent) + 4 > limit else [part]
        for piece in pieces:
            if lines[-1].strip() and len(lines[-1]) + len(piece.rstrip()) > limit:
                lines.append(indent + "    ")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def size(n_bytes: float) -> str:
    """Bytes in one decimal unit."""
    return format_bytes(n_bytes).partition(" (")[0]


def distinct_sizes(n_bytes: Sequence[int]) -> list[str]:
    """Each in one decimal unit, all with as many digits (rounded up) as tell different sizes apart."""
    shown = [size(n) for n in n_bytes]
    scale, unit = next(
        ((s, u) for s, u in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if max(n_bytes) >= s), (1, "B")
    )
    for digits in range(2, 10):
        if len(set(shown)) == len(set(n_bytes)):
            break
        shown = [f"{math.ceil(n * 10**digits / scale) / 10**digits:.{digits}f} {unit}" for n in n_bytes]
    return shown


def only_ascii() -> bool:
    """Whether standard output takes no block elements: any encoding but UTF-8 and its kin."""
    return not _encoding().lower().startswith("utf")


def printable(text: str) -> str:
    """A text that standard output can hold, a question mark for every letter that it cannot."""
    return text.encode(_encoding(), "replace").decode(_encoding())


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


class _Ascii(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]  # rich draws its lines with what this can hold


def rendered(parts: Iterable[Any], width: int, only_ascii: bool = False) -> str:
    """Tables and texts as lines of plain text.

    Args:
        parts: rich renderables, or texts.
        width: in columns.
        only_ascii: draw lines with ASCII characters, for locales that have no others.
    """
    from rich.console import Console

    texts = []
    for part in parts:
        out = _Ascii() if only_ascii else io.StringIO()
        options: dict[str, Any] = {"color_system": None, "markup": False, "highlight": False, "legacy_windows": False}
        options["force_jupyter"] = False  # in a notebook rich would show the text as well as return it
        Console(file=out, width=width, **options).print(part)
        texts.append("\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n"))
    return "\n\n".join(texts) + "\n"

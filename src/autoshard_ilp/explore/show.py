"""What the answers share: records as data frames and HTML, seconds and layouts as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from autoshard_ilp.units import format_seconds


def dataframe(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Records as a ``pandas.DataFrame``; ImportError says what to install."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError('This needs pandas: pip install "autoshard-ilp[notebook]".') from error
    return pandas.DataFrame(list(records), columns=None if columns is None else list(columns))


def html_block(text: str) -> str:
    """Plain text for a notebook, in the page's own colours."""
    return f'<pre style="line-height:1.25;overflow-x:auto">{escape(text)}</pre>'


def seconds(value: float | None) -> str:
    """A time, or nothing where there is none."""
    return "" if value is None or not math.isfinite(value) else format_seconds(value)


def signed_seconds(value: float | None) -> str:
    """A difference of times: "+1.20 ms", "-3.00 us", "same"."""
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) < 1e-12:
        return "same"
    return ("+" if value > 0 else "-") + format_seconds(abs(value))


def signed_bytes(value: float) -> str:
    """A difference of sizes: "+1.2 GB"."""
    from autoshard_ilp.display.render import size

    return "same" if abs(value) < 1 else ("+" if value > 0 else "-") + size(abs(value))


def spec_text(spec: Sequence[Any], rank: int) -> str:
    """A PartitionSpec as in a plan's summary: one entry per dimension, "-" for a whole one."""
    entries = [*spec, *[None] * (rank - len(spec))]
    parts = ["-" if e is None else e if isinstance(e, str) else "+".join(e) for e in entries]
    return "(" + ", ".join(parts) + ")"


def plain_spec(spec: Sequence[Any]) -> list[Any]:
    """A PartitionSpec as JSON."""
    return [list(e) if isinstance(e, tuple) else e for e in spec]


def finite(value: float) -> float | None:
    """A number, or None for infinities and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None

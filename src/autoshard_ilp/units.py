"""Sizes and times as text: strict parsing, readable printing."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from autoshard_ilp.errors import InputShapeError

_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = _DECIMAL | _BINARY
_SIZE = re.compile(rf"([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?) ?({'|'.join(_UNITS)})")
_RULE = (
    "A size in bytes is a positive int, or a number followed by one of kB, MB, GB, TB (powers of 1000) "
    "or KiB, MiB, GiB, TiB (powers of 1024), such as '16GB' or '1.5 GiB'."
)


def parse_bytes(text: str | int) -> int:
    """Bytes of a size given as text or as a whole number.

    Args:
        text: ``"16GB"`` is 16 * 10**9 bytes, ``"16GiB"`` is 16 * 2**30; decimals and one space are allowed.
            An ``int`` (or anything that converts losslessly with ``__index__``, such as ``numpy.int64``) is bytes.

    Returns:
        Whole bytes, at least 1; a fraction of a byte is dropped.

    Raises:
        InputShapeError: anything else, such as ``"16Gb"`` (bits?), ``"16GB/s"`` (a rate), 0, negative, bool or float.
    """
    if isinstance(text, str):
        found = _SIZE.fullmatch(text)
        size = int(Decimal(found[1]) * _UNITS[found[2]]) if found else 0
    else:
        size = _whole_number(text)
    if size < 1:
        raise InputShapeError(f"{_RULE} Received: {text!r}.")
    return size


def _whole_number(value: Any) -> int:
    """``value`` as an int, or 0 when it is no whole number (a bool is a mistake, not one byte)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return 0
    try:
        return int(value.__index__())
    except TypeError:  # arrays have __index__ but refuse
        return 0


def _scaled(n: float, units: dict[str, int]) -> str:
    """``n`` bytes in the largest unit that leaves at least one, or in plain bytes."""
    fitting = [(size, unit) for unit, size in units.items() if abs(n) >= size]
    if not fitting:
        return f"{n:.0f} B"
    size, unit = max(fitting)
    return f"{n / size:.1f} {unit}"


def format_bytes(n: float) -> str:
    """``16000000000`` as ``"16.0 GB (14.9 GiB)"``: both readings, because a factor of 1.07 has fooled many.

    Args:
        n: bytes; below 1000 only the plain count is printed.
    """
    decimal = _scaled(n, _DECIMAL)
    return decimal if abs(n) < 1000 else f"{decimal} ({_scaled(n, _BINARY)})"


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it: ``"12.3 ms"``, ``"850 ns"``, ``"2.50 s"``, ``"1 h 05 min"``."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size >= 3600:
        minutes = round(size / 60)
        return f"{'-' if seconds < 0 else ''}{minutes // 60} h {minutes % 60:02d} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        # 0.9995 so that 999.6 us is printed as 1.00 ms, not as 1000 us
        if size >= 0.9995 * scale or unit == "ns":
            value = seconds / scale
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{seconds:g} s"

"""Sizes and times as text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.1 kB", 100),
        ("80MB", 80 * 10**6),
        ("512MiB", 512 * 2**20),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        (1, 1),
        (10**12, 10**12),
        (np.int64(7), 7),
    ],
)
def test_sizes_are_read_exactly(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("16 bananas", "16Gb", "16GB/s", "", " ", "GB", "-1GB", "16", "16  GB", " 16GB", "16GB ", "16gb", "16KB"),
        *("1e3GB", "1,5GB", ".5GB", "5.GB", "0GB", "0.0001kB", "nan", "nanGB", "infGB", "16GB\n", "١٦GB", "16G"),
        *(0, -1, True, False, 1.5, float("nan"), None, b"16GB", [16], np.array([1, 2])),
    ],
)
def test_anything_else_is_refused_with_the_rule(text: object) -> None:
    with pytest.raises(InputShapeError, match=r"powers of 1000.*powers of 1024.*Received"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_bytes_are_printed_in_both_readings() -> None:
    assert format_bytes(16 * 10**9) == "16.0 GB (14.9 GiB)"
    assert format_bytes(16 * 2**30) == "17.2 GB (16.0 GiB)"
    assert format_bytes(999) == "999 B"
    assert format_bytes(1000) == "1.0 kB (1000 B)"
    assert format_bytes(0) == "0 B"
    assert format_bytes(-2_000_000) == "-2.0 MB (-1.9 MiB)"


@given(st.integers(1, 10**15))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_printed_sizes_can_be_read_again(size: int) -> None:
    printed = format_bytes(size)
    if size < 1000:
        assert printed == f"{size} B"
    else:
        assert parse_bytes(printed.split(" (")[0]) == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (8.5e-7, "850 ns"),
        (1.5e-6, "1.50 us"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (2.5, "2.50 s"),
        (-2.5, "-2.50 s"),
        (125.0, "125 s"),
        (3900, "1 h 05 min"),
        (3.2e-10, "0.32 ns"),
    ],
)
def test_seconds_are_printed_in_a_fitting_unit(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected

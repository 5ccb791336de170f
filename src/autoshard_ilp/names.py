"""Names that differ in numbers only, as those of repeated layers do, and the one name that stands for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """A name with ``*`` for every number: equal for names that differ in numbers only."""
    return NUMBER.sub("*", name)


def common(names: Iterable[str]) -> str:
    """One name for names of one :func:`pattern`: ``*`` for the numbers that differ, the others as they are."""
    found = list(dict.fromkeys(names))
    numbers = zip(*(NUMBER.findall(name) for name in found), strict=True)
    parts = iter([same[0] if len(set(same)) == 1 else "*" for same in numbers])
    return NUMBER.sub(lambda _: next(parts), found[0])

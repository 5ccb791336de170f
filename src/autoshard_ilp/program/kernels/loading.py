"""Seconds spent on compiling kernels or loading solvers, once per machine or process: no limit of time counts them."""

from __future__ import annotations

import time
from collections.abc import Callable

_loaded = [0.0]


def loaded_seconds() -> float:
    """Seconds of this process so far; what a clock that began at some moment has lost is a difference of two."""
    return _loaded[0]


def clock() -> float:
    """Monotonic seconds without those: what limits of time, and what was learnt of how long things take, go by."""
    return time.monotonic() - loaded_seconds()


def load(what: Callable[[], object]) -> float:
    """Call ``what``, which does nothing when called again, and count its time.

    Returns:
        The seconds that took.
    """
    since = time.monotonic()
    what()
    seconds = time.monotonic() - since
    _loaded[0] += seconds
    return seconds

"""Python's cyclic garbage collector, kept quiet while large structures are built.

A traced step is millions of small objects, nearly all of which stay alive. The collector walks all of them each time
their number has grown by a quarter and finds nothing: a third of the time from call to cost table.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1
"""Collections of middle-aged objects before one of the old: the largest number that the interpreter takes."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection inside; nested use and a collector that was off before are both left as they were.

    What was made inside is old at the end: as young objects, all would be walked at once by the next collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else somebody keeps objects frozen, which this would thaw
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, without a walk
            gc.enable()


@contextmanager
def old_objects_left() -> Iterator[None]:
    """Inside, collections look at young objects only: what has survived some of them is left until afterwards."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)

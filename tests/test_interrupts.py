"""Ctrl-C in a callback of Python's collector, where Python prints and forgets exceptions."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autoshard_ilp.interrupts import dropped_come_again
from autoshard_ilp.progress import Progress


@pytest.fixture
def interrupted_collector() -> Iterator[None]:
    """The next collection is interrupted, once."""
    left = [1]

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and left:
            left.pop()
            raise KeyboardInterrupt

    gc.callbacks.append(callback)
    yield
    gc.callbacks.remove(callback)


def test_an_interrupt_that_python_drops_comes_again(interrupted_collector: None) -> None:
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), Progress(False).running():
        gc.collect()
        time.sleep(10)
    assert sys.unraisablehook is before


def test_other_dropped_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda event: seen.append(event.exc_type))

    class Fails:
        def __del__(self) -> None:
            raise ZeroDivisionError

    with dropped_come_again():
        one = Fails()
        del one
        gc.collect()
    assert seen == [ZeroDivisionError]


def test_other_threads_leave_the_hook_alone() -> None:
    found, before = list[Any](), sys.unraisablehook

    def run() -> None:
        with dropped_come_again():
            found.append(sys.unraisablehook)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]

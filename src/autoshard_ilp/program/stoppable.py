"""Work in C++ in a thread of its own, so that Ctrl-C reaches Python and stops it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.2


def run_stoppable(
    name: str, work: Callable[[], T], stop: Callable[[], object], patience: float = math.inf
) -> tuple[T | None, bool]:
    """The result of ``work()``, and whether Ctrl-C came meanwhile.

    Args:
        name: of the thread.
        work: what it raises is raised here.
        stop: asks ``work`` to end; called again while it does not (a first call may come before it has begun).
        patience: seconds to wait for that; the result is None when they are over, and ``work`` is left to itself.
    """
    found: list[T] = []
    raised: list[BaseException] = []
    finished = threading.Event()  # not ``Thread.join``, after whose interruption a thread counts as ended

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)
        finally:
            finished.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    interrupted, deadline = False, math.inf
    while True:
        try:
            if interrupted:
                stop()
            if finished.wait(POLL_SECONDS):
                break
            if time.monotonic() > deadline:
                return None, True
        except KeyboardInterrupt:
            interrupted, deadline = True, min(deadline, time.monotonic() + patience)
    if raised:
        raise raised[0]
    return found[0], interrupted

"""Interrupts that Python drops come again.

An exception in a callback of Python's collector (JAX has one) or in a destructor is printed and forgotten, and so is a
Ctrl-C that arrives in one: long work would go on as if nothing had been pressed.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 0.05
"""After which a dropped interrupt comes again."""


def interrupt_again() -> None:
    """Soon, and to the main thread: a signal that another thread raises would not end its waiting."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, [main, signal.SIGINT])
    timer.daemon = True
    timer.start()


@contextmanager
def dropped_come_again() -> Iterator[None]:
    """No interrupt is lost while the block runs in the main thread; other dropped exceptions are reported as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = sys.unraisablehook

    def once_more(event: Any) -> None:
        if issubclass(event.exc_type, KeyboardInterrupt):
            interrupt_again()
        else:
            ignored(event)

    sys.unraisablehook = once_more
    try:
        yield
    finally:
        sys.unraisablehook = ignored

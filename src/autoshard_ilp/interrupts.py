"""Interrupts that Python drops come again, and those that would lose something wait.

An exception in a callback of Python's collector (JAX has one) or in a destructor is printed and forgotten, and so is a
Ctrl-C that arrives in one: long work would go on as if nothing had been pressed.

A training step gives its variables away and returns new ones. A Ctrl-C in between would leave a model without any, so
it waits from :func:`hold` to :func:`release`; a second one does not.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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


class _Held:
    """In place of Python's handler of SIGINT.

    Attributes:
        handler: the one that comes back.
        came: whether a signal waits for it.
    """

    def __init__(self, handler: Any) -> None:
        self.handler, self.came = handler, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.handler(number, frame)
        self.came = True


_held: _Held | None = None


def hold() -> None:
    """From here to :func:`release` an interrupt of the main thread waits; nothing where one waits already.

    Other threads are not interrupted, nor is a process whose SIGINT Python does not handle.
    """
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        _held = _Held(handler)
        signal.signal(signal.SIGINT, _held)


def release() -> None:
    """Ends :func:`hold`.

    Raises:
        KeyboardInterrupt: or what else the handler does; an interrupt came meanwhile.
    """
    global _held
    if _held is None or threading.current_thread() is not threading.main_thread():
        return
    held, _held = _held, None
    now: Any = signal.getsignal(signal.SIGINT)
    if now is held:
        signal.signal(signal.SIGINT, held.handler)
    if held.came:
        signal.raise_signal(signal.SIGINT)

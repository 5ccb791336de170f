"""Progress of long stages: a spinner with the stage's name and figures on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.interrupts import dropped_come_again


class Progress:
    """Times the stages of one run and shows them where somebody watches.

    Args:
        show: True or False; None: only on a terminal or in a notebook; a callable receives
            ``{"stage": ..., "seconds": ..., ...}`` instead.
    """

    def __init__(self, show: bool | Callable[[dict[str, Any]], None] | None = None) -> None:
        if not (show is None or isinstance(show, bool) or callable(show)):
            raise InputShapeError(f"progress is True, False, None or a callable of one dictionary. Received: {show!r}.")
        self.seconds: dict[str, float] = {}
        self._call = show if callable(show) else None
        watched = sys.stderr.isatty() or _in_notebook()
        self._draw = self._call is None and (watched if show is None else bool(show))
        self._status: Any = None
        self._stage = ""

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """Shows the spinner while the block runs, in which no interrupt is lost."""
        if not self._draw:
            with dropped_come_again():
                yield self
            return
        with dropped_come_again(), _notebook_line() if _in_notebook() else _terminal_line() as status:
            self._status = status
            try:
                yield self
            finally:
                self._status = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage under ``name``; repeated stages add up."""
        self._stage = name
        self.tell({"stage": name})
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def tell(self, news: dict[str, Any]) -> None:
        """Passes on what a stage reports about itself."""
        if self._call is not None:
            self._call(dict(news))
        if self._status is not None:
            figures = [f"{k} {v:.4g}" for k, v in news.items() if isinstance(v, float) and abs(v) < 1e300]
            self._status.update(" ".join([str(news.get("stage", self._stage)), *figures]))


def _in_notebook() -> bool:
    """Whether a kernel shows what is displayed; IPython on a terminal is a terminal."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


def _terminal_line() -> Any:
    from rich.console import Console

    return Console(stderr=True).status("planning")


class _Line:
    """One line of a notebook's output that is written over; no widgets are needed."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def update(self, text: str) -> None:
        """Shows another text."""
        self._handle.update({"text/plain": text}, raw=True)


@contextmanager
def _notebook_line() -> Iterator[_Line]:
    from IPython.display import display

    began = time.perf_counter()
    line = _Line(display({"text/plain": "planning"}, raw=True, display_id=True))
    try:
        yield line
    finally:
        line.update(f"{time.perf_counter() - began:.1f} s of planning")

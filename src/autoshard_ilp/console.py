"""What every command of the command line shares: exit codes, printing for any locale, quiet native libraries."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TextIO, TypeVar

import typer

from autoshard_ilp.display.render import only_ascii as only_ascii
from autoshard_ilp.display.render import printable
from autoshard_ilp.errors import AutoshardError, InfeasibleError, InputShapeError
from autoshard_ilp.files import write_whole
from autoshard_ilp.interrupts import dropped_come_again, interrupt_again

INFEASIBLE, BAD_INPUT, FAULT, INTERRUPTED = 1, 2, 3, 130
"""Exit codes other than 0."""

P = ParamSpec("P")
R = TypeVar("R")


class _Interrupts:
    """Handler of SIGINT that remembers: a library interrupted while it loads raises an error of its own instead.

    A compiled extension does not even survive an exception in the middle of its loading, so there it comes later.
    """

    seen = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if loads_extension(frame):
            interrupt_again()
            return
        raise KeyboardInterrupt


def loads_extension(frame: FrameType | None) -> bool:
    """Whether a compiled extension is being loaded in this frame or below."""
    while frame is not None:
        loader = frame.f_locals.get("self") if frame.f_code.co_name in ("create_module", "exec_module") else None
        if isinstance(loader, ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed during a command."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, _Interrupts) and handler.seen


@contextlib.contextmanager
def _remembering_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    replaces = before in (signal.default_int_handler, signal.SIG_DFL)
    if not replaces or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _Interrupts())

    def printed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """An extension that is interrupted while it loads prints the error and goes on."""
        if not issubclass(kind, KeyboardInterrupt):
            uncaught(kind, error, trace)

    uncaught, sys.excepthook = sys.excepthook, printed
    try:
        with dropped_come_again():
            yield
    except Exception as error:
        if was_interrupted() and not isinstance(error, typer.Exit | typer.Abort):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.excepthook = uncaught
        signal.signal(signal.SIGINT, before)


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turns errors into one message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _remembering_interrupts():
                return command(*args, **kwargs)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except InfeasibleError as error:
            say(f"infeasible: {error}")
            raise typer.Exit(INFEASIBLE) from None
        except AutoshardError as error:
            say(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get("AUTOSHARD_TRACEBACK"):
                raise
            say(f"unexpected {type(error).__name__}: {error}\nSet AUTOSHARD_TRACEBACK=1 to see where it came from.")
            raise typer.Exit(FAULT) from None

    return run


def reserve_streams() -> None:
    """Standard streams that the shell closed lead nowhere: else the next file opened gets what libraries print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # as long as the process lives


def say(message: str) -> None:
    """One message on stderr, whatever the locale can print."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    try:
        print(message.encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)
    except OSError:  # nobody reads it: the exit code must do
        lead_nowhere(sys.stderr)


def print_text(text: str) -> None:
    """A result on stdout, whatever the locale can print."""
    _printed(printable(text))


def print_json(data: Any) -> None:
    """One JSON document on stdout; numbers that JSON does not have become null."""
    _printed(json.dumps(_finite(data), allow_nan=False, indent=2))


def _printed(text: str) -> None:
    """All of it, now: what fails only when Python ends would be no error of ours."""
    try:
        print(text, flush=True)
    except OSError as error:
        lead_nowhere(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # a reader such as head that has seen enough is no error
            raise InputShapeError(f"Results go to stdout, which must take them. Received: {error}.") from error


def lead_nowhere(stream: TextIO) -> None:
    """A stream that takes nothing: what is in its buffer would fail once more when Python ends."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def keep(path: Path, data: bytes) -> None:
    """Writes a file that the user asked for; InputShapeError where that is impossible."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise InputShapeError(
            f"Results are written to a file that can be written. Received: {path} ({error})."
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def width() -> int:
    """Columns of the terminal (or of COLUMNS); 120 where output is no terminal."""
    return max(40, shutil.get_terminal_size((120, 40)).columns)


def prepare() -> None:
    """Planning needs no device; Keras must run on JAX; native libraries shall keep to themselves."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    with quiet_native_logs():  # JAX's plugins for GPUs say while they load that there is none
        from autoshard_ilp import _jax_compat  # noqa: F401


_NATIVE_NOISE = re.compile(rb"([IW]\d{4} \d|\d{4}-\d\d-\d\d .*: [IW] |WARNING: All log messages before absl)")


@contextlib.contextmanager
def quiet_native_logs() -> Iterator[None]:
    """Holds back what native libraries write to stderr and drops their notes and warnings.

    Abseil's logging writes to file descriptor 2 before it reads any setting. The rest is passed on afterwards.
    """
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError):
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in () if was_interrupted() else held:
                if not _NATIVE_NOISE.match(line):
                    os.write(2, line)

"""Imports OR-Tools so that it survives next to TensorFlow.

TensorFlow (which KerasHub imports) loads its libraries with global symbols. OR-Tools brings other versions of the same
C++ libraries (Abseil, Protocol Buffers); imported later, it would bind to TensorFlow's and crash in the first model or
at exit (seen with ortools 9.15 after tensorflow 2.21: segmentation fault). ``RTLD_DEEPBIND`` makes a library look up
its own symbols first; see dlopen(3). It exists on Linux with glibc, the only place where the conflict arises.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_LOADING = threading.RLock()  # what another thread is still importing is in sys.modules already, half made


def load_cp_model() -> Any:
    """The module ``ortools.sat.python.cp_model``, loaded safely whatever was imported before."""
    return _load("ortools.sat.python.cp_model")


def load_mathopt() -> Any:
    """The module ``ortools.math_opt.python.mathopt``, loaded in the same way."""
    return _load("ortools.math_opt.python.mathopt")


def load_solve_interrupter() -> Any:
    """The module ``ortools.util.python.solve_interrupter``, loaded in the same way."""
    return _load("ortools.util.python.solve_interrupter")


def _load(name: str) -> Any:
    with _LOADING:
        if name in sys.modules:
            return sys.modules[name]
        deep = getattr(os, "RTLD_DEEPBIND", 0)
        if not deep:
            return importlib.import_module(name)
        flags = sys.getdlopenflags()
        sys.setdlopenflags(flags | deep)
        try:
            return importlib.import_module(name)
        finally:
            sys.setdlopenflags(flags)


_SILENCE = threading.RLock()  # one thread at a time: file descriptors are those of the whole process


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Drops what native code prints to standard output meanwhile.

    HiGHS (in OR-Tools 9.15) prints names of its functions ("HighsMipSolverData::transformNewInteger...") whatever
    its parameters say; they would stand in front of the JSON that a command prints.
    """
    buffers = ctypes.CDLL(None)
    with _SILENCE:
        try:
            sys.stdout.flush()
            buffers.fflush(None)
            kept = os.dup(1)
        except (OSError, ValueError, AttributeError):  # there is no standard output
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        try:
            yield
        finally:
            buffers.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)

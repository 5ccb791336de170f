"""One process at a time compiles kernels: what Numba keeps in files is not made for two that write at once.

Numba numbers the files of a kernel's signatures, and two processes that compile different signatures of one kernel can
give them the same number; the next to read them calls code made for other arrays, and crashes
(https://github.com/numba/numba/issues/4807). Who waits finds everything compiled, and reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from autoshard_ilp.program.kernels.messages import descend

PATIENCE_SECONDS = 120.0
"""Longest wait for another process, which has 25 s of work at most: one that hangs must not stop a plan."""


@contextlib.contextmanager
def alone(stage: str) -> Iterator[None]:
    """The time in which the kernels of a stage are compiled or read: no other process of this cache does so meanwhile.

    Where there is no cache, or no locks for its files, there is nothing to wait for. Who needs one stage does not wait
    for another, of other kernels: a process that compiles all of them (:mod:`ahead`) is then at the next one.
    """
    folder = cache_folder()
    if folder is None:
        yield
        return
    lock = FileLock(folder / f"autoshard_ilp.{stage}.lock", timeout=PATIENCE_SECONDS)
    with contextlib.suppress(OSError, NotImplementedError):  # TimeoutError is one of the former
        lock.acquire()
    try:
        yield
    finally:
        lock.release()  # does nothing where it is not held


def cache_folder(kernel: Any = descend) -> Path | None:
    """Where Numba keeps a kernel compiled; None where it is switched off, and nothing is compiled."""
    stats = getattr(kernel, "stats", None)
    return Path(stats.cache_path) if stats is not None and stats.cache_path else None

"""The bound of a chain of layers, from a second process that works while this one goes on.

A chain can be bounded as soon as its program is there, before the program with shared decisions is solved. The process
takes one program after the other, by pipes, and ends with its pipe. Where there is none (one processor, a process of a
pool, no interpreter to be had), or it gives up, there is no answer, and whoever asks computes the bound in place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import threading
import time
from typing import BinaryIO

import numpy as np

from autoshard_ilp.program.interpreter import begin_python
from autoshard_ilp.program.kernels.compiled import load_kernels, load_windows
from autoshard_ilp.program.model import Program
from autoshard_ilp.program.repeated.chain import ChainBound, chain_bound
from autoshard_ilp.program.repeated.repeats import Alike, copies_in

POLL_SECONDS = 0.2

_CODE = """
import os
import sys
from autoshard_ilp.program.repeated.beside import serve
if hasattr(os, "nice"):
    os.nice(10)  # who looks for the plan comes first where processors are few
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever prints does not print into the answers
serve(sys.stdin.buffer, answers)
"""


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer one job after the other until their pipe is closed: what the second process does."""
    load_kernels()
    load_windows()
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(_bound(*job), answers)
        answers.flush()


def _bound(program: Program, alike: Alike, known: np.ndarray | None, seconds: float) -> ChainBound | None:
    until = time.monotonic() + seconds
    return chain_bound(program, alike.edges, copies_in(program, alike), known, lambda cells: until)


class Job:
    """A program that the second process has been given."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._found: ChainBound | None = None

    def run(self, process: subprocess.Popen[bytes], what: tuple[object, ...]) -> None:
        """Write the job and read its answer, in a thread of their own."""
        try:
            assert process.stdin is not None and process.stdout is not None
            pickle.dump(what, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            self._found = pickle.load(process.stdout)
        except (
            OSError,
            ValueError,
            EOFError,
            MemoryError,
            pickle.PickleError,
        ):  # ended, its pipes closed, or too large
            pass
        finally:
            self.ended.set()

    def answer(self, seconds: float) -> ChainBound | None:
        """The bound, waited for so long at most; None where there is none."""
        until = time.monotonic() + seconds
        while not self.ended.wait(POLL_SECONDS):  # short, so that Ctrl-C is heard
            if time.monotonic() > until:
                return None
        return self._found


class Beside:
    """The second process, begun where it is first wanted; a context in which it may be."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._none = not _may_begin()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> None:
        """Begin the process, which loads what it needs; nothing where there is one, or none may be."""
        if self._process is not None or self._none:
            return
        self._process = begin_python(_CODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._none = self._process is None

    def begin(self, program: Program, alike: Alike, known: np.ndarray | None, seconds: float) -> Job | None:
        """Give the process a program instead of what it may be working on; None where there is no process.

        Args:
            program, alike, known: as for :func:`~autoshard_ilp.program.repeated.whole.solve_repeated`.
            seconds: that it may take.
        """
        if self._job is not None and not self._job.ended.is_set():
            self._end()
        self.start()
        if self._process is None:
            return None
        self._job = Job()
        what = program, alike, known, seconds
        threading.Thread(target=self._job.run, args=(self._process, what), name="chain beside", daemon=True).start()
        return self._job

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None and (self._job is None or self._job.ended.wait(POLL_SECONDS)):
                    pipe.close()
        process.wait()


_kept_to_one = [False]


def keep_to_one_process() -> None:
    """Begin no second process in this one, which is of a pool that has work for all processors."""
    _kept_to_one[0] = True


def _may_begin() -> bool:
    """Whether there is a processor for a second process, and this one is not of a pool."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors > 1 and multiprocessing.parent_process() is None and not _kept_to_one[0]

"""Worker processes of a sweep: one that dies or hangs costs its case, nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard_ilp.explore.cases import Case
from autoshard_ilp.explore.runcase import failed_row

START_SECONDS = 120.0
"""Beyond its time limit, a case may need this long for the libraries to load."""


class Worker:
    """One process; :meth:`run` gives a case's row, also when the process dies."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self.models = models
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self._log: Any = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # what it says last, should it die
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard_ilp.explore.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        self.process = process
        self._send({"path": [os.getcwd(), *sys.path], "models": dict(self.models)})
        return process

    def _send(self, data: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write((json.dumps(data) + "\n").encode())
        self.process.stdin.flush()

    def run(self, case: Case, time_limit: float) -> dict[str, Any]:
        """The row of a case.

        Args:
            case: what to plan.
            time_limit: seconds after which the process is killed; inf: never.
        """
        began = time.monotonic()
        fresh = self.process is None or self.process.poll() is not None
        limit = time_limit + (START_SECONDS if fresh else 0.0)
        try:
            process = self._start() if fresh else self.process
            assert process is not None
            self._send(case.__dict__)
            line = self._line(process, began + limit)
        except (BrokenPipeError, OSError):
            line = b""
        if line:
            return dict(json.loads(line))
        seconds = time.monotonic() - began
        late = seconds >= limit
        code = self._end()
        said = self._last_words()
        if self.stopped:
            return failed_row(case, "WorkerDied", "the sweep was stopped", seconds)
        self.stop()
        if late:
            return failed_row(case, "Timeout", f"no answer within {time_limit:g} s", seconds)
        return failed_row(case, "WorkerDied", f"the process ended {_how(code)}. {said}", seconds)

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        """The next whole line; empty when the process has ended or time is up."""
        assert process.stdout is not None
        number, data = process.stdout.fileno(), b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([number], [], [], None if math.isinf(left) else left)[0]:
                return b""
            piece = os.read(number, 1 << 16)
            if not piece:
                return b""
            data += piece
        return data

    def _last_words(self) -> str:
        log = self._log
        if log is None:
            return ""
        with contextlib.suppress(OSError, ValueError):
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").split("\n")
            said = [x.strip() for x in lines if x.strip() and not x.startswith(("I0000", "WARNING: All log", "W0000"))]
            return said[-1][:300] if said else ""
        return ""

    def stop(self) -> None:
        """Ends the process and forgets what it said."""
        self._end()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def close(self) -> None:
        """As :meth:`stop`, from any thread and for good: a case under way gives no row worth keeping."""
        self.stopped = True
        self.stop()

    def _end(self) -> int | None:
        """Ends the process; its exit code."""
        process = self.process  # the pool stops a worker from another thread than the one that runs its cases
        if process is None:
            return None
        with contextlib.suppress(OSError):
            time.sleep(0.0 if process.poll() is not None else 0.05)
            code = process.poll()
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            if self.process is process:
                self.process = None
            return code
        return None


def _how(code: int | None) -> str:
    if code is None:
        return "without an exit code"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"by {name}" + (" (perhaps out of memory)" if name == "SIGKILL" else "")
    return f"with exit code {code}"


def rows_of(
    cases: Sequence[Case], models: Mapping[str, Any], workers: int, case_time_limit: float
) -> Iterator[dict[str, Any]]:
    """Rows as they are finished, from worker processes. Closing the iterator ends the processes at once."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    done: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    pool = [Worker(models) for _ in range(min(workers, len(cases)))]
    stopped = threading.Event()

    def serve(worker: Worker) -> None:
        while not stopped.is_set():
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            row = worker.run(case, case_time_limit)
            if not stopped.is_set():
                done.put(row)
        done.put(None)

    threads = [threading.Thread(target=serve, args=(w,), daemon=True) for w in pool]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            try:
                row = done.get(timeout=0.2)  # short, so that Ctrl-C is seen
            except queue.Empty:
                continue
            if row is None:
                running -= 1
            else:
                yield row
    finally:
        stopped.set()
        for worker in pool:
            worker.close()
        for thread in threads:
            thread.join(timeout=5.0)

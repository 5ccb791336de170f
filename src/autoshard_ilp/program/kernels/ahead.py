"""Kernels compiled ahead: by a process of its own while models load and are traced, once per machine.

Numba compiles a kernel where it is called first, and keeps it in a cache of files. That takes 17 seconds of one core,
which a first plan would wait for although nothing is to be solved yet: so a second process fills the cache in the
meantime, and a solve waits for what is left of it. Without such a process everything is compiled in place, as ever.
"""

from __future__ import annotations

import atexit
import subprocess
from pathlib import Path
from typing import Any

from autoshard_ilp.program.interpreter import begin_python
from autoshard_ilp.program.kernels.alone import cache_folder
from autoshard_ilp.program.kernels.messages import descend
from autoshard_ilp.program.window.kernels_fronts import joined

STAGES = ("kernels", "windows")
"""What is compiled, in this order; the process writes a line after each."""

_CODE = """
import contextlib
from autoshard_ilp.program.kernels.compiled import compile_all
for stage in compile_all():
    with contextlib.suppress(OSError):  # nobody listens any more
        print(stage, flush=True)
"""


class _Compiler:
    """The process that compiles, if one was begun, and what it has still to do."""

    def __init__(self) -> None:
        self.begun = False
        self.left: list[str] = []
        self.process: subprocess.Popen[str] | None = None  # held, or Python would warn that it is still running


_compiler = _Compiler()


def compile_ahead() -> None:
    """Begin to compile the kernels in a process of its own, unless that was done on this machine, or is being done."""
    if _compiler.begun or all(_in_cache(kernel) for kernel in (descend, joined)):
        return
    _compiler.begun = True
    process = begin_python(_CODE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if process is None:  # compiled in place
        return
    _compiler.process, _compiler.left = process, list(STAGES)


@atexit.register
def _let_go() -> None:
    """A process that still compiles goes on by itself, for the next plan; Python is not to warn of it."""
    process = _compiler.process
    if process is not None:
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.returncode = 0


def wait_for(stage: str) -> None:
    """Wait until the process, if there is one, has compiled a stage, or has given up."""
    while stage in _compiler.left:
        assert _compiler.process is not None and _compiler.process.stdout is not None
        line = _compiler.process.stdout.readline().strip()
        _compiler.left = _compiler.left[_compiler.left.index(line) + 1 :] if line in _compiler.left else []


def _in_cache(kernel: Any) -> bool:
    """Whether Numba's cache has something of a kernel that is not older than its source."""
    folder = cache_folder(kernel)
    if folder is None:
        return True
    function = kernel.py_func
    written = Path(function.__code__.co_filename).stat().st_mtime
    files = folder.glob(f"*{function.__name__}-*.nbi")
    return any(file.stat().st_mtime >= written for file in files)

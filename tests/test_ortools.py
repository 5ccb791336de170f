"""OR-Tools is imported once, whoever asks for it first, and prints nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from autoshard_ilp._ortools import silent_stdout

THREADS = """
import sys, threading, time
from autoshard_ilp._ortools import load_cp_model

found = []

def load_while_it_loads():
    until = time.monotonic() + 60
    while "ortools.sat.python.cp_model" not in sys.modules and time.monotonic() < until:
        time.sleep(0)
    found.append(load_cp_model().CpModel)

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=load_while_it_loads) for _ in range(3)]
for t in threads:
    t.start()
found.append(load_cp_model().CpModel)
for t in threads:
    t.join()
assert len(found) == 4 and len(set(found)) == 1, found
"""


def test_threads_that_load_at_once_all_get_the_whole_module() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_a_solver_prints_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints from C, through a buffer that outlives the call; before and after it, everything arrives."""
    libc = ctypes.CDLL(None)
    libc.printf(b"before\n")
    with silent_stdout():
        libc.printf(b"within\n")
        with silent_stdout():
            os.write(1, b"deeper\n")
        libc.printf(b"within again\n")
    libc.printf(b"after\n")
    libc.fflush(None)
    print("at last", flush=True)
    assert capfd.readouterr().out.split() == ["before", "after", "at", "last"]

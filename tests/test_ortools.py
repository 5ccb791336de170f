"""OR-Tools is imported once, whoever asks for it first."""

from __future__ import annotations

import subprocess
import sys

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

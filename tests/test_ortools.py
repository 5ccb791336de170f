"""OR-Tools is imported once, whoever asks for it first."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import threading
from autoshard_ilp._ortools import load_cp_model

found, start = [], threading.Barrier(4)

def load():
    start.wait()
    found.append(load_cp_model().CpModel)

threads = [threading.Thread(target=load) for _ in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert len(found) == 4 and len(set(found)) == 1, found
"""


def test_threads_that_load_at_once_all_get_the_whole_module() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

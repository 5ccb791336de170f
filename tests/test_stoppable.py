"""Work in a thread that Ctrl-C stops: its answer is kept, its errors arrive, and it is not waited for in vain."""

import math
import os
import signal
import threading
import time

import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.program.model import Solution
from autoshard_ilp.program.stoppable import run_stoppable


def interrupt_soon(seconds=0.3):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def test_the_answer_of_what_stops_when_told():
    told = threading.Event()
    interrupt_soon()
    assert run_stoppable("worker", lambda: told.wait(20) and "best so far", told.set) == ("best so far", True)


def test_what_does_not_stop_is_left():
    release = threading.Event()
    interrupt_soon()
    began = time.monotonic()
    assert run_stoppable("worker", lambda: release.wait(30), lambda: None, patience=0.5) == (None, True)
    assert time.monotonic() - began < 10
    release.set()


def test_results_and_errors_arrive():
    assert run_stoppable("worker", lambda: 3, lambda: None) == (3, False)
    with pytest.raises(ValueError, match="inside"):
        run_stoppable("worker", lambda: int("inside"), lambda: None)


def test_an_interrupt_before_any_plan_is_raised_and_nothing_else_tried(monkeypatch):
    asked = []

    def solve(program, options, **_):
        asked.append(program)
        return Solution("feasible", None, math.inf, 0.0, 0, 0.0, {"interrupted": True})

    monkeypatch.setattr("autoshard_ilp.program.solve", solve)
    with pytest.raises(KeyboardInterrupt):
        autoshard.optimize_fn(lambda x, w: x @ w, (np.ones((8, 16)), np.ones((16, 8))), {"data": 8}, progress=False)
    assert len(asked) == 1

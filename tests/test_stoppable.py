"""Work in a thread that Ctrl-C stops: its answer is kept, its errors arrive, and it is not waited for in vain."""

import os
import signal
import threading
import time

import pytest

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

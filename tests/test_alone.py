"""Kernels are compiled by one process at a time, whatever becomes of the lock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard_ilp.program.kernels import alone

HOLD = """
import sys, time
from pathlib import Path
from autoshard_ilp.program.kernels import alone
alone.cache_folder = lambda: Path(sys.argv[1])
with alone.alone("kernels"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(monkeypatch, tmp_path):
    """Another process that compiles for a minute."""
    monkeypatch.setattr(alone, "cache_folder", lambda: tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_waited_for_until_it_ends(other, monkeypatch):
    monkeypatch.setattr(alone, "PATIENCE_SECONDS", 0.5)
    began = time.monotonic()
    with alone.alone("kernels"):  # the patience is over, and this process compiles as well
        assert time.monotonic() - began >= 0.5
    monkeypatch.setattr(alone, "PATIENCE_SECONDS", 30.0)
    with alone.alone("windows"):  # other kernels
        assert time.monotonic() - began < 15.0
    other.kill()
    began = time.monotonic()
    with alone.alone("kernels"):
        assert time.monotonic() - began < 15.0


def test_what_fails_meanwhile_lets_go(monkeypatch, tmp_path):
    monkeypatch.setattr(alone, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(alone, "PATIENCE_SECONDS", 5.0)
    with pytest.raises(ZeroDivisionError), alone.alone("kernels"):
        raise ZeroDivisionError
    began = time.monotonic()
    with alone.alone("kernels"):
        assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("folder", [None, Path("/dev/null/nowhere")])
def test_no_cache_or_no_lock_is_no_obstacle(monkeypatch, folder):
    monkeypatch.setattr(alone, "cache_folder", lambda: folder)
    ran = []
    with alone.alone("kernels"):
        ran.append(True)
    assert ran

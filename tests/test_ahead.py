"""Kernels compiled ahead by a process of their own: begun when they are needed, waited for, and never in the way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from autoshard_ilp.program.kernels import ahead


@pytest.fixture
def compiler(monkeypatch):
    """A process that has not begun, on a machine whose cache is empty."""
    fresh = ahead._Compiler()
    monkeypatch.setattr(ahead, "_compiler", fresh)
    monkeypatch.setattr(ahead, "_in_cache", lambda kernel: False)
    yield fresh
    if fresh.process is not None:
        fresh.process.kill()
        fresh.process.communicate()


def test_the_process_compiles_both_stages(compiler):
    ahead.compile_ahead()
    assert compiler.process is not None and compiler.left == list(ahead.STAGES)
    ahead.wait_for("kernels")
    assert compiler.left == ["windows"]
    ahead.wait_for("windows")
    assert compiler.left == []


def test_a_stage_is_waited_for(compiler, monkeypatch):
    monkeypatch.setattr(ahead, "_CODE", "import time; time.sleep(0.5); print('kernels', flush=True); time.sleep(60)")
    ahead.compile_ahead()
    began = time.monotonic()
    ahead.wait_for("kernels")
    assert time.monotonic() - began > 0.2
    assert compiler.left == ["windows"]  # still at work


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('something else')"])
def test_a_process_that_gives_up_is_not_waited_for(compiler, monkeypatch, code):
    monkeypatch.setattr(ahead, "_CODE", code)
    ahead.compile_ahead()
    ahead.wait_for("kernels")
    ahead.wait_for("windows")
    assert compiler.left == []


def test_no_interpreter_no_process(compiler, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(Path("/nowhere/python")))
    ahead.compile_ahead()
    assert compiler.process is None
    ahead.wait_for("kernels")  # returns at once


def test_one_process_at_most(compiler, monkeypatch):
    monkeypatch.setattr(ahead, "_CODE", "print('kernels'); print('windows')")
    ahead.compile_ahead()
    first = compiler.process
    ahead.compile_ahead()
    assert compiler.process is first


def test_nothing_is_begun_where_the_cache_is_filled(monkeypatch):
    fresh = ahead._Compiler()
    monkeypatch.setattr(ahead, "_compiler", fresh)
    monkeypatch.setattr(ahead, "_in_cache", lambda kernel: True)
    ahead.compile_ahead()
    assert not fresh.begun


def test_the_cache_is_read_by_its_files(tmp_path):
    class Kernel:
        class stats:
            cache_path = str(tmp_path)

        py_func = staticmethod(ahead.wait_for)

    assert not ahead._in_cache(Kernel)
    index = tmp_path / "ahead.wait_for-58.py311.nbi"
    index.touch()
    assert ahead._in_cache(Kernel)
    os.utime(index, (0, 0))  # older than the source: Numba would compile again
    assert not ahead._in_cache(Kernel)

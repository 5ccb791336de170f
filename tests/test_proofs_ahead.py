"""The proof that a second process begins while a plan is being looked for: the same answer, or none."""

from __future__ import annotations

import functools
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.test_chain import Chain
from tests.test_untied import MESH, OPTIONS, deep

import autoshard_ilp as autoshard
from autoshard_ilp.costs import apart as costs_apart
from autoshard_ilp.costs import facts
from autoshard_ilp.program.repeated import beside
from autoshard_ilp.program.repeated.beside import Beside, serve
from autoshard_ilp.program.repeated.chain import chain_bound
from autoshard_ilp.program.repeated.repeats import copies_in
from autoshard_ilp.search import early

SECONDS = 60.0


@pytest.fixture
def second() -> Iterator[Beside]:
    with Beside() as process:
        process._none = False  # whatever this machine has
        yield process


def in_place(chain: Chain, known: np.ndarray | None) -> Any:
    return chain_bound(chain.program, chain.alike.edges, copies_in(chain.program, chain.alike), known)


def test_its_bounds_are_those_of_this_process(second: Beside) -> None:
    """Of one program after the other, with and without a known assignment."""
    for seed, known in ((7, True), (8, False)):
        chain = Chain(12, seed)
        start = chain.known if known else None
        job = second.begin(chain.program, chain.alike, start, SECONDS)
        assert job is not None
        found, expected = job.answer(SECONDS), in_place(chain, start)
        assert found is not None
        assert (found.lower_bound, found.layers) == (expected.lower_bound, 12)
        assert np.array_equal(found.choices, expected.choices)


def test_a_bound_needs_no_known_assignment() -> None:
    for seed in range(20):
        chain = Chain(6, seed)
        found = in_place(chain, None)
        assert found.lower_bound == pytest.approx(in_place(chain, chain.known).lower_bound)
        assert np.isfinite(chain.program.cost(found.choices))


def test_a_job_that_nobody_wants_any_more_is_given_up(second: Beside) -> None:
    long, short = Chain(400, 7), Chain(6, 9)
    first = second.begin(long.program, long.alike, None, SECONDS)
    before = second._process
    later = second.begin(short.program, short.alike, None, SECONDS)
    assert first is not None and later is not None
    assert first.answer(SECONDS) is None
    assert before is not None and before.poll() is not None, "its process has ended"
    found = later.answer(SECONDS)
    assert found is not None and found.layers == 6


def test_a_process_that_ends_has_no_answer(second: Beside) -> None:
    chain = Chain(400, 7)
    job = second.begin(chain.program, chain.alike, None, SECONDS)
    assert job is not None and second._process is not None
    second._process.kill()
    assert job.answer(SECONDS) is None


def test_a_process_ends_with_its_context() -> None:
    with Beside() as second:
        second._none = False
        second.start()
        process = second._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None
    assert process.stdin is not None and process.stdin.closed


def test_what_is_served_ends_with_its_pipe() -> None:
    chain, answers = Chain(6, 3), io.BytesIO()
    serve(io.BytesIO(pickle.dumps((chain.program, chain.alike, None, SECONDS))), answers)
    answers.seek(0)
    assert pickle.load(answers).lower_bound == in_place(chain, None).lower_bound


@pytest.mark.parametrize("why", ["processors", "pool", "kept to one", "interpreter", "refused"])
def test_there_is_none_where_it_would_not_help(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    if why == "processors":
        monkeypatch.setattr(beside.os, "sched_getaffinity", lambda pid: {0})
    elif why == "pool":
        monkeypatch.setattr(beside.multiprocessing, "parent_process", lambda: object())
    elif why == "kept to one":
        monkeypatch.setattr(beside, "_kept_to_one", [False])
        beside.keep_to_one_process()
    elif why == "interpreter":
        monkeypatch.setattr(sys, "executable", "")
    else:

        def refused(*_: Any, **__: Any) -> Any:
            raise PermissionError

        monkeypatch.setattr(beside.subprocess, "Popen", refused)
    chain = Chain(6, 3)
    with Beside() as second:
        second.start()
        assert second.begin(chain.program, chain.alike, None, SECONDS) is None


IN_A_SWEEP = """
import os
os.sched_getaffinity = lambda pid: {0, 1}
from autoshard_ilp.explore.worker import main
from autoshard_ilp.program.repeated.beside import Beside
assert not Beside()._none
main()
assert Beside()._none
"""


def test_a_worker_of_a_sweep_begins_none() -> None:
    first = json.dumps({"path": sys.path, "models": {}}) + "\n"
    subprocess.run([sys.executable, "-c", IN_A_SWEEP], input=first.encode(), check=True, timeout=120)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is begun ahead for however small a step, in this process."""
    jobs: list[tuple[Any, ...]] = []

    class InPlace:
        def __init__(self, *what: Any) -> None:
            self.what = what

        def answer(self, seconds: float) -> Any:
            program, alike, known, _ = self.what
            jobs.append(self.what)
            return chain_bound(program, alike.edges, copies_in(program, alike), known)

    monkeypatch.setattr(Beside, "start", lambda self: None)
    monkeypatch.setattr(Beside, "begin", lambda self, *what: InPlace(*what))
    monkeypatch.setattr(early, "OPS", 0)
    monkeypatch.setattr(early, "CELLS", 0)
    monkeypatch.setattr(facts, "FEW_OPERATIONS", 0)
    return jobs


@pytest.mark.parametrize("share", [None, pytest.param(0.9, marks=pytest.mark.slow)])
def test_plans_are_those_without_it(
    share: float | None, begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory binds, bytes have the prices that were known when the last program was about to be solved."""
    model, budget = functools.partial(deep, 4, 256), None
    options: dict[str, Any] = {**OPTIONS, "batch_size": 4096, "remat": "never"}
    if share is not None:
        budget = int(share * autoshard.optimize(model, MESH, **options).memory.peak_bytes)
        begun.clear()
    plan = autoshard.optimize(model, MESH, memory_budget=budget, **options)
    assert len(begun) == 1, "the plan's proof was asked for"
    with monkeypatch.context() as patch:
        patch.setattr(early.EarlyProofs, "begin", lambda self, *_: None)
        alone = autoshard.optimize(model, MESH, memory_budget=budget, **options)
    assert len(begun) == 1
    assert plan.specs == alone.specs
    assert (plan.status, plan.cost.total_s) == (alone.status, alone.cost.total_s)
    assert plan.lower_bound == pytest.approx(alone.lower_bound, rel=1e-6)
    assert plan.notes == alone.notes


def test_without_an_answer_the_proof_is_made_in_place(
    begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def answer(self, seconds: float) -> None:
            begun.append(())

    monkeypatch.setattr(Beside, "begin", lambda self, *what: Silent())
    plan = autoshard.optimize(functools.partial(deep, 4, 256), MESH, remat="never", **OPTIONS)
    assert begun == [()]
    assert plan.gap < 1e-3


def test_without_memory_for_it_nothing_is_begun(begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made all the same, and proved if there is memory then."""
    full = iter([True])

    def apart(*arguments: Any) -> Any:
        if next(full, False):
            raise MemoryError
        return made(*arguments)

    made = costs_apart.apart
    monkeypatch.setattr(costs_apart, "apart", apart)
    plan = autoshard.optimize(functools.partial(deep, 4, 256), MESH, remat="never", **OPTIONS)
    assert not begun and "proof" in plan.timings and plan.gap < 1e-3


def test_a_small_step_begins_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*_: Any) -> None:
        raise AssertionError("a process takes longer to begin than this takes")

    monkeypatch.setattr(Beside, "start", begun)
    monkeypatch.setattr(Beside, "begin", begun)
    plan = autoshard.optimize(deep(4), MESH, remat="never", **OPTIONS)
    assert "proof" in plan.timings

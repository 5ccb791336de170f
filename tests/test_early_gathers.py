"""Gathers of the forward pass that wait for their readers under a budget, and those that may begin with the step."""

from __future__ import annotations

import re
from dataclasses import replace

import keras
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.course import Course
from autoshard_ilp.enforce.earlygathers import MARGIN, gathers_that_wait
from autoshard_ilp.enforce.latesums import Room
from compiled import needs_cuda

LAYERS, WIDTH = 6, 1024
COPY = 2 * WIDTH * WIDTH  # bytes of a kernel's copy; there is a small one, of the loss


@pytest.fixture(scope="module")
def fsdp() -> autoshard.Plan:
    layers = [keras.layers.Dense(WIDTH, "relu", dtype="mixed_bfloat16", name=f"layer_{i}") for i in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("sgd", "mse")
    options = {"hardware": "h100", "batch_size": 16384, "progress": False}
    plan = autoshard.baseline(model, {"data": 8}, "fsdp", **options)  # type: ignore[arg-type]
    return autoshard.baseline(model, {"data": 8}, "fsdp", plan.memory.peak_bytes, **options)  # type: ignore[arg-type]


def waiting(plan: autoshard.Plan, free: list[int]) -> list[tuple[str, bool]]:
    """Layer of every gather that waits, and whether there is room for its copy from the start, where so many bytes are
    free at samples of memory, one per layer of the forward pass."""
    ends = [s.end_s for s in plan.course.segments if s.phase == "forward" and s.layer.startswith("layer_")]
    layers = [s.layer for s in plan.course.segments if s.phase == "forward" and s.layer.startswith("layer_")]
    starts = [0.0, *(max(e for e, at in zip(ends, layers, strict=True) if at == f"layer_{i}") for i in range(LAYERS))]
    budget = 10 * LAYERS * COPY
    held = [int(budget * (1 - MARGIN)) - bytes_free for bytes_free in free]
    course = Course(plan.course.segments, tuple(starts[: len(held)]), {"activations": tuple(held)})
    graph, decided = plan._step().graph, plan.decisions()
    waits, early = gathers_that_wait(graph, decided.operands, decided.results, Room(budget, budget, course), [8])
    assert early <= waits
    return sorted((graph.ops[op].scope.rpartition("/")[2], (op, i) in early) for op, i in waits)


def test_copies_wait_that_have_no_room_until_they_are_read(fsdp: autoshard.Plan) -> None:
    names = [f"layer_{i}" for i in range(LAYERS)]
    assert waiting(fsdp, [(LAYERS + 1) * COPY] * LAYERS) == [(name, True) for name in names]
    assert waiting(fsdp, [COPY - 1] * LAYERS) == [(name, False) for name in names]
    assert waiting(fsdp, [3 * COPY - 1] * LAYERS) == [(name, i < 2) for i, name in enumerate(names)], (
        "the first read first"
    )
    filling = [(LAYERS - 2 * i) * COPY + COPY // 2 for i in range(LAYERS)]  # activations are yet to come
    assert waiting(fsdp, filling) == [(name, i < 3) for i, name in enumerate(names)]


def test_nothing_waits_without_a_budget_and_all_without_a_course(fsdp: autoshard.Plan) -> None:
    graph, decided = fsdp._step().graph, fsdp.decisions()
    layouts = graph, decided.operands, decided.results
    assert gathers_that_wait(*layouts, Room(COPY), [8]) == (frozenset(), frozenset())
    waits, early = gathers_that_wait(*layouts, Room(COPY, COPY), [8])
    assert len(waits) == LAYERS and not early
    some, _ = gathers_that_wait(*layouts, Room(COPY, 5 * COPY - 1), [8])
    assert len(some) == LAYERS - 3, "the budget has room for three"


@needs_cuda
def test_gathers_that_need_not_wait_become_one(fsdp: autoshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for eight H100s."""

    def gathers() -> int:
        return len(re.findall(r" all-gather(?:-start)?\(", fsdp.verify(target="h100:8").text))

    decided = fsdp.decisions()
    assert len(decided.waits) == LAYERS and len(decided.fit_early) >= LAYERS - 2
    combined = gathers()
    monkeypatch.setattr(type(fsdp), "decisions", lambda plan: replace(decided, fit_early=frozenset()))
    assert combined <= gathers() - len(decided.fit_early) + 1

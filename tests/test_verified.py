"""``optimize(..., verify=True)``: the loop with a made-up compiler, then with the real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.errors import InfeasibleError, TargetError
from autoshard_ilp.plan import Plan
from autoshard_ilp.progress import Progress
from autoshard_ilp.verified import MAX_COMPILES, compiled_peak, peak_in_message, until_it_fits
from compiled import needs_cuda
from profiles_for_tests import toy

MESH = {"data": 8}


def model() -> keras.Model:
    x = inputs = keras.Input((256,), name="x")
    for i in range(4):
        h = layers.Dense(1024, activation="gelu", name=f"up_{i}")(layers.LayerNormalization(name=f"norm_{i}")(x))
        x = layers.Add(name=f"add_{i}")([x, layers.Dense(256, name=f"down_{i}")(h)])
    made = keras.Model(inputs, layers.Dense(8, name="head")(x))
    made.compile(optimizer="sgd", loss="mse")
    return made


@pytest.fixture(scope="module")
def small() -> Plan:
    build = lambda: keras.Sequential([keras.Input((8,)), layers.Dense(8)])  # noqa: E731
    return autoshard.optimize(build, MESH, hardware=toy(), mode="predict", batch_size=8, progress=False)


def of_peak(plan: Plan, peak: int) -> Plan:
    return replace(plan, memory=replace(plan.memory, peak_bytes=peak))


def loop(small: Plan, budget: int, compiled: Any, least: int = 0) -> tuple[Plan, list[int], list[Any]]:
    """Runs the loop with a planner that fills every capacity of at least ``least`` bytes."""
    asked: list[int] = []
    news: list[Any] = []

    def again(capacity: int) -> Plan:
        asked.append(capacity)
        if capacity < least:
            raise InfeasibleError("nothing is that small", minimum_budget=least)
        return of_peak(small, capacity)

    first = of_peak(small, budget)
    peak = lambda plan, target: compiled(plan.memory.peak_bytes)  # noqa: E731
    return until_it_fits(first, budget, again, lambda: "h100:8", Progress(news.append), peak), asked, news


def test_a_plan_that_fits_is_compiled_once(small: Plan) -> None:
    plan, asked, news = loop(small, 1000, lambda predicted: predicted)
    assert not asked and "fits the budget" in plan.notes[-1]
    assert [n["stage"] for n in news] == ["verify", "verify"]


@pytest.mark.parametrize(
    "compiled", [lambda p: p + 300, lambda p: int(1.7 * p), lambda p: int(1.2 * p) + 200, lambda p: max(p, 700) + 250]
)
def test_a_plan_too_large_is_made_again_until_it_fits(small: Plan, compiled: Any) -> None:
    plan, asked, _ = loop(small, 1000, compiled)
    assert asked and asked == sorted(asked, reverse=True)
    assert compiled(plan.memory.peak_bytes) <= 1000
    assert "fits the budget of 1.0 kB (1000 B)" in plan.notes[-1] and plan.notes[-1].count("compiled") == len(asked) + 1
    assert plan.memory.budget_bytes == 1000, "the user's budget, not the corrected one"


def test_what_cannot_fit_is_said(small: Plan) -> None:
    plan, asked, _ = loop(small, 1000, lambda p: 2 * p, least=600)
    assert plan.memory.peak_bytes == 600, "the smallest plan exceeds the budget least"
    assert asked[:2] == [500, 600] and max(asked[2:]) < 600
    assert "DOES NOT FIT" in plan.notes[-1] and "nothing is that small" in plan.notes[-1]
    plan, asked, _ = loop(small, 1000, lambda p: 5000 - p)  # worse and worse
    assert plan.memory.peak_bytes == 1000 and len(asked) == MAX_COMPILES - 1
    assert "DOES NOT FIT" in plan.notes[-1] and "DOES NOT FIT" in plan.summary()


def test_the_smallest_plan_is_compiled_too(small: Plan) -> None:
    """What the excess asks for cannot be planned, but the least that can be planned has another excess."""
    compiled = {1000: 2000, 700: 950}
    plan, asked, _ = loop(small, 1000, compiled.__getitem__, least=700)
    assert asked == [500, 700] and plan.memory.peak_bytes == 700
    assert "fits the budget" in plan.notes[-1]


def test_where_nothing_is_found_in_time_more_room_is_tried(small: Plan) -> None:
    asked: list[int] = []

    def again(capacity: int) -> Plan:
        asked.append(capacity)
        if capacity < 700:
            raise InfeasibleError("nothing was found in time")
        return of_peak(small, capacity)

    peak = lambda plan, target: {1000: 2000, 750: 990}[plan.memory.peak_bytes]  # noqa: E731
    plan = until_it_fits(of_peak(small, 1000), 1000, again, lambda: "h100:8", Progress(False), peak)
    assert asked == [500, 750] and "fits the budget" in plan.notes[-1]


def test_without_a_compiler_the_plan_is_unharmed(small: Plan) -> None:
    def missing() -> str:
        raise TargetError("no compiler here")

    plan = until_it_fits(small, 1000, lambda c: small, missing, Progress(False))
    assert plan.specs == small.specs and plan.notes[-1] == "Not verified: no compiler here"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm.", int(18.5 * 2**30)),
        ("INTERNAL: something else. Used 18.50G of 15.75G hbm.", None),
        ("RESOURCE_EXHAUSTED: it is too large", None),
    ],
)
def test_a_compiler_that_refuses_says_how_much_it_needs(message: str, expected: int | None) -> None:
    assert peak_in_message(message) == expected


def test_other_failures_of_a_compilation_are_not_swallowed(small: Plan) -> None:
    with pytest.raises(TargetError):
        compiled_peak(small, "h100:4")


@needs_cuda
def test_the_real_compiler_decides_whether_it_fits() -> None:
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 16384, "pins": {"inputs|targets": "data"}}
    options |= {"progress": False, "solver": autoshard.SolverOptions(time_limit=4, relative_gap=0.02)}
    free = autoshard.optimize(model, MESH, remat="never", **options)
    compiled = free.verify("h100:8").compiled_peak_bytes
    budget = int(0.8 * min(compiled, free.memory.peak_bytes))
    seen: list[Any] = []
    plan = autoshard.optimize(model, MESH, budget, verify=True, **{**options, "progress": seen.append})
    assert any(n.get("stage") == "verify" for n in seen)
    assert f"fits the budget of {autoshard.units.format_bytes(budget)}" in plan.notes[-1], plan.notes
    assert plan.verify("h100:8").compiled_peak_bytes <= budget < compiled


def test_the_command_line_verifies_too(tmp_path: Any) -> None:
    from typer.testing import CliRunner

    from autoshard_ilp.cli import app as cli

    arguments = ["plan", "cli_models:small", "--mesh", "data=8", "--hardware", "cpu-host", "--verify", "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "Compiled for cpu" in result.stdout and "fits the budget" in result.stdout

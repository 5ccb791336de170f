"""The course of a step adds up to the plan's cost, peaks at the plan's memory, and survives a file."""

from __future__ import annotations

import json
from collections import defaultdict

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp import course
from autoshard_ilp.course import Course, Segment
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def blocks() -> keras.Model:
    x = inputs = keras.Input((16, 64), name="x")
    for i in range(3):
        h = layers.LayerNormalization(name=f"norm_{i}")(x)
        x = layers.Add(name=f"add_{i}")([x, layers.Dense(64, "gelu", name=f"dense_{i}")(h)])
    model = keras.Model(inputs, layers.Dense(8, name="head")(x))
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(blocks, MESH, "2MB", hardware=toy(1e8), batch_size=32, progress=False)


def test_segments_are_the_cost(plan: autoshard.Plan) -> None:
    seconds: dict[str, float] = defaultdict(float)
    axes: dict[str, float] = defaultdict(float)
    now = 0.0
    for s in plan.course.segments:
        assert s.start_s == pytest.approx(now, rel=1e-9, abs=1e-15) and s.seconds > 0
        now = s.end_s
        seconds[s.kind] += s.seconds
        if s.kind != "compute":
            axes[s.axes] += s.seconds
    assert now == plan.course.seconds == pytest.approx(plan.cost.total_s, rel=1e-9)
    assert seconds.pop("compute") == pytest.approx(plan.cost.compute_s, rel=1e-9)
    assert dict(seconds) == pytest.approx(dict(plan.cost.per_kind), rel=1e-9)
    assert dict(axes) == pytest.approx(dict(plan.cost.per_axis), rel=1e-9)
    assert seconds, "the case communicates"


def test_the_curve_peaks_where_the_plan_does(plan: autoshard.Plan) -> None:
    total = plan.course.total_bytes()
    assert max(total) == plan.memory.peak_bytes == total[plan.course.peak_index()]
    parts = {name: held[plan.course.peak_index()] for name, held in plan.course.held.items()}
    assert {k: v for k, v in parts.items() if v} == {k: v for k, v in plan.memory.parts.items() if v}
    assert min(total) >= plan.memory.parameters + plan.memory.optimizer
    assert list(plan.course.at_s) == sorted(set(plan.course.at_s))
    assert plan.course.at_s[0] >= 0 and plan.course.at_s[-1] < plan.course.seconds


def test_layers_run_forward_then_backward(plan: autoshard.Plan) -> None:
    visited = {phase: [s.layer for s in plan.course.segments if s.phase == phase] for phase in ("forward", "backward")}
    first = {phase: list(dict.fromkeys(x for x in names if "dense" in x)) for phase, names in visited.items()}
    assert first["forward"] == ["dense_0", "dense_1", "dense_2"] == first["backward"][::-1]
    by_layer = plan.course.by_layer()
    assert {"dense_*", "norm_*", "head"} <= by_layer.keys() and "dense_0" not in by_layer
    assert sum(sum(kinds.values()) for kinds in by_layer.values()) == pytest.approx(plan.cost.total_s, rel=1e-9)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (["a", "b", "c/x"], {"a": "a", "b": "b", "c/x": "c"}),
        (["net/a/q", "net/a/k", "net/b/q", "loss"], {"net/a/q": "a", "net/b/q": "b", "loss": "loss"}),
        (["m/body/l_0/q"] * 4 + ["m/body/l_1/q", "m/head"], {"m/body/l_0/q": "l_0", "m/head": "head"}),
        (["only/dense", "only/dense"], {"only/dense": "only"}),
        ([], {}),
    ],
)
def test_layers_are_named_below_the_model(forward: list[str], expected: dict[str, str]) -> None:
    found = course.layers_of([*forward, "", "adam"], forward)
    assert {x: found[x] for x in expected} == expected
    assert found[""] == "" and found["adam"] == "adam"


def test_a_course_survives_json(plan: autoshard.Plan) -> None:
    text = json.dumps(course.to_dict(plan.course))
    assert course.from_dict(json.loads(text)) == plan.course
    assert course.from_dict(course.to_dict(Course())) == Course()
    damaged = json.loads(text)
    damaged["held"]["parameters"].pop()
    with pytest.raises(ValueError, match="samples"):
        course.from_dict(damaged)
    damaged["segments"][0][0] = -1
    with pytest.raises(ValueError, match="name"):
        course.from_dict(damaged)


def test_long_steps_are_merged_by_visit() -> None:
    kinds = ["compute", "all-gather"] * 3
    segments = [Segment(f"l_{i}", "forward", k, "", 0.0, 1.0) for i in range(2) for k in kinds]
    found = course._merged(course._by_visit(course._merged(segments)))
    assert [(s.layer, s.kind, s.start_s, s.seconds) for s in found] == [
        ("l_0", "compute", 0.0, 3.0),
        ("l_0", "all-gather", 3.0, 3.0),
        ("l_1", "compute", 6.0, 3.0),
        ("l_1", "all-gather", 9.0, 3.0),
    ]

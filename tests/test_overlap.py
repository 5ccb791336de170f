"""Exposed and hidden communication: what the objective counts, and what a plan says about it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.costs.collectives import COLLECTIVE_KINDS
from autoshard_ilp.costs.profile import load_profile
from autoshard_ilp.course import COMPUTE, Segment, behind_compute, from_dict, to_dict
from profiles_for_tests import toy

MESH = {"model": 4}
PINS = {"up/kernel": (None, "model"), "down/kernel": ("model", None), "inputs|targets": ()}


def model() -> keras.Model:
    inputs = keras.Input((64,), name="x")
    x = layers.Dense(256, use_bias=False, activation="relu", name="up")(inputs)
    made = keras.Model(inputs, layers.Dense(64, use_bias=False, name="down")(x))
    made.compile(optimizer="sgd", loss="mse")
    return made


def plan_of(share: float, **changes: Any) -> autoshard.Plan:
    hardware = toy(1e11, 1e18, overlap_by_kind=dict.fromkeys(COLLECTIVE_KINDS, share), **changes)
    return autoshard.optimize(model, MESH, hardware=hardware, pins=PINS, batch_size=512, progress=False)


def test_hidden_and_exposed_communication_add_up() -> None:
    alone, half = plan_of(0.0), plan_of(0.5)
    assert alone.cost.hidden_s == 0.0 and alone.cost.communication_s > 0 and not any("hides" in n for n in alone.notes)
    assert half.specs == alone.specs
    assert half.cost.communication_s == pytest.approx(alone.cost.communication_s / 2)
    assert half.cost.hidden_s == pytest.approx(alone.cost.communication_s / 2)
    assert half.cost.total_s == pytest.approx(half.cost.compute_s + half.cost.communication_s)
    assert half.cost.total_s == pytest.approx(half.trail.program.cost(half.trail.solution.choices))
    assert sum(c.hidden_seconds * c.count for c in half.collectives) == pytest.approx(half.cost.hidden_s)
    assert "hidden behind compute" in half.summary() and "hidden" not in alone.summary()
    assert any("declares communication that hides" in note for note in half.notes)


def test_everything_hidden_leaves_compute() -> None:
    plan = plan_of(1.0)
    assert plan.cost.communication_s == 0.0
    assert plan.cost.total_s == plan.cost.compute_s
    assert plan.cost.hidden_s > 0.0


def test_more_hidden_than_computed_is_said() -> None:
    slow = plan_of(0.5, link_bytes_per_s=1e3)
    assert slow.cost.hidden_s > slow.cost.compute_s
    assert any("impossible" in note for note in slow.notes)


def test_the_objective_counts_exposed_time_only() -> None:
    """Gathers that hide make sharded weights free: the plan then shards what it keeps whole otherwise."""
    options: dict[str, Any] = {"batch_size": 512, "progress": False}
    plans = [
        autoshard.optimize(
            model, {"data": 4}, hardware=toy(1e11, 1e18, overlap_by_kind=dict.fromkeys(COLLECTIVE_KINDS, s)), **options
        )
        for s in (0.0, 0.9)
    ]
    assert plans[1].cost.total_s < plans[0].cost.total_s
    assert plans[1].cost.communication_s < plans[0].cost.communication_s


def test_no_profile_hides_anything_by_default_and_says_why() -> None:
    for name in autoshard.profiles():
        assert set(load_profile(name).overlap_by_kind.values()) <= {0.0}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_hidden_communication_is_drawn_beside_compute(share: float, tmp_path: Path) -> None:
    """In every picture of the step: over its whole hidden time, on compute, and never twice on one lane."""
    plan = plan_of(share, peak_flops_per_s_by_dtype={"float32": 1e9})
    course = plan.course
    hidden = course.hidden()
    assert sum(s.seconds for s in hidden) == pytest.approx(plan.cost.hidden_s)
    assert course.seconds == pytest.approx(plan.cost.total_s)
    compute = [s for s in course.segments if s.kind == COMPUTE]
    for s in hidden:
        assert any(c.start_s <= s.start_s + 1e-15 and s.end_s <= c.end_s + 1e-15 for c in compute)
    lane = sorted((s.start_s, s.end_s) for s in (*hidden, *course.segments) if s.kind != COMPUTE and s.seconds)
    assert all(b >= a - 1e-15 for (_, a), (b, _) in pairwise(lane))
    assert from_dict(to_dict(course)) == course
    assert "capitals: behind compute" in plan.summary() and "Pale: runs behind compute" in plan._repr_html_()
    assert "pale: behind compute" in [t.get_text() for t in plan.plot.timeline().legends[0].get_texts()]
    plan.to_perfetto(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    behind = [e for e in events if e.get("args", {}).get("runs") == "behind compute"]
    assert sum(e["dur"] for e in behind) == pytest.approx(1e6 * plan.cost.hidden_s)


def test_hidden_communication_takes_the_compute_before_it_and_then_the_next() -> None:
    rows = [
        (COMPUTE, "", 1.0, 0.0),
        ("all-gather", "a", 0.5, 1.5),
        ("all-reduce", "b", 0.5, 0.25),
        (COMPUTE, "", 1.0, 0.0),
    ]
    rows += [("all-gather", "a", 0.0, 9.0)]
    segments, now = [], 0.0
    for kind, axes, seconds, more in rows:
        segments.append(Segment("l", "forward", kind, axes, now, seconds, more))
        now += seconds
    assert behind_compute(segments) == [(1, 0.0, 1.0), (2, 0.75, 0.25), (1, 2.0, 0.5), (4, 2.5, 0.5)]

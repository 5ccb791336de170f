"""Plans of models whose layers Keras has numbered anew: one set of names, and the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.saved.renaming import Names
from profiles_for_tests import toy

MESH = {"data": 2, "model": 4}


def build() -> keras.Model:
    x = keras.Input((64,))
    h = layers.Dense(256, activation="relu")(x)
    h = layers.Dense(256)(h)
    model = keras.Model(x, layers.Dense(64)(h))
    model.compile(optimizer="adam", loss="mse")
    return model


def renumbered() -> keras.Model:
    """As in a process in which one more layer was built before: its ``dense_1`` is what was ``dense``."""
    keras.utils.clear_session()
    layers.Dense(3)
    return build()


def planned(**options: Any) -> autoshard.Plan:
    keras.utils.clear_session()
    return autoshard.optimize(build(), MESH, hardware="h100", progress=False, **options)


def kernels(plan: autoshard.Plan) -> list[str]:
    return [path for path in plan.specs if path.startswith("dense") and path.endswith("/kernel")]


@pytest.fixture(params=["from a file", "alive"])
def bound(request: Any, tmp_path: Path) -> Any:
    """Binds a plan to the renumbered model."""

    def bind(plan: autoshard.Plan) -> autoshard.Plan:
        if request.param == "alive":
            return plan.bind(renumbered())
        plan.save(tmp_path / "plan.json")
        return autoshard.load(tmp_path / "plan.json", renumbered())

    return bind


def test_a_bound_plan_has_the_names_of_its_model(bound: Any) -> None:
    plan = planned()
    found = bound(plan)
    assert kernels(plan) == ["dense/kernel", "dense_1/kernel", "dense_2/kernel"]
    assert kernels(found) == ["dense_1/kernel", "dense_2/kernel", "dense_3/kernel"]
    assert list(found.specs.values()) == list(plan.specs.values()) and found.fingerprint == plan.fingerprint
    held = {label for label, _ in found.memory.contributors}
    assert "dense_3/kernel" in held and "dense/kernel" not in held
    model = build()
    assert kernels(found.bind(model)) == [v.path for v in model.trainable_variables if v.path.endswith("kernel")]


def test_the_same_tensor_has_the_same_answers(bound: Any) -> None:
    plan = planned()
    found, specs = bound(plan), [("model", "data"), ("data", None), (None, "model")]
    for spec, path, now in zip(specs, kernels(plan), kernels(found), strict=True):
        asked = plan.what_if(pins={f"^{path}$": spec})
        again = found.what_if(pins={f"^{now}$": spec})
        assert again.cost.total_s == pytest.approx(asked.cost.total_s, rel=1e-9)
        assert again.specs[now] == asked.specs[path]
        told, retold = plan.explain(path), found.explain(now)
        assert [a.total_s for a in retold.alternatives] == pytest.approx([a.total_s for a in told.alternatives])
    assert found.plot.graph("dense_3") is not None


def test_pins_mean_the_tensors_that_they_meant(bound: Any) -> None:
    """``dense_1`` is another layer now; ``kernel$`` finds what it found."""
    pins = {"^dense_1/kernel$": ("model", "data"), "_2/kernel$": ("data", None)}
    plan = planned(pins=pins)
    found = bound(plan).what_if(memory_budget="1GB")
    assert tuple(found.specs["dense_2/kernel"]) == ("model", "data")
    assert [found.specs[k] for k in kernels(found)] == [plan.specs[k] for k in kernels(plan)]


def test_a_baseline_stays_one(bound: Any) -> None:
    keras.utils.clear_session()
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 64, "progress": False}
    plan = autoshard.baseline(build(), MESH, "fsdp", **options)
    asked = bound(plan).what_if(memory_budget="1GB")
    assert list(asked.specs.values()) == list(plan.specs.values())
    assert asked.cost.total_s == pytest.approx(plan.cost.total_s, rel=1e-9)


def test_a_profile_of_ones_own_is_kept() -> None:
    keras.utils.clear_session()
    plan = autoshard.optimize(build(), MESH, hardware=toy(1e8), batch_size=64, progress=False)
    asked = plan.bind(renumbered()).what_if(pins={"^dense_1/kernel$": ("data", None)})
    same = plan.what_if(pins={"^dense/kernel$": ("data", None)})
    assert asked.cost.total_s == pytest.approx(same.cost.total_s, rel=1e-9)


def test_names() -> None:
    names = Names([("a/dense/kernel", "a/dense_1/kernel"), ("a/dense_1/kernel", "a/dense_2/kernel"), ("x", "x")])
    assert names and not Names([("x", "x")])
    assert names.of_path("a/dense_1/kernel") == "a/dense_2/kernel" and names.of_path("unknown") == "unknown"
    assert names.of_label("a/dense") == "a/dense_1" and names.of_label("outer/dense_1/add") == "outer/dense_2/add"
    assert names.of_pins({"(": 0}) == {"(": 0}, "an edited file's; resolving it says what is wrong"
    pins = {"kernel$": 1, "dense_1/kernel": 2, "^x": 3}
    assert names.of_pins(pins) == {"kernel$": 1, r"^(a/dense_2/kernel)$": 2, "^x": 3}

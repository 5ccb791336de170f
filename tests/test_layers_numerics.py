"""Every layer of ``keras.layers``, trained and used for prediction under a plan: the numbers of one device."""

from __future__ import annotations

import inspect
import random
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.keras_integration import runs_eagerly
from layer_cases import BATCH, CASES, NOT_IN_A_MODEL, assert_same_numbers, plan_of

pytestmark = pytest.mark.usefixtures("quick_code")

MESHES = {"2x4": {"data": 2, "model": 4}, "3x2": {"x": 3, "y": 2}}
QUICK = ("Embedding",)


def test_every_layer_of_keras_has_a_case() -> None:
    classes = {c for c in vars(keras.layers).values() if inspect.isclass(c) and issubclass(c, keras.Layer)}
    named = {getattr(keras.layers, name) for name in (*CASES, *NOT_IN_A_MODEL)}
    assert classes - named == set()
    assert not set(CASES) & set(NOT_IN_A_MODEL)


def _cases() -> list[Any]:
    return [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * (name not in QUICK or mesh != "2x4"))
        for name in CASES
        for mesh in MESHES
    ]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of Keras's MixUp, always
@pytest.mark.parametrize(("name", "mesh"), _cases())
def test_a_layer_under_any_layouts(name: str, mesh: str) -> None:
    case = CASES[name]
    assert_same_numbers(case.model, case.data(), MESHES[mesh])


NOT_BEYOND_BATCH = {
    "Identity": "does nothing",
    "Equalization": "its histograms are of whole pictures",
    "AugMix": "thousands of small operations, which XLA compiles for many minutes when each is sharded in its own way",
    "RandAugment": "as AugMix",
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("Dense", "Softmax")))
        for name in CASES
        if name not in NOT_BEYOND_BATCH
    ],
)
def test_a_layer_with_more_than_its_batch_sharded(name: str) -> None:
    case, mesh = (
        CASES[name],
        MESHES["3x2" if name == "CenterCrop" else "2x4"],
    )  # of a crop, only the three channels may be sharded
    assert_same_numbers(case.model, case.data(), mesh, seed=1, beyond_batch=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (layers.RandomElasticTransform, AttributeError, "_error_repr"),
        (lambda: layers.RandomCrop(6, 5), IndexError, "Slice entries must be static"),
    ],
    ids=["RandomElasticTransform", "RandomCrop"],
)
def test_a_layer_left_out_does_not_compile_on_one_device_either(make: Any, error: Any, text: str) -> None:
    inputs = keras.Input((8, 8, 3))
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(make()(inputs))))
    model.compile("sgd", "mse")
    model._jit_compile = True  # Keras trains models with RandomCrop operation by operation
    batch = np.ones((4, 8, 8, 3), "float32"), np.ones((4, 2), "float32")
    with pytest.raises(error, match=text):
        model.train_on_batch(*batch)
    with pytest.raises(autoshard.UnsupportedModelError, match=text):
        plan_of(model, batch, MESHES["2x4"])


def test_layers_that_keras_does_not_compile_run_the_planned_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """``RandomRotation`` says that it does not support compilation; traced, it can be planned and compiled."""
    case = CASES["RandomRotation"]
    model = case.model()
    assert not model.jit_compile
    plan_of(model, case.data()[0], MESHES["2x4"]).apply(model)
    monkeypatch.setattr("autoshard_ilp.keras_runtime.programs.eager_program", None)
    assert np.isfinite(model.train_on_batch(*case.data()[0])[0])
    for wanted in ({"jit_compile": False}, {"run_eagerly": True}):
        asked = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        asked.compile("sgd", "mse", **wanted)
        assert runs_eagerly(asked)


class _Drawing(layers.Layer):
    """Draws from Python's generator in every call, as ``AugMix`` does; compiled, it would draw once."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False

    def call(self, x: Any) -> Any:
        return x * random.uniform(0.5, 2.0)


def test_a_layer_that_draws_in_python_draws_in_every_step() -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), _Drawing(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    batch = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
    alone, planned = build(), build()
    plan_of(planned, batch, MESHES["2x4"]).apply(planned)
    losses = []
    for model in (alone, planned):
        model.train_on_batch(*batch)  # Keras calls the layer once more to create its metrics
        random.seed(1)
        losses.append([float(model.train_on_batch(*batch)) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len(set(losses[0])) == 3


@pytest.mark.slow
def test_random_crop_predicts() -> None:
    """It resizes and crops the centre then."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((9, 8, 3))
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPooling2D()(layers.RandomCrop(6, 5)(inputs))))
    x = np.random.default_rng(0).uniform(0, 255, (BATCH, 9, 8, 3)).astype("float32")
    expected = model.predict(x, verbose=0)
    plan_of(model, (x,), MESHES["2x4"], seed=0, mode="predict").apply(model)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-3)

"""Every layer of ``keras.layers``, trained and used for prediction under a plan: the numbers of one device."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from layer_cases import CASES, NOT_IN_A_MODEL, assert_same_numbers

MESHES = {"2x4": {"data": 2, "model": 4}, "3x2": {"x": 3, "y": 2}}
QUICK = ("Embedding", "MelSpectrogram")


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


@pytest.mark.slow
def test_a_layer_left_out_does_not_train_on_one_device_either() -> None:
    inputs = keras.Input((8, 8, 3))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.RandomElasticTransform()(inputs))))
    model.compile("sgd", "mse")
    with pytest.raises(AttributeError, match="_error_repr"):
        model.train_on_batch(np.ones((4, 8, 8, 3), "float32"), np.ones((4, 2), "float32"))

"""Every layer of ``keras.layers``, trained and used for prediction under a plan: the numbers of one device."""

from __future__ import annotations

import inspect

import keras
import pytest

from layer_cases import CASES, NOT_IN_A_MODEL, assert_same_numbers

MESHES = {"2x4": {"data": 2, "model": 4}, "3x2": {"x": 3, "y": 2}}
QUICK = ()


def test_every_layer_of_keras_has_a_case() -> None:
    classes = {c for c in vars(keras.layers).values() if inspect.isclass(c) and issubclass(c, keras.Layer)}
    named = {getattr(keras.layers, name) for name in (*CASES, *NOT_IN_A_MODEL)}
    assert classes - named == set()
    assert not set(CASES) & set(NOT_IN_A_MODEL)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_a_layer_under_any_layouts(name: str, mesh: str) -> None:
    case = CASES[name]
    assert_same_numbers(case.model, case.data(), MESHES[mesh])

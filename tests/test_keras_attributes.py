"""What layers hold besides variables, changed between ``apply`` and the first ``fit``, and laid out by a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_cases import BATCH, assert_close, features, plan_for, seeded

pytestmark = pytest.mark.usefixtures("quick_code")


def normalised(seed: int = 0) -> keras.Model:
    """A classifier whose statistics are of other data for every seed."""
    inputs = keras.Input((16,))
    normalization = layers.Normalization(name="statistics")
    normalization.adapt(np.random.default_rng(seed).normal(2 + seed, 3, (40, 16)).astype("float32"))
    x = layers.LeakyReLU(0.3, name="slope")(layers.Dense(8)(normalization(inputs)))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def other_statistics(model: keras.Model, path: Path) -> None:
    file = path / "other.weights.h5"
    seeded(lambda: normalised(3)).save_weights(file)
    model.load_weights(file)


CHANGES: dict[str, Callable[[keras.Model, Path], Any]] = {
    "load_weights": other_statistics,
    "adapt": lambda model, path: model.get_layer("statistics").adapt(features(seed=9)[0]),
    "a number": lambda model, path: setattr(model.get_layer("slope"), "negative_slope", 0.9),
    "a function": lambda model, path: setattr(model.get_layer("head"), "activation", keras.activations.sigmoid),
}


@pytest.mark.parametrize("how", ["load_weights", "adapt", "a number"])
def test_the_first_fit_trains_with_what_layers_hold_by_then(how: str, tmp_path: Path) -> None:
    x, y = features()

    def losses(model: keras.Model) -> Any:
        return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]

    alone, planned, same = (seeded(normalised) for _ in range(3))
    for model in (planned, same):
        plan_for(model, (x, y)).apply(model)
    for model in (alone, planned):
        CHANGES[how](model, tmp_path)
    expected = losses(alone)
    assert_close(losses(planned), expected)
    assert not np.allclose(losses(same), expected, rtol=1e-3), "the change matters"


def test_another_operation_is_refused_at_the_first_fit(tmp_path: Path) -> None:
    import autoshard_ilp as autoshard

    x, y = features()
    model = seeded(normalised)
    plan_for(model, (x, y)).apply(model)
    before = [np.asarray(v) for v in model.weights]
    CHANGES["a function"](model, tmp_path)
    with pytest.raises(autoshard.PlanMismatchError, match="Plan again"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_close([np.asarray(v) for v in model.weights], before)


def test_nothing_is_compiled_again_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features()
    model = seeded(normalised)
    plan_for(model, (x, y)).apply(model)
    traced: list[Any] = []
    own_step = model.train_step
    monkeypatch.setattr(model, "train_step", lambda *args: traced.append(args) or own_step(*args))
    model.evaluate(x, y, batch_size=BATCH, verbose=0)
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    model.get_layer("slope").negative_slope = 0.9  # too late, as in Keras
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    assert not traced


def test_statistics_on_the_mesh_are_no_other_model(tmp_path: Path) -> None:
    """Read from variables that a plan has laid out, they are arrays on its mesh, which JAX traces as moved."""
    x, y = features()
    plan = plan_for(normalised, (x, y))
    with plan.scope():
        model = seeded(normalised)
    plan.apply(model)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    other_statistics(model, tmp_path)
    plan.apply(model)
    model.compile("sgd", "sparse_categorical_crossentropy")
    alone = seeded(normalised)
    alone.set_weights(model.get_weights())
    alone.get_layer("statistics").finalize_state()
    for one in (alone, model):
        one.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(model.get_weights(), alone.get_weights())

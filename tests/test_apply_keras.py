"""plan.apply: a model that exists, trained by fit under its plan, against the same model on one device."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from profiles_for_tests import toy
from zoo import ZOO

MESH = {"data": 2, "model": 4}


def _weights(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def _trained(case, batches, plan=None):
    model = case.build()
    if plan is not None:
        plan.apply(model)
    history = [model.train_on_batch(*batch, return_dict=True) for batch in batches]
    return model, history


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_training_under_a_plan_equals_one_device(name):
    case = ZOO[name]
    rng = np.random.default_rng(0)
    batches = [case.make_batch(rng) for _ in range(3)]
    plan = autoshard.optimize(
        case.build(),
        MESH,
        hardware=toy(flops_per_s=1e8, memory_bytes_per_s=1e8),
        inputs=batches[0][0],
        targets=batches[0][1],
        progress=False,
    )
    assert any(any(spec) for path, spec in plan.specs.items() if path.endswith(("kernel", "embeddings")))
    alone, expected = _trained(case, batches)
    planned, found = _trained(case, batches, plan)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
    for a, b in zip(_weights(alone), _weights(planned), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4)
    _assert_on_plan(planned, plan)


def _assert_on_plan(model, plan):
    """No variable has drifted off its layout; by order, since Keras numbers the layers of every instance anew."""
    for v, leaf in zip(model.trainable_variables, plan.arguments, strict=False):
        expected = jax.sharding.NamedSharding(v.value.sharding.mesh, plan.specs[leaf.path])
        assert v.value.sharding.is_equivalent_to(expected, len(v.shape)), v.path


def test_fit_with_a_ragged_last_batch_evaluates_and_predicts():
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    x = np.random.default_rng(0).normal(size=(20, 32)).astype("float32")
    y = x[:, :8] * 2
    plan = autoshard.optimize(
        model, MESH, hardware=toy(flops_per_s=1e8, memory_bytes_per_s=1e8), batch_size=8, progress=False
    )
    before = [np.asarray(v) for v in model.trainable_variables]
    plan.apply(model)
    for a, v in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(a, np.asarray(v))
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(x, verbose=0).shape == (20, 8)
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    _assert_on_plan(model, plan)


def test_another_model_is_refused_and_left_alone():
    def build(units):
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(8)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    plan = autoshard.optimize(
        lambda: build(64), MESH, hardware=toy(flops_per_s=1e8, memory_bytes_per_s=1e8), batch_size=8, progress=False
    )
    other = build(128)
    with pytest.raises(autoshard.PlanMismatchError, match=r"\(32, 64\)"):
        plan.apply(other)
    assert all(len(v.value.sharding.device_set) == 1 for v in other.trainable_variables)
    same = build(64)
    plan.apply(same)
    assert same.train_on_batch(np.ones((8, 32), "float32"), np.ones((8, 8), "float32")) > 0

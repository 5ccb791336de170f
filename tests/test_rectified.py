"""Gradients of ReLUs on GPUs, told by the result instead of the operand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.apply import operations
from compiled import needs_cuda


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_gradient_is_the_same(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 0 and -0, below it, at infinities, and where there is no number; "cpu": told by the result here, too."""
    monkeypatch.setattr(operations, "TOLD_BY_RESULT", frozenset({platform}))
    numbers = np.array([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, 3.0] * 8, np.float32)
    x = np.tile(numbers, (16, 1))

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda y: jnp.sum(jnp.sin(jax.nn.relu(y)) * 0.5))(x)

    plan = autoshard.optimize_fn(gradient, (jax.ShapeDtypeStruct(x.shape, x.dtype),), {"data": 8}, hardware="h100")
    told = "neg" in str(jax.make_jaxpr(plan.jit())(x))
    assert told == (platform == "cpu")
    np.testing.assert_array_equal(np.asarray(plan.jit()(x)), np.asarray(jax.jit(gradient)(x)))


@needs_cuda
def test_what_comes_before_a_relu_is_not_held_for_its_gradient() -> None:
    """A convolution's result, beside that of the ReLU and its gradient: 1.49 of the predicted peak."""

    def model() -> keras.Model:
        images = keras.Input((64, 64, 8))
        h = keras.layers.GroupNormalization(4)(keras.layers.Conv2D(256, 1, activation="relu")(images))
        model = keras.Model(images, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(h)))
        model.compile("sgd", "mse")
        return model

    plan = autoshard.optimize(model, {"data": 2, "model": 4}, hardware="h100", batch_size=128, progress=False)
    seen = plan.verify("h100:8").compiled_peak_bytes
    assert seen is not None and seen == pytest.approx(plan.memory.peak_bytes, rel=0.05)

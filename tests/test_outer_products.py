"""Products over dimensions of size 1 are multiplications (``graph/rewrites.py``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.graph.rewrites import rewrite
from compiled import needs_tpu


def value(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(rng.integers(-9, 9, shape) if dtype == "int32" else rng.normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((5, 1), (1, 7), (((1,), (0,)), ((), ()))),
        ((1, 5), (7, 1), (((0,), (1,)), ((), ()))),  # a gradient
        ((3, 5, 1), (3, 1, 7), (((2,), (1,)), ((0,), (0,)))),
        ((5, 1, 3), (1, 7, 3), (((1,), (0,)), ((2,), (2,)))),  # the batch is last
        ((5, 1, 2, 1), (1, 1, 7), (((3, 1), (0, 1)), ((), ()))),
        ((4,), (6,), (((), ()), ((), ()))),
        ((4, 1), (1, 4), (((1,), (0,)), ((0,), (1,)))),  # nothing is free
    ],
)
@pytest.mark.parametrize(("dtype", "wanted"), [("float32", None), ("bfloat16", "float32"), ("int32", None)])
def test_an_outer_product_is_a_multiplication(left: Any, right: Any, numbers: Any, dtype: str, wanted: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = value(rng, left, dtype), value(rng, right, dtype)
    product = lax.dot_general(a, b, numbers, preferred_element_type=wanted)
    params = {"dimension_numbers": numbers, "preferred_element_type": wanted and np.dtype(wanted)}
    equal = rewrite("dot_general", params, (a, b), product.shape)
    assert equal is not None
    found = equal(a, b)
    assert found.dtype == product.dtype and found.shape == product.shape
    np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(product, np.float64))
    assert "dot_general" not in str(jax.make_jaxpr(equal)(a, b))


def test_other_products_stay() -> None:
    a, b = jnp.zeros((5, 2)), jnp.zeros((2, 7))
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "preferred_element_type": None}
    assert rewrite("dot_general", params, (a, b), (5, 7)) is None
    bits = jnp.zeros((5, 1), bool)
    assert rewrite("dot_general", params, (bits, bits.T), (5, 5)) is None


def one_unit() -> keras.Model:
    inputs = keras.Input((192,))
    x = layers.Dense(2048)(layers.Dense(4096, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.LeakyReLU()(x)))
    model.compile("adam", "mse")
    return model


@needs_tpu
@pytest.mark.slow
def test_what_reaches_the_layer_before_a_single_unit_is_not_gathered() -> None:
    mesh = {"data": 2, "model": 4}
    plan = autoshard.optimize(one_unit, mesh, hardware="tpu-v5e:2x4", batch_size=2048, progress=False)
    found = plan.verify("tpu-v5e:2x4")
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)

"""Functions that write to mutable arrays (``jax.new_ref``): planned and run as JAX compiles them, without any."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard_ilp as autoshard
from profiles_for_tests import toy

X = np.random.default_rng(0).normal(size=(16, 12)).astype("float32")
W = np.random.default_rng(1).normal(size=(12, 8)).astype("float32")


def overwritten(x, w):
    held = jax.new_ref(jnp.zeros((16, 8)))
    held[...] = x @ w
    held[:, 0] += 1.0
    return held[...]


def accumulated(x, w):
    total = jax.new_ref(jnp.zeros(8))

    def step(carry, row):
        total[...] += jnp.tanh(row @ w)
        return carry, total[...]

    return jax.lax.scan(step, None, x)[1], total[...]


def in_branches(x, w):
    held = jax.new_ref(jnp.zeros((16, 8)))
    jax.lax.cond(x.sum() > 0, lambda: held.__setitem__(..., x @ w), lambda: held.__setitem__(..., x @ -w))
    return jax.freeze(held)


def differentiated(x, w):
    return jax.value_and_grad(lambda w: jnp.mean(overwritten(x, w) ** 2))(w)


@pytest.mark.parametrize("fn", [overwritten, accumulated, in_branches, differentiated], ids=lambda f: f.__name__)
def test_mutable_arrays(fn):
    plan = autoshard.optimize_fn(fn, (X, W), {"a": 2, "b": 4}, hardware=toy(1e8, 1e8), progress=False)
    assert plan.status == "optimal" and not plan.unknown
    found, expected = plan.jit()(X, W), jax.jit(fn)(X, W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)

"""Plans inside ``jax.set_mesh`` of a mesh with Explicit axes, which ``jax.make_mesh`` makes unless told otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autoshard_ilp as autoshard
from keras_cases import assert_close, features, fitted, is_sharded, mlp, plan_for, seeded
from profiles_for_tests import toy

pytestmark = pytest.mark.usefixtures("quick_code")

X, Y = features(16)


@pytest.fixture
def mesh():
    made = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(made):
        yield made


def on_batches(model):
    one = X[:8], Y[:8]
    return model.train_on_batch(*one), model.test_on_batch(*one), model.predict_on_batch(one[0])


def test_a_function_is_planned_and_run(mesh):
    def fn(a, b):
        return jax.nn.relu(a @ b + jnp.zeros(8)).sum(0)

    args = X, np.ones((16, 8), "float32")
    plan = autoshard.optimize_fn(fn, args, mesh, hardware=toy(1e8, 1e8), progress=False)
    assert_close(np.asarray(plan.jit()(*args)), np.maximum(args[0] @ args[1], 0).sum(0))


def test_a_model_is_planned_applied_and_trained(mesh):
    model = seeded(mlp)
    plan = plan_for(model, (X, Y), mesh=mesh)
    assert is_sharded(plan)
    plan.jit().lower(*plan.abstract_args()).compile()
    plan.apply(model)
    found = fitted(model, X, Y)["loss"], model.predict(X, batch_size=8, verbose=0)
    found += on_batches(model)
    with jax.set_mesh(jax.make_mesh((1,), ("alone",), axis_types=(AxisType.Auto,))):
        alone = seeded(mlp)
        expected = fitted(alone, X, Y)["loss"], alone.predict(X, batch_size=8, verbose=0)
        expected += (
            alone.train_on_batch(X[:8], Y[:8]),
            alone.test_on_batch(X[:8], Y[:8]),
            alone.predict_on_batch(X[:8]),
        )
    assert_close(found, expected)


def test_a_model_is_born_sharded(mesh):
    plan = plan_for(mlp, (X, Y), mesh=mesh)
    with plan.scope():
        model = seeded(mlp)
    assert np.isfinite(fitted(model, X, Y)["loss"]).all()

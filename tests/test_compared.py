"""One element of each row, by comparing places: as JAX takes it and adds to it, for all modes, sharded or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.graph.rewrites import rewrite

pytestmark = pytest.mark.usefixtures("quick_code")

INDEXED = ("gather", "scatter-add")
MODES = (None, "clip", "fill", "promise_in_bounds")


def primitives(function: Any, *args: Any) -> list[str]:
    closed = jax.make_jaxpr(function)(*args)
    paths = [str(i) for i in range(len(args))]
    graph = build_graph(closed, argument_paths=paths, result_paths=[str(i) for i in range(len(closed.jaxpr.outvars))])
    return [op.primitive for op in graph.ops]


def planned(function: Any, *args: Any) -> Any:
    """What a planned program returns on eight devices."""
    mesh = {"data": 2, "model": 4}
    plan = autoshard.optimize_fn(function, args, mesh, hardware="h100", progress=False, donate_argnums=())
    return plan.jit()(*args)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)  # each compiles a program of its own
@given(
    rank=st.integers(2, 4),
    axis=st.integers(0, 3),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(("float32", "bfloat16", "int32")),
    seed=st.integers(0, 2**16),
)
def test_an_element_of_each_row_is_taken_and_added_to(rank: int, axis: int, mode: Any, dtype: str, seed: int) -> None:
    rng, axis = np.random.default_rng(seed), axis % rank
    shape = tuple(int(n) for n in rng.integers(2, 7, rank))
    low, high = (0, shape[axis]) if mode == "promise_in_bounds" else (-2 * shape[axis], 2 * shape[axis])
    x = jnp.asarray(rng.normal(size=shape) * 9, dtype)
    at = jnp.asarray(rng.integers(low, high, [1 if d == axis else n for d, n in enumerate(shape)]), "int32")
    new = jnp.asarray(rng.integers(-9, 9, at.shape), dtype)

    def both(x: Any, at: Any, new: Any) -> tuple[Any, Any]:
        taken, back = jax.vjp(lambda x: jnp.take_along_axis(x, at, axis=axis, mode=mode), x)
        return taken, (back(new) if dtype != "int32" else ())

    indexed = [e for e in equations(jax.make_jaxpr(both)(x, at, new).jaxpr) if e.primitive.name in INDEXED]
    assert indexed
    for eqn in indexed:
        params, operands = eqn.params, [v.aval for v in eqn.invars]
        instead = rewrite(eqn.primitive.name, params, operands, eqn.outvars[0].aval.shape)
        assert instead is not None
        args = [x, at.reshape(operands[1].shape), *([new.reshape(operands[2].shape)] if len(operands) > 2 else [])]
        np.testing.assert_array_equal(
            np.asarray(instead(*args), "float32"), np.asarray(eqn.primitive.bind(*args, **params), "float32")
        )


def equations(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr")
        found += equations(getattr(inner, "jaxpr", inner)) if inner is not None else [eqn]
    return found


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "uint32"])
def test_places_are_compared_as_they_are_counted(dtype: str) -> None:
    """More places than the indices' type can count."""
    x, at = np.arange(4 * 1000, dtype="float32").reshape(4, 1000), np.array([[3], [7], [100], [0]], dtype)
    with jax.enable_x64(dtype == "int64"):
        closed = jax.make_jaxpr(lambda x, at: jnp.take_along_axis(x, at, axis=1, mode="clip"))(x, at)
        (eqn,) = (e for e in equations(closed.jaxpr) if e.primitive.name == "gather")
        operands = [v.aval for v in eqn.invars]
        instead = rewrite("gather", eqn.params, operands, (4, 1))
        assert instead is not None
        found = instead(x, jnp.asarray(at).reshape(operands[1].shape))
    np.testing.assert_array_equal(found, np.take_along_axis(x, at.astype("int32"), 1))


@pytest.mark.parametrize("width", [8, 9])
def test_the_loss_of_each_label_is_planned_without_a_scatter(width: int) -> None:
    rng = np.random.default_rng(0)
    args = (
        rng.normal(size=(16, 4, 32)).astype("float32"),
        rng.normal(size=(32, width)).astype("float32"),
        rng.integers(0, width, (16, 4)).astype("int32"),
    )

    def loss(x: Any, w: Any, y: Any) -> Any:
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0].mean()

    both = jax.value_and_grad(loss, 1)
    assert not set(INDEXED) & set(primitives(both, *args))
    expected, found = both(*args), planned(both, *args)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, at: x[at],  # rows of a table
        lambda x, at: jnp.take_along_axis(x[0], at[:1], axis=0),  # of one row, which may be large
        lambda x, at: jnp.take_along_axis(x, jnp.stack([at, at], 1), axis=1),  # two of each row
        lambda x, at: x.at[at].add(1.0),
        lambda x, at: jnp.take_along_axis(x > 0, at[:, None], axis=1),
        lambda x, at: jnp.take_along_axis(x + 1j, at[:, None], axis=1),
    ],
)
def test_what_takes_more_than_one_number_of_each_row_is_kept(function: Any) -> None:
    found = primitives(function, jnp.ones((8, 6)), jnp.zeros(8, "int32"))
    assert set(INDEXED) & set(found)

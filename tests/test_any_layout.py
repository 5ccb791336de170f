"""Whatever layouts a plan has, its numbers are those of one device.

The best plan of a small function shards little. Here every operation gets any of its strategies, drawn at random, on
meshes whose axes do not divide the dimensions: compilers must not make their padding or their copies part of a result.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

import autoshard_ilp as autoshard
from random_layouts import at_random

UNEVEN = {"x": 3, "y": 2}
TWO = {"data": 2, "model": 4}


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def integers(below, *shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, below, shape), jnp.int32)


def positive_definite(n):
    x = normal(n, n)
    return x @ x.T + n * jnp.eye(n)


def plan_at_random(fn, args, mesh, seed, **options):
    """A plan of strategies drawn at random."""
    with at_random(seed):
        return autoshard.optimize_fn(fn, args, mesh, donate_argnums=(), **options)


def check(fn, args, mesh, seeds, rtol=1e-4):
    expected = jax.jit(fn)(*args)
    for seed in seeds:
        found = plan_at_random(fn, args, mesh, seed, strict=True)
        got = found.jit()(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-4), got, expected)


def every_row_in_turn(a):
    return jax.lax.fori_loop(0, 4, lambda i, s: s.at[i].add(0.1 * jnp.sum(s)), a)


@pytest.mark.parametrize(
    ("fn", "args", "seeds"),
    [
        (every_row_in_turn, (normal(16, 8),), range(4)),
        (lambda a: jnp.zeros(16).at[a].add(jnp.cos(a * 1.0)), (integers(16, 64),), range(6)),
        (
            lambda t, a, b, u: t.at[a, b].multiply(u),
            (normal(16, 8), integers(16, 32), integers(8, 32), normal(32)),
            (1, 8),
        ),
        (
            lambda d, s: (jax.ops.segment_max(d, s, 17), jax.ops.segment_sum(d, s, 17)),
            (normal(35, 8), integers(17, 35)),
            (0, 1),
        ),
    ],
    ids=["one row at a time", "counting", "products", "segments"],
)
def test_padding_is_not_scattered(fn, args, seeds):
    check(fn, args, UNEVEN, seeds)


def test_a_fourier_transform_beside_a_collective():
    check(lambda a, b: jsp.signal.fftconvolve(a, b, mode="same"), (normal(16, 16), normal(5, 5)), TWO, (0, 1))


@pytest.mark.parametrize("fn", [jnp.linalg.solve, jax.grad(lambda a, b: jnp.sum(jnp.linalg.solve(a, b)))])
def test_a_linear_solve_is_what_it_calls(fn):
    check(fn, (positive_definite(16), normal(16, 8)), TWO, (0, 1))


@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmean, jax.lax.pmax, jax.lax.pmin])
def test_a_reduction_over_an_axis_of_vmap_is_one_of_a_dimension(reduce):
    check(jax.vmap(lambda a: a - reduce(jnp.sin(a), "rows"), axis_name="rows"), (normal(16, 8),), TWO, (0, 1))


def test_a_choice_between_platforms_is_its_default():
    check(lambda a: jnp.diag(jnp.diag(a @ a.T)), (normal(16, 8),), TWO, (0, 1))


def test_a_choice_without_a_branch_for_every_platform_is_kept_whole():
    def fn(a):
        return jax.lax.platform_dependent(a, cpu=lambda x: jnp.sin(x), tpu=lambda x: jnp.cos(x))

    found = autoshard.optimize_fn(fn, (normal(16, 8),), TWO, strict=True)
    np.testing.assert_allclose(found.jit()(normal(16, 8)), np.sin(normal(16, 8)), rtol=1e-6)


def test_a_loop_that_its_data_ends_is_known():
    def fn(a):
        return jax.lax.while_loop(lambda s: jnp.sum(s) > 1, lambda s: s * 0.5, jnp.abs(a))

    check(fn, (normal(16, 8),), TWO, (0,))


def test_nothing_to_scatter_of_an_empty_dimension():
    check(lambda a: a @ jnp.zeros((4, 8)) + a.sum(), (normal(0, 4),), TWO, range(3))


def test_a_batch_of_loops_ends_row_by_row():
    """``vmap`` makes a loop whose condition has one answer per row; JAX adds the rest when it lowers it."""

    def halved(a):
        return jax.vmap(lambda row: jax.lax.while_loop(lambda s: jnp.sum(s) > 1, lambda s: s * 0.5, jnp.abs(row)))(a)

    check(halved, (normal(16, 8),), TWO, range(2))


@pytest.mark.parametrize(
    ("fn", "args", "mesh", "seeds"),
    [
        (lambda x, a, b: jax.lax.dynamic_slice(jnp.sin(x), (a, b), (3, 2)), (normal(3, 3), 2, 2), TWO, (1, 3)),
        (
            lambda x, a, b: jax.lax.dynamic_slice(jnp.sin(x)[:, 2:6], (a, b), (12, 2)),
            (normal(12, 8), 2, 7),
            UNEVEN,
            (3, 16),
        ),
        (
            lambda x, a: jax.vmap(lambda s: jax.lax.dynamic_slice_in_dim(jnp.sin(x), s, 3, 1))(a),
            (normal(12, 8), jnp.array([7], jnp.int32)),
            UNEVEN,
            (9, 10),
        ),
    ],
    ids=["full", "cut before", "gather"],
)
def test_a_slice_that_begins_too_late_moves_back(fn, args, mesh, seeds):
    """XLA joins it with the slices that cut values into shards, and forgets to move it."""
    check(lambda *a: jnp.sin(fn(*a)), args, mesh, seeds)


def test_slices_and_updates_out_of_range_of_a_slice():
    """What XLA gets wrong on one device too; the plan gives what the operations say."""

    def fn(x, a, b):
        part = jax.lax.dynamic_slice(x, (a, 0), (4, 8))
        late = jax.lax.dynamic_slice(part, (b.astype(jnp.int8), jnp.int8(0)), (2, 8))
        row = jnp.take(part, b, 0, mode="clip")
        return late, row, part.at[b].set(-1.0, mode="drop"), part.at[b - 9].add(1.0, mode="drop")

    args = (normal(12, 8), jnp.int32(2), jnp.int32(7))
    with jax.disable_jit():
        expected = fn(*args)
    for seed in (0, 1):
        got = plan_at_random(fn, args, TWO, seed, strict=True).jit()(*args)
        jax.tree.map(np.testing.assert_allclose, got, expected)


@pytest.mark.parametrize(
    ("fn", "seeds"),
    [
        (lambda k: 3 * k, (22, 36)),
        (lambda k: (3 * k + 1) * 2 - k, (6, 9, 22)),
        (lambda k: 3 * k.astype("int8") + 5 * k.astype("uint8").astype("int8"), (0, 1)),
    ],
    ids=["once", "twice", "other dtypes"],
)
def test_whole_numbers_of_one_element_per_device_are_multiplied(fn, seeds):
    """XLA's simplifier loses such a product between two slices of it."""
    check(fn, (integers(9, 8) - 4,), {"a": 2, "b": 2, "c": 2}, seeds)

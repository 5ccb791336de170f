"""Programs that nobody wrote: any layouts give the numbers of one device, and plans keep what they promise."""

import jax
import numpy as np
import pytest

import autoshard_ilp as autoshard
from dear_compute import dear_compute
from random_programs import program, wide_program
from test_any_layout import plan_at_random

MESHES = ({"x": 8}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}, {"x": 3, "y": 2}, {"z": 2, "one": 1, "a": 4})
WIDE_MESHES = ({"x": 3, "y": 2}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}, {"x": 8}, {"x": 5})
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 160)]


def compare(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("seed", [*range(10), *SLOW])
def test_any_layout_of_a_random_program_gives_the_numbers_of_one_device(seed):
    fn, args = program(seed)
    expected = jax.jit(fn)(*args)
    found = plan_at_random(fn, args, MESHES[seed % len(MESHES)], seed, strict=True)
    got = found.jit()(*args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(compare, got, expected)


@pytest.mark.parametrize("seed", [*range(12), *SLOW])
def test_any_layout_of_operations_of_every_family(seed):
    """Of what the other tests draw rarely or never: all kinds of indices, windows, loops, branches and dtypes."""
    fn, args = wide_program(seed, length=2 if seed < 100 else 6)
    expected = jax.jit(fn)(*args)
    found = plan_at_random(fn, args, WIDE_MESHES[seed % len(WIDE_MESHES)], seed)
    jax.tree.map(compare, found.jit()(*args), expected)


@pytest.mark.parametrize("seed", [*range(20, 26), *SLOW])
def test_budgets_and_pins_of_a_random_program(seed):
    fn, args = program(seed, choice=(8, 12, 16, 24))
    mesh, free = MESHES[seed % len(MESHES)], {"hardware": dear_compute()}
    plan = autoshard.optimize_fn(fn, args, mesh, **free)
    cost, peak = plan.cost.total_s, plan.memory.peak_bytes
    assert plan.status == "optimal" and plan.lower_bound <= cost * (1 + 1e-9)
    assert autoshard.optimize_fn(fn, args, mesh, max(peak, 1), **free).cost.total_s == pytest.approx(cost, rel=1e-9)
    own = {f"^{path}$": spec for path, spec in plan.specs.items()}
    assert plan.what_if(pins=own).cost.total_s == pytest.approx(cost, rel=1e-9)
    try:
        autoshard.optimize_fn(fn, args, mesh, 1, **free)
    except autoshard.InfeasibleError as error:
        least = error.minimum_budget
    else:  # nothing of a kilobyte or more, which is what is counted, needs to be held
        return
    tight = autoshard.optimize_fn(fn, args, mesh, least, **free)
    assert tight.memory.peak_bytes == least and tight.cost.total_s >= cost * (1 - 1e-9)
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.optimize_fn(fn, args, mesh, least - 1, **free)

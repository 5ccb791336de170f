"""Corners of the public functions: steps that hand arguments back, empty dimensions, names that XLA cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard

MESH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, nothing: (x, nothing), (jnp.ones((64, 32)), {})),
        (lambda x: (x,), (jnp.ones((64, 32)),)),
        (lambda s: s, ({"a": jnp.ones((64, 32)), "b": jnp.zeros((64, 32))},)),
        (lambda x: (x,), (jnp.ones((256, 512)),)),  # large enough for its copies to count as memory
    ],
)
def test_a_step_that_only_hands_its_donated_argument_back(fn, args):
    found = autoshard.optimize_fn(fn, args, MESH)
    assert found.executable.donated == (0,) and found.status == "optimal" and found.cost.communication_s == 0
    state = sum(x.nbytes for x in jax.tree.leaves(args))
    assert found.memory.peak_bytes <= state
    whole = autoshard.optimize_fn(fn, args, MESH, pins={"^args/0": P()})
    assert whole.memory.peak_bytes == state  # handed over, not copied
    tight = autoshard.optimize_fn(fn, args, MESH, memory_budget=state // 8)
    assert tight.memory.peak_bytes == state // 8
    expected = jax.tree.map(np.asarray, fn(*args))
    assert found.what_if(pins={"^args/0": P("data")}).specs.popitem()[1] == P("data")
    assert "optimal" in found.summary() and found.explain(found.arguments[0].path)
    got = found.jit()(*jax.tree.map(jnp.copy, args))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_pin_on_an_empty_dimension_names_it():
    with pytest.raises(autoshard.InputShapeError, match="dimension 0 of size 0"):
        autoshard.optimize_fn(lambda x: x * 2, (jnp.zeros((0, 8)),), MESH, pins={"args/0": ("data", None)})


@pytest.mark.parametrize("name", ["é", "back\\slash", "日本"])
def test_mesh_axes_that_end_the_process_in_xla_are_refused(name):
    with pytest.raises(autoshard.InputShapeError, match="ASCII"):
        autoshard.optimize_fn(lambda x: x * 2, (jnp.ones((8, 8)),), {name: 2, "model": 4})


@pytest.mark.parametrize("name", ["my axis", 'a"b', "a/b", "1", "a,b"])
def test_other_odd_names_of_mesh_axes_run(name):
    found = autoshard.optimize_fn(lambda x: x @ x, (jnp.ones((8, 8)),), {name: 2, "model": 4}, pins={"args/0": name})
    np.testing.assert_array_equal(found.jit()(jnp.ones((8, 8))), np.full((8, 8), 8.0))
    assert found.specs["args/0"] == P(name) and found.summary()

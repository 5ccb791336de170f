"""argmax and argmin are written out as two reductions: equal values, and no gathering of what they reduce."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.graph.rewrites import rewrite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_same_place_as_the_primitive(name: str, dtype: str) -> None:
    """Ties go to the first, NaN wins, infinities are ordinary."""
    values = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 5, 7)), dtype)
    if dtype in ("float32", "bfloat16"):
        values = values.at[1, 2, 3].set(jnp.nan).at[1, 2, 5].set(jnp.nan).at[0].set(-jnp.inf).at[2].set(jnp.inf)
    for axis in range(3):
        written_out = rewrite(name, {"axes": (axis,), "index_dtype": np.dtype("int32")}, (), ())
        found, wanted = written_out(values), getattr(jnp, name)(values, axis=axis)
        assert found.dtype == wanted.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


def test_a_sharded_vocabulary_is_not_gathered() -> None:
    """Two numbers per row are all-reduced; gathering the logits would send 400 MB."""
    rows, width, vocabulary = 8192, 256, 32768

    def accuracy(x: Any, w: Any, y: Any) -> Any:
        return jnp.sum(jnp.argmax(x @ w, axis=-1) == y)

    shapes = (((rows, width), "bfloat16"), ((width, vocabulary), "bfloat16"), ((rows,), "int32"))
    plan = autoshard.optimize_fn(
        accuracy,
        tuple(jax.ShapeDtypeStruct(*s) for s in shapes),
        {"model": 4},
        hardware="h100",
        pins={"^args/0$": P(), "^args/1$": P(None, "model")},
        progress=False,
    )
    assert 0 < sum(c.bytes_per_device * c.count for c in plan.collectives) <= 2 * 2 * rows * 4


def test_the_graph_has_no_argmax() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.argmax(x, 1))(jax.ShapeDtypeStruct((8, 8), "float32"))
    graph = build_graph(jaxpr, argument_paths=["x"], result_paths=["y"])
    assert not [op for op in graph.ops if op.primitive == "argmax"]

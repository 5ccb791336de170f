"""Sums of partial sums are reduced once: in the program, in its price, and in the compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp.deferral import Deferral
from autoshard_ilp.rules import rule_for
from autoshard_ilp.rules.rule import OpView
from autoshard_ilp.sharding import PARTIAL, WHOLE
from autoshard_ilp.strategies import strategies_of
from compiled import needs_cuda

MESH = {"data": 2, "model": 4}
X, W = (2048, 2048), (2048, 2048)


def three_products(x, y, z, a, b, c):
    """As the gradient of what query, key and value read."""
    return x @ a + (y @ b + (z @ c).T)


def planned(function=three_products, hardware="h100", **more):
    """Contracted dimensions sharded by pins, so that every product leaves partial sums over "model"."""
    shapes = [jax.ShapeDtypeStruct(X, "bfloat16")] * 3 + [jax.ShapeDtypeStruct(W, "bfloat16")] * 3
    pins = {f"^args/{i}$": P(None, "model") for i in range(3)} | {f"^args/{i}$": P("model") for i in (3, 4, 5)}
    return autoshard.optimize_fn(function, tuple(shapes), MESH, hardware=hardware, pins=pins, progress=False, **more)


def bytes_of(plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for c in plan.collectives:
        found[c.kind] = found.get(c.kind, 0.0) + c.bytes_per_device * c.count
    return found


def test_a_sum_of_three_products_is_reduced_once():
    plan = planned()
    assert [(c.kind, c.bytes_per_device, c.operation) for c in plan.collectives] == [
        ("reduce-scatter", 3 / 4 * 2048 * 1024 * 2, "add")
    ]


def test_whole_results_are_all_reduced_once():
    """With the batch whole and the result whole everywhere the sum is all-reduced, at twice a reduce-scatter."""
    pins = {f"^args/{i}$": P(None, "model") for i in range(3)} | {f"^args/{i}$": P("model") for i in (3, 4, 5)}
    shapes = [jax.ShapeDtypeStruct(X, "bfloat16")] * 3 + [jax.ShapeDtypeStruct(W, "bfloat16")] * 3
    plan = autoshard.optimize_fn(
        three_products, tuple(shapes), {"model": 4}, hardware="h100", pins={**pins, "outputs/0": P()}, progress=False
    )
    assert sum(bytes_of(plan).values()) == pytest.approx(2 * 3 / 4 * 2048 * 2048 * 2)
    assert sum(c.count for c in plan.collectives) <= 2  # all-reduce, or reduce-scatter and all-gather


def test_what_something_else_reads_is_reduced_by_itself():
    def both(x, y, z, a, b, c):
        first = x @ a
        return jnp.tanh(first) + (first + y @ b) + 0 * (z @ c)

    plan = planned(both)
    assert sum(c.count for c in plan.collectives if c.kind == "reduce-scatter") == 3


def test_strategies_of_a_sum():
    rule = rule_for(OpView("add_any", ((8, 8), (8, 8)), ((8, 8),), ("float32",) * 2, ("float32",)))
    shapes = [(8, 8), (8, 8)], [(8, 8)]
    plain = strategies_of(rule, *shapes, (2,))
    assert not any(PARTIAL in lay for s in plain for lay in (*s.operands, *s.results))
    summing = [s for s in strategies_of(rule, *shapes, (2,), deferral=Deferral(True, True)) if s not in plain]
    assert {(s.operands, s.results[0], s.resolutions[0].kind) for s in summing} == {
        (((PARTIAL,), (PARTIAL,)), (WHOLE,), "all-reduce"),
        (((PARTIAL,), (PARTIAL,)), (0,), "reduce-scatter"),
        (((PARTIAL,), (PARTIAL,)), (1,), "reduce-scatter"),
    }
    leaving = strategies_of(rule, *shapes, (2,), deferral=Deferral(True, True, True))
    assert ((PARTIAL,),) in [s.results for s in leaving if s.operands == ((PARTIAL,), (PARTIAL,))]
    handed_on = strategies_of(rule, *shapes, (2,), deferral=Deferral(True, False, True))
    assert all(not s.resolutions for s in handed_on)


def test_the_plan_file_keeps_partial_layouts(tmp_path):
    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").placement == plan.placement


WORDS, ROWS, COLUMNS = 16, 32768, 128


def bag_of_words(table, words, weights):
    """Every example's rows of a table, added up in 32 bits."""
    return jnp.sum(jnp.take(table, words, axis=0).astype("float32"), axis=1) @ weights


def bag(hardware="h100", examples=256, dtype="bfloat16", **more):
    """The plan of a table whose rows are sharded over "model"."""
    shapes = ((ROWS, COLUMNS), dtype), ((examples, WORDS), "int32"), ((COLUMNS, COLUMNS), "float32")
    pins = {"^args/0$": P("model"), "^args/1$": P("data"), "^args/2$": P(), "outputs/0": P("data")}
    structs = tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
    return autoshard.optimize_fn(bag_of_words, structs, MESH, hardware=hardware, pins=pins, progress=False, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_looked_up_is_added_up_before_it_is_reduced(dtype):
    """One row per example is reduced, not one per word: WORDS times fewer bytes."""
    sums = [c for c in bag(dtype=dtype).collectives if c.operation.endswith("reduce_sum")]
    assert [c.kind for c in sums] in (["all-reduce"], ["reduce-scatter"])
    whole = 256 // 2 * COLUMNS * 4
    assert sums[0].bytes_per_device == (2 if sums[0].kind == "all-reduce" else 1) * 3 / 4 * whole
    assert not [c for c in bag(dtype=dtype).collectives if c.operation.endswith("gather")]


def test_a_bag_of_words_is_the_one_of_one_device():
    """Words that are not in the table, and those counted from its end, included."""
    plan = bag(hardware="cpu-host", examples=16, dtype="float32")
    rng = np.random.default_rng(0)
    table, weights = (rng.normal(size=(n, COLUMNS)).astype("float32") for n in (ROWS, COLUMNS))
    words = rng.integers(-ROWS, ROWS, (16, WORDS)).astype("int32")
    words[3, 4], words[5, 6] = ROWS, -ROWS - 1
    want = np.asarray(bag_of_words(table, words, weights))
    assert np.isnan(want[[3, 5]]).all() and np.isfinite(np.delete(want, [3, 5], 0)).all()
    np.testing.assert_allclose(plan.jit()(table, words, weights), want, rtol=1e-5, atol=1e-5)


def test_a_sum_over_sharded_dimensions_of_partial_sums():
    """Both reductions, over the contracted dimension and over the rows that are added up, are one."""

    def function(x, w):
        return jnp.sum(x @ w, axis=0)

    shapes = jax.ShapeDtypeStruct((8192, 32), "float32"), jax.ShapeDtypeStruct((32, 48), "float32")
    pins = {"^args/0$": P("data", "model"), "^args/1$": P("model"), "outputs/0": P()}
    plan = autoshard.optimize_fn(function, shapes, MESH, hardware="cpu-host", pins=pins, progress=False)
    assert all(c.operation.endswith(("reduce_sum", "result")) for c in plan.collectives)
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s.shape).astype("float32") for s in shapes)
    np.testing.assert_allclose(plan.jit()(x, w), function(x, w), rtol=1e-5, atol=1e-3)


def test_what_is_narrowed_is_reduced_before():
    """Rounding does not commute with a sum: a narrower dtype ends what may stay partial."""

    def function(x, w):
        return jnp.sum((x @ w).astype("bfloat16").astype("float32"), axis=0)

    shapes = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 48), "float32")
    pins = {"^args/0$": P(None, "model"), "^args/1$": P("model"), "outputs/0": P()}
    plan = autoshard.optimize_fn(function, shapes, MESH, hardware="h100", pins=pins, progress=False)
    assert [c.operation for c in plan.collectives][:1] == ["dot_general"]


@needs_cuda
@pytest.mark.cuda
def test_the_gpu_compiler_reduces_what_words_add_up_to():
    checked = bag().verify("h100:8")
    assert checked.compiled_bytes_per_device == checked.predicted_bytes_per_device


@pytest.mark.tpu
def test_the_tpu_compiler_reduces_what_words_add_up_to():
    pytest.importorskip("libtpu")
    checked = bag(hardware="tpu-v5e:2x4").verify("tpu-v5e:2x4")
    assert checked.compiled_bytes_per_device == pytest.approx(checked.predicted_bytes_per_device, rel=0.01)


@needs_cuda
@pytest.mark.cuda
def test_the_gpu_compiler_reduces_once():
    checked = planned().verify("h100:8")
    assert checked.compiled_bytes_per_device == checked.predicted_bytes_per_device == 3 * 2**20
    assert [c.kind for c in checked.collectives] == ["reduce-scatter"]


@pytest.mark.tpu
def test_the_tpu_compiler_reduces_once():
    pytest.importorskip("libtpu")
    checked = planned(hardware="tpu-v5e:2x4").verify("tpu-v5e:2x4")
    assert checked.compiled_bytes_per_device == pytest.approx(checked.predicted_bytes_per_device, rel=0.01)

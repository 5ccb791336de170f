"""Sums of partial sums are reduced once: in the program, in its price, and in the compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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

"""Sequence-parallel layouts: around a norm, a reduce-scatter and an all-gather take the place of an all-reduce."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from compiled import needs_cuda

TOKENS, WIDTH, HIDDEN = 8192, 2048, 32768


def block(x, scale, up, down):
    """A residual block: norm, product whose columns are sharded, product whose rows are."""
    mean = jnp.mean(jnp.square(x.astype("float32")), axis=-1, keepdims=True)
    normed = (x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)) * scale
    return x + jax.nn.gelu(normed @ up) @ down


def two_blocks(x, scale, up, down):
    return block(block(x, scale, up, down), scale, up, down)


def planned(result=None, tokens=TOKENS):
    """Weights sharded over "model" as in Megatron, and larger than the tokens, which arrive whole."""
    shapes = [(tokens, WIDTH), (WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    args = tuple(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes)
    pins = {"args/0": P(), "args/1": P(), "args/2": P(None, "model"), "args/3": P("model")}
    pins |= {} if result is None else {"outputs/0": result}
    return autoshard.optimize_fn(two_blocks, args, {"model": 4}, pins=pins, hardware="h100", progress=False)


def sent(plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for c in plan.collectives:
        found[c.kind] = found.get(c.kind, 0.0) + c.bytes_per_device * c.count
    return found


def test_the_norm_between_two_blocks_runs_on_shards():
    """Scatter and gather send what the all-reduce would, and the norm is computed once instead of four times."""
    payload = TOKENS * WIDTH * 2
    plan = planned(P("model"))
    assert sent(plan) == pytest.approx({"reduce-scatter": 2 * 3 / 4 * payload, "all-gather": 3 / 4 * payload})
    assert plan.status == "optimal"


def test_a_whole_result_sends_no_more_than_two_all_reduces():
    plan = planned(P())
    assert sum(sent(plan).values()) == pytest.approx(2 * 2 * 3 / 4 * TOKENS * WIDTH * 2)


def test_a_few_tokens_are_all_reduced():
    """A collective has a price of its own: with little to compute, one all-reduce is cheaper than two collectives."""
    assert set(sent(planned(P(), tokens=16))) <= {"all-reduce"}


@needs_cuda
@pytest.mark.cuda
def test_the_gpu_compiler_keeps_the_layout():
    plan = planned(P("model"))
    checked = plan.verify("h100:4")
    assert checked.compiled_bytes_per_device == checked.predicted_bytes_per_device
    assert {c.kind for c in checked.collectives} == {"reduce-scatter", "all-gather"}
    assert checked.differences == ()

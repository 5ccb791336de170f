"""The rule of cuDNN's flash attention. Where there is no GPU its primitives can be traced, but not run."""

import dataclasses
import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import autoshard_ilp as autoshard
from autoshard_ilp.rules import OpView, rule_for, runs_locally
from compiled import needs_cuda

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH = 8, 256, 16, 4, 64
EMPTY = (0,)


def view(primitive, heads, key_heads, bias=EMPTY, mask="MaskType.NO_MASK", dbias=False, layout=0):
    def array(n):
        return (BATCH, TOKENS, n, WIDTH) if layout == 0 else (BATCH, n, TOKENS, WIDTH)

    q, k, sums = array(heads), array(key_heads), (BATCH, heads, TOKENS)
    given = (q, k, k, bias, *6 * [EMPTY])
    forward = "fwd" in primitive
    ins, outs = (given, (q, sums)) if forward else ((*given, sums, q, q), (q, k, k))
    params = {"variadic_args": (bias != EMPTY, dbias), "mask_type": mask, "layout": layout}
    return OpView(primitive, ins, outs, len(ins) * ("bfloat16",), len(outs) * ("bfloat16",), params)


FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("key_heads", [HEADS, KEY_HEADS, 1])
@pytest.mark.parametrize("primitive", [FORWARD, BACKWARD])
def test_batch_and_heads_pass_and_nothing_else(primitive, key_heads, layout):
    op = view(primitive, HEADS, key_heads, layout=layout)
    rule = rule_for(op)
    assert rule.known and runs_locally(op)
    free = {name: f.size for name, f in rule.factors.items() if f.kind.name == "PASS"}
    assert sorted(free.values()) == sorted(n for n in (BATCH, key_heads) if n > 1)
    heads_at = 2 if layout == 0 else 1
    assert rule.operands[0][0] == rule.operands[1][0] == rule.operands[2][0] == rule.results[0][0]
    if key_heads > 1:
        assert rule.operands[0][heads_at][0] == rule.operands[1][heads_at][0] in free
    products = 2 if primitive == FORWARD else 5
    assert rule.flops == products * 2 * BATCH * HEADS * TOKENS**2 * WIDTH


def test_a_mask_goes_with_the_batch_and_half_is_computed_under_a_causal_one():
    masked = rule_for(view(FORWARD, HEADS, HEADS, bias=(BATCH, 1, TOKENS, TOKENS)))
    assert masked.operands[3][0] == masked.operands[0][0] and masked.operands[3][1] == ()
    causal = rule_for(view(FORWARD, HEADS, HEADS, mask="MaskType.CAUSAL"))
    assert causal.flops == masked.flops / 2


def test_the_gradient_of_a_bias_is_not_covered():
    assert not rule_for(view(FORWARD, HEADS, HEADS, bias=(1, HEADS, TOKENS, TOKENS), dbias=True)).known


def test_a_function_of_the_scores_is_not_covered():
    op = view(FORWARD, HEADS, HEADS)
    assert rule_for(dataclasses.replace(op, params={**op.params, "score_mod": None})).known
    assert not rule_for(dataclasses.replace(op, params={**op.params, "score_mod": max})).known


def attention(x, w):
    """Traced as ``jax.nn.dot_product_attention(..., implementation="cudnn")`` and its gradient on a GPU."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, part) for part in w)
    nothing = [jnp.zeros((0,), x.dtype)] * 7
    names = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
    values = (0.125, 42, 0.0, (False, False), cudnn.MaskType.CAUSAL, 0, None)
    params = dict(zip(names, values, strict=True))
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters:  # from jax 0.12 on
        params["score_mod"] = None
    out, sums = cudnn._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *nothing, **params, is_training=True)
    return out, *cudnn._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *nothing, sums, out, out, **params)


X = jax.ShapeDtypeStruct((BATCH, TOKENS, 4096), jnp.bfloat16)
W = [jax.ShapeDtypeStruct((4096, n, WIDTH), jnp.bfloat16) for n in (HEADS, KEY_HEADS, KEY_HEADS)]


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, {"model": 8}])
def test_attention_is_planned_over_batch_and_heads(mesh):
    plan = autoshard.optimize_fn(attention, (X, W), mesh, hardware="h200", progress=False)
    assert not plan.unknown
    for path, spec in plan.specs.items():
        if path.startswith("outputs"):
            assert any(spec) and all(dim is None for dim in (*spec[1:2], *spec[3:4]))


@needs_cuda
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, {"model": 8}])
def test_compiled_for_gpus_each_device_computes_its_rows_and_heads(mesh):
    plan = autoshard.optimize_fn(attention, (X, W), mesh, hardware="h200", progress=False)
    seen = plan.verify("h200:8")
    found = [line.split("custom-call(")[0] for line in seen.text.splitlines() if "custom-call(" in line]
    kernels = [re.search(r"bf16\[([\d,]+)\]", line) for line in found if "dot_product_attention" in line]
    assert len(kernels) == 2
    for match in kernels:
        assert match is not None
        assert math.prod(map(int, match[1].split(","))) == BATCH * TOKENS * HEADS * WIDTH // 8
    assert seen.compiled_bytes_per_device == seen.predicted_bytes_per_device

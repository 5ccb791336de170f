"""Products that XLA:GPU makes one, and the place of cuBLAS's workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.gpu.siblings import MERGED_BYTES, held_for_siblings, merged_bytes
from autoshard_ilp.costs.gpu.workspace import workspace_spans
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.rules import rule_for
from autoshard_ilp.strategies import strategies_of
from compiled import needs_cuda, unlike_jax_12


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    jaxpr = jax.make_jaxpr(function)(*args)
    names = [f"a{i}" for i in range(len(jaxpr.jaxpr.invars))]
    results = [f"r{i}" for i in range(len(jaxpr.jaxpr.outvars))]
    return insert_hubs(build_graph(jaxpr, argument_paths=names, result_paths=results))


def attention(tokens: int, batch: int = 8) -> Graph:
    """The gradient of attention over so many tokens, in bfloat16."""

    def loss(x: Any, weights: Any, bias: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) + bias for w in weights)
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q * 0.125, k).astype("float32")).astype("bfloat16")
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", scores, v).astype("float32") ** 2)

    x, w, b = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((batch, tokens, 64), (64, 4, 16), (4, 16)))
    return graph_of(jax.grad(loss, argnums=(0, 1, 2)), x, [w, w, w], b)


@pytest.mark.parametrize(("tokens", "held"), [(197, 2), (200, 0)])
def test_keys_and_values_are_held_beside_their_copies_for_the_query(tokens: int, held: int) -> None:
    """The padded query is computed from the product of all three once more in the backward pass."""
    graph = attention(tokens)
    buffers = analyse(graph, "gpu")
    found = held_for_siblings(graph, buffers)
    assert len(found) == held
    forward = [op for op in graph.ops if op.primitive == "dot_general" and not op.params["dimension_numbers"][1][0]][:3]
    for product, until in found.items():
        assert product in {op.id for op in forward[1:]}
        assert until > buffers.end[graph.ops[product].outputs[0]]


def test_large_products_are_not_merged() -> None:
    """Operands and result of one device count."""
    batch = 8 * (MERGED_BYTES // (2 * 2 * 64 * 197) - 1)  # operand and result in bfloat16, and a small weight
    graph = attention(197, batch=batch)
    op = next(op for op in graph.ops if op.primitive == "dot_general")
    view = graph.view(op)
    strategies = strategies_of(rule_for(view), view.in_shapes, view.out_shapes, (8,))
    held = merged_bytes(graph, op, strategies, (8,))
    by_batch = next(i for i, s in enumerate(strategies) if s.operands[0] == (0,) and s.results[0] == (0,))
    assert held[0] == 0, "whole, they are too large"
    assert held[by_batch] == batch // 8 * 197 * 64 * 2
    assert not held[[bool(s.resolutions) for s in strategies]].any(), "what is summed up after it is no part of it"


@pytest.mark.parametrize(("rows", "used"), [(65536, True), (64, False)])
def test_only_what_lives_between_products_takes_the_place_of_their_workspace(rows: int, used: bool) -> None:
    """What is sorted first is read by no product."""

    def step(x: Any, w: Any) -> Any:
        return jnp.sort(-jnp.sort(x @ w)) @ w

    graph = graph_of(step, jax.ShapeDtypeStruct((rows, 256), "float32"), jax.ShapeDtypeStruct((256, 256), "float32"))
    buffers = analyse(graph, "gpu")
    free = np.zeros(buffers.horizon, bool)
    for start, end in workspace_spans(graph, buffers, 1):
        free[start:end] = True
    first, last = (int(buffers.time[op.id]) for op in graph.ops if op.primitive == "dot_general")
    between, beside = (int(buffers.time[op.id]) for op in graph.ops if op.primitive == "sort")
    assert free[[first, beside, last]].tolist() == [True, not used, True]
    assert free[between] != used
    assert not free[:first].any() and not free[last + 1 :].any()


@pytest.mark.slow
@needs_cuda
@unlike_jax_12("956 MB of 1071 MB predicted")
def test_memory_of_attention_over_odd_tokens() -> None:
    """Two layers of a vision transformer whose products Triton does not take (1.064 of the prediction before)."""
    layers = keras.layers
    with_16_bits = keras.DTypePolicy("mixed_bfloat16")
    x = inputs = keras.Input((197, 256))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6, dtype=with_16_bits)(x)
        x = x + layers.MultiHeadAttention(4, 64, dtype=with_16_bits)(y, y)
        y = layers.LayerNormalization(epsilon=1e-6, dtype=with_16_bits)(x)
        y = layers.Dense(1024, lambda z: keras.activations.gelu(z, approximate=False), dtype=with_16_bits)(y)
        x = x + layers.Dense(256, dtype=with_16_bits)(y)
    model = keras.Model(inputs, layers.Dense(10)(x[:, 0]))
    model.compile("adam", "mse")
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 1024, "progress": False, "remat": "never"}
    plan = autoshard.baseline(model, {"data": 8}, "data_parallel", **options)
    compiled = plan.verify("h100:8").compiled_peak_bytes
    assert compiled == pytest.approx(plan.memory.peak_bytes, rel=0.05)

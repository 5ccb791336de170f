"""Statistics over groups of channels are computed in the channels' own shape: same values, nothing left split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import autoshard_ilp as autoshard
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.check import check_graph
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.graph.groups import merge_groups
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_tpu

GROUPS = 4


def normalised(x: Any, scale: Any, shift: Any, axis: int) -> Any:
    """Group normalisation of channels at ``axis``, with a value per channel (scale, shift)."""
    c = x.shape[axis] // GROUPS
    y = x.astype("float32").reshape(*x.shape[:axis], GROUPS, c, *x.shape[axis + 1 :])
    over = tuple(d for d in range(1, y.ndim) if d != axis)
    per_channel = [1] * y.ndim
    per_channel[axis : axis + 2] = GROUPS, c
    y = (y - y.mean(over, keepdims=True)) * lax.rsqrt(y.var(over, keepdims=True) + 1e-3)
    y = y * scale.reshape(per_channel) + shift.reshape(per_channel)
    return jnp.tanh(y).reshape(x.shape).astype(x.dtype)


def largest(x: Any, axis: int) -> Any:
    """Divided by the largest of a group; a mask that is broadcast, and g reduced as well as c."""
    c = x.shape[axis] // GROUPS
    y = x.reshape(*x.shape[:axis], GROUPS, c, *x.shape[axis + 1 :])
    over = tuple(d for d in range(1, y.ndim) if d != axis)
    most = jnp.abs(y).max(over)
    one = jnp.where(jnp.arange(GROUPS)[:, None] > 1, 2.0, 1.0).astype(x.dtype) * jnp.ones((GROUPS, c), x.dtype)
    one = lax.broadcast_in_dim(one, y.shape, (axis, axis + 1))
    total = lax.broadcast_in_dim(y.sum(tuple(range(1, y.ndim))), y.shape, (0,))
    wide = lax.broadcast_in_dim(most, y.shape, (0, axis))
    return jnp.where(wide > 3.0, total * one, y / wide).reshape(x.shape)


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    closed = jax.make_jaxpr(function)(*args)
    inputs, outputs = ([f"{kind}{i}" for i in range(len(a))] for kind, a in (("a", args), ("r", closed.out_avals)))
    return build_graph(closed, argument_paths=inputs, result_paths=outputs)


def split_elements(graph: Graph, rank: int) -> int:
    """Elements of the largest tensor with more dimensions than the image."""
    return max((math.prod(t.shape) for t in graph.tensors if len(t.shape) > rank), default=0)


def results(graph: Graph, args: Any) -> list[Any]:
    check_graph(graph)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = planned_function(insert_hubs(graph), Decisions(), mesh, ("data",))
    return [np.asarray(v) for v in jax.jit(run)(*args)]


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 8, 8, 32), 3), ((2, 32, 6, 10), 1), ((4, 24, 64), 2), ((2, 4, 6, 5, 16), 4)]
)
@pytest.mark.parametrize("kind", ["normalised", "gradient", "largest"])
def test_values_are_the_same_and_nothing_large_is_left_split(kind: str, shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape) * 2 + 0.5, "float32")
    scale, shift = (jnp.asarray(rng.normal(size=shape[axis]), "float32") for _ in range(2))
    weight = jnp.asarray(rng.normal(size=shape), "float32")

    def loss(x: Any, scale: Any, shift: Any) -> Any:
        return (normalised(x, scale, shift, axis) * weight).sum()

    functions = {
        "normalised": lambda x, a, b: (normalised(x, a, b, axis), a, b),
        "gradient": jax.grad(loss, argnums=(0, 1, 2)),
        "largest": lambda x, a, b: (largest(x, axis), a, b),
    }
    before = graph_of(functions[kind], x, scale, shift)
    after = merge_groups(before)
    assert split_elements(before, x.ndim) == x.size
    assert split_elements(after, x.ndim) <= shape[0] * shape[axis]
    for got, wanted in zip(results(after, (x, scale, shift)), results(before, (x, scale, shift)), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_heads_and_statistics_over_channels_alone_stay() -> None:
    """Heads are split for products; where no place is summed up, the statistics are as many as the places."""

    def heads(x: Any) -> Any:
        y = x.reshape(4, 32, 8, 8)
        y = y * 2.0 / jnp.sqrt(jnp.square(y).sum((1, 3), keepdims=True))
        return jnp.einsum("bqhd,bkhd->bhqk", y, y)

    def per_head(x: Any) -> Any:
        y = x.reshape(4, 32, 8, 8)
        return (y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True))).reshape(x.shape)

    def in_loop(x: Any) -> Any:
        y = x.reshape(4, 32, 8, 8)
        y = lax.fori_loop(0, 3, lambda _, y: y / (1.0 + y.sum((1, 3), keepdims=True)), y)
        return y.reshape(x.shape)

    for function in (heads, per_head, in_loop):
        graph = graph_of(function, jnp.ones((4, 32, 64)))
        assert merge_groups(graph) is graph


def normalising_model() -> Any:
    import keras

    layers = keras.layers
    net = keras.Sequential([keras.Input((16, 16, 32)), layers.GroupNormalization(8), layers.Conv2D(32, 3)])
    net.compile(optimizer="sgd", loss="mse")
    return net


def test_plans_of_keras_have_nothing_split() -> None:
    plan = autoshard.optimize(normalising_model, {"data": 2}, hardware="tpu-v5e", batch_size=8, progress=False)
    assert split_elements(plan.trail.graph, 4) <= 8 * 32


@pytest.mark.slow
@needs_tpu
@pytest.mark.tpu
def test_the_tpu_compiler_copies_split_operands() -> None:
    """A product and a group normalisation as Keras has it, twice, by batch: 471 MB of temporaries, or 34."""
    shape, kernel = (128, 64, 64, 128), (1, 1, 128, 128)

    def loss(kernels: Any, scale: Any, x: Any) -> Any:
        for k in kernels:
            x = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = x.reshape(*shape[:3], 8, 16).astype("float32")
            mean = y.mean((1, 2, 4), keepdims=True)
            factor = lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-3) * scale.reshape(1, 1, 1, 8, 16)
            x = jax.nn.relu((y * factor - mean * factor).astype("bfloat16").reshape(shape))
        return (x.astype("float32") ** 2).mean()

    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in (kernel, kernel, (128,), shape)]
    before = graph_of(lambda a, b, scale, x: tuple(jax.grad(loss)([a, b], scale, x)), *args)
    mesh = compile_only_mesh(parse_target("tpu-v5e:2x2"), ("data",), (4,))
    held = []
    for graph in map(insert_hubs, (before, merge_groups(before))):
        layouts = {
            (op.id, j): (0,) if graph.tensors[t].shape[:1] == shape[:1] else (-1,)
            for op in graph.ops
            for j, t in enumerate(op.outputs)
        }
        layouts |= {(op, 0): (-1,) for op in graph.arguments[:3]}  # one of them has as many elements as the batch
        whole, by_row = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ("data",)))
        jitted = jax.jit(
            planned_function(graph, Decisions(results=layouts), mesh, ("data",)),
            in_shardings=(whole, whole, whole, by_row),
        )
        held.append(jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes)
    assert held[1] < held[0] - 4 * math.prod(shape) // 4, held

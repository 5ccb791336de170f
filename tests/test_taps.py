"""Convolutions as products of matrices, where cuDNN would compute them badly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard_ilp.enforce import taps
from autoshard_ilp.graph import Graph, Op
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo_text import parse_module
from compiled import mesh_of, needs_cuda, sharding


def causal(x: jax.Array, kernel: jax.Array) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (8 * (kernel.shape[0] - 1), 0), (0, 0)))
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", rhs_dilation=(8,), dimension_numbers=("NWC", "WIO", "NWC")
    )


def uneven(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Channels first, a stride, two dimensions, of which one is padded at one end."""
    return jax.lax.conv_general_dilated(
        x, kernel, (2, 1), [(4, 0), (1, 1)], rhs_dilation=(2, 1), dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_transpose(x, kernel, (2, 3), "SAME", transpose_kernel=True)


def transposed_with_gaps(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A window smaller than the stride: between its places the result is zero."""
    return jax.lax.conv_transpose(x, kernel, (3, 3), "VALID")


def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (8, 8), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def in_groups(groups: int, stride: int, dilation: int) -> Callable[..., jax.Array]:
    """The gradient of its kernel is a batch-grouped convolution."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, "SAME", None, (dilation,) * 2, numbers, feature_group_count=groups
        )

    return convolve


CASES: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], tuple[int, ...], int, int]] = {
    # name: function, image, kernel, products per tap, products per position
    "causal": (causal, (4, 64, 6), (3, 6, 5), 1, 1),
    "uneven": (uneven, (3, 4, 20, 20), (5, 4, 3, 3), 1, 1),
    "transposed": (transposed, (3, 8, 9, 4), (2, 2, 6, 4), 0, 1),
    "transposed with gaps": (transposed_with_gaps, (3, 8, 9, 4), (2, 2, 4, 6), 0, 1),
    "plain": (plain, (3, 16, 16, 4), (3, 3, 4, 6), 0, 0),
    "patches": (patches, (3, 32, 32, 3), (8, 8, 3, 16), 0, 0),
    "grouped": (in_groups(2, 2, 1), (3, 9, 9, 8), (3, 3, 4, 6), 0, 0),
    "grouped, dilated": (in_groups(2, 1, 2), (3, 9, 9, 8), (3, 3, 4, 6), 0, 1),
    "depthwise": (in_groups(8, 1, 1), (3, 9, 9, 8), (3, 3, 1, 16), 0, 0),
    "depthwise, dilated": (in_groups(8, 1, 2), (3, 9, 9, 8), (3, 3, 1, 16), 0, 1),
}


def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(x: jax.Array, kernel: jax.Array) -> Any:
        return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(function(x, kernel))), (0, 1))(x, kernel)

    return step


def graph_of(function: Callable[..., Any], *shapes: Any) -> tuple[Graph, list[Op]]:
    jaxpr = jax.make_jaxpr(function)(*shapes)
    graph = build_graph(jaxpr, argument_paths=["x", "kernel"], result_paths=["dx", "dkernel"])
    return graph, [op for op in graph.ops if op.primitive == "conv_general_dilated"]


@pytest.mark.parametrize("name", CASES)
def test_which_convolutions_become_products(name: str) -> None:
    function, image, kernel, per_tap, per_position = CASES[name]
    shapes = (jax.ShapeDtypeStruct(image, "float32"), jax.ShapeDtypeStruct(kernel, "float32"))
    graph, ops = graph_of(gradients(function), *shapes)
    found = [taps.as_products(graph, op, "gpu") for op in ops]
    assert found.count(taps.product_per_tap) == per_tap
    assert found.count(taps.product_per_position) == per_position
    for platform in ("tpu", "cpu"):
        elsewhere = [f for f in (taps.as_products(graph, op, platform) for op in ops) if f is not None]
        assert elsewhere == [taps.product_per_position] * name.startswith("grouped"), "groups of several features"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("plain", "patches", "depthwise")])
def test_products_are_the_convolution(name: str) -> None:
    """Every convolution of a function and its gradients, on the operands that it has there."""
    function, image, kernel, *_ = CASES[name]
    rng = np.random.default_rng(0)
    x, k = (jnp.asarray(rng.normal(size=shape), "float32") for shape in (image, kernel))
    graph, ops = graph_of(gradients(function), x, k)
    checked = 0
    for op in ops:
        by_products = taps.as_products(graph, op, "gpu") or taps.as_products(graph, op, "cpu")
        if by_products is None:
            continue
        args = [jnp.asarray(rng.normal(size=graph.tensors[t].shape), "float32") for t in op.inputs]
        expected = op.eqn.primitive.bind(*args, **op.eqn.params)
        np.testing.assert_allclose(by_products(*args, **op.eqn.params), expected, rtol=1e-4, atol=1e-4)
        checked += 1
    assert checked


@pytest.mark.parametrize("way", [taps.product_per_position, taps.feature_grouped])
@pytest.mark.parametrize("features", [1, 3])
def test_batch_groups_where_image_and_window_are_dilated(way: Callable[..., Any], features: int) -> None:
    rng = np.random.default_rng(0)
    image, window = (
        jnp.asarray(rng.normal(size=shape), "float32") for shape in ((4 * features, 7, 8, 2), (3, 3, 2, 4 * 2))
    )
    jaxpr = jax.make_jaxpr(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (2, 1), [(2, 1), (-1, 3)], (2, 3), (3, 1), ("NHWC", "HWIO", "NHWC"), batch_group_count=4
        )
    )(image, window)
    (eqn,) = jaxpr.eqns
    expected = eqn.primitive.bind(image, window, **eqn.params)
    np.testing.assert_allclose(way(image, window, **eqn.params), expected, rtol=1e-4, atol=1e-4)


def test_features_of_a_group_that_fill_the_lanes_are_convolved_on_tpus() -> None:
    shapes = (jax.ShapeDtypeStruct((4, 16, 16, 256), "float32"), jax.ShapeDtypeStruct((3, 3, 64, 256), "float32"))
    graph, ops = graph_of(gradients(in_groups(4, 1, 1)), *shapes)
    assert not any(taps.as_products(graph, op, "tpu") for op in ops)
    assert any(taps.as_products(graph, op, "cpu") for op in ops)


def test_taps_of_16_bits_are_added_up_in_32() -> None:
    shapes = jax.ShapeDtypeStruct((2, 64, 6), "bfloat16"), jax.ShapeDtypeStruct((3, 6, 5), "bfloat16")
    graph, ops = graph_of(gradients(causal), *shapes)
    op = next(op for op in ops if taps.as_products(graph, op, "gpu") is taps.product_per_tap)
    args = [jax.ShapeDtypeStruct(graph.tensors[t].shape, "bfloat16") for t in op.inputs]
    jaxpr = jax.make_jaxpr(lambda *args: taps.product_per_tap(*args, **op.eqn.params))(*args)
    assert {str(e.outvars[0].aval.dtype) for e in jaxpr.eqns if e.primitive.name == "dot_general"} == {"float32"}
    assert jaxpr.out_avals[0].dtype == "bfloat16"


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("products", [True, False])
def test_the_gpu_compiler_then_computes_no_more_than_the_model(products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal convolution and its gradients under a plan: without products, kernels are filled with zeros."""
    from autoshard_ilp.apply import Decisions, planned_function

    if not products:
        monkeypatch.setattr(taps, "PLATFORMS", frozenset())
    shapes = (jax.ShapeDtypeStruct((16, 512, 64), "float32"), jax.ShapeDtypeStruct((2, 64, 64), "float32"))

    def step(x: jax.Array, kernel: jax.Array) -> Any:
        x = jnp.tanh(x)
        return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(causal(x, kernel))), (0, 1))(x, kernel)

    graph, _ = graph_of(step, *shapes)
    layouts = {
        (op.id, j): (0, -1) if graph.tensors[t].shape[:1] == (16,) else (-1, -1)
        for op in graph.ops
        for j, t in enumerate(op.outputs)
    }
    mesh = mesh_of("h100:8")
    ins = (sharding(mesh, (0, -1), 3), sharding(mesh, (-1, -1), 3))
    run = planned_function(graph, Decisions(results=layouts), mesh, ("data", "model"))
    text = jax.jit(run, in_shardings=ins).lower(*shapes).compile().as_text()
    model = 3 * 2 * 8 * 512 * 64 * 2 * 64  # each of the three convolutions, 8 examples per device
    assert (matmul_flops(parse_module(text)) < 1.2 * model) == products
    assert text.count("__cudnn$conv") == (1 if products else 3)  # the image's gradient is padded at both ends


def upsampled(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", transpose_kernel=True)


def with_a_gathered_kernel(mesh: Any, function: Callable[..., Any], *shapes: Any) -> Any:
    """A transposed convolution on a kernel that is sharded until it has been mirrored."""
    from autoshard_ilp.apply import Decisions, planned_function

    graph = build_graph(jax.make_jaxpr(function)(*shapes), argument_paths=["x", "kernel"], result_paths=["y"])
    last = [op for op in graph.ops if op.primitive == "rev"][-1]
    sharded = {(op.id, 0): (-1, 3) for op in graph.ops if op.id <= last.id and op.outputs and "rev" in op.primitive}
    operands: dict[tuple[int, int], tuple[int, ...]] = {}
    for op in graph.ops:
        for i, t in enumerate(op.inputs):
            if t == last.outputs[0]:
                operands[op.id, i] = (-1, -1)
        if op.primitive == "conv_general_dilated":
            operands[op.id, 1] = (-1, -1)
            sharded[op.id, 0] = (0, -1)
    run = planned_function(graph, Decisions(results=sharded, operands=operands), mesh, ("data", "model"))
    return jax.jit(run, in_shardings=(sharding(mesh, (0, -1), 4), sharding(mesh, (-1, 3), 4)))


UPSAMPLED = (jax.ShapeDtypeStruct((4, 12, 12, 16), "float32"), jax.ShapeDtypeStruct((2, 2, 8, 16), "float32"))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("here", [True, False])
def test_a_kernel_gathered_after_it_was_mirrored_is_mirrored_again(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise cuDNN convolves an image filled with zeros."""
    from autoshard_ilp.apply import operations

    if not here:
        monkeypatch.setattr(operations, "MIRRORED_HERE", frozenset())
    program = with_a_gathered_kernel(mesh_of("h100:8"), upsampled, *UPSAMPLED)
    text = program.lower(*UPSAMPLED).compile().as_text()
    assert ("__cudnn$convBackwardInput" in text) == here


def test_mirroring_again_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard_ilp.apply import operations

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape), "float32") for s in UPSAMPLED]
    monkeypatch.setattr(operations, "MIRRORED_HERE", frozenset({"cpu"}))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = with_a_gathered_kernel(mesh, upsampled, *UPSAMPLED)
    assert found.lower(*args).as_text().count("optimization_barrier") == 1
    np.testing.assert_allclose(found(*args)[0], upsampled(*args), rtol=1e-5, atol=1e-5)

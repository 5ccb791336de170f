"""Kernels and their gradients in cuDNN's order of dimensions, and images smaller than kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.costs.gpu.kernel_copies import kernel_copies
from autoshard_ilp.costs.kernels import is_kernel_gradient, runs_forward, swapped_by_xla
from autoshard_ilp.enforce import taps
from autoshard_ilp.graph import Graph, Op, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_cuda

MESH = {"data": 2, "model": 4}


def discriminator(kernel: int, optimizer: str, dtype: str = "float32") -> Callable[[], keras.Model]:
    """That of a DCGAN."""

    def build() -> keras.Model:
        x = image = keras.Input((64, 64, 3))
        for features in (64, 128, 256, 512):
            x = layers.Conv2D(features, kernel, strides=2, padding="same", dtype=dtype)(x)
            x = layers.LeakyReLU(0.2, dtype=dtype)(x)
        model = keras.Model(image, layers.Dense(1, dtype="float32")(layers.Flatten()(x)))
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    return build


def strided(image: Any, kernel: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=layout)


def step_of(size: int, window: int) -> tuple[Graph, list[Op]]:
    """The gradient of a strided convolution, behind another one, and its convolutions."""
    shapes = ((4, 2 * size, 2 * size, 3), (window, window, 3, 4), (window, window, 4, 6))
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]

    def loss(image: Any, first: Any, second: Any) -> Any:
        return jnp.sum(strided(strided(image, first), second) ** 2)

    with jax.named_scope("step"):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(1, 2)))(*args)
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["x", "w", "v"], result_paths=["a", "b"]))
    return graph, [op for op in graph.ops if op.primitive == "conv_general_dilated"]


@pytest.mark.parametrize(("size", "forward"), [(8, True), (12, False)])
def test_the_gradient_of_a_kernel_larger_than_its_image_is_told(size: int, forward: bool) -> None:
    """5 x 5 over 8 x 8 makes 4 x 4, fewer positions than the kernel has."""
    graph, convolutions = step_of(size, 5)
    gradients = [op for op in convolutions if is_kernel_gradient(graph, op)]
    assert len(gradients) == 2
    assert [runs_forward(graph, op) for op in gradients].count(True) == forward
    assert sum(swapped_by_xla(graph, op) for op in convolutions) == forward
    assert not any(taps.as_products(graph, op, "gpu") for op in gradients)


def test_a_larger_image_gives_the_same() -> None:
    graph, convolutions = step_of(8, 5)
    (op,) = (op for op in convolutions if swapped_by_xla(graph, op))
    numbers = np.random.default_rng(0)
    args = [jnp.asarray(numbers.normal(size=graph.tensors[t].shape), "float32") for t in op.inputs]
    equal = taps.as_products(graph, op, "gpu")
    assert equal is taps.of_larger_image
    expected = jax.lax.conv_general_dilated_p.bind(*args, **op.eqn.params)
    np.testing.assert_allclose(equal(*args, **op.eqn.params), expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_is_copied_until_the_gradient_of_the_image() -> None:
    graph, convolutions = step_of(8, 5)
    copies = kernel_copies(graph, [op.id for op in graph.ops])
    forward = [op.id for op in convolutions if op.phase == "forward"]
    back = next(op.id for op in convolutions if op.phase == "backward" and not is_kernel_gradient(graph, op))
    spans = [c.as_it_is for c in copies.values() if c.as_it_is is not None]
    assert spans == [(forward[0], forward[0] + 1), (forward[1], back + 1)]


@needs_cuda
@pytest.mark.parametrize(
    ("kernel", "optimizer", "dtype"),
    [
        pytest.param(5, "adam", "float32", marks=pytest.mark.slow),
        pytest.param(4, "sgd", "float32", marks=pytest.mark.slow),
        pytest.param(5, "adam", "mixed_bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_compiled_peak_of_a_discriminator(kernel: int, optimizer: str, dtype: str) -> None:
    """Once 2.0 of the prediction."""
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 256, "progress": False}
    build = discriminator(kernel, optimizer, dtype)
    loose = autoshard.optimize(build, MESH, **options)
    tight = autoshard.optimize(build, MESH, memory_budget=int(0.75 * loose.memory.peak_bytes), **options)
    for plan in (loose, tight):
        seen = plan.verify(target="h100:8")
        assert 0.9 <= seen.compiled_peak_bytes / plan.memory.peak_bytes <= 1.1


@needs_cuda
def test_updates_of_kernels_overwrite_what_they_read() -> None:
    """A kernel, its slots and their new values were there at once."""

    def build() -> keras.Model:
        x = keras.Input((16, 16, 512))
        model = keras.Model(x, layers.GlobalAveragePooling2D()(layers.Conv2D(512, 3, padding="same")(x)))
        model.compile("adam", "mse")
        return model

    pins = {".*": ()}
    plan = autoshard.optimize(build, {"data": 8}, hardware="h100", batch_size=8, progress=False, pins=pins)
    kernel = 3 * 3 * 512 * 512 * 4
    seen = plan.verify(target="h100:8").compiled_peak_bytes
    assert seen < 5.5 * kernel  # three of the state, a gradient and a copy of it

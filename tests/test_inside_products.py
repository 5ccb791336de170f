"""What XLA:GPU computes inside products, beside softmaxes and for variances: the rules, and what the compiler does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.apply import planned
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph
from autoshard_ilp.verify import compile_only_mesh, parse_target
from autoshard_ilp.verify.hlo_text import array_shapes, parse_module
from compiled import needs_cuda
from test_gpu_buffers import graph_of

ROWS, WIDTH = 4096, 256
LAYERS = 2


def step(activation: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of layers with a bias and an activation."""

    def loss(weights: Any, biases: Any, x: Any) -> Any:
        for w, b in zip(weights, biases, strict=True):
            x = activation(x @ w + b)
        return jnp.mean(jnp.square(x @ jnp.ones((WIDTH, 16))))

    return lambda w1, w2, b1, b2, x: jax.grad(loss)((w1, w2), (b1, b2), x)


ARGUMENTS = ((WIDTH, WIDTH),) * LAYERS + ((WIDTH,),) * LAYERS + ((ROWS, WIDTH),)

#: activation -> arrays that are written for a layer by the forward pass: its product, and the activation's result
SEEN: dict[str, tuple[Callable[..., Any], int]] = {
    "ReLU": (lambda x: jnp.maximum(x, 0), 1),
    "scale": (lambda x: 0.5 * x, 1),
    "sigmoid of a ReLU": (lambda x: jax.nn.sigmoid(jnp.maximum(x, 0) - 0.1), 1),
    "sine": (jnp.sin, 1),
    "leaky ReLU": (lambda x: jnp.where(x >= 0, x, 0.2 * x), 2),
    "square": (lambda x: x * x, 2),
    "ReLU6": (lambda x: jnp.clip(x, 0, 6), 2),
    "GELU": (lambda x: jax.nn.gelu(x, approximate=True), 2),
}


def written(graph: Graph) -> int:
    """Arrays as large as the layer's input that the forward pass writes."""
    stored = analyse(graph, "gpu").stored
    ops = (op for op in graph.ops if op.phase == "forward" and op.primitive not in ("argument", "constant"))
    return sum(bool(stored[t]) and graph.tensors[t].shape == (ROWS, WIDTH) for op in ops for t in op.outputs)


@pytest.mark.parametrize("name", ["ReLU", "scale", "leaky ReLU", "square", "ReLU6"])
def test_the_rule(name: str) -> None:
    """Of the functions whose derivatives are not made of costly ones, for which other rules hold as well."""
    activation, arrays = SEEN[name]
    assert written(graph_of(step(activation), *ARGUMENTS)) == LAYERS * arrays


@needs_cuda
@pytest.mark.parametrize(("activation", "arrays"), SEEN.values(), ids=SEEN)
def test_what_the_compiler_writes(activation: Callable[..., Any], arrays: int) -> None:
    target = parse_target("h100:1")
    whole = NamedSharding(compile_only_mesh(target, ("data",), (1,)), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, "float32", sharding=whole) for shape in ARGUMENTS]
    lowered = jax.jit(step(activation)).lower(*arguments)
    module = parse_module(lowered.compile(compiler_options=target.compiler_options).as_text())
    made = (i for i in module.computations[module.entry].instructions.values() if "transpose(" not in i.op_name)
    kernels = [i for i in made if i.opcode == "fusion" or i.opcode == "custom-call"]
    shapes = [shape for i in kernels for _, shape in array_shapes(i.type_text)]
    assert sum(shape == (ROWS, WIDTH) for shape in shapes) == LAYERS * arrays


def multilayer() -> keras.Model:
    x = inputs = keras.Input((256,))
    for _ in range(4):
        x = layers.Dense(1024, activation="relu")(x)
    return _compiled(keras.Model(inputs, layers.Dense(10)(x)), "mse")


def autoencoder() -> keras.Model:
    """Whose loss is a function of as many numbers as its input has."""
    x = inputs = keras.Input((784,))
    for width in (512, 256, 64, 256, 512):
        x = layers.Dense(width, activation="relu")(x)
    return _compiled(keras.Model(inputs, layers.Dense(784, activation="sigmoid")(x)), "mse")


def normalised() -> keras.Model:
    x = inputs = keras.Input((256,))
    for _ in range(4):
        x = keras.ops.relu(layers.BatchNormalization()(layers.Dense(1024)(x)))
    return _compiled(keras.Model(inputs, layers.Dense(10)(x)), "mse")


def language_model() -> keras.Model:
    """Of so few tokens that their softmax is one kernel."""
    tokens = keras.Input((256,), dtype="int32")
    x = layers.Embedding(8000, 256)(tokens)
    x = layers.LayerNormalization()(x + layers.Dense(256)(layers.Dense(1024, activation="relu")(x)))
    return _compiled(keras.Model(tokens, layers.Dense(8000)(x)), keras.losses.SparseCategoricalCrossentropy(True))


def _compiled(model: keras.Model, loss: Any) -> keras.Model:
    model.compile(optimizer="adam", loss=loss)
    return model


@needs_cuda
@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (multilayer, 65536),
        (autoencoder, 65536),
        (normalised, 32768),
        pytest.param(language_model, 64, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_peaks_agree(build: Callable[[], keras.Model], batch: int) -> None:
    plan = autoshard.optimize(build, {"data": 2, "model": 4}, hardware="h100", batch_size=batch)
    seen = plan.verify("h100:8")
    assert seen.compiled_peak_bytes == pytest.approx(seen.predicted_peak_bytes, rel=0.07)


@needs_cuda
def test_a_sum_with_a_gathered_bias_is_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a barrier behind it XLA keeps the product beside it: 1067 MB, 933 with one.

    Or with its weights in rows (``test_gathered_rows.py``), which this is without: others are not gathered so.
    """
    monkeypatch.setattr(planned.Planned, "in_rows", lambda self, value, *_: value)

    def build() -> keras.Model:
        x = inputs = keras.Input((1024,))
        for _ in range(4):
            x = layers.Dense(8192, activation="relu")(x)
        return _compiled(keras.Model(inputs, layers.Dense(16)(x)), "mse")

    def compiled_peak() -> int:
        plan = autoshard.optimize(build, {"data": 2, "model": 4}, hardware="h100", batch_size=8192)
        seen = plan.verify("h100:8")
        assert seen.unplanned_bytes_per_device < 0.01 * seen.predicted_bytes_per_device
        assert seen.compiled_peak_bytes is not None
        return seen.compiled_peak_bytes

    one = compiled_peak()
    monkeypatch.setattr(planned, "sums_read_by_products", lambda *_: frozenset())
    assert compiled_peak() > 1.1 * one

"""Tiny Keras models that use one feature each, and their runs: the same under a plan as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np
from keras import layers
from keras.src.backend.common.stateless_scope import StatelessScope

import autoshard_ilp as autoshard
from profiles_for_tests import toy
from zoo import TiedHead

MESH = {"data": 2, "model": 4}
HARDWARE = toy(flops_per_s=1e8, memory_bytes_per_s=1e8)  # so slow that even tiny layers are worth sharding
FEATURES, CLASSES, WORDS, LENGTH, BATCH = 16, 4, 32, 8, 8
SOLVER = autoshard.SolverOptions(time_limit=20.0, relative_gap=0.02)


def features(samples: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (samples, 16) and labels; 20 samples leave a last batch of 4."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, FEATURES)).astype("float32"), rng.integers(0, CLASSES, (samples,)).astype("int32")


def tokens(samples: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (samples, 8), some of them the padding 0, and labels."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (samples, LENGTH)).astype("int32")
    ids[::3, -3:] = 0
    return ids, rng.integers(0, CLASSES, (samples,)).astype("int32")


def images(samples: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 8, 8, 3)).astype("float32"), rng.integers(0, CLASSES, (samples,)).astype("int32")


def compiled(model: keras.Model, optimizer: Any = None, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(**{"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"], **options})
    return model


def mlp(optimizer: Any = None, dtype: Any = None, hidden: int = 32, **options: Any) -> keras.Model:
    """Two layers with dropout between them."""
    inputs = keras.Input((FEATURES,), name="features")
    x = layers.Dense(hidden, activation="relu", dtype=dtype)(inputs)
    x = layers.Dropout(0.2, seed=3, dtype=dtype)(x)
    return compiled(keras.Model(inputs, layers.Dense(CLASSES, dtype=dtype)(x)), optimizer, **options)


def normalised() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    x = layers.BatchNormalization(momentum=0.8)(layers.EinsumDense("bf,fhd->bhd", (4, 8), bias_axes="hd")(inputs))
    x = layers.LayerNormalization()(layers.Flatten()(x))
    return compiled(keras.Model(inputs, layers.Dense(CLASSES)(x)))


def convolutions() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))))


def recurrent() -> keras.Model:
    """Masking, attention and an LSTM."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 16, mask_zero=True)(inputs)
    x = x + layers.MultiHeadAttention(4, 4)(x, x)
    return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.LSTM(16)(x))))


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(BATCH, LENGTH, FEATURES))
    return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.GRU(16, stateful=True)(inputs))))


def several() -> keras.Model:
    """Two named inputs, two named outputs with a loss each, one layer used twice."""
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((FEATURES,), name="b")
    shared = layers.Dense(16, activation="tanh")
    x = layers.Concatenate()([shared(a), shared(b)])
    model = keras.Model({"a": a, "b": b}, {"label": layers.Dense(CLASSES)(x), "score": layers.Dense(1)(x)})
    losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "score": "mse"}
    weights = {"label": 1.0, "score": 0.3}
    model.compile(keras.optimizers.SGD(0.05), losses, loss_weights=weights, metrics={"score": ["mae"]})
    return model


def several_data(samples: int = 20) -> tuple[Any, Any]:
    (a, label), (b, _) = features(samples), features(samples, seed=1)
    return {"a": a, "b": b}, {"label": label, "score": b[:, :1] * 0.5}


@keras.saving.register_keras_serializable("keras_cases")
class Nested(keras.Model):
    """A subclassed model with a model inside, and a training step of its own."""

    def __init__(self, own_step: bool = False) -> None:
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(16)])
        self.head = layers.Dense(CLASSES)
        self.own_step = own_step

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.head(self.inner(inputs, training=training))

    def train_step(self, state: Any, data: Any) -> Any:
        if not self.own_step:
            return super().train_step(state, data)
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = gradient(
            trainable, non_trainable, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        loss, _, non_trainable, metrics = aux
        grads = [g * 0.5 for g in grads]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)


def tied() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    return compiled(keras.Model(inputs, TiedHead(WORDS, 16)(inputs)))


def with_lora(rank: int = 2) -> keras.Model:
    model = mlp()
    enable_lora(model, rank)
    return compiled(model)


def enable_lora(model: keras.Model, rank: int = 2) -> None:
    keras.utils.set_random_seed(11)
    for layer in model.layers:
        if isinstance(layer, layers.Dense):
            layer.enable_lora(rank)


def seeded(build: Callable[[], keras.Model], seed: int = 5) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return build()


def plan_for(model: Any, batch: Any, **options: Any) -> autoshard.Plan:
    """A plan of the training step for one batch ``(x, y)`` of arrays (of which the first 8 samples count)."""
    first = jax.tree.map(lambda v: v[:BATCH], batch)
    if options.get("mode") == "predict":
        first = first[:1]
    names = dict(zip(("inputs", "targets", "sample_weight"), first, strict=False))
    return autoshard.optimize(
        model, **{"mesh": MESH, "hardware": HARDWARE, "solver": SOLVER, "progress": False, **names, **options}
    )


def values(model: keras.Model) -> list[np.ndarray]:
    """Everything that training changes: variables, slots, metrics."""
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    variables += model.optimizer.variables if model.optimizer is not None else []
    return [np.asarray(v.value) for v in variables]


def assert_on_plan(model: keras.Model, plan: autoshard.Plan) -> None:
    """No variable has drifted off its planned layout; by order, since Keras numbers the layers of every model anew."""
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    if plan.mode == "train":
        variables += [*model.optimizer.variables, *model.metrics_variables]
    for v, leaf in zip(variables, plan.arguments, strict=False):
        expected = jax.sharding.NamedSharding(plan.mesh.concrete(), plan.specs[leaf.path])
        assert v.value.sharding.is_equivalent_to(expected, len(v.shape)), (v.path, v.value.sharding, expected)


def is_sharded(plan: autoshard.Plan) -> bool:
    return any(any(plan.specs[x.path]) for x in plan.arguments if x.role == "parameter")


def assert_close(found: Any, expected: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def fitted(model: keras.Model, x: Any, y: Any, **options: Any) -> dict[str, list[float]]:
    """History of two epochs over batches of 8 in order."""
    return model.fit(x, y, **{"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}).history


@contextlib.contextmanager
def losses_kept_apart() -> Iterator[None]:
    """No two added losses share an address, so that Keras by itself neither loses one nor counts one twice.

    ``autoshard_ilp.keras_integration.trainer.only_new_losses`` says when it would.
    """
    kept = []
    with mock.patch.object(StatelessScope, "add_loss", autospec=True) as added:
        added.side_effect = lambda scope, loss: (kept.append(loss), scope.losses.append(loss))
        yield


def same_as_one_device(
    build: Callable[[], keras.Model],
    batch: Any,
    run: Callable[[keras.Model], Any],
    *,
    rtol: float = 2e-4,
    atol: float = 2e-5,
    **options: Any,
) -> keras.Model:
    """Runs a model on one device and under a plan; results and all variables must agree. Returns the planned one."""
    alone, planned = seeded(build), seeded(build)
    plan = plan_for(planned, batch, **options)
    assert is_sharded(plan)
    plan.apply(planned)
    with losses_kept_apart():
        expected = run(alone)
    found = run(planned)
    assert_close(found, expected, rtol, atol)
    assert_close(values(planned), values(alone), rtol, atol)
    assert_on_plan(planned, plan)
    return planned

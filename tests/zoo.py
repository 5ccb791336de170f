"""The model zoo: real architectures at small size, each with a batch of real data.

Widths and depths are cut so that three training steps take seconds on a CPU; the structure that matters for sharding is
kept: grouped key/value heads, tied and odd-sized vocabularies, experts, depthwise convolutions, loops, moving averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import layers, ops

BATCH_SIZE = 8
SEQUENCE_LENGTH = 16
VOCABULARY = 257  # odd, like the 50257 of GPT-2


@dataclass(frozen=True)
class Case:
    """One model: ``build()`` gives a compiled model, ``make_batch(rng)`` numpy ``(inputs, targets)``."""

    name: str
    build: Callable[[], keras.Model]
    make_batch: Callable[[np.random.Generator], tuple[Any, Any]]
    sequence_length: int | None = None
    needs_inputs: bool = False  # the inputs' shapes are not known to the model


ZOO: dict[str, Case] = {}


def _case(
    make_batch: Callable[[np.random.Generator], tuple[Any, Any]],
    sequence_length: int | None = None,
    needs_inputs: bool = False,
) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Register a builder; every build starts from the same seed."""

    def register(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        def seeded() -> keras.Model:
            keras.utils.set_random_seed(7)
            return build()

        ZOO[build.__name__] = Case(build.__name__, seeded, make_batch, sequence_length, needs_inputs)
        return build

    return register


def _features(shape: tuple[int, ...], classes: int) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    def make(rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(BATCH_SIZE, *shape)).astype("float32")
        return x, rng.integers(0, classes, size=(BATCH_SIZE,)).astype("int32")

    return make


def _tokens(rng: np.random.Generator, *names: str) -> dict[str, np.ndarray]:
    ids = rng.integers(0, VOCABULARY, size=(BATCH_SIZE, SEQUENCE_LENGTH)).astype("int32")
    fixed = {"token_ids": ids, "padding_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    fixed["padding_mask"][0, -3:] = 0
    return {name: fixed[name] for name in names}


def _language(rng: np.random.Generator) -> tuple[Any, Any]:
    inputs = _tokens(rng, "token_ids", "padding_mask")
    return inputs, np.roll(inputs["token_ids"], -1, axis=1)


def _sequence_labels(rng: np.random.Generator) -> tuple[Any, Any]:
    return _tokens(rng, "token_ids")["token_ids"], rng.integers(0, 4, size=(BATCH_SIZE,)).astype("int32")


def _compiled(model: keras.Model, optimizer: Any = None, from_logits: bool = True) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model.compile(optimizer=optimizer or keras.optimizers.AdamW(1e-3), loss=loss, metrics=["accuracy"])
    return model


def _mlp(optimizer: Any, dtype: str = "float32") -> keras.Model:
    inputs = keras.Input((16,), name="features")
    x = layers.Dense(64, activation="relu", dtype=dtype)(inputs)
    x = layers.Dropout(0.1, dtype=dtype)(x)
    x = layers.LayerNormalization(dtype=dtype)(x)
    x = layers.Dense(64, activation="gelu", dtype=dtype)(x)
    return _compiled(keras.Model(inputs, layers.Dense(8, dtype=dtype)(x), name="mlp"), optimizer)


@_case(_features((16,), 8))
def mlp() -> keras.Model:
    return _mlp(keras.optimizers.Adam(1e-3))


@_case(_features((16,), 8))
def mlp_accumulation_ema() -> keras.Model:
    return _mlp(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2, use_ema=True, global_clipnorm=1.0))


@_case(_features((16,), 8))
def mlp_loss_scaling() -> keras.Model:
    return _mlp(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2, momentum=0.9)), "mixed_float16")


@_case(_features((16,), 8))
def mlp_adafactor() -> keras.Model:
    return _mlp(keras.optimizers.Adafactor(1e-2))


@_case(_features((16,), 8))
def sequential() -> keras.Model:
    model = keras.Sequential([keras.Input((16,)), layers.Dense(32, activation="relu"), layers.Dense(8)])
    return _compiled(model, keras.optimizers.RMSprop(1e-3))


@_case(_features((16, 16, 3), 8))
def resnet() -> keras.Model:
    """Bottleneck blocks of ResNet v1 with batch normalisation, one with a projection and a stride."""
    inputs = keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.MaxPooling2D(2)(x)
    for width, stride in ((8, 1), (16, 2)):
        shortcut = layers.Conv2D(4 * width, 1, strides=stride)(x)
        h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 1, strides=stride)(x)))
        h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(h)))
        h = layers.BatchNormalization()(layers.Conv2D(4 * width, 1)(h))
        x = layers.ReLU()(layers.add([h, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return _compiled(keras.Model(inputs, layers.Dense(8)(x)), keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True))


@_case(_features((16, 16, 3), 8))
def mobilenet() -> keras.Model:
    """Inverted residual with a depthwise convolution and squeeze-and-excitation."""
    inputs = keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(inputs)
    h = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(32, 1, use_bias=False)(x)))
    h = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(h)
    h = layers.ReLU(6.0)(layers.BatchNormalization()(h))
    gate = layers.Dense(8, activation="silu")(layers.GlobalAveragePooling2D(keepdims=True)(h))
    h = layers.multiply([h, layers.Dense(32, activation="sigmoid")(gate)])
    h = layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(h))
    x = layers.GlobalAveragePooling2D()(layers.add([x, h]))
    return _compiled(keras.Model(inputs, layers.Dense(8)(x)))


@_case(_features((16, 16, 3), 8))
def efficientnet() -> keras.Model:
    """A fused and a depthwise inverted residual, with squeeze-and-excitation and stochastic depth."""
    backbone = keras_hub.models.EfficientNetBackbone(
        stackwise_width_coefficients=[1.0] * 3,
        stackwise_depth_coefficients=[1.0] * 3,
        stackwise_kernel_sizes=[3] * 3,
        stackwise_num_repeats=[1, 2, 1],
        stackwise_input_filters=[8, 8, 16],
        stackwise_output_filters=[8, 16, 16],
        stackwise_expansion_ratios=[1, 4, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25, 0.0],
        stackwise_strides=[1, 2, 1],
        stackwise_block_types=["v1", "v1", "fused"],
        stackwise_force_input_filters=[0] * 3,
        stackwise_nores_option=[False] * 3,
        input_shape=(16, 16, 3),
        num_features=32,
    )
    return _compiled(keras_hub.models.EfficientNetImageClassifier(backbone=backbone, num_classes=8, preprocessor=None))


def _unet_batch(rng: np.random.Generator) -> tuple[Any, Any]:
    inputs = {
        "latent": rng.normal(size=(BATCH_SIZE, 8, 8, 4)).astype("float32"),
        "time": rng.normal(size=(BATCH_SIZE, 16)).astype("float32"),
    }
    return inputs, rng.normal(size=(BATCH_SIZE, 8, 8, 4)).astype("float32")


@_case(_unet_batch)
def unet() -> keras.Model:
    """Down, attention, up: the convolutional blocks of a diffusion model."""
    latent, time = keras.Input((8, 8, 4), name="latent"), keras.Input((16,), name="time")

    def block(x: Any, width: int) -> Any:
        h = layers.Conv2D(width, 3, padding="same")(layers.Activation("silu")(layers.GroupNormalization(4)(x)))
        h = h + ops.expand_dims(ops.expand_dims(layers.Dense(width)(time), 1), 1)
        return layers.Conv2D(width, 1)(x) + h

    top = block(layers.Conv2D(16, 3, padding="same")(latent), 16)
    low = block(layers.Conv2D(32, 3, strides=2, padding="same")(top), 32)
    flat = layers.Reshape((16, 32))(low)
    low = low + layers.Reshape((4, 4, 32))(layers.MultiHeadAttention(4, 8)(flat, flat))
    joined = layers.Concatenate()([layers.UpSampling2D(2)(low), top])
    outputs = layers.Conv2D(4, 3, padding="same")(block(joined, 16))
    model = keras.Model({"latent": latent, "time": time}, outputs)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss="mse")
    return model


@_case(_language, SEQUENCE_LENGTH)
def gpt2() -> keras.Model:
    backbone = keras_hub.models.GPT2Backbone(
        VOCABULARY, num_layers=2, num_heads=4, hidden_dim=32, intermediate_dim=128, max_sequence_length=32
    )
    return _compiled(keras_hub.models.GPT2CausalLM(backbone=backbone))


def _bert_batch(rng: np.random.Generator) -> tuple[Any, Any]:
    labels = rng.integers(0, 4, size=(BATCH_SIZE,)).astype("int32")
    return _tokens(rng, "token_ids", "padding_mask", "segment_ids"), labels


@_case(_bert_batch, SEQUENCE_LENGTH)
def bert() -> keras.Model:
    backbone = keras_hub.models.BertBackbone(
        VOCABULARY, num_layers=2, num_heads=4, hidden_dim=32, intermediate_dim=128, max_sequence_length=32
    )
    return _compiled(keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=4))


def _llama_backbone() -> Any:
    return keras_hub.models.Llama3Backbone(
        VOCABULARY, num_layers=2, num_query_heads=8, num_key_value_heads=2, hidden_dim=64, intermediate_dim=128
    )


@_case(_language, SEQUENCE_LENGTH)
def llama() -> keras.Model:
    return _compiled(keras_hub.models.Llama3CausalLM(backbone=_llama_backbone()))


@_case(_language, SEQUENCE_LENGTH)
def lora() -> keras.Model:
    """Only low-rank factors (and what LoRA leaves open) train; the base weights are frozen."""
    backbone = _llama_backbone()
    backbone.enable_lora(4)
    return _compiled(keras_hub.models.Llama3CausalLM(backbone=backbone))


@_case(_language, SEQUENCE_LENGTH)
def gemma() -> keras.Model:
    backbone = keras_hub.models.GemmaBackbone(
        VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=128,
        head_dim=16,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=8,
    )
    return _compiled(keras_hub.models.GemmaCausalLM(backbone=backbone))


@_case(_language, SEQUENCE_LENGTH)
def mixtral() -> keras.Model:
    backbone = keras_hub.models.MixtralBackbone(
        VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        num_experts=4,
        sliding_window=8,
    )
    return _compiled(keras_hub.models.MixtralCausalLM(backbone=backbone))


@_case(_features((16, 16, 3), 8))
def vit() -> keras.Model:
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3), patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    )
    return _compiled(keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=8))


def _recurrent(cell: type[keras.Layer]) -> keras.Model:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, 32)(tokens)
    x = layers.Bidirectional(cell(16, return_sequences=True))(x)
    return _compiled(keras.Model(tokens, layers.Dense(4)(cell(32)(x))))


@_case(_sequence_labels, SEQUENCE_LENGTH)
def lstm() -> keras.Model:
    return _recurrent(layers.LSTM)


@_case(_sequence_labels, SEQUENCE_LENGTH)
def gru() -> keras.Model:
    return _recurrent(layers.GRU)


def _multi_batch(rng: np.random.Generator) -> tuple[Any, Any]:
    numbers = rng.normal(size=(BATCH_SIZE, 12)).astype("float32")
    tokens = rng.integers(0, VOCABULARY, size=(BATCH_SIZE, SEQUENCE_LENGTH)).astype("int32")
    labels = rng.integers(0, 4, size=(BATCH_SIZE,)).astype("int32")
    score = rng.normal(size=(BATCH_SIZE, 1)).astype("float32")
    return {"numbers": numbers, "tokens": tokens}, {"label": labels, "score": score}


@_case(_multi_batch, SEQUENCE_LENGTH)
def multi_input_output() -> keras.Model:
    numbers = keras.Input((12,), name="numbers")
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, 16)(tokens))
    shared = layers.Dense(32, activation="relu")
    x = layers.Concatenate()([shared(layers.Dense(16)(numbers)), shared(pooled)])
    outputs = {"label": layers.Dense(4, name="label")(x), "score": layers.Dense(1, name="score")(x)}
    model = keras.Model({"numbers": numbers, "tokens": tokens}, outputs)
    losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "score": "mse"}
    model.compile(optimizer="adam", loss=losses, loss_weights={"label": 1.0, "score": 0.5}, metrics={"score": ["mae"]})
    return model


@keras.saving.register_keras_serializable("zoo")
class CustomStep(keras.Model):
    """A subclassed model with its own training step: the gradient's norm is logged and limited."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(32, activation="tanh")
        self.head = layers.Dense(8)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.head(self.hidden(inputs))

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = gradient(
            trainable, non_trainable, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        loss, _, non_trainable, metrics = aux
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        grads = [g / ops.maximum(norm, 1.0) for g in grads]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        return {"loss": loss, "norm": norm}, (trainable, non_trainable, optimizer, metrics)


@_case(_features((16,), 8), needs_inputs=True)
def custom_train_step() -> keras.Model:
    return _compiled(CustomStep(), keras.optimizers.Lion(1e-3))


class TiedHead(layers.Layer):
    """Embeds tokens, and scores them with the same table."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = layers.Embedding(vocabulary, width)
        self.mix = layers.Dense(width, activation="relu")

    def build(self, input_shape: Any) -> None:
        self.table.build(input_shape)
        self.mix.build((*input_shape, self.table.output_dim))

    def call(self, tokens: Any) -> Any:
        return ops.matmul(self.mix(self.table(tokens)), ops.transpose(self.table.embeddings))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape, self.table.input_dim)


def _tied_batch(rng: np.random.Generator) -> tuple[Any, Any]:
    inputs, targets = _language(rng)
    return inputs["token_ids"], targets


@_case(_tied_batch, SEQUENCE_LENGTH)
def tied_embeddings() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    return _compiled(keras.Model(tokens, TiedHead(VOCABULARY, 32)(tokens)))


def build_full(name: str, layers: int | None = None) -> Callable[[], keras.Model]:
    """Builder of a published architecture at its true width, by preset name; ``layers`` cuts a transformer's depth.

    For tests: gpt2_small, bert_base, llama3_8b, resnet50, vit_base, mixtral_8x7b. Build it abstractly (trace the
    callable); called directly it allocates its variables.
    """
    from autoshard_ilp.models import hub_model

    return lambda: hub_model(name, layers=layers)

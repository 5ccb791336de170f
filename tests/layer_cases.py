"""A small model around every layer of ``keras.layers``, and a plan of random strategies to run it under.

The best plan of a small model shards little. Here every operation gets any of its strategies, drawn at random, so that
each layer runs with its operands, weights and results sharded in whatever way its rules allow.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

import autoshard_ilp as autoshard
from profiles_for_tests import toy
from random_layouts import at_random, sharded_beyond_batch

BATCH, CLASSES = 8, 4
VECTOR, SEQUENCE, IMAGE, VOLUME = (16,), (8, 8), (8, 8, 4), (4, 4, 4, 4)
PICTURE = (8, 8, 3)
TOLERANCE = 1e-5
SOLVER = autoshard.SolverOptions(time_limit=10.0, relative_gap=0.5)

NOT_IN_A_MODEL = {
    "Layer": "an abstract base class",
    "Wrapper": "an abstract base class",
    "InputLayer": "part of every model here",
    "Pipeline": "runs in data pipelines, in front of a model",
    "MaxNumBoundingBoxes": "works on labels, in front of a model",
    "StringLookup": "of strings, in front of a model",
    "TextVectorization": "of strings, in front of a model",
    "HashedCrossing": "computed by TensorFlow, in front of a model",
    "Hashing": "computed by TensorFlow, in front of a model",
    "IntegerLookup": "computed by TensorFlow, in front of a model",
    "RandomCrop": "does not run under jax.jit where it crops (it slices by traced numbers); predicts like Resizing",
    "RandomElasticTransform": "does not run under jax.jit",
    "TFSMLayer": "runs a TensorFlow program",
    "TorchModuleWrapper": "runs a PyTorch module",
}
"""Classes of ``keras.layers`` that no compiled JAX step can hold, and why."""


@dataclass(frozen=True)
class Case:
    """One layer in a model.

    Attributes:
        layer: makes it.
        shapes: of its inputs, without the batch.
        call: applies it to its inputs; default: to the only one, or to the list of them.
        stem: whether a Dense layer comes before it, so that gradients go through it.
        dtype: of its inputs; integers are below ``most``.
        most: inputs lie between 0 and this; ``None``: normally distributed.
        train: whether its outputs are trained on; what no gradient goes through trains a head alone.
    """

    layer: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[[Any, list[Any]], Any] | None = None
    stem: bool = True
    dtype: str = "float32"
    most: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> keras.Model:
        """The layer between a Dense layer and a classifier, compiled; the same initial weights every time."""
        keras.utils.set_random_seed(5)
        inputs = [keras.Input(shape, dtype=self.dtype, name=f"x{i}") for i, shape in enumerate(self.shapes)]
        values = [layers.Dense(x.shape[-1], name=f"stem{i}")(x) if self.stem else x for i, x in enumerate(inputs)]
        made = self.layer()
        x = self.call(made, values) if self.call is not None else made(values if len(values) > 1 else values[0])
        found = [x] if not isinstance(x, (list, tuple)) else list(x)
        flat = [
            layers.Flatten(dtype="float32", name=f"flat{i}")(layers.Identity(dtype="float32", name=f"float{i}")(x))
            for i, x in enumerate(found)
            if len(x.shape) > 1
        ]
        x = flat[0] if len(flat) == 1 else layers.Concatenate(name="joined")(flat)
        model = keras.Model(
            inputs if len(inputs) > 1 else inputs[0],
            layers.Dense(CLASSES, name="head")(x * self.options.get("scale", 1.0)),
        )
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
        return model

    def data(self, steps: int = 3) -> list[tuple[Any, np.ndarray]]:
        """Batches of inputs and targets."""
        rng = np.random.default_rng(0)

        def array(shape: tuple[int, ...]) -> np.ndarray:
            whole = (BATCH, *shape)
            if self.dtype.startswith("int"):
                return rng.integers(0, int(self.most or 8), whole).astype(self.dtype)
            drawn = rng.uniform(0, self.most, whole) if self.most is not None else rng.normal(size=whole)
            return drawn.astype(self.dtype)

        batches = []
        for _ in range(steps):
            x = [array(s) for s in self.shapes]
            batches.append((x if len(x) > 1 else x[0], rng.normal(size=(BATCH, CLASSES)).astype("float32")))
        return batches


def _one(shape: tuple[int, ...], **options: Any) -> Callable[..., Case]:
    return lambda make, **more: Case(make, (shape,), **{**options, **more})


vector, sequence, image, volume = _one(VECTOR), _one(SEQUENCE), _one(IMAGE), _one(VOLUME)
picture = _one(PICTURE, stem=False, most=255.0, options={"scale": 0.01})
raw = _one(VECTOR, stem=False)


def _pairs(make: Callable[[], Any], shape: tuple[int, ...] = VECTOR, count: int = 2, **options: Any) -> Case:
    return Case(make, (shape,) * count, **options)


def _attend(layer: Any, values: list[Any]) -> Any:
    return layer(*values)


def _rescaled(make: Callable[[], Any]) -> Case:
    return Case(make, (PICTURE,), stem=False, most=1.0)


def _jax_layer() -> Any:
    def init(rng: Any, inputs: Any) -> Any:
        return {"w": jax.random.normal(rng, (inputs.shape[-1], 8)) * 0.1, "b": jnp.zeros((8,))}

    def call(params: Any, inputs: Any) -> Any:
        return jnp.tanh(inputs @ params["w"] + params["b"])

    return layers.JaxLayer(call, init)


def _flax_layer() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, training: bool) -> Any:
            x = nn.BatchNorm(use_running_average=not training)(nn.Dense(8)(x))
            return nn.Dropout(0.3, deterministic=not training)(x)

    return layers.FlaxLayer(Block())


def _discretization() -> Any:
    return layers.Discretization(bin_boundaries=[-1.0, -0.3, 0.0, 0.4, 1.1], output_mode="one_hot")


def _normalization() -> Any:
    return layers.Normalization(mean=np.linspace(-1, 1, 16), variance=np.linspace(1, 2, 16))


def _cells() -> list[Any]:
    return [layers.LSTMCell(8), layers.GRUCell(4)]


def _cell(make: Callable[[], Any], states: int = 1) -> Case:
    """A cell called by hand: ``(inputs, states) -> (output, states)``."""

    def call(cell: Any, values: list[Any]) -> Any:
        return cell(values[0], values[1:])[0]

    return Case(make, (VECTOR, *[(8,)] * states), call)


class _OwnCell(layers.Layer):
    """A recurrent cell of the user's own."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = self.state_size = units
        self.inner, self.outer = layers.Dense(units), layers.Dense(units, use_bias=False)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        self.outer.build((shape[0], self.units))

    def call(self, inputs: Any, states: Any) -> Any:
        out = keras.ops.tanh(self.inner(inputs) + self.outer(states[0]))
        return out, [out]


CASES: dict[str, Case] = {
    "Activation": vector(lambda: layers.Activation("gelu")),
    "ActivityRegularization": vector(lambda: layers.ActivityRegularization(l1=0.01, l2=0.02)),
    "Add": _pairs(layers.Add, count=3),
    "AdditiveAttention": _pairs(layers.AdditiveAttention, SEQUENCE, 3),
    "AlphaDropout": vector(lambda: layers.AlphaDropout(0.3, seed=1)),
    "Attention": _pairs(lambda: layers.Attention(use_scale=True), SEQUENCE, 3),
    "Average": _pairs(layers.Average, count=3),
    "BatchNormalization": image(lambda: layers.BatchNormalization(momentum=0.7)),
    "Bidirectional": sequence(lambda: layers.Bidirectional(layers.LSTM(8, return_sequences=True))),
    "CategoryEncoding": raw(lambda: layers.CategoryEncoding(8, "count"), dtype="int32"),
    "CenterCrop": picture(lambda: layers.CenterCrop(4, 6)),
    "Concatenate": _pairs(layers.Concatenate, SEQUENCE, count=3),
    "Dense": sequence(lambda: layers.Dense(8, "relu")),
    "Discretization": raw(_discretization),
    "Dot": _pairs(lambda: layers.Dot(axes=(1, 1)), SEQUENCE),
    "Dropout": sequence(lambda: layers.Dropout(0.4, noise_shape=(None, 1, 8), seed=1)),
    "EinsumDense": sequence(lambda: layers.EinsumDense("abc,cde->abde", (8, 4, 8), bias_axes="de")),
    "ELU": vector(lambda: layers.ELU(0.7)),
    "Embedding": raw(lambda: layers.Embedding(32, 8), dtype="int32", most=32),
    "Flatten": image(lambda: layers.Flatten("channels_first")),
    "FlaxLayer": vector(_flax_layer),
    "GaussianDropout": vector(lambda: layers.GaussianDropout(0.3, seed=1)),
    "GaussianNoise": vector(lambda: layers.GaussianNoise(0.3, seed=1)),
    "GroupNormalization": image(lambda: layers.GroupNormalization(2)),
    "GroupQueryAttention": _pairs(lambda: layers.GroupQueryAttention(4, 4, 2), SEQUENCE, call=_attend),
    "GRU": sequence(lambda: layers.GRU(8, return_sequences=True, return_state=True)),
    "GRUCell": _cell(lambda: layers.GRUCell(8)),
    "Identity": vector(layers.Identity),
    "JaxLayer": vector(_jax_layer),
    "Lambda": vector(lambda: layers.Lambda(lambda x: keras.ops.cumsum(x, axis=-1) * 0.3)),
    "LayerNormalization": image(lambda: layers.LayerNormalization(axis=(-2, -1))),
    "LeakyReLU": vector(lambda: layers.LeakyReLU(0.3)),
    "LSTM": sequence(lambda: layers.LSTM(8, go_backwards=True, dropout=0.2, recurrent_dropout=0.2, seed=1)),
    "LSTMCell": _cell(lambda: layers.LSTMCell(8), 2),
    "Masking": sequence(lambda: layers.Masking(1.0), call=lambda layer, x: layers.GRU(8)(layer(x[0]))),
    "Maximum": _pairs(layers.Maximum, count=3),
    "MelSpectrogram": Case(
        lambda: layers.MelSpectrogram(16, 8, 16, num_mel_bins=8, sampling_rate=160, max_freq=80.0, min_power=0.1),
        ((64,),),
        options={"scale": 0.01},
    ),
    "Minimum": _pairs(layers.Minimum, count=3),
    "MultiHeadAttention": _pairs(lambda: layers.MultiHeadAttention(4, 4, dropout=0.1, seed=1), SEQUENCE, call=_attend),
    "Multiply": _pairs(layers.Multiply, count=3),
    "Normalization": raw(_normalization),
    "Permute": image(lambda: layers.Permute((3, 1, 2))),
    "PReLU": image(lambda: layers.PReLU(shared_axes=[1])),
    "ReLU": vector(lambda: layers.ReLU(max_value=2.0, negative_slope=0.1, threshold=0.2)),
    "RepeatVector": vector(lambda: layers.RepeatVector(4)),
    "Rescaling": vector(lambda: layers.Rescaling(0.5, 0.1)),
    "Reshape": image(lambda: layers.Reshape((4, -1))),
    "Resizing": picture(lambda: layers.Resizing(6, 12, interpolation="bicubic")),
    "ReversibleEmbedding": raw(
        lambda: layers.ReversibleEmbedding(32, 8),
        dtype="int32",
        most=32,
        call=lambda layer, x: layer(layer(x[0]), reverse=True),
    ),
    "RMSNormalization": vector(layers.RMSNormalization),
    "RNN": sequence(lambda: layers.RNN(_OwnCell(8), return_sequences=True)),
    "SimpleRNN": sequence(lambda: layers.SimpleRNN(8, unroll=True)),
    "SimpleRNNCell": _cell(lambda: layers.SimpleRNNCell(8)),
    "Softmax": sequence(lambda: layers.Softmax(axis=1)),
    "SpatialDropout1D": sequence(lambda: layers.SpatialDropout1D(0.3, seed=1)),
    "SpatialDropout2D": image(lambda: layers.SpatialDropout2D(0.3, seed=1)),
    "SpatialDropout3D": volume(lambda: layers.SpatialDropout3D(0.3, seed=1)),
    "SpectralNormalization": vector(lambda: layers.SpectralNormalization(layers.Dense(8))),
    "StackedRNNCells": sequence(lambda: layers.RNN(layers.StackedRNNCells(_cells()))),
    "STFTSpectrogram": Case(
        lambda: layers.STFTSpectrogram("magnitude", 16, 8, 16, expand_dims=True), ((64, 2),), options={"scale": 0.1}
    ),
    "Subtract": _pairs(layers.Subtract),
    "TimeDistributed": Case(lambda: layers.TimeDistributed(layers.Conv2D(4, 3)), ((4, 8, 8, 4),)),
    "UnitNormalization": sequence(lambda: layers.UnitNormalization(axis=(1, 2))),
    # -- convolutions
    "Conv1D": sequence(lambda: layers.Conv1D(8, 3, padding="causal", dilation_rate=2)),
    "Conv1DTranspose": sequence(lambda: layers.Conv1DTranspose(8, 3, strides=2)),
    "Conv2D": image(lambda: layers.Conv2D(8, 3, strides=2, padding="same", groups=2)),
    "Conv2DTranspose": image(lambda: layers.Conv2DTranspose(8, 3, strides=2, padding="same")),
    "Conv3D": volume(lambda: layers.Conv3D(8, 3, padding="same")),
    "Conv3DTranspose": volume(lambda: layers.Conv3DTranspose(4, 2, strides=2)),
    "ConvLSTM1D": Case(lambda: layers.ConvLSTM1D(4, 3, padding="same"), ((4, 8, 4),)),
    "ConvLSTM2D": Case(lambda: layers.ConvLSTM2D(4, 3, return_sequences=True), ((3, 6, 6, 4),)),
    "ConvLSTM3D": Case(lambda: layers.ConvLSTM3D(2, 2, padding="same"), ((2, 4, 4, 4, 2),)),
    "DepthwiseConv1D": sequence(lambda: layers.DepthwiseConv1D(3, depth_multiplier=2)),
    "DepthwiseConv2D": image(lambda: layers.DepthwiseConv2D(3, strides=2, padding="same")),
    "SeparableConv1D": sequence(lambda: layers.SeparableConv1D(8, 3)),
    "SeparableConv2D": image(lambda: layers.SeparableConv2D(8, 3, depth_multiplier=2)),
    # -- pooling, padding
    "AdaptiveAveragePooling1D": sequence(lambda: layers.AdaptiveAveragePooling1D(3)),
    "AdaptiveAveragePooling2D": image(lambda: layers.AdaptiveAveragePooling2D((3, 4))),
    "AdaptiveAveragePooling3D": volume(lambda: layers.AdaptiveAveragePooling3D((2, 3, 4))),
    "AdaptiveMaxPooling1D": sequence(lambda: layers.AdaptiveMaxPooling1D(3)),
    "AdaptiveMaxPooling2D": image(lambda: layers.AdaptiveMaxPooling2D((3, 4))),
    "AdaptiveMaxPooling3D": volume(lambda: layers.AdaptiveMaxPooling3D((2, 3, 4))),
    "AveragePooling1D": sequence(lambda: layers.AveragePooling1D(3, 2, padding="same")),
    "AveragePooling2D": image(lambda: layers.AveragePooling2D(2)),
    "AveragePooling3D": volume(lambda: layers.AveragePooling3D(2)),
    "Cropping1D": sequence(lambda: layers.Cropping1D((1, 2))),
    "Cropping2D": image(lambda: layers.Cropping2D(((1, 2), (0, 3)))),
    "Cropping3D": volume(lambda: layers.Cropping3D(1)),
    "GlobalAveragePooling1D": sequence(layers.GlobalAveragePooling1D),
    "GlobalAveragePooling2D": image(layers.GlobalAveragePooling2D),
    "GlobalAveragePooling3D": volume(layers.GlobalAveragePooling3D),
    "GlobalMaxPooling1D": sequence(layers.GlobalMaxPooling1D),
    "GlobalMaxPooling2D": image(layers.GlobalMaxPooling2D),
    "GlobalMaxPooling3D": volume(layers.GlobalMaxPooling3D),
    "MaxPooling1D": sequence(lambda: layers.MaxPooling1D(3, 2, padding="same")),
    "MaxPooling2D": image(lambda: layers.MaxPooling2D(3, 2)),
    "MaxPooling3D": volume(lambda: layers.MaxPooling3D(2)),
    "UpSampling1D": sequence(lambda: layers.UpSampling1D(2)),
    "UpSampling2D": image(lambda: layers.UpSampling2D(2, interpolation="bilinear")),
    "UpSampling3D": volume(lambda: layers.UpSampling3D(2)),
    "ZeroPadding1D": sequence(lambda: layers.ZeroPadding1D((1, 2))),
    "ZeroPadding2D": image(lambda: layers.ZeroPadding2D(((1, 2), (0, 3)))),
    "ZeroPadding3D": volume(lambda: layers.ZeroPadding3D(1)),
    # -- pictures
    "AugMix": picture(lambda: layers.AugMix(seed=1)),
    "AutoContrast": picture(layers.AutoContrast),
    "ContrastLimitedAdaptiveHistogramEqualization": picture(
        lambda: layers.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))
    ),
    "CutMix": picture(lambda: layers.CutMix(seed=1)),
    "Equalization": picture(layers.Equalization),
    "MixUp": picture(lambda: layers.MixUp(seed=1)),
    "RandAugment": picture(lambda: layers.RandAugment(seed=1)),
    "RandomBrightness": picture(lambda: layers.RandomBrightness(0.3, seed=1)),
    "RandomColorDegeneration": picture(lambda: layers.RandomColorDegeneration(0.5, seed=1)),
    "RandomColorJitter": picture(
        lambda: layers.RandomColorJitter(
            brightness_factor=0.2, contrast_factor=0.2, saturation_factor=0.2, hue_factor=0.2, seed=1
        )
    ),
    "RandomContrast": picture(lambda: layers.RandomContrast(0.3, seed=1)),
    "RandomErasing": picture(lambda: layers.RandomErasing(seed=1)),
    "RandomFlip": picture(lambda: layers.RandomFlip(seed=1)),
    "RandomGaussianBlur": picture(lambda: layers.RandomGaussianBlur(seed=1)),
    "RandomGrayscale": picture(lambda: layers.RandomGrayscale(0.5, seed=1)),
    "RandomHue": picture(lambda: layers.RandomHue(0.3, seed=1)),
    "RandomInvert": picture(lambda: layers.RandomInvert(0.5, seed=1)),
    "RandomPerspective": picture(lambda: layers.RandomPerspective(1.0, 0.3, seed=1)),
    "RandomPosterization": picture(lambda: layers.RandomPosterization(4, seed=1)),
    "RandomRotation": picture(lambda: layers.RandomRotation(0.2, seed=1)),
    "RandomSaturation": picture(lambda: layers.RandomSaturation(0.3, seed=1)),
    "RandomSharpness": picture(lambda: layers.RandomSharpness(0.5, seed=1)),
    "RandomShear": picture(lambda: layers.RandomShear(0.3, 0.2, seed=1)),
    "RandomTranslation": picture(lambda: layers.RandomTranslation(0.2, 0.3, seed=1)),
    "RandomZoom": picture(lambda: layers.RandomZoom(0.3, seed=1)),
    "Solarization": picture(lambda: layers.Solarization(seed=1)),
}


def own_layers(model: keras.Model) -> list[str]:
    """Names of the layers that a case is about."""
    around = re.compile(r"(x|stem|float|flat)\d+|joined|head")
    return [layer.name for layer in model.layers if not around.fullmatch(layer.name)]


def plan_of(
    model: Any, batch: Any, mesh: dict[str, int], seed: int | None = None, beyond_batch: bool = False, **options: Any
) -> autoshard.Plan:
    """The plan of a training step; with ``seed`` one of random strategies."""
    names = dict(zip(("inputs", "targets", "sample_weight"), batch, strict=False))
    options = {"hardware": toy(1e8, 1e8), "solver": SOLVER, "progress": False, **names, **options}
    with contextlib.nullcontext() if seed is None else at_random(seed, beyond_batch):
        return autoshard.optimize(model, mesh, **options)


def assert_equal(found: Any, expected: Any, what: str) -> None:
    """Equal up to rounding: 1e-5 of the norm of what is compared."""
    a, b = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert a.shape == b.shape, what
    allowed = TOLERANCE * max(1.0, float(np.linalg.norm(b)))
    assert np.linalg.norm(a - b) <= allowed, (what, float(np.linalg.norm(a - b)), float(np.linalg.norm(b)))


def everything(model: keras.Model, batches: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """Three steps of training, then predictions, then every variable."""
    found: list[tuple[str, Any]] = []
    random.seed(0)  # AugMix draws from Python's generator while it is traced; plans always trace from this state
    for batch in batches:
        found += model.train_on_batch(*batch, return_dict=True).items()
    found.append(("predictions", model.predict_on_batch(batches[0][0])))
    variables = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return found + [(v.path, np.asarray(v.value)) for v in variables]


def assert_same_numbers(
    build: Callable[[], keras.Model], batches: Any, mesh: dict[str, int], seed: int = 0, beyond_batch: bool = False
) -> None:
    """Trains and predicts on one device and under a plan of random strategies.

    With ``beyond_batch`` they shard something else than the batch inside the model's own layers.
    """
    alone, planned = build(), build()
    expected = everything(alone, batches)
    plan = plan_of(planned, batches[0], mesh, seed, beyond_batch)
    if beyond_batch:
        assert sum(sharded_beyond_batch(plan, name) for name in own_layers(planned)), "only the batch is sharded"
    plan.apply(planned)
    for (what, a), (_, b) in zip(everything(planned, batches), expected, strict=True):
        assert_equal(a, b, what)

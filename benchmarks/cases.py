"""The registry of benchmark cases: which model, on which mesh, of which hardware. One line per case."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One planning problem.

    Attributes:
        model: "hub:<preset>" (see ``autoshard_ilp.models``), or the name of a builder in this file.
        mesh: axis name -> size.
        hardware: profile name.
        batch_size: global batch.
        sequence_length: tokens per example, where the model takes tokens.
    """

    model: str
    mesh: Mapping[str, int]
    hardware: str
    batch_size: int
    sequence_length: int | None = None

    def factory(self) -> Callable[[], Any]:
        """Builder of the compiled model."""
        from autoshard_ilp.models import load_model_factory

        if ":" in self.model:
            return load_model_factory(self.model, sequence_length=self.sequence_length)
        return BUILDERS[self.model]

    def options(self) -> dict[str, Any]:
        """Options of the batch, as ``optimize`` takes them."""
        return {"batch_size": self.batch_size, "sequence_length": self.sequence_length}

    @property
    def mesh_text(self) -> str:
        """The mesh as "2x4"."""
        return "x".join(map(str, self.mesh.values()))

    def on(self, target: str) -> bool:
        """Whether a target as ``verify`` takes it ("tpu-v5e:4x4", "h100:8") has this case's hardware and mesh."""
        hardware, _, shape = target.partition(":")
        return hardware == self.hardware and shape in (self.mesh_text, str(math.prod(self.mesh.values())))


def mlp() -> Any:
    """Two dense layers: the smoke case."""
    import keras

    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(256)])
    model.compile(optimizer="adam", loss="mse")
    return model


def wide_mlp() -> Any:
    """Four square layers of width 8192: 268 million parameters without any attention."""
    import keras

    dense = [keras.layers.Dense(8192, "relu", dtype="mixed_bfloat16") for _ in range(4)]
    model = keras.Sequential([keras.Input((8192,)), *dense])
    model.compile(optimizer=keras.optimizers.AdamW(1e-4), loss="mse")
    return model


def lstm(use_cudnn: bool | str = False) -> Any:
    """Two LSTM layers of width 1024 over 256 tokens: a loop in the step, also where a GPU is attached."""
    import keras

    inputs = keras.Input((256,), dtype="int32")
    x = keras.layers.Embedding(32000, 1024)(inputs)
    x = keras.layers.LSTM(1024, return_sequences=True, use_cudnn=use_cudnn)(x)
    x = keras.layers.LSTM(1024, use_cudnn=use_cudnn)(x)
    model = keras.Model(inputs, keras.layers.Dense(32000)(x))
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def lstm_of_keras() -> Any:
    """The same as Keras would build it: cuDNN's loop where a GPU is attached."""
    return lstm("auto")


BUILDERS: Mapping[str, Callable[[], Any]] = {
    "mlp": mlp,
    "wide_mlp": wide_mlp,
    "lstm": lstm,
    "lstm_of_keras": lstm_of_keras,
}

_2X4 = {"data": 2, "model": 4}
_4X4 = {"data": 4, "model": 4}
_2X2X4 = {"replica": 2, "data": 2, "model": 4}

SMOKE = {"mlp": Case("mlp", _2X4, "h100", 64)}

SPEED: Mapping[str, Case] = {
    "gpt2_small": Case("hub:gpt2_small", _2X4, "tpu-v5e", 32, 1024),
    "bert_base": Case("hub:bert_base", _2X4, "tpu-v5e", 64, 512),
    "llama3_8b 4x4": Case("hub:llama3_8b", _4X4, "tpu-v5e", 16, 2048),
    "llama3_8b 2x2x4": Case("hub:llama3_8b", _2X2X4, "tpu-v5e", 16, 2048),
    "llama3_8b 4x4 h100": Case("hub:llama3_8b", _4X4, "h100", 16, 2048),
    "llama3_8b 2x2x4 h100": Case("hub:llama3_8b", _2X2X4, "h100", 16, 2048),
    "llama3_70b 16x16": Case("hub:llama3_70b", {"data": 16, "model": 16}, "tpu-v5p", 64, 2048),
    "mixtral, 4 layers": Case("hub:mixtral_8x7b?layers=4", _4X4, "h100", 16, 2048),
    "mixtral 2x4x8": Case("hub:mixtral_8x7b", {"data": 2, "expert": 4, "model": 8}, "h100", 16, 2048),
    "vit_base": Case("hub:vit_base", _2X4, "h100", 256),
    "resnet50": Case("hub:resnet50", _2X4, "h100", 256),
    "lstm": Case("lstm", _2X4, "h100", 128),
}
"""Whole models at true width and depth (but for one mixture of experts); of these, memory binds for Llama on v5e."""

REDUCED: Mapping[str, tuple[str, int, int | None]] = {
    "gpt2_small": ("hub:gpt2_small?layers=2", 16, 1024),
    "llama3_8b": ("hub:llama3_8b?layers=2", 8, 1024),
    "bert_base": ("hub:bert_base?layers=2", 32, 512),
    "vit_base": ("hub:vit_base?layers=2", 128, None),
    "opt_6.7b": ("hub:opt_6.7b?layers=2", 8, 1024),
    "mistral_7b": ("hub:mistral_7b?layers=2", 8, 1024),
    "gemma2_2b": ("hub:gemma2_2b?layers=2", 8, 1024),
    "gemma3_1b": ("hub:gemma3_1b?layers=2", 8, 1024),
    "wide_mlp": ("wide_mlp", 1024, None),
    "resnet50": ("hub:resnet50", 256, None),
    "mobilenet_v2": ("hub:mobilenet_v2", 256, None),
    "lstm": ("lstm", 128, None),
}
"""Name -> factory, global batch, sequence length: true width, few layers: small enough to compile for its target."""

_QUALITY = {
    **{f"{name}, 2 layers" if "layers=2" in case[0] else name: case for name, case in REDUCED.items()},
    "mixtral, 1 layer": ("hub:mixtral_8x7b?layers=1", 8, 1024),
}
_QUALITY_TARGETS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "h100": ("h100", _2X4),
    "tpu-v5e": ("tpu-v5e", _2X4),
    "tpu-v5e 4x4": ("tpu-v5e", _4X4),
    "tpu-v5e 4x8": ("tpu-v5e", {"data": 4, "model": 8}),
    "tpu-v5p 2x2x2": ("tpu-v5p", {"replica": 2, "data": 2, "model": 2}),
}
QUALITY: Mapping[str, Case] = {
    f"{name} / {target}": Case(model, mesh, hardware, batch, length)
    for name, (model, batch, length) in _QUALITY.items()
    for target, (hardware, mesh) in _QUALITY_TARGETS.items()
}
"""True width, few layers: small enough to compile every plan for its target."""

_GROWTH_MESHES: Mapping[str, Mapping[str, int]] = {
    "4 devices": {"data": 2, "model": 2},
    "16 devices": _4X4,
    "64 devices": {"data": 8, "model": 8},
    "256 devices": {"data": 16, "model": 16},
    "1 axis": {"data": 16},
    "2 axes": _4X4,
    "3 axes": _2X2X4,
    "4 axes": {"replica": 2, "data": 2, "expert": 2, "model": 2},
}
GROWTH: Mapping[str, Case] = {
    **{f"layers / {n}": Case(f"hub:gpt2_small?layers={n}", _2X4, "tpu-v5e", 256, 256) for n in (2, 4, 8, 16, 32)},
    **{
        f"{'axes' if 'ax' in name else 'devices'} / {name.split()[0]}": Case(
            "hub:gpt2_small?layers=4", mesh, "tpu-v5e", 256, 256
        )
        for name, mesh in _GROWTH_MESHES.items()
    },
}
"""One model whose layers, devices or mesh axes grow, all else equal."""

CASES: Mapping[str, Case] = {**SMOKE, **SPEED, **QUALITY, **GROWTH}

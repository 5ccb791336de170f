"""What is gathered along its last dimension: XLA:GPU would lay out all that is computed of it the other way around."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp.apply.planned import Planned
from autoshard_ilp.verify import compile_only_mesh
from autoshard_ilp.verify.compiled import compile_planned
from compiled import needs_cuda

LENGTH, WIDTH = 256, 512


def stream() -> keras.Model:
    """A residual stream with layer normalisations, from a table whose columns are divided."""
    given = keras.Input((LENGTH,), dtype="int32")
    x = layers.LayerNormalization(dtype="mixed_bfloat16")(layers.Embedding(32768, WIDTH, dtype="mixed_bfloat16")(given))
    for _ in range(2):
        y = layers.Dense(WIDTH, activation="tanh", dtype="mixed_bfloat16")(x)
        x = layers.LayerNormalization(dtype="mixed_bfloat16")(layers.Add(dtype="mixed_bfloat16")([x, y]))
    model = keras.Model(given, layers.Dense(4, dtype="float32")(x[:, 0]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@needs_cuda
def test_a_stream_of_gathered_columns_is_laid_out_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pins: dict[str, Any] = {"embedding.*embeddings": (None, "model"), "dense.*kernel": (None, None)}
    pins |= {"inputs.*": ("data", None), "targets.*": ("data",)}
    mesh = {"data": 2, "model": 4}
    plan = autoshard.optimize(stream, mesh, hardware="h100", batch_size=16, pins=pins, progress=False)
    gpus = compile_only_mesh("h100:8", tuple(mesh), tuple(mesh.values()))

    def compiled() -> tuple[float, int]:
        """Peak over the predicted one, and arrays that have the columns in front."""
        found = compile_planned(plan, gpus)
        m = found.memory_analysis()
        peak = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
        entry = found.as_text().split("\nENTRY")[1]
        return peak / plan.memory.peak_bytes, len(re.findall(rf"= \(?(?:f32|bf16)\[{WIDTH},8,{LENGTH}\]", entry))

    ratio, turned = compiled()
    assert 0.9 < ratio < 1.05 and turned == 0
    monkeypatch.setattr(Planned, "in_rows", lambda self, value, *_: value)
    without, turned = compiled()
    assert without > 1.1 * ratio and turned > 10

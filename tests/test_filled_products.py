"""What two products read of an uneven dimension, filled up: TPU v5p writes it, v5e computes it in both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.models import load_model_factory
from compiled import needs_tpu

WORDS = 50257
BATCH, TOKENS = 16, 512


def planned(hardware: Any = "tpu-v5p") -> autoshard.Plan:
    """GPT-2 with one layer: no mesh axis divides its words."""
    factory = load_model_factory("hub:gpt2_small?layers=1", sequence_length=TOKENS)
    options: dict[str, Any] = {"batch_size": BATCH, "sequence_length": TOKENS, "progress": False}
    return autoshard.optimize(factory, {"replica": 2, "data": 2, "model": 2}, hardware=hardware, **options)


@pytest.mark.slow
def test_the_gradient_of_uneven_logits_is_counted_as_written() -> None:
    more = replace(autoshard.profile("tpu-v5p"), fused_kernels="more")
    counted, without = planned(), planned(more)
    assert counted.specs == without.specs
    gradient = BATCH * TOKENS * WORDS * 2 // 8
    assert counted.memory.peak_bytes - without.memory.peak_bytes >= gradient


@needs_tpu
@pytest.mark.slow
def test_compiled_v5p_writes_it() -> None:
    plan = planned()
    found = plan.verify("tpu-v5p:2x2x2")
    assert found.compiled_peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=0.1)

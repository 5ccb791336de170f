"""KerasHub's models under a plan: true head counts, little depth and width; three steps, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_cases as cases
from keras_cases import assert_close, assert_on_plan, plan_for, seeded

keras_hub = pytest.importorskip("keras_hub")

VOCABULARY, LENGTH = 64, 8
PLAIN = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 48, "num_heads": 12, "intermediate_dim": 64}
PLAIN["max_sequence_length"] = 16
GROUPED = {"vocabulary_size": VOCABULARY, "num_layers": 2, "num_query_heads": 32, "num_key_value_heads": 8}
GROUPED |= {"hidden_dim": 128, "intermediate_dim": 96}
GEMMA = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 64, "intermediate_dim": 96, "head_dim": 8}
GEMMA |= {"use_post_ffw_norm": True, "use_post_attention_norm": True, "use_sliding_window_attention": True}
VIT = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 2, "num_heads": 12, "hidden_dim": 48, "mlp_dim": 64}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name -> (prefix of KerasHub's classes, task, the backbone's configuration)
    "gpt2": ("GPT2", "CausalLM", PLAIN),
    "bert": ("Bert", "TextClassifier", PLAIN),
    "roberta": ("Roberta", "TextClassifier", PLAIN),
    "opt": ("OPT", "CausalLM", PLAIN),
    "llama3": ("Llama3", "CausalLM", GROUPED),
    "gemma2": ("Gemma", "CausalLM", {**GEMMA, "num_query_heads": 16, "num_key_value_heads": 8}),
    "gemma3": ("Gemma3", "CausalLM", {**GEMMA, "num_query_heads": 8, "num_key_value_heads": 4, "image_size": None}),
    "mistral": ("Mistral", "CausalLM", GROUPED),
    "mixtral": ("Mixtral", "CausalLM", {**GROUPED, "num_experts": 8, "top_k": 2}),
    "qwen_moe": (
        "QwenMoe",
        "CausalLM",
        {**GROUPED, "num_query_heads": 16, "num_key_value_heads": 16, "moe_intermediate_dim": 16}
        | {"shared_expert_intermediate_dim": 32, "num_experts": 60, "top_k": 4},
    ),
    "vit": ("ViT", "ImageClassifier", VIT),
}

WIDTHS = {"vocabulary_size": VOCABULARY, "num_layers": 1, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 32}
ROTATED = {"num_heads": 4, "depth": 1, "depth_single_blocks": 1, "axes_dim": [2, 2, 4], "theta": 100, "use_bias": True}
ROTATED |= {"input_channels": 8, "hidden_size": 32, "mlp_ratio": 2.0, "image_shape": (4, 8), "text_shape": (4, 32)}
ROTATED |= {"image_ids_shape": (4, 3), "text_ids_shape": (4, 3), "y_shape": (16,)}
WINDOWS = {"image_shape": (32, 32, 3), "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
EXPERTS = {**GROUPED, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # name -> (KerasHub's class, its configuration): what none of the models above has
    "relative positions, encoder and decoder": ("T5Backbone", {**WIDTHS, "dropout": 0.0}),
    "Fourier transforms": (
        "FNetBackbone",
        {**{k: v for k, v in WIDTHS.items() if k != "num_heads"}, "max_sequence_length": 16},
    ),
    "attention sinks": ("GptOssBackbone", {**EXPERTS, "num_layers": 1, "num_experts": 4, "sliding_window": 4}),
    "diffusion transformer": ("FluxBackbone", ROTATED),
    "shifted windows": ("SwinTransformerBackbone", {**WINDOWS, "patch_size": 2}),
}


def other_backbone(name: str) -> keras.Model:
    kind, config = OTHERS[name]
    model = getattr(keras_hub.models, kind)(**config)
    loss = dict.fromkeys(model.output, "mse") if isinstance(model.output, dict) else "mse"
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
    return model


def backbone(name: str) -> keras.Model:
    prefix, _, config = MODELS[name]
    depth = 2 if name in ("gpt2", "llama3", "gemma2") else 1  # gemma2 alternates two kinds of layers
    return getattr(keras_hub.models, f"{prefix}Backbone")(**{**config, "num_layers": depth})


def task(name: str) -> keras.Model:
    prefix, kind, _ = MODELS[name]
    head = {} if kind == "CausalLM" else {"num_classes": 4}
    model = getattr(keras_hub.models, prefix + kind)(backbone=backbone(name), preprocessor=None, **head)
    return cases.compiled(model, keras.optimizers.SGD(0.02, momentum=0.9))


def trained_backbone(name: str) -> keras.Model:
    model = backbone(name)
    loss = dict.fromkeys(model.output, "mse") if isinstance(model.output, dict) else "mse"
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
    return model


def inputs_of(model: keras.Model, rng: np.random.Generator) -> Any:
    def values(tensor: Any) -> np.ndarray:
        shape = [8, *(LENGTH if n is None else n for n in tensor.shape[1:])]
        if "padding_mask" in tensor.name:
            return (np.arange(LENGTH) < np.array([LENGTH, LENGTH - 2] * 4)[:, None]).astype("int32")
        if tensor.name.startswith("segment_ids"):
            return np.zeros(shape, "int32")
        if "int" in tensor.dtype:
            return rng.integers(1, VOCABULARY, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    return jax.tree.map(values, model.input)


def targets_of(model: keras.Model, inputs: Any, rng: np.random.Generator) -> Any:
    if isinstance(model, keras_hub.models.CausalLM):
        return np.roll(inputs["token_ids"], -1, axis=1)
    if isinstance(model, keras_hub.models.Task):
        return rng.integers(0, 4, (8,)).astype("int32")
    return jax.tree.map(
        lambda t: rng.normal(size=(8, *[n or LENGTH for n in t.shape[1:]])).astype("float32"), model.output
    )


def compare_three_steps(build: Callable[[], keras.Model]) -> None:
    rng = np.random.default_rng(0)
    alone, planned = seeded(build), seeded(build)
    x = inputs_of(alone, rng)
    y = targets_of(alone, x, rng)
    plan = plan_for(planned, (x, y))
    assert cases.is_sharded(plan)
    assert not plan.unknown
    plan.apply(planned)
    for _ in range(3):
        expected = alone.train_on_batch(x, y, return_dict=True)
        assert_close(planned.train_on_batch(x, y, return_dict=True), expected, 5e-4, 1e-4)
    assert_on_plan(planned, plan)
    for a, b in zip(planned.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-3, atol=2e-4, err_msg=b.path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_task_model(name: str) -> None:
    compare_three_steps(lambda: task(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_backbone(name: str) -> None:
    compare_three_steps(lambda: trained_backbone(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask", "ignore:.build")  # KerasHub's own
@pytest.mark.parametrize("name", OTHERS)
def test_another_backbone(name: str) -> None:
    compare_three_steps(lambda: other_backbone(name))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama3", marks=pytest.mark.slow)])
def test_generate_gives_the_same_tokens(name: str) -> None:
    """With a cache of keys and values, on the layout of a plan made for predict mode."""
    rng = np.random.default_rng(0)
    alone, planned = seeded(lambda: task(name)), seeded(lambda: task(name))
    pins = {"attention/(query|key|value)/kernel$": (None, "model"), "token_embedding/embeddings$": ("model",)}
    plan = plan_for(planned, (inputs_of(alone, rng), None), mode="predict", pins=pins)
    assert cases.is_sharded(plan)
    plan.apply(planned)
    prompt = {"token_ids": rng.integers(1, VOCABULARY, (4, LENGTH)).astype("int32")}
    prompt["padding_mask"] = (np.arange(LENGTH) < 3).astype("int32") * np.ones((4, 1), "int32")
    outputs = [model.generate(prompt, stop_token_ids=None)["token_ids"] for model in (alone, planned)]
    np.testing.assert_array_equal(outputs[1], outputs[0])
    assert np.any(np.asarray(outputs[0])[:, 3:] != prompt["token_ids"][:, 3:])
    assert_on_plan(planned, plan)

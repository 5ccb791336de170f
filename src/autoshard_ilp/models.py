"""Models by name, for the command line: ``package.module:factory`` and ``hub:<preset>``. No weights are downloaded.

A preset is the published architecture of a model: widths, heads, vocabulary, as in its ``config.json`` or paper. It is
built by KerasHub's backbone and task classes (or ``keras.applications``) with random initialisation, and compiled with
AdamW and the loss of its task. ``hub:llama3_8b?layers=2&dtype=float32`` changes the depth or the dtype policy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from autoshard_ilp.errors import InputShapeError, UnsupportedModelError
from autoshard_ilp.keras_integration import ensure_jax_backend

DEFAULT_DTYPE = "mixed_bfloat16"


@dataclass(frozen=True)
class Preset:
    """One published architecture.

    Attributes:
        builder: "hub" for a KerasHub task on a backbone, "application" for ``keras.applications``.
        task: name of the task class in ``keras_hub.models``, or of the function in ``keras.applications``.
        backbone: name of the backbone class in ``keras_hub.models``.
        config: arguments of the backbone.
        head: arguments of the task.
        source: where the figures were published.
        max_sequence_length: longest sequence that the model can be built for; ``None``: no limit in its weights.
    """

    builder: str
    task: str
    backbone: str
    config: Mapping[str, Any]
    source: str
    head: Mapping[str, Any] = field(default_factory=dict)
    max_sequence_length: int | None = None


def _gpt2(layers: int, heads: int, width: int) -> Preset:
    config = {
        "vocabulary_size": 50257,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
        "max_sequence_length": 1024,
    }
    source = "Radford et al. 2019, table 2; config.json of openai-community/gpt2"
    return Preset("hub", "GPT2CausalLM", "GPT2Backbone", config, source, max_sequence_length=1024)


def _encoder(kind: str, vocabulary: int, layers: int, heads: int, width: int, source: str) -> Preset:
    config = {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
        "max_sequence_length": 512,
    }
    head = {"num_classes": 2}
    return Preset("hub", f"{kind}TextClassifier", f"{kind}Backbone", config, source, head, max_sequence_length=512)


def _opt(layers: int, heads: int, width: int) -> Preset:
    config = {
        "vocabulary_size": 50272,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
        "max_sequence_length": 2048,
    }
    return Preset("hub", "OPTCausalLM", "OPTBackbone", config, "Zhang et al. 2022, table 1", max_sequence_length=2048)


def _llama3(layers: int, heads: int, width: int, intermediate: int) -> Preset:
    config = {
        "vocabulary_size": 128256,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": 8,
        "hidden_dim": width,
        "intermediate_dim": intermediate,
        "rope_max_wavelength": 500000,
        "layer_norm_epsilon": 1e-5,
    }
    return Preset("hub", "Llama3CausalLM", "Llama3Backbone", config, "Grattafiori et al. 2024, table 3")


def _gemma2(layers: int, heads: int, key_value_heads: int, width: int, feed_forward: int) -> Preset:
    config = {
        "vocabulary_size": 256000,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_dim": width,
        "intermediate_dim": 2 * feed_forward,  # KerasHub counts the gate and the up projection together
        "head_dim": 256,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4096,
    }
    source = "Gemma Team 2024 (Gemma 2), table 1; config.json of google/gemma-2-9b"
    return Preset("hub", "GemmaCausalLM", "GemmaBackbone", config, source)


def _mistral_like(kind: str, source: str, **extra: Any) -> Preset:
    config = {
        "vocabulary_size": 32000,
        "num_layers": 32,
        "num_query_heads": 32,
        "num_key_value_heads": 8,
        "hidden_dim": 4096,
        "intermediate_dim": 14336,
        "layer_norm_epsilon": 1e-5,
        **extra,
    }
    return Preset("hub", f"{kind}CausalLM", f"{kind}Backbone", config, source)


def _vit(layers: int, heads: int, width: int) -> Preset:
    config = {
        "image_shape": (224, 224, 3),
        "patch_size": 16,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "mlp_dim": 4 * width,
    }
    source = "Dosovitskiy et al. 2021, table 1"
    return Preset("hub", "ViTImageClassifier", "ViTBackbone", config, source, {"num_classes": 1000})


def _application(name: str, source: str) -> Preset:
    return Preset("application", name, "", {}, source)


_GEMMA3_1B: Mapping[str, Any] = {
    "vocabulary_size": 262144,
    "image_size": None,
    "num_layers": 26,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 1152,
    "intermediate_dim": 6912,
    "head_dim": 256,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 512,
}
_QWEN3_30B: Mapping[str, Any] = {
    "vocabulary_size": 151936,
    "num_layers": 48,
    "num_query_heads": 32,
    "num_key_value_heads": 4,
    "hidden_dim": 2048,
    "intermediate_dim": 6144,
    "moe_intermediate_dim": 768,
    "num_experts": 128,
    "head_dim": 128,
    "top_k": 8,
    "norm_top_k_prob": True,
    "rope_max_wavelength": 1000000,
    "sliding_window_size": None,
    "mlp_only_layers": [],
}

PRESETS: Mapping[str, Preset] = {
    "gpt2_small": _gpt2(12, 12, 768),
    "gpt2_medium": _gpt2(24, 16, 1024),
    "gpt2_large": _gpt2(36, 20, 1280),
    "gpt2_xl": _gpt2(48, 25, 1600),
    "bert_base": _encoder("Bert", 30522, 12, 12, 768, "Devlin et al. 2019; config.json of bert-base-uncased"),
    "bert_large": _encoder("Bert", 30522, 24, 16, 1024, "Devlin et al. 2019; config.json of bert-large-uncased"),
    "roberta_base": _encoder("Roberta", 50265, 12, 12, 768, "Liu et al. 2019; config.json of roberta-base"),
    "opt_125m": _opt(12, 12, 768),
    "opt_6.7b": _opt(32, 32, 4096),
    "llama3_8b": _llama3(32, 32, 4096, 14336),
    "llama3_70b": _llama3(80, 64, 8192, 28672),
    "gemma2_2b": _gemma2(26, 8, 4, 2304, 9216),
    "gemma2_9b": _gemma2(42, 16, 8, 3584, 14336),
    "gemma3_1b": Preset(
        "hub",
        "Gemma3CausalLM",
        "Gemma3Backbone",
        _GEMMA3_1B,
        "Gemma Team 2025 (Gemma 3), section 2; config.json of google/gemma-3-1b-pt",
        {"preprocessor": None},
    ),
    "mistral_7b": _mistral_like("Mistral", "Jiang et al. 2023, table 1", sliding_window=4096),
    "mixtral_8x7b": _mistral_like(
        "Mixtral",
        "Jiang et al. 2024, table 1",
        num_experts=8,
        top_k=2,
        rope_max_wavelength=1000000,
        sliding_window=None,
    ),
    "qwen3_moe_30b": Preset(
        "hub", "Qwen3MoeCausalLM", "Qwen3MoeBackbone", _QWEN3_30B, "config.json of Qwen/Qwen3-30B-A3B"
    ),
    "vit_base": _vit(12, 12, 768),
    "vit_large": _vit(24, 16, 1024),
    "resnet50": _application("ResNet50", "He et al. 2016, table 1"),
    "efficientnet_b0": _application("EfficientNetB0", "Tan and Le 2019, table 1"),
    "mobilenet_v2": _application("MobileNetV2", "Sandler et al. 2018, table 2"),
}


def hub_presets() -> tuple[str, ...]:
    """Names that ``hub:<name>`` accepts."""
    return tuple(sorted(PRESETS))


def load_model_factory(spec: str, *, sequence_length: int | None = None) -> Callable[[], Any]:
    """The builder behind a name.

    Args:
        spec: "package.module:factory" (a callable without arguments, or a model), found from the current directory
            too; or "hub:<preset>", optionally with "?layers=<n>&dtype=<policy>".
        sequence_length: checked against the longest sequence that the preset's position embedding holds, and what is
            planned for where the call that plans does not say.

    Returns:
        A callable without arguments that builds a compiled ``keras.Model``.

    Raises:
        InputShapeError: an unknown preset or option, or a sequence that is too long.
        UnsupportedModelError: the module or the factory cannot be found.
    """
    kind, colon, rest = spec.partition(":")
    if not colon or not kind or not rest:
        raise InputShapeError(
            f"A model is named as 'package.module:factory' or 'hub:<preset>'. Received: {spec!r}. "
            f"Presets: {', '.join(hub_presets())}."
        )
    ensure_jax_backend()
    factory = _hub_factory(rest, sequence_length) if kind == "hub" else _imported_factory(kind, rest)
    if sequence_length is None:
        return factory

    @functools.wraps(factory)
    def build() -> Any:
        return factory()

    build.sequence_length = sequence_length  # type: ignore[attr-defined]
    return build


def _hub_factory(text: str, sequence_length: int | None) -> Callable[[], Any]:
    name, _, query = text.partition("?")
    preset = _preset(name)
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - {"layers", "dtype"})
    layers = options.get("layers")
    if unknown or (layers is not None and not layers.isdecimal()):
        raise InputShapeError(
            f"A preset takes the options layers=<positive integer> and dtype=<Keras dtype policy>. Received: {query!r}."
        )
    longest = preset.max_sequence_length
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise InputShapeError(
            f"The preset {name!r} has positions for sequences of at most {longest}. Received: "
            f"sequence_length={sequence_length}. Use a shorter sequence or another preset."
        )
    dtype = options.get("dtype", DEFAULT_DTYPE)
    return lambda: hub_model(name, layers=None if layers is None else int(layers), dtype=dtype)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InputShapeError(f"Unknown preset. Received: {name!r}. Presets: {', '.join(hub_presets())}.")
    return PRESETS[name]


def _imported_factory(module_name: str, attribute: str) -> Callable[[], Any]:
    import keras

    with _current_directory_importable():
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UnsupportedModelError(
                f"The model's module must be importable from here. Received: {module_name!r} ({error}). Run from the "
                f"directory that holds it, or set PYTHONPATH."
            ) from error
        except (Exception, SystemExit) as error:  # the module's own, or a name that no module can have
            raise UnsupportedModelError(
                f"The model's module must be importable. Received: {module_name!r}, which raised "
                f"{type(error).__name__}: {error}"
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnsupportedModelError(
                f"The model's factory must exist in its module. Received: {attribute!r}, not in {module_name!r}."
            )
        found = getattr(found, part)
    if isinstance(found, keras.Model):
        model = found
        return lambda: model
    if not callable(found):
        raise UnsupportedModelError(
            f"The model's factory must be a callable without arguments. Received: {module_name}:{attribute} of type "
            f"{type(found).__name__}."
        )
    return found


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    """A console script does not have the current directory on its path, ``python -m`` does."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


def hub_model(name: str, *, layers: int | None = None, dtype: str = DEFAULT_DTYPE) -> Any:
    """Build and compile a preset. This allocates its variables, unless it runs inside an abstract construction.

    Args:
        name: one of :func:`hub_presets`.
        layers: depth instead of the published one; not for ``keras.applications``.
        dtype: Keras dtype policy, e.g. "mixed_bfloat16" (variables in float32, computation in bfloat16).

    Returns:
        A ``keras.Model`` compiled with AdamW and a sparse categorical cross-entropy.

    Raises:
        InputShapeError: unknown preset, or a depth that it cannot have.
        UnsupportedModelError: KerasHub is not installed.
    """
    ensure_jax_backend()
    import keras

    preset = _preset(name)
    if layers is not None and (layers < 1 or preset.builder == "application"):
        raise InputShapeError(
            f"layers must be a positive integer, and only transformer presets take it. Received: layers={layers} for "
            f"{name!r}."
        )
    application = preset.builder == "application"
    model = _application_model(preset, dtype) if application else _hub_task(preset, layers, dtype)
    # An application ends in a softmax, a KerasHub task in logits.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=not application)
    model.compile(optimizer=keras.optimizers.AdamW(1e-4, weight_decay=0.01), loss=loss)
    return model


def _hub_task(preset: Preset, layers: int | None, dtype: str) -> Any:
    try:
        import keras_hub
    except ImportError as error:
        raise UnsupportedModelError(
            "This preset needs KerasHub, which is not installed. Run: pip install 'autoshard-ilp[hub]'."
        ) from error
    config = dict(preset.config)
    if layers is not None:
        config["num_layers"] = layers
    backbone = getattr(keras_hub.models, preset.backbone)(**config, dtype=dtype)
    return getattr(keras_hub.models, preset.task)(backbone=backbone, **{"preprocessor": None, **preset.head})


def _application_model(preset: Preset, dtype: str) -> Any:
    """``keras.applications`` take no dtype: the global policy is set while they are built."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        return getattr(keras.applications, preset.task)(weights=None, input_shape=(224, 224, 3), classes=1000)
    finally:
        keras.config.set_dtype_policy(before)

"""Models by name: presets have their published size, and factories are found."""

from __future__ import annotations

import math

import keras
import pytest

from autoshard_ilp.errors import InputShapeError, UnsupportedModelError
from autoshard_ilp.keras_integration import abstract_construction
from autoshard_ilp.models import PRESETS, hub_presets, load_model_factory
from autoshard_ilp.trace import trace_model

# Parameters as published: papers, or the sum over the checkpoint's tensors.
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "bert_base": 109_483_778,  # with a classifier of two classes: 109,482,240 + 1,538
    "opt_125m": 125_237_760,  # the checkpoint has two more rows of positions, for padding
    "llama3_8b": 8_030_261_248,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_moe_30b": 30_532_122_624,
    "vit_base": 86_567_656,
    "resnet50": 25_583_592,  # trainable in Keras: its convolutions have biases
}


def _parameters(model):
    return sum(math.prod(v.shape) for v in model.trainable_variables)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_have_their_published_size(name):
    with abstract_construction():
        model = load_model_factory(f"hub:{name}")()
    assert model.compiled and isinstance(model.optimizer, keras.optimizers.AdamW)
    assert _parameters(model) == PUBLISHED[name]


def test_every_preset_names_its_source():
    assert all(preset.source for preset in PRESETS.values())
    assert set(hub_presets()) == set(PRESETS)


def test_options_change_depth_and_dtype():
    traced = trace_model(load_model_factory("hub:llama3_8b?layers=1&dtype=bfloat16"), batch_size=2, sequence_length=8)
    dtypes = {a.dtype for a in traced.arguments if a.role == "parameter"}
    assert dtypes == {"bfloat16"}
    assert sum(a.role == "parameter" for a in traced.arguments) == 9 + 3  # one decoder, two embeddings, the last norm


def test_applications_follow_the_dtype_and_leave_the_policy_alone():
    before = keras.config.dtype_policy()
    with abstract_construction():
        model = load_model_factory("hub:mobilenet_v2")()
    assert keras.config.dtype_policy() == before
    assert model.layers[1].compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("hub:llama9_1b", {}, "llama9_1b.*llama3_8b"),
        ("llama3_8b", {}, "package.module:factory"),
        ("hub:", {}, "package.module:factory"),
        ("hub:gpt2_small?width=3", {}, "layers=.*width=3"),
        ("hub:gpt2_small?layers=two", {}, "layers=two"),
        ("hub:gpt2_small", {"sequence_length": 4096}, "at most 1024"),
    ],
)
def test_wrong_names_are_explained(spec, options, message):
    with pytest.raises(InputShapeError, match=f"(?s){message}"):
        load_model_factory(spec, **options)


def test_depth_of_a_convolutional_network_is_refused():
    with pytest.raises(InputShapeError, match="layers=2"):
        load_model_factory("hub:resnet50?layers=2")()


def test_factories_are_found_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_models_for_a_test.py").write_text(
        "import keras\n"
        "def build():\n    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "live = build()\nnumber = 3\n"
        "class Zoo:\n    build = staticmethod(build)\n"
    )
    monkeypatch.chdir(tmp_path)
    for attribute in ("build", "live", "Zoo.build"):
        model = load_model_factory(f"my_models_for_a_test:{attribute}")()
        assert isinstance(model, keras.Sequential)
    for spec, message in [
        ("my_models_for_a_test:missing", "must exist"),
        ("my_models_for_a_test:number", "of type int"),
        ("no_such_module_for_a_test:build", "importable"),
    ]:
        with pytest.raises(UnsupportedModelError, match=message):
            load_model_factory(spec)


def test_a_model_loaded_for_a_sequence_length_is_planned_for_it() -> None:
    factory = load_model_factory("hub:gpt2_small?layers=1", sequence_length=16)
    assert trace_model(factory, batch_size=2).batch[0]["token_ids"].shape == (2, 16)
    assert trace_model(factory, batch_size=2, sequence_length=8).batch[0]["token_ids"].shape == (2, 8)

"""Baselines: what each fixes, that none is predicted to beat the optimum, and that they run."""

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp import baselines
from autoshard_ilp.graph.step import trace_step
from autoshard_ilp.planning import plan_step
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import check_request
from autoshard_ilp.search import recipes
from dear_compute import dear_compute

MESH = {"data": 2, "model": 4}
BOTH = ("data", "model")


def mlp(optimizer="adam"):
    model = keras.Sequential(
        [
            keras.Input((64,), name="features"),
            keras.layers.Dense(128, activation="relu", name="up"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(32, name="down"),
        ],
        name="mlp",
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


def plan(name, mesh=MESH, builder=mlp, **options):
    options = {"hardware": dear_compute(), "batch_size": 16, **options}
    return autoshard.baseline(builder, mesh, name, **options)


def spec(found, *parts):
    """The one spec whose path holds all parts."""
    matching = {path: s for path, s in found.specs.items() if all(p in path for p in parts)}
    assert len(matching) == 1, (parts, list(found.specs))
    return next(iter(matching.values()))


def weight_leaves(found):
    return [x for x in found.arguments if x.role in ("parameter", "non_trainable", "optimizer")]


def axes_used(found, leaf):
    return {axis for axis, dim in zip(found.mesh.axis_names, leaf.layout, strict=True) if dim >= 0}


# -- the pieces


def test_widest_takes_the_largest_dimension_that_divides():
    assert recipes.widest((6, 40, 16), (0, 1), (2, 4), range(3)) == {(1, 1)}


def test_widest_allows_every_equally_large_dimension():
    assert recipes.widest((16, 3, 16), (0, 1), (2, 4), range(3)) == {(0, 0), (2, 2)}


def test_widest_uses_fewer_axes_where_all_do_not_divide():
    assert recipes.widest((12, 7), (0, 1), (2, 4), range(2)) == {(-1, 0)}
    assert recipes.widest((6, 7), (0, 1), (2, 4), range(2)) == {(0, -1)}


def test_widest_keeps_whole_what_does_not_divide():
    assert recipes.widest((7, 9), (0, 1), (2, 4), range(2)) == {(-1, -1)}
    assert recipes.widest((), (0, 1), (2, 4), range(0)) == {(-1, -1)}


def test_widest_ignores_axes_of_one_device():
    assert recipes.widest((8,), (0, 1), (1, 8), range(1)) == {(-1, 0)}


def test_small_means_vectors_and_tiny_matrices():
    assert recipes.is_small(()) and recipes.is_small((4096,)) and recipes.is_small((1, 4096))
    assert recipes.is_small((31, 32)) and not recipes.is_small((32, 32))
    assert not recipes.is_small((1 << 16,))


# -- what each baseline fixes


def test_data_parallel_keeps_state_whole_and_shards_the_batch_over_all_axes():
    found = plan("data_parallel")
    assert all(s == P() for path, s in found.specs.items() if not path.startswith(("inputs/", "targets/")))
    assert spec(found, "inputs/") == spec(found, "targets/") == P(BOTH)
    assert "data_parallel" in found.notes[0]


def test_the_batch_uses_as_many_axes_as_divide():
    assert spec(plan("data_parallel", {"a": 3, "b": 4}), "inputs/") == P("b")


def test_fsdp_shards_weights_and_slots_on_their_largest_dimension():
    found = plan("fsdp")
    assert spec(found, "mlp/up/kernel") == P(None, BOTH)
    assert spec(found, "mlp/down/kernel") == P(BOTH)
    assert spec(found, "up_kernel_velocity") == P(None, BOTH)
    assert spec(found, "mlp/up/bias") == P()
    assert spec(found, "inputs/") == P(BOTH)


def test_zero1_shards_only_the_slots():
    found = plan("zero1")
    assert spec(found, "mlp/up/kernel") == P()
    assert spec(found, "up_kernel_momentum") == P(None, BOTH)


def test_megatron_uses_only_the_last_axis_for_weights():
    found = plan("megatron")
    assert set().union(*(axes_used(found, x) for x in weight_leaves(found))) == {"model"}
    assert spec(found, "inputs/") == P("data")


def test_megatron_lays_slots_like_their_weights():
    found = plan("megatron")
    for layer in ("up", "down"):
        weight = spec(found, f"mlp/{layer}/kernel")
        assert weight != P()
        assert spec(found, f"{layer}_kernel_momentum") == spec(found, f"{layer}_kernel_velocity") == weight


def test_fsdp_megatron_uses_the_other_axes_for_every_large_weight():
    found = plan("fsdp+megatron", {"a": 2, "b": 2, "model": 2})
    large = [x for x in weight_leaves(found) if not recipes.is_small(x.shape)]
    assert len(large) == 6  # two kernels, two slots each
    assert all({"a", "b"} <= axes_used(found, x) for x in large)
    assert any("model" in axes_used(found, x) for x in large)
    assert spec(found, "inputs/") == P(("a", "b"))


def test_one_axis_is_the_model_axis():
    found = plan("megatron", {"x": 8})
    assert spec(found, "inputs/") == P()
    assert any(axes_used(found, x) for x in weight_leaves(found))


def test_factored_slots_are_sharded_by_their_own_shape():
    found = plan("zero1", builder=lambda: mlp(keras.optimizers.Adafactor(1e-2)))
    assert found.status == "optimal"
    assert all(axes_used(found, x) == set() for x in found.arguments if x.role == "parameter")


def test_predict_mode():
    found = plan("fsdp", mode="predict")
    assert found.mode == "predict" and spec(found, "mlp/up/kernel") == P(None, BOTH)
    assert not any(x.role == "optimizer" for x in found.arguments)


def test_pins_take_precedence():
    found = plan("data_parallel", pins={"mlp/up/kernel$": (None, "model")})
    assert spec(found, "mlp/up/kernel") == P(None, "model")
    assert spec(found, "mlp/down/kernel") == P()


# -- against the optimum


@pytest.mark.parametrize(
    ("mesh", "hardware"),
    [({"x": 8}, "dear"), (MESH, "h100"), (MESH, "dear"), ({"a": 2, "b": 2, "c": 2}, "dear")],
    ids=str,
)
def test_no_baseline_is_predicted_to_beat_the_optimum(mesh, hardware):
    request = check_request(mesh, None, dear_compute() if hardware == "dear" else hardware, None, "step_time", None)
    step, traced = trace_step(mlp, request.mesh, batch_size=16)

    def cost(found):
        assert found.status == "optimal"
        return found.cost.total_s

    best = cost(plan_step(step, traced, request, Progress(False), mode="train", batch_size=16))
    others = {
        name: cost(baselines.plan_baseline(traced, request, name, Progress(False)))
        for name in baselines.BASELINES
        if name != "keras_hub"
    }
    assert best > 0
    assert all(seconds >= best * (1 - 1e-9) for seconds in others.values()), (best, others)
    assert max(others.values()) > best  # they do differ from it


def test_infeasible_names_the_baseline_and_its_smallest_budget():
    fits = plan("fsdp", mode="predict").memory.peak_bytes
    with pytest.raises(autoshard.InfeasibleError, match="Baseline 'data_parallel'") as caught:
        plan("data_parallel", mode="predict", memory_budget=fits)
    minimum = caught.value.minimum_budget
    assert minimum > fits
    assert plan("data_parallel", mode="predict", memory_budget=minimum).memory.peak_bytes <= minimum


# -- KerasHub


def llama(heads=4, key_value_heads=4):
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=128,
        num_layers=1,
        num_query_heads=heads,
        num_key_value_heads=key_value_heads,
        hidden_dim=32,
        intermediate_dim=64,
    )
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_keras_hub_follows_the_shipped_map():
    found = plan("keras_hub", builder=llama, sequence_length=8)
    assert spec(found, "embeddings_momentum", "token_embedding_embeddings") == P("model", "data")
    assert found.specs["token_embedding/embeddings"] == P("model", "data")
    assert spec(found, "feedforward_gate_dense/kernel") == P("data", "model")
    assert spec(found, "attention_output/kernel") == P("model", None, "data")
    assert spec(found, "transformer_layer_0/feedforward_layernorm/scale") == P()
    assert spec(found, "targets/") == P("data")
    assert not any("dropped" in note for note in found.notes)


def test_keras_hub_on_three_axes_takes_all_but_the_last_as_batch():
    found = plan("keras_hub", {"a": 2, "b": 2, "c": 2}, llama, sequence_length=8, mode="predict")
    assert found.specs["token_embedding/embeddings"] == P("c", ("a", "b"))


def test_keras_hub_on_one_axis():
    found = plan("keras_hub", {"x": 8}, llama, sequence_length=8, mode="predict")
    assert found.specs["token_embedding/embeddings"] == P("x")


def test_keras_hub_drops_entries_that_do_not_divide_and_says_so():
    narrow = lambda: llama(heads=2, key_value_heads=2)  # noqa: E731
    found = plan("keras_hub", {"data": 2, "model": 3}, narrow, sequence_length=8, mode="predict")
    assert found.specs["token_embedding/embeddings"] == P()
    dropped = next(note for note in found.notes if "dropped" in note)
    assert "token_embedding/embeddings of shape (128, 32)" in dropped


def test_keras_hub_needs_a_backbone_with_a_map():
    with pytest.raises(autoshard.UnsupportedModelError, match=r"GemmaBackbone.*LlamaBackbone.*Received: Sequential"):
        plan("keras_hub")
    backbone = keras_hub.models.GPT2Backbone(32, 1, 2, 8, 16)
    with pytest.raises(autoshard.UnsupportedModelError, match="Received: GPT2Backbone"):
        plan("keras_hub", builder=backbone, mode="predict", sequence_length=8)


# -- errors, running


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(autoshard.InputShapeError, match=r"data_parallel, fsdp, zero1.*Received: 'ddp'"):
        plan("ddp")


def test_fsdp_trains_like_one_device():
    def build():
        keras.utils.set_random_seed(3)
        return mlp()

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 64)).astype("float32"), rng.normal(size=(16, 32)).astype("float32")
    reference = float(build().train_on_batch(x, y))
    keras.utils.set_random_seed(3)
    found = plan("fsdp", builder=build())
    state = found.init_state()
    assert len(state[0][0].sharding.device_set) == 8 and not state[0][0].sharding.is_fully_replicated
    _, logs = found.jit()(state, jax.device_put((x, y), found.in_shardings[1]))
    np.testing.assert_allclose(float(logs["loss"]), reference, rtol=1e-5)

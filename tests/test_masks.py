"""What a dropout's mask meets is computed before it, where masks are drawn again for the backward pass."""

from __future__ import annotations

import keras
import pytest
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp import Plan, apply
from autoshard_ilp.costs.masks import met_by_random_bits
from autoshard_ilp.verify import compile_only_mesh
from compiled import needs_tpu


def attention() -> keras.Model:
    """Two blocks of attention, whose softmaxes meet masks, and one dropout behind each."""
    x = inputs = keras.Input((64, 128))
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32, dropout=0.1, flash_attention=False)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(attended)]))
    model = keras.Model(inputs, layers.Dense(8)(x))
    model.compile(optimizer="sgd", loss="mse")
    return model


def planned(remat: str) -> Plan:
    solver = autoshard.SolverOptions(relative_gap=0.2)
    options = {"hardware": "tpu-v5e", "batch_size": 64, "progress": False, "solver": solver}
    return autoshard.optimize(attention, {"data": 2, "model": 4}, remat=remat, **options)


@pytest.fixture(scope="module")
def again() -> Plan:
    return planned("selective")


def test_softmaxes_of_both_passes_stand_before_masks_that_both_draw(again: Plan) -> None:
    graph = again.executable.graph
    met = met_by_random_bits(graph)
    shapes = [graph.tensors[t].shape for t in met]
    assert shapes.count((64, 4, 64, 64)) >= 4  # two softmaxes and their copies; gradients of what was dropped, too
    phases = {graph.ops[graph.tensors[t].producer].phase for t in met}
    assert phases == {"forward", "backward"}
    for t in met:
        readers = {graph.ops[op].primitive for op, _ in graph.tensors[t].consumers}
        assert "select_n" in readers
        assert graph.ops[graph.tensors[t].producer].primitive != "broadcast_in_dim", "a zero would be written"


def test_masks_that_are_drawn_once_may_be_fused_with_anything() -> None:
    assert not met_by_random_bits(planned("never").executable.graph)


@needs_tpu
@pytest.mark.tpu
def test_barriers_are_for_tpus_alone(again: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def barriers(target: str) -> int:
        mesh = compile_only_mesh(target, ("data", "model"), (2, 4))
        return again.jit(mesh).lower(*again.abstract_args(mesh)).as_text().count("stablehlo.optimization_barrier")

    with_them = {target: barriers(target) for target in ("tpu-v5e:2x4", "cpu")}
    monkeypatch.setattr(apply.planned, "met_by_random_bits", lambda graph: frozenset())
    assert with_them["tpu-v5e:2x4"] >= barriers("tpu-v5e:2x4") + 4, "one per softmax, in both passes"
    assert with_them["cpu"] == barriers("cpu")

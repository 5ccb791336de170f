"""The fixed time of a collective that XLA:GPU combines with others is shared among them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.gpu.combining import Shares, shares
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.flatten import build_graph
from compiled import needs_cuda

LAYERS = 6


def graph_of(width: int) -> Graph:
    """The step as ``optimize`` would have it: phases are those of a training step."""
    import keras

    from autoshard_ilp.graph.step import trace_step
    from autoshard_ilp.mesh import as_mesh

    dense = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return trace_step(model, as_mesh({"data": 8}), batch_size=64)[0].graph


@pytest.mark.parametrize(("width", "share"), [(128, 1 / LAYERS), (4096, 1.0)])
def test_members_of_a_group_share_its_fixed_time(width, share):
    """64 kB each: one group. 64 MB each are beyond the threshold: every one of them pays for itself."""
    graph = graph_of(width)
    found = shares(graph, analyse(graph, "gpu"), "gpu")
    weights = [op.outputs[0] for op in graph.ops if op.primitive == "argument" and "kernel" in op.path]
    forward, backward, new = ([], [], [])
    for op in graph.ops:
        for i, t in enumerate(op.inputs):
            if t in weights and op.phase in ("forward", "backward"):
                (forward if op.phase == "forward" else backward).append(found.of_gathers(graph, [(op.id, i)]))
            if op.primitive == "result" and graph.tensors[t].shape == (width, width):
                new.append(found.of_gathers(graph, [(op.id, i)]))
    assert len(forward) >= LAYERS and set(forward) == {share}
    assert set(backward) <= {1.0}, "what is gathered again waits for its turn"
    assert set(new) == {share}
    products = [op.id for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    gradients = [found.of_reductions(graph, [o]) for o in products]
    assert gradients.count(share) >= LAYERS and (share == 1.0 or gradients.count(1.0) == LAYERS - 1)
    assert shares(graph, analyse(graph, "tpu"), "tpu") == Shares()


def test_gradients_of_biases_are_members_of_their_group():
    """They end in a sum over dimensions of size 1, which is a view: all of them share one fixed time."""
    import keras

    from autoshard_ilp.graph.step import trace_step
    from autoshard_ilp.mesh import as_mesh

    dense = [keras.layers.Dense(128, "tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((16, 128)), *dense])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    graph = trace_step(model, as_mesh({"data": 8}), batch_size=64)[0].graph
    found = shares(graph, analyse(graph, "gpu"), "gpu")
    sums = [
        op.id
        for op in graph.ops
        if op.primitive == "reduce_sum" and op.phase == "backward" and graph.tensors[op.inputs[0]].shape[:2] == (64, 16)
    ]
    assert len(sums) >= LAYERS
    assert {found.of_reductions(graph, [o]) for o in sums} == {1 / (2 * LAYERS)}


def test_sums_that_do_not_need_one_another_share_a_fixed_time():
    def moments(x: Any) -> Any:
        mean, square = jnp.sum(x, 0), jnp.sum(x * x, 0)
        return jnp.sum((x - mean) * square, 0), mean

    graph = build_graph(jax.make_jaxpr(moments)(np.ones((8, 4))), argument_paths=["x"], result_paths=["y", "mean"])
    found = shares(graph, analyse(graph, "gpu"), "gpu")
    sums = [op.id for op in graph.ops if op.primitive == "reduce_sum"]
    assert [found.of_reductions(graph, [o]) for o in sums] == [0.5, 0.5, 1.0]


def test_layers_that_decide_together_pay_their_mean():
    jaxpr = jax.make_jaxpr(lambda a, b: (a + 1.0, b + 2.0))(np.ones(2), np.ones(2))
    graph = build_graph(jaxpr, argument_paths=["a", "b"], result_paths=["c", "d"])
    first, second = (op.id for op in graph.ops if op.primitive == "add")
    found = Shares(reduced={graph.ops[first].outputs[0]: 0.5})
    assert found.of_reductions(graph, [first, second]) == 0.75


def fully_sharded(width: int, layers: int) -> Any:
    import keras

    def build() -> Any:
        dense = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
        model = keras.Sequential([keras.Input((width,)), *dense])
        model.compile(optimizer="adam", loss="mse")
        return model

    return autoshard.baseline(build, {"data": 8}, "fsdp", hardware="h100", batch_size=512, progress=False)


def test_the_costs_of_a_plan_are_those_of_its_collectives():
    plan = fully_sharded(256, LAYERS)
    listed = sum(c.seconds * c.count for c in plan.collectives)
    assert plan.cost.communication_s == pytest.approx(listed, rel=1e-6)
    assert plan.cost.total_s == pytest.approx(plan.trail.program.cost(plan.trail.solution.choices), rel=1e-9)


@pytest.mark.slow
@needs_cuda
def test_many_small_gathers_take_what_the_compiler_makes_of_them():
    """Each paying its fixed time, they would take 1.5 ms; combined they take a quarter of that."""
    plan = fully_sharded(256, 24)
    found = plan.verify("h100:8")
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)
    assert found.predicted_communication_seconds == pytest.approx(found.compiled_communication_seconds, rel=0.5)

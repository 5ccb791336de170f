"""Weight gradients are computed when the backward pass reaches them: less memory on GPU, the same values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard_ilp import order
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.graph import Graph, build_graph, insert_hubs
from autoshard_ilp.order import order_of
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda

ROWS, WIDTH, LAYERS = 16384, 512, 5


def step(weights: Any, slots: Any, x: Any) -> Any:
    """One step of momentum of an MLP without residuals: each layer's cotangent replaces the one before."""

    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jax.nn.relu(y @ w)
        return jnp.sum(y**2)

    gradients = jax.grad(loss)(weights)
    slots = [0.9 * s + g for s, g in zip(slots, gradients, strict=True)]
    return [w - 1e-6 * s for w, s in zip(weights, slots, strict=True)], slots


def shapes(rows: int = ROWS, width: int = WIDTH) -> Any:
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * LAYERS
    return weights, weights, jax.ShapeDtypeStruct((rows, width), "float32")


def graph_of(rows: int = ROWS, width: int = WIDTH) -> Graph:
    jaxpr = jax.make_jaxpr(step)(*shapes(rows, width))
    paths = [f"a{i}" for i in range(2 * LAYERS + 1)]
    return insert_hubs(build_graph(jaxpr, argument_paths=paths, result_paths=[f"r{i}" for i in range(2 * LAYERS)]))


def planned(graph: Graph, mesh: Mesh, rows: int) -> Any:
    """The step, its batch sharded over the mesh, gradients reduced or scattered where they are computed."""
    layouts = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            layouts[op.id, j] = (0,) if graph.tensors[t].shape[:1] == (rows,) else (-1,)
    run = planned_function(graph, Decisions(results=layouts), mesh, ("data",))
    whole, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(run, in_shardings=(*[whole] * (2 * LAYERS), by_row))


def cpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


def test_every_gradient_but_the_last_is_waited_for_once() -> None:
    graph = graph_of()
    found = order_of(graph, "gpu")
    products = [op for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    weights = [op.id for op in products if graph.tensors[op.outputs[0]].shape == (WIDTH, WIDTH)]
    waited = [g for gradients in found.waits.values() for g in gradients]
    assert sorted(waited) == sorted(weights)[:-1] == sorted(found.gradients)
    for (op_id, _), gradients in found.waits.items():
        assert max(gradients) < op_id and graph.ops[op_id].phase == "backward"


def test_other_compilers_are_left_alone() -> None:
    assert not order_of(graph_of(), "tpu").waits and not order_of(graph_of(), "cpu").waits


@needs_cuda
def test_activations_are_freed_as_the_backward_pass_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, graph = compile_only_mesh(parse_target("h100:8"), ("data",), (8,)), graph_of()
    held = {}
    for platforms in (frozenset(), frozenset({"gpu"})):
        monkeypatch.setattr(order, "PLATFORMS", platforms)
        lowered = planned(graph, mesh, ROWS).lower(*jax.tree.leaves(shapes()))
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        held[bool(platforms)] = compiled.memory_analysis().temp_size_in_bytes
    activation = ROWS // 8 * WIDTH * 4
    print(held, activation)
    assert held[True] <= held[False] - activation


def test_waiting_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 1024, 256
    graph, mesh = graph_of(rows, width), cpu_mesh()
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in jax.tree.leaves(shapes(rows, width))]
    found = []
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(order, "PLATFORMS", platforms)
        jitted = planned(graph, mesh, rows)
        found.append((jitted(*args), jitted.lower(*args).as_text()))
    (plain, text), (waiting, text_waiting) = found
    assert text_waiting.count("stablehlo.select") > text.count("stablehlo.select")
    for a, b in zip(plain, waiting, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)

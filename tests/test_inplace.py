"""New values of variables take the place of the old ones: updates wait for who reads the old value last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard_ilp import inplace
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.graph import Graph, build_graph, insert_hubs
from autoshard_ilp.inplace import Wait, waiting_updates

ROWS, WIDTH, CLASSES = 1024, 512, 2048


def step(first: Any, last: Any, x: Any) -> Any:
    """One step of SGD of two layers, the second sharded over its columns."""

    def loss(first: Any, last: Any) -> Any:
        return jnp.sum(jax.nn.logsumexp(jax.nn.relu(x @ first) @ last, axis=-1))

    gradients = jax.grad(loss, (0, 1))(first, last)
    return first - 1e-3 * gradients[0], last - 1e-3 * gradients[1]


SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((WIDTH, WIDTH), (WIDTH, CLASSES), (ROWS, WIDTH))]


def graph_of() -> Graph:
    jaxpr = jax.make_jaxpr(step)(*SHAPES)
    graph = build_graph(jaxpr, argument_paths=["first", "last", "x"], result_paths=["r0", "r1"], aliases={0: 0, 1: 1})
    return insert_hubs(graph)


def test_only_a_weight_that_a_cotangent_needs_is_waited_for() -> None:
    """The first layer's weight is not read by the backward pass."""
    graph = graph_of()
    products = [op for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    gradient = next(op for op in products if graph.tensors[op.outputs[0]].shape in ((WIDTH, CLASSES), (CLASSES, WIDTH)))
    cotangent = next(op for op in products if graph.tensors[op.outputs[0]].shape == (ROWS, WIDTH))
    found = waiting_updates(graph, "tpu")
    assert set(found.values()) == {Wait(cotangent.id, gradient.id)}
    assert all(graph.ops[op].phase == "update" for op, _ in found)
    assert not waiting_updates(graph, "gpu")


@pytest.mark.parametrize(("by_rows", "waits"), [(False, True), (True, False)])
def test_waiting_changes_no_value(monkeypatch: pytest.MonkeyPatch, by_rows: bool, waits: bool) -> None:
    """Where rows are sharded, gradients are partial sums, whose update does not wait."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    graph = graph_of()
    layouts = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            shape = graph.tensors[t].shape
            sharded = ROWS if by_rows else CLASSES
            layouts[op.id, j] = (shape.index(sharded),) if sharded in shape else (-1,)
    decisions = Decisions(results=layouts)
    specs = [layouts[a, 0][0] for a in graph.arguments]
    shardings = [NamedSharding(mesh, PartitionSpec(*(["data" if d == at else None for d in range(2)]))) for at in specs]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in SHAPES]
    found = []
    for platforms in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(inplace, "PLATFORMS", platforms)
        jitted = jax.jit(planned_function(graph, decisions, mesh, ("data",)), in_shardings=tuple(shardings))
        found.append((jitted(*args), jitted.lower(*args).as_text().count("stablehlo.select")))
    (plain, selects), (waiting, more) = found
    assert (more > selects) == waits
    for a, b in zip(plain, waiting, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)

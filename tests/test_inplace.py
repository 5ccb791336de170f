"""New values of variables take the place of the old ones: updates wait for who reads the old value last."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce import inplace
from autoshard_ilp.enforce.inplace import Wait, waiting_updates
from two_layers import CLASSES, ROWS, WIDTH, graph_of, without_and_with


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
    run = lambda: jax.jit(planned_function(graph, decisions, mesh, ("data",)), in_shardings=tuple(shardings))  # noqa: E731
    plain, waiting = without_and_with(monkeypatch, [(inplace, "PLATFORMS")], run)
    assert (waiting.count("stablehlo.select") > plain.count("stablehlo.select")) == waits

"""Gradients of biases are summed up over what is written, not over a part that XLA:GPU would compute anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce import uncut
from autoshard_ilp.enforce.order import sums_put_off
from autoshard_ilp.enforce.uncut import sums_of_the_whole
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph

ROWS, WIDTH = 4096, 512
AXES = ("data", "model")
SIZES = (2, 4)


def step(w: Any, b: Any, x: Any) -> Any:
    """New weights of a layer that is applied twice, and the bias of the second time."""

    def loss(w: Any, b: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w + b) ** 2)

    of_w, of_b = jax.grad(loss, (0, 1))(w, b)
    return w - 1e-4 * of_w, b - 1e-4 * of_b


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH))
    return [jnp.asarray(rng.normal(size=s, scale=0.05), jnp.float32) for s in shapes]


def graph_of() -> Graph:
    paths = ["w", "b", "x"]
    return insert_hubs(build_graph(jax.make_jaxpr(step)(*arguments()), argument_paths=paths, result_paths=paths[:2]))


def layouts(graph: Graph, cut: int) -> tuple[Any, Any]:
    """Everything whole, but the sum over the cotangent, of which ``model`` cuts a dimension."""
    operands = {(o.id, i): (-1, -1) for o in graph.ops for i, _ in enumerate(o.inputs)}
    results = {(o.id, j): (-1, -1) for o in graph.ops for j, _ in enumerate(o.outputs)}
    (total,) = sums_put_off(graph)
    operands[total.id, 0] = (-1, cut)
    results[total.id, 0] = (-1, 0 if cut == 1 else -2)
    return operands, results


def test_a_sum_over_a_part_of_the_columns_is_one_over_all_whose_result_is_cut() -> None:
    graph = graph_of()
    (total,) = sums_put_off(graph)
    before = layouts(graph, 1)
    operands, results = sums_of_the_whole(graph, *before, SIZES, "gpu")
    assert operands[total.id, 0] == (-1, -1) and results[total.id, 0] == (-1, -1)
    assert {k for k in operands if operands[k] != before[0][k]} == {(total.id, 0)}
    assert sums_of_the_whole(graph, *before, SIZES, "tpu") == before
    rows = layouts(graph, 0)
    assert sums_of_the_whole(graph, *rows, SIZES, "gpu") == rows, "its parts are to be added up"


def test_the_values_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, args = graph_of(), arguments()
    mesh = jax.make_mesh(SIZES, AXES, devices=jax.devices("cpu")[:8])
    found = []
    for platforms in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr(uncut, "PLATFORMS", platforms)
        run = jax.jit(planned_function(graph, Decisions(*layouts(graph, 1)), mesh, AXES))
        found.append((run(*args), run.lower(*args).as_text()))
    assert found[0][1] != found[1][1]
    for a, b, exact in zip(found[0][0], found[1][0], step(*args), strict=True):
        np.testing.assert_allclose(a, exact, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(b, exact, rtol=2e-5, atol=1e-6)

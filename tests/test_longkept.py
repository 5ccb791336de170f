"""Exponentials and logistics of what is kept anyway have no buffers of their own on GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph

ROWS, WIDTH = 4096, 512


def graph_of(function: Any) -> Graph:
    """The step of one product, ``function``, and another product."""

    def step(a: Any, b: Any, x: Any) -> Any:
        of_a, of_b = jax.grad(lambda a, b: jnp.sum((function(x @ a) @ b) ** 2), (0, 1))(a, b)
        return a - of_a, b - of_b

    w, x = (jax.ShapeDtypeStruct((n, WIDTH), "float32") for n in (WIDTH, ROWS))
    return insert_hubs(
        build_graph(jax.make_jaxpr(step)(w, w, x), argument_paths=["a", "b", "x"], result_paths=["a", "b"])
    )


def results_of(graph: Graph, primitive: str) -> list[int]:
    found = [op.outputs[0] for op in graph.ops if op.primitive == primitive and op.phase == "forward"]
    assert found
    return [t for t in found if graph.tensors[t].shape == (ROWS, WIDTH)]


@pytest.mark.parametrize(("family", "anew", "kept"), [("gpu", True, False), ("gpu", False, True), ("cpu", True, True)])
def test_a_logistic_of_what_the_backward_pass_needs_is_computed_again(family: str, anew: bool, kept: bool) -> None:
    graph = graph_of(jax.nn.silu)
    assert analyse(graph, family, anew).stored[results_of(graph, "logistic")].any() == kept


def test_an_error_function_is_kept() -> None:
    graph = graph_of(lambda x: jax.nn.gelu(x, approximate=False))
    assert analyse(graph, "gpu").stored[results_of(graph, "erfc")].all()


def test_logits_are_not_held_beside_their_exponentials() -> None:
    def step(w: Any, x: Any, labels: Any) -> Any:
        def loss(w: Any) -> Any:
            logits = x @ w
            total = jnp.sum(jnp.log(jnp.sum(jnp.exp(logits), 1)))  # read once more behind the exponentials
            return total - jnp.sum(jnp.where(labels[:, None] == jnp.arange(WIDTH), logits, 0.0))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    w, x = (jax.ShapeDtypeStruct((n, WIDTH), "float32") for n in (WIDTH, ROWS))
    jaxpr = jax.make_jaxpr(step)(w, x, jax.ShapeDtypeStruct((ROWS,), "int32"))
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["w", "x", "labels"], result_paths=["w", "loss"]))
    buffers = analyse(graph, "gpu")
    (logits,) = results_of(graph, "dot_general")
    held = [t for t in results_of(graph, "exp") if buffers.stored[t]]
    assert held and all(buffers.start[t] >= buffers.end[logits] for t in held)
    assert buffers.end[logits] < buffers.horizon

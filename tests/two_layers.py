"""One step of SGD of two layers, the second of which may be sharded over its columns; and who waits for what in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph

ROWS, WIDTH, CLASSES = 1024, 512, 2048


def step(first: Any, last: Any, x: Any, *, clip: bool = False) -> Any:
    """Args:
    clip: whether gradients are divided by their common norm.
    """

    def loss(first: Any, last: Any) -> Any:
        return jnp.sum(jax.nn.logsumexp(jax.nn.relu(x @ first) @ last, axis=-1))

    gradients = jax.grad(loss, (0, 1))(first, last)
    rate = 1e-3 / jnp.sqrt(sum(jnp.sum(g**2) for g in gradients)) if clip else 1e-3
    return first - rate * gradients[0], last - rate * gradients[1]


def shapes(classes: int = CLASSES) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, "float32") for s in ((WIDTH, WIDTH), (WIDTH, classes), (ROWS, WIDTH))]


def graph_of(classes: int = CLASSES, *, clip: bool = False) -> Graph:
    jaxpr = jax.make_jaxpr(lambda *args: step(*args, clip=clip))(*shapes(classes))
    graph = build_graph(jaxpr, argument_paths=["first", "last", "x"], result_paths=["r0", "r1"], aliases={0: 0, 1: 1})
    return insert_hubs(graph)


def without_and_with(
    monkeypatch: pytest.MonkeyPatch, platforms: Iterable[tuple[Any, str]], jitted: Any, classes: int = CLASSES
) -> tuple[str, str]:
    """Lowered texts of ``jitted()`` where no platform waits and where a CPU does; their values are equal.

    Args:
        platforms: (module, name of its set of platforms).
        jitted: makes the step anew.
    """
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape, scale=0.06), s.dtype) for s in shapes(classes)]
    texts, values = [], []
    for waiting in (frozenset(), frozenset({"cpu"})):
        for module, name in platforms:
            monkeypatch.setattr(module, name, waiting)
        run = jitted()
        values.append(run(*args))
        texts.append(run.lower(*args).as_text())
    for a, b in zip(*values, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    return texts[0], texts[1]

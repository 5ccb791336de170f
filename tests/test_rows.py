"""Rows that XLA:TPU gathers and scatters: which of a step lie in rows, what they take, and what is compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.tpu.rows import Rows, copied_rows, row_padding, rows_of
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.strategies import Strategy
from compiled import mesh_of, needs_tpu

NODES, EDGES = 2**15, 2**18
Shapes = list[jax.ShapeDtypeStruct]


@pytest.mark.parametrize(
    ("local", "dims", "expected"),
    [
        ((EDGES, 64), 1, 2.0),  # seen: f32[262144,64]{1,0:T(8,128)} of 134 MB
        ((EDGES, 100), 1, 1.28),
        ((EDGES, 128), 1, 1.0),
        ((EDGES, 192), 1, 256 / 192),
        ((EDGES, 2), 1, 64.0),  # seen: f32[2097152,2]{1,0:T(8,128)} of 1074 MB
        ((EDGES, 1), 1, 1.0),  # seen: f32[4194304]{0:T(1024)}
        ((256, 2048, 64), 1, 2.0),  # seen: f32[524288,64]{1,0:T(8,128)}
        ((EDGES, 2, 64), 2, 2.0),  # seen: f32[262144,2,64]{2,1,0:T(2,128)}
        ((EDGES, 1, 64), 2, 2.0),
        ((0, 64), 1, 1.0),
    ],
)
def test_rows_are_padded_to_whole_tiles(local: tuple[int, ...], dims: int, expected: float) -> None:
    assert row_padding(local, dims) == pytest.approx(expected)


def messages(x: jax.Array, weights: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """Sums of weighted rows, as layers of graph networks have them."""
    return jax.ops.segment_sum(x[start] * weights[:, None], end, num_segments=NODES)


def embedded(table: jax.Array, kernel: jax.Array, places: jax.Array) -> jax.Array:
    rows = table[places]
    return (rows @ kernel).sum() + (jnp.tanh(rows) @ kernel).max()


def embedded_once(table: jax.Array, kernel: jax.Array, places: jax.Array) -> jax.Array:
    return (jnp.tanh(table[places]) @ kernel).sum()


def made_by_a_product(x: jax.Array, kernel: jax.Array, end: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x @ kernel, end, num_segments=NODES)


def computed_of_a_product(x: jax.Array, kernel: jax.Array, end: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(jnp.maximum(x @ kernel, 0), end, num_segments=NODES)


def arrays(width: int, *more: tuple[tuple[int, ...], str]) -> Shapes:
    return [jax.ShapeDtypeStruct((NODES, width), "float32"), *(jax.ShapeDtypeStruct(*m) for m in more)]


PLACES = ((EDGES,), "int32")
OF_EDGES = [jax.ShapeDtypeStruct((EDGES, 256), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")]
ENDS = jax.ShapeDtypeStruct(*PLACES)
CASES: dict[str, tuple[Callable[..., Any], Shapes, set[str], set[str]]] = {
    # function, arguments, what is kept in rows of 64, what is copied to or from rows
    "messages": (messages, arrays(64, ((EDGES,), "float32"), PLACES, PLACES), {"gather", "mul"}, set()),
    "embedding": (embedded, arrays(64, ((64, 32), "float32"), ((128, 2048), "int32")), set(), {"gather"}),
    "embedding for one product": (
        embedded_once,
        arrays(64, ((64, 32), "float32"), ((128, 2048), "int32")),
        {"gather", "tanh"},
        set(),
    ),
    "product": (made_by_a_product, [*OF_EDGES, ENDS], {"dot_general"}, set()),
    "computed": (computed_of_a_product, [*OF_EDGES, ENDS], set(), {"scatter-add"}),
}


def graph_of(function: Callable[..., Any], args: Shapes) -> Graph:
    paths = [f"a{i}" for i in range(len(args))]
    return build_graph(jax.make_jaxpr(function)(*args), argument_paths=paths, result_paths=["sum"])


def found_in(graph: Graph, rows: Rows) -> tuple[set[str], set[str]]:
    made = {graph.tensors[t].producer for t in rows.kept}
    return {graph.ops[p].primitive for p in made if p is not None}, {graph.ops[m].primitive for m in rows.copied}


@pytest.mark.parametrize("case", CASES)
def test_what_lies_in_rows(case: str) -> None:
    function, args, kept, copied = CASES[case]
    graph = graph_of(function, args)
    found = found_in(graph, rows_of(graph))
    assert kept <= found[0] and ("dot_general" in kept or "dot_general" not in found[0])
    assert found[1] == copied


def test_rows_are_beside_their_copy_where_they_pad_more() -> None:
    graph = graph_of(*CASES["embedding"][:2])
    ((number, dims),) = rows_of(graph).copied.items()
    op = graph.ops[number]
    for layout, mib in (((-1,), 128.0), ((0,), 16.0), ((2,), 128.0)):  # sixteen columns on each of four devices
        strategy = Strategy(((-1,), (-1,)), (layout,), layout, ())
        size = 4 if layout == (2,) else 8
        assert copied_rows(graph, op, dims, [strategy], (size,), 4.0).tolist() == [mib * 2**20]
    graph = graph_of(embedded, arrays(128, ((128, 32), "float32"), ((128, 2048), "int32")))
    ((number, dims),) = rows_of(graph).copied.items()
    strategy = Strategy(((-1,), (-1,)), ((-1,),), (-1,), ())
    assert copied_rows(graph, graph.ops[number], dims, [strategy], (8,), 4.0).tolist() == [0]


@needs_tpu
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in ("product", "computed") else ()) for c in CASES]
)
def test_rows_as_compiled(case: str) -> None:
    """Arrays of all edges are written in rows where the rule says so, and are copied where it says that."""
    function, args, kept, _ = CASES[case]
    whole = jax.sharding.NamedSharding(mesh_of("tpu-v5e:2x4"), jax.sharding.PartitionSpec())
    text = jax.jit(function, in_shardings=(whole,) * len(args)).lower(*args).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    large = re.findall(r"= (?:f32|bf16)\[(?:262144|128,2048),64\]\{([\d,]+):\S* (copy|fusion)\(", entry)
    assert large
    if kept:
        assert {order for order, _ in large} == {"1,0"} and ("copy" not in {made for _, made in large})
    else:
        assert "1,0" in {order for order, _ in large}
        assert {order for order, _ in large} & {"0,1", "1,2,0"}
        assert "copy" in {made for _, made in large}


@needs_tpu
@pytest.mark.slow
def test_peak_of_a_graph_network() -> None:
    """2097152 messages of 64 numbers: 1170 MB are compiled, of which 52 were predicted without rows."""
    import keras

    class Sums(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any, edges: Any) -> Any:
            graphs, nodes, width = x.shape
            first = (keras.ops.arange(graphs, dtype="int32") * nodes)[:, None]
            start, end = (keras.ops.reshape(edges[:, :, k] + first, (-1,)) for k in (0, 1))
            sent = keras.ops.take(keras.ops.reshape(x, (-1, width)), start, axis=0)
            return keras.ops.reshape(keras.ops.segment_sum(sent, end, num_segments=graphs * nodes), x.shape)

    def build() -> Any:
        x = inputs = keras.Input((1024, 64), batch_size=32)
        edges = keras.Input((65536, 2), dtype="int32", batch_size=32)
        for _ in range(2):
            x = x + keras.ops.relu(Sums()(keras.layers.Dense(64)(x), edges))
        net = keras.Model([inputs, edges], keras.layers.Dense(8)(x))
        net.compile(optimizer="sgd", loss="mse")
        return net

    mesh = {"data": 2, "model": 4}
    found = autoshard.optimize(build, mesh, hardware="tpu-v5e", progress=False, batch_size=32).verify("tpu-v5e:2x4")
    assert found.compiled_peak_bytes is not None and found.predicted_peak_bytes is not None
    assert 0.9 < found.compiled_peak_bytes / found.predicted_peak_bytes < 1.1

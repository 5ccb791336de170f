"""Look-ups whose partial sums are scattered over some mesh axes and added up over others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard_ilp import apply
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce.lookup import look_up
from autoshard_ilp.graph import insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.rules import rule_for
from autoshard_ilp.verify import parse_collectives
from compiled import mesh_of, needs_cuda, needs_tpu, sharding

NAMES, SIZES = ("a", "b"), (2, 4)
ROWS, COLUMNS, TOKENS = 16, 8, 12


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(SIZES), NAMES)


def graph_of(function: Any, *args: Any) -> tuple[Any, Any]:
    jaxpr = jax.make_jaxpr(function)(*args)
    graph = build_graph(
        jaxpr,
        argument_paths=[f"x{i}" for i in range(len(args))],
        result_paths=[f"y{i}" for i in range(len(jaxpr.out_avals))],
    )
    return graph, next(op for op in graph.ops if op.primitive == "gather")


def gathered(function: Any, args: tuple[Any, ...], layouts: dict[str, tuple[Any, ...]]) -> tuple[Any, str]:
    """The planned function's result, and its jaxpr; layouts of "table", "indices" and "result" of its gather."""
    graph, op = graph_of(function, *args)
    read = {(op.id, 0): layouts["table"], (op.id, 1): layouts["indices"]}
    made = {(graph.ops[graph.tensors[t].producer].id, 0): lay for t, lay in zip(op.inputs, read.values(), strict=True)}
    decisions = Decisions(operands=read, results={**made, (op.id, 0): layouts["result"]})
    planned = planned_function(graph, decisions, mesh(), NAMES)
    return jax.jit(planned)(*args)[0], str(jax.make_jaxpr(planned)(*args))


TABLES = {
    "float": np.linspace(1.0, 2.0, ROWS * COLUMNS).astype("float32").reshape(ROWS, COLUMNS),
    "integer": np.arange(ROWS * COLUMNS, dtype="int32").reshape(ROWS, COLUMNS),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
@pytest.mark.parametrize(
    "result",
    [(-1, 0), (0, -1), (-1, 1), (0, 1), (1, 0)],
    ids=["tokens and sum", "sum and tokens", "columns and sum", "both", "the other way round"],
)
def test_rows_are_found_wherever_they_are(table: Any, mode: str, result: tuple[int, int]) -> None:
    tokens = np.array([0, 3, 15, 7, 8, -1, 16, 99, -17, 5, 4, 2])  # some of them out of bounds
    out, text = gathered(
        lambda t, i: jnp.take(t, i, axis=0, mode=mode),
        (table, tokens),
        {"table": (0, 0), "indices": (-1, -1), "result": result},
    )
    np.testing.assert_array_equal(out, jnp.take(table, tokens, axis=0, mode=mode))
    assert text.count("reduce_scatter") == sum(d >= 0 for d in result), text
    assert text.count("psum") == sum(d < 0 for d in result)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])  # unsigned ones are not found device by device
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_along_another_dimension_than_the_first(mode: str, dtype: str) -> None:
    """XLA returns wrong numbers where it scatters the sum onto what comes before the looked-up dimension."""
    table, at = np.arange(ROWS * COLUMNS, dtype="float32").reshape(COLUMNS, ROWS), np.array([0, 3, 15, 7, 8, 5, 4, 2])
    take = lambda t, i: jnp.take(t, i.astype(dtype), axis=1, mode=mode)  # noqa: E731
    layouts = {"table": (1, -1), "indices": (-1, 0), "result": (0, 1)}
    out, _ = gathered(take, (table, at), layouts)
    np.testing.assert_array_equal(out, table[:, at])


def test_over_a_whole_slice_rows_are_scattered_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:TPU would add up the whole result on every device: two layers of Gemma 3 on v5e 4x4 sent 17 % more."""
    tokens = np.arange(2 * ROWS) % (ROWS + 3) - 2  # some of them out of bounds
    layouts = {"table": (0, 0), "indices": (-1, -1), "result": (0, 0)}
    take = lambda t, i: jnp.take(t, i, axis=0)  # noqa: E731
    _, text = gathered(take, (TABLES["float"], tokens), layouts)
    assert "reduce_scatter" not in text, "left to the partitioner"
    monkeypatch.setattr("autoshard_ilp.enforce.lookup.whole_slice", lambda mesh: (2, 2, 2))
    out, text = gathered(take, (TABLES["float"], tokens), layouts)
    np.testing.assert_array_equal(out, take(jnp.asarray(TABLES["float"]), tokens))
    assert text.count("reduce_scatter") == len(SIZES) and "psum" not in text.replace("psum_scatter", "")


def test_a_fill_value_and_indices_of_few_bits() -> None:
    table, tokens = TABLES["integer"], np.array([0, 1, 2, 250, 15, 3, 14, 200, 4, 5, 6, 7], "uint8")
    take = lambda t, i: t.at[i].get(mode="fill", fill_value=-7)  # noqa: E731
    out, _ = gathered(take, (table, tokens), {"table": (0, 0), "indices": (-1, -1), "result": (-1, 0)})
    np.testing.assert_array_equal(out, take(jnp.asarray(table), tokens))


def test_large_unsigned_indices_are_left_to_the_partitioner() -> None:
    graph, op = graph_of(lambda t, i: t.at[i].get(mode="clip"), TABLES["float"], np.arange(TOKENS))
    layouts = ([(0, 0), (-1, -1)], (-1, 0))
    args = (TABLES["float"], np.arange(TOKENS)[:, None])
    for dtype, written_out in (("int32", True), ("uint32", False)):
        view = replace(graph.view(op), in_dtypes=("float32", dtype))
        assert (look_up(view, rule_for(view), args, layouts, mesh(), NAMES) is not None) == written_out


def test_two_numbers_per_index() -> None:
    """Single elements, with both dimensions of the table sharded."""
    table = TABLES["float"]
    at = np.stack([np.arange(TOKENS) % ROWS, np.arange(TOKENS) % COLUMNS])
    pick = lambda t, i: t.at[i[0], i[1]].get(mode="clip")  # noqa: E731
    out, text = gathered(pick, (table, at), {"table": (0, 1), "indices": (-1, -1), "result": (-1, 0)})
    np.testing.assert_array_equal(out, pick(jnp.asarray(table), at))
    assert "reduce_scatter" in text


@pytest.mark.parametrize(
    ("table", "indices", "result"),
    [
        ((0, 0), (-1, -1), (0, 0)),
        ((0, 0), (-1, -1), (-1, -1)),
        ((-1, 0), (0, -1), (0, 1)),
        ((-1, 0), (-1, -1), (-1, -1)),
        ((1, 0), (-1, -1), (1, -1)),
    ],
    ids=["one place", "only sums", "one axis", "one axis, only sums", "columns stay"],
)
def test_what_the_partitioner_does_as_well_is_left_to_it(
    table: tuple[int, int], indices: tuple[int, int], result: tuple[int, int]
) -> None:
    graph, op = graph_of(lambda t, i: jnp.take(t, i, axis=0), TABLES["float"], np.arange(TOKENS))
    view = graph.view(op)
    args = (TABLES["float"], np.arange(TOKENS)[:, None])
    assert look_up(view, rule_for(view), args, ([table, indices], result), mesh(), NAMES) is None


@needs_cuda
@pytest.mark.cuda
def test_where_an_axis_computes_copies_rows_are_scattered_over_the_other_alone() -> None:
    """XLA:GPU shares the indices out over the axis of the copies, adds up, and permutes to where they belong."""
    table, tokens = jax.ShapeDtypeStruct((4096, 64), "float32"), jax.ShapeDtypeStruct((1024,), "int32")
    graph, op = graph_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table, tokens)
    results = {(graph.arguments[0], 0): (-1, 0), (graph.arguments[1], 0): (-1, -1), (op.id, 0): (-1, 0)}
    decisions = Decisions({(op.id, 0): (-1, 0), (op.id, 1): (-1, -1)}, results)
    target = mesh_of("h100:8")
    step = jax.jit(
        planned_function(graph, decisions, target, target.axis_names),
        in_shardings=(sharding(target, (-1, 0), 2), sharding(target, (-1, -1), 1)),
        out_shardings=[sharding(target, (-1, 0), 2)],
    )
    found = parse_collectives(step.lower(table, tokens).compile({"xla_gpu_autotune_level": 0}).as_text())
    assert [(c.kind, c.total_bytes_per_device) for c in found] == [("reduce-scatter", 1024 * 64 * 4 * 3 // 4)]


@needs_tpu
@pytest.mark.tpu
def test_a_table_whose_rows_are_rounded_is_sent_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From rows on some devices to columns on others: XLA:TPU rounds before an all-gather, but not before this."""
    table, tokens = jax.ShapeDtypeStruct((4096, 1024), "float32"), jax.ShapeDtypeStruct((64,), "int32")
    graph, op = graph_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip").astype("bfloat16"), table, tokens)
    results = {(graph.arguments[0], 0): (0, 0), (graph.arguments[1], 0): (-1, -1), (op.id, 0): (0, 1)}
    decisions = Decisions({(op.id, 0): (0, 1), (op.id, 1): (-1, -1)}, results)
    target = mesh_of("tpu-v5e:2x4")

    def sent() -> list[tuple[str, float]]:
        step = jax.jit(
            planned_function(graph, decisions, target, target.axis_names),
            in_shardings=(sharding(target, (0, 0), 2), sharding(target, (-1, -1), 1)),
            out_shardings=[sharding(target, (0, 1), 2)],
        )
        found = parse_collectives(step.lower(table, tokens).compile().as_text())
        return [(c.kind, c.total_bytes_per_device) for c in found if c.kind == "all-to-all"]

    elements = 4096 * 1024 // 8 * 3 // 4
    assert sent() == [("all-to-all", 2 * elements)]
    monkeypatch.setattr(apply.planned, "rounded_operands", lambda graph: frozenset())
    assert sent() == [("all-to-all", 4 * elements)], "XLA:TPU rounds by itself now"


@needs_tpu
@pytest.mark.tpu
def test_a_table_that_is_cut_for_its_rows_is_not_rounded() -> None:
    """A tied table, whose cast the logits read as it is stored: XLA:TPU took the one for the other, and gathered it."""
    table, tokens = jax.ShapeDtypeStruct((4096, 1024), "float32"), jax.ShapeDtypeStruct((64,), "int32")

    def logits(t: Any, i: Any) -> Any:
        return jnp.take(t, i, axis=0, mode="clip").astype("bfloat16") @ t.astype("bfloat16").T

    jaxpr = jax.make_jaxpr(logits)(table, tokens)
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["t", "i"], result_paths=["y"]))
    results = {}
    for op in graph.ops:
        for j, t in enumerate(op.outputs):
            shape = graph.tensors[t].shape
            layouts = {(4096, 1024): (-1, 0), (1024, 4096): (-1, 1), (64, 4096): (0, 1), (64, 1024): (0, -1)}
            results[op.id, j] = layouts.get(shape, (-1,) * 2)
    lookup = next(op for op in graph.ops if op.primitive == "gather")
    results[lookup.id, 0] = (1, -1)
    decisions = Decisions({(lookup.id, 0): (1, 0), (lookup.id, 1): (-1, -1)}, results)
    target = mesh_of("tpu-v5p:2x2x2")
    step = jax.jit(
        planned_function(graph, decisions, target, target.axis_names),
        in_shardings=(sharding(target, (-1, 0), 2), sharding(target, (-1, -1), 1)),
    )
    largest = max(c.total_bytes_per_device for c in parse_collectives(step.lower(table, tokens).compile().as_text()))
    assert largest <= 64 * 1024 * 4  # rows that were looked up, and nothing of the table: a quarter has 2 MB

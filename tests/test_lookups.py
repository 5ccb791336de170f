"""Tables that XLA:TPU copies into rows to look something up: what the copies take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.costs.tpu.lookups import copied_bytes, first_lookup, is_lookup, several_tables
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.strategies import Strategy
from compiled import needs_tpu

ROWS, COLUMNS, TABLES, BATCH = 200_000, 128, 6, 4096
SIZES = (2, 4)


def looked_up(tables: list[jax.Array], places: jax.Array) -> jax.Array:
    """The sum of the rows that each table has in some places."""
    return sum(jnp.take(t, places[:, i], axis=0) for i, t in enumerate(tables))  # type: ignore[return-value]


def graph_of(count: int) -> Graph:
    tables = [jax.ShapeDtypeStruct((ROWS, COLUMNS), "float32")] * count
    jaxpr = jax.make_jaxpr(looked_up)(tables, jax.ShapeDtypeStruct((BATCH, count), "int32"))
    paths = [*(f"t{i}" for i in range(count)), "places"]
    return build_graph(jaxpr, argument_paths=paths, result_paths=["sum"])


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        ((1, 1), ROWS * 128 * 4),  # sixteen columns each take a whole tile's
        ((-1, 1), ROWS * 128 * 4),  # so do thirty-two
        ((0, 0), 0),  # whole rows lie as they are looked up
        ((-1, -1), 0),
    ],
)
def test_rows_that_are_no_whole_tiles_are_copied(layout: tuple[int, int], copied: int) -> None:
    graph = graph_of(1)
    (op,) = (op for op in graph.ops if is_lookup(graph, op))
    strategy = Strategy((layout, (-1, -1)), ((-1, -1),), (-1, -1), ())
    assert copied_bytes(graph, op, [strategy], SIZES, 4.0).tolist() == [copied]


def test_lookups_in_several_tables_are_told() -> None:
    assert several_tables(graph_of(2)) and not several_tables(graph_of(1))
    graph = graph_of(2)
    assert first_lookup(graph, np.arange(len(graph.ops))) == min(op.id for op in graph.ops if op.primitive == "gather")


def model() -> Any:
    import keras

    inputs = [keras.Input((1,), dtype="int32", name=f"c{i}") for i in range(TABLES)]
    found = [keras.layers.Flatten()(keras.layers.Embedding(ROWS, COLUMNS)(x)) for x in inputs]
    x = keras.layers.Dense(1024, "relu")(keras.layers.Concatenate()(found))
    built = keras.Model(inputs, keras.layers.Dense(1)(x))
    built.compile(optimizer="adagrad", loss="mse")
    return built


@needs_tpu
@pytest.mark.tpu
@pytest.mark.slow
def test_compiled_lookups_take_and_send_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {}
    for counted in (True, False):
        if not counted:
            for module in ("tpu.lookups", "table", "held"):
                monkeypatch.setattr(f"autoshard_ilp.costs.{module}.is_lookup", lambda graph, op: False)
        columns = {".*/embeddings": (None, ("data", "model"))}
        plan = autoshard.optimize(
            model, {"data": 2, "model": 4}, hardware="tpu-v5e", batch_size=BATCH, pins=columns, progress=False
        )
        found = plan.verify("tpu-v5e:2x4")
        assert found.compiled_peak_bytes is not None and found.predicted_peak_bytes is not None
        ratios[counted] = found.compiled_peak_bytes / found.predicted_peak_bytes
        if counted:
            assert found.unplanned_bytes_per_device < 0.01 * found.predicted_bytes_per_device
    print(ratios)
    assert ratios[True] <= 1.05 and ratios[False] > 1.3  # not all copies are there at once, but most

"""Elementwise results that a reader cuts: computed on the part that it takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce import cuts
from autoshard_ilp.enforce.cuts import computed_as_read, cut_for, is_cut
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from compiled import NAMES, mesh_of, needs_tpu, sharding

WHOLE, ROWS_CUT = (-1, -1), (-1, 0)
ROWS, WIDTH = 2048, 2048
SHAPES = ((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))


def norm(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A normalisation of short floats for a product, and what its gradient sums up."""
    y = x.astype("float32")
    z = y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-6)
    return z.astype("bfloat16") @ w, jnp.sum(z * g.astype("float32"), axis=1)


def planned(hubs: bool = True) -> tuple[Graph, Decisions]:
    """What reductions read is cut by rows, all else whole."""
    jaxpr = jax.make_jaxpr(norm)(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in SHAPES))
    graph = build_graph(jaxpr, argument_paths=["x", "w", "g"], result_paths=["out", "sums"])
    graph = insert_hubs(graph, min_elements=1) if hubs else graph
    operands, results = {}, {}
    squares = {op.inputs[0] for op in graph.ops if op.primitive == "reduce_sum"}
    for op in graph.ops:
        cut = op.primitive == "reduce_sum" or any(t in squares for t in op.outputs)
        for places, tensors in ((operands, op.inputs), (results, op.outputs)):
            for i, t in enumerate(tensors):
                rank = len(graph.tensors[t].shape)
                if rank:
                    places[op.id, i] = ROWS_CUT if cut else WHOLE
    return graph, Decisions(operands, results)


def compiled(target: str) -> Any:
    graph, decided = planned()
    mesh = mesh_of(target)
    step = jax.jit(
        planned_function(graph, decided, mesh, NAMES),
        in_shardings=tuple(sharding(mesh, WHOLE, 2) for _ in SHAPES),
        out_shardings=[sharding(mesh, WHOLE, 2), sharding(mesh, WHOLE, 1)],
    )
    return step.lower(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in SHAPES)).compile()


def written(program: Any) -> int:
    """Instructions of the entry computation that write the whole array in 32 bits."""
    entry = program.as_text().partition("\nENTRY ")[2]
    return sum(f"f32[{ROWS},{WIDTH}]" in line.partition(" = ")[2].partition("(%")[0] for line in entry.splitlines())


@needs_tpu
@pytest.mark.tpu
def test_the_tpu_compiler_writes_no_whole_result(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(compiled("tpu-v5e:2x4")) == 0
    monkeypatch.setattr(cuts, "PLATFORMS", frozenset())
    assert written(compiled("tpu-v5e:2x4")) > 0, "XLA:TPU no longer writes it: enforce/cuts.py can go"


def test_the_values_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [np.random.default_rng(i).normal(size=s).astype(jnp.bfloat16) for i, s in enumerate(SHAPES)]

    def values() -> list[Any]:
        program = compiled("cpu:8")
        return [np.asarray(v) for v in program(*map(jax.device_put, args, program.input_shardings[0]))]

    monkeypatch.setattr(cuts, "PLATFORMS", frozenset({"cpu"}))
    cut = values()
    monkeypatch.setattr(cuts, "PLATFORMS", frozenset())
    for got, wanted in zip(cut, values(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_only_what_is_not_written_is_computed_again() -> None:
    graph, _ = planned()
    found = {graph.ops[graph.tensors[t].producer or 0].primitive for t in computed_as_read(graph, "tpu")}
    assert {"convert_element_type", "mul", "hub"} <= found
    assert not found & {"dot_general", "argument", "reduce_sum", "broadcast_in_dim"}
    assert not computed_as_read(graph, "gpu")


@pytest.mark.parametrize(
    ("before", "after", "shape", "expected"),
    [
        ((-1, -1), (-1, 0), (8, 4), True),
        ((0, -1), (0, 1), (8, 4), True),
        ((-1, 0), (-1, -1), (8, 4), False),  # a gather
        ((-1, 0), (-1, 1), (8, 4), False),  # an all-to-all
        ((-1, -1), (-1, 0), (6, 4), False),  # uneven
        ((-2, -1), (-2, 0), (8, 4), False),  # partial sums
        (None, (-1, 0), (8, 4), False),
        ((-1, 0), (-1, 0), (8, 4), False),
    ],
)
def test_what_is_a_cut(before: Any, after: Any, shape: tuple[int, ...], expected: bool) -> None:
    assert is_cut(before, after, shape, (2, 4)) is expected


def test_what_is_repeated_is_not_cut() -> None:
    assert cut_for((0, 1), (8, 1)) == (0, -1)
    assert cut_for((0, 1), ()) == (-1, -1)

"""Broadcasts that a plan lays out in several ways: made on every device, so that nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard_ilp import apply
from autoshard_ilp.apply import Decisions, planned_function
from autoshard_ilp.enforce import manual, repeated
from autoshard_ilp.enforce.repeated import made_as_read, unequal_broadcasts
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.verify import parse_collectives
from compiled import NAMES, mesh_of, needs_cuda, needs_tpu, sharding

WHOLE, FEATURES = (-1, -1), (1, 1)
ROWS, WIDTH = 256, 512


def within(x: jax.Array, scale: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers per token, repeated by the operation that reads them."""
    return jax.lax.mul(x, scale), jax.lax.mul(y, scale)


def apart(x: jax.Array, scale: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, repeated by operations of their own."""
    wide = (jax.lax.broadcast_in_dim(scale, (ROWS, WIDTH), (0, 1)) for _ in range(2))
    return jax.lax.mul(x, next(wide)), jax.lax.mul(y, next(wide))


def anew(x: jax.Array, scale: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, computed twice, as every layer computes its rotary embedding and its mask."""
    return jax.lax.mul(x, jnp.cos(scale)), jax.lax.mul(y, jnp.cos(scale))


FUNCTIONS: dict[str, Callable[..., Any]] = {"by their reader": within, "on their own": apart, "computed twice": anew}
SHAPES = ((ROWS, WIDTH), (ROWS, 1), (ROWS, WIDTH))


def planned(function: Callable[..., Any]) -> tuple[Graph, Decisions]:
    """The first product keeps whole rows on every device, the second shards their features."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, "float32") for s in SHAPES))
    graph = build_graph(jaxpr, argument_paths=["x", "scale", "y"], result_paths=["whole", "sharded"])
    products = [op for op in graph.ops if op.primitive == "mul"]
    results = {(a, 0): at for a, at in zip(graph.arguments, (WHOLE, WHOLE, FEATURES), strict=True)}
    operands = {}
    for op, layout in zip(products, (WHOLE, FEATURES), strict=True):
        results[op.id, 0] = operands[op.id, 0] = layout
        scale = graph.tensors[op.inputs[1]]
        operands[op.id, 1] = layout if scale.shape == (ROWS, WIDTH) else WHOLE
        if graph.ops[scale.producer or 0].primitive == "broadcast_in_dim":
            results[scale.producer or 0, 0] = layout
            operands[scale.producer or 0, 0] = WHOLE
    return graph, Decisions(operands, results)


def compiled(function: Callable[..., Any], target: str) -> Any:
    graph, decided = planned(function)
    mesh = mesh_of(target)
    step = jax.jit(
        planned_function(graph, decided, mesh, NAMES),
        in_shardings=tuple(sharding(mesh, at, 2) for at in (WHOLE, WHOLE, FEATURES)),
        out_shardings=[sharding(mesh, at, 2) for at in (WHOLE, FEATURES)],
    )
    return step.lower(*(jax.ShapeDtypeStruct(s, "float32") for s in SHAPES)).compile()


@needs_tpu
@pytest.mark.tpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_tpu_compiler_gathers_no_broadcast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parse_collectives(compiled(FUNCTIONS[name], "tpu-v5e:2x4").as_text())
    monkeypatch.setattr(repeated, "PLATFORMS", frozenset())
    merged = parse_collectives(compiled(FUNCTIONS[name], "tpu-v5e:2x4").as_text())
    assert [c.kind for c in merged] == ["all-gather"], "XLA:TPU no longer merges them: enforce/repeated.py can go"


@pytest.mark.parametrize("target", ["cpu:8", pytest.param("h100:8", marks=[needs_cuda, pytest.mark.cuda])])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_compilers_need_no_help(name: str, target: str) -> None:
    assert not parse_collectives(compiled(FUNCTIONS[name], target).as_text())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_values_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "PLATFORMS", frozenset({"cpu"}))
    program = compiled(FUNCTIONS[name], "cpu:8")
    args = [np.random.default_rng(i).normal(size=s).astype("float32") for i, s in enumerate(SHAPES)]
    placed = map(jax.device_put, args, program.input_shardings[0])
    for got, wanted in zip(program(*placed), FUNCTIONS[name](*map(jnp.asarray, args)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_broadcasts_of_one_layout_are_left_alone() -> None:
    graph, decided = planned(within)
    layouts = {graph.ops[op].outputs[j]: at for (op, j), at in decided.results.items()}
    assert len(unequal_broadcasts(graph, "tpu", layouts.get)) == 2
    assert not unequal_broadcasts(graph, "tpu", dict.fromkeys(layouts, FEATURES).get)


def masked(layers: int = 2) -> Graph:
    """Scores of several layers, each under a mask of its own and filled with numbers in two steps."""
    shape = (8, 16, 256, 256)

    def step(*scores: jax.Array) -> list[jax.Array]:
        fill = lambda: jax.lax.broadcast_in_dim(jnp.full(shape[1:], -1.0), shape, (1, 2, 3))  # noqa: E731
        seen = lambda: jnp.arange(256)[:, None] >= jnp.arange(256)[None]  # noqa: E731
        return [jax.lax.select(jax.lax.broadcast_in_dim(seen(), shape, (2, 3)), s, fill()) for s in scores]

    jaxpr = jax.make_jaxpr(step)(*[jax.ShapeDtypeStruct(shape, "float32")] * layers)
    names = [str(i) for i in range(layers)]
    return build_graph(jaxpr, argument_paths=names, result_paths=[f"out{i}" for i in range(layers)])


def test_what_layers_compute_alike_is_told_apart_by_its_layout() -> None:
    graph = masked()
    wide = [op for op in graph.ops if op.outputs and len(graph.tensors[op.outputs[0]].shape) == 4]
    broadcasts = [op for op in wide if op.primitive == "broadcast_in_dim"]
    assert len(broadcasts) == 4
    first = {op.outputs[0]: (0, 1) for op in wide}
    assert not unequal_broadcasts(graph, "tpu", first.get)
    selects = [op for op in wide if op.primitive == "select_n"]
    other = {t: (1, 0) for op in selects[1:] for t in (*op.inputs, *op.outputs)}
    assert set(unequal_broadcasts(graph, "tpu", {**first, **other}.get)) >= {op.id for op in broadcasts}


def test_a_broadcast_of_a_broadcast_is_cut_as_it_is() -> None:
    graph = masked(layers=1)
    (select,) = (op for op in graph.ops if op.primitive == "select_n")
    operands = {(select.id, i): (0, 2) for i in range(3)}
    results = {(op.id, i): (-1, -1) for op in graph.ops for i in range(len(op.outputs))}
    operands, results = made_as_read(graph, operands, results)
    fill = graph.ops[graph.tensors[select.inputs[1]].producer or 0]
    row = graph.ops[graph.tensors[fill.inputs[0]].producer or 0]
    assert (results[fill.id, 0], operands[fill.id, 0], results[row.id, 0]) == ((0, 2), (-1, 1), (-1, 1))


def test_a_mask_of_all_layers_is_made_as_the_loop_reads_it() -> None:
    """Repeated for the batch and the heads outside of the loop that scans the layers."""
    shape = (8, 16, 256, 256)

    def step(scores: jax.Array, scales: jax.Array) -> jax.Array:
        mask = jax.lax.broadcast_in_dim(jnp.arange(256)[:, None] >= jnp.arange(256)[None], shape, (2, 3))
        return jax.lax.scan(lambda s, scale: (jax.lax.select(mask, s * scale, s), None), scores, scales)[0]

    args = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct((4,), "float32")
    graph = build_graph(jax.make_jaxpr(step)(*args), argument_paths=["s", "x"], result_paths=["out"])
    (select,) = (op for op in graph.ops if op.primitive == "select_n")
    operands = {(select.id, i): (0, 1) for i in range(3)}
    results = {(op.id, i): (-1, -1) for op in graph.ops for i in range(len(op.outputs))}
    operands, results = made_as_read(graph, operands, results)
    passed = graph.ops[graph.tensors[select.inputs[0]].producer or 0]
    assert passed.primitive == "loop_invariant"
    mask = graph.ops[graph.tensors[passed.inputs[0]].producer or 0]
    assert mask.primitive == "broadcast_in_dim"
    assert results[mask.id, 0] == results[passed.id, 0] == (0, 1)


ODD = 4001
LOGITS = ((1024, 256), (256, ODD), (1024,))


def weighted(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    """A number per row for each of an odd number of columns, as the gradient of a loss over a vocabulary has it."""
    logits = jnp.tanh(x @ w)
    each = jax.lax.broadcast_in_dim(g, logits.shape, (0,))
    return jnp.sum(jax.lax.mul(jax.lax.exp(logits), each) @ w.T)


def odd_graph(hubs: bool = False) -> tuple[Graph, Decisions]:
    """Columns over the second axis wherever there are any, but for the broadcast, which is cut by who reads it."""
    args = [jax.ShapeDtypeStruct(s, "float32") for s in LOGITS]
    graph = build_graph(jax.make_jaxpr(weighted)(*args), argument_paths=["x", "w", "g"], result_paths=["r"])
    graph = insert_hubs(graph, min_elements=1) if hubs else graph
    operands, results = {}, {}
    for op in graph.ops:
        for places, tensors in ((operands, op.inputs), (results, op.outputs)):
            for i, t in enumerate(tensors):
                shape = graph.tensors[t].shape
                behind = graph.tensors[graph.behind(t, ("hub",))].producer
                whole = (
                    behind is not None and graph.ops[behind].primitive == "broadcast_in_dim" and op.primitive != "mul"
                )
                places[op.id, i] = (-1, shape.index(ODD)) if ODD in shape and not whole else (-1, -1)
    for argument in graph.arguments:
        results[argument, 0] = (-1, -1)
    return graph, Decisions(operands, results)


def compiled_odd(target: str) -> Any:
    graph, decided = odd_graph()
    mesh = mesh_of(target)
    ins = tuple(sharding(mesh, (-1, -1), len(s)) for s in LOGITS)
    step = jax.jit(planned_function(graph, decided, mesh, NAMES), in_shardings=ins)
    return step.lower(*(jax.ShapeDtypeStruct(s, "float32") for s in LOGITS)).compile()


@needs_tpu
@pytest.mark.tpu
def test_a_broadcast_cut_unevenly_is_not_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"f32[1024,{ODD}]" not in compiled_odd("tpu-v5e:2x4").as_text()
    monkeypatch.setattr(apply.planned, "made_as_read", lambda graph, operands, results: (operands, results))
    assert f"f32[1024,{ODD}]" in compiled_odd("tpu-v5e:2x4").as_text(), "XLA:TPU cuts it now: made_as_read can go"


def test_broadcasts_cut_unevenly_have_the_same_values() -> None:
    args = [np.random.default_rng(i).normal(size=s).astype("float32") / 32 for i, s in enumerate(LOGITS)]
    (got,) = compiled_odd("cpu:8")(*args)
    np.testing.assert_allclose(got, weighted(*map(jnp.asarray, args)), rtol=1e-4)


@pytest.mark.parametrize("hubs", [False, True])
def test_broadcasts_are_made_as_all_their_readers_cut_them(hubs: bool) -> None:
    graph, decided = odd_graph(hubs)
    (each,) = (op for op in graph.ops if op.primitive == "broadcast_in_dim")
    operands, results = made_as_read(graph, decided.operands, decided.results)
    assert (decided.results[each.id, 0], results[each.id, 0]) == ((-1, -1), (-1, 1))
    changed = {at for at, layout in results.items() if decided.results[at] != layout}
    assert {graph.ops[op].primitive for op, _ in changed} <= {"broadcast_in_dim", "hub"}
    whole = dict.fromkeys(operands, (-1, -1))
    assert made_as_read(graph, whole, decided.results)[1] == decided.results


def test_what_does_not_divide_is_left_to_the_compiler() -> None:
    mesh = mesh_of("cpu:8")
    assert manual.repeat(jnp.zeros((6, 1)), (0, 1), (6, 9), (1, 1), mesh, NAMES) is None

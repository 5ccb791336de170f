"""The graph of a step: what flattening makes of calls, loops, branches, remat, names and phases; hubs; invariants."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard_ilp.check import GRAPH_INVARIANTS, BrokenInvariant, check_graph
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.graph import Graph, insert_hubs
from autoshard_ilp.graph.flatten import build_graph, layer_path


def graph_of(fn: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    closed = jax.make_jaxpr(fn)(*args)
    inputs = [f"inputs/{i}" for i in range(len(closed.in_avals))]
    outputs = [f"outputs/{i}" for i in range(len(closed.out_avals))]
    graph = build_graph(closed, argument_paths=inputs, result_paths=outputs, **options)
    check_graph(graph)
    return graph


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.primitive for op in graph.ops)


def find(graph: Graph, primitive: str) -> Any:
    (op,) = [op for op in graph.ops if op.primitive == primitive]
    return op


def test_calls_are_inlined() -> None:
    @jax.custom_vjp
    def double(x):
        return jax.jit(lambda y: 2.0 * y)(x)

    double.defvjp(lambda x: (double(x), None), lambda _, g: (2.0 * g,))
    graph = graph_of(lambda x: jax.nn.relu(double(x)), jnp.ones((2, 3)))
    assert [op.primitive for op in graph.ops] == ["argument", "mul", "max", "result"]
    assert [graph.tensors[t].literal is not None for t in graph.ops[1].inputs] == [True, False]


def test_what_nothing_needs_is_dropped_and_unused_arguments_stay() -> None:
    def f(x, unused):
        jnp.sin(x) @ jnp.ones((3, 3))
        carry, _ = jax.lax.scan(lambda c, _: ((c[0] * 2, jnp.cos(c[1])), c[0]), (x, x), length=3)
        return carry[0]

    graph = graph_of(f, jnp.ones((2, 3)), jnp.ones(5))
    assert kinds(graph) == {"argument": 2, "loop_carry": 1, "mul": 1, "result": 1}
    assert graph.regions[1].stacks == ()


def test_scan() -> None:
    def f(w, xs):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c.sum(0)), jnp.zeros((2, 3)), xs, reverse=True)

    graph = graph_of(f, jnp.ones((3, 3)), jnp.ones((5, 2, 3)))
    region = graph.regions[1]
    assert (region.kind, region.trip_count, region.params["reverse"]) == ("scan", 5, True)
    carry, piece, stack = (find(graph, f"loop_{name}") for name in ("carry", "slice", "stack"))
    assert (carry.region, piece.region, stack.region) == (0, 1, 1)
    assert [graph.tensors[t].shape for t in (*piece.inputs, *piece.outputs)] == [(5, 2, 3), (2, 3)]
    assert [graph.tensors[t].shape for t in (*stack.inputs, *stack.outputs)] == [(3,), (5, 3)]
    assert (find(graph, "dot_general").count, carry.count, find(graph, "loop_invariant").count) == (5.0, 1.0, 1.0)
    assert graph.ops[graph.tensors[carry.inputs[1]].producer].primitive == "tanh"
    assert carry.id < find(graph, "dot_general").id


def test_counts_multiply_and_while_loops_use_the_given_trip_count() -> None:
    def f(x):
        def inner(y):
            return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, y))[1]

        return jax.lax.scan(lambda c, _: (inner(c), None), x, length=4)[0]

    graph = graph_of(f, jnp.ones(4), while_trip_count=7)
    assert find(graph, "sin").count == 28.0
    condition = find(graph, "while_cond")
    assert [graph.tensors[t].shape for t in condition.inputs] == [()]  # it reads the counter only
    assert graph.regions[condition.region].parent == graph.regions[condition.region - 1].id


def test_branches() -> None:
    def f(i, x):
        y = x + 1.0
        return jax.lax.switch(i, [lambda: y * 2.0, lambda: jnp.sin(y), lambda: y])

    graph = graph_of(f, 1, jnp.ones((2, 3)))
    merge = find(graph, "branch_merge")
    region = graph.regions[merge.params["region"]]
    assert (len(merge.inputs), len(region.branches), merge.region) == (3, 3, 0)
    add = find(graph, "add")
    assert find(graph, "sin").inputs == add.outputs
    assert merge.inputs[2] == add.outputs[0]  # a branch that only passes its operand on
    assert region.index is not None
    assert graph.tensors[region.index].shape == ()


def test_remat_keeps_a_barrier_over_what_it_reads() -> None:
    def loss(w, x):
        return jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w) @ w))(w).sum()

    graph = graph_of(jax.grad(loss), jnp.ones((3, 3)), jnp.ones((2, 3)))
    barrier = find(graph, "optimization_barrier")
    assert barrier.phase == "backward"
    after = [op for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    assert len(after) == 5
    barred = set(barrier.outputs)
    assert any(barred & set(op.inputs) for op in after)
    assert not any({0, 1} & set(op.inputs) for op in after)
    forward_only = graph_of(loss, jnp.ones((3, 3)), jnp.ones((2, 3)))
    assert "optimization_barrier" not in kinds(forward_only)


@pytest.mark.parametrize(
    ("name_stack", "path"),
    [
        ("", ""),
        ("jvp()", ""),
        ("jvp(net)/block_0/dense", "net/block_0/dense"),
        ("transpose(jvp(net))/block_0/dense", "net/block_0/dense"),
        ("transpose(jvp(net))/jvp(net)/rematted_computation/dense", "net/dense"),
        ("jvp(net)/vmap(heads)/query", "net/heads/query"),
        ("jit(step)/jvp(net)/jit(relu)/max", "net/max"),
        ("transpose(jvp(conv2d_transpose))/conv", "conv2d_transpose/conv"),
        ("adam/update", "adam/update"),
        ("jvp(net)/query/btd,dnh->btnh", "net/query"),
    ],
)
def test_layer_path(name_stack: str, path: str) -> None:
    assert layer_path(name_stack) == path


def sgd_step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(ws):
        h = x
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                h = jnp.tanh(h @ w)
        return h.sum()

    with jax.named_scope("net"):
        gradients = jax.grad(loss)(ws)
    with jax.named_scope("sgd"):
        return [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]


WEIGHTS, INPUT = [jnp.ones((32, 32))] * 3, jnp.ones((64, 32))


def test_scopes_phases_and_sources() -> None:
    graph = graph_of(sgd_step, WEIGHTS, INPUT, aliases={0: 0, 1: 1, 2: 2})
    dots = [op for op in graph.ops if op.primitive == "dot_general"]
    assert Counter(op.phase for op in dots) == {"forward": 3, "backward": 5}
    assert {op.scope for op in dots} == {"net/layer_0", "net/layer_1", "net/layer_2"}
    assert {(op.phase, op.scope) for op in graph.ops if op.primitive == "sub" and op.inputs[0] in (0, 1, 2)} == {
        ("update", "sgd")
    }
    assert dots[0].source.startswith("test_graph.py:")
    assert dots[0].source.endswith("(loss)")
    assert [(graph.ops[r].path, graph.ops[a].path) for r, a in graph.aliases][2] == ("outputs/2", "inputs/2")


def test_hubs_stand_where_a_copy_can_be_shared() -> None:
    graph = graph_of(sgd_step, WEIGHTS, INPUT)
    with_hubs = insert_hubs(graph)
    check_graph(with_hubs)
    hubs = [op for op in with_hubs.ops if op.primitive == "hub"]
    second = [h for h in hubs if h.params["of"] == with_hubs.ops[1].outputs[0]]  # of the weight of layer_1
    assert [h.phase for h in second] == ["forward", "backward"]
    assert second[1].params["first"] == second[0].id
    assert all(with_hubs.ops[with_hubs.tensors[h.outputs[0]].consumers[0][0]].phase == h.phase for h in hubs)
    update = with_hubs.ops[1].outputs[0]
    assert [with_hubs.ops[c].primitive for c, _ in with_hubs.tensors[update].consumers] == ["hub", "hub", "sub"]
    assert len(hubs) == len(with_hubs.ops) - len(graph.ops)
    assert kinds(insert_hubs(graph, min_elements=10**6))["hub"] == 0


def test_hubs_leave_loops_their_own_values() -> None:
    def f(w, xs):
        c, ys = jax.lax.scan(lambda c, x: (jnp.sin(c @ w) + jnp.cos(c @ w), x + c), xs[0], xs)
        return c, ys, xs + 1.0, xs * 2.0

    graph = insert_hubs(graph_of(f, jnp.ones((3, 3)), jnp.ones((4, 2, 3))), min_elements=1)
    check_graph(graph)
    hubs = [op for op in graph.ops if op.primitive == "hub"]
    assert {h.region for h in hubs} == {0, 1}
    piece = find(graph, "loop_slice")
    assert graph.ops[graph.tensors[piece.inputs[0]].producer].primitive == "argument"


def test_networkx() -> None:
    graph = graph_of(lambda x: x * x, jnp.ones((2, 3)))
    nx_graph = graph.networkx()
    edge = (("tensor", graph.ops[0].outputs[0]), ("op", find(graph, "mul").id))
    assert nx_graph.edges[edge]["operands"] == (0, 1)  # both uses are kept
    assert nx_graph.nodes[edge[0]]["bytes"] == 24
    assert nx_graph.number_of_nodes() == len(graph.ops) + len(graph.tensors)


def test_item_sizes() -> None:
    key = jax.random.key(0)
    graph = graph_of(lambda k, a, b: (k, a, b), key, jnp.ones(3, jnp.int4), jnp.ones(3, jnp.bfloat16))
    tensors = [graph.tensors[op.outputs[0]] for op in graph.ops[:3]]
    assert [(t.dtype, t.itemsize) for t in tensors] == [("key<fry>", 8.0), ("int4", 0.5), ("bfloat16", 2.0)]
    assert tensors[1].bytes == 2


def test_wrong_paths_and_aliases_are_refused() -> None:
    closed = jax.make_jaxpr(lambda x: x + 1.0)(jnp.ones(3))
    with pytest.raises(InputShapeError, match="Received 0 paths for 1 arguments"):
        build_graph(closed, argument_paths=[], result_paths=["y"])
    with pytest.raises(InputShapeError, match="aliases"):
        build_graph(closed, argument_paths=["x"], result_paths=["y"], aliases={1: 0})


def broken(graph: Graph, op_id: int, **changes: Any) -> Graph:
    ops = list(graph.ops)
    ops[op_id] = dataclasses.replace(ops[op_id], **changes)
    return dataclasses.replace(graph, ops=ops)


def test_checks_name_what_is_broken() -> None:
    graph = insert_hubs(graph_of(sgd_step, WEIGHTS, INPUT, aliases={0: 0}))
    hub = next(op for op in graph.ops if op.primitive == "hub" and op.params["first"] is not None)
    cases = {
        "ids are indices": broken(graph, 5, id=6),
        "consumers mirror operands": broken(graph, hub.id, inputs=(0, 0)),
        "phases are known": broken(graph, hub.id, phase="sideways"),
        "hubs know their tensor": broken(graph, hub.id, params={**hub.params, "first": hub.id}),
        "regions nest": broken(graph, hub.id, region=4),
        "arguments and results stand by position": dataclasses.replace(graph, arguments=graph.arguments[::-1]),
        "aliases have equal types": dataclasses.replace(graph, aliases=[(graph.results[0], graph.arguments[3])]),
    }
    assert cases.keys() <= GRAPH_INVARIANTS.keys()
    for name, wrong in cases.items():
        with pytest.raises(BrokenInvariant) as caught:
            check_graph(wrong)
        assert caught.value.invariant == name

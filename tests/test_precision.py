"""What XLA rounds early: 32-bit floats that only 16-bit readers see are sent, on TPU also held, as 16-bit ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

import autoshard_ilp as autoshard
from autoshard_ilp.apply import Decisions, planned, planned_function
from autoshard_ilp.costs.precision import precision
from autoshard_ilp.enforce.moved import move
from autoshard_ilp.graph import insert_hubs
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.verify import parse_collectives
from compiled import NAMES, mesh_of, needs_cuda, needs_tpu, sharding

TPU, GPU = SimpleNamespace(family="tpu"), SimpleNamespace(family="gpu")
MESH = {"data": 2, "model": 4}
SIZE = 64


def sent_as(function: Any, profile: Any = TPU, dtype: str = "float32") -> list[float]:
    """Bytes per element in which the weight, the second argument, reaches each operation that reads it."""
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), dtype)
    jaxpr = jax.make_jaxpr(function)(shape, shape)
    results = [f"r{i}" for i in range(len(jaxpr.jaxpr.outvars))]
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["x", "w"], result_paths=results))
    found = precision(graph, profile)
    weight = graph.ops[graph.arguments[1]].outputs[0]
    return [found.moved(graph, graph.ops[op], i) for op, i in graph.tensors[weight].consumers]


def looped(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0]


ROUNDED = {
    "product": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.T.reshape(SIZE, SIZE),
    "relu": lambda x, w: x @ jnp.maximum(w, 0.0),
    "two products": lambda x, w: jnp.tanh(x @ w) @ w.T,
    "loop": looped,
    "converted": lambda x, w: jnp.sum(w.astype("bfloat16")),
}
KEPT = {
    "sum besides": lambda x, w: (x @ w, jnp.sum(w * w)),
    "arithmetic first": lambda x, w: x @ jnp.exp(w),
    "HIGHEST": lambda x, w: jnp.dot(x, w, precision="highest"),
    "HIGH": lambda x, w: jnp.dot(x, w, precision="high"),
    "result": lambda x, w: (x @ w, w),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_only_products_read_is_rounded(name: str) -> None:
    assert set(sent_as(ROUNDED[name])) == {2.0}
    assert set(sent_as(ROUNDED[name], GPU)) == {2.0 if name == "converted" else 4.0}
    assert set(sent_as(ROUNDED[name], dtype="bfloat16")) == {2.0}


@pytest.mark.parametrize("name", KEPT)
def test_what_something_else_reads_is_kept(name: str) -> None:
    assert 4.0 in sent_as(KEPT[name])


CAST: dict[str, tuple[Any, float]] = {
    "one cast": (lambda x, w: jnp.sum(w.astype("bfloat16") @ x.astype("bfloat16")), 2.0),
    "transposed": (lambda x, w: jnp.sum(w.T.astype("bfloat16") @ x.astype("bfloat16")), 2.0),
    "two casts": (lambda x, w: jnp.sum(w.astype("bfloat16") @ x.astype("bfloat16") @ w.T.astype("bfloat16")), 4.0),
    "read besides": (lambda x, w: jnp.sum(w.astype("bfloat16") @ x.astype("bfloat16")) + jnp.sum(w), 4.0),
}


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", CAST)
def test_the_gpu_compiler_casts_before_it_gathers(name: str) -> None:
    function, each = CAST[name]
    assert set(sent_as(function, GPU)) == {each}
    mesh = mesh_of("h100:8")
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), "float32")

    def gathered(x: Any, w: Any) -> Any:
        return function(x, move(w, (0, 0), (-1, -1), mesh, NAMES))

    ins = (sharding(mesh, (-1, -1), 2), sharding(mesh, (0, 0), 2))
    text = jax.jit(gathered, in_shardings=ins).lower(shape, shape).compile().as_text()
    sent = sum(c.total_bytes_per_device for c in parse_collectives(text) if c.kind == "all-gather")
    assert sent == SIZE * SIZE * each * 7 / 8


@pytest.mark.parametrize(
    ("profile", "groups", "reads", "expected"),
    [
        (TPU, 4, "casts", 4.0),  # seen: f32[64,48,48,128]
        (TPU, 4, "adds", 2.0),
        (TPU, 32, "casts", 2.0),  # seen: bf16[16,64,64,32] of a depthwise one
        (TPU, 1, "casts", 2.0),
        (GPU, 4, "casts", 2.0),
    ],
)
def test_convolutions_in_groups_are_held_in_32_bits_where_their_readers_cast(
    profile: Any, groups: int, reads: str, expected: float
) -> None:
    def normalised(x: Any, k: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )
        wide = y.astype("float32")
        return (
            y * 2 if reads == "adds" else 0.0,
            wide - wide.mean((0, 1, 2)),
            jnp.square(y.astype("float32")).mean(),
        )

    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8, 16, 16, 32), (3, 3, 32 // groups, 32))]
    jaxpr = jax.make_jaxpr(normalised)(*args)
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["x", "k"], result_paths=["a", "b", "c"]))
    (made,) = [op.outputs[0] for op in graph.ops if op.primitive == "conv_general_dilated"]
    found = precision(graph, profile)
    assert found.held[made] == expected
    assert {found.moved(graph, graph.ops[c], i) for c, i in graph.tensors[made].consumers} == {2.0}


def tied(table: Any, ids: Any, x: Any) -> Any:
    """A table that is looked up and makes logits in 16 bits; its gradient is a sum of both."""

    def loss(table: Any) -> Any:
        narrow = table.astype("bfloat16")
        return jnp.sum(jnp.tanh((jnp.take(table, ids, axis=0).astype("bfloat16") + x) @ narrow.T).astype("float32"))

    return table - jax.grad(loss)(table)


def untied(table: Any, ids: Any, x: Any) -> Any:
    return table - jax.grad(lambda table: jnp.sum(jnp.tanh(x @ table.astype("bfloat16").T).astype("float32")))(table)


@pytest.mark.parametrize(
    ("step", "profile", "expected"),
    [(tied, TPU, 4.0), (tied, GPU, 2.0), (untied, TPU, 2.0)],
    ids=["tied-tpu", "tied-gpu", "untied-tpu"],
)
def test_the_gradient_of_a_tied_table_is_held_in_32_bits(step: Any, profile: Any, expected: float) -> None:
    shapes = ((512, 64), "float32"), ((32,), "int32"), ((32, 64), "bfloat16")
    jaxpr = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    graph = insert_hubs(build_graph(jaxpr, argument_paths=["t", "i", "x"], result_paths=["t"]))
    made = [op for op in graph.ops if op.primitive == "dot_general" and op.phase == "backward"]
    (gradient,) = [op.outputs[0] for op in made if set(graph.tensors[op.outputs[0]].shape) == {512, 64}]
    assert precision(graph, profile).held[gradient] == expected


def gathered_to_be_cut(rows: int) -> float:
    """Bytes of the all-gather of a float32 table whose columns are gathered, whose rows are cut, and which is cast."""
    mesh, table = mesh_of("h100:8"), jax.ShapeDtypeStruct((rows, SIZE), "float32")
    jaxpr = jax.make_jaxpr(lambda w: jnp.sum(w.astype("bfloat16") * 2))(table)
    graph = build_graph(jaxpr, argument_paths=["w"], result_paths=["out"])
    cast = next(op.id for op in graph.ops if op.primitive == "convert_element_type")
    results = {(op.id, 0): (1, 0) for op in graph.ops if op.outputs and graph.tensors[op.outputs[0]].shape}
    results[graph.arguments[0], 0] = (1, 1)
    decided = Decisions({(cast, 0): (1, 0)}, results, via={(cast, 0): ((1, -1),)})
    step = jax.jit(planned_function(graph, decided, mesh, NAMES), in_shardings=sharding(mesh, (1, 1), 2))
    found = parse_collectives(step.lower(table).compile().as_text())
    return sum(c.total_bytes_per_device for c in found if c.kind == "all-gather")


@needs_cuda
@pytest.mark.cuda
def test_what_is_cut_before_its_cast_is_cast_before_it_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:GPU does so by itself only where nothing lies between the gather and the cast: a cut of 1001 rows, say."""
    rows = 1001
    elements = rows * SIZE / 2 * 3 / 4
    assert gathered_to_be_cut(rows) == 2 * elements
    monkeypatch.setattr(planned, "cast_before_collectives", lambda graph: ("",) * len(graph.ops))
    assert gathered_to_be_cut(rows) == 4 * elements, "XLA:GPU casts by itself now: apply need not"


@needs_cuda
@pytest.mark.cuda
def test_what_changes_its_order_of_shards_is_cast_where_it_comes_from() -> None:
    """Or XLA casts what has arrived: twice the bytes of a permute in a step of MobileNet-V2."""
    mesh, rows = mesh_of("h100:8"), jax.ShapeDtypeStruct((SIZE, 8), "float32")
    graph = build_graph(
        jax.make_jaxpr(lambda x: (x + 1).astype("bfloat16"))(rows), argument_paths=["x"], result_paths=["out"]
    )
    add, cast = (next(op.id for op in graph.ops if op.primitive == p) for p in ("add", "convert_element_type"))
    results = {(graph.arguments[0], 0): (-1, 0), (add, 0): (-1, 0), (cast, 0): (0, 0)}
    step = jax.jit(planned_function(graph, Decisions({(cast, 0): (0, 0)}, results), mesh, NAMES))
    lines = [line for line in step.lower(rows).as_text().splitlines() if "bf16" in line and "@main" not in line]
    a, b = NAMES
    assert "stablehlo.convert" in lines[0]
    assert f'[{{"{b}"}}, {{}}]' in lines[1], "in the old layout first"
    assert f'[{{"{a}", "{b}"}}, {{}}]' in lines[2]


def dense() -> Any:
    model = keras.Sequential(
        [keras.Input((256,)), *[keras.layers.Dense(512, "relu") for _ in range(2)], keras.layers.Dense(256)]
    )
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.tpu
@pytest.mark.parametrize("mode", ["predict", "train"])
def test_the_tpu_compiler_sends_half_of_float32_weights(mode: str) -> None:
    pytest.importorskip("libtpu")
    options = {"batch_size": 256, "hardware": "tpu-v5e:2x4", "mode": mode, "progress": False}
    checked = autoshard.baseline(dense, MESH, "fsdp", **options).verify("tpu-v5e:2x4")
    assert checked.predicted_bytes_per_device > 0
    assert checked.compiled_bytes_per_device == pytest.approx(checked.predicted_bytes_per_device, rel=0.01)
    assert checked.unplanned_bytes_per_device <= 0.01 * checked.predicted_bytes_per_device


def test_a_result_of_odd_columns_is_copied_on_tpu() -> None:
    """GPT-2's logits, 50257 columns: the compiled peak has them twice."""
    rows, width = 16384, 128  # more than what a TPU keeps on its chip

    def peak(columns: int, hardware: str) -> int:
        args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, width), (width, columns))]
        pins = {"args/0": jax.sharding.PartitionSpec(), "args/1": jax.sharding.PartitionSpec()}
        pins["outputs/0"] = jax.sharding.PartitionSpec()
        plan = autoshard.optimize_fn(jnp.matmul, tuple(args), MESH, hardware=hardware, pins=pins, progress=False)
        return plan.memory.peak_bytes - 2 * width * (rows + columns)

    assert peak(4096, "tpu-v5e:2x4") == peak(4096, "h100") == 2 * rows * 4096
    assert peak(4001, "tpu-v5e:2x4") == 2 * 2 * rows * 4008 + 2 * width * 7  # whole tiles of 8 rows


@needs_tpu
@pytest.mark.tpu
@pytest.mark.slow
def test_the_tpu_compiler_sends_half_of_what_was_scattered_for_products() -> None:
    """A gradient of 32 bits, scattered by one product and gathered for two others, which round it."""

    def step(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            up, down, head = weights
            return jnp.square((x + jax.nn.relu(x @ up) @ down) @ head - y).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    shapes = (2048, 8192), (8192, 2048), (2048, 8192)
    args = (
        [jax.ShapeDtypeStruct(s, "float32") for s in shapes],
        jax.ShapeDtypeStruct((2048, 2048), "float32"),
        jax.ShapeDtypeStruct((2048, 8192), "float32"),
    )
    pins = {"args/0/0": (None, "data"), "args/0/1": ("data",), "args/0/2": (None, "data")}
    plan = autoshard.optimize_fn(step, args, {"data": 8}, hardware="tpu-v5e", pins=pins, progress=False)
    assert any(c.kind == "reduce-scatter" for c in plan.collectives)
    found = plan.verify("tpu-v5e:2x4")
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)

"""Which kernels XLA:GPU makes of a step: what they write, and what they read, as compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard_ilp.costs.fusion import roots
from autoshard_ilp.costs.gpu import splits
from autoshard_ilp.costs.gpu.kernels import kernels_of_operations
from autoshard_ilp.costs.memory import analyse
from autoshard_ilp.verify.hlo_text import array_shapes, parse_module
from compiled import needs_cuda
from test_gpu_buffers import graph_of, whole_on_gpus

SHAPE = (2048, 512)
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def traffic_planned(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[int, int]:
    """Arrays of ``SHAPE`` that the kernels of a plan read, and write."""
    graph = graph_of(function, *shapes)
    buffers = analyse(graph, "gpu")
    read = sum(graph.tensors[op.inputs[i]].shape == SHAPE for op in graph.ops for i in buffers.reads[op.id])
    written = [t for t in graph.tensors if t.shape == SHAPE and buffers.stored[t.id] and t.producer is not None]
    return read, sum(graph.ops[t.producer].primitive != "argument" for t in written if t.producer is not None)


def traffic_compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[int, int]:
    """The same of the compiled program."""
    whole = whole_on_gpus()
    args = [jax.ShapeDtypeStruct(s, "float32", sharding=whole) for s in shapes]
    lowered = jax.jit(function, out_shardings=whole).lower(*args)
    module = parse_module(lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text())
    made = module.computations[module.entry].instructions
    read = written = 0
    for instruction in made.values():
        if instruction.opcode in FREE:
            continue
        written += sum(shape == SHAPE for _, shape in array_shapes(instruction.type_text))
        for name in dict.fromkeys(instruction.operands):
            read += any(shape == SHAPE for _, shape in array_shapes(made[name].type_text))
    return read, written


def sums(x: Any) -> Any:
    """Two sums that do not need one another."""
    return jnp.sum(x, axis=1), jnp.sum(x * x, axis=1)


def rows(x: Any, y: Any) -> Any:
    """A result, and the sums of its rows."""
    total = x + y
    return total, jnp.sum(total, axis=1)


def columns(x: Any, y: Any) -> Any:
    """A result, and the sums of its columns."""
    total = x + y
    return total, jnp.sum(total, axis=0)


def residual(x: Any, y: Any) -> Any:
    """A sum that two kernels need."""
    total = x + y
    first = jnp.sum(jnp.maximum(total, 0.0))
    return jnp.minimum(total, first)


def residual_of_many(x: Any, y: Any) -> Any:
    """The same of five, each of which needs the one before."""
    total, found = x + y, jnp.zeros(())
    for _ in range(5):
        found = jnp.sum(jnp.maximum(total, found))
    return found


def beside(x: Any, y: Any) -> Any:
    """Five that read one of the summands anyway."""
    total, found = x + y, jnp.zeros(())
    for _ in range(5):
        found = jnp.sum(jnp.where(x > found, total, 0.0))
    return found


@needs_cuda
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (sums, [SHAPE]),
        (rows, [SHAPE, SHAPE]),
        (columns, [SHAPE, SHAPE]),
        (residual, [SHAPE, SHAPE]),
        (residual_of_many, [SHAPE, SHAPE]),
        (beside, [SHAPE, SHAPE]),
    ],
)
def test_kernels_read_and_write_what_the_plan_counts(function: Callable[..., Any], shapes: list[Any]) -> None:
    assert traffic_planned(function, *shapes) == traffic_compiled(function, *shapes)


def scanned(x: Any, y: Any) -> Any:
    """What a linear recurrence gives, found by an associative scan: each level reads what the one before made twice."""
    joined = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, y))
    return jnp.sum(joined[1], axis=-1)


def rows_written(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """Of all arrays as wide as the first that a plan counts between arguments and results."""
    graph = graph_of(function, *shapes)
    buffers, width = analyse(graph, "gpu"), shapes[0][-1]
    made = (t for op in graph.ops if op.primitive != "argument" for t in op.outputs if buffers.stored[t])
    return sum(t.shape[0] for t in (graph.tensors[i] for i in made) if t.shape[1:] == (width,))


def test_no_kernel_computes_a_whole_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [(128, 4096)] * 2
    assert 64 <= rows_written(scanned, *wide) <= 192
    assert rows_written(scanned, (2, 4096), (2, 4096)) == 0, "a single level is computed by the sum"
    monkeypatch.setattr(splits, "MOST_BRANCHES", 10**9)
    assert rows_written(scanned, *wide) == 0, "computed anew 128 times"


@needs_cuda
def test_a_scan_is_written_as_compiled() -> None:
    wide = [(128, 4096)] * 2
    whole = whole_on_gpus()
    args = [jax.ShapeDtypeStruct(s, "float32", sharding=whole) for s in wide]
    lowered = jax.jit(scanned, out_shardings=whole).lower(*args)
    module = parse_module(lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text())
    made = [i for i in module.computations[module.entry].instructions.values() if i.opcode not in FREE]
    rows = sum(s[0] for i in made for _, s in array_shapes(i.type_text) if s[1:] == (4096,))
    assert rows <= rows_written(scanned, *wide) <= 4 * rows


def test_places_where_a_kernel_reads() -> None:
    """Two places of an array, at each of which two of another are read: four copies of what it is made of."""
    graph = graph_of(lambda x: jnp.sum(twice(twice(jnp.pad(x, ((0, 2), (0, 0)))))), (128, 64))
    root, stored = roots(graph), [t.producer in graph.arguments for t in graph.tensors]
    inside = kernels_of_operations(graph, root, stored)
    branches = splits.Branches(graph, root, stored, inside)
    (total,) = (op.id for op in graph.ops if op.primitive == "reduce_sum")
    assert branches.count[total] == 1 + 4
    assert sum(branches.reads[total, graph.ops[0].outputs[0]].values()) == 4
    assert not branches.repeated


def twice(x: Any) -> Any:
    return x[1:] * x[:-1]

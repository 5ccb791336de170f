"""Which kernels XLA:GPU makes of a step: what they write, and what they read, as compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

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

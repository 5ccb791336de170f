"""Products in groups of rows: what compilers make of them is counted, in bytes and in time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import autoshard_ilp as autoshard
from autoshard_ilp.costs.compute import Traffic
from autoshard_ilp.costs.grouped import copies_for_groups, groups_of, masked_again
from autoshard_ilp.costs.kernels import with_kernels
from compiled import needs_cuda

GROUPS, ROWS, WIDTH, COLUMNS = 8, 4096, 512, 1024
PINS = {"args/0": (), "args/1": (), "args/2": ()}


def product(x: Any, w: Any, sizes: Any) -> Any:
    return lax.ragged_dot(x, w, sizes)


def step(x: Any, w: Any, sizes: Any) -> Any:
    return w - jax.grad(lambda w: (lax.ragged_dot(x, w, sizes) ** 2).sum())(w)


def planned(function: Any, hardware: str = "h100", groups: int = GROUPS) -> Any:
    shapes = ((ROWS, WIDTH), "float32"), ((groups, WIDTH, COLUMNS), "float32"), ((groups,), "int32")
    args = tuple(jax.ShapeDtypeStruct(*s) for s in shapes)
    return autoshard.optimize_fn(
        function, args, {"data": 8}, hardware=hardware, pins={**PINS, "outputs": ()}, donate_argnums=(), progress=False
    )


def test_copies_of_operands() -> None:
    """One of the rows per group, kept for the product that contracts them, which copies both of its operands."""
    table = planned(step).trail.costs
    graph = table.graph
    forward, contracted = (op for op in graph.ops if op.primitive == "ragged_dot_general")
    assert masked_again(graph) == {forward.id: contracted.id}
    rows, results = GROUPS * ROWS * WIDTH * 4, GROUPS * ROWS * COLUMNS * 4
    for op, again, wanted in [
        (forward, False, rows),
        (forward, True, 2 * rows),
        (contracted, False, rows + results),
        (contracted, True, results),
    ]:
        assert groups_of(graph, op) == GROUPS
        strategies = table.classes[int(table.class_of[op.id])].strategies
        held = copies_for_groups(graph, op, strategies, (8,), again)
        whole = [i for i, s in enumerate(strategies) if all(lay == (-1,) for lay in s.operands)]
        assert whole
        np.testing.assert_array_equal(held[whole], wanted)
        assert held.max() == wanted
    assert groups_of(graph, graph.ops[0]) == 1
    assert not copies_for_groups(graph, graph.ops[0], strategies, (8,)).any()


@pytest.mark.parametrize(("hardware", "slower"), [("h100", GROUPS), ("tpu-v5e", 1)])
def test_every_group_takes_its_time_on_gpus(hardware: str, slower: int) -> None:
    graph = planned(product).trail.costs.graph
    (op,) = (op for op in graph.ops if op.primitive == "ragged_dot_general")
    traffic = Traffic(((0, (ROWS, WIDTH), 4.0),), ((0, (ROWS, COLUMNS), 4.0),), "float32")
    found = with_kernels(traffic, graph, op, autoshard.profile(hardware))
    assert found.share == 1 / slower
    assert len(found.reads) == (2 if slower > 1 else 1)


@needs_cuda
@pytest.mark.parametrize("function", [product, step])
def test_what_xla_holds(function: Any) -> None:
    plan = planned(function)
    compiled = plan.verify("h100:8").compiled_peak_bytes
    assert compiled == pytest.approx(plan.memory.peak_bytes, rel=0.1)

"""Differences between plan and compiled program: matched by operation, then by kind, and named by tensor and layer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard_ilp as autoshard
from autoshard_ilp.apply import mark
from autoshard_ilp.verify import CompiledCollective
from autoshard_ilp.verify.diff import differences, marked_operation

NAMES, SIZES = ("data", "model"), (2, 4)
MODEL_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
DATA_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))


def planned(kind, n_bytes, axes=("model",), op_ids=(), **more):
    fields = {"count": max(1, len(op_ids)), "tensor": "w", "operation": "layer/dot_general", "source": "m.py:1"}
    return SimpleNamespace(kind=kind, bytes_per_device=n_bytes, mesh_axes=axes, op_ids=op_ids, **{**fields, **more})


def compiled(kind, n_bytes, groups=MODEL_GROUPS, op_name="", count=1):
    return CompiledCollective(kind, n_bytes, n_bytes, count, groups, "bf16", op_name, "m.py:9", name="instruction.1")


def test_the_mark_of_an_operation_is_read_back():
    assert marked_operation(f"jit(step)/jvp(layer)/{mark(17)}/dot_general") == 17
    assert marked_operation(f"jit(step)/{mark(3)}/shard_map/{mark(4)}/psum") == 4
    assert marked_operation("jit(step)/shop.3x/dot_general") is None
    assert marked_operation("") is None


def test_equal_bytes_leave_no_difference_even_when_combined():
    two = [planned("all-reduce", 100, op_ids=(1,)), planned("all-reduce", 50, op_ids=(2,))]
    assert differences(two, [compiled("all-reduce", 150)], NAMES, SIZES) == ()


def test_an_all_reduce_stands_for_a_scatter_and_a_gather():
    halves = [planned("reduce-scatter", 100), planned("all-gather", 100)]
    assert differences(halves, [compiled("all-reduce", 200)], NAMES, SIZES) == ()
    left = differences(halves, [compiled("all-reduce", 200, DATA_GROUPS)], NAMES, SIZES)
    assert [(d.status, d.mesh_axes) for d in left] == [("surplus", ("data",))] + [("missing", ("model",))] * 2


def test_what_remains_is_named():
    plan = [planned("all-gather", 100, op_ids=(5,), tensor="dense/kernel", operation="dense/dot_general")]
    found = [compiled("all-to-all", 70, op_name="jit(step)/transpose(jvp(encoder/block_1))/dot_general", count=2)]
    missing, surplus = sorted(differences(plan, found, NAMES, SIZES), key=lambda d: d.status)
    assert (missing.tensor, missing.layer, missing.operation) == ("dense/kernel", "dense", "dot_general")
    assert (missing.bytes_per_device, surplus.bytes_per_device) == (100, 140)
    assert (surplus.layer, surplus.operation, surplus.source) == ("encoder/block_1", "dot_general", "m.py:9")
    assert surplus.instruction == "instruction.1"


def test_the_same_operation_is_matched_before_another_of_the_same_kind():
    plan = [planned("all-gather", 100, op_ids=(1,), tensor="a"), planned("all-gather", 100, op_ids=(2,), tensor="b")]
    (left,) = differences(plan, [compiled("all-gather", 100, op_name=mark(2))], NAMES, SIZES)
    assert (left.status, left.tensor) == ("missing", "a")


@pytest.fixture(scope="module")
def plan():
    """x w with a gathered weight: one all-gather, in a layer of its own."""

    def step(x, w):
        with jax.named_scope("encoder"):
            return x @ w

    shapes = jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 512), "float32")
    pins = {"args/0": P("data"), "args/1": P("model"), "outputs/0": P("data")}
    return autoshard.optimize_fn(step, shapes, {"data": 2, "model": 4}, pins=pins, hardware="cpu-host", progress=False)


def test_a_real_program_has_none_and_a_forged_plan_is_found_out(plan):
    checked = plan.verify("cpu:8")
    assert checked.compiled_bytes_per_device == checked.predicted_bytes_per_device > 0
    assert checked.differences == ()
    (gather, *_) = [c for c in plan.collectives if c.kind == "all-gather"] or plan.collectives
    forged = replace(plan, collectives=tuple(c for c in plan.collectives if c is not gather))
    (surplus,) = forged.verify("cpu:8").differences
    assert (surplus.status, surplus.kind, surplus.mesh_axes) == ("surplus", gather.kind, gather.mesh_axes)
    assert surplus.bytes_per_device == gather.bytes_per_device
    assert surplus.layer == "encoder" and surplus.operation == "dot_general"
    assert "surplus" in forged.verify("cpu:8").summary()


def test_marks_change_nothing_but_names(plan):
    def program(marked):
        text = plan.jit(plan.mesh.concrete(), marked=marked).lower(*plan.abstract_args()).compile().as_text()
        return [line.partition(", metadata")[0] for line in text.splitlines() if " = " in line and "ENTRY" not in line]

    assert len(program(True)) == len(program(False))
    assert [c.total_bytes_per_device for c in plan.verify("cpu:8").collectives]

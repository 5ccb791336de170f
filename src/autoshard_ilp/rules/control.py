"""Pseudo-operations of the graph that are not elementwise, and primitives with an effect outside the program."""

from __future__ import annotations

from autoshard_ilp.rules.builder import Builder
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Kind, OpView, Rule


@register("argument", "constant", "empty", "empty2", "result", "dce_sink")
def ends(op: OpView) -> Rule:
    """Where values enter and leave: ``() -> (a b)`` and ``(a b) -> ()``."""
    b = Builder()
    return b.rule([b.dims(s) for s in op.in_shapes], [b.dims(s) for s in op.out_shapes])


@register("loop_slice")
def loop_slice(op: OpView) -> Rule:
    """What one iteration reads of a scanned array: ``(t a b) -> (a b) replicate={t}``."""
    b = Builder()
    (source,) = op.in_shapes
    steps = b.dim(source[0], Kind.REPLICATE, stem="t")
    rest = b.dims(source[1:])
    return b.rule([(steps, *rest)], [rest])


@register("loop_stack")
def loop_stack(op: OpView) -> Rule:
    """What one iteration writes of a stacked array: ``(a b) -> (t a b) replicate={t}``."""
    b = Builder()
    (target,) = op.out_shapes
    steps = b.dim(target[0], Kind.REPLICATE, stem="t")
    rest = b.dims(target[1:])
    return b.rule([rest], [(steps, *rest)])


@register("debug_callback", "debug_print", "io_callback", "pure_callback", "while_cond", "platform_index")
def whole(op: OpView) -> Rule:
    """Python code sees whole arrays, and every device decides alike whether a loop goes on."""
    b = Builder()
    return b.rule([b.dims(s, Kind.REPLICATE) for s in op.in_shapes], [b.dims(s, Kind.REPLICATE) for s in op.out_shapes])

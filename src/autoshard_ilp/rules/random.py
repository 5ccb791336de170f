"""Random numbers. Counter-based generators compute every element from the key and its index: any dimension passes.

That holds for Threefry (``key<fry>``) with ``jax_threefry_partitionable``, the default. Other generators may give
other numbers when sharded, so their results stay whole.
"""

from __future__ import annotations

from autoshard_ilp.rules.builder import Builder
from autoshard_ilp.rules.registry import register
from autoshard_ilp.rules.rule import Kind, OpView, Rule


@register("random_bits", "random_split")
def from_keys(op: OpView) -> Rule:
    """Keys of shape K give an array of shape K + shape."""
    b = Builder()
    kind = Kind.PASS if op.in_dtypes[0] == "key<fry>" else Kind.REPLICATE
    keys = b.dims(op.in_shapes[0], kind)
    return b.rule([keys], [keys + b.dims(op.out_shapes[0][len(keys) :], kind)])


@register("random_seed")
def random_seed(op: OpView) -> Rule:
    """One key per seed."""
    b = Builder()
    keys = b.dims(op.in_shapes[0])
    return b.rule([keys], [keys])


@register("iota_2x32_shape")
def counters(op: OpView) -> Rule:
    """The two halves of every element's index."""
    b = Builder()
    dims = b.dims(op.out_shapes[0])
    return b.rule([], [dims, dims])


@register("rng_uniform", "rng_bit_generator", "random_gamma")
def whole(op: OpView) -> Rule:
    """Generators whose numbers depend on the order in which they are drawn, or that flatten their operands."""
    b = Builder()
    return b.rule([b.dims(s, Kind.REPLICATE) for s in op.in_shapes], [b.dims(s, Kind.REPLICATE) for s in op.out_shapes])

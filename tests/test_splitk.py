"""Products that XLA:GPU splits: the rule, what the compiler does, and the bytes that the plan counts."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autoshard_ilp as autoshard
from autoshard_ilp.apply import planned
from autoshard_ilp.costs.gpu.splitk import kept_in_pieces, pieces
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda

#: rows, columns, contracted -> pieces
SEEN = {
    (512, 256, 4096): 16,
    (589, 1024, 4096): 4,
    (264, 520, 1536): 8,
    (768, 3072, 4096): 1,
    (272, 256, 16384): 32,
    (128, 128, 65536): 128,
    (520, 2048, 12544): 2,
    (1024, 1024, 8192): 2,
    (2048, 1024, 4096): 1,
    (2048, 768, 25129): 2,
    (64, 1152, 768): 4,
    (1152, 768, 4096): 2,
    (1408, 1024, 4096): 2,
}


@pytest.mark.parametrize(("shape", "expected"), SEEN.items(), ids=str)
def test_the_rule(shape: tuple[int, int, int], expected: int) -> None:
    assert pieces(1, *shape) == expected


def test_batches_are_tiles_too() -> None:
    assert pieces(16, 512, 256, 4096) == 1 and pieces(2, 512, 256, 4096) == 8


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiler_splits_so(dtype: str) -> None:
    mesh = compile_only_mesh(parse_target("h100:8"), ("data",), (8,))
    whole = NamedSharding(mesh, PartitionSpec())

    def products(*operands: jax.Array) -> list[jax.Array]:
        return [jax.lax.dot_general(a, b, (((0,), (0,)), ((), ()))) for a, b in zip(*[iter(operands)] * 2, strict=True)]

    args = [jax.ShapeDtypeStruct((k, n), dtype) for rows, columns, k in SEEN for n in (rows, columns)]
    jitted = jax.jit(products, in_shardings=[whole] * len(args), out_shardings=whole)
    text = jitted.lower(*args).compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()
    made = set(re.findall(r"%gemm_fusion\S* = f32\[([\d,]*)\]", text))
    for (rows, columns, _), n in SEEN.items():
        found = {m for m in (2**i for i in range(1, 9)) for s in ((rows, columns), (columns, rows))
                 if f"{m},{s[0]},{s[1]}" in made}  # fmt: skip
        assert found == ({n} if n > 1 else set()), (rows, columns)


LAYERS, BATCH, TOKENS, NARROW, WIDE = 3, 64, 128, 256, 1024


def two_streams(weights: Any, x: Any) -> Any:
    """Gradients of gated blocks of two streams of tokens, concatenated by kernels that write nothing else."""

    def loss(weights: Any) -> Any:
        y = x
        for layer in weights:
            streams = y[:, : TOKENS // 2], y[:, TOKENS // 2 :]
            blocks = [s + gate * (jnp.tanh(s @ up) @ down) for s, (up, down, gate) in zip(streams, layer, strict=True)]
            y = jnp.concatenate(blocks, axis=1)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return jnp.sum(y * y)

    return jax.grad(loss)(weights)


def planned_streams() -> Any:
    shapes = [(NARROW, WIDE), (WIDE, NARROW), (NARROW,)]
    weights = [[tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes) for _ in range(2)] for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, NARROW), "float32")
    pins = {r"args/0/.*/.*/[01]": (None, None), r"args/0/.*/.*/2": ("data",), "args/1": ("data",)}
    return autoshard.optimize_fn(two_streams, (weights, x), {"data": 8}, hardware="h100", progress=False, pins=pins)


def test_products_that_both_passes_read_would_be_kept_in_pieces() -> None:
    plan = planned_streams()
    graph, decided = plan.trail.graph, plan.decisions()

    def layouts(op: Any) -> Any:
        return [decided.operands.get((op.id, i)) for i in range(len(op.inputs))]

    kept = [graph.tensors[t].shape for t in kept_in_pieces(graph, layouts, (8,))]
    assert kept == [(BATCH, TOKENS // 2, NARROW)] * 2 * LAYERS
    assert not kept_in_pieces(graph, lambda op: [None] * len(op.inputs), (8,))


@pytest.mark.slow
@needs_cuda
def test_they_are_added_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_streams()
    rows = BATCH // 8 * TOKENS // 2
    assert pieces(1, rows, NARROW, WIDE) == 8
    in_one = plan.verify("h100:8")
    monkeypatch.setattr(planned.Planned, "_apart", lambda self: frozenset())
    in_pieces = plan.verify("h100:8")
    assert f"f32[8,{rows},{NARROW}]" in in_pieces.text
    assert in_pieces.compiled_peak_bytes - in_one.compiled_peak_bytes > 3 * 7 * rows * NARROW * 4
    assert in_one.compiled_peak_bytes <= in_one.predicted_peak_bytes < in_pieces.compiled_peak_bytes

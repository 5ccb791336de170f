"""Products that XLA:GPU splits: the rule, what the compiler does, and the bytes that the plan counts."""

from __future__ import annotations

import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard_ilp.costs.splitk import pieces
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

"""Products that Triton finds no tiles for: the rule, and what the compiler does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard_ilp.costs.gpu.triton import leaves_triton
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.flatten import build_graph
from autoshard_ilp.verify import compile_only_mesh, parse_target
from compiled import needs_cuda


def _einsums(x: Any, *kernels: Any) -> Any:
    """Attention as Keras computes it: scores and results as einsums over heads."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, kernel) for kernel in kernels[:3])
    p = jax.nn.softmax(jnp.einsum("bsnh,btnh->bnts", k, q))
    return x + jnp.einsum("btnh,nhe->bte", jnp.einsum("bnts,bsnh->btnh", p, v), kernels[3])


def _matrices(x: Any, *kernels: Any) -> Any:
    """The same as products of matrices per head, with the heads before the tokens."""
    _, heads, size = kernels[0].shape
    flat = [kernel.reshape(-1, heads * size) for kernel in kernels[:3]]
    q, k, v = ((x @ kernel).reshape(*x.shape[:2], heads, size).transpose(0, 2, 1, 3) for kernel in flat)
    p = jax.nn.softmax(q @ k.swapaxes(2, 3))
    return x + (p @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ kernels[3].reshape(heads * size, -1)


def _single(x: Any, *kernels: Any) -> Any:
    """Attention without heads."""
    q, k, v = (x @ kernel.reshape(x.shape[2], -1) for kernel in kernels[:3])
    return x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ kernels[3].reshape(-1, x.shape[2])


def _step(attention: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *a: (attention(*a) ** 2).sum(), argnums=(0, 1, 2, 3, 4))


def _arguments(batch: int, tokens: int, heads: int, size: int) -> list[Any]:
    width = heads * size
    shapes = [(batch, tokens, width), *[(width, heads, size)] * 3, (heads, size, width)]
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def _graph(function: Callable[..., Any], *args: Any) -> Graph:
    closed = jax.make_jaxpr(function)(*args)
    return build_graph(
        closed,
        argument_paths=[f"a{i}" for i in range(len(closed.in_avals))],
        result_paths=[f"r{i}" for i in range(len(closed.out_avals))],
    )


#: form, batch, tokens, heads, their size -> whether all products go to cuBLAS
SEEN = {
    (_einsums, 8, 7, 4, 16): True,  # tokens
    (_einsums, 2, 12, 2, 16): True,
    (_einsums, 8, 24, 4, 16): True,
    (_einsums, 8, 197, 4, 16): True,
    (_einsums, 8, 8, 4, 16): False,
    (_einsums, 8, 32, 4, 16): False,
    (_einsums, 1, 10, 4, 16): False,  # of one sequence, which joins nothing
    (_einsums, 96, 16, 4, 7): True,  # elements of a head
    (_einsums, 96, 16, 4, 24): True,
    (_einsums, 96, 16, 1, 7): False,
    (_einsums, 96, 16, 7, 16): False,  # heads themselves may be odd
    (_matrices, 8, 7, 4, 16): False,
    (_matrices, 8, 197, 4, 16): False,
    (_single, 96, 10, 1, 24): False,
}


@pytest.mark.parametrize(("case", "expected"), SEEN.items(), ids=lambda v: v[0].__name__ if isinstance(v, tuple) else v)
def test_the_rule(case: tuple[Any, ...], expected: bool) -> None:
    assert leaves_triton(_graph(_step(case[0]), *_arguments(*case[1:]))) is expected


def test_plain_products_never_leave_and_complex_ones_always() -> None:
    assert not leaves_triton(_graph(jnp.matmul, jnp.zeros((64, 197)), jnp.zeros((197, 10))))
    assert leaves_triton(_graph(jnp.matmul, jnp.zeros((64, 64), "complex64"), jnp.zeros((64, 8), "complex64")))


@needs_cuda
@pytest.mark.parametrize(("case", "expected"), SEEN.items(), ids=lambda v: v[0].__name__ if isinstance(v, tuple) else v)
def test_the_compiler_finds_no_tiles_either(case: tuple[Any, ...], expected: bool) -> None:
    whole = NamedSharding(compile_only_mesh(parse_target("h100:1"), ("x",), (1,)), PartitionSpec())
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in _arguments(*case[1:])]
    lowered = jax.jit(_step(case[0])).lower(*args)
    options = parse_target("h100:1").compiler_options
    if expected:
        with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
            lowered.compile(compiler_options=options)
    else:
        assert "__cublas" not in lowered.compile(compiler_options=options).as_text()

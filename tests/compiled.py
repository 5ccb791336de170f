"""Compiles a small function for a target without hardware and sums what each collective kind sends."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding

import autoshard_ilp as autoshard
from autoshard_ilp.costs.collectives import ring_bytes_per_device
from autoshard_ilp.sharding import Layout, to_partition_spec
from autoshard_ilp.verify import compile_only_mesh, parse_collectives, parse_target

NAMES, SIZES = ("data", "model"), (2, 4)

needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason='needs pip install "autoshard-ilp[cuda]"'
)

needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install "autoshard-ilp[tpu]"'
)


def unlike_jax_12(compiled: str) -> pytest.MarkDecorator:
    """Expects a test of memory on GPUs to fail with jax 0.12: what is modelled is the compiler of jax 0.10.

    Args:
        compiled: what that version's compiler holds instead.
    """
    return pytest.mark.xfail(jax.__version_info__ >= (0, 12), reason=f"XLA:GPU of jax 0.12: {compiled}", strict=True)


def mesh_of(target: str) -> Any:
    """A 2 x 4 mesh of the target's devices."""
    return compile_only_mesh(parse_target(target), NAMES, SIZES)


def sharding(mesh: Any, layout: Layout, rank: int) -> NamedSharding:
    return NamedSharding(mesh, to_partition_spec(layout, rank, NAMES))


def sent(
    function: Callable[..., Any], mesh: Any, shapes: Sequence[tuple[int, ...]], ins: Sequence[Layout], out: Layout
) -> dict[str, float]:
    """Bytes per device and kind that XLA's program of ``function`` sends (bfloat16 operands)."""
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes]
    in_shardings = tuple(sharding(mesh, lay, len(s)) for lay, s in zip(ins, shapes, strict=True))
    rank = len(jax.eval_shape(function, *args).shape)
    jitted = jax.jit(function, in_shardings=in_shardings, out_shardings=sharding(mesh, out, rank))
    found: dict[str, float] = {}
    for c in parse_collectives(jitted.lower(*args).compile().as_text()):
        found[c.kind] = found.get(c.kind, 0.0) + c.total_bytes_per_device
    return found


def predicted(collectives: Sequence[tuple[str, tuple[int, ...], float]]) -> dict[str, float]:
    """The same from (kind, mesh axes, payload bytes)."""
    total: dict[str, float] = {}
    for kind, axes, payload in collectives:
        group = math.prod(SIZES[a] for a in axes)
        total[kind] = total.get(kind, 0.0) + ring_bytes_per_device(kind, group, payload)
    return total


def peaks_on_h100s(model: Callable[[], Any], batch_size: int) -> tuple[int, int]:
    """Compiled and predicted peak in bytes of a model's training step, planned for eight H100s on one axis."""
    plan = autoshard.optimize(model, {"data": 8}, hardware="h100", batch_size=batch_size, progress=False)
    found = plan.verify("h100:8")
    assert found.compiled_peak_bytes is not None and found.predicted_peak_bytes is not None
    return found.compiled_peak_bytes, found.predicted_peak_bytes

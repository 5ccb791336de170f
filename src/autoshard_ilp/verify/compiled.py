"""Compile a plan for a mesh and ask the compiler for its figures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from autoshard_ilp.errors import TargetError
from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo_text import Module

_NO_TOOLCHAIN = ("libdevice", "ptxas", "nvlink", "nvjitlink")


def compile_planned(plan: Any, mesh: Any | None = None, *, compiler_options: Mapping[str, Any] | None = None) -> Any:
    """Compile a plan's step.

    Args:
        plan: has ``jit(mesh)`` and ``abstract_args(mesh)``.
        mesh: a ``jax.sharding.Mesh`` in place of the plan's own, compile-only devices included; None: the plan's own.
        compiler_options: options for XLA.

    Returns:
        ``jax.stages.Compiled``.

    Raises:
        TargetError: the GPU compiler misses CUDA's assembler or device library.
    """
    arguments = () if mesh is None else (mesh,)
    marked = {"marked": True} if "marked" in inspect.signature(plan.jit).parameters else {}
    lowered = plan.jit(*arguments, **marked).lower(*plan.abstract_args(*arguments))
    try:
        return lowered.compile(compiler_options=dict(compiler_options or {}))
    except Exception as error:
        if not any(word in str(error).lower() for word in _NO_TOOLCHAIN):
            raise
        raise TargetError(
            "XLA:GPU needs CUDA's assembler (ptxas) and device library (libdevice), new or old enough for the GPU. "
            f"Received from the compiler: {str(error).splitlines()[0]} Install them with: "
            'pip install "autoshard-ilp[cuda]" nvidia-cuda-nvcc-cu12 (no GPU is needed).'
        ) from error


def memory_bytes(compiled: Any) -> dict[str, int]:
    """Bytes per device of a compiled program, as XLA reports them.

    Args:
        compiled: ``jax.stages.Compiled``.

    Returns:
        ``argument``, ``output``, ``temp``, ``alias`` (outputs that reuse donated arguments), and
        ``peak`` = argument + output + temp - alias. Empty when the backend reports nothing.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    parts = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")}
    return {**parts, "peak": parts["argument"] + parts["output"] + parts["temp"] - parts["alias"]}


def flops_per_device(compiled: Any, module: Module | None = None) -> float | None:
    """Floating-point operations one device does per step.

    Matrix multiplications and convolutions are counted in the program's text, loops included, since compilers count a
    loop's body once and XLA:GPU reports nothing without a GPU. A program without any falls back on XLA's own count.

    Args:
        compiled: ``jax.stages.Compiled``.
        module: its parsed text; parsed here when None.

    Returns:
        The number; None when it cannot be told.
    """
    from autoshard_ilp.verify.hlo_text import parse_module

    counted = matmul_flops(module if module is not None else parse_module(compiled.as_text()))
    if counted:
        return float(counted)
    try:
        analysis = compiled.cost_analysis()
    except Exception:  # some backends raise instead of answering None
        return None
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    value = analysis.get("flops") if analysis else None
    return float(value) if value is not None and value >= 0 else None

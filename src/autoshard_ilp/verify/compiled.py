"""Compile a plan for a mesh and ask the compiler for its figures."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from autoshard_ilp.errors import CompileError, TargetError
from autoshard_ilp.verify.flops import matmul_flops
from autoshard_ilp.verify.hlo_text import Module

_NO_TOOLCHAIN = ("libdevice", "ptxas", "nvlink", "nvjitlink")
_OUT_OF_MEMORY = ("resource_exhausted", "ran out of memory", "out of memory")
#: "Used 18.31G of 15.75G hbm", "memory required for HLO temporaries (128.06G) exceeds available HBM (15.75G)"
_NEEDED = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)")
_NO_TRITON_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
_NO_TRITON_NORMALISATIONS = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
        CompileError: the compiler gave up, for want of memory or for another reason.
    """
    arguments = () if mesh is None else (mesh,)
    marked = {"marked": True} if "marked" in inspect.signature(plan.jit).parameters else {}
    lowered = plan.jit(*arguments, **marked).lower(*plan.abstract_args(*arguments))
    options = dict(compiler_options or {})
    try:
        return _compile(lowered, options)
    except KeyboardInterrupt as error:
        error.add_note("The compilation was interrupted; the plan is unharmed and can be verified again.")
        raise
    except MemoryError as error:
        raise CompileError(
            "The compiler must find room in this machine's own memory. Received: it ran out of it. The plan is "
            "unharmed; verify it on a machine with more memory, or verify a model of fewer layers."
        ) from error
    except Exception as error:
        explained = _explained(error)
        if explained is None:
            raise
        raise explained from error


def _compile(lowered: Any, options: dict[str, Any]) -> Any:
    """Compiles; once more without XLA:GPU's Triton products where these find no tiles, as happens for odd sizes.

    Without a GPU nothing can try which tiles work, and XLA's own choice may not fit the shape. Of a normalisation over
    what is stacked, a kernel may be made that Triton itself refuses (``scf.if``; Gemma 3n). Nor can a compiler alone
    load a program that jax has been told to keep on disk (``JAX_COMPILATION_CACHE_DIR``): jax warns and compiles again,
    and there is nothing to be done about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        try:
            return lowered.compile(compiler_options=options)
        except Exception as error:
            known = any(word in str(error).lower() for word in (*_NO_TOOLCHAIN, *_OUT_OF_MEMORY))
            if known or "xla_gpu_autotune_level" not in options:
                raise
            without = _NO_TRITON_NORMALISATIONS if "scf.if" in str(error) else _NO_TRITON_PRODUCTS
            return lowered.compile(compiler_options={**options, **without})


def _explained(error: Exception) -> Exception | None:
    """Our error for one of the compiler's; None for what is no compiler's error."""
    from jax.errors import JaxRuntimeError

    text = str(error)
    first = " ".join(text.split())[:500]
    if any(word in text.lower() for word in _NO_TOOLCHAIN):
        return TargetError(
            "XLA:GPU needs CUDA's assembler (ptxas) and device library (libdevice), new or old enough for the GPU. "
            f"Received from the compiler: {text.splitlines()[0]} Install them with: "
            'pip install "autoshard-ilp[cuda]" nvidia-cuda-nvcc-cu12 (no GPU is needed).'
        )
    if any(word in text.lower() for word in _OUT_OF_MEMORY):
        return CompileError(
            f"The compiled program must fit the target's memory. Received from its compiler: {first} The plan is "
            "unharmed; plan again with a smaller memory_budget, or with verify=True, which does so by itself.",
            needed_bytes=needed_bytes(text),
        )
    if isinstance(error, JaxRuntimeError):
        return CompileError(
            f"The target's compiler must accept the planned program. Received from it: {first} The plan is unharmed. "
            f"Installed are {installed_compilers()}; the compilers must be of the versions that this jax pins "
            '(pip install "autoshard-ilp[tpu]" or "autoshard-ilp[cuda]").'
        )
    return None


def needed_bytes(message: str) -> int | None:
    """Bytes per device that a compiler says a program needs when it refuses it; None when it does not say."""
    match = _NEEDED.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def installed_compilers() -> str:
    """Versions of jax and of the compilers' packages, as "jax 0.10.2, libtpu 0.0.30, no jax-cuda12-plugin"."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


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

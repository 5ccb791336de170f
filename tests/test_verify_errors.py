"""What can go wrong on the way to a compiled program: each its own error, and the plan unharmed."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import autoshard_ilp as autoshard
from autoshard_ilp.errors import CompileError, TargetError
from autoshard_ilp.verify import compile_only_mesh, targets
from autoshard_ilp.verify.compiled import installed_compilers, needed_bytes
from compiled import needs_cuda

MESH = {"data": 2, "model": 4}


@pytest.fixture(scope="module")
def plan():
    shapes = (jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((128, 256), "float32"))
    return autoshard.optimize_fn(lambda x, w: x @ w, shapes, MESH, hardware="cpu-host", progress=False)


class _Lowered:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def lower(self, *args):
        return self

    def compile(self, **options):
        raise self.error


def failing(plan, monkeypatch, error):
    """What verification raises when the compiler raises ``error``; afterwards the plan verifies as before."""
    before = plan.specs
    with monkeypatch.context() as patched:
        patched.setattr(type(plan), "jit", lambda self, mesh=None, marked=False: _Lowered(error))
        with pytest.raises(BaseException) as caught:
            plan.verify("cpu:8")
    assert plan.specs == before
    assert plan.verify("cpu:8").compiled_peak_bytes > 0
    return caught.value


def test_a_program_too_large_for_the_target_says_how_large(plan, monkeypatch):
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm."
    error = failing(plan, monkeypatch, jax.errors.JaxRuntimeError(text))
    assert isinstance(error, CompileError) and error.needed_bytes == round(18.5 * 2**30)
    assert "smaller memory_budget" in str(error) and "18.50G" in str(error)


def test_a_compiler_without_room_on_this_machine(plan, monkeypatch):
    error = failing(plan, monkeypatch, MemoryError())
    assert isinstance(error, CompileError) and error.needed_bytes is None and "machine" in str(error)


def test_any_other_compiler_error_names_the_installed_versions(plan, monkeypatch):
    error = failing(plan, monkeypatch, jax.errors.JaxRuntimeError("INTERNAL: unsupported StableHLO version"))
    assert isinstance(error, CompileError) and "StableHLO" in str(error)
    assert f"jax {jax.__version__}" in str(error)


def test_an_interrupted_compilation_is_an_interrupt(plan, monkeypatch):
    error = failing(plan, monkeypatch, KeyboardInterrupt())
    assert isinstance(error, KeyboardInterrupt) and "unharmed" in error.__notes__[0]


def test_errors_of_our_own_pass_through(plan, monkeypatch):
    assert isinstance(failing(plan, monkeypatch, ZeroDivisionError()), ZeroDivisionError)


@pytest.mark.parametrize("target", ["tpu-v9:8", "h100:8:8", "warp-drive", "", "tpu-v5e:2y4"])
def test_an_unknown_target(plan, target):
    with pytest.raises(TargetError, match="Received"):
        plan.verify(target)


@pytest.mark.parametrize("target", ["h100:4", "cpu:4", "tpu-v5e:4x4"])
def test_a_target_of_another_size_than_the_mesh(plan, target):
    with pytest.raises(TargetError, match="as many devices as the mesh"):
        plan.verify(target)


@pytest.mark.parametrize("answer", ["INVALID_ARGUMENT: plugin version mismatch", "NOT_FOUND: no such topology"])
def test_a_topology_or_version_that_the_compiler_refuses(monkeypatch, answer):
    def refuse(platform, name, **options):
        raise RuntimeError(answer)

    monkeypatch.setattr("autoshard_ilp._jax_compat.compile_only_devices", refuse)
    monkeypatch.setattr(targets, "_need", lambda *args: None)
    for target in ("tpu-v5e:2x4", "h100:8"):
        targets._tpu_devices.cache_clear()
        targets._gpu_devices.cache_clear()
        with pytest.raises(TargetError, match=f"{answer}.*jax {jax.__version__}"):
            compile_only_mesh(target, ("a",), (8,))
    targets._tpu_devices.cache_clear()
    targets._gpu_devices.cache_clear()


def test_packages_that_are_not_installed_are_named(monkeypatch):
    import importlib.metadata

    def version(package):
        if package != "jax":
            raise importlib.metadata.PackageNotFoundError(package)
        return "9.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_compilers().startswith("jax 9.9, no jaxlib, no libtpu")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("Used 1.5K of 1K hbm", 1536),
        ("memory required for HLO temporaries (128.06G) exceeds available HBM (15.75G)", round(128.06 * 2**30)),
        ("it is too large", None),
    ],
)
def test_what_a_compiler_needs(text, needed):
    assert needed_bytes(text) == needed


@needs_cuda
@pytest.mark.cuda
def test_gpus_are_compiled_for_without_jax_platforms_too():
    """Then jax's discovery of its CUDA plugin gives up for want of a driver."""
    code = (
        "from autoshard_ilp.verify import compile_only_mesh\n"
        "print(compile_only_mesh('h100:8', ('a',), (8,)).devices.size)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["8"], done.stderr[-2000:]


@pytest.fixture
def cache_of_programs(tmp_path):
    """What ``JAX_COMPILATION_CACHE_DIR`` asks for, with room for programs that compile in no time."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    _set(wanted)
    yield tmp_path
    _set(before)


def _set(options):
    compilation_cache.reset_cache()
    for name, value in options.items():
        jax.config.update(name, value)


@needs_cuda
@pytest.mark.cuda
def test_programs_that_jax_keeps_on_disk_are_compiled_again(plan, cache_of_programs):
    """The compiler of a machine that is not there cannot load them; jax says so in a warning, here an error."""
    first, second = plan.verify("h100:8"), plan.verify("h100:8")
    assert list(cache_of_programs.iterdir()), "jax has kept nothing"
    assert first.compiled_peak_bytes == second.compiled_peak_bytes


@pytest.mark.parametrize(
    ("refusal", "without"),
    [
        ("INTERNAL: Couldn't find output tile sizes that satisfy hlo", {"xla_gpu_enable_triton_gemm": False}),
        ("UNKNOWN: 'scf.if' op along control flow edge", {"xla_disable_hlo_passes": "triton-softmax-rewriter"}),
    ],
    ids=["products", "normalisations"],
)
def test_kernels_that_triton_refuses_are_compiled_another_way(plan, refusal, without):
    """XLA:GPU without a GPU cannot try which Triton tiles fit; for some odd sizes its own choice does not."""
    asked = []

    class Tiled(_Lowered):
        def compile(self, compiler_options):
            asked.append(compiler_options)
            if len(asked) == 1:
                raise jax.errors.JaxRuntimeError(refusal)
            return plan.jit().lower(*plan.abstract_args()).compile()

    from autoshard_ilp.verify.compiled import compile_planned

    jitted = type("FakePlan", (), {"jit": lambda self: Tiled(None), "abstract_args": lambda self: ()})()
    compile_planned(jitted, compiler_options={"xla_gpu_autotune_level": 0})
    assert asked == [
        {"xla_gpu_autotune_level": 0},
        {"xla_gpu_autotune_level": 0, **without},
    ]

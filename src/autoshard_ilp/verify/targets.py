"""Compilers without their hardware: meshes of compile-only devices for TPUs and GPUs.

XLA:TPU and XLA:GPU compile ahead of time from a description of the machine. jax reaches both through
``jax.experimental.topologies``; what it needs is the compiler's library (``libtpu``, or the CUDA plugin with its PJRT
library), not a device. ``JAX_PLATFORMS=cpu`` may stay set: it chooses the process's own devices, while a topology loads
its library on request. Both libraries can be loaded in one process.

* TPU: ``get_topology_desc("v5e:4x4", platform="tpu")``. On v4, ``chip_config_name="megacore"`` makes one device of a
  chip's two cores, as jax does there. Where no TPU is attached, four environment variables are set unless they are
  already: ``TPU_SKIP_MDS_QUERY`` keeps libtpu from asking a metadata server that only Google's machines have,
  ``ALLOW_MULTIPLE_LIBTPU_LOAD`` from claiming a machine-wide lock (two processes may then compile side by side),
  ``TPU_LOG_DIR`` from writing log files, ``TPU_WORKER_HOSTNAMES`` from complaining that there are no workers.
* GPU: ``get_topology_desc(platform="cuda", topology="1x1x8", target_config=...)``; the topology is NVLink domains x
  hosts x GPUs per host, and ``target_config`` the GPU's figures as the text form of XLA's GpuTargetConfigProto
  (``gpus.toml``). Compiled with ``xla_gpu_autotune_level=0``, since there is nothing to time kernels on. XLA:GPU also
  wants CUDA's ``ptxas`` and ``libdevice``: a CUDA toolkit, or the package ``nvidia-cuda-nvcc-cu12``, which also serves
  old GPUs such as V100 that newer toolkits dropped.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autoshard_ilp.errors import TargetError
from autoshard_ilp.verify.compiled import installed_compilers

_TEXT = re.compile(r"([a-z0-9]+(?:[-_][a-z0-9]+)*)(?::(\d+(?:x\d+)*))?", re.IGNORECASE)


_WITHOUT_TPU: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class _Chip:
    """A TPU generation: libtpu's name for it, dimensions of its torus, devices per chip, how axes wrap around."""

    topology_name: str
    dims: int
    devices_per_chip: int = 1
    options: tuple[tuple[str, str], ...] = ()
    aliases: tuple[str, ...] = ()


_TPUS: Mapping[str, _Chip] = {
    "v4": _Chip("v4", 3, options=(("chip_config_name", "megacore"),)),
    "v5e": _Chip("v5e", 2, aliases=("v5lite", "v5litepod")),
    "v5p": _Chip("v5p", 3, aliases=("v5",)),
    "v6e": _Chip("v6e", 2, aliases=("v6", "trillium")),
    "7x": _Chip("tpu7x", 3, devices_per_chip=2, aliases=("v7x", "tpu7x", "v7", "ironwood")),
}
_HELP = (
    "A target is a kind of hardware and its size: tpu-v4:2x2x2, tpu-v5e:4x4, tpu-v5p:2x2x2, tpu-v6e:4x4, "
    "tpu-7x:2x2x1 (chips along each axis of the torus, or a number of chips such as tpu-v5e:16), v100:8, a100-40:8, "
    "a100-80:8, l4:8, h100:8, h200:8, b200:8, gb200:72 (GPUs, or hosts x GPUs such as h100:2x8), cpu:8. "
    "Without a size the mesh's own size is taken."
)


@dataclass(frozen=True)
class Target:
    """Hardware to compile for.

    Attributes:
        platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        kind: ``"v5e"``, ``"h100"``, ``"cpu"``: a key of the tables of this module or of ``gpus.toml``.
        shape: chips along each torus axis; or hosts and GPUs per host; or a single count; empty: as the mesh needs.
    """

    platform: str
    kind: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = f"tpu-{self.kind}" if self.platform == "tpu" else self.kind
        one_host = self.platform == "gpu" and len(self.shape) == 2 and self.shape[0] == 1
        shape = self.shape[1:] if one_host else self.shape
        return f"{name}:{'x'.join(map(str, shape))}" if shape else name

    @property
    def devices_per_chip(self) -> int:
        """jax devices that one chip shows up as."""
        return _TPUS[self.kind].devices_per_chip if self.platform == "tpu" else 1

    @property
    def n_devices(self) -> int | None:
        """Number of jax devices; None when the target takes the mesh's size."""
        return math.prod(self.shape) * self.devices_per_chip if self.shape else None

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options for ``jax.stages.Lowered.compile``."""
        return {"xla_gpu_autotune_level": 0} if self.platform == "gpu" else {}


@cache
def gpu_figures() -> Mapping[str, Mapping[str, Any]]:
    """Figures of every GPU that can be compiled for, by name (``gpus.toml``)."""
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


def parse_target(text: str | Target) -> Target:
    """Read a target such as ``"tpu-v5e:4x4"``, ``"h100:8"`` or ``"cpu:8"``.

    Names of hardware profiles are targets too; case, ``_`` for ``-`` and the prefixes ``tpu-``, ``gpu-``, ``nvidia-``
    do not matter.

    Raises:
        TargetError: an unknown kind or a size that makes no sense for it; lists the known forms.
    """
    if isinstance(text, Target):
        return text
    match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise TargetError(f"{_HELP} Received: {text!r}.")
    name = match[1].lower().replace("_", "-")
    shape = tuple(int(size) for size in match[2].split("x")) if match[2] else ()
    if any(size < 1 for size in shape):
        raise TargetError(f"Every size of a target is at least 1. Received: {text!r}. {_HELP}")
    target = _named(name, shape)
    if target is None:
        raise TargetError(f"{_HELP} Received: {text!r}.")
    _check_shape(target, text)
    return target


def _named(name: str, shape: tuple[int, ...]) -> Target | None:
    if name in ("cpu", "cpu-host", "host"):
        return Target("cpu", "cpu", shape)
    bare = re.sub(r"^(tpu|gpu|nvidia|cuda)-", "", name)
    for kind, chip in _TPUS.items():
        if bare in (kind, *chip.aliases) and not name.startswith(("gpu", "nvidia", "cuda")):
            return Target("tpu", kind, shape)
    plain = re.sub(r"-(sxm\d?|hgx|dgx|nvl72)\b", "", bare)
    plain = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40"}.get(plain, plain)
    return Target("gpu", plain, shape) if plain in gpu_figures() and not name.startswith("tpu") else None


def _check_shape(target: Target, text: Any) -> None:
    shape = target.shape
    if target.platform == "tpu":
        dims = _TPUS[target.kind].dims
        if len(shape) not in (0, 1, dims):
            raise TargetError(
                f"A {target.kind} slice has {dims} dimensions. Received: {text!r}. Write for example "
                f"tpu-{target.kind}:{'x'.join(['2'] * dims)}, or a number of chips."
            )
    elif len(shape) > (2 if target.platform == "gpu" else 1):
        raise TargetError(f"{_HELP} Received: {text!r}.")


def sized(target: Target, n_devices: int) -> Target:
    """The target with its full shape, for a mesh of ``n_devices``.

    A TPU count becomes the most cubic slice (the shapes that are sold are); a GPU count becomes whole hosts.

    Raises:
        TargetError: the target has another number of devices, or no such slice or cluster exists.
    """
    have = target.n_devices
    if have is not None and have != n_devices:
        raise TargetError(
            f"A target has as many devices as the mesh. Received: {target} with {have} device(s) and a mesh of "
            f"{n_devices}. Choose a target or a mesh of the same size, or leave the size of the target out."
        )
    if target.platform == "cpu":
        return Target("cpu", "cpu", (n_devices,))
    if target.platform == "gpu":
        return _sized_gpu(target, n_devices)
    chips, rest = divmod(n_devices, target.devices_per_chip)
    if rest:
        raise TargetError(f"A {target.kind} chip is {target.devices_per_chip} devices. Received: {n_devices} devices.")
    dims = _TPUS[target.kind].dims
    return target if len(target.shape) == dims else Target("tpu", target.kind, _cubic(chips, dims))


def _sized_gpu(target: Target, n_devices: int) -> Target:
    per_host = int(gpu_figures()[target.kind]["devices_per_host"])
    if len(target.shape) == 2:
        return target
    if n_devices <= per_host:
        return Target("gpu", target.kind, (1, n_devices))
    if n_devices % per_host:
        raise TargetError(
            f"More than {per_host} {target.kind} GPUs fill whole hosts of {per_host}. Received: {n_devices} devices. "
            f"Write hosts x GPUs, such as {target.kind}:{n_devices // 2}x2, for a cluster of another build."
        )
    return Target("gpu", target.kind, (n_devices // per_host, per_host))


def _cubic(count: int, dims: int) -> tuple[int, ...]:
    """The factorisation of ``count`` into ``dims`` sizes with the least sum; sizes of 1 come last, then small first."""

    def factorisations(n: int, parts: int, least: int) -> list[tuple[int, ...]]:
        if parts == 1:
            return [(n,)] if n >= least else []
        return [
            (size, *more)
            for size in range(least, n + 1)
            if n % size == 0
            for more in factorisations(n // size, parts - 1, size)
        ]

    best = min(factorisations(count, dims, 1), key=lambda sizes: (sum(sizes), sizes))
    return tuple(sorted(best, key=lambda size: (size == 1, size)))


def compile_only_mesh(
    target: str | Target, axis_names: Sequence[str], axis_sizes: Sequence[int], *, devices: Sequence[Any] | None = None
) -> Any:
    """A ``jax.sharding.Mesh`` that programs can be compiled for, but not run on (for ``cpu``: run on as well).

    On TPU the devices are arranged as ``jax.make_mesh`` would: each mesh axis follows the torus where it can.

    Args:
        target: as :func:`parse_target` reads it.
        axis_names: names of the mesh axes, major to minor.
        axis_sizes: devices along each.
        devices: only for ``cpu``: the devices to take instead of jax's CPU devices.

    Raises:
        TargetError: unknown target, another number of devices, or the compiler's package is not installed.
    """
    from jax.sharding import AxisType, Mesh

    shape = tuple(int(size) for size in axis_sizes)
    full = sized(parse_target(target), math.prod(shape))
    if full.platform == "tpu":
        array = _along_torus(_tpu_devices(full), shape)
    else:
        found = _gpu_devices(full) if full.platform == "gpu" else tuple(devices or _cpu_devices(math.prod(shape)))
        array = _reshaped(found, shape)
    return Mesh(array, tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape))


def _reshaped(devices: Sequence[Any], shape: tuple[int, ...]) -> Any:
    import numpy as np

    array = np.empty(len(devices), dtype=object)
    array[:] = list(devices)
    return array.reshape(shape)


def _along_torus(devices: Sequence[Any], shape: tuple[int, ...]) -> Any:
    from jax.experimental import mesh_utils

    for split in (False, True):  # whole torus axes first; splitting one is the second choice
        try:
            return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=split)
        except (NotImplementedError, ValueError, AssertionError):
            continue
    return _reshaped(devices, shape)


def _cpu_devices(n_devices: int) -> tuple[Any, ...]:
    import jax

    found = jax.devices("cpu")
    if len(found) < n_devices:
        raise TargetError(
            f"The CPU target needs as many virtual devices as the mesh. Received: {len(found)} for a mesh of "
            f'{n_devices}. Call jax.config.update("jax_num_cpu_devices", {n_devices}) before anything else uses JAX, '
            f"or set XLA_FLAGS=--xla_force_host_platform_device_count={n_devices} in the shell."
        )
    return tuple(found[:n_devices])


def _need(packages: Sequence[str], extra: str, target: Target) -> None:
    if not any(importlib.util.find_spec(package) for package in packages):
        raise TargetError(
            f"Compiling for {target} needs its compiler. Received: none of {', '.join(packages)} is installed. "
            f'Install it with: pip install "autoshard-ilp[{extra}]" (no accelerator is needed).'
        )


@cache
def _tpu_devices(target: Target) -> tuple[Any, ...]:
    """Compile-only devices of a full TPU slice."""
    from autoshard_ilp._jax_compat import compile_only_devices

    _need(("libtpu",), "tpu", target)
    if not any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0")):
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    chip = _TPUS[target.kind]
    sizes = (*target.shape, 1, 1)[:3]
    options: dict[str, Any] = dict(chip.options)
    # One host holds a 2x2 plane of chips, or less where an axis is odd.
    options["chips_per_host_bounds"] = tuple(2 if axis < 2 and size % 2 == 0 else 1 for axis, size in enumerate(sizes))
    options["wrap"] = _wraps(chip, target.shape)
    name = f"{chip.topology_name}:{'x'.join(map(str, target.shape))}"
    try:
        return compile_only_devices("tpu", name, **options)
    except Exception as error:
        raise TargetError(
            f"The TPU compiler describes a slice before it compiles for it. Received: {target}, answered with: {error} "
            f"Choose a slice shape that is sold, and a libtpu of the version that this jax pins "
            f'(pip install "autoshard-ilp[tpu]"); installed are {installed_compilers()}.'
        ) from error


def _wraps(chip: _Chip, shape: tuple[int, ...]) -> tuple[bool, bool, bool]:
    """Which torus axes close into rings: on v5e and v6e those of 16 chips; else all of them in multiples of 4x4x4.

    Source: Google Cloud's pages on the TPU versions; and the slice table of MaxText.
    """
    if chip.dims == 2:
        x, y = (size == 16 for size in shape)
        return (x, y, False)
    return (all(size % 4 == 0 for size in shape),) * 3


@cache
def _gpu_devices(target: Target) -> tuple[Any, ...]:
    """Compile-only devices of whole hosts of GPUs."""
    from autoshard_ilp._jax_compat import compile_only_devices

    _need(("jax_cuda12_plugin", "jax_cuda13_plugin"), "cuda", target)
    figures = gpu_figures()[target.kind]
    hosts, per_host = target.shape
    in_domain = math.gcd(hosts, int(figures["hosts_per_domain"]))
    topology = f"{hosts // in_domain}x{in_domain}x{per_host}"
    try:
        return compile_only_devices("cuda", "", topology=topology, target_config=target_config(figures))
    except Exception as error:
        raise TargetError(
            f"The GPU compiler could not be set up for {target}: {error}. Check that jax, its CUDA plugin and its "
            f'PJRT library have one version: pip install "autoshard-ilp[cuda]"; installed are {installed_compilers()}.'
        ) from error


def target_config(figures: Mapping[str, Any]) -> str:
    """Text form of XLA's ``GpuTargetConfigProto`` from the figures of one GPU.

    The limits that all NVIDIA GPUs since Volta share (threads per block, registers, grid sizes) are those of the CUDA
    programming guide's table of technical specifications.
    """
    major, minor, accelerated = re.fullmatch(r"(\d+)\.(\d+)(a?)", figures["compute_capability"]).groups()  # type: ignore[union-attr]
    copied = (
        "core_count",
        "fpus_per_core",
        "clock_rate_ghz",
        "device_memory_size",
        "memory_bandwidth",
        "l2_cache_size",
        "shared_memory_per_core",
        "shared_memory_per_block_optin",
    )
    shared = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 49152,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
    }
    lines = [f"  {name}: {value}" for name, value in {**{name: figures[name] for name in copied}, **shared}.items()]
    extension = " feature_extension: ACCELERATED_FEATURES" if accelerated else ""
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}")
    return (
        "gpu_device_info {\n" + "\n".join(lines) + "\n}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        f'device_description_str: "{figures["description"]}"\n'
    )

"""Hardware profiles: what one device and its links can do, each figure with its source.

A profile is a TOML file in ``cost_models/``; every figure there is ``{value = ..., source = "..."}``. This module
reads, validates and holds it. One *device* is what JAX calls a device (a TPU7x chip is two of them). Bandwidths are
bytes per second in one direction, decimal. Time of one operation is the roofline of Williams, Waterman and Patterson
(Communications of the ACM 52(4), 2009): the slower of arithmetic and memory.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from autoshard_ilp.errors import ProfileError

COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
LINK_KINDS = ("torus", "switch", "pcie", "host")

SPLIT_LENGTH = 1024
"""Products in the shortest sum that is worth a processor of its own (128 x 4096 x 1024 on H200: the 8 tiles of the
result take what 32 would)."""


@dataclass(frozen=True)
class Torus:
    """Shape rules of a torus interconnect, counted in chips.

    Attributes:
        dims: physical axes (2 or 3).
        wrap_rule: "all-multiples-of": every axis wraps when all sizes are multiples of ``wrap_size``;
            "axis-equals": an axis wraps when its size is ``wrap_size``.
        slice_shapes: shapes that can be rented, such as (2, 4); other counts get the most cube-like shape.
        ring_shapes: shapes that a single mesh axis covering everything visits as a closed ring.
        cores_per_chip: JAX devices per chip; they share the chip's links.
        core_bytes_per_s: between the devices of one chip, one way.
    """

    dims: int
    wrap_rule: str
    wrap_size: int
    slice_shapes: tuple[tuple[int, ...], ...]
    ring_shapes: tuple[tuple[int, ...], ...] = ()
    cores_per_chip: int = 1
    core_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class HardwareProfile:
    """One kind of device and its links. Use ``dataclasses.replace`` to ask "what if".

    Attributes:
        family: "tpu", "gpu" or "cpu".
        device_kinds: ``jax.Device.device_kind`` strings that identify the device.
        peak_flops_per_s_by_dtype: dense matrix peak per device; a multiply-add counts as two.
        float32_runs_as: the dtype whose rate a float32 matmul gets at JAX's default precision.
        matmul_efficiency, memory_efficiency, link_efficiency, all_to_all_efficiency, network_efficiency: the share
            of the nominal figure that large transfers or matmuls reach.
        kernel_launch_seconds: fixed time per kernel, not part of :meth:`roofline_seconds`.
        matmul_tile: side of the part of a product that one processor computes at a time; smaller ones are padded to it.
        processors: those that work on one product (GPUs: streaming multiprocessors); 0: not counted.
        unaligned_efficiency: share of the rate of products that is left where rows do not begin at multiples of 16
            bytes.
        convolution_efficiency: share of the rate of products that convolutions reach.
        random_words_per_s: 32-bit words of random bits; None: they cost their bytes only.
        usable_memory_bytes: what a program may use per device; the default memory budget.
        vector_memory_bytes: of short-lived buffers, kept on the chip instead of in device memory (TPUs); 0: counted
            like all others.
        vector_idle_copies: for how long a buffer stays there that nobody reads, in copies of the whole vector memory.
        fused_kernels: "more", or "fewer" where XLA:TPU writes softmaxes for the products of attention, and error
            functions for the backward pass; where XLA:GPU writes long functions, such as the exponentials of logits,
            rather than compute them again from less.
        heap_loss_share: holes between the buffers of a training step, as a share of those that are live (TPUs).
        link_kind: "torus" (``link_bytes_per_s`` is one link), "switch", "pcie" or "host" (one device's whole egress).
        hop_seconds: per step between neighbours inside a domain.
        call_seconds_by_kind: fixed time per collective.
        domain_devices: devices joined by the fast links: a pod, a node, an NVLink domain.
        host_devices: devices that are rented together; None: a whole domain.
        shared_bus_bytes_per_s: what all devices of a domain share (pcie and host only).
        in_switch_bytes_per_s: all-reduce *bus bandwidth* with reduction in the switch, for groups of at least
            ``in_switch_min_group``; None: the switch only forwards.
        network_bytes_per_s: per device, between domains; None: there is no network, the domain is unbounded.
        efficiency_by_kind: what a kind of collective reaches relative to the formula over the links; above 1 where it
            is better, 1 where nothing was measured.
        overlap_by_kind: share of each collective that hides behind compute; 0.0 hides nothing.
        figure_sources: {"section.key": source text}.
        sources: {short name of a source: where it is found}.
        residuals: per kind of measurement, how far this profile is from what ``calibrate`` measured.
    """

    name: str
    family: str
    description: str
    device_kinds: tuple[str, ...]
    peak_flops_per_s_by_dtype: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    float32_runs_as: str
    kernel_launch_seconds: float
    matmul_tile: int
    memory_bytes: int
    usable_memory_bytes: int
    memory_bytes_per_s: float
    memory_efficiency: float
    link_kind: str
    link_bytes_per_s: float
    link_efficiency: float
    hop_seconds: float
    domain_devices: int
    call_seconds_by_kind: Mapping[str, float] = field(hash=False)
    all_to_all_efficiency: float | None = None
    vector_memory_bytes: int = 0
    vector_idle_copies: float = 8.0
    heap_loss_share: float = 0.0
    fused_kernels: str = "more"
    host_devices: int | None = None
    shared_bus_bytes_per_s: float | None = None
    in_switch_bytes_per_s: float | None = None
    in_switch_min_group: int = 2
    torus: Torus | None = None
    network_bytes_per_s: float | None = None
    network_efficiency: float = 1.0
    network_hop_seconds: float = 0.0
    processors: int = 0
    unaligned_efficiency: float = 1.0
    convolution_efficiency: float = 1.0
    random_words_per_s: float | None = None
    overlap_by_kind: Mapping[str, float] = field(hash=False, default_factory=dict)
    efficiency_by_kind: Mapping[str, float] = field(hash=False, default_factory=dict)
    figure_sources: Mapping[str, str] = field(hash=False, compare=False, repr=False, default_factory=dict)
    sources: Mapping[str, str] = field(hash=False, compare=False, repr=False, default_factory=dict)
    residuals: Mapping[str, Mapping[str, float]] = field(hash=False, compare=False, repr=False, default_factory=dict)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Matmul FLOP/s that a device reaches at JAX's default precision: peak times ``matmul_efficiency``.

        Args:
            dtype: numpy-style name such as "bfloat16", "float32", "float8_e4m3fn", "int8". float32 runs as
                ``float32_runs_as``; small integers as int8, and a type the device lacks as the next wider one.
        """
        peaks = self.peak_flops_per_s_by_dtype
        for candidate in _fallbacks(str(dtype), self.float32_runs_as):
            if candidate in peaks:
                return peaks[candidate] * self.matmul_efficiency
        return min(peaks.values()) * self.matmul_efficiency

    def figures(self) -> dict[str, Any]:
        """Every figure that this profile has, by its key in a TOML: "links.bytes_per_s" -> 4.5e11."""
        by_kind = {"call_seconds": self.call_seconds_by_kind, "overlap": self.overlap_by_kind}
        by_kind |= {
            "peak_flops_per_s": self.peak_flops_per_s_by_dtype,
            "collective_efficiency": self.efficiency_by_kind,
        }
        found: dict[str, Any] = {}
        for section, keys in _SCHEMA.items():
            for key, figure in keys.items():
                if section in by_kind:
                    value = by_kind[section].get(key)
                else:
                    value = getattr(self.torus if section == "torus" else self, figure.field, None)
                absent = self.network_bytes_per_s is None if section == "network" else False
                unset = value == _DEFAULTS.get(figure.field) and f"{section}.{key}" not in self.figure_sources
                if value is not None and not absent and not unset:
                    found[f"{section}.{key}"] = value
        return found

    def product_seconds(
        self, m: float, k: float, n: float, *, count: float = 1.0, dtype: str = "bfloat16", aligned: bool = True
    ) -> float:
        """Seconds of arithmetic of ``count`` products of m x k and k x n matrices on one device.

        A processor computes one tile of the result at a time, so a result of few tiles leaves processors idle (NVIDIA,
        "Matrix Multiplication Background User's Guide": tile quantisation). Long sums are split among processors.

        Args:
            aligned: whether all rows begin at multiples of 16 bytes.
        """
        seconds = 2.0 * count * m * k * n / self.peak_flops_per_s(dtype)
        if self.processors:
            tiles = count * math.ceil(m / self.matmul_tile) * math.ceil(n / self.matmul_tile)
            seconds /= min(1.0, tiles * max(1, k // SPLIT_LENGTH) / self.processors)
        return seconds if aligned else seconds / self.unaligned_efficiency

    def roofline_seconds(self, flops: float, bytes_moved: float, dtype: str = "bfloat16") -> float:
        """max(compute, memory) seconds on one device; ``kernel_launch_seconds`` comes on top, once per kernel.

        Args:
            flops: floating point operations of this device's share (a multiply-add counts as two).
            bytes_moved: bytes read plus written in device memory.
            dtype: of the multiplication.
        """
        memory_seconds = bytes_moved / (self.memory_bytes_per_s * self.memory_efficiency)
        return max(flops / self.peak_flops_per_s(dtype), memory_seconds)


def _fallbacks(dtype: str, float32_runs_as: str) -> tuple[str, ...]:
    """Rates to try for a dtype, best first. A narrow type without its own unit is computed in the next wider one."""
    wide = (float32_runs_as, "tfloat32", "float32")
    half = ("bfloat16", "float16", *wide)
    if dtype == "float64" or dtype == "complex128":
        return ("float64", "float32")
    if dtype.startswith("float8"):
        return ("float8", *half)
    if dtype in ("int8", "uint8", "int4", "uint4", "int2", "uint2", "bool"):
        return ("int8", *half)
    if dtype.startswith("float4"):
        return ("float4", "float8", *half)
    if dtype == "float16":
        return ("float16", "bfloat16", *wide)
    if dtype == "bfloat16":
        # Without a bfloat16 unit the operands are widened, not narrowed to float16's smaller range.
        return ("bfloat16", *wide)
    if dtype == "float32" or dtype == "complex64":
        return wide
    return ("float32", float32_runs_as)


@dataclass(frozen=True)
class _Figure:
    """What the schema says about one key: the profile's field, its type and its range."""

    field: str
    type: type
    low: float = 0.0
    high: float = math.inf
    required: bool = True
    choices: tuple[str, ...] = ()


def _share(name: str, required: bool = True) -> _Figure:
    return _Figure(name, float, 1e-6, 1.0, required)


_SCHEMA: dict[str, dict[str, _Figure]] = {
    "compute": {
        "matmul_efficiency": _share("matmul_efficiency"),
        "float32_runs_as": _Figure("float32_runs_as", str, choices=("bfloat16", "tfloat32", "float32")),
        "kernel_launch_seconds": _Figure("kernel_launch_seconds", float),
        "matmul_tile": _Figure("matmul_tile", int, 1),
        "processors": _Figure("processors", int, 1, required=False),
        "unaligned_efficiency": _share("unaligned_efficiency", required=False),
        "convolution_efficiency": _share("convolution_efficiency", required=False),
        "random_words_per_s": _Figure("random_words_per_s", float, 1.0, required=False),
        "fused_kernels": _Figure("fused_kernels", str, required=False, choices=("more", "fewer")),
    },
    "memory": {
        "total_bytes": _Figure("memory_bytes", int, 1),
        "usable_bytes": _Figure("usable_memory_bytes", int, 1),
        "bytes_per_s": _Figure("memory_bytes_per_s", float, 1.0),
        "efficiency": _share("memory_efficiency"),
        "vector_bytes": _Figure("vector_memory_bytes", int, 0, required=False),
        "vector_idle_copies": _Figure("vector_idle_copies", float, 0.01, required=False),
        "heap_loss": _share("heap_loss_share", required=False),
    },
    "links": {
        "kind": _Figure("link_kind", str, choices=LINK_KINDS),
        "bytes_per_s": _Figure("link_bytes_per_s", float, 1.0),
        "efficiency": _share("link_efficiency"),
        "all_to_all_efficiency": _share("all_to_all_efficiency", required=False),
        "hop_seconds": _Figure("hop_seconds", float),
        "domain_devices": _Figure("domain_devices", int, 1),
        "host_devices": _Figure("host_devices", int, 1, required=False),
        "shared_bus_bytes_per_s": _Figure("shared_bus_bytes_per_s", float, 1.0, required=False),
        "in_switch_bytes_per_s": _Figure("in_switch_bytes_per_s", float, 1.0, required=False),
        "in_switch_min_group": _Figure("in_switch_min_group", int, 2, required=False),
    },
    "torus": {
        "dims": _Figure("dims", int, 1, 3),
        "wrap_rule": _Figure("wrap_rule", str, choices=("all-multiples-of", "axis-equals")),
        "wrap_size": _Figure("wrap_size", int, 1),
        "slice_shapes": _Figure("slice_shapes", list),
        "ring_shapes": _Figure("ring_shapes", list, required=False),
        "cores_per_chip": _Figure("cores_per_chip", int, 1, required=False),
        "core_bytes_per_s": _Figure("core_bytes_per_s", float, 1.0, required=False),
    },
    "network": {
        "bytes_per_s": _Figure("network_bytes_per_s", float, 1.0),
        "efficiency": _share("network_efficiency"),
        "hop_seconds": _Figure("network_hop_seconds", float),
    },
    "call_seconds": {kind: _Figure(kind, float) for kind in COLLECTIVE_KINDS},
    "overlap": {kind: _Figure(kind, float, 0.0, 1.0) for kind in COLLECTIVE_KINDS},
    "collective_efficiency": {kind: _Figure(kind, float, 1e-6, required=False) for kind in COLLECTIVE_KINDS},
}
_DTYPES = ("bfloat16", "float16", "tfloat32", "float32", "float64", "int8", "float8", "float4")
_SCHEMA["peak_flops_per_s"] = {
    name: _Figure(name, float, 1.0, required=name in ("float32", "float64")) for name in _DTYPES
}
_DEFAULTS = {f.name: f.default for kind in (HardwareProfile, Torus) for f in fields(kind)}
_TOP = {"name": str, "family": str, "description": str, "device_kinds": list, "sources": dict}
_OPTIONAL_SECTIONS = ("torus", "network", "collective_efficiency")


def profiles() -> list[str]:
    """Names of the packaged hardware profiles, sorted."""
    return sorted(path.stem for path in _models_folder().glob("*.toml"))


def profile_path(name: str) -> Path:
    """The file of a packaged profile: the nearest one is where a profile of your own starts.

    Raises:
        ProfileError: there is no such profile.
    """
    load_profile(name)
    return _models_folder() / f"{name}.toml"


def profile_for_device_kind(kind: str) -> str | None:
    """Name of the packaged profile whose ``device_kinds`` holds ``kind`` (``jax.Device.device_kind``), or None."""
    return _names_by_device_kind().get(kind.strip().lower())


@cache
def _names_by_device_kind() -> dict[str, str]:
    return {kind.lower(): name for name in profiles() for kind in load_profile(name).device_kinds}


def load_profile(name_or_path_or_profile: str | os.PathLike[str] | HardwareProfile) -> HardwareProfile:
    """The profile of a packaged name ("tpu-v5e"), of a path ending in ``.toml``, or the profile itself.

    Raises:
        ProfileError: the name is unknown, or the file is missing, unreadable or invalid; ``.key`` names the key.
    """
    if isinstance(name_or_path_or_profile, HardwareProfile):
        return name_or_path_or_profile
    if not isinstance(name_or_path_or_profile, str | os.PathLike):
        raise ProfileError(
            "hardware must be a profile name, the path of a .toml file, or a HardwareProfile. "
            f"Received: {name_or_path_or_profile!r}."
        )
    text = os.fspath(name_or_path_or_profile)
    if text.endswith(".toml"):
        return _read(Path(text))
    known = profiles()
    if text in known:
        return _packaged(text)
    near = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5) or [n for n in known if text.lower() in n]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ProfileError(
        f"hardware names a known profile or a .toml file. Received: {text!r}, which is unknown.{hint} "
        f"Known: {', '.join(known)}."
    )


@cache
def _packaged(name: str) -> HardwareProfile:
    return _read(_models_folder() / f"{name}.toml")


@cache
def _models_folder() -> Path:
    """``cost_models`` inside an installed package, or at the root of the repository in an editable install."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cost_models", package.parents[1] / "cost_models"):
        if folder.is_dir():
            return folder
    raise ProfileError(f"The packaged hardware profiles are missing next to {package}; reinstall autoshard-ilp.")


def _read(path: Path) -> HardwareProfile:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"Cannot read {path}: a hardware profile is a readable file. Received: {error.strerror or error}."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"The hardware profile {path} is not valid TOML: {error}.") from error
    return _Reader(path, data).profile()


class _Reader:
    """Validates one parsed TOML file; every complaint names the key and the file."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data
        self.figure_sources: dict[str, str] = {}

    def fail(self, key: str, problem: str) -> ProfileError:
        return ProfileError(f"Hardware profile {self.path}: key '{key}' {problem}", key=key)

    def profile(self) -> HardwareProfile:
        self.check_names("", self.data, {*_TOP, *_SCHEMA, "residuals"})
        for key, kind in _TOP.items():
            if key not in self.data:
                raise self.fail(key, "is missing.")
            if not isinstance(self.data[key], kind):
                raise self.fail(key, f"must be a {kind.__name__}. Received: {self.data[key]!r}.")
        for key, text in self.data["sources"].items():
            if not isinstance(text, str) or not text.strip():
                raise self.fail(f"sources.{key}", f"must be a non-empty text. Received: {text!r}.")
        if not all(isinstance(kind, str) for kind in self.data["device_kinds"]):
            raise self.fail("device_kinds", f"must be a list of texts. Received: {self.data['device_kinds']!r}.")
        if self.data["family"] not in ("tpu", "gpu", "cpu"):
            raise self.fail("family", f"must be one of tpu, gpu, cpu. Received: {self.data['family']!r}.")
        values = {section: self.section(section) for section in _SCHEMA if self.wanted(section)}
        self.check_combinations(values)
        by_field = {k: v for s in ("compute", "memory", "links", "network") for k, v in values.get(s, {}).items()}
        torus = Torus(**values["torus"]) if "torus" in values else None
        return HardwareProfile(
            name=self.data["name"],
            family=self.data["family"],
            description=self.data["description"],
            device_kinds=tuple(self.data["device_kinds"]),
            peak_flops_per_s_by_dtype=values["peak_flops_per_s"],
            call_seconds_by_kind=values["call_seconds"],
            overlap_by_kind=values["overlap"],
            efficiency_by_kind=values.get("collective_efficiency", {}),
            torus=torus,
            figure_sources=self.figure_sources,
            sources=dict(self.data["sources"]),
            residuals=self.residuals(),
            **by_field,
        )

    def residuals(self) -> dict[str, dict[str, float]]:
        """What calibration left unexplained; written by it, optional, and of no influence on any price."""
        table = self.data.get("residuals", {})
        if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
            raise self.fail("residuals", f"must be a table of tables. Received: {table!r}.")
        for kind, row in table.items():
            for key, value in row.items():
                self.value(f"residuals.{kind}.{key}", _Figure(key, float), value)
        return {kind: {key: float(value) for key, value in row.items()} for kind, row in table.items()}

    def wanted(self, section: str) -> bool:
        if section in self.data:
            return True
        if section not in _OPTIONAL_SECTIONS:
            raise self.fail(section, "is missing: it must be a table of figures.")
        return False

    def section(self, section: str) -> dict[str, Any]:
        table, figures = self.data[section], _SCHEMA[section]
        if not isinstance(table, dict):
            raise self.fail(section, f"must be a table of figures. Received: {table!r}.")
        self.check_names(f"{section}.", table, set(figures))
        values = {}
        for key, figure in figures.items():
            if key in table:
                values[figure.field] = self.figure(f"{section}.{key}", figure, table[key])
            elif figure.required:
                raise self.fail(f"{section}.{key}", "is missing.")
        return values

    def check_names(self, prefix: str, table: dict[str, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f" Did you mean '{prefix}{near[0]}'?" if near else f" Known: {', '.join(sorted(known))}."
                raise self.fail(prefix + key, f"is unknown.{hint}")

    def figure(self, key: str, figure: _Figure, entry: Any) -> Any:
        if not isinstance(entry, dict) or "value" not in entry:
            raise self.fail(key, f"must be written {{value = ..., source = '...'}}. Received: {entry!r}.")
        for extra in entry.keys() - {"value", "source"}:
            raise self.fail(f"{key}.{extra}", "is unknown: a figure has only 'value' and 'source'.")
        source = entry.get("source")
        sources = self.data["sources"]
        # "derived: ...", "assumption: ..." and "measured: ..." explain themselves; the rest names a key of [sources].
        first = source.replace(":", " ").replace(",", " ").split()[:1] if isinstance(source, str) else []
        if not first or (first[0] not in sources and first[0] not in ("derived", "assumption", "measured")):
            raise self.fail(
                f"{key}.source",
                "must start with a key of [sources], or be 'derived: ...', 'assumption: ...' or 'measured: ...'. "
                f"Received: {source!r}; known sources: {', '.join(sources) or 'none'}.",
            )
        self.figure_sources[key] = f"{source} ({sources[first[0]]})" if first[0] in sources else str(source)
        return self.value(key, figure, entry["value"])

    def value(self, key: str, figure: _Figure, value: Any) -> Any:
        if figure.type is list:
            return self.shapes(key, value)
        if figure.type is str:
            if value not in figure.choices:
                raise self.fail(key, f"must be one of {', '.join(figure.choices)}. Received: {value!r}.")
            return value
        numeric = isinstance(value, int if figure.type is int else int | float) and not isinstance(value, bool)
        # compared, since a whole number may be too large for isfinite
        if not numeric or not -sys.float_info.max <= value <= sys.float_info.max:
            wanted = "a whole number" if figure.type is int else "a finite number"
            raise self.fail(key, f"must be {wanted}. Received: {value!r}.")
        if not figure.low <= value <= figure.high:
            raise self.fail(key, f"must be from {figure.low:g} to {figure.high:g}. Received: {value!r}.")
        return figure.type(value)

    def shapes(self, key: str, value: Any) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(tuple(int(size) for size in text.split("x")) for text in value)
        except (AttributeError, TypeError, ValueError) as error:
            raise self.fail(key, f"must be a list of shapes such as '4x4'. Received: {value!r}.") from error

    def check_combinations(self, values: dict[str, dict[str, Any]]) -> None:
        """Figures that only make sense together."""
        kind = values["links"]["link_kind"]
        if (kind == "torus") != ("torus" in values):
            raise self.fail("torus", f"must be given exactly when links.kind is 'torus'. Received kind {kind!r}.")
        if (kind in ("pcie", "host")) != ("shared_bus_bytes_per_s" in values["links"]):
            raise self.fail(
                "links.shared_bus_bytes_per_s", f"must be given exactly when links.kind is pcie or host, not {kind!r}."
            )
        if "in_switch_bytes_per_s" in values["links"] and kind != "switch":
            raise self.fail("links.in_switch_bytes_per_s", f"needs links.kind = 'switch'. Received kind {kind!r}.")
        if values["memory"]["usable_memory_bytes"] > values["memory"]["memory_bytes"]:
            raise self.fail("memory.usable_bytes", "must not exceed memory.total_bytes.")
        torus = values.get("torus", {})
        for key in ("slice_shapes", "ring_shapes"):
            for shape in torus.get(key, ()):
                if len(shape) != torus["dims"] or min(shape) < 1:
                    raise self.fail(f"torus.{key}", f"must have {torus['dims']} positive sizes each, not {shape}.")
        if values["compute"]["float32_runs_as"] not in values["peak_flops_per_s"]:
            raise self.fail("compute.float32_runs_as", "must name a dtype of [peak_flops_per_s].")

"""Hardware profiles: every figure sourced, every mistake named, rooflines against published examples."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard_ilp.costs import profile as profile_module
from autoshard_ilp.costs.profile import HardwareProfile, load_profile, profile_for_device_kind, profiles
from autoshard_ilp.errors import ProfileError

FOLDER = Path(__file__).parents[1] / "cost_models"
EXPECTED = {
    *("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x", "a100-40", "a100-80", "h100", "h200", "b200"),
    *("gb200-nvl72", "v100", "l4", "cpu-host"),
}


def ideal(name: str) -> HardwareProfile:
    """A profile at its nominal rates, as the published examples use them."""
    return replace(load_profile(name), matmul_efficiency=1.0, memory_efficiency=1.0)


def test_all_promised_hardware_is_there() -> None:
    assert set(profiles()) >= EXPECTED


@pytest.mark.parametrize("name", profiles())
def test_every_figure_has_a_source_and_every_source_is_used(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    data = tomllib.loads(text)
    profile = load_profile(name)
    assert profile.name == name
    sections = {k: v for k, v in data.items() if isinstance(v, dict) and k != "sources"}
    figures = {f"{section}.{key}" for section, table in sections.items() for key in table}
    assert figures == set(profile.figure_sources)
    for key, source in data["sources"].items():
        assert source.startswith("https://")
        assert text.count(key) > 1, f"source {key} is cited by no figure"


@pytest.mark.parametrize("name", profiles())
def test_figures_are_in_a_sane_range_of_units(name: str) -> None:
    """Catches a figure entered in GB/s, in GiB, per chip instead of per device, or in microseconds."""
    p = load_profile(name)
    assert 2**33 < p.usable_memory_bytes <= p.memory_bytes < 2**38
    assert 1e10 <= p.memory_bytes_per_s <= 1e13
    assert all(1e10 <= rate <= 2e16 for rate in p.peak_flops_per_s_by_dtype.values())
    assert 1e9 <= p.link_bytes_per_s <= 1e12
    assert 1e-7 <= p.hop_seconds <= 1e-4
    assert all(1e-6 <= call <= 1e-4 for call in p.call_seconds_by_kind.values())
    assert p.network_bytes_per_s is None or 1e9 <= p.network_bytes_per_s < p.link_bytes_per_s
    assert (p.family == "tpu") == (p.torus is not None)
    assert hash(p) == hash(load_profile(name))


def test_device_kinds_identify_profiles() -> None:
    assert profile_for_device_kind("TPU v5 lite") == "tpu-v5e"
    assert profile_for_device_kind("TPU v6 lite") == "tpu-v6e"
    assert profile_for_device_kind("NVIDIA H100 80GB HBM3") == "h100"
    assert profile_for_device_kind("cpu") == "cpu-host"
    assert profile_for_device_kind("NVIDIA L40") is None
    kinds = [kind.lower() for name in profiles() for kind in load_profile(name).device_kinds]
    assert len(kinds) == len(set(kinds))


def test_default_precision_decides_the_rate_of_float32() -> None:
    v5e, h100, v100 = ideal("tpu-v5e"), ideal("h100"), ideal("v100")
    assert v5e.peak_flops_per_s("float32") == v5e.peak_flops_per_s("bfloat16") == 197e12
    assert h100.peak_flops_per_s("float32") == 494.5e12  # tensorfloat32
    assert v100.peak_flops_per_s("float32") == v100.peak_flops_per_s("bfloat16") == 15.7e12
    assert v100.peak_flops_per_s("float16") == 125e12
    assert h100.peak_flops_per_s("float8_e4m3fn") == h100.peak_flops_per_s("int8") == 1979e12
    assert ideal("tpu-7x").peak_flops_per_s("int8") == ideal("tpu-7x").peak_flops_per_s("bfloat16")
    assert h100.peak_flops_per_s("int32") == 67e12
    assert load_profile("h100").peak_flops_per_s("bfloat16") == pytest.approx(794.5e12, rel=0.01)
    for name in profiles():
        for dtype in ("bfloat16", "float16", "float32", "float64", "int8", "float4_e2m1fn", "complex64", "bool", "key"):
            assert load_profile(name).peak_flops_per_s(dtype) > 0


# Examples of the scaling book (jax-ml.github.io/scaling-book): what, expected microseconds, relative tolerance.
ROOFLINES = [
    # fp16 [64, 4096] x [4096, 8192] on B200, and with batch 512
    ("b200", 2 * 64 * 4096 * 8192, 2 * (64 * 4096 + 4096 * 8192 + 64 * 8192), "float16", 8.6, 0.03),
    ("b200", 2 * 512 * 4096 * 8192, 0, "float16", 15.3, 0.03),
    # float32 vector add of 2**30 elements on H100
    ("h100", 2**30, 12 * 2**30, "float32", 3846, 0.01),
    # 200e9 bfloat16 parameters over 32 v4 chips, read once
    ("tpu-v4", 0, 12.5e9, "bfloat16", 10_163, 0.03),
    # a 16 GB int8 matrix on v5e: read it, and multiply a vector
    ("tpu-v5e", 0, 16e9, "int8", 19_753, 0.03),
    ("tpu-v5e", 2.75e11, 0, "bfloat16", 1_395, 0.03),
]


@pytest.mark.parametrize(("name", "flops", "moved", "dtype", "microseconds", "tolerance"), ROOFLINES)
def test_roofline_examples(
    name: str, flops: float, moved: float, dtype: str, microseconds: float, tolerance: float
) -> None:
    assert ideal(name).roofline_seconds(flops, moved, dtype) * 1e6 == pytest.approx(microseconds, rel=tolerance)


def test_critical_batch_sizes_of_the_book() -> None:
    """Tokens per chip above which data parallelism is compute bound: FLOP/s over link bytes per second."""
    v5p, h100, b200 = ideal("tpu-v5p"), ideal("h100"), ideal("b200")
    peak = v5p.peak_flops_per_s("bfloat16")
    assert peak / (2 * v5p.link_bytes_per_s) == pytest.approx(2550, rel=0.01)
    assert peak / (6 * v5p.link_bytes_per_s) == pytest.approx(850, rel=0.01)
    # across pods: the book's 76,000 comes from rounded pod totals
    assert v5p.network_bytes_per_s is not None
    assert peak / v5p.network_bytes_per_s == pytest.approx(76_000, rel=0.05)
    for gpu, inside, beyond in ((h100, 2200, 2475), (b200, 2500, 5625)):
        assert gpu.network_bytes_per_s is not None
        assert gpu.peak_flops_per_s("bfloat16") / gpu.link_bytes_per_s == pytest.approx(inside, rel=0.01)
        assert gpu.peak_flops_per_s("bfloat16") / (8 * gpu.network_bytes_per_s) == pytest.approx(beyond, rel=0.01)


def test_a_profile_and_a_path_are_accepted(tmp_path: Path) -> None:
    profile = load_profile("h100")
    assert load_profile(profile) is profile
    assert load_profile(FOLDER / "h100.toml") == profile
    copy = tmp_path / "mine.toml"
    copy.write_text((FOLDER / "h100.toml").read_text().replace('name = "h100"', 'name = "mine"'))
    assert load_profile(str(copy)).name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "Did you mean 'h100'"),
        ("TPU-V5E", "Did you mean 'tpu-v5e'"),
        ("v5p", "Did you mean 'tpu-v5p'"),
        ("abacus", "Known: a100-40"),
        ("missing.toml", "Cannot read .*missing.toml"),
        (7, "Received: 7"),
    ],
)
def test_unknown_profiles(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(name)


BROKEN = [
    # (text of the file, what it is replaced by, key, message)
    ('family = "gpu"\n', "", "family", "is missing"),
    ('family = "gpu"', 'family = "quantum"', "family", "tpu, gpu, cpu"),
    ('family = "gpu"', 'family = "gpu"\nspeed = 3', "speed", "unknown"),
    (
        "[memory]\n",
        "[memory]\nbytes_per_second = {value = 1.0, source = 'XLA-spec'}\n",
        "memory.bytes_per_second",
        "mean",
    ),
    ("bytes_per_s = {value = 3.352e12", "bytes_per_s = {value = -1.0", "memory.bytes_per_s", "from 1 to inf"),
    ("bytes_per_s = {value = 3.352e12", "bytes_per_s = {value = nan", "memory.bytes_per_s", "finite"),
    ("bytes_per_s = {value = 3.352e12", "bytes_per_s = {value = true", "memory.bytes_per_s", "finite"),
    ("bytes_per_s = {value = 3.352e12", "bytes_per_s = {value = '3e12'", "memory.bytes_per_s", "finite"),
    ("matmul_efficiency = {value = 0.8", "matmul_efficiency = {value = 80.0", "compute.matmul_efficiency", "to 1"),
    ("domain_devices = {value = 8", "domain_devices = {value = 8.5", "links.domain_devices", "whole number"),
    ('{value = 0.9, source = "assumption', '{value = 0.9, source = "somewhere', "network.efficiency.source", "sources"),
    (
        'hop_seconds = {value = 1.9e-6, source = "NCCL-tun: ring step over NVLink, LL128"}',
        "",
        "links.hop_seconds",
        "is missing",
    ),
    ('{value = 1.9e-6, source = "NCCL-tun: ring step over NVLink, LL128"}', "1.9e-6", "links.hop_seconds", "value = "),
    (
        '{value = 1.9e-6, source = "NCCL-tun: ring step over NVLink, LL128"}',
        "{value = 1.9e-6}",
        "links.hop_seconds.source",
        "Received: None",
    ),
    (
        '{value = 1.9e-6, source = "NCCL-tun: ring step over NVLink, LL128"}',
        "{value = 1.9e-6, url = 'x'}",
        "links.hop_seconds.url",
        "only",
    ),
    ('{value = "switch"', '{value = "string"', "links.kind", "torus, switch"),
    ('{value = "switch"', '{value = "torus"', "torus", "exactly when"),
    ('{value = "switch"', '{value = "pcie"', "links.shared_bus_bytes_per_s", "exactly when"),
    ("usable_bytes = {value = 8", "usable_bytes = {value = 98", "memory.usable_bytes", "not exceed"),
    ("device_kinds = [", "device_kinds = [3, ", "device_kinds", "list of texts"),
    ("[overlap]", "[overlaps]", "overlaps", "Did you mean 'overlap'"),
    ('XLA-spec = "https', 'XLA-spec = 3\n#"https', "sources.XLA-spec", "non-empty text"),
]


@pytest.mark.parametrize(("old", "new", "key", "message"), BROKEN)
def test_a_broken_file_names_its_key(tmp_path: Path, old: str, new: str, key: str, message: str) -> None:
    text = (FOLDER / "h100.toml").read_text()
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message) as error:
        load_profile(path)
    assert error.value.key == key
    assert key in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"1x1", "2x2"', '"1x1", "2x2x2"', "torus.slice_shapes"),
        ('"1x1", "2x2"', '"1x1", "two"', "torus.slice_shapes"),
        ('["2x2", "2x4", "4x4"]', "3", "torus.ring_shapes"),
        ('float32_runs_as = {value = "bfloat16"', 'float32_runs_as = {value = "tfloat32"', "compute.float32_runs_as"),
    ],
)
def test_a_broken_torus_names_its_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = (FOLDER / "tpu-v5e.toml").read_text()
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError) as error:
        load_profile(path)
    assert error.value.key == key


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "no.toml"
    path.write_text("name = = 3")
    with pytest.raises(ProfileError, match=r"no\.toml is not valid TOML"):
        load_profile(path)


def test_profiles_are_found_in_a_wheel_too(tmp_path: Path) -> None:
    """An installed package carries cost_models inside; an editable one uses the repository's folder."""
    package = tmp_path / "autoshard_ilp"
    (package / "costs").mkdir(parents=True)
    (package / "cost_models").mkdir()
    source = Path(profile_module.__file__)
    for path in (source, source.parent / "__init__.py"):
        (package / "costs" / path.name).write_text(path.read_text())
    (package / "__init__.py").write_text("")
    (package / "errors.py").write_text((source.parents[1] / "errors.py").read_text())
    (package / "cost_models" / "only-here.toml").write_text(
        (FOLDER / "h100.toml").read_text().replace('name = "h100"', 'name = "only-here"')
    )
    code = "from autoshard_ilp.costs.profile import *; print(profiles(), load_profile('only-here').name)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "['only-here'] only-here", run.stderr


def test_reading_profiles_does_not_import_jax() -> None:
    code = "import sys, autoshard_ilp.costs.collectives; sys.exit(bool({'jax', 'keras', 'ortools'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_whole_number_beyond_floats_is_no_figure(tmp_path):
    text = profile_module.profile_path("h100").read_text(encoding="utf-8")
    line = next(x for x in text.splitlines() if x.startswith("total_bytes"))
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(line, f'total_bytes = {{value = {10**400}, source = "assumption: endless"}}'))
    with pytest.raises(ProfileError, match=r"finite|whole") as caught:
        load_profile(path)
    assert caught.value.key == "memory.total_bytes"

"""Calibration: the fit finds the figures behind the measurements; a run on CPU devices gives a usable profile."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import autoshard_ilp as autoshard
from autoshard_ilp.calibration import programs, timing
from autoshard_ilp.calibration.calibrate import calibrate
from autoshard_ilp.calibration.fit import fit, predict
from autoshard_ilp.calibration.programs import collective_loop
from autoshard_ilp.calibration.timing import PAYLOAD_BYTES, Sample, axis_groups
from autoshard_ilp.costs.profile import COLLECTIVE_KINDS
from autoshard_ilp.costs.profile_file import to_toml
from autoshard_ilp.mesh import as_mesh

MESH = as_mesh({"data": 2, "model": 4})


def samples_of(profile, mesh, noise=0.0):
    rng = np.random.default_rng(0)
    bare = [
        Sample(k, g, s, "float32", 1.0, 0.0)
        for g in axis_groups(mesh.axis_sizes)
        for k in COLLECTIVE_KINDS
        for s in PAYLOAD_BYTES
    ]
    bare += [Sample("matmul", (), 8192, "float32", 1.0, 0.0), Sample("memory", (), 1 << 27, "float32", 1.0, 0.0)]
    return [replace(s, seconds=predict(profile, mesh, s) * float(np.exp(noise * rng.standard_normal()))) for s in bare]


@pytest.mark.parametrize("name", ["cpu-host", "h100", "tpu-v5e"])
def test_the_fit_finds_the_figures_behind_the_measurements(name):
    base = autoshard.profile(name)
    calls = {k: 1.5 * v + 1e-5 for k, v in base.call_seconds_by_kind.items()}
    efficiency = dict(zip(COLLECTIVE_KINDS, (0.9, 0.5, 0.7, 0.3, 1.2), strict=True))
    truth = replace(base, call_seconds_by_kind=calls, efficiency_by_kind=efficiency, hop_seconds=3 * base.hop_seconds)
    fitted, residuals = fit(base, MESH, samples_of(truth, MESH))
    assert fitted.efficiency_by_kind == pytest.approx(efficiency, rel=1e-3)
    assert max(r.worst for kind, r in residuals.items() if kind in COLLECTIVE_KINDS) < 1e-3
    assert fitted.roofline_seconds(1e12, 0.0, "float32") == pytest.approx(truth.roofline_seconds(1e12, 0.0, "float32"))


def test_the_fit_finds_what_slows_a_gpu_down():
    base = autoshard.profile("h200")
    truth = replace(
        base,
        matmul_efficiency=0.7,
        peak_flops_per_s_by_dtype={**base.peak_flops_per_s_by_dtype, "tfloat32": 4e14},
        memory_efficiency=0.8,
        kernel_launch_seconds=5e-6,
        unaligned_efficiency=0.5,
        convolution_efficiency=0.6,
        random_words_per_s=1e11,
    )
    bare = [Sample("kernel", (), 64, "float32", 5e-6, 0.0), Sample("memory", (), 1 << 31, "float32", 1.0, 0.0)]
    for dtype in timing.MATMUL_DTYPES:
        bare += [Sample("matmul", (), n, dtype, 1.0, 0.0) for n in timing.GPU_MATMUL_SIZES]
        bare += [Sample("unaligned", (), 0, dtype, 1.0, 0.0, shape) for shape in timing.GPU_UNALIGNED_SHAPES]
        bare += [Sample("convolution", (), 0, dtype, 1.0, 0.0, shape) for shape in timing.GPU_CONVOLUTIONS]
    bare += [Sample("random", (), 1 << 34, "uint32", 1.0, 0.0)]
    mesh = as_mesh({"device": 1})
    samples = [s if s.kind == "kernel" else replace(s, seconds=predict(truth, mesh, s)) for s in bare]
    fitted, residuals = fit(base, mesh, samples)
    for dtype in timing.MATMUL_DTYPES:
        assert fitted.peak_flops_per_s(dtype) == pytest.approx(truth.peak_flops_per_s(dtype), rel=1e-3)
    for key in ("kernel_launch_seconds", "memory_efficiency", "unaligned_efficiency", "random_words_per_s"):
        assert getattr(fitted, key) == pytest.approx(getattr(truth, key), rel=1e-3), key
    assert fitted.convolution_efficiency == pytest.approx(0.6, rel=0.01)
    assert residuals["matmul"].worst < 0.01
    assert fitted.call_seconds_by_kind == base.call_seconds_by_kind and fitted.hop_seconds == base.hop_seconds


def test_a_cpu_is_as_fast_as_the_median_of_its_products():
    rates = {64: 5e10, 128: 9e10, 256: 2e11}
    samples = [Sample("matmul", (), n, "float32", 2.0 * n**3 / rate, 0.0) for n, rate in rates.items()]
    found, _ = fit(replace(autoshard.profile("cpu-host"), kernel_launch_seconds=0.0), as_mesh({"data": 8}), samples)
    assert found.peak_flops_per_s("float32") == pytest.approx(9e10)


def test_calls_that_update_leave_an_operand_for_the_next_ones():
    mesh = as_mesh({"data": 8}).concrete()
    (calls, operand), moved = programs.update_calls(mesh, 1 << 12)
    first = calls(operand, 3)
    assert moved == 7 << 12 and first.shape == (8 << 10,)
    assert calls(operand, 2) is not first


def test_what_was_counted_on_cpus_is_priced_there():
    """Random bits and kernels take time on a CPU whose profile has measured them."""

    def step(key, x):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    args = (jax.random.key(0), np.ones((8, 64), np.float32))
    base = autoshard.profile("cpu-host")
    slow = replace(base, random_words_per_s=1e3)
    plans = [autoshard.optimize_fn(step, args, {"data": 8}, hardware=p, progress=False) for p in (base, slow)]
    drawn = 8 * 64 / 8 / 1e3
    assert plans[1].cost.compute_s - plans[0].cost.compute_s >= 0.9 * drawn


@pytest.fixture
def less_memory(monkeypatch):
    """Passes over less memory than eight devices that share two cores take seconds for."""
    monkeypatch.setattr(timing, "MEMORY_BYTES", (1 << 20, 1 << 21))


@pytest.mark.usefixtures("less_memory")
def test_one_device_is_enough_for_the_compute_side(tmp_path):
    path = tmp_path / "one.toml"
    found = calibrate({"device": 1}, output=path, matmul_sizes=[64, 128], repeats=1, target_seconds=0.002)
    assert found == autoshard.profile(path)
    assert set(found.residuals) == {"matmul", "memory", "reduction"}
    assert (
        found.figure_sources["links.bytes_per_s"] == autoshard.profile("cpu-host").figure_sources["links.bytes_per_s"]
    )


@pytest.mark.parametrize(
    "loop",
    [
        lambda mesh: programs.matmul_loop(mesh, (16, 8, 33), np.dtype("float32")),
        lambda mesh: programs.matmul_loop(mesh, (16, 16, 16), np.dtype("float32")),
        lambda mesh: programs.convolution_loop(mesh, (8, 7, 16), np.dtype("float32")),
        lambda mesh: programs.reduction_loop(mesh, 1 << 14),
        lambda mesh: programs.memory_loop(mesh, 1 << 14),
        lambda mesh: programs.random_loop(mesh, 1 << 10),
    ],
)
def test_loops_for_gpus_queue_many_operations_per_iteration(loop, monkeypatch):
    """A loop of constant length inside: the host is asked once for all of it. Numbers stay finite."""
    monkeypatch.setattr(programs, "repeats", lambda mesh: 64)
    program, operand = loop(as_mesh({"device": 1}).concrete())
    assert np.isfinite(np.asarray(program(operand, np.int32(3)))).all()
    text = program.lower(operand, np.int32(3)).as_text()
    assert text.count("stablehlo.while") >= 2


def test_one_disturbed_measurement_does_not_bend_the_fit():
    base = autoshard.profile("h100")
    truth = replace(base, efficiency_by_kind=dict.fromkeys(COLLECTIVE_KINDS, 0.6))
    samples = samples_of(truth, MESH, noise=0.02)
    spoiled = next(i for i, s in enumerate(samples) if s.kind == "all-reduce" and s.size == 1 << 26)
    samples[spoiled] = replace(samples[spoiled], seconds=20 * samples[spoiled].seconds)
    fitted, residuals = fit(base, MESH, samples)
    assert fitted.efficiency_by_kind["all-reduce"] == pytest.approx(0.6, rel=0.1)
    assert residuals["all-reduce"].worst > 0.9  # and it is not hidden


@pytest.mark.parametrize("name", autoshard.profiles())
def test_a_written_profile_reads_back_equal(name, tmp_path):
    profile = autoshard.profile(name)
    path = tmp_path / "copy.toml"
    path.write_text(to_toml(profile), encoding="utf-8")
    copy = autoshard.profile(path)
    assert copy == profile
    assert copy.figure_sources == profile.figure_sources


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model")])
def test_each_timed_loop_runs_exactly_its_collective(kind, axes):
    (program, operand), moved = collective_loop(MESH.concrete(), kind, axes, 4096)
    assert moved == 4096
    text = program.lower(operand, np.int32(3)).compile().as_text()
    started = [line for line in text.splitlines() if f" {kind}(" in line or f" {kind}-start(" in line]
    assert len(started) == 1
    out = program(operand, np.int32(3))
    assert out.shape == operand.shape


@pytest.mark.usefixtures("less_memory")
def test_calibrate_on_cpu_devices_writes_a_profile_that_plans(tmp_path):
    path = tmp_path / "here.toml"
    told = []
    found = calibrate(
        {"data": 2, "model": 4},
        output=path,
        payload_bytes=[1 << 10, 1 << 20],
        matmul_sizes=[64, 128],
        repeats=1,
        target_seconds=0.002,
        progress=told.append,
    )
    assert found == autoshard.profile(path)
    assert found.name == "cpu-host-measured"
    assert all(0 < value < 1 for value in found.call_seconds_by_kind.values() if value)
    assert found.figure_sources["peak_flops_per_s.float32"].startswith("measured: ")
    assert found.figure_sources["links.kind"].startswith("assumption: ")
    assert set(found.residuals) == {"matmul", "memory", "reduction", *COLLECTIVE_KINDS}
    assert told[-1]["done"] == told[-1]["total"] - 1
    plan = autoshard.optimize_fn(lambda x, w: x @ w, (np.ones((8, 16)), np.ones((16, 8))), {"data": 8}, hardware=path)
    assert plan.hardware == "cpu-host-measured"


def test_a_calibration_ends_in_time_with_every_kind_measured(monkeypatch):
    """Of each kind the smallest size comes first, then the largest: enough for a latency and a bandwidth."""
    mesh = as_mesh({"data": 2, "model": 4}).concrete()
    jobs = timing.grid(mesh)
    assert len(jobs) == len(set(jobs)) == 1 + 8 + 6 + 2 * 3 + 2 + 2 + 3 * 5 * 9
    first = jobs[: 1 + 4 + 2 * 2 + 2 + 2 * 15]
    assert {"convolution", "random"} <= {kind for kind, *_ in first}
    passes = dict.fromkeys(("memory", "reduction"), timing.MEMORY_BYTES)
    for kind, sizes in {"matmul": timing.MATMUL_SIZES, **passes}.items():
        assert {n for k, _, n, _ in first if k == kind} == {min(sizes), max(sizes)}
    for kind in COLLECTIVE_KINDS:
        assert {n for k, _, n, _ in first if k == kind} == {min(timing.PAYLOAD_BYTES), max(timing.PAYLOAD_BYTES)}
    assert timing.ends_first([4, 1, 2]) == [1, 4, 2] and timing.ends_first([5]) == [5]
    now = iter(float(x) for x in range(1000))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(timing, "seconds_of", lambda loop, **_: (1e-3, 0.0))
    with pytest.warns(UserWarning, match="time limit of 4 s ended the calibration after 3 of 39"):
        calibrate({"data": 8}, payload_bytes=[64, 128, 256, 512, 1024, 2048], matmul_sizes=[8], time_limit=4.0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"payload_bytes": [0]}, autoshard.InputShapeError, "payload_bytes are positive"),
        ({"payload_bytes": []}, autoshard.InputShapeError, "payload_bytes are positive"),
        ({"matmul_sizes": [2.5]}, autoshard.InputShapeError, "matmul_sizes are positive"),
        ({"payload_bytes": 5}, autoshard.InputShapeError, "payload_bytes are positive"),
        ({"payload_bytes": "64"}, autoshard.InputShapeError, "payload_bytes are positive"),
        ({"matmul_sizes": 5}, autoshard.InputShapeError, "matmul_sizes are positive"),
        ({"repeats": 0}, autoshard.InputShapeError, "repeats is an integer of at least 1"),
        ({"repeats": "x"}, autoshard.InputShapeError, "repeats is an integer of at least 1"),
        ({"repeats": float("nan")}, autoshard.InputShapeError, "repeats is an integer of at least 1"),
        ({"repeats": 1.5}, autoshard.InputShapeError, "repeats is an integer of at least 1"),
        ({"target_seconds": "x"}, autoshard.InputShapeError, "target_seconds is a positive"),
        ({"time_limit": 0}, autoshard.InputShapeError, "time_limit is a positive"),
        ({"time_limit": "x"}, autoshard.InputShapeError, "time_limit is a positive"),
        ({"time_limit": None}, autoshard.InputShapeError, "time_limit is a positive"),
        ({"name": 5, "time_limit": 0.1}, autoshard.InputShapeError, "name is a text"),
        ({"name": "", "time_limit": 0.1}, autoshard.InputShapeError, "name is a text"),
        ({"name": "a/b", "time_limit": 0.1}, autoshard.InputShapeError, "name is a text"),
        ({"output": 5}, autoshard.InputShapeError, "named by its path"),
        ({"output": "profile.json"}, autoshard.ProfileError, "ending in .toml"),
        ({"output": "/no/such/folder/x.toml"}, autoshard.ProfileError, "existing folder"),
        ({"hardware": "abacus"}, autoshard.ProfileError, "unknown"),
        ({"mesh": {"data": 64}}, autoshard.PlanMismatchError, "64 devices"),
    ],
)
def test_bad_input(options, error, words):
    with pytest.raises(error, match=words):
        calibrate(**{"mesh": {"data": 8}, **options})


def test_the_command_line_refuses_a_wrong_output():
    from autoshard_ilp.cli.app import app

    result = CliRunner().invoke(app, ["calibrate", "profile.json", "--mesh", "data=8"])
    assert result.exit_code == 2
    assert "ending in .toml" in result.stderr


def test_a_first_run_is_no_measurement() -> None:
    """Its memory is fresh from the system: 64 MiB of state on each of eight devices once took 17 times as long."""
    runs: list[int] = []

    class Done:
        def block_until_ready(self) -> None:
            pass

    def program(_: Any, count: Any) -> Done:
        runs.append(int(count))
        time.sleep(0.3 if count and runs.count(0) == len(runs) - 1 else 1e-3 * int(count))
        return Done()

    seconds, _ = timing.seconds_of((program, None), target_seconds=0.01, repeats=1)
    assert 5e-4 < seconds < 0.1

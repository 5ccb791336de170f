"""Targets, compile-only devices, and the comparison of a plan with what XLA:TPU, XLA:GPU and XLA:CPU make of it."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard_ilp.costs.profile import load_profile, profiles
from autoshard_ilp.errors import TargetError
from autoshard_ilp.mesh import as_mesh
from autoshard_ilp.verify import targets
from autoshard_ilp.verify.compiled import memory_bytes
from autoshard_ilp.verify.hlo import CompiledCollective
from autoshard_ilp.verify.replica_groups import IRREGULAR
from autoshard_ilp.verify.report import Verification, compare_collectives, verify
from autoshard_ilp.verify.targets import (
    Target,
    compile_only_mesh,
    gpu_figures,
    parse_target,
    sized,
    target_config,
)

needs_tpu = [
    pytest.mark.tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu (the tpu extra) is not installed"),
]
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None, reason="the CUDA plugin (cuda extra) is not installed"
    ),
]
BACKENDS = [
    pytest.param("cpu:8", id="cpu"),
    pytest.param("h100:8", id="gpu", marks=needs_cuda),
    pytest.param("tpu-v5e:2x4", id="tpu", marks=needs_tpu),
]


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed", "n_devices"),
    [
        ("tpu-v5e:4x4", "tpu-v5e:4x4", 16),
        ("v5e:2x4", "tpu-v5e:2x4", 8),
        ("TPU-v5p:2x2x2", "tpu-v5p:2x2x2", 8),
        ("tpu-v4:2x2x2", "tpu-v4:2x2x2", 8),
        ("tpu_v6e:4x4", "tpu-v6e:4x4", 16),
        ("tpu-7x:2x2x1", "tpu-7x:2x2x1", 8),
        ("tpu-v5e", "tpu-v5e", None),
        ("tpu-v5e:32", "tpu-v5e:32", 32),
        ("h100:8", "h100:8", 8),
        (" gpu-h100:2x8 ", "h100:2x8", 16),
        ("h100:1x8", "h100:8", 8),
        ("a100:8", "a100-80:8", 8),
        ("a100_40:4", "a100-40:4", 4),
        ("h200", "h200", None),
        ("v100:8", "v100:8", 8),
        ("l4:8", "l4:8", 8),
        ("gb200-nvl72:72", "gb200:72", 72),
        ("cpu:8", "cpu:8", 8),
        ("cpu-host", "cpu", None),
    ],
)
def test_known_targets(text: str, printed: str, n_devices: int | None) -> None:
    target = parse_target(text)
    assert (str(target), target.n_devices) == (printed, n_devices)
    assert str(parse_target(printed)) == printed
    assert parse_target(target) is target


@pytest.mark.parametrize("profile", profiles())
def test_every_shipped_profile_is_a_target(profile: str) -> None:
    assert parse_target(profile).platform == {"tpu": "tpu", "gpu": "gpu"}.get(load_profile(profile).family, "cpu")


@pytest.mark.parametrize(
    "text",
    [
        *("", "bananas", "tpu-v9:2x2", "tpu-v5e:", "tpu-v5e:2x2x2", "tpu-v5p:4x4", "h100:0", "h100:2x2x2", "h100:-8"),
        *("cpu:2x4", "tpu-h100:8", "gpu-v5e:8", "h100:8 GPUs", None, 8),
    ],
)
def test_unknown_targets_list_the_known_forms(text: Any) -> None:
    with pytest.raises(TargetError, match=r"Received: .*"):
        parse_target(text)


@pytest.mark.parametrize(
    ("target", "n_devices", "shape"),
    [
        ("tpu-v5e", 1, (1, 1)),
        ("tpu-v5e", 8, (2, 4)),
        ("tpu-v5e", 256, (16, 16)),
        ("tpu-v5p", 4, (2, 2, 1)),
        ("tpu-v5p:64", 64, (4, 4, 4)),
        ("tpu-v4", 16, (2, 2, 4)),
        ("tpu-7x", 8, (2, 2, 1)),
        ("h100", 2, (1, 2)),
        ("h100:8", 8, (1, 8)),
        ("h100", 32, (4, 8)),
        ("h100:8x4", 32, (8, 4)),
        ("gb200", 72, (18, 4)),
        ("cpu", 8, (8,)),
    ],
)
def test_sizes_follow_the_mesh(target: str, n_devices: int, shape: tuple[int, ...]) -> None:
    full = sized(parse_target(target), n_devices)
    assert full.shape == shape
    assert full.n_devices == n_devices


@pytest.mark.parametrize(("target", "n_devices"), [("h100:8", 4), ("tpu-v5e:2x4", 16), ("h100", 12), ("tpu-7x", 3)])
def test_another_number_of_devices_is_an_error(target: str, n_devices: int) -> None:
    with pytest.raises(TargetError, match=r"Received: "):
        sized(parse_target(target), n_devices)


def test_too_few_cpu_devices_say_how_to_get_more() -> None:
    with pytest.raises(TargetError, match="jax_num_cpu_devices"):
        compile_only_mesh("cpu", ("a",), (1024,))


@pytest.mark.parametrize(
    ("target", "extra"), [("tpu-v5e:2x4", r"autoshard-ilp\[tpu\]"), ("h100:8", r"autoshard-ilp\[cuda\]")]
)
def test_a_missing_compiler_names_the_extra(monkeypatch: pytest.MonkeyPatch, target: str, extra: str) -> None:
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    targets._tpu_devices.cache_clear()
    targets._gpu_devices.cache_clear()
    with pytest.raises(TargetError, match=extra):
        compile_only_mesh(target, ("a",), (8,))


def test_wraparound_follows_the_slice() -> None:
    chips = targets._TPUS
    assert targets._wraps(chips["v5e"], (8, 16)) == (False, True, False)
    assert targets._wraps(chips["v6e"], (8, 8)) == (False, False, False)
    assert targets._wraps(chips["v5p"], (4, 4, 8)) == (True, True, True)
    assert targets._wraps(chips["v4"], (2, 4, 4)) == (False, False, False)


def test_gpu_figures_are_complete() -> None:
    for name, figures in gpu_figures().items():
        text = target_config(figures)
        assert f"core_count: {figures['core_count']}" in text
        assert text.count("{") == text.count("}") == 3
        assert parse_target(name).kind == name
    assert "feature_extension: ACCELERATED_FEATURES" in target_config(gpu_figures()["h100"])
    assert "feature_extension" not in target_config(gpu_figures()["a100-80"])


def test_importing_needs_no_jax() -> None:
    code = "import sys, autoshard_ilp.verify; print('jax' in sys.modules, 'keras' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


# --- meshes of devices that are not there -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", BACKENDS)
def test_mesh_has_the_asked_form(target: str) -> None:
    mesh = compile_only_mesh(target, ("data", "model"), (2, 4))
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert len({device.id for device in mesh.devices.flat}) == 8
    assert compile_only_mesh(target, ("data", "model"), (2, 4)) == mesh


@pytest.mark.parametrize(
    ("target", "sizes"), [("tpu-v4:2x2x2", (2, 4)), ("tpu-v5p:4x4x4", (4, 16)), ("tpu-v6e", (1, 1))]
)
@pytest.mark.tpu
@needs_tpu[1]
def test_other_tpus(target: str, sizes: tuple[int, ...]) -> None:
    mesh = compile_only_mesh(target, ("data", "model"), sizes)
    assert mesh.devices.shape == sizes
    assert mesh.devices.flat[0].platform == "tpu"


@pytest.mark.parametrize(
    ("target", "processes"), [("h100:16", 2), ("gb200:16", 4), ("a100-80:8", 1), ("b200:2", 1), ("l4:16", 2)]
)
@pytest.mark.cuda
@needs_cuda[1]
def test_other_gpus(target: str, processes: int) -> None:
    size = parse_target(target).n_devices
    assert size is not None
    mesh = compile_only_mesh(target, ("data",), (size,))
    assert len({device.process_index for device in mesh.devices.flat}) == processes


# --- a plan against the compilers -------------------------------------------------------------------------------------

D, TOKENS, LAYERS = 256, 512, 3


class FakePlan:
    """The least that verification needs of a plan: FSDP over both axes of a scanned multilayer perceptron, training."""

    def __init__(self, collectives: list[Any]) -> None:
        self.mesh = as_mesh({"data": 2, "model": 4})
        self.collectives = collectives
        self.memory = SimpleNamespace(peak_bytes=10**6)
        self.cost = SimpleNamespace(flops=3 * LAYERS * 2 * TOKENS * D * D / 8)
        self.trail: Any = None
        self.weights, self.tokens = (None, ("data", "model")), (("data", "model"),)

    def _shardings(self, mesh: Mesh | None) -> tuple[NamedSharding, NamedSharding]:
        mesh = self.mesh.concrete() if mesh is None else mesh
        weights, tokens = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (self.weights, self.tokens))
        return weights, tokens

    def jit(self, mesh: Mesh | None = None) -> Any:
        weights, tokens = self._shardings(mesh)

        def loss(w, x):
            return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].astype(jnp.float32) ** 2).sum()

        def step(w, x):
            dw, dx = jax.grad(loss, (0, 1))(w, x)
            return w - 0.1 * dw, dx

        return jax.jit(step, out_shardings=(weights, tokens), donate_argnums=(0,))

    def abstract_args(self, mesh: Mesh | None = None) -> tuple[Any, Any]:
        weights, tokens = self._shardings(mesh)
        return (
            jax.ShapeDtypeStruct((LAYERS, D, D), jnp.bfloat16, sharding=weights),
            jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16, sharding=tokens),
        )


def predicted(kind: str, n_bytes: int, axes: tuple[str, ...], count: int) -> Any:
    return SimpleNamespace(kind=kind, bytes_per_device=n_bytes, mesh_axes=axes, count=count, seconds=1e-3)


AXES = ("data", "model")
GATHERED = 7 * D * D * 2 // 8  # bytes one device sends to gather one bf16 weight over eight


@pytest.mark.parametrize("target", BACKENDS)
def test_fsdp_training_step(target: str) -> None:
    """Two gathers of every layer's weight and one reduction of its gradient, on each compiler in its own way."""
    plan = FakePlan(
        [
            predicted("all-gather", GATHERED, AXES, 2 * LAYERS),
            predicted("reduce-scatter", GATHERED, ("model", "data"), LAYERS),
        ]
    )
    report = verify(plan, target, seconds=lambda kind, axes, payload: payload * 1e-9)
    rows = {(row.kind, row.mesh_axes): row for row in report.rows_by_collective}
    width = 2 if target == "cpu:8" else 1  # XLA:CPU computes bf16 as f32
    assert rows["all-gather", AXES].compiled_bytes_per_device == width * 2 * LAYERS * GATHERED
    assert rows["all-gather", AXES].compiled_count == 2 * LAYERS
    if target == "cpu:8":  # which has no pass that forms a reduce-scatter
        assert rows["all-reduce", AXES].compiled_bytes_per_device == width * 2 * LAYERS * GATHERED
    else:
        assert rows["reduce-scatter", AXES].compiled_bytes_per_device == LAYERS * GATHERED
        assert report.compiled_bytes_per_device == report.predicted_bytes_per_device
        assert rows["reduce-scatter", AXES].compiled_seconds == pytest.approx(LAYERS * D * D * 2e-9)
    assert report.unplanned == ()
    assert report.compiled_flops == plan.cost.flops
    assert report.compiled_peak_bytes is not None
    arguments = (LAYERS * D * D + TOKENS * D) * 2 // 8
    assert report.memory["argument"] == arguments
    assert report.memory["alias"] == LAYERS * D * D * 2 // 8  # the donated weights
    assert report.target == str(sized(parse_target(target), 8))
    assert all(c.op_name or c.source or target != "cpu:8" for c in report.collectives)


def test_own_devices_and_unplanned_collectives() -> None:
    report = verify(FakePlan([]))
    assert report.target == "own devices"
    assert report.unplanned_bytes_per_device == report.compiled_bytes_per_device > 0
    assert {row.kind for row in report.unplanned} == {"all-gather", "all-reduce"}
    assert report.predicted_communication_seconds == 0
    assert report.compiled_communication_seconds is None


def test_report_reads_as_text_html_and_table() -> None:
    report = verify(FakePlan([predicted("all-to-all", GATHERED, AXES, 2 * LAYERS)]), "cpu:8")
    summary = report.summary()
    for part in ("cpu:8", "all-gather", "data+model", "peak memory", "unplanned"):
        assert part in summary
        assert part in report._repr_html_()
    assert report.text not in repr(report)
    assert "cpu:8" in repr(report)
    frame = report.to_dataframe()
    assert list(frame["kind"]) == [row["kind"] for row in report.rows()]
    assert set(frame.columns) == set(report.rows()[0])


def compiled(kind: str, n_bytes: int, groups: tuple[tuple[int, ...], ...], count: int = 1) -> CompiledCollective:
    return CompiledCollective(kind, n_bytes, 2 * n_bytes, count, groups, "f32", "", "")


def test_comparison_adds_up_per_kind_and_axes() -> None:
    rows = compare_collectives(
        [predicted("all_gather", 10, ("b", "one"), 3), predicted("all-gather", 0, ("a",), 1)],
        [
            compiled("all-gather", 5, ((0, 1), (2, 3)), 4),
            compiled("all-gather", 7, ((0, 1), (2, 3))),
            compiled("collective-permute", 9, ((0, 3), (1, 2))),
        ],
        ("one", "a", "b"),
        (1, 2, 2),
        seconds=lambda kind, axes, payload: float(payload),
    )
    by_key = {(row.kind, row.mesh_axes): row for row in rows}
    assert set(by_key) == {("all-gather", ("b",)), ("collective-permute", IRREGULAR)}
    gather, permute = by_key["all-gather", ("b",)], by_key["collective-permute", IRREGULAR]
    assert (gather.predicted_bytes_per_device, gather.predicted_count) == (30, 3)
    assert (gather.compiled_bytes_per_device, gather.compiled_count) == (27, 5)
    assert gather.predicted_seconds == pytest.approx(3e-3)
    assert gather.compiled_seconds == pytest.approx(4 * 10 + 14)
    assert gather.planned
    assert not permute.planned
    assert permute.compiled_seconds is None


def test_an_all_reduce_may_be_written_in_two_halves() -> None:
    groups = (tuple(range(4)),)
    halves = [compiled("reduce-scatter", 5, groups), compiled("all-gather", 5, groups)]
    rows = compare_collectives([predicted("all-reduce", 10, ("a",), 1)], halves, ("a",), (4,))
    assert all(row.planned for row in rows)
    assert sum(row.compiled_bytes_per_device for row in rows) == sum(row.predicted_bytes_per_device for row in rows)


@pytest.mark.parametrize(
    ("planned", "made", "beyond"),
    [
        ([("all-reduce", 10)], [("reduce-scatter", 5), ("all-gather", 5)], 0),
        ([("reduce-scatter", 5), ("all-gather", 5)], [("all-reduce", 10)], 0),
        ([("reduce-scatter", 5), ("all-gather", 5)], [("all-reduce", 10), ("all-gather", 5)], 5),
        ([("all-reduce", 10)], [("all-reduce", 10), ("all-gather", 3)], 3),
        ([("all-gather", 10)], [("all-to-all", 4), ("all-gather", 9)], 4),
        ([("all-gather", 10)], [], 0),
    ],
)
def test_bytes_beyond_the_plan(planned: list[tuple[str, int]], made: list[tuple[str, int]], beyond: int) -> None:
    rows = compare_collectives(
        [predicted(kind, n_bytes, ("a",), 1) for kind, n_bytes in planned],
        [compiled(kind, n_bytes, (tuple(range(4)),)) for kind, n_bytes in made],
        ("a",),
        (4,),
    )
    report = Verification("cpu", rows, (), None, None, {}, None, None, 0.0, "")
    assert report.unplanned_bytes_per_device == beyond
    assert "not predicted" in report.summary()


def test_the_plans_own_cost_model_is_used() -> None:
    plan = FakePlan([])
    model = SimpleNamespace(seconds=lambda kind, axes, payload: 1.0 if axes == (0, 1) else math.nan)
    plan.trail = SimpleNamespace(costs=SimpleNamespace(collectives=model))
    report = verify(plan, "cpu:8")
    assert report.compiled_communication_seconds == 3 * LAYERS


def test_memory_is_argument_output_temp_minus_alias() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    shaped = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=sharding)
    figures = memory_bytes(jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding).lower(shaped).compile())
    assert (figures["argument"], figures["output"], figures["alias"]) == (4096, 4096, 4096)
    assert figures["peak"] == figures["argument"] + figures["output"] + figures["temp"] - figures["alias"]


def test_a_target_is_plain_data() -> None:
    assert Target("tpu", "v5e", (4, 4)) == parse_target("tpu-v5e:4x4")
    assert parse_target("h100").compiler_options == {"xla_gpu_autotune_level": 0}
    assert parse_target("cpu").compiler_options == {}
    assert math.prod(parse_target("tpu-7x:2x2x1").shape) * parse_target("tpu-7x").devices_per_chip == 8

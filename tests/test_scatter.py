"""Reduce-scatters over a whole TPU slice, in two stages, since XLA:TPU would all-reduce: values, prices, programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from autoshard_ilp._jax_compat import whole_slice
from autoshard_ilp.costs.collectives import CollectiveCosts, ring_bytes_per_device
from autoshard_ilp.costs.profile import load_profile
from autoshard_ilp.costs.resolution import resolution_payloads
from autoshard_ilp.costs.scatter import all_reduces, stages
from autoshard_ilp.costs.topology import MeshLinks
from autoshard_ilp.enforce import manual
from autoshard_ilp.rules import rule_for
from autoshard_ilp.sharding import to_partition_spec
from autoshard_ilp.strategies import Resolution, Strategy
from autoshard_ilp.verify import compile_only_mesh, parse_collectives
from test_manual import equation

MESHES = {"8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2), "1x8": (1, 8), "4x2": (4, 2)}
WEIGHTS = [((64, 48), 0), ((24, 128), 1), ((8, 16, 4), 1), ((128, 12, 16), 2)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 2, 2), True),
        ((2, 2, 4), True),
        ((4, 4, 8), True),
        ((4, 4), True),
        ((8, 8), True),
        ((2, 4), False),
        ((4, 8), False),
        ((2, 2), False),
        ((2, 2, 1), False),
        ((16,), False),
        ((), False),
    ],
)
def test_slices_over_which_the_tpu_compiler_all_reduces(shape: tuple[int, ...], expected: bool) -> None:
    assert all_reduces(shape) is expected


def test_stages() -> None:
    cube = (2, 2, 2)
    assert stages((0, 1), (2, 4), cube) == ((1,), (0,))
    assert stages((0, 1), (4, 2), cube) == ((0,), (1,))
    assert stages((0, 1, 2), (2, 2, 2), cube) == ((0, 1), (2,))
    assert stages((0, 1), (4, 4), (4, 4)) == ((0,), (1,))  # of equal axes the last comes last
    assert stages((0, 1), (2, 4), (2, 4)) == ((0, 1),)  # no whole cube
    assert stages((1,), (2, 4), cube) == ((1,),)  # not all devices
    assert stages((0, 1), (1, 8), cube) == ((0, 1),)  # one axis: in two parts, under one price


def sides(sizes: tuple[int, ...], weight: tuple[int, ...]) -> tuple[Any, Any, tuple[Any, Any]]:
    """The gradient of a weight over a batch that all devices share: its equation, view and operands' layouts."""
    shapes = [(64, *weight[:1]), (64, *weight[1:])]
    eqn, view = equation(lambda x, g: lax.dot_general(x, g, (((0,), (0,)), ((), ()))), shapes, "bfloat16")
    layout = tuple(0 if n > 1 else -1 for n in sizes)
    return eqn, view, (layout, layout)


def program(sizes: tuple[int, ...], weight: tuple[int, ...], dim: int, mesh: Any) -> Any:
    """The gradient scattered onto one of its dimensions by all devices, jitted for a mesh, and its view."""
    eqn, view, layouts = sides(sizes, weight)
    result = tuple(dim if n > 1 else -1 for n in sizes)

    def run(*args: Any) -> Any:
        out = manual.run(
            eqn.primitive.bind, view, rule_for(view), args, (layouts, result), mesh, tuple(mesh.axis_names)
        )
        assert out is not None
        return out.astype("float32")

    ins = tuple(NamedSharding(mesh, to_partition_spec(lay, 2, mesh.axis_names)) for lay in layouts)
    out = NamedSharding(mesh, to_partition_spec(result, len(weight), mesh.axis_names))
    return jax.jit(run, in_shardings=ins, out_shardings=out), view


def price(sizes: tuple[int, ...], weight: tuple[int, ...], dim: int, hardware: str) -> list[tuple[str, tuple, float]]:
    """(kind, mesh axes, bytes sent per device) of that scatter."""
    costs = costs_of(hardware, sizes)
    real = tuple(a for a, n in enumerate(sizes) if n > 1)
    after = tuple(dim if n > 1 else -1 for n in sizes)
    strategy = Strategy((), (after,), (-1,) * len(sizes), (Resolution("reduce-scatter", real, dim),))
    found = resolution_payloads(strategy, weight, 2, sizes, costs)
    return [(k, axes, ring_bytes_per_device(k, math.prod(sizes[a] for a in axes), size)) for k, axes, size in found]


def costs_of(hardware: str, sizes: tuple[int, ...]) -> CollectiveCosts:
    return CollectiveCosts(MeshLinks.create(load_profile(hardware), tuple("abc"[: len(sizes)]), sizes))


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize(("weight", "dim"), WEIGHTS)
def test_stages_compute_the_same(mesh_name: str, weight: tuple[int, ...], dim: int, monkeypatch: Any) -> None:
    sizes = MESHES[mesh_name]
    monkeypatch.setattr(manual, "whole_slice", lambda mesh: (2, 2, 2))
    mesh = compile_only_mesh("cpu:8", tuple("abc"[: len(sizes)]), sizes)
    jitted, view = program(sizes, weight, dim, mesh)
    rng = np.random.default_rng(0)
    args = [rng.integers(-3, 4, shape).astype(jax.numpy.bfloat16) for shape in view.in_shapes]
    expected = np.tensordot(args[0].astype("float32"), args[1].astype("float32"), (0, 0))
    np.testing.assert_array_equal(jitted(*args), expected)


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_stages_send_the_bytes_of_one_scatter_and_take_longer(sizes: tuple[int, ...]) -> None:
    sent = price(sizes, (64, 48), 0, "tpu-v5p")
    assert sum(n for _, _, n in sent) == 64 * 48 * 2 * 7 / 8
    costs = costs_of("tpu-v5p", sizes)
    axes = tuple(a for a, n in enumerate(sizes) if n > 1)
    size = 2**30
    split = sum(
        costs.seconds(kind, at, size * share)
        for (kind, at, _), share in zip(sent, (1, sizes[sent[-1][1][0]] / 8), strict=False)
    )
    together = costs.seconds("all-reduce", axes, size)
    assert 0.5 * together < split <= 1.01 * together  # all dimensions of the torus at once would take half


def test_only_whole_slices_of_one_device_per_chip_are_told() -> None:
    assert costs_of("tpu-v5p", (2, 4)).links.whole_slice == (2, 2, 2)
    assert costs_of("tpu-7x", (2, 4)).links.whole_slice == ()
    assert costs_of("h100", (2, 4)).links.whole_slice == ()
    assert whole_slice(compile_only_mesh("cpu:8", ("a",), (8,))) == ()


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("target", "mesh_name"),
    [("tpu-v5p:2x2x2", name) for name in MESHES] + [("tpu-v5e:4x4", "4x4"), ("tpu-v5e:2x4", "2x4")],
)
def test_the_tpu_compiler_scatters_over_a_whole_slice(target: str, mesh_name: str) -> None:
    pytest.importorskip("libtpu")
    sizes = tuple(map(int, mesh_name.split("x")))
    mesh = compile_only_mesh(target, tuple("abc"[: len(sizes)]), sizes)
    weight = (1024, 2048)
    jitted, view = program(sizes, weight, 0, mesh)
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in view.in_shapes]
    found = parse_collectives(jitted.lower(*args).compile().as_text())
    assert not [c for c in found if c.kind == "all-reduce"]
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    expected = price(sizes, weight, 0, target.partition(":")[0])
    total = sum(n for _, _, n in expected)
    assert sum(c.total_bytes_per_device for c in found) == pytest.approx(total, rel=0.03)
    if sum(n > 1 for n in sizes) > 1:
        axes = [c.mesh_axes(sizes, mesh.axis_names) for c in scattered]
        assert axes == [tuple(mesh.axis_names[a] for a in at) for _, at, _ in expected]


@pytest.mark.tpu
@pytest.mark.parametrize(("target", "sizes"), [("tpu-v5e:4x4", (4, 4)), ("tpu-v5e:2x4", (2, 4))])
@pytest.mark.parametrize("per_shard", [2, 4])
def test_shards_of_a_few_rows_are_scattered_too(target: str, sizes: tuple[int, int], per_shard: int) -> None:
    """Kernels of twelve heads: XLA:TPU makes tiles of so few rows, and would all-reduce."""
    pytest.importorskip("libtpu")
    weight = (768, 12, per_shard * math.prod(sizes))
    jitted, view = program(sizes, weight, 2, compile_only_mesh(target, ("a", "b"), sizes))
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in view.in_shapes]
    found = parse_collectives(jitted.lower(*args).compile().as_text())
    assert {c.kind for c in found} == {"reduce-scatter"}
    expected = sum(n for _, _, n in price(sizes, weight, 2, target.partition(":")[0]))
    assert sum(c.total_bytes_per_device for c in found) == pytest.approx(expected, rel=0.03)


@pytest.mark.tpu
@pytest.mark.parametrize(
    "mesh_name", [pytest.param("8", marks=pytest.mark.slow), pytest.param("2x4", marks=pytest.mark.slow), "2x2x2"]
)
def test_a_planned_step_on_a_cube_sends_what_it_says(mesh_name: str) -> None:
    """Kinds, axes and bytes of a whole training step on meshes of one, two and three axes."""
    pytest.importorskip("libtpu")
    import keras

    import autoshard_ilp as autoshard

    def build() -> Any:
        layers = [keras.layers.Dense(2048, dtype="mixed_bfloat16") for _ in range(2)]
        model = keras.Sequential([keras.Input((2048,)), *layers])
        model.compile(optimizer="adam", loss="mse")
        return model

    sizes = tuple(map(int, mesh_name.split("x")))
    mesh = dict(zip("abc", sizes, strict=False))
    plan = autoshard.optimize(build, mesh, "40MB", hardware="tpu-v5p", batch_size=4096, progress=False)
    assert any(c.kind == "reduce-scatter" for c in plan.collectives)
    found = plan.verify("tpu-v5p:2x2x2")
    assert found.unplanned_bytes_per_device < 0.01 * found.predicted_bytes_per_device
    assert found.compiled_bytes_per_device == pytest.approx(found.predicted_bytes_per_device, rel=0.01)

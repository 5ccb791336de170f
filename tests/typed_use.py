"""The public API as a type checker sees it: mypy checks this file with the package, nothing runs it."""

from typing import assert_type

import keras
from matplotlib.figure import Figure

import autoshard_ilp as autoshard
from autoshard_ilp.costs.profile import HardwareProfile
from autoshard_ilp.explore.compare import Comparison
from autoshard_ilp.explore.explain import Explanation
from autoshard_ilp.explore.meshes_table import MeshSearch
from autoshard_ilp.explore.pareto import Pareto
from autoshard_ilp.explore.sizing import Sizing
from autoshard_ilp.explore.sweep_result import Sweep
from autoshard_ilp.verify.report import Verification


def build() -> keras.Model:
    inputs = keras.Input((16,))
    return keras.Model(inputs, keras.layers.Dense(4)(inputs))


def use() -> None:
    mesh = {"data": 2, "model": 4}
    plan = autoshard.optimize(build, mesh, "16GB", hardware="h100", batch_size=32, pins={"kernel$": (None, "model")})
    assert_type(plan, autoshard.Plan)
    assert_type(plan.cost.total_s, float)
    assert_type(plan.memory.peak_bytes, int)
    assert_type(plan.what_if(memory_budget="8GB"), autoshard.Plan)
    assert_type(plan.explain("dense/kernel"), Explanation)
    assert_type(plan.compare(plan, price=True), Comparison)
    assert_type(plan.verify("h100:8"), Verification)
    assert_type(plan.plot.memory(), Figure)
    assert_type(autoshard.load("plan.json", build), autoshard.Plan)
    assert_type(autoshard.baseline(build, mesh, "fsdp"), autoshard.Plan)
    assert_type(autoshard.pareto(build, mesh), Pareto)
    assert_type(autoshard.search_mesh(build, 8, hardware="h100"), MeshSearch)
    assert_type(autoshard.smallest_slice(build, "tpu-v5e"), Sizing)
    assert_type(autoshard.sweep(models=[build], meshes=[mesh]), Sweep)
    assert_type(autoshard.profile("tpu-v5e"), HardwareProfile)
    assert_type(autoshard.calibrate({"data": 8}), HardwareProfile)


def misuse() -> None:
    """Each line is an error to the type checker, which complains if one is not."""
    plan = autoshard.optimise(build, {"data": 2})  # type: ignore[attr-defined]
    plan = autoshard.optimize(build, {"data": 2}, hardwear="h100")  # type: ignore[call-arg]
    print(plan.costs)  # type: ignore[attr-defined]
    plan.what_if(budget="8GB")  # type: ignore[call-arg]
    plan.explain("dense/kernel", seconds=3)  # type: ignore[call-arg]

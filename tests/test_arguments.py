"""Wrong values of single arguments: our errors, with the rule and what was received."""

import json

import keras
import numpy as np
import pytest
from keras import layers

import autoshard_ilp as autoshard

MESH = {"data": 2, "model": 4}


@pytest.fixture(scope="module")
def model():
    found = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
    found.compile(loss="mse", optimizer="sgd")
    return found


@pytest.fixture(scope="module")
def plan(model):
    return autoshard.optimize(model, MESH)


@pytest.mark.parametrize(
    "options",
    [
        {"time_limit": -1},
        {"time_limit": "x"},
        {"time_limit": float("nan")},
        {"relative_gap": -0.1},
        {"relative_gap": 1.0},
        {"relative_gap": float("nan")},
        {"seed": -1},
        {"seed": "a"},
        {"seed": 1.5},
        {"workers": 0},
        {"workers": 1.5},
        {"fold_layers": "yes"},
        {"strict": 1},
    ],
    ids=str,
)
def test_solver_options(options):
    with pytest.raises(autoshard.InputShapeError, match=f"{next(iter(options))} is .*Received"):
        autoshard.SolverOptions(**options)


def test_solver_options_without_end():
    assert autoshard.SolverOptions(time_limit=float("inf"), relative_gap=0, workers=1).workers == 1


def test_numbers_of_numpy_are_numbers(model, tmp_path):
    solver = autoshard.SolverOptions(time_limit=np.float32(9), relative_gap=np.float32(0), seed=np.int64(0))
    assert type(solver.time_limit) is float and type(solver.seed) is int
    options = {"hardware": "h100", "solver": solver, "batch_size": np.int64(8), "progress": False}
    plan = autoshard.optimize(model, {"data": np.int64(2)}, sequence_length=np.int32(4), **options)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").batch_size == 8 and plan.explain("kernel", time_limit=np.int64(9))
    frontier = autoshard.pareto(plan, budgets=["1GB"], max_points=np.int64(3), time_limit=np.int64(9), progress=False)
    search = autoshard.search_mesh(
        model, hardware={"h100": np.int64(2)}, prices={"h100": np.float32(2)}, max_axes=np.int64(1), progress=False
    )
    options = {"memory_budget": "4kB", "multiple_of": np.int64(8), "progress": False}
    large = autoshard.largest_batch(model, {"data": 2}, hardware="h100", **options)
    axes = {"meshes": ["data=2"], "hardware": ["h100"], "batch_sizes": np.array([8]), "output": tmp_path / "r.csv"}
    limits = {"workers": np.int64(0), "case_time_limit": np.int64(60)}
    swept = autoshard.sweep(models=[model], **axes, **limits, solver=solver, progress=False)
    for found in (frontier, search, large, swept):
        assert json.loads(json.dumps(found.to_dict()))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"pins": [("kernel", None)]}, autoshard.InputShapeError, "pins is a mapping"),
        ({"pins": "kernel"}, autoshard.InputShapeError, "pins is a mapping"),
        ({"solver": {}}, autoshard.InputShapeError, "solver is"),
        ({"strict": "yes"}, autoshard.InputShapeError, "strict is True or False"),
        ({"verify": 2}, autoshard.InputShapeError, "verify is True or False"),
        ({"target": "foo:8"}, autoshard.TargetError, "foo"),
        ({"progress": "yes"}, autoshard.InputShapeError, "progress is"),
        ({"sequence_length": 2.5}, autoshard.InputShapeError, "sequence_length must be"),
        ({"sequence_length": "8"}, autoshard.InputShapeError, "sequence_length must be"),
        ({"mode": np.array([1, 2])}, autoshard.InputShapeError, "mode must be one of"),
        ({"objective": np.array([1, 2])}, autoshard.InputShapeError, "objective is one of"),
        ({"hardware": "h100:4"}, autoshard.ProfileError, "devices"),
        ({"hardware": "h100:abc"}, autoshard.ProfileError, "number of devices"),
    ],
    ids=str,
)
def test_options_of_optimize(model, options, error, says):
    with pytest.raises(error, match=says):
        autoshard.optimize(model, MESH, **options)


def test_a_budget_beyond_64_bits_is_no_constraint(model, plan):
    assert autoshard.optimize(model, MESH, 10**30).cost.total_s == plan.cost.total_s


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda p: p.apply(None), autoshard.PlanMismatchError),
        (lambda p: p.apply("model"), autoshard.PlanMismatchError),
        (lambda p: p.jit("mesh"), autoshard.PlanMismatchError),
        (lambda p: p.init_state("a"), autoshard.InputShapeError),
        (lambda p: p.init_state(-1), autoshard.InputShapeError),
        (lambda p: p.summary(width="x"), autoshard.InputShapeError),
        (lambda p: p.summary(width=-1), autoshard.InputShapeError),
        (lambda p: p.save(None), autoshard.InputShapeError),
        (lambda p: p.to_perfetto(None), autoshard.InputShapeError),
        (lambda p: autoshard.load(None), autoshard.InputShapeError),
        (lambda p: autoshard.save_checkpoint(5, None), autoshard.InputShapeError),
        (lambda p: autoshard.restore_checkpoint(None, p), autoshard.InputShapeError),
        (lambda p: autoshard.optimize_fn(abs, (1.0,), MESH, donate_argnums=1.5), autoshard.InputShapeError),
        (lambda p: autoshard.optimize_fn(abs, (1.0,), MESH, donate_argnums=None), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(None, MESH, budgets=5), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(None, MESH, budgets="8GB"), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(p, time_limit="x"), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(p, time_limit=-1), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(p, time_limit=float("nan")), autoshard.InputShapeError),
        (lambda p: autoshard.pareto(p, time_limit=True), autoshard.InputShapeError),
        (lambda p: p.verify(seconds=-1), autoshard.InputShapeError),
        (lambda p: p.verify(seconds=float("nan")), autoshard.InputShapeError),
        (lambda p: p.verify(seconds="x"), autoshard.InputShapeError),
        (lambda p: autoshard.smallest_slice(None, "h100", max_devices="x"), autoshard.InputShapeError),
        (lambda p: autoshard.smallest_slice(None, "h100", max_devices=0), autoshard.InputShapeError),
        (lambda p: autoshard.smallest_slice(None, "h100", max_devices=True), autoshard.InputShapeError),
        (lambda p: autoshard.smallest_slice(None, "h100", max_axes="x"), autoshard.InputShapeError),
        (lambda p: autoshard.load_sweep(""), autoshard.SweepFileError),
        (lambda p: p.init_state(np.array([1, 2])), autoshard.InputShapeError),
        (lambda p: p.what_if(objective=""), autoshard.InputShapeError),
        (lambda p: p.what_if(solver={}), autoshard.InputShapeError),
        (lambda p: p.explain(["kernel"]), autoshard.InputShapeError),
        (lambda p: p.explain("kernel", time_limit=-1), autoshard.InputShapeError),
        (lambda p: p.explain("kernel", time_limit=None), autoshard.InputShapeError),
        (lambda p: p.plot.mesh(3), autoshard.InputShapeError),
        (lambda p: p.plot.graph(3), autoshard.InputShapeError),
        (lambda p: autoshard.baseline(None, MESH, ["fsdp"]), autoshard.InputShapeError),
        (lambda p: autoshard.sweep(models=[], meshes=[], output=3), autoshard.InputShapeError),
        (
            lambda p: autoshard.sweep(models=[abs], meshes=["d=2"], retry_failed="x", workers=0),
            autoshard.InputShapeError,
        ),
        (lambda p: autoshard.search_mesh(None, 2, axis_names="ab"), autoshard.InputShapeError),
        (lambda p: autoshard.search_mesh(None, 2, axis_names=None), autoshard.InputShapeError),
        (lambda p: autoshard.search_mesh(None, 2, max_axes=True), autoshard.InputShapeError),
        (lambda p: autoshard.search_mesh(None, 2, prune="yes"), autoshard.InputShapeError),
    ],
)
def test_what_a_plan_is_asked(plan, call, error):
    with pytest.raises(error, match="Received"):
        call(plan)

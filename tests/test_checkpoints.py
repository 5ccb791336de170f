"""Checkpoints: saved under one plan, restored under another or on one device, bit for bit; crashes lose nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from keras import layers

import autoshard_ilp as autoshard
from autoshard_ilp import files
from autoshard_ilp.checkpoint import storage
from profiles_for_tests import toy

pytestmark = pytest.mark.usefixtures("quick_code")

pytest.importorskip("orbax.checkpoint")

MESHES = {"a": {"data": 2, "model": 4}, "b": {"x": 4, "y": 2}}
FORMATS = ["weights.keras", "model.weights.h5", "folder"]


def build() -> keras.Model:
    """Dropout has a seed, normalisation has statistics, AdamW two slots; names are numbered anew every time."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((16,))
    h = layers.BatchNormalization()(layers.Dense(64, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(8)(layers.Dropout(0.25, seed=5)(h)))
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse", metrics=["mae"])
    return model


def batches(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    make = lambda n: rng.normal(size=(8, n)).astype("float32")  # noqa: E731
    return [(make(16), make(8)) for _ in range(count)]


@pytest.fixture(scope="module")
def plans() -> dict[str, autoshard.Plan]:
    return {
        name: autoshard.optimize(build, mesh, hardware=toy(1e7), batch_size=8, progress=False)
        for name, mesh in MESHES.items()
    }


def variables(model: keras.Model) -> list[Any]:
    return [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v.value) for v in variables(model)]


def take_over_seeds(model: keras.Model, kept: list[np.ndarray]) -> None:
    """Keras's own formats leave out the state of random generators (keras 3.15); a folder has it."""
    for v, value in zip(variables(model), kept, strict=True):
        if v.path.endswith("seed_generator_state"):
            assert not np.array_equal(v.value, value)
            v.assign(value)


def train(model: keras.Model, data: Any) -> list[float]:
    return [float(model.train_on_batch(x, y, return_dict=True)["loss"]) for x, y in data]


@pytest.fixture(scope="module")
def trained(plans: dict[str, autoshard.Plan], tmp_path_factory: Any) -> Any:
    """A model trained for three steps under plan "a", saved in every format, then trained for two more."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = build()
    plans["a"].apply(model)
    train(model, batches(3))
    for name in FORMATS:
        autoshard.save_checkpoint(folder / name, model)
    kept = values(model)
    model.reset_metrics()
    return folder, kept, train(model, batches(2, seed=1))


def same(found: list[Any], kept: list[Any]) -> bool:
    return len(found) == len(kept) and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), b) for a, b in zip(found, kept, strict=True)
    )


def test_the_plans_differ(plans: dict[str, autoshard.Plan]) -> None:
    layouts = [[leaf.layout for leaf in p.arguments] for p in plans.values()]
    assert all(any(max(layout) >= 0 for layout in found) for found in layouts)
    assert plans["a"].mesh != plans["b"].mesh


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("where", ["b", "one device"])
def test_training_goes_on_elsewhere(plans: Any, trained: Any, name: str, where: str) -> None:
    folder, kept, losses = trained
    model = build()
    keras.utils.set_random_seed(99)
    if where == "b":
        plans["b"].apply(model)
    assert not same(values(model), kept)
    laid_out = [v.value.sharding for v in variables(model)] if where == "b" else None
    assert autoshard.restore_checkpoint(folder / name, model) is model
    if name != "folder":
        take_over_seeds(model, kept)
    assert same(values(model), kept)
    if where == "b":
        assert [v.value.sharding for v in variables(model)] == laid_out
    np.testing.assert_allclose(train(model, batches(2, seed=1)), losses, rtol=2e-5)


def test_keras_itself_reads_what_was_saved_under_a_plan(trained: Any) -> None:
    folder, kept, losses = trained
    loaded = keras.saving.load_model(folder / "weights.keras")
    take_over_seeds(loaded, kept)
    assert same(values(loaded), kept)
    fresh = build()
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(folder / "model.weights.h5")
    take_over_seeds(fresh, kept)
    assert same(values(fresh), kept)
    np.testing.assert_allclose(train(loaded, batches(2, seed=1)), losses, rtol=2e-5)


def test_a_model_under_a_plan_reads_what_keras_saved(plans: Any, tmp_path: Path) -> None:
    alone = build()
    train(alone, batches(2))
    alone.save(tmp_path / "alone.keras")
    alone.save_weights(tmp_path / "alone.weights.h5")
    for name in ("alone.keras", "alone.weights.h5"):
        model = build()
        plans["b"].apply(model)
        model.load_weights(tmp_path / name)
        take_over_seeds(model, values(alone))
        assert same(values(model), values(alone))
        _assert_on_plan(model, plans["b"])


def _assert_on_plan(model: keras.Model, plan: autoshard.Plan) -> None:
    state = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    for leaf, v in zip(plan.arguments, state, strict=False):
        sharding = NamedSharding(plan.mesh.concrete(), plan.specs[leaf.path])
        assert v.value.sharding.is_equivalent_to(sharding, len(leaf.shape)), v.path


def test_a_plans_own_state_is_saved_and_restored(plans: Any, trained: Any, tmp_path: Path) -> None:
    a, b = plans["a"], plans["b"]
    state = a.init_state()
    for batch in batches(2):
        state, _ = a.jit()(state, batch)
    autoshard.save_checkpoint(tmp_path / "state", state, a)
    there = autoshard.restore_checkpoint(tmp_path / "state", b)
    assert jax.tree.structure(there) == jax.tree.structure(state)
    for x, y, sharding in zip(*map(jax.tree.leaves, (state, there, b.in_shardings[0])), strict=True):
        assert y.sharding == sharding and np.array_equal(x, y)
    model = build()  # what a bare loop has trained goes on in fit, and the other way round
    autoshard.restore_checkpoint(tmp_path / "state", model)
    assert same([np.asarray(v.value) for v in model.trainable_variables], [np.asarray(v) for v in state[0]])
    from_fit = autoshard.restore_checkpoint(trained[0] / "folder", b)
    flat = [np.asarray(v) for group in from_fit[:3] for v in group]
    assert same(flat, trained[1]) and from_fit[0][0].sharding == b.in_shardings[0][0][0]
    index = json.loads((tmp_path / "state" / "checkpoint.json").read_text())
    assert index["plan"] == a.fingerprint and index["entries"][0]["name"] == a.arguments[0].path


class Slots(NamedTuple):
    count: Any
    mean: Any


def test_any_pytree_of_any_dtype(tmp_path: Path) -> None:
    mesh = plans_mesh()
    tree = {
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("data", "model"))),
        "slots": Slots(jnp.int32(3), [jnp.ones(4, "bfloat16"), jnp.arange(4, dtype="int4")]),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "empty": jnp.zeros((0, 3)),
        "number": 2.5,
        "small": jnp.ones(3, "float8_e4m3fn"),
        "none": None,
    }
    autoshard.save_checkpoint(tmp_path / "tree", tree)
    wanted = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree)
    wanted["sharded"] = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P(None, "data")))
    found = autoshard.restore_checkpoint(tmp_path / "tree", wanted)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["sharded"].sharding == wanted["sharded"].sharding
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        a, b = (jax.random.key_data(x) if str(getattr(x, "dtype", "")).startswith("key") else x for x in (a, b))
        assert np.array_equal(np.asarray(a), np.asarray(b))
    draw = lambda key: jax.random.normal(key, (3,))  # noqa: E731
    assert np.array_equal(draw(found["key"]), draw(tree["key"]))


def plans_mesh() -> Any:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_the_state_of_a_function_goes_to_another_mesh(tmp_path: Path) -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w - 0.1 * jnp.mean(x) * w, params), jnp.mean(x)

    args = ({"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, jnp.ones((16, 64)))
    pins = [{"args/0/w": ("data", "model")}, {"args/0/w": (None, ("x", "y"))}]
    first, second = (
        autoshard.optimize_fn(step, args, mesh, pins=pin, progress=False)
        for mesh, pin in zip(MESHES.values(), pins, strict=True)
    )
    params, _ = first.jit()(*jax.device_put(args, first.in_shardings))
    autoshard.save_checkpoint(tmp_path / "params", params)
    there = autoshard.restore_checkpoint(tmp_path / "params", second)
    assert there["w"].sharding.spec == P(None, ("x", "y"))
    assert np.array_equal(there["w"], params["w"])
    second.jit()(there, args[1])


# -- what is refused


def test_other_variables_are_refused_and_nothing_changes(plans: Any, trained: Any) -> None:
    folder = trained[0]

    def other(width: int = 64, optimizer: str = "adamw", extra: bool = False) -> keras.Model:
        inputs = keras.Input((16,))
        h = layers.BatchNormalization()(layers.Dense(width)(inputs))
        h = layers.Dropout(0.25)(h)
        model = keras.Model(inputs, layers.Dense(8)(layers.Dense(width)(h) if extra else h))
        model.compile(optimizer=optimizer, loss="mse")
        return model

    for change, said in (({"width": 32}, "(16, 32)"), ({"extra": True}, "parameter variables")):
        for name in FORMATS:
            model = other(**change)
            model.optimizer.build(model.trainable_variables)
            before = values(model)
            with pytest.raises(autoshard.CheckpointError) as caught:
                autoshard.restore_checkpoint(folder / name, model)
            assert name != "folder" or said in str(caught.value)
            assert same(values(model), before)
    with pytest.raises(autoshard.CheckpointError, match=r"optimizer variables.*optimizer=False"):
        autoshard.restore_checkpoint(folder / "folder", other(optimizer="sgd"))
    for name in FORMATS:
        model = other(optimizer="sgd")
        optimizer = model.optimizer
        autoshard.restore_checkpoint(folder / name, model, optimizer=False)
        assert model.optimizer is optimizer
        weights = [np.asarray(v.value) for v in model.trainable_variables]
        assert same(weights, trained[1][: len(weights)])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "checkpoint.json").unlink(), "a folder with checkpoint.json"),
        (lambda f: (f / "checkpoint.json").write_text("{"), "damaged"),
        (lambda f: (f / "checkpoint.json").write_text("{}"), "something else"),
        (lambda f: rewrite(f, version=99), "version 99"),
        (lambda f: rewrite(f, entries=[{"name": "x"}]), "lists entries"),
        (lambda f: rewrite(f, data="data-7"), "data-7"),
        (lambda f: [shutil.rmtree(p) for p in f.glob("data-*/d")], "cannot be read"),
    ],
)
def test_damaged_checkpoints_are_refused(trained: Any, tmp_path: Path, damage: Any, said: str) -> None:
    shutil.copytree(trained[0] / "folder", tmp_path / "folder")
    damage(tmp_path / "folder")
    with pytest.raises(autoshard.CheckpointError) as caught:
        autoshard.restore_checkpoint(tmp_path / "folder", build())
    assert said in str(caught.value) and "Received" in str(caught.value)


def rewrite(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**index, **changes}))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(autoshard.CheckpointError, match=r"thesis\.tex"):
        autoshard.save_checkpoint(tmp_path, {"x": jnp.ones(2)})
    with pytest.raises(autoshard.CheckpointError, match="folder"):
        autoshard.save_checkpoint(tmp_path / "thesis.tex", {"x": jnp.ones(2)})
    with pytest.raises(autoshard.CheckpointError, match=r"keras\.Model"):
        autoshard.save_checkpoint(tmp_path / "x.keras", {"x": jnp.ones(2)})
    with pytest.raises(autoshard.CheckpointError, match="must exist"):
        autoshard.restore_checkpoint(tmp_path / "x.keras", build())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("state", [None, 5, {}, [None, ()], keras.Sequential([layers.Dense(2)])], ids=repr)
def test_a_state_without_arrays_replaces_nothing(tmp_path: Path, state: Any) -> None:
    autoshard.save_checkpoint(tmp_path / "good", {"x": jnp.ones(2)})
    for name in ("good", "new"):
        with pytest.raises(autoshard.CheckpointError, match=r"pytree of arrays.*Received"):
            autoshard.save_checkpoint(tmp_path / name, state)
    found = autoshard.restore_checkpoint(tmp_path / "good", {"x": jnp.zeros(2)})
    assert found["x"].tolist() == [1.0, 1.0] and not (tmp_path / "new").exists()


# -- crashes


class Crash(BaseException):
    """Stands for a power failure: nothing may rely on being able to clean up."""


POINTS = {
    "folder": [
        (storage, "write_data"),
        (storage, "flush"),
        (storage, "write_index"),
        (storage, "remove_others"),
    ],
    "weights.keras": [(files, "take_place")],
    "model.weights.h5": [(files, "take_place")],
}


@pytest.mark.parametrize(("name", "point"), [(n, p) for n, points in POINTS.items() for p in points])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failure_at_any_point_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: Any, name: str, point: Any, moment: str
) -> None:
    module, function = point
    old, new, fresh = build(), build(), build()
    new.set_weights([w + 1 for w in new.get_weights()])
    path = tmp_path / name
    autoshard.save_checkpoint(path, old)
    original = getattr(module, function)

    def crash(*args: Any, **kwargs: Any) -> Any:
        if moment == "after":
            original(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(module, function, crash)
        with pytest.raises(Crash):
            autoshard.save_checkpoint(path, new)
    autoshard.restore_checkpoint(path, fresh)
    found = [np.asarray(v.value) for v in fresh.trainable_variables]
    whole = [[np.asarray(v.value) for v in m.trainable_variables] for m in (old, new)]
    assert any(same(found, w) for w in whole)
    assert same(found, whole[0]) or (function, moment) in {
        ("write_index", "after"),
        ("take_place", "after"),
        ("remove_others", "before"),
        ("remove_others", "after"),
    }
    autoshard.save_checkpoint(path, new)  # and the next save works, and leaves nothing behind
    autoshard.restore_checkpoint(path, fresh)
    assert same([np.asarray(v.value) for v in fresh.trainable_variables], whole[1])
    left = sorted(p.name for p in tmp_path.rglob("*") if p.parent in (tmp_path, path))
    assert len(left) == (3 if name == "folder" else 1), left


KILLED = """
import os, signal, sys
os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp
import autoshard_ilp as autoshard
from autoshard_ilp.checkpoint import storage
autoshard.save_checkpoint(sys.argv[1], {"w": jnp.zeros((64, 64))})
flush = storage.flush
def killed(folder):
    print("half", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
storage.flush = killed
autoshard.save_checkpoint(sys.argv[1], {"w": jnp.ones((64, 64))})
"""


def test_a_killed_process_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == -signal.SIGKILL and "half" in run.stdout, run.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"checkpoint.json", "data-0", "data-1"}
    found = autoshard.restore_checkpoint(tmp_path / "run", {"w": jnp.zeros((64, 64))})
    assert not np.asarray(found["w"]).any()
    autoshard.save_checkpoint(tmp_path / "run", {"w": jnp.full((64, 64), 2.0)})
    assert len(list((tmp_path / "run").glob("data-*"))) == 1

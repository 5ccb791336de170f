# ruff: noqa: E402
"""One of several processes of a job on this machine; prints what it found as one line of JSON.

Run as ``python process_script.py COUNT PROCESS PORT FOLDER DEVICES``; test_processes.py starts all of them. COUNT 1 is
the same script on the same number of devices in one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
COUNT, PROCESS, PORT, FOLDER, DEVICES = (*map(int, sys.argv[1:4]), Path(sys.argv[4]), int(sys.argv[5]))

import jax

jax.config.update("jax_num_cpu_devices", DEVICES // COUNT)
if COUNT > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=COUNT, process_id=PROCESS)

import jax.numpy as jnp
import keras
import numpy as np

os.environ["AUTOSHARD_PROCESS_TIMEOUT_SECONDS"] = "90"
import autoshard_ilp as autoshard
from profiles_for_tests import toy

MESH = {"data": 2, "model": DEVICES // 2}


def build(width: int = 64, seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((16,), name="x")
    h = keras.layers.BatchNormalization()(keras.layers.Dense(width, activation="relu", name="up")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(8, name="down")(keras.layers.Dropout(0.2)(h)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def data(count: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 16)).astype("float32"), rng.normal(size=(count, 8)).astype("float32")


def optimize(model: Any, **options: Any) -> autoshard.Plan:
    return autoshard.optimize(model, MESH, hardware=toy(1e7), batch_size=8, progress=False, **options)


def training() -> dict[str, Any]:
    """Two epochs whose last batch is ragged, with validation; then evaluate, predict and a checkpoint."""
    model = build()
    plan = optimize(model)
    plan.apply(model)
    x, y = data()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:8], y[:8])).history
    autoshard.save_checkpoint(FOLDER / f"checkpoint{COUNT}", model)
    return {
        "sharded": sorted(path for path, spec in plan.specs.items() if any(spec)),
        "devices": sorted({d.id for v in model.trainable_variables for d in v.value.sharding.device_set}),
        "fingerprint": plan.fingerprint,
        "planned here": plan.trail is not None,
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": np.asarray(model.predict(x, batch_size=8, verbose=0)).tolist(),
    }


def bare_steps() -> dict[str, Any]:
    """plan.jit() on a state born sharded, and a plain function."""
    plan = optimize(build)
    state, losses = plan.init_state(), []
    for seed in range(3):
        state, logs = plan.jit()(state, data(8, seed))
        losses.append(float(logs["loss"]))
    x = np.arange(64 * 16.0).reshape(64, 16).astype("float32")

    def product(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w) ** 2)

    args = (np.ones((16, 32), "float32"), x)
    found = autoshard.optimize_fn(product, args, MESH, pins={"args/0": (None, "model")}, progress=False)
    return {"losses": losses, "function": float(found.jit()(*args)), "of function": found.fingerprint}


def shared(whole: np.ndarray) -> Any:
    """A global array of which this process passes its own rows alone."""
    from jax.sharding import NamedSharding, PartitionSpec

    by_process = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all"))
    part = np.split(whole, COUNT)[PROCESS]
    return jax.make_array_from_process_local_data(by_process, part, whole.shape)


def shared_batches() -> list[float]:
    """Every process reads its own part of each batch; the parts together are the global batch."""
    plan = optimize(build)
    state, losses = plan.init_state(), []
    for seed in range(3):
        state, logs = plan.jit()(state, tuple(map(shared, data(8, seed))))
        losses.append(float(logs["loss"]))
    return losses


def parts_in_fit() -> dict[str, Any]:
    """As above with fit, evaluate and predict, from a generator."""
    model = build()
    optimize(model).apply(model)

    def batches() -> Any:
        for i in (0, 8) * 2:
            yield tuple(shared(whole[i : i + 8]) for whole in data(16))

    fitted = model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0).history
    predicted = model.predict(batches(), steps=2, verbose=0)
    return {
        "losses": [*fitted["loss"], *fitted["mae"], *model.evaluate(batches(), steps=2, verbose=0)],
        "predicted": np.asarray(predicted).tolist(),
        "on batch": on_batches(),
    }


def on_batches() -> list[list[float]]:
    """As above, batch by batch."""
    model = build()
    optimize(model).apply(model)
    x, y, weights = *map(shared, data(8)), shared(np.linspace(0.5, 1.5, 8).astype("float32"))
    classes = shared(np.eye(8, dtype="float32")[np.arange(8) % 3])
    return [
        model.train_on_batch(x, classes, class_weight={0: 3.0, 1: 0.2}),
        model.train_on_batch(x, y),
        model.train_on_batch(x, y, sample_weight=weights),
        model.test_on_batch(x, y),
        np.asarray(model.predict_on_batch(x)).ravel().tolist(),
        model.train_on_batch(*data(8)),  # what every process has whole
    ]


def refused(action: Any) -> str:
    """The error that ``action`` raises."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        assert time.monotonic() - start < 100, error
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def disagreements() -> dict[str, str]:
    """Whatever one process does otherwise is an error in all of them, and they can go on afterwards."""
    other = PROCESS == 1
    model = build()
    plan = optimize(model)
    plan.apply(model)
    x, y = data(8)
    found = {
        "model": refused(lambda: optimize(build(96 if other else 64))),
        "options": refused(lambda: optimize(build(), memory_budget="1GB" if other else "2GB")),
        "seed": refused(lambda: plan.apply(build(seed=PROCESS))),
        "failure": refused(lambda: optimize(broken if other else build)),
        "infeasible": refused(lambda: optimize(build, memory_budget=1000)),
        "batch": refused(lambda: model.fit(x + PROCESS, y, batch_size=8, verbose=0)),
        "plan": refused(lambda: autoshard.load(FOLDER / f"plan{PROCESS % 2}.json").apply(build())),
        "place": refused(lambda: plan.apply(build()) if other else optimize(build)),
    }
    found["after"] = str(float(model.train_on_batch(x, y, return_dict=True)["loss"]))
    os.environ["AUTOSHARD_PROCESS_TIMEOUT_SECONDS"] = "4"
    if other:
        time.sleep(8)
    else:
        found["absent"] = refused(lambda: optimize(build))
        os.environ["AUTOSHARD_PROCESS_TIMEOUT_SECONDS"] = "60"
        found["ended"] = refused(lambda: optimize(build))  # the other one has no more to do
    return found


def broken() -> keras.Model:
    raise RuntimeError("no such layer")


if __name__ == "__main__":
    result: dict[str, Any] = {"training": training(), "bare": bare_steps(), "parts": parts_in_fit()}
    if COUNT == 1:  # two plans that differ in one layout, for the processes that disagree
        for i, pin in enumerate([("model",), ()]):
            optimize(build, pins={"up/bias": pin}).save(FOLDER / f"plan{i}.json")
    else:
        result["shared"] = shared_batches()
    if COUNT == 2:
        result["disagreements"] = disagreements()
    print("RESULT " + json.dumps(result), flush=True)

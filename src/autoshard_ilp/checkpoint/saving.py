"""Saving a model or a state so that the previous checkpoint stays whole until the new one is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autoshard_ilp.arguments import file_path
from autoshard_ilp.checkpoint import storage
from autoshard_ilp.checkpoint.entries import entries_of_model, entries_of_tree
from autoshard_ilp.errors import CheckpointError
from autoshard_ilp.files import replacing

KERAS_SUFFIXES = (".keras", ".weights.h5")


def save_checkpoint(path: str | os.PathLike[str], state: Any, plan: Any = None) -> None:
    """Saves a model with its optimizer, or any state, under whatever layout it has.

    Over several processes every process calls this with a path on a file system that all of them see.

    Args:
        path: a name that ends in ".keras" or ".weights.h5" for Keras's own formats, else a folder for Orbax. What is
            there already is replaced once the new checkpoint is complete, never before.
        state: a ``keras.Model`` (its optimizer's variables are saved too), the state of ``plan.jit()``, or any pytree
            of arrays, such as the parameters of a hand-written training step.
        plan: names the variables of a state and is noted in the folder; not needed to restore.

    Raises:
        CheckpointError: there is no array in the state, the path cannot be written, the folder holds other things,
            Orbax is not installed, or a state is saved in a format of Keras.
    """
    target = file_path(path).absolute()
    if target.name.endswith(KERAS_SUFFIXES):
        _save_keras(target, state)
    else:
        _save_folder(target, state, plan)


def is_model(candidate: Any) -> bool:
    """Whether something is a Keras model (which only exists once Keras is loaded)."""
    import sys

    keras = sys.modules.get("keras")
    return keras is not None and isinstance(candidate, keras.Model)


def _save_keras(target: Path, model: Any) -> None:
    import jax

    if not is_model(model):
        raise CheckpointError(
            f"Keras's formats hold a keras.Model. Received: {type(model).__name__} for {target.name}. Save a state to "
            "a folder (a name without .keras or .weights.h5)."
        )
    if jax.process_count() > 1:
        raise CheckpointError(
            f"Keras's formats are written by one process that gathers every variable. Received: {target.name} with "
            f"{jax.process_count()} processes. Save to a folder (a name without .keras or .weights.h5)."
        )
    entries_of_model(model)  # builds the optimizer, so that any model of this kind can read the file
    suffix = next(s for s in KERAS_SUFFIXES if target.name.endswith(s))
    try:
        with replacing(target, suffix) as beside:
            if suffix == ".keras":
                model.save(beside, overwrite=True)
            else:
                model.save_weights(beside, overwrite=True)
    except OSError as error:
        raise CheckpointError(
            f"A checkpoint is saved to a file that can be written. Received: {target} ({error})."
        ) from error


def _save_folder(folder: Path, state: Any, plan: Any) -> None:
    import jax

    entries = entries_of_model(state) if is_model(state) else entries_of_tree(state, plan)
    if not entries or (not entries[0].name and not hasattr(state, "dtype")):
        raise CheckpointError(
            f"A checkpoint holds the variables of a built keras.Model, or a pytree of arrays. Received: {state!r} of "
            f"type {type(state).__name__}, without an array. Pass the model or the state; nothing was written."
        )
    missing = [e.name for e in entries if e.value is None]
    if missing:
        raise CheckpointError(
            f"A checkpoint holds values. Received: {missing[0]!r} and others without one. Run plan.apply."
        )
    storage.orbax()
    first = jax.process_index() == 0
    name = f"data-{_agreed(storage.next_number(folder))}"
    if first:
        storage.remove_others(folder, _current(folder))
    _barrier("autoshard checkpoint: folder ready")
    storage.write_data(folder / name, entries)
    _barrier("autoshard checkpoint: data written")
    if first:
        if (folder / name).is_dir():
            storage.flush(folder / name)
        about = {} if plan is None else {"plan": plan.fingerprint, "mesh": str(plan.mesh)}
        storage.write_index(folder, name, entries, about)
        storage.remove_others(folder, name)
    _barrier("autoshard checkpoint: done")


def _current(folder: Path) -> str | None:
    """The data that counts now."""
    return str(storage.read_index(folder).get("data")) if (folder / storage.INDEX).exists() else None


def _agreed(number: int) -> int:
    """The first process's number."""
    import jax

    if jax.process_count() == 1:
        return number
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _barrier(name: str) -> None:
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)

"""Restoring a checkpoint under whatever layout is wanted now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard_ilp.arguments import file_path
from autoshard_ilp.checkpoint import storage
from autoshard_ilp.checkpoint.entries import KINDS, Entry, entries_of_model, entries_of_tree, matched
from autoshard_ilp.checkpoint.saving import KERAS_SUFFIXES, is_model
from autoshard_ilp.errors import CheckpointError


def restore_checkpoint(path: str | os.PathLike[str], target: Any, *, optimizer: bool = True) -> Any:
    """Restores what :func:`save_checkpoint` saved, laid out as ``target`` is; bit for bit the same values.

    Every variable is read before the first one is replaced, so a failure leaves a model as it was.

    Args:
        path: as for ``save_checkpoint``; the formats of Keras may also come from Keras itself.
        target: what is filled: a ``keras.Model``, under a plan or on one device; a plan, whose state is returned; or a
            pytree of arrays or ``jax.ShapeDtypeStruct`` with shardings, such as ``plan.abstract_args()[0]``.
        optimizer: False restores a model's weights alone.

    Returns:
        the model; or the state of the plan (of a function's plan: its donated arguments), to be passed to
        ``plan.jit()``; or the pytree.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or holds other variables.
    """
    source = file_path(path).absolute()
    if source.name.endswith(KERAS_SUFFIXES):
        return _restore_keras(source, target, optimizer)
    index = storage.read_index(source)
    stored = storage.stored_entries(source, index)
    data = source / str(index.get("data"))
    if is_model(target):
        return _restore_model(data, stored, target, optimizer)
    if hasattr(target, "abstract_args"):
        return _restore_plan(data, stored, target)
    return _restore_tree(data, stored, target)


def _restore_model(data: Path, stored: Sequence[Entry], model: Any, optimizer: bool) -> Any:
    from autoshard_ilp import keras_integration as ki

    wanted = entries_of_model(model)
    has_optimizer = optimizer and getattr(model, "optimizer", None) is not None
    kinds = KINDS if has_optimizer else KINDS[:2]
    places = matched(wanted, stored, kinds)
    values = storage.read_data(data, stored, {theirs: wanted[ours] for ours, theirs in places.items()})
    flat = [values[places[i]] if i in places else entry.value for i, entry in enumerate(wanted)]
    state, rest = [], iter(flat)
    for group in ki.state_variables(model, "train"):
        state.append([next(rest) for _ in group])
    ki.attach(model, "train", state)
    return model


def _restore_plan(data: Path, stored: Sequence[Entry], plan: Any) -> Any:
    import jax

    from autoshard_ilp import keras_integration as ki

    specs = plan.abstract_args()
    if plan.mode == "function":
        donated = plan.executable.donated
        tree = specs[donated[0]] if len(donated) == 1 else tuple(specs[i] for i in donated)
        return _restore_tree(data, stored, tree)
    wanted = entries_of_tree(specs[0], plan)
    places = matched(wanted, stored, KINDS[: len(specs[0])])
    values = storage.read_data(data, stored, {theirs: wanted[ours] for ours, theirs in places.items()})
    missing = [i for i in range(len(wanted)) if i not in places]  # metrics of a step that counted others
    fresh = ki.initial_values(plan.executable.traced, missing, [wanted[i].sharding for i in missing]) if missing else {}
    flat = [values[places[i]] if i in places else fresh[i] for i in range(len(wanted))]
    return jax.tree.unflatten(jax.tree.structure(specs[0]), flat)


def _restore_tree(data: Path, stored: Sequence[Entry], tree: Any) -> Any:
    import jax

    wanted = entries_of_tree(tree)
    kinds = [k for k in KINDS if any(e.kind == k for e in wanted)]
    places = matched(wanted, stored, kinds)
    if len(places) < len(wanted):
        raise CheckpointError(
            f"A checkpoint holds the arrays that are restored from it. Received: {len(places)} of {len(wanted)}."
        )
    values = storage.read_data(data, stored, {theirs: wanted[ours] for ours, theirs in places.items()})
    return jax.tree.unflatten(jax.tree.structure(tree), [values[places[i]] for i in range(len(wanted))])


def _restore_keras(source: Path, model: Any, with_optimizer: bool) -> Any:
    from autoshard_ilp import keras_integration as ki

    if not is_model(model):
        raise CheckpointError(
            f"Keras's formats are restored into a keras.Model. Received: {type(model).__name__} for {source.name}."
        )
    if not source.is_file():
        raise CheckpointError(f"A checkpoint must exist. Received: {source}, which is no file.")
    entries_of_model(model)  # builds the optimizer, whose variables are then restored too
    before = [[v._value for v in group] for group in ki.state_variables(model, "train")]
    optimizer = model.optimizer
    try:
        if not with_optimizer:
            model.optimizer = None  # Keras restores what it finds in the model
        try:
            model.load_weights(source)
        finally:
            model.optimizer = optimizer
    except Exception as error:
        ki.attach(model, "train", before)
        raise CheckpointError(
            f"A checkpoint holds the variables that are restored from it. Received: {source} ({type(error).__name__}: "
            f"{error})."
        ) from error
    ki.sync(model)
    return model

"""Shapes of one global batch: from what the user gives, or derived from the model and its loss. No data is needed.

Everything here is ``jax.ShapeDtypeStruct``; leading dimension: the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard_ilp.arguments import integer
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.keras_integration import has_fixed_outputs, input_names, output_names, symbolic_inputs

DEFAULT_BATCH_SIZE = 32  # the default of keras.Model.fit

_SHAPES = "as a pytree of arrays, jax.ShapeDtypeStruct or keras.KerasTensor with the shapes of one global batch"
_GIVE_INPUTS = f"Give inputs= {_SHAPES}."
_GIVE_TARGETS = f"Give targets= {_SHAPES}."


def default_batch_size(device_count: int) -> int:
    """Keras's own default of 32, rounded up to a multiple of the number of devices."""
    if device_count < 1:
        raise InputShapeError(f"device_count must be at least 1. Received: {device_count}.")
    return -(-DEFAULT_BATCH_SIZE // device_count) * device_count


def input_specs(
    model: Any,
    inputs: Any,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    device_count: int,
) -> tuple[Any, int]:
    """Shapes of the model's inputs and the global batch size.

    Args:
        model: a Keras model; its symbolic inputs are used where ``inputs`` is ``None``.
        inputs: pytree of arrays, shapes or KerasTensors; ``None`` dimensions are filled in as below.
        batch_size: global batch; ``None``: what ``inputs`` or the model fix, else :func:`default_batch_size`.
        sequence_length: fills the one unknown dimension (other than the batch) of each input.
        device_count: see :func:`default_batch_size`.

    Returns:
        pytree of ``jax.ShapeDtypeStruct``, and the batch size.

    Raises:
        InputShapeError: no inputs are known, a dimension is unknown, or batch sizes disagree.
    """
    for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if value is not None and (integer(value) or 0) < 1:
            raise InputShapeError(f"{name} must be a positive integer. Received: {value!r}.")
    symbolic = symbolic_inputs(model)
    structure = symbolic if inputs is None else inputs
    if structure is None:
        raise InputShapeError(
            f"The input shapes of a model must be known; functional models know them, and Sequential ones that start "
            f"with keras.Input. Received: {model.name!r} ({type(model).__name__}), shapes not known. {_GIVE_INPUTS}"
        )
    return complete_specs(
        structure,
        kind="inputs",
        batch_size=batch_size,
        sequence_length=sequence_length,
        device_count=device_count,
        names=input_names(model),
        batched=[] if has_fixed_outputs(model) else _batched(symbolic, structure),
    )


def _batched(symbolic: Any, structure: Any) -> list[bool]:
    """Which inputs the batch runs through: those whose first dimension the model leaves open, where there are any.

    Another input (a table, positions) may have a fixed first dimension of its own.
    """
    known, given = named_leaves(symbolic), named_leaves(structure)
    if symbolic is None or isinstance(symbolic, dict) != isinstance(structure, dict) or len(known) != len(given):
        return []
    open_ones = [leaf.shape[:1] == (None,) for _, leaf in known]
    return open_ones if any(open_ones) else []


def complete_specs(
    structure: Any,
    *,
    kind: str,
    batch_size: int | None,
    sequence_length: int | None = None,
    device_count: int = 1,
    names: Sequence[str] = (),
    batched: Sequence[bool] = (),
    of_any_size: bool = False,
) -> tuple[Any, int]:
    """Replace every leaf by a ``jax.ShapeDtypeStruct`` without unknown dimensions; see :func:`input_specs`.

    ``batched`` says which leaves the batch runs through, in flat order; where nobody knows, all of them, or those that
    agree with a ``batch_size`` that is given. ``of_any_size`` allows any first dimension, where the inputs have several
    (:func:`has_several_sizes`).
    """
    import jax

    treedef = jax.tree.structure(structure, is_leaf=_is_spec)
    described = []
    for name, leaf in named_leaves(structure, names):
        path = kind if name is None else f"{kind}/{name}"
        described.append((path, *_shape_and_dtype(leaf, path)))
    if not described:
        raise InputShapeError(f"{kind} must hold at least one array. Received: {structure!r}.")
    running = [d for d, runs in zip(described, batched or [True] * len(described), strict=True) if runs]
    fixed = {shape[0] for _, shape, _ in running if shape and shape[0] is not None}
    if batch_size is None:
        if len(fixed) > 1:
            raise InputShapeError(
                f"All {kind} must have the same first dimension, the global batch. Received: "
                f"{ {name: shape for name, shape, _ in described} }. Fix the shapes, or give batch_size= where some "
                "inputs have no batch."
            )
        batch_size = fixed.pop() if fixed else default_batch_size(device_count)
    elif fixed - {batch_size} and not of_any_size and (batched or kind != "inputs" or batch_size not in fixed):
        raise InputShapeError(
            f"The first dimension of all {kind} must be the global batch, {batch_size}. Received: "
            f"{ {name: shape for name, shape, _ in described} }. Give the shapes of one whole global "
            f"batch, and a batch_size that agrees with them (or none)."
        )
    if batch_size < 1:
        raise InputShapeError(
            f"A batch must hold at least one sample. Received: {kind} of {batch_size}. {_GIVE_INPUTS}"
        )
    specs = [
        jax.ShapeDtypeStruct(_fill(name, shape, batch_size, sequence_length), dtype) for name, shape, dtype in described
    ]
    return jax.tree_util.tree_unflatten(treedef, specs), batch_size


def has_several_sizes(batch: Any) -> bool:
    """Whether arrays of a batch differ in their first dimension: nodes and edges of a graph, say."""
    import jax

    return len({x.shape[0] for x in jax.tree.leaves(batch) if x.shape}) > 1


def _fill(name: str, shape: tuple[int | None, ...], batch_size: int, sequence_length: int | None) -> tuple[int, ...]:
    """Fill unknown dimensions: the first with the batch, one more with the sequence length."""
    unknown = [d for d, size in enumerate(shape) if size is None and d > 0]
    if unknown and (sequence_length is None or len(unknown) > 1):
        option = " or sequence_length=" if len(unknown) == 1 else ""
        raise InputShapeError(
            f"Every dimension of a batch must be known. Received: {name} of shape {shape}, whose dimension "
            f"{unknown[0]} is None. {_GIVE_INPUTS[:-1]}{', ' + option.strip() if option else ''}."
        )
    filled = [batch_size if d == 0 and size is None else size for d, size in enumerate(shape)]
    return tuple(sequence_length if size is None else size for size in filled)  # type: ignore[misc]


def _shape_and_dtype(leaf: Any, name: str) -> tuple[tuple[int | None, ...], Any]:
    """Shape and (canonical JAX) dtype of an array, a ShapeDtypeStruct or a KerasTensor."""
    import jax
    import numpy as np

    if not _is_spec(leaf):
        raise InputShapeError(f"Arrays need a shape and a dtype. Received: {name} = {leaf!r}. {_GIVE_INPUTS}")
    if getattr(leaf, "sparse", False):
        raise InputShapeError(f"Sparse tensors cannot be planned. Received: {name}, sparse. Give a dense input.")
    try:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if not (jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_):
            raise TypeError(dtype)
    except TypeError as error:
        raise InputShapeError(
            f"Inputs must be numbers or booleans; strings are turned into numbers by preprocessing, before the step. "
            f"Received: {name} of dtype {leaf.dtype}. {_GIVE_INPUTS}"
        ) from error
    return tuple(leaf.shape), dtype


def _is_spec(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def leaf_name(path: Sequence[Any]) -> str:
    """Keys of a pytree path joined by "/"; "" for a lone leaf."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
    return "/".join(parts)


def named_leaves(structure: Any, names: Sequence[str] = ()) -> list[tuple[str | None, Any]]:
    """``(name, leaf)`` of a pytree in flat order.

    The name is the leaf's keys joined by "/". A lone leaf and the leaves of a flat sequence take ``names`` instead,
    where there is one for each; a lone leaf without a name has ``None``.
    """
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(structure, is_leaf=_is_spec)[0]
    flat = not isinstance(structure, dict) and all(len(path) <= 1 for path, _ in leaves)
    if flat and len(names) == len(leaves):
        return [(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return [(leaf_name(path) or None, leaf) for path, leaf in leaves]


def target_specs(model: Any, outputs: Any) -> Any:
    """Shapes of the targets, derived from the compiled loss and the model's outputs.

    A sparse categorical loss takes integer labels of the output's shape without its last dimension; any other loss is
    assumed to take floats of the output's shape. Outputs without a loss get a target too, as Keras expects one.

    Args:
        model: a compiled Keras model.
        outputs: its outputs, a structure of KerasTensors without unknown dimensions.

    Returns:
        A structure of ``jax.ShapeDtypeStruct`` like ``outputs``; ``None`` when the model has no compiled loss.

    Raises:
        InputShapeError: the loss leaves the shape of the labels open.
    """
    import jax
    import keras

    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return None
    leaves, treedef = jax.tree_util.tree_flatten_with_path(outputs, is_leaf=_is_spec)
    keys = [leaf_name(path) for path, _ in leaves]
    losses = _loss_per_output(compiled._user_loss, keys, output_names(model))
    labels = [
        _label_spec(loss, tuple(leaf.shape), keras.config.floatx(), key or "the output")
        for loss, (_, leaf), key in zip(losses, leaves, keys, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, labels)


def _loss_per_output(loss: Any, keys: Sequence[str], names: Sequence[str]) -> list[Any]:
    """One loss (or ``None``) per flat output; follows how Keras matches ``compile(loss=...)`` with outputs."""
    import jax

    count = len(keys)
    if isinstance(loss, dict):
        flat = {leaf_name(path): value for path, value in jax.tree_util.tree_flatten_with_path(loss)[0]}
        if count == 1 and len(flat) == 1:
            return list(flat.values())
        if set(flat) <= set(keys):
            return [flat.get(name) for name in keys]
        if len(names) == count and set(flat) <= set(names):
            return [flat.get(name) for name in names]
    elif isinstance(loss, (list, tuple)):
        flat_list = jax.tree.leaves(loss, is_leaf=lambda x: x is None)
        if len(flat_list) == count:
            return flat_list
        if count == 1 and flat_list:
            return flat_list[:1]
    else:
        return [loss] * count
    raise InputShapeError(
        f"The compiled losses cannot be matched with the model's outputs. Received: loss={loss!r} for the outputs "
        f"{list(names) or list(keys)}. {_GIVE_TARGETS}"
    )


def _label_spec(loss: Any, shape: tuple[int, ...], floatx: str, name: str) -> Any:
    import jax

    identifier = loss_identifier(loss)
    if identifier in ("crossentropy", "ce") and shape and shape[-1] != 1:
        raise InputShapeError(
            f"The loss {loss!r} of {name} takes integer labels or one-hot labels. Received: no targets to tell "
            f"which. {_GIVE_TARGETS}"
        )
    if identifier in ("ctc", "circle"):
        raise InputShapeError(f"The loss {identifier!r} of {name} does not fix its labels' shape. {_GIVE_TARGETS}")
    if "sparsecategorical" in identifier:
        return jax.ShapeDtypeStruct(shape[:-1], "int32")
    return jax.ShapeDtypeStruct(shape, floatx)


def loss_identifier(loss: Any) -> str:
    """Name, in lower case and without underscores, of a loss: a string, a function or a ``keras.losses.Loss``."""
    import keras

    if loss is None:
        return ""
    if isinstance(loss, str):
        name = loss
    elif isinstance(loss, keras.losses.Loss):
        wrapped: Callable[..., Any] | None = getattr(loss, "fn", None)
        name = type(loss).__name__ + (getattr(wrapped, "__name__", "") if wrapped is not None else "")
        if type(loss).__name__ in ("CTC", "Circle"):
            name = type(loss).__name__
    else:
        name = getattr(loss, "__name__", type(loss).__name__)
    return name.lower().replace("_", "")

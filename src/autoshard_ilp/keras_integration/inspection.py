"""What a Keras model takes, returns and holds: shapes, names, variables, and which slot belongs to which parameter.

Read against keras 3.15 (``models/functional.py``, ``optimizers/base_optimizer.py``, ``trainers/trainer.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard_ilp.keras_integration.construction import AbstractBuild, abstract_construction

StateVariables = tuple[list[Any], ...]

GROUPS = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "evaluate": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
"""The lists of variables that make up the state of a step, by mode."""


def symbolic_outputs(model: Any, inputs: Any) -> Any:
    """The model's outputs as KerasTensors, for inputs given as a pytree of shapes; builds the model if necessary.

    A live model's variables are created for real, as its first ``fit`` would; inside
    :func:`abstract_construction` nothing is allocated.
    """
    import keras
    from keras.src import backend

    return backend.compute_output_spec(model, keras.tree.map_structure(_symbolic, inputs), training=False)


def _symbolic(spec: Any) -> Any:
    """A shape as a KerasTensor; None, which stands for an input or a part of the batch that is absent, stays."""
    import keras
    from keras.src import backend

    return None if spec is None else keras.KerasTensor(spec.shape, backend.standardize_dtype(spec.dtype))


def symbolic_inputs(model: Any) -> Any:
    """The structure of KerasTensors that a model takes; ``None`` where the model does not know it.

    Functional models know it, Sequential ones when they start with ``keras.Input`` or were called, subclassed ones
    only after a symbolic call on a single tensor.
    """
    import keras
    from keras.src.models.functional import Functional

    try:
        structure = model.inputs if isinstance(model, keras.Sequential) else model.input
    except (AttributeError, ValueError):
        return None
    if isinstance(model, keras.Sequential) and isinstance(structure, list) and len(structure) == 1:
        return structure[0]
    known = isinstance(model, (keras.Sequential, Functional)) or isinstance(structure, keras.KerasTensor)
    return structure if known and keras.tree.flatten(structure) else None


def input_names(model: Any) -> list[str]:
    """Names of the input layers of a functional or Sequential model in flat order; empty for any other model."""
    import keras

    flat = keras.tree.flatten(symbolic_inputs(model))
    return [tensor._keras_history.operation.name for tensor in flat if isinstance(tensor, keras.KerasTensor)]


def has_fixed_outputs(model: Any) -> bool:
    """Whether the first dimension of every output of a functional or Sequential model is a number."""
    import keras
    from keras.src.models.functional import Functional

    if not isinstance(model, (keras.Sequential, Functional)) or symbolic_inputs(model) is None:
        return False
    return all(isinstance(x, keras.KerasTensor) and x.shape[:1] not in ((), (None,)) for x in model.outputs)


def output_names(model: Any) -> list[str]:
    """Names of the outputs of a functional or Sequential model in flat order; empty for any other model."""
    import keras

    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name] if model.layers else []
    return [str(name) for name in getattr(model, "output_names", None) or []]


def has_own_step(model: Any, mode: str) -> bool:
    """Whether the model's class, or the model itself, overrides Keras's step ("train", "evaluate" or "predict")."""
    import keras

    name = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}[mode]
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def is_fully_built(model: Any) -> bool:
    """Whether every layer of the model has created its variables."""
    return all(layer.built for layer in model._flatten_layers())


def build_training_state(model: Any, batch: tuple[Any, ...], outputs: Any = None) -> AbstractBuild:
    """Create optimizer, loss and metric variables for a batch of shapes; nothing is computed.

    The optimizer's slots are as large as the model, so they are left without value (see :func:`abstract_construction`):
    a live model does not grow, and the slots can be born sharded. The model itself must be built.

    Args:
        outputs: what :func:`symbolic_outputs` gave for this batch, where it was called: Keras's own ``_symbolic_build``
            would call the whole model again to learn it.
    """
    with abstract_construction() as build:
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    if outputs is None:
        model._symbolic_build(data_batch=batch)
    else:
        _build_loss_and_metrics(model, batch, outputs)
    return build


def _build_loss_and_metrics(model: Any, batch: tuple[Any, ...], outputs: Any) -> None:
    import keras
    from keras.src import backend
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

    x, y, weights = unpack_x_y_sample_weight(keras.tree.map_structure(_symbolic, batch))
    if model._compile_metrics is not None and not model._compile_metrics.built:
        backend.compute_output_spec(model.compute_metrics, x, y, outputs, sample_weight=weights)
    if model._compile_loss is not None and not model._compile_loss.built:
        backend.compute_output_spec(model._compute_loss, x, y, outputs, sample_weight=weights, training=False)
    model._post_build()


def state_variables(model: Any, mode: str) -> StateVariables:
    """The Keras variables behind the step's state, one list per entry of ``GROUPS[mode]``, in the order of the step."""
    optimizer = getattr(model, "optimizer", None)
    variables = {
        "trainable": lambda: model.trainable_variables,
        "non_trainable": lambda: model.non_trainable_variables,
        "optimizer": lambda: optimizer.variables if optimizer is not None else (),
        "metrics": lambda: model.metrics_variables,
    }
    return tuple(list(variables[kind]()) for kind in GROUPS[mode])


def optimizer_parts(model: Any) -> tuple[Any, ...]:
    """What decides what a model's optimizer computes: itself, its variables, its learning rate or schedule."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return ()
    return (optimizer, getattr(optimizer, "_learning_rate", None), *optimizer.variables)


def seed_variable_ids(model: Any) -> set[int]:
    """``id`` of every variable that is the state of a ``keras.random.SeedGenerator`` of the model or its layers."""
    return {id(g.state) for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())}


def optimizer_slot_reference(
    optimizer: Any, parameters: Sequence[Any], recorded: Sequence[tuple[Any, Any]] = ()
) -> list[int | None]:
    """Which parameter each optimizer variable belongs to.

    Matched by what the optimizer declared when it was built (``recorded``, see :class:`AbstractBuild`), else by
    alignment: an optimizer keeps its slots in lists parallel to the variables that it was built with. Names are never
    looked at. The slots of Adafactor, smaller than their parameter, are matched too, so compare shapes before use.

    Args:
        optimizer: a built Keras optimizer, wrappers included; or ``None``.
        parameters: the model's trainable variables.
        recorded: ``(slot, parameter)`` pairs.

    Returns:
        For each of ``optimizer.variables`` an index into ``parameters``, or ``None`` (iteration, learning rate, ...).
    """
    if optimizer is None:
        return []
    index_of = {id(v): i for i, v in enumerate(parameters)}
    owner: dict[int, int] = {}
    _align_slots(optimizer, index_of, owner, set())
    for slot, parameter in recorded:
        if id(parameter) in index_of:
            owner[id(slot)] = index_of[id(parameter)]
    return [owner.get(id(v)) for v in optimizer.variables]


def _align_slots(optimizer: Any, index_of: dict[int, int], owner: dict[int, int], seen: set[int]) -> None:
    """Fill ``owner`` (id of a slot -> parameter index) from the lists and dicts that an optimizer holds."""
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    known = list(getattr(optimizer, "_trainable_variables", ()))
    own = {id(v) for v in getattr(optimizer, "_variables", ())}
    for name, value in vars(optimizer).items():
        if isinstance(value, BaseOptimizer):
            _align_slots(value, index_of, owner, seen)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, BaseOptimizer) for v in value):
            for inner in value:
                _align_slots(inner, index_of, owner, seen)
        elif isinstance(value, (list, tuple)) and len(value) == len(known) and name != "_variables":
            for parameter, slot in zip(known, value, strict=True):
                # A list of optimizer variables can hold None (no slot) and placeholders that are not state.
                if id(slot) in own and id(parameter) in index_of:
                    owner[id(slot)] = index_of[id(parameter)]


def layers_without_jit(model: Any) -> list[str]:
    """Names of a model's layers that Keras does not compile, in order."""
    return [layer.name for layer in model._flatten_layers(include_self=False) if not layer.supports_jit]

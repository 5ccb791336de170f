"""From a Keras model, or a callable that builds one, to one traced step. No data, no allocation.

The step is the model's own ``train_step`` (or ``test_step``, ``predict_step``), so that custom steps, the compiled
optimizer, loss, metrics, loss scaling, gradient accumulation and moving averages are all part of it. Its *state* is a
tuple of lists in Keras's order::

    train:     (trainable, non_trainable, optimizer, metrics)
    evaluate:  (trainable, non_trainable, metrics)
    predict:   (trainable, non_trainable)

and its *batch* is ``(inputs, targets)`` or ``(inputs, targets, sample_weight)`` in train and evaluate mode,
``(inputs,)`` in predict mode and for models that are trained without targets. The flat order of arguments is that of
``jax.tree.flatten((state, batch))``, the flat order of results that of ``(new state, logs)`` or
``(new state, outputs)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.arguments import is_one_of
from autoshard_ilp.errors import AutoshardError, InputShapeError, UnsupportedModelError, said_by
from autoshard_ilp.traced import ArgumentInfo, ResultInfo, TracedStep

MODES = ("train", "predict")
_BATCH_ROLES = (("inputs", "input"), ("targets", "target"), ("sample_weight", "sample_weight"))
_ROLES = {"trainable": "parameter", "non_trainable": "non_trainable", "optimizer": "optimizer", "metrics": "metric"}


@compat.without_explicit_mesh()
@compat.with_jit()
def trace_model(
    model_or_builder: Any,
    *,
    mode: str = "train",
    batch_size: int | None = None,
    inputs: Any = None,
    targets: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    device_count: int = 1,
) -> TracedStep:
    """Trace one training or prediction step of a Keras model.

    Args:
        model_or_builder: a ``keras.Model``, or a callable without arguments that builds (and, for "train", compiles)
            one. A builder runs abstractly: no variable is allocated. A live model is built if necessary, and its
            optimizer's slots are created without values.
        mode: "train" (the whole step) or "predict" (the forward pass).
        batch_size: global batch; ``None``: from ``inputs`` or the model, else 32 rounded up to a multiple of
            ``device_count``.
        inputs: pytree of arrays, ``jax.ShapeDtypeStruct`` or ``keras.KerasTensor``; ``None``: the functional model's.
        targets: likewise; ``None``: derived from the compiled loss and the model's outputs.
        sample_weight: likewise; ``None``: the step takes no sample weights.
        sequence_length: size of the unknown dimension of inputs such as token ids; None: what the builder was loaded
            for (:func:`autoshard_ilp.models.load_model_factory`), if it was.
        device_count: only used for the default batch size.

    Returns:
        The traced step.

    Raises:
        InputShapeError: shapes are unknown or contradict each other.
        UnsupportedModelError: not a Keras model on JAX, not compiled (train), or its step cannot be traced.
    """
    from autoshard_ilp import keras_integration as ki

    if not is_one_of(mode, MODES):
        raise InputShapeError(f"mode must be one of {MODES}. Received: {mode!r}.")
    ki.ensure_jax_backend()
    if sequence_length is None and not _is_model(model_or_builder):
        sequence_length = getattr(model_or_builder, "sequence_length", None)  # of a model named for it

    def prepare(model: Any) -> tuple[tuple[Any, ...], int, Sequence[tuple[Any, Any]]]:
        return _prepare(model, mode, batch_size, inputs, targets, sample_weight, sequence_length, device_count)

    with ki.no_distribution():
        if _is_model(model_or_builder):
            model = model_or_builder
            batch, size, references = prepare(model)
            return _trace(model, mode, batch, size, references)
        with ki.undisturbed(), ki.abstract_construction() as built:
            model = _build(model_or_builder)
            batch, size, references = prepare(model)

        def rebuild() -> tuple[list[Any], ...]:
            with ki.no_distribution(), ki.undisturbed(), ki.abstract_construction():
                again = _build(model_or_builder)
                prepare(again)
            return ki.state_variables(again, mode)

        traced = _trace(model, mode, batch, size, [*built.references, *references])
        index = {id(v): i for i, v in enumerate(v for group in ki.state_variables(model, mode) for v in group)}
        return replace(traced, creation=tuple(index.get(id(v)) for v in built.created), rebuild=rebuild)


@compat.without_explicit_mesh()
@compat.with_jit()
def trace_batch(model: Any, mode: str, batch: tuple[Any, ...]) -> TracedStep:
    """Trace one step of a live, fully built model on a batch of exactly these shapes.

    Args:
        model: a Keras model that has been trained, planned or built before.
        mode: "train", "evaluate" (loss and metrics) or "predict".
        batch: what the model's step takes: a tuple of pytrees of ``jax.ShapeDtypeStruct``, absent parts ``None``.

    Raises:
        UnsupportedModelError: the step cannot be traced.
    """
    import jax

    from autoshard_ilp import keras_integration as ki

    leaves = jax.tree.leaves(batch)
    size = leaves[0].shape[0] if leaves and leaves[0].shape else 1
    with ki.no_distribution():
        return _trace(model, mode, batch, size, ())


def _is_model(candidate: Any) -> bool:
    import keras

    return isinstance(candidate, keras.Model)


def _build(builder: Any) -> Any:
    """Call the builder and check what it returns."""
    import keras

    if not callable(builder) or isinstance(builder, keras.Layer):
        raise UnsupportedModelError(
            f"A model must be a keras.Model, or a callable without arguments that builds one. Received: {builder!r}."
        )
    try:
        model = builder()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise UnsupportedModelError(
                f"A model builder must take no arguments. Received: {builder!r}, which failed with: {error}. "
                f"Wrap it: lambda: builder(...)."
            ) from error
        raise
    if not _is_model(model):
        raise UnsupportedModelError(
            f"A model builder must return a keras.Model. Received: {type(model).__name__}. Wrap layers in "
            f"keras.Sequential or keras.Model; use optimize_fn for other JAX functions."
        )
    return model


def _prepare(
    model: Any,
    mode: str,
    batch_size: int | None,
    inputs: Any,
    targets: Any,
    sample_weight: Any,
    sequence_length: int | None,
    device_count: int,
) -> tuple[tuple[Any, ...], int, Sequence[tuple[Any, Any]]]:
    """Shapes of the batch, and every variable of the step created.

    Returns:
        batch of ShapeDtypeStructs, batch size, ``(slot, parameter)`` pairs of an optimizer built here.
    """
    from autoshard_ilp import batch as batch_shapes
    from autoshard_ilp import keras_integration as ki

    if mode == "train" and not model.compiled:
        raise UnsupportedModelError(
            f"mode='train' plans the whole training step, so the model must be compiled. Received: {model.name!r}, not "
            f"compiled. Call model.compile(optimizer=..., loss=...) first (inside the builder), or use mode='predict'."
        )
    x, size = batch_shapes.input_specs(
        model, inputs, batch_size=batch_size, sequence_length=sequence_length, device_count=device_count
    )
    needs_outputs = mode == "train" and targets is None and model._compile_loss is not None
    outputs = None
    # A step of the model's own may call it on something else than the batch (a generator on noise).
    checks = inputs is not None and not (mode == "train" and ki.has_own_step(model, "train"))
    if needs_outputs or checks or not ki.is_fully_built(model):
        hint = "Check that inputs= has the structure, shapes and dtypes that the model takes."
        error = UnsupportedModelError if inputs is None else InputShapeError
        with _explained(model, "called symbolically", hint, error):
            outputs = ki.symbolic_outputs(model, x)
    if mode == "predict":
        return (x,), size, ()
    known: dict[str, Any] = {"batch_size": size, "sequence_length": sequence_length}
    known["of_any_size"] = inputs is not None and batch_shapes.has_several_sizes(x)
    if targets is not None:
        y, _ = batch_shapes.complete_specs(targets, kind="targets", **known)
    else:
        y = batch_shapes.target_specs(model, outputs) if needs_outputs else None
    weights = None
    if sample_weight is not None:
        weights, _ = batch_shapes.complete_specs(sample_weight, kind="sample_weight", **known)
    batch = (x,) if y is None and weights is None else (x, y) if weights is None else (x, y, weights)
    hint = "Check that targets= fits the loss and the metrics." if targets is not None else "Give targets=."
    error = UnsupportedModelError if targets is None else InputShapeError
    with _explained(model, "prepared for training", hint, error):
        built = ki.build_training_state(model, batch, outputs)
    return batch, size, built.references


@contextlib.contextmanager
def _explained(
    model: Any, action: str, hint: str, kind: type[AutoshardError] = UnsupportedModelError
) -> Iterator[None]:
    """Turn any failure inside the user's model into an error that says what was tried."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        raise kind(
            f"The model {model.name!r} could not be {action}. Received: {type(error).__name__}: "
            f"{said_by(error)}\n{hint}"
        ) from error


def _trace(
    model: Any,
    mode: str,
    batch: tuple[Any, ...],
    batch_size: int,
    references: Sequence[tuple[Any, Any]],
) -> TracedStep:
    import jax

    from autoshard_ilp import keras_integration as ki

    variables = ki.state_variables(model, mode)
    state = tuple([jax.ShapeDtypeStruct(tuple(v.shape), _variable_dtype(v)) for v in group] for group in variables)
    fn = _step_function(model, mode)
    if uncompiled := ki.layers_without_jit(model):
        hint = f"Keras does not compile these layers (their supports_jit is False): {', '.join(uncompiled)}. "
        hint += "If the error comes from one of them, apply it to the data, before the model."
    else:
        hint = "A step that trains with model.fit on JAX can be traced; try one step of fit on a small batch"
        hint += ", and give targets= if the derived ones are not what the loss takes." if mode == "train" else "."
    with _explained(model, f"traced (mode={mode!r})", hint), ki.repeatable() as drawn:
        closed_jaxpr, out_shape = jax.make_jaxpr(fn, return_shape=True)(state, batch)
        closed_jaxpr = compat.without_refs(closed_jaxpr)
    arguments = _arguments(model, mode, variables, state, batch, references)
    results, aliases = _results(model, mode, arguments, state, out_shape)
    return TracedStep(
        closed_jaxpr=closed_jaxpr,
        fn=fn,
        state=state,
        batch=batch,
        arguments=arguments,
        results=results,
        out_tree=jax.tree.structure(out_shape),
        aliases=aliases,
        model=model,
        batch_size=batch_size,
        mode=mode,
        draws=bool(drawn),
    )


def _variable_dtype(variable: Any) -> Any:
    import jax

    return variable._value.dtype if variable._value is not None else jax.dtypes.canonicalize_dtype(variable._dtype)


def variables_of(model: Any, mode: str) -> tuple[ArgumentInfo, ...]:
    """The variables of a live model's step without tracing it; none for a builder or a model that is not built yet."""
    import jax

    from autoshard_ilp import keras_integration as ki

    if not _is_model(model) or not ki.is_fully_built(model) or (mode == "train" and not model.compiled):
        return ()
    variables = ki.state_variables(model, mode)
    if mode == "train" and model.optimizer is not None and not model.optimizer.built:
        variables = variables[:2]  # neither slots nor metrics yet
    state = tuple([jax.ShapeDtypeStruct(tuple(v.shape), _variable_dtype(v)) for v in group] for group in variables)
    return _arguments(model, mode, variables, state, (), ())


def _step_function(model: Any, mode: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The model's own step as ``(state, batch) -> (new state, logs or outputs)``."""
    from autoshard_ilp import keras_integration as ki

    own = ki.own_step(model, mode)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        out, new_state = own(tuple(state), batch)
        return tuple(list(group) for group in new_state), out

    return step


def _arguments(
    model: Any,
    mode: str,
    variables: Sequence[Sequence[Any]],
    state: Any,
    batch: tuple[Any, ...],
    references: Sequence[tuple[Any, Any]],
) -> tuple[ArgumentInfo, ...]:
    from autoshard_ilp import keras_integration as ki
    from autoshard_ilp.batch import named_leaves

    unique = _UniquePaths()
    seeds = ki.seed_variable_ids(model)
    slots: list[int | None] = []
    if mode == "train":
        slots = ki.optimizer_slot_reference(model.optimizer, variables[0], references)
    found = []
    for kind, group, specs in zip(ki.GROUPS[mode], variables, state, strict=False):
        for i, (variable, spec) in enumerate(zip(group, specs, strict=True)):
            role = "seed" if id(variable) in seeds or _is_seed(variable) else _ROLES[kind]
            # Parameters come first, so an index into them is a flat index.
            reference = slots[i] if kind == "optimizer" else None
            found.append(ArgumentInfo(unique(variable.path), role, tuple(spec.shape), str(spec.dtype), reference))
    for (prefix, role), part in zip(_BATCH_ROLES, batch, strict=False):
        names = _functional_names(model, role)
        for name, spec in named_leaves(part, names):
            lone = prefix if role == "sample_weight" else f"{prefix}/0"
            path = lone if name is None else f"{prefix}/{name}"
            found.append(ArgumentInfo(unique(path), role, tuple(spec.shape), str(spec.dtype)))
    return tuple(found)


def _is_seed(variable: Any) -> bool:
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


class _UniquePaths:
    """Keras allows two variables of one path; a plan addresses each of them."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def __call__(self, path: str) -> str:
        count = self._seen[path] = self._seen.get(path, 0) + 1
        return path if count == 1 else self(f"{path}#{count}")


def _functional_names(model: Any, role: str) -> list[str]:
    """Names of a functional model's inputs or outputs, where the structure has no keys of its own."""
    from autoshard_ilp import keras_integration as ki

    if role == "input":
        return ki.input_names(model)
    if role in ("target", "output"):
        return ki.output_names(model)
    return []


def _results(
    model: Any, mode: str, arguments: Sequence[ArgumentInfo], state: Any, out_shape: Any
) -> tuple[tuple[ResultInfo, ...], dict[int, int]]:
    """Results in flat order; the new state has the structure of the old, checked here."""
    import jax

    from autoshard_ilp.batch import named_leaves

    new_state, outputs = out_shape
    if str(jax.tree.structure(new_state)) != str(jax.tree.structure(state)):
        raise UnsupportedModelError(
            f"A {mode} step must return its state in the structure that it took. Received: "
            f"{[len(g) for g in new_state]} arrays for {[len(g) for g in state]}. Correct the model's {mode}_step."
        )
    results, aliases = [], {}
    for i, spec in enumerate(jax.tree.leaves(new_state)):
        argument = arguments[i]
        results.append(ResultInfo(argument.path, argument.role, tuple(spec.shape), str(spec.dtype)))
        if (tuple(spec.shape), str(spec.dtype)) == (argument.shape, argument.dtype):
            aliases[i] = i
    names = _functional_names(model, "output") if mode == "predict" else []
    unique = _UniquePaths()
    for argument in arguments:
        unique(argument.path)
    for name, spec in named_leaves(outputs, names):
        results.append(ResultInfo(unique(f"outputs/{name or 0}"), "output", tuple(spec.shape), str(spec.dtype)))
    return tuple(results), aliases

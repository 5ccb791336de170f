"""Where Keras's trainer takes its step functions from, and how their state stays attached to the model.

``fit``, ``evaluate``, ``predict`` and their ``_on_batch`` variants call ``model.make_<kind>_function()`` and then
``model.<kind>_function(state, iterator)``. While they run, Keras detaches every variable's value (``_value = None``)
and hands the arrays around as ``state``; an exception in between loses them. The functions installed here attach the
current arrays again after every step and whenever something fails, so that the variables are always readable. Where
nothing but a local variable has the arrays, a Ctrl-C waits (:mod:`autoshard_ilp.interrupts`): from where Keras detaches
them to the step, and from where a program takes them over to where the new ones are attached.

Read against keras 3.15 (``backend/jax/trainer.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard_ilp import interrupts
from autoshard_ilp.keras_integration import methods
from autoshard_ilp.keras_integration.inspection import state_variables

FUNCTIONS = {"train": "train_function", "evaluate": "test_function", "predict": "predict_function"}
"""The attribute that holds a mode's compiled function."""

_MAKERS = {"train": "make_train_function", "evaluate": "make_test_function", "predict": "make_predict_function"}

Step = Callable[[Any, Any], tuple[Any, Any]]


def sync(model: Any) -> None:
    """Attaches the state of an epoch that is under way (or was interrupted) to the variables."""
    model.jax_state_sync()


def attach(model: Any, mode: str, state: Sequence[Sequence[Any]]) -> None:
    """Makes ``state`` the values of the variables, as they are: neither copied nor laid out again.

    Keras then reads the variables again before the next step, instead of keeping a copy of its own.
    """
    for variables, values in zip(state_variables(model, mode), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
    model._jax_state_synced = True


def reattach(model: Any, mode: str, state: Sequence[Sequence[Any]]) -> None:
    """Gives detached variables their values back; arrays that a failed step has consumed are left out."""
    for variables, values in zip(state_variables(model, mode), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            if variable._value is None and not value.is_deleted():
                variable._value = value
    model._jax_state_synced = True


def runs_eagerly(model: Any, draws: bool = False) -> bool:
    """Whether the user has asked for steps that are not compiled.

    That is by ``run_eagerly=True``, ``jit_compile=False`` or ``jax.disable_jit``.

    Keras sets ``jit_compile=False`` itself where a layer says ``supports_jit = False`` (``RandomRotation`` and others,
    for the sake of TensorFlow's compiler). A step that could be planned can be compiled, so that is no reason.

    Args:
        model: a compiled Keras model, or one that predicts.
        draws: whether its step draws from Python's generator in every call (``AugMix``); compiled, it would do so once.
    """
    import jax
    from keras.src.trainers.trainer import model_supports_jit

    asked = model.run_eagerly or jax.config.jax_disable_jit  # type: ignore[attr-defined]
    return bool(asked or (not model.jit_compile and (draws or model_supports_jit(model))))


def own_step(model: Any, mode: str) -> Step:
    """The model's own step as ``(state, data) -> (logs or outputs, new state)``."""

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        with only_new_losses(model):
            if mode == "train":
                return model.train_step(state, data)
            if mode == "evaluate":
                return model.test_step(state, data)
            outputs, non_trainable = model.predict_step(state, data)
            return outputs, (state[0], non_trainable)

    return step


@contextlib.contextmanager
def only_new_losses(model: Any) -> Iterator[None]:
    """Losses added by earlier calls are forgotten before and after, so that none of a new call is taken for one.

    Keras knows the losses that layers have added (``add_loss``, ``activity_regularizer``) by ``id()``, also after the
    tensors of an earlier call are gone. A step calls the model without forgetting them first, so a new loss at the
    address of an old one is, at times, left out of the sum or counted twice.
    """

    def forget() -> None:
        for layer in model._flatten_layers():
            layer._loss_ids.clear()

    forget()
    try:
        yield
    finally:
        forget()


def install(model: Any, steps: dict[str, Step], check: Callable[[str], None]) -> None:
    """Makes a model's trainer run ``steps`` instead of its own functions, also after another ``compile()``.

    Args:
        model: a Keras model; whatever was installed before is replaced.
        steps: mode -> ``(state, data) -> (logs or outputs, new state)``.
        check: called with the mode whenever a function is asked for, before the trainer takes the variables; raises
            where the model can no longer run.
    """
    for mode, step in steps.items():
        make, function = _maker(model, mode, step, check)
        setattr(model, _MAKERS[mode], make)
        setattr(model, FUNCTIONS[mode], function())  # at once: an epoch under way does not ask again
    model._purge_model_variables = _detaching(model)
    methods.install(model)


def _detaching(model: Any) -> Callable[..., None]:
    """Keras's own way to detach values, after which an interrupt waits for the step."""

    def purge(**which: bool) -> None:
        interrupts.hold()
        type(model)._purge_model_variables(model, **which)

    return purge


def refuse_training(model: Any, error: Exception) -> None:
    """Makes ``fit`` and ``train_on_batch`` raise ``error`` until :func:`allow_training`."""

    def refuse(force: bool = False) -> None:
        raise error

    model.make_train_function = refuse


def allow_training(model: Any) -> None:
    """Undoes :func:`refuse_training`."""
    if "make_train_function" in vars(model):
        del model.make_train_function


def _maker(
    model: Any, mode: str, step: Step, check: Callable[[str], None]
) -> tuple[Callable[..., None], Callable[[], Any]]:
    """What replaces ``make_<kind>_function``, and a function that makes ``<kind>_function``."""
    attribute = FUNCTIONS[mode]

    def guarded_step(state: Any, data: Any) -> tuple[Any, Any]:
        try:
            out, new_state = step(state, data)
            attach(model, mode, new_state)
        finally:
            interrupts.release()
        return out, new_state

    def function() -> Any:
        several = model._make_function(guarded_step, concatenate_outputs=mode == "predict")

        def run(state: Any, iterator: Any) -> tuple[Any, Any]:
            try:
                interrupts.release()
                return several(state, iterator)
            except BaseException:  # also KeyboardInterrupt: the variables must not stay detached
                reattach(model, mode, state)
                raise

        run.steps = model.steps_per_execution  # type: ignore[attr-defined]
        return run

    def make(force: bool = False) -> None:
        sync(model)
        check(mode)
        if force or getattr(getattr(model, attribute), "steps", None) != model.steps_per_execution:
            setattr(model, attribute, function())

    return make, function

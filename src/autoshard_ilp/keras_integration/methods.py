"""What a model's own methods do under a plan before and after Keras runs them.

``fit``, ``evaluate`` and ``predict`` say so when there is no sample. All of them, and those on one batch, run outside
the mesh of Explicit axes that ``jax.set_mesh`` may have set (:func:`autoshard_ilp._jax_compat.without_explicit_mesh`).
In a job of several processes ``train_on_batch`` and ``test_on_batch`` take arrays that are spread over them, class
weights included.

Read against keras 3.15 (``backend/jax/trainer.py``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.errors import InputShapeError

_LOOPS = ("fit", "evaluate", "predict")
_ON_BATCH = ("train_on_batch", "test_on_batch")
_PLAIN = (*_ON_BATCH, "predict_on_batch")


def install(model: Any) -> None:
    """Gives a model the methods of this module; one that the user has put on the model stays."""
    chosen = dict.fromkeys(_LOOPS, _looping) | dict.fromkeys(_PLAIN, _plain)
    if compat.coordination() is not None:
        chosen |= dict.fromkeys(_ON_BATCH, _on_batch)
    for name, wrapped in chosen.items():
        present = vars(model).get(name)
        if present is None or hasattr(present, "of_a_plan"):
            setattr(model, name, wrapped(model, name))


def _marked(run: Callable[..., Any], model: Any, name: str) -> Callable[..., Any]:
    method = functools.wraps(getattr(type(model), name))(compat.without_explicit_mesh()(run))
    method.of_a_plan = True  # type: ignore[attr-defined]
    return method


def _plain(model: Any, name: str) -> Callable[..., Any]:
    """The model's own method."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(model), name)(model, *args, **kwargs)

    return _marked(run, model, name)


# -- no samples


def _looping(model: Any, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("x")
        within_fit = kwargs.get("_use_cached_eval_dataset", False)  # validation data may be empty
        if not within_fit and _is_empty(data):
            raise _no_sample(name, data)
        try:
            return getattr(type(model), name)(model, *args, **kwargs)
        except UnboundLocalError as error:  # of the results of the last batch
            if not _comes_from_trainer(error):
                raise
            raise _no_sample(name, data) from error

    return _marked(run, model, name)


def _is_empty(data: Any) -> bool:
    """Whether data are arrays without a sample; what other kinds of data hold is known once they have been read."""
    import keras

    if isinstance(data, (list, tuple, dict)) and not data:
        return True
    parts = keras.tree.flatten(data) if isinstance(data, (list, tuple, dict)) else [data]
    shapes = [getattr(x, "shape", None) for x in parts]
    return any(isinstance(shape, tuple) and shape[:1] == (0,) for shape in shapes)


def _comes_from_trainer(error: BaseException) -> bool:
    from keras.src.backend.jax import trainer

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == trainer.__name__


def _no_sample(name: str, data: Any) -> InputShapeError:
    import keras

    parts = keras.tree.flatten(data) if isinstance(data, (list, tuple, dict)) else [data]
    shapes = [f"an array of shape {tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__ for x in parts]
    found = ", ".join(shapes[:4]) or "an empty " + type(data).__name__
    return InputShapeError(f"{name} runs on at least one sample. Received: {found}, which holds none. Pass some data.")


# -- arrays that are spread over processes


def _on_batch(model: Any, name: str) -> Callable[..., Any]:
    """The model's own method, which then takes arrays that are spread over processes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        method = getattr(type(model), name)
        given = inspect.signature(method).bind(model, *args, **kwargs)
        values = given.arguments
        if values.get("class_weight") is not None and values.get("sample_weight") is None and _is_shared(values["y"]):
            values["sample_weight"] = _weights_of(values["y"], values.pop("class_weight"))
        with _shared_arrays_stay():
            return method(*given.args, **given.kwargs)

    return _marked(run, model, name)


def _is_shared(value: Any) -> bool:
    import jax

    return isinstance(value, jax.Array) and not value.is_fully_addressable


def _weights_of(labels: Any, class_weight: Mapping[int, float]) -> Any:
    """The weight of each sample: Keras reads labels in NumPy, which no process can do with those of others.

    Args:
        labels: (samples,) or (samples, 1) of class numbers, or (samples, classes) of which the largest counts.
        class_weight: class number -> weight; 1 for others.
    """
    import jax
    import jax.numpy as jnp
    import keras

    if labels.ndim > 2:
        raise InputShapeError(
            "class_weight goes with labels of shape (samples,), (samples, 1) or (samples, classes). Received: labels "
            f"of shape {tuple(labels.shape)}. Pass sample_weight instead."
        )

    @jax.jit
    def weights(y: Any) -> Any:
        if y.ndim == 2:
            y = y[:, 0] if y.shape[1] == 1 else jnp.argmax(y, axis=-1)
        number = jnp.round(y).astype("int32")
        found = jnp.ones(number.shape, keras.config.floatx())
        for label, weight in class_weight.items():
            found = jnp.where(number == label, weight, found).astype(found.dtype)
        return found

    return weights(labels)


@contextlib.contextmanager
def _shared_arrays_stay() -> Iterator[None]:
    """Keras copies every batch to one device before its step sees it; of other processes' shards it cannot.

    Arrays that are spread over processes go to the step as they are, which lays them out; all others as Keras does it.
    """
    import keras
    from keras.src.backend.jax import trainer

    really = trainer._distribute_data

    def distribute(data: Any, layouts: Any = None) -> Any:
        if layouts is not None or not any(map(_is_shared, keras.tree.flatten(data))):
            return really(data, layouts)
        return keras.tree.map_structure(lambda x: x if _is_shared(x) or x is None else really(x), data)

    trainer._distribute_data = distribute
    try:
        yield
    finally:
        trainer._distribute_data = really

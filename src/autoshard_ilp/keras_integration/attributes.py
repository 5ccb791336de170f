"""What a model's step reads besides variables: numbers, arrays and functions that are attributes of layers.

Tracing takes them as they are: the slope of a ``LeakyReLU``, the statistics of an adapted ``Normalization``. Keras
traces at the first call of ``fit``, and again after ``compile``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCALARS = (bool, int, float, complex, str, type(None))

_OF_TRAINERS = frozenset(
    """
    built stop_training stop_evaluating stop_predicting train_function test_function predict_function
    """.split()  # noqa: SIM905
)
"""What Keras itself sets while a model is used."""


def attributes(model: Any) -> tuple[Any, ...]:
    """Values of the public attributes of all layers and of the optimizer, in order.

    Numbers and texts, arrays and functions, also inside lists, tuples and dictionaries; of a model no functions, since
    its trainer keeps its own there. Arrays and functions are kept as they are, to be told apart by identity.
    """
    from keras import Model

    found: list[Any] = []
    for owner in (*model._flatten_layers(), getattr(model, "optimizer", None)):
        functions = not isinstance(owner, Model)
        for name, value in vars(owner).items() if owner is not None else ():
            if not name.startswith("_") and name not in _OF_TRAINERS:
                found += ((name, x) for x in _values(value, functions))
    return tuple(found)


def same_attributes(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether nothing was set between two answers of :func:`attributes`."""
    return len(a) == len(b) and all(
        n == m and (x is y or (isinstance(x, SCALARS) and type(x) is type(y) and x == y))
        for (n, x), (m, y) in zip(a, b, strict=True)
    )


def _values(value: Any, functions: bool) -> Iterator[Any]:
    import jax
    import numpy as np

    if isinstance(value, (*SCALARS, np.ndarray, np.generic, jax.Array)):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _values(value[key], functions)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _values(part, functions)
    elif functions and callable(value) and hasattr(value, "__qualname__"):
        yield value

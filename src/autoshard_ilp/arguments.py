"""Checks of single arguments that many public functions share; each error says the rule and what was received."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autoshard_ilp.errors import InputShapeError, PlanMismatchError


def whole_number(name: str, value: Any, least: int = 1, *, none: str = "") -> None:
    """Raises InputShapeError unless ``value`` is an integer of at least ``least``, or None where ``none`` says why."""
    if none and value is None:
        return
    found = integer(value)
    if found is None or found < least:
        rest = f", or None: {none}" if none else ""
        raise InputShapeError(f"{name} is an integer of at least {least}{rest}. Received: {value!r}.")


def integer(value: Any) -> int | None:
    """A whole number (NumPy's too) as the int that files and keys can hold; None for a bool and for all else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several numbers has the method, and raises
        return None


def real(value: Any) -> float | None:
    """A number (NumPy's too) as a float, infinite beyond the floats; None for a bool and for all else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return -math.inf if value < 0 else math.inf


def is_one_of(value: Any, names: Collection[str]) -> bool:
    """Whether ``value`` is one of some names; whatever else it is, False and no exception."""
    return isinstance(value, str) and value in names


def string(name: str, value: Any) -> None:
    """Raises InputShapeError unless ``value`` is a string."""
    if not isinstance(value, str):
        raise InputShapeError(f"{name} is a string. Received: {value!r}.")


def number(name: str, value: Any, least: float, below: float) -> None:
    """Raises InputShapeError unless ``least <= value < below`` (``below`` itself only where it is infinite).

    NumPy's numbers are numbers.
    """
    found = real(value)
    if found is None or not found >= least or not (found < below or found == below == math.inf):
        upper = "" if below == math.inf else f" and below {below:g}"
        raise InputShapeError(f"{name} is a number of at least {least:g}{upper}. Received: {value!r}.")


def flag(name: str, value: Any) -> None:
    """Raises InputShapeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InputShapeError(f"{name} is True or False. Received: {value!r}.")


def mapping(name: str, value: Any, of: str) -> None:
    """Raises InputShapeError unless ``value`` is a mapping or None; ``of`` shows one."""
    if value is not None and not isinstance(value, Mapping):
        raise InputShapeError(f"{name} is a mapping such as {of}. Received: {value!r}.")


def file_path(value: Any) -> Path:
    """``value`` as a path; InputShapeError where it is none."""
    try:
        path = Path(value)
        if "\0" in str(path):
            raise TypeError
        return path
    except TypeError:
        raise InputShapeError(f"A file is named by its path, a string or os.PathLike. Received: {value!r}.") from None


def keras_model(value: Any, call: str) -> None:
    """Raises PlanMismatchError unless ``value`` is a built Keras model that ``call`` can lay out."""
    import keras

    if not isinstance(value, keras.Model):
        raise PlanMismatchError(
            f"{call} takes the Keras model that was planned. Received: {value!r} of type {type(value).__name__}."
        )

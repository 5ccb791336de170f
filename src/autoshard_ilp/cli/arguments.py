"""What commands make of their arguments: a model's builder, pins, and where a plan comes from."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard_ilp.console import quiet_native_logs
from autoshard_ilp.errors import AutoshardError, InputShapeError, UnsupportedModelError


def factory_of(model: str, sequence_length: int | None) -> Callable[[], Any]:
    """The builder of a model named on the command line, its libraries loaded quietly."""
    with quiet_native_logs():
        from autoshard_ilp.models import load_model_factory

        factory = load_model_factory(model, sequence_length=sequence_length)
        if model.startswith("hub:"):
            with contextlib.suppress(ImportError), _without_tensorflow():  # the factory says what to install
                import keras_hub  # noqa: F401
        import jax

        try:
            jax.devices()  # plugins load now
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"JAX must find its devices; planning needs no more than JAX_PLATFORMS=cpu. Received: "
                f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r} ({error})"
            ) from error

    def build() -> Any:
        try:
            return factory()
        except AutoshardError:
            raise
        except (Exception, SystemExit) as error:
            raise UnsupportedModelError(
                f"The model's factory must build a model. Received: {model!r}, which raised {type(error).__name__}: "
                f"{error}"
            ) from error

    return build


@contextlib.contextmanager
def _without_tensorflow() -> Iterator[None]:
    """KerasHub loads TensorFlow where it finds it, which takes seconds, for tokenizers, which no plan needs."""
    hidden = [name for name in ("tensorflow", "tensorflow_text") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def parse_pins(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Reads ``--pin`` options: ``REGEX=SPEC``, with one entry of SPEC per dimension.

    Args:
        texts: such as ``'query/kernel=(None, "model")'``, or without quotes ``query/kernel=None,data+model``; ``-``
            stands for None, as in a plan's summary. The last ``=`` separates.

    Raises:
        InputShapeError: no ``=``, an entry that is no axis, or one regular expression with two layouts.
    """
    pins: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern:
            raise InputShapeError(
                f"A pin is REGEX=SPEC, such as 'query/kernel=(None, \"model\")' or 'query/kernel=None,model'. "
                f"Received: {text!r}."
            )
        entries = _spec(spec.strip(), text)
        if pins.get(pattern, entries) != entries:
            raise InputShapeError(
                f"A regular expression is pinned once. Received: {pattern!r} with {pins[pattern]} and {entries}."
            )
        pins[pattern] = entries
    return pins


def _spec(text: str, pin: str) -> tuple[Any, ...]:
    try:
        value = ast.literal_eval(text)
        entries = tuple(value) if isinstance(value, tuple | list) else (value,)
    except (ValueError, SyntaxError):
        inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        parts = [part.strip() for part in inner.removesuffix(",").split(",")]
        entries = tuple(None if p in ("None", "-") else tuple(p.split("+")) if "+" in p else p for p in parts)
    for entry in entries:
        names = entry if isinstance(entry, tuple | list) else (entry,)
        if entry is not None and not all(isinstance(n, str) and re.fullmatch(r"[^\s()\[\],'\"+]+", n) for n in names):
            raise InputShapeError(
                f"A pin's layout has, per dimension, None, a mesh axis, or a tuple of mesh axes. Received: {pin!r}. "
                'Write it as (None, "model") or None,data+model.'
            )
    return tuple(tuple(e) if isinstance(e, list) else e for e in entries)


def budget_of(text: str) -> str | int:
    """A memory budget as ``optimize`` takes it: plain digits are bytes, all else is read there."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else text


def with_origin(plan: Any, origin: Mapping[str, Any]) -> Any:
    """The plan with what the command line made it from."""
    from dataclasses import replace

    return replace(plan, origin={**plan.origin, **origin})

"""Building a Keras model without allocating it, and without leaving a trace in Keras's global state.

Read against keras 3.15 (``backend/jax/core.py``, ``optimizers/base_optimizer.py``, ``utils/naming.py``).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autoshard_ilp.errors import UnsupportedModelError

_PATCH_LOCK = threading.RLock()


def ensure_jax_backend() -> None:
    """Make sure that Keras runs on JAX; choose it when nothing was chosen yet.

    Raises:
        UnsupportedModelError: Keras is already imported with, or configured for, another backend.
    """
    remedy = "Set the environment variable KERAS_BACKEND=jax before keras is imported (and restart the process)."
    if "keras" in sys.modules:
        import keras

        if keras.backend.backend() != "jax":
            raise UnsupportedModelError(
                f"Sharding plans need Keras on the JAX backend. Received: keras is imported with the backend "
                f"{keras.backend.backend()!r}. {remedy}"
            )
        return
    chosen = os.environ.setdefault("KERAS_BACKEND", "jax")
    if chosen != "jax":
        raise UnsupportedModelError(
            f"Sharding plans need Keras on the JAX backend. Received: KERAS_BACKEND={chosen!r}. {remedy}"
        )


@dataclass(eq=False)
class AbstractBuild:
    """What was created inside one :func:`abstract_construction`.

    Attributes:
        variables: every variable whose value was left unset, in order of creation; ``v._initializer`` makes its value.
        created: every variable, those made from an array included, in order of creation.
        references: ``(optimizer variable, model variable)`` pairs, as the optimizer declared them.
        models: every ``keras.Model`` instance, in order of creation.
    """

    variables: list[Any] = field(default_factory=list)
    created: list[Any] = field(default_factory=list)
    references: list[tuple[Any, Any]] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def abstract_construction(layout_of: Callable[[int, Any], Any] | None = None) -> Iterator[AbstractBuild]:
    """Variables created in this context get a shape, a dtype and an initializer, but no value.

    Keras computes the placeholder ``initializer(shape, dtype)`` whenever such a variable is read, so a model built here
    still works when it is used directly; it is only slow. Variables created from a concrete array keep it. Only the
    entering thread is affected, and every patch is undone on exit, also after an exception.

    Args:
        layout_of: called with the number of variables created before and a new variable; the sharding that values
            assigned to it are laid out in, or ``None`` for Keras's own choice.
    """
    from keras.src.backend.jax.core import JaxVariable
    from keras.src.backend.jax.trainer import JAXTrainer
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    build = AbstractBuild()
    seen: set[int] = set()
    owner = threading.get_ident()
    initialize = JaxVariable._initialize_with_initializer
    deferred = JaxVariable._deferred_initialize
    initialize_layout = JaxVariable._initialize_layout
    add_from_reference = BaseOptimizer.add_variable_from_reference
    initialize_trainer = JAXTrainer.__init__

    def layout_and_record(self: Any) -> None:
        if threading.get_ident() == owner and id(self) not in seen:
            seen.add(id(self))
            if layout_of is not None and self._layout is None:
                self._layout = layout_of(len(build.created), self)
            build.created.append(self)
        initialize_layout(self)

    def initialize_abstractly(self: Any, initializer: Any) -> None:
        if threading.get_ident() != owner:
            initialize(self, initializer)
            return
        self._initialize_layout()
        self._value = None
        self._initializer = _OfTensors(initializer)
        build.variables.append(self)

    def deferred_abstractly(self: Any) -> None:
        if threading.get_ident() != owner:
            deferred(self)
        elif self._value is None:
            initialize_abstractly(self, self._initializer)

    def add_and_record(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = add_from_reference(self, reference_variable, *args, **kwargs)
        build.references.append((slot, reference_variable))
        return slot

    def initialize_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == owner:
            build.models.append(self)
        initialize_trainer(self, *args, **kwargs)

    with _PATCH_LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(_patched(JaxVariable, "_initialize_with_initializer", initialize_abstractly))
        stack.enter_context(_patched(JaxVariable, "_deferred_initialize", deferred_abstractly))
        stack.enter_context(_patched(JaxVariable, "_initialize_layout", layout_and_record))
        stack.enter_context(_patched(BaseOptimizer, "add_variable_from_reference", add_and_record))
        stack.enter_context(_patched(JAXTrainer, "__init__", initialize_model))
        yield build


class _OfTensors:
    """An initializer as Keras takes it: one may return a number or a NumPy array, of which Keras makes a tensor."""

    def __init__(self, initializer: Callable[..., Any]) -> None:
        self.__wrapped__ = initializer  # whose signature Keras asks for

    def __call__(self, shape: Any, dtype: Any = None, **keywords: Any) -> Any:
        from keras import ops

        return ops.convert_to_tensor(self.__wrapped__(shape, dtype=dtype, **keywords), dtype=dtype)


@contextlib.contextmanager
def _patched(owner: type, name: str, value: Any) -> Iterator[None]:
    """Replace a class attribute for a while; an inherited one is removed again, not copied down."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def no_distribution() -> Iterator[None]:
    """Suspend the global ``keras.distribution``: its constraints must not be baked into the traced step."""
    import keras

    before = keras.distribution.distribution()
    if before is None:
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """``keras.utils.set_random_seed(seed)`` for a while; Python's, numpy's and Keras's generators are put back."""
    import keras

    with undisturbed():
        keras.utils.set_random_seed(seed)
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Puts back all that building a model changes: random generators (Python, numpy, Keras) and names given so far.

    A model built after planning then has the initial values and the variable paths that it would have had without.
    """
    import numpy as np
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

    python_state, numpy_state = random.getstate(), np.random.get_state()
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    drawn = None if generator is None else generator.state._value
    seed = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    names = global_state.get_global_attribute("object_name_uids")
    kept = None if names is None else names.copy()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None:
            generator.state._value = drawn
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, seed)
        global_state.set_global_attribute("object_name_uids", kept)


@contextlib.contextmanager
def repeatable() -> Iterator[list[str]]:
    """Python's and numpy's random generators from the same state every time, and put back afterwards.

    Some layers (``AugMix``) draw from them while they are traced. The same model must trace to the same step: when it
    is planned, when the plan is applied, and in every process.

    Yields:
        a list that holds, afterwards, the names of the generators that were drawn from.
    """
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    python_start, numpy_start = random.getstate(), _position(np.random.get_state())
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        drawn += ["Python"] if random.getstate() != python_start else []
        drawn += ["numpy"] if _position(np.random.get_state()) != numpy_start else []
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _position(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator that can be compared."""
    return state[1].tobytes(), *state[2:]

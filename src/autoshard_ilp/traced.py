"""A step that was traced: its jaxpr, and what its arguments and results are. :mod:`.trace` makes one of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArgumentInfo:
    """One argument of the step.

    Attributes:
        path: Keras's ``variable.path``, "inputs/<name>", "targets/<name>" or "sample_weight"; unique in the step (a
            repeated path gets "#2", "#3", ...).
        role: "parameter", "non_trainable", "optimizer", "metric", "seed", "input", "target" or "sample_weight".
        shape: global shape.
        dtype: name of the dtype, e.g. "bfloat16".
        reference: for an optimizer slot, the flat index of the parameter that it belongs to; shapes may differ.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    reference: int | None = None


@dataclass(frozen=True)
class ResultInfo:
    """One result of the step: ``path`` is "outputs/<name>" for logs and predictions (role "output"), and the argument's
    path and role for updated state."""

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TracedStep:
    """One traced step and what its arguments and results are.

    Attributes:
        closed_jaxpr: ``jax.core.ClosedJaxpr`` of ``fn`` on flat arguments.
        fn: pure function (state, batch) -> (state, logs or outputs).
        state, batch: pytrees of ``jax.ShapeDtypeStruct``.
        arguments, results: in flat order.
        out_tree: tree structure of ``fn``'s result.
        aliases: flat result index -> flat argument index: the state that may be updated in place.
        model: the live or abstract Keras model.
        batch_size: global batch.
        mode: "train", "evaluate" or "predict".
        creation: flat argument index of every variable that the builder made, in order of creation; ``None`` for
            variables that are not part of the state. Empty for a model that was passed in live.
        rebuild: builds the model once more, abstractly, and returns the variables behind ``state``; ``None`` for a
            model that was passed in live.
        draws: whether tracing it drew from Python's or numpy's random generators: what was drawn is part of the step.
    """

    closed_jaxpr: Any
    fn: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    arguments: tuple[ArgumentInfo, ...]
    results: tuple[ResultInfo, ...]
    out_tree: Any
    aliases: dict[int, int]
    model: Any
    batch_size: int
    mode: str
    creation: tuple[int | None, ...] = ()
    rebuild: Callable[[], tuple[list[Any], ...]] | None = None
    draws: bool = False

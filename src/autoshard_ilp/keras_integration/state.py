"""The values behind a step's state: read, created already sharded, written back.

Read against keras 3.15 (``backend/jax/core.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.errors import PlanMismatchError
from autoshard_ilp.keras_integration.construction import seeded
from autoshard_ilp.keras_integration.inspection import GROUPS, state_variables

if TYPE_CHECKING:
    from autoshard_ilp.traced import TracedStep


def compiled_state(model: Any, mode: str = "train") -> tuple[list[Any], ...]:
    """Current values of the state of a live, built model, in the order of :func:`state_variables`."""
    return tuple([v.value for v in group] for group in state_variables(model, mode))


def write_state(model: Any, state: Sequence[Sequence[Any]]) -> None:
    """Store a step's state in the model's variables, keeping each array's sharding.

    The arrays are shared, not copied: do not donate them to another step afterwards.

    Args:
        model: a live or abstract Keras model, built the way it was when it was traced.
        state: lists of arrays as a step returns them: four of them (train), three (evaluate) or two (predict).

    Raises:
        PlanMismatchError: the numbers or the shapes of variables and arrays differ.
    """
    mode = next((m for m, kinds in GROUPS.items() if len(kinds) == len(state)), "train")
    groups = state_variables(model, mode)
    for kind, variables, values in zip(GROUPS[mode], groups, state, strict=True):
        if len(variables) != len(values):
            raise PlanMismatchError(
                f"The state must have one array per {kind} variable. Received: {len(values)} arrays for "
                f"{len(variables)} variables. Use the model that the plan was made for, compiled the same way."
            )
        for variable, value in zip(variables, values, strict=True):
            if tuple(variable.shape) != tuple(value.shape):
                raise PlanMismatchError(
                    f"The state must match the model's shapes. Received: {tuple(value.shape)} for the variable "
                    f"{variable.path!r} of shape {tuple(variable.shape)}."
                )
    for variables, values in zip(groups, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            # Not assign(): that would lay the array out again by the variable's old layout.
            variable._value = value


def refuse_deleted(model: Any, mode: str, state: Sequence[Sequence[Any]]) -> None:
    """Raises where a variable holds an array that an earlier step has consumed: jaxlib 0.10 may crash on one.

    Raises:
        PlanMismatchError: such a variable, by its path.
    """
    import jax

    def is_consumed(value: Any) -> bool:
        return isinstance(value, jax.Array) and value.is_deleted()

    if not any(is_consumed(value) for group in state for value in group):
        return
    for variables, values in zip(state_variables(model, mode), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            if is_consumed(value):
                raise PlanMismatchError(
                    f"The model's variables must hold arrays that still exist. Received: {variable.path!r}, which was "
                    "assigned an array that a training step has consumed since (its state is donated). Keep copies of "
                    "values, such as model.get_weights() or variable.value.copy(), and assign those."
                )


def place(value: Any, sharding: Any) -> Any:
    """A global array laid out; what lies there already is returned as it is.

    Args:
        value: a JAX array, or a numpy array of the global shape. Over several processes every process passes the same
            global value and keeps its own shards.
        sharding: a ``jax.sharding.Sharding``.
    """
    import jax
    import numpy as np

    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if sharding.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def initial_state(traced: TracedStep, shardings: Any = None, seed: int | None = None) -> tuple[list[Any], ...]:
    """Create the state of a traced step, already sharded.

    Variables without a value are made by one compiled program of all initializers with ``out_shardings``, so that no
    full tensor exists on any one device (except inside initializers that do not partition, such as a QR). Variables
    that have a value, as in a live model, are copied to their shardings.

    Args:
        traced: a traced step.
        shardings: a pytree of shardings like ``traced.state``; ``None``: JAX's default device.
        seed: with a builder, build it once more (abstractly) after ``keras.utils.set_random_seed(seed)``, so that the
            values are those of an eager build with that seed. ``None``, or a live model: the initializers as they are.

    Returns:
        Arrays in the structure of ``traced.state``.

    Raises:
        PlanMismatchError: the builder makes another model the second time.
    """
    import jax

    groups = state_variables(traced.model, traced.mode)
    if seed is not None and traced.rebuild is not None:
        with seeded(seed):
            groups = traced.rebuild()
    flat_variables, treedef = jax.tree.flatten(groups, is_leaf=lambda x: not isinstance(x, (list, tuple)))
    specs = jax.tree.leaves(traced.state)
    # A variable may be declared wider than JAX's arrays are (float64, int64): its value is not.
    found = [(tuple(v.shape), str(jax.dtypes.canonicalize_dtype(v.dtype))) for v in flat_variables]
    if found != [(tuple(s.shape), str(s.dtype)) for s in specs]:
        raise PlanMismatchError(
            "The model builder must build the same variables each time. Received: a second build with other "
            "variables. Make the builder deterministic, or pass seed=None."
        )
    flat_shardings = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings)
    if len(flat_shardings) != len(specs):
        raise PlanMismatchError(
            f"shardings must have one entry per state array. Received: {len(flat_shardings)} for {len(specs)} arrays."
        )
    return jax.tree.unflatten(treedef, create_values(flat_variables, flat_shardings))


def initial_values(traced: TracedStep, positions: Sequence[int], shardings: Sequence[Any]) -> dict[int, Any]:
    """As :func:`initial_state`, for some variables alone: flat position in the state -> value."""
    variables = [v for group in state_variables(traced.model, traced.mode) for v in group]
    return dict(zip(positions, create_values([variables[i] for i in positions], shardings), strict=True))


@compat.without_explicit_mesh()
@compat.with_jit()
def create_values(variables: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Values of variables: initializers in one jit, existing values by ``device_put``."""
    import jax
    import keras

    missing = [i for i, v in enumerate(variables) if v._value is None]
    # A copy first: device_put shares the buffer of the device that already holds it (may_alias=False does not prevent
    # that for a replicated result), and a donated state would then take the model's own array with it.
    values = {
        i: v._value.copy() if shardings[i] is None else place(v._value.copy(), shardings[i])
        for i, v in enumerate(variables)
        if v._value is not None
    }

    def create() -> tuple[list[Any], dict[int, Any]]:
        # An initializer may draw from a SeedGenerator, whose state moves on; the scope keeps that pure.
        with keras.StatelessScope(initialize_variables=False) as scope:
            made = []
            for i in missing:
                variable = variables[i]
                value = variable._initializer(variable._shape, dtype=variable._dtype)
                made.append(keras.ops.convert_to_tensor(value, dtype=variable._dtype))
        moved = {i: scope.get_current_value(v) for i, v in enumerate(variables)}
        moved = {i: value for i, value in moved.items() if value is not None}
        return [moved.pop(i, value) for i, value in zip(missing, made, strict=True)], moved

    if not missing:
        return [values[i] for i in range(len(variables))]
    moved_indices = jax.eval_shape(create)[1]
    if all(s is None for s in shardings):
        created, moved = jax.jit(create)()
    else:
        out = ([shardings[i] for i in missing], {i: shardings[i] for i in moved_indices})
        created, moved = jax.jit(create, out_shardings=out)()
    values.update(moved)
    values.update(zip(missing, created, strict=True))
    return [values[i] for i in range(len(variables))]

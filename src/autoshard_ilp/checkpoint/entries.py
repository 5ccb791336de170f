"""What a checkpoint holds: arrays in order, with the names by which they find their places again.

The variables of a Keras model are matched by kind and order, not by name: Keras numbers the layers of every new
instance anew. Any other pytree is matched by the keys of its leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.errors import CheckpointError

KINDS = ("parameter", "non_trainable", "optimizer", "metric")
"""Kinds of variables, in the order of a training step's state."""


@dataclass(frozen=True)
class Entry:
    """One array.

    Attributes:
        name: Keras path, or the keys of a leaf.
        kind: one of :data:`KINDS`; "" for a leaf of any other pytree.
        shape, dtype: of the whole array; the dtype of a random key is "key<...>".
        value: the array, or None where there is none yet.
        sharding: where it lies or shall lie; None: JAX's default device.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    value: Any = None
    sharding: Any = None

    def describe(self) -> dict[str, Any]:
        """As plain data, without the array."""
        return {"name": self.name, "kind": self.kind, "shape": list(self.shape), "dtype": self.dtype}


def entries_of_model(model: Any) -> list[Entry]:
    """Every variable of a model and its optimizer; the state of an epoch under way is attached first."""
    from autoshard_ilp import keras_integration as ki

    ki.sync(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    found = []
    for kind, variables in zip(KINDS, ki.state_variables(model, "train"), strict=True):
        for v in variables:
            value = v._value
            layout = v._layout if hasattr(v._layout, "device_set") else None
            dtype = str(value.dtype) if value is not None else str(v._dtype)
            sharding = layout if value is None else value.sharding
            found.append(Entry(v.path, kind, tuple(v.shape), dtype, value, sharding))
    return found


def entries_of_tree(tree: Any, plan: Any = None) -> list[Entry]:
    """Every leaf of a pytree of arrays or ``jax.ShapeDtypeStruct``.

    Args:
        tree: the state of a Keras step (a tuple of lists, as ``plan.init_state()`` makes it), or anything else.
        plan: names the variables of such a state.

    Raises:
        CheckpointError: a leaf is no array.
    """
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_state = _is_state(tree)
    names = [leaf.path for leaf in plan.arguments[: len(leaves)]] if is_state and plan is not None else None
    found = []
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path) if names is None else names[i]
        value = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else _as_array(leaf, name)
        kind = KINDS[path[0].idx] if is_state else ""
        dtype, sharding = str(value.dtype), getattr(value, "sharding", None)
        array = None if isinstance(value, jax.ShapeDtypeStruct) else value
        found.append(Entry(name, kind, tuple(value.shape), dtype, array, sharding))
    return found


def _is_state(tree: Any) -> bool:
    return isinstance(tree, tuple) and 2 <= len(tree) <= len(KINDS) and all(type(part) is list for part in tree)


def _as_array(leaf: Any, name: str) -> Any:
    import jax.numpy as jnp

    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A checkpoint holds arrays. Received: {name} = {leaf!r} of type {type(leaf).__name__}. Leave it out."
        ) from error


def matched(wanted: Sequence[Entry], stored: Sequence[Entry], kinds: Sequence[str]) -> dict[int, int]:
    """Which stored entry goes into which wanted one.

    Args:
        wanted: what shall be filled.
        stored: what the checkpoint holds.
        kinds: kinds that must be found; metric variables are taken where they fit.

    Returns:
        position in ``wanted`` -> position in ``stored``.

    Raises:
        CheckpointError: another number of variables, another shape or dtype.
    """
    found: dict[int, int] = {}
    by_kind = all(e.kind for e in wanted) and all(e.kind for e in stored)
    for kind in kinds if by_kind else ("",):
        ours = [i for i, e in enumerate(wanted) if not by_kind or e.kind == kind]
        theirs = [i for i, e in enumerate(stored) if not by_kind or e.kind == kind]
        problem = _difference([wanted[i] for i in ours], [stored[i] for i in theirs], by_kind)
        if problem and kind == "metric":
            continue
        if problem:
            what = {"": "arrays", "optimizer": "optimizer variables"}.get(kind, f"{kind.replace('_', '-')} variables")
            hint = " Pass optimizer=False to restore the weights alone." if kind == "optimizer" else ""
            raise CheckpointError(f"A checkpoint holds the {what} that are restored from it. {problem}{hint}")
        found.update(zip(ours, theirs, strict=True))
    return found


def _difference(wanted: Sequence[Entry], stored: Sequence[Entry], by_kind: bool) -> str:
    for a, b in zip(wanted, stored, strict=False):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or (not by_kind and a.name != b.name):
            return (
                f"Needed: {a.name!r} of shape {a.shape} and dtype {a.dtype}. Received: {b.name!r} of shape {b.shape} "
                f"and dtype {b.dtype} in its place (of {len(stored)} for {len(wanted)})."
            )
    if len(wanted) != len(stored):
        return f"Needed: {len(wanted)}. Received: {len(stored)}."
    return ""

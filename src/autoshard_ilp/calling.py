"""Calling a planned step: its arguments checked, and JAX's own complaints turned into ours.

``plan.jit()`` is a :class:`PlannedJit`. Checking costs next to nothing while calls succeed: shapes, dtypes and
structure are compared while the step is traced, and the rest only after JAX has refused a call, which it does before it
runs or donates anything. Only arrays that were donated before are looked for in advance: jaxlib 0.10 may crash on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.errors import AutoshardError, PlanMismatchError
from autoshard_ilp.processes import place_arguments

CASTABLE_ROLES = frozenset({"input", "target", "sample_weight"})
"""Arguments whose dtype is converted where every number keeps its meaning (:func:`keeps_meaning`)."""

FLOATS_OF_KERAS = 32
"""Bits of the floating-point numbers for which whole ones are taken, of however many bits: Keras does the same."""


class PlannedJit:
    """The compiled step of a plan: call it, or ``lower`` it; everything else of ``jax.jit``'s functions works too.

    Raises:
        PlanMismatchError: (from calls and ``lower``) arguments of another number, structure, shape, dtype or layout.
    """

    def __init__(self, jitted: Any, check: Callable[[Sequence[Any]], None], shardings: Any = None) -> None:
        self._jitted, self._check, self._shardings = jitted, check, shardings
        self.__wrapped__ = jitted

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._has_deleted(args):
            self._check(args)
        placed = args if self._shardings is None else place_arguments(args, self._shardings)
        return self._explained(self._jitted, placed, keywords)

    def lower(self, *args: Any, **keywords: Any) -> Any:
        """``jax.jit(...).lower``, for ``plan.abstract_args()`` or real arrays."""
        with compat.with_jit():
            return self._explained(self._jitted.lower, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._jitted, name)

    @staticmethod
    def _has_deleted(args: Any) -> bool:
        import jax

        concrete = (x for x in jax.tree.leaves(args) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
        return any(x.is_deleted() for x in concrete)

    def _explained(self, function: Any, args: Sequence[Any], keywords: Any) -> Any:
        if keywords:
            raise PlanMismatchError(
                f"The planned step takes positional arguments. Received: the keywords {sorted(keywords)}. Pass every "
                "argument by position, in the order of plan.abstract_args()."
            )
        try:
            with compat.without_explicit_mesh():
                return function(*args)
        except AutoshardError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            # Reported only if it is the arguments' fault; an error of JAX itself stays as it is.
            try:
                self._check(args)
            except PlanMismatchError as mismatch:
                raise mismatch from error
            raise


def check_structure(args: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises PlanMismatchError where ``args`` are not ``len(expected)`` pytrees of the structures of ``expected``."""
    import jax

    if len(args) != len(expected):
        raise PlanMismatchError(
            "The planned step takes arguments of the structure it was planned for. Planned: "
            f"{len(expected)} positional arguments. Received: {len(args)}. plan.abstract_args() shows them."
        )
    for position, (arg, want) in enumerate(zip(args, expected, strict=True)):
        found: Any = jax.tree.structure(arg)
        planned: Any = jax.tree.structure(want)
        if found != planned:
            raise PlanMismatchError(
                "The planned step takes arguments of the structure it was planned for. Planned: argument "
                f"{position} as {_short(planned)} with {planned.num_leaves} arrays. Received: {_short(found)} with "
                f"{found.num_leaves}.{_difference(arg, want)}"
            )


def _short(tree: Any, limit: int = 300) -> str:
    text = str(tree)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _difference(found: Any, planned: Any) -> str:
    """The first key or type in which two pytrees differ, as a sentence; "" when JAX finds no single one."""
    import jax

    names = [{jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(t)} for t in (found, planned)]
    extra, missing = sorted(names[0] - names[1])[:3], sorted(names[1] - names[0])[:3]
    parts = [f" missing: {', '.join(missing)}" if missing else "", f" unknown: {', '.join(extra)}" if extra else ""]
    return "".join(f"{part};" for part in parts if part).rstrip(";") + ("." if any(parts) else "")


def checked_leaves(leaves: Sequence[Any], values: Sequence[Any], convert: bool) -> list[Any]:
    """The flat arguments of a step, compared with ``plan.arguments``.

    Args:
        leaves: planned arguments (:class:`autoshard_ilp.plan.Leaf`).
        values: arrays, tracers or ``jax.ShapeDtypeStruct``, one per leaf.
        convert: whether inputs of a convertible dtype are converted (while tracing) or only accepted.

    Raises:
        PlanMismatchError: a shape or a dtype differs.
    """
    import jax
    import numpy as np

    found = []
    for leaf, value in zip(leaves, values, strict=True):
        try:
            shape = tuple(value.shape) if hasattr(value, "shape") else np.shape(value)
            dtype = jax.dtypes.canonicalize_dtype(
                value.dtype if hasattr(value, "dtype") else jax.dtypes.result_type(value), allow_extended_dtype=True
            )
        except (TypeError, ValueError) as error:
            raise PlanMismatchError(
                f"The planned step takes arrays. Received: {leaf.path!r} = {value!r} of type {type(value).__name__}."
            ) from error
        if shape != leaf.shape:
            raise PlanMismatchError(
                f"The planned step takes arguments of the shapes it was planned for. Received: {leaf.path!r} "
                f"of shape {shape} instead of {leaf.shape}. Plan again for this shape."
            )
        if str(dtype) != leaf.dtype:
            wanted = None if leaf.dtype.startswith("key<") else jax.numpy.dtype(leaf.dtype)
            castable = leaf.role in CASTABLE_ROLES and wanted is not None and keeps_meaning(dtype, wanted)
            if not castable:
                raise PlanMismatchError(
                    f"The planned step takes arguments of the dtypes it was planned for. Received: {leaf.path!r} "
                    f"of dtype {dtype} instead of {leaf.dtype}. Convert it, or plan again for this dtype."
                )
            value = jax.numpy.asarray(value, dtype=wanted) if convert else value
        found.append(value)
    return found


def keeps_meaning(found: Any, wanted: Any) -> bool:
    """Whether every number of dtype ``found`` stands for the same one as ``wanted``: never cut off, wrapped or rounded.

    But for whole numbers as floating-point ones of 32 bits and more: Keras takes them so itself.
    """
    import jax.numpy as jnp

    found, wanted = jnp.dtype(found), jnp.dtype(wanted)
    if found == wanted or found == jnp.bool_:
        return True
    if jnp.issubdtype(found, jnp.integer):
        whole = jnp.iinfo(found)
        if jnp.issubdtype(wanted, jnp.integer):
            other = jnp.iinfo(wanted)
            return bool(other.min <= whole.min and whole.max <= other.max)
        if jnp.issubdtype(wanted, jnp.floating):
            return bool(jnp.finfo(wanted).bits >= FLOATS_OF_KERAS or jnp.finfo(wanted).nmant + 1 >= whole.bits)
        return bool(jnp.issubdtype(wanted, jnp.complexfloating))
    inexact = jnp.issubdtype(found, jnp.inexact) and jnp.issubdtype(wanted, jnp.inexact)
    return bool(inexact and jnp.promote_types(found, wanted) == wanted)


def check_layouts(leaves: Sequence[Any], values: Sequence[Any], shardings: Sequence[Any]) -> None:
    """Raises PlanMismatchError where an array is already laid out on devices in another way than planned."""
    import jax

    for leaf, value, planned in zip(leaves, values, shardings, strict=True):
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            continue
        if value.is_deleted():
            raise PlanMismatchError(
                f"The planned step takes arrays that still exist. Received: {leaf.path!r}, which an earlier call took "
                "over (the state is donated). Pass the state that the last call returned."
            )
        if value.committed and not value.sharding.is_equivalent_to(planned, value.ndim):
            raise PlanMismatchError(
                f"The planned step takes arrays laid out as planned, or not laid out yet. Received: {leaf.path!r} "
                f"with {value.sharding} instead of {planned}. Lay it out first: "
                "jax.device_put(args, plan.in_shardings)."
            )

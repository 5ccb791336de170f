"""Equations that XLA cannot partition well, or not correctly, replaced by equal ones while a jaxpr is flattened.

**argmax and argmin** have partial results that no all-reduce combines: the reduced dimension would have to be gathered,
the logits of a language model over a whole vocabulary for the sake of its accuracy. Written out they are two reductions
that an all-reduce of one number per row combines: the extreme, and the first place that holds it (or a NaN)::

    argmax(x) = min over places where x == max(x) or x != x

(XLA:CPU's all-reduce of maxima drops a NaN of another device; of an array with NaNs, the maximum's place may come out.)

**Outer products**, ``dot_general`` over contracting dimensions of size 1 (what reaches the layer before a ``Dense(1)``
in the backward pass) are multiplied element by element. XLA:TPU computes a product that the plan wants whole by parts,
and gathers it, for the sake of its arithmetic (14.7 MB where 14 kB of the kernel were planned, 1.8 of a step's bytes).

**Loops that end for every element of a batch by itself** (``vmap`` of ``lax.while_loop``) go on while any element does,
and keep what has ended. JAX does so only when it lowers them.

**One element of each row** (``take_along_axis`` with one index per row: the logit of each label in optax's
cross-entropy), and its gradient, a scatter-add of one element to each row, compare every place with the index::

    take(x, i) = sum over places of  x where place == i else 0          add(x, i, u) = x + (u where place == i else 0)

XLA:TPU computes both like this, inside the kernels around them. Other compilers write zeros as large as the logits
first, and the partitioner scatters into what it holds.

**Sums, maxima and minima over a named axis of ``vmap``** (``psum``, ``pmean``, ``pmax``, ``pmin``) are reductions of
the mapped dimension, which is what JAX lowers them to.

**Indices of a gather or a scatter** become int32. XLA's partitioner takes others for int32 where it pads them (unequal
shards of a scatter with batch dimensions, such as the gradient of a sort) or searches a range of rows (a gather by
uint8), and ends the process. No dimension is that large, so a number beyond int32 is out of bounds before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard_ilp import _jax_compat as compat

_INDEXED = {
    "gather": lax.gather_p,
    "scatter": lax.scatter_p,
    "scatter-add": lax.scatter_add_p,
    "scatter-sub": lax.scatter_sub_p,
    "scatter-mul": lax.scatter_mul_p,
    "scatter-min": lax.scatter_min_p,
    "scatter-max": lax.scatter_max_p,
}
_COMPARED_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)
_COMPARED_TYPES = frozenset(
    ["bfloat16", *(f"float{bits}" for bits in (16, 32, 64))]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
"""What XLA adds up on every backend."""

_OVER_MAPPED = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}

REWRITTEN = frozenset({"dot_general", "argmax", "argmin", "while", *_INDEXED, *_OVER_MAPPED})


def rewrite(
    primitive: str, params: Mapping[str, Any], operands: Sequence[Any], out_shape: Sequence[int]
) -> Callable[..., Any] | None:
    """A function equal to an equation, to be traced in its place; None to keep the equation.

    Args:
        primitive: name of the equation's primitive.
        params: its parameters.
        operands: abstract values of its operands (``shape``, ``dtype``).
        out_shape: shape of its first result.
    """
    if primitive in ("gather", "scatter-add"):
        compared = _compared(primitive, params, operands)
        if compared is not None:
            return compared
    if primitive in _INDEXED:
        kept = str(operands[1].dtype) == "int32"
        return None if kept else lambda x, at, *new: _INDEXED[primitive].bind(x, _as_int32(at), *new, **params)
    if primitive == "while":
        return lambda *operands: _until_all_end(operands, params)
    if primitive in ("argmax", "argmin"):
        return lambda x: _place_of_extreme(x, params, largest=primitive == "argmax")
    if primitive in _OVER_MAPPED:
        mapped = len(operands) == 1 and not params["axis_index_groups"]
        if not mapped or not all(isinstance(a, int) for a in params["axes"]):
            return None
        return lambda x: _OVER_MAPPED[primitive](x, params["axes"])
    if primitive == "dot_general":
        return _if_outer(params, operands, out_shape)
    return None


def _if_outer(
    params: Mapping[str, Any], operands: Sequence[Any], out_shape: Sequence[int]
) -> Callable[..., Any] | None:
    """A product over dimensions of size 1 as a multiplication; None for other products."""
    (contracted, _), (batch, _) = params["dimension_numbers"]
    lhs, rhs = operands
    if math.prod(lhs.shape[d] for d in contracted) != 1 or not jnp.issubdtype(lhs.dtype, jnp.number):
        return None
    dtype = params["preferred_element_type"] or jnp.result_type(lhs.dtype, rhs.dtype)
    kept = len(lhs.shape) - len(contracted)  # dimensions of the result that are the left operand's

    def spread(x: Any, side: int, first: int) -> Any:
        (contract, own) = (numbers[side] for numbers in params["dimension_numbers"])
        free = [d for d in range(x.ndim) if d not in contract and d not in own]
        order = [*own, *free, *contract]
        x = x if order == list(range(x.ndim)) else lax.transpose(x, order)
        x = lax.squeeze(x, range(len(own) + len(free), x.ndim))
        at = [*range(len(own)), *range(first, first + len(free))]
        return lax.broadcast_in_dim(lax.convert_element_type(x, dtype), out_shape, at)

    return lambda a, b: spread(a, 0, len(batch)) * spread(b, 1, kept)


def _compared(primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Callable[..., Any] | None:
    """A gather of one element of each row, or a scatter-add of one to each, by comparing places; None for others."""
    x, indices = operands[:2]
    numbers, mode = params["dimension_numbers"], params["mode"]
    gathers = primitive == "gather"
    window_dims = numbers.offset_dims if gathers else numbers.update_window_dims
    indexed = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    taken_out = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    rows = numbers.start_indices_batching_dims if gathers else numbers.scatter_indices_batching_dims
    single = [d for d in range(len(indices.shape) - 1) if d not in rows]  # dimensions of the indices, and of the result
    in_order = list(numbers.operand_batching_dims) == [d for d in range(len(x.shape)) if d not in indexed]
    if (
        window_dims
        or not rows
        or len(indexed) != 1
        or tuple(taken_out) != tuple(indexed)
        or not (in_order and list(rows) == sorted(rows))
        or any(indices.shape[d] != 1 for d in single)
        or mode not in _COMPARED_MODES
        or str(x.dtype) not in _COMPARED_TYPES
    ):
        return None
    (axis,) = indexed
    size = x.shape[axis]

    def places(at: Any) -> tuple[Any, Any]:
        """Where each row's element is, and whether it is inside; both of the operand's rank."""
        at = at if at.dtype == "int32" else _as_int32(at)  # a uint8 would meet every 256th place
        at = lax.expand_dims(lax.squeeze(at, [*single, at.ndim - 1]), [axis])
        if mode == lax.GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, size - 1)
        return lax.broadcasted_iota(at.dtype, x.shape, axis) == at, (at >= 0) & (at < size)

    def take(x: Any, at: Any) -> Any:
        hit, inside = places(at)
        found = jnp.where(hit, x, jnp.zeros((), x.dtype)).sum(axis, dtype=x.dtype)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            found = jnp.where(lax.squeeze(inside, [axis]), found, jnp.asarray(params["fill_value"], x.dtype))
        return lax.expand_dims(found, single)

    def add(x: Any, at: Any, new: Any) -> Any:
        hit, _ = places(at)
        return x + jnp.where(hit, lax.expand_dims(lax.squeeze(new, single), [axis]), jnp.zeros((), x.dtype))

    return take if gathers else add


def _as_int32(indices: Any) -> Any:
    """Integers as int32, those beyond it as its largest or smallest."""
    given, wanted = jnp.iinfo(indices.dtype), jnp.iinfo("int32")
    if given.max > wanted.max:
        indices = lax.min(indices, jnp.array(wanted.max, indices.dtype))
    if given.min < wanted.min:
        indices = lax.max(indices, jnp.array(wanted.min, indices.dtype))
    return lax.convert_element_type(indices, "int32")


def _until_all_end(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """A loop over a batch whose condition has one answer per element."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    for_condition, for_body = operands[:n_cond], operands[n_cond : n_cond + n_body]

    def goes_on(carried: Any) -> Any:
        return compat.run_jaxpr(params["cond_jaxpr"], [*for_condition, *carried])[0]

    def body(carried: Any) -> Any:
        ahead, still = compat.run_jaxpr(params["body_jaxpr"], [*for_body, *carried]), goes_on(carried)

        def kept(new: Any, old: Any) -> Any:
            return jnp.where(jnp.expand_dims(still, tuple(range(still.ndim, new.ndim))), new, old)

        return [kept(new, old) for new, old in zip(ahead, carried, strict=True)]

    return list(lax.while_loop(lambda c: jnp.any(goes_on(c)), body, list(operands[n_cond + n_body :])))


def _place_of_extreme(x: Any, params: Mapping[str, Any], *, largest: bool) -> Any:
    (axis,) = params["axes"]
    if x.dtype == bool:
        x = x.astype("int8")
    best = lax.reduce_max(x, (axis,)) if largest else lax.reduce_min(x, (axis,))
    hit = x == jnp.expand_dims(best, axis)
    if jnp.issubdtype(x.dtype, jnp.floating):
        hit |= x != x
    place = lax.broadcasted_iota(params["index_dtype"], x.shape, axis)
    return lax.reduce_min(jnp.where(hit, place, x.shape[axis] - 1), (axis,))

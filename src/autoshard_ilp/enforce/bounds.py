"""Indices that say themselves what XLA would do with them beyond the ends of an array.

``dynamic_slice``, and a gather in mode "clip", move a slice that would begin too late back into the array; a scatter
drops an update out of range. XLA (jaxlib 0.10.2) makes dynamic slices of a gather of one row and of the operand of such
a scatter, and its simplifier makes one dynamic slice of two, at the sum of their starts, without moving either back
first. On one device that needs two slices in a row; in a planned program every cut of a value into shards is one,
before or after. The result is another row, or another device's row overwritten. So, before the operation,

* starts of slices and of gathers are moved into the array (a constant 0 where a slice takes a dimension in full);
* the operand of a scatter of few indices is finished: the barrier keeps the simplifier from joining the slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard_ilp.rules.rule import OpView

_CLAMPED = frozenset({"dynamic_slice", "gather"})


def within_bounds(op: OpView, args: Sequence[Any], devices: int) -> list[Any]:
    """Operands with which an operation gives what it should, however it and its neighbours are partitioned.

    Args:
        op: the whole operation.
        args: its operands, whole arrays or tracers (literals may be plain numbers).
        devices: in the mesh; XLA makes a slice of a gather or scatter where one index is left for a device.

    Returns:
        the operands, changed where necessary; for other primitives, ``args``.
    """
    if op.primitive not in _CLAMPED and not op.primitive.startswith("scatter"):
        return list(args)
    operand, first, *rest = args
    if op.primitive == "dynamic_slice":
        sizes = zip(op.in_shapes[0], op.out_shapes[0], op.in_dtypes[1:], (first, *rest), strict=True)
        return [operand, *(_moved_back(start, n - m, dtype) for n, m, dtype, start in sizes)]
    if math.prod(op.in_shapes[1][:-1]) > devices:
        return list(args)
    mode = op.params["mode"].name
    if op.primitive == "gather":
        return [operand, _clipped(op, first) if mode == "CLIP" else first, *rest]
    return [jax.lax.optimization_barrier(operand), first, *rest]


def _moved_back(start: Any, last: int, dtype: str) -> Any:
    """The start of a slice, at most ``last``, of an integer dtype that may not hold that number."""
    kind = np.dtype(dtype)
    if last == 0:
        return np.zeros((), kind)
    most = min(last, np.iinfo(kind).max)
    if not isinstance(start, jax.Array):
        return np.asarray(min(max(int(start), 0), most), kind)
    return jax.lax.clamp(np.asarray(0, kind), start, np.asarray(most, kind))


def _clipped(op: OpView, indices: Any) -> Any:
    """Indices of a gather, each coordinate at most where the last slice begins."""
    kind = np.dtype(op.in_dtypes[1])
    dims = [int(d) for d in op.params["dimension_numbers"].start_index_map]
    last = [op.in_shapes[0][d] - int(op.params["slice_sizes"][d]) for d in dims]
    most = np.asarray([min(n, np.iinfo(kind).max) for n in last], kind)
    return jnp.clip(jnp.asarray(indices, kind), np.zeros((), kind), most)

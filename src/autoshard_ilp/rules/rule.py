"""The notation of a sharding rule: named factors, one printable line.

A rule says which dimensions of an operation's operands and results are "the same" dimension. Every dimension is a
compound of one or more *factors*, major to minor. Sharding a factor over a mesh axis shards every dimension in which
the factor is the major-most one; a dimension in which it is not major-most cannot be sharded over it.

Printed form, for ``dot_general`` of a batched matrix product::

    (b m k, b k n) -> (b m n) reduction={k}

and for a reshape that splits one dimension in two: ``((h d)) -> (h d)``. Kinds that are not pass-through follow as
``reduction={k:add}`` (``:add`` is left out), ``permutation={x}``, ``replicate={x}``; ``even={x}`` may be sharded only
where it divides. The notation is that of the
sharding rules of OpenXLA Shardy (docs/propagation.md) and of ``jax.experimental.custom_partitioning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Dim = tuple[str, ...]  # factors of one dimension, major to minor; a dimension of size 1 has no factor: ()
Dims = tuple[Dim, ...]


class Kind(StrEnum):
    """What sharding a factor means for the operation."""

    PASS = "pass"  # each device computes its own part
    REDUCTION = "reduction"  # each device holds a partial result, to be combined over the mesh axes
    PERMUTATION = "permutation"  # neighbours exchange a halo
    REPLICATE = "replicate"  # cannot be sharded: every device needs the whole


@dataclass(frozen=True)
class Factor:
    """One factor of a rule. ``combine`` is how partial results are combined: add, max, min, mul, and, or.

    ``even``: sharded only where it divides, since XLA mistakes its padding for values.
    """

    size: int
    kind: Kind = Kind.PASS
    combine: str = "add"
    even: bool = False


@dataclass(frozen=True)
class Rule:
    """Sharding rule of one operation; see the module docstring for the printed form."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: Mapping[str, Factor] = field(default_factory=dict)
    known: bool = True  # False: an unknown primitive, kept whole
    flops: float = 0.0  # floating point operations of one whole execution; 0: priced by bytes moved only

    def __str__(self) -> str:
        def dims(ds: Dims) -> str:
            parts = ["1" if not d else d[0] if len(d) == 1 else "(" + " ".join(d) + ")" for d in ds]
            return " ".join(parts)

        line = f"({', '.join(dims(o) for o in self.operands)}) -> ({', '.join(dims(r) for r in self.results)})"
        for kind in (Kind.REDUCTION, Kind.PERMUTATION, Kind.REPLICATE):
            names = [
                name if f.kind is not Kind.REDUCTION or f.combine == "add" else f"{name}:{f.combine}"
                for name, f in self.factors.items()
                if f.kind is kind
            ]
            if names:
                line += f" {kind.value}={{{','.join(names)}}}"
        even = [name for name, f in self.factors.items() if f.even]
        line += f" even={{{','.join(even)}}}" if even else ""
        return line if self.known else line + " unknown"


@dataclass(frozen=True)
class OpView:
    """What a rule may look at: the primitive's name, its parameters and the types of its operands and results."""

    primitive: str
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)

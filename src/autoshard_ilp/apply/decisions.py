"""What a planned step enforces: layouts of operands and results, on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.sharding import Layout


@dataclass(frozen=True)
class Decisions:
    """Layouts to enforce; what is absent is left to XLA's propagation.

    Attributes:
        operands: (op id, operand index) -> the layout in which the op reads that operand.
        results: (op id, result index) -> the layout of that result; for ``argument`` ops, how the argument arrives.
        regather: ids of backward hubs that gather again instead of sharing the copy of their forward hub.
        via: (op id, operand index) -> layouts to pass through on the way, in order. A partitioner asked for several
            changes at once may gather the whole tensor; one step at a time it does what was priced.
        waits: (op id, operand index) of gathers in the forward pass that begin only once the op's other operand is
            there, so that the copy is held for less long.
        fit_early: those of ``waits`` for whose copies there is room from the start of the step on: they wait only where
            compilers would not combine them.
        sums: ids of gradients of biases and the like that the backward pass waits for (:mod:`.enforce.order`).
    """

    operands: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    results: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    regather: frozenset[int] = frozenset()
    via: Mapping[tuple[int, int], tuple[Layout, ...]] = field(default_factory=dict)
    waits: frozenset[tuple[int, int]] = frozenset()
    sums: frozenset[int] = frozenset()
    fit_early: frozenset[tuple[int, int]] = frozenset()


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with every axis of type Auto, as ``with_sharding_constraint`` needs.

    Raises:
        InputShapeError: ``mesh`` is no mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise InputShapeError(f"A mesh must be a jax.sharding.Mesh or AbstractMesh. Received: {type(mesh).__name__}.")
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def mark(op_id: int) -> str:
    """The name scope of an operation in a marked program; :mod:`autoshard_ilp.verify.diff` reads it back."""
    return f"op.{op_id}"

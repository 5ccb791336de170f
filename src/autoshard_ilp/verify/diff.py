"""Which collectives the compiler added to a plan, and which it left out, by tensor and layer.

Planned and compiled collectives are matched in three passes, each on what the one before left over, bytes against
bytes of one step:

1. same operation of the plan (a marked program tells it, :func:`autoshard_ilp.apply.mark`), same kind and mesh axes;
2. same kind and mesh axes: compilers combine several collectives into one, which names no operation any more;
3. same mesh axes, an all-reduce against reduce-scatters and all-gathers that send the same bytes.

What remains is a :class:`Difference`: "missing" where the plan has it, "surplus" where the compiled program does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.verify.hlo import CompiledCollective

#: Kinds that may stand for one another over the same mesh axes, ring bytes against ring bytes.
_REDUCTIONS = ("all-reduce", "reduce-scatter", "all-gather")
_WRAPPER = re.compile(r"\w*\(")


@dataclass(frozen=True)
class Difference:
    """A collective that only the plan or only the compiled program has, or the part of it that is unmatched.

    Attributes:
        status: "missing" (planned, not compiled) or "surplus" (compiled, not planned).
        kind: as in :class:`~autoshard_ilp.verify.hlo.CompiledCollective`.
        mesh_axes: that its groups span.
        bytes_per_device: sent per step under a ring, beyond what could be matched.
        tensor: path, or type and shape, of what is moved; of a surplus one, what its operation makes.
        layer: Keras path of the layer; empty when unknown.
        operation: primitive.
        source: the user's line, or what the compiler tells of it.
        instruction: name in the HLO text of a surplus collective.
    """

    status: str
    kind: str
    mesh_axes: tuple[str, ...]
    bytes_per_device: int
    tensor: str
    layer: str
    operation: str
    source: str
    instruction: str = ""


@dataclass
class _Item:
    """Bytes of one collective still to be matched; ``op`` is the operation that it belongs to, if known."""

    kind: str
    axes: tuple[str, ...]
    op: int | None
    left: float
    origin: Any


def differences(
    planned: Iterable[Any],
    compiled: Sequence[CompiledCollective],
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
    graph: Any = None,
) -> tuple[Difference, ...]:
    """What is planned but not compiled, and the reverse; the most bytes first.

    Args:
        planned: :class:`~autoshard_ilp.report.PlannedCollective`.
        compiled: what :func:`~autoshard_ilp.verify.hlo.parse_collectives` found.
        axis_names, axis_sizes: of the mesh, major to minor.
        graph: of the planned step, to name what the compiler added; None: its own names are told.
    """
    wanted = _planned_items(planned, axis_names, dict(zip(axis_names, axis_sizes, strict=True)))
    found = [_compiled_item(c, axis_names, axis_sizes) for c in compiled]
    _match(wanted, found, lambda item: None if item.op is None else (item.op, item.kind, item.axes))
    _match(wanted, found, lambda item: (item.kind, item.axes))
    _match(wanted, found, lambda item: item.axes if item.kind in _REDUCTIONS else None)
    result = [_missing(item) for item in wanted if item.left >= 0.5]
    result += [_surplus(item, graph) for item in found if item.left >= 0.5]
    return tuple(sorted(result, key=lambda d: (-d.bytes_per_device, d.status, d.kind)))


def _planned_items(planned: Iterable[Any], axis_names: Sequence[str], size_of: dict[str, int]) -> list[_Item]:
    items = []
    for c in planned:
        axes = tuple(name for name in axis_names if name in c.mesh_axes and size_of[name] > 1)
        kind = str(c.kind).replace("_", "-")
        op_ids = getattr(c, "op_ids", ()) or (None,)
        for op_id in op_ids if axes else ():
            items.append(_Item(kind, axes, op_id, c.bytes_per_device * c.count / len(op_ids), c))
    return items


def _compiled_item(c: CompiledCollective, axis_names: Sequence[str], axis_sizes: Sequence[int]) -> _Item:
    axes = c.mesh_axes(axis_sizes, axis_names)
    return _Item(c.kind, axes, marked_operation(c.op_name), float(c.total_bytes_per_device), c)


_MARK = re.compile(r"(?:^|/)op\.(\d+)(?=/|$)")


def marked_operation(op_name: str) -> int | None:
    """The planned operation behind an instruction of a marked program, by its ``op_name``; None where none is told."""
    found = _MARK.findall(op_name)
    return int(found[-1]) if found else None


def _match(wanted: list[_Item], found: list[_Item], key: Callable[[_Item], Any]) -> None:
    """Takes off both sides what they have in common under ``key``; items without a key wait for the next pass."""
    offers: dict[Any, list[_Item]] = {}
    for item in wanted:
        if item.left > 0 and key(item) is not None:
            offers.setdefault(key(item), []).append(item)
    for item in found:
        for offer in offers.get(key(item), ()) if key(item) is not None else ():
            taken = min(item.left, offer.left)
            item.left -= taken
            offer.left -= taken
            if item.left <= 0:
                break


def _missing(item: _Item) -> Difference:
    tensor, operation, source = (str(getattr(item.origin, name, "")) for name in ("tensor", "operation", "source"))
    layer, _, operation = operation.rpartition("/")
    return Difference("missing", item.kind, item.axes, round(item.left), tensor, layer, operation, source)


def _surplus(item: _Item, graph: Any) -> Difference:
    c = item.origin
    common = ("surplus", item.kind, item.axes, round(item.left))
    if graph is None or item.op is None or item.op >= len(graph.ops):
        layer, operation = _scope(c.op_name)
        return Difference(*common, f"{c.dtype}, {c.payload_bytes} bytes", layer, operation, c.source, c.name)
    op = graph.ops[item.op]
    tensor = graph.tensors[(op.outputs or op.inputs)[0]]
    shape = op.path or f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    return Difference(*common, shape, op.scope, op.primitive, op.source or c.source, c.name)


def _scope(op_name: str) -> tuple[str, str]:
    """Layer and primitive of jax's name stack ``jit(f)/jvp(layer/inner)/dot_general``."""
    *path, primitive = _WRAPPER.sub("", op_name).replace(")", "").split("/")
    ours = {"shard_map"}  # under which collectives are written out
    return "/".join(name for name in path[1:] if name not in ours and not _MARK.fullmatch(name)), primitive

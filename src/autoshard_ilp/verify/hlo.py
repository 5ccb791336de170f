"""The collectives that XLA really produced, read from the text of a compiled program for CPU, GPU or TPU.

``bytes_per_device`` is what one device sends under a ring, per execution. With ``n`` devices in a group and ``S`` bytes
of the full buffer on one device:

    all-reduce            2 (n-1)/n S
    all-gather            (n-1)/n S       S: the gathered result
    reduce-scatter        (n-1)/n S       S: the buffer before the reduction
    all-to-all            (n-1)/n S
    collective-permute    S
    collective-broadcast  S

``count`` is executions per step: trip counts of the enclosing loops multiplied. Compilers hide collectives in several
ways, all of which are undone here: asynchronous pairs are counted at their start; the three fusions into which XLA:TPU
spreads one overlapped collective are counted once; XLA:TPU's ``all-reduce-scatter`` fusions are reduce-scatters; of the
branches of a conditional the one that sends the most counts, and its collectives say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard_ilp.verify.hlo_text import Computation, Instruction, Module, array_shapes, parse_module, type_bytes
from autoshard_ilp.verify.hlo_text import element_bits as element_bits
from autoshard_ilp.verify.replica_groups import (
    IRREGULAR,
    Groups,
    connected,
    mesh_axes_of_pairs,
    parse_groups,
    parse_pairs,
    within_one_axis,
)
from autoshard_ilp.verify.replica_groups import mesh_axes_of as mesh_axes_of
from autoshard_ilp.verify.trip_count import Frame, called, trip_count

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPCODES = {kind + suffix: kind for kind in _KINDS for suffix in ("", "-start")}
_CALLS = {
    "fusion": ("calls",),
    "fusion-start": ("calls",),
    "call": ("to_apply", "calls"),
    "call-start": ("to_apply", "calls"),
    "async-start": ("calls",),
    "custom-call": ("called_computations", "calls"),
}
_MESH_GROUPS = re.compile(r"replica_groups=(mesh\[[^\]]*\].*?\{[^}]*\})")
_SLICE_SIZES = re.compile(r"slice_sizes=\{((?:\{[\d,\s]*\},?\s*)+)\}")
_CHAIN = re.compile(r'chain_id="?(\w+)')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``collective-permute`` or
            ``collective-broadcast``.
        bytes_per_device: bytes that one device sends under a ring, per execution (formulas in the module docstring).
        payload_bytes: ``S`` of those formulas.
        count: executions per step.
        groups: partition numbers of each group. Of a permutation: the sets of devices that it connects.
        dtype: XLA element type of the first buffer, such as ``bf16``.
        op_name: jax's name stack; may be empty.
        source: ``file:line`` in Python; may be empty.
        name: name of the instruction in the HLO text.
        pairs: source and target of a permutation, else empty.
        conditional: inside a branch that may not run; the branch that sends the most was taken.
        unknown_loop: inside a loop whose trip count could not be told, counted as one.
    """

    kind: str
    bytes_per_device: int
    payload_bytes: int
    count: int
    groups: Groups
    dtype: str
    op_name: str
    source: str
    name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()
    conditional: bool = False
    unknown_loop: bool = False

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes that one device sends per step."""
        return self.bytes_per_device * self.count

    def mesh_axes(
        self, mesh_shape: Sequence[int], axis_names: Sequence[str], *, position: Mapping[int, int] | None = None
    ) -> tuple[str, ...]:
        """Mesh axes that it spans; arguments as in :func:`~autoshard_ilp.verify.replica_groups.mesh_axes_of`."""
        if self.pairs:
            return mesh_axes_of_pairs(self.pairs, mesh_shape, axis_names, position=position)
        found = mesh_axes_of(self.groups, mesh_shape, axis_names, position=position)
        if found == IRREGULAR and self.kind == "reduce-scatter" and position is None:
            return within_one_axis(self.groups, mesh_shape, axis_names)
        return found


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes one device sends under a ring, rounded up (formulas in the module docstring)."""
    if group_size <= 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return payload_bytes
    share = payload_bytes * (group_size - 1)
    return -(-(2 * share if kind == "all-reduce" else share) // group_size)


def parse_collectives(text: str | Module) -> list[CompiledCollective]:
    """Every collective that one step executes, in program order.

    Args:
        text: ``compiled.as_text()`` or an already parsed module.

    Returns:
        One entry per instruction and place it is called from; those that send nothing are left out.

    Raises:
        ValueError: the text is no HLO module, or its replica groups are in an unknown notation.
    """
    module = text if isinstance(text, Module) else parse_module(text)
    return _Collector(module).of(Frame(module.computations[module.entry]))


class _Collector:
    """Walks the computations of a module from its entry; stateless but for what was learnt before the walk."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._holds: dict[str, bool] = {}
        # Overlapped collectives whose first part is in the program: their other parts are repetitions.
        self._started: set[tuple[str, ...]] = set()
        for computation in module.computations.values():
            if _has_custom_call(computation, "AsyncCollectiveStart"):
                for instruction in computation.instructions.values():
                    if instruction.opcode in _OPCODES:
                        self._started.add(_chain_key(instruction))

    def of(self, frame: Frame) -> list[CompiledCollective]:
        """Collectives of one execution of the frame's computation."""
        found: list[CompiledCollective] = []
        for instruction in frame.computation.instructions.values():
            opcode = instruction.opcode
            if opcode in _OPCODES:
                collective = None if self._is_repetition(frame, instruction) else self._read(frame, instruction)
                if collective is not None and collective.bytes_per_device > 0:
                    found.append(collective)
            elif opcode == "while":
                found += self._of_loop(frame, instruction)
            elif opcode == "conditional":
                found += self._of_branches(frame, instruction)
            elif opcode in _CALLS:
                for name in called(instruction, *_CALLS[opcode]):
                    if self._holds_collectives(name):
                        found += self.of(Frame(self.module.computations[name], instruction, frame))
        return found

    def _holds_collectives(self, name: str) -> bool:
        """Whether a computation, or one it calls, holds a collective; most do not, and need no walk."""
        if name not in self._holds:
            self._holds[name] = False  # also ends the search in a recursive (malformed) module
            computation = self.module.computations.get(name)
            instructions = list(computation.instructions.values()) if computation else []
            self._holds[name] = any(i.opcode in _OPCODES for i in instructions) or any(
                self._holds_collectives(inner) for i in instructions for inner in _callees(i)
            )
        return self._holds[name]

    def _of_loop(self, frame: Frame, loop: Instruction) -> list[CompiledCollective]:
        inside = [name for name in called(loop, "body", "condition") if self._holds_collectives(name)]
        if not inside:
            return []
        trips = trip_count(self.module, loop, frame)
        found: list[CompiledCollective] = []
        for name in inside:
            times = 1 if trips is None else trips + (name not in called(loop, "body"))
            for collective in self.of(Frame(self.module.computations[name], loop, frame, loop=True)):
                found.append(
                    replace(
                        collective,
                        count=collective.count * times,
                        unknown_loop=collective.unknown_loop or trips is None,
                    )
                )
        return [collective for collective in found if collective.count]

    def _of_branches(self, frame: Frame, instruction: Instruction) -> list[CompiledCollective]:
        names = called(instruction, "branch_computations", "true_computation", "false_computation")
        branches = [
            self.of(Frame(self.module.computations[name], instruction, frame))
            for name in names
            if self._holds_collectives(name)
        ]
        heaviest = max(branches, key=lambda found: sum(c.total_bytes_per_device for c in found), default=[])
        return [replace(collective, conditional=True) for collective in heaviest]

    def _is_repetition(self, frame: Frame, instruction: Instruction) -> bool:
        """Whether this is a later part of an overlapped collective that was counted at its start (XLA:TPU)."""
        if frame.caller is None or frame.caller.opcode != "fusion" or _chain_key(instruction) not in self._started:
            return False
        return not _has_custom_call(frame.computation, "AsyncCollectiveStart")

    def _read(self, frame: Frame, instruction: Instruction) -> CompiledCollective | None:
        kind = _OPCODES[instruction.opcode]
        pairs: tuple[tuple[int, int], ...] = ()
        payload, dtype = _operand_bytes(frame.computation, instruction)
        if kind == "collective-permute":
            pairs = parse_pairs(instruction.attribute("source_target_pairs") or "")
            groups = connected(pairs)
            payload = _sliced_bytes(instruction, dtype) or payload
        else:
            groups = _groups_of(instruction, self.module.n_devices)
        size = max((len(group) for group in groups), default=1)
        if kind == "all-gather":
            payload *= size
        elif kind == "all-reduce" and _is_reduce_scatter(frame, instruction, payload, size):
            kind = "reduce-scatter"
        elif kind == "ragged-all-to-all":
            kind = "all-to-all"
        return CompiledCollective(
            kind=kind,
            bytes_per_device=ring_bytes(kind, payload, size),
            payload_bytes=payload,
            count=1,
            groups=groups,
            dtype=dtype,
            op_name=instruction.op_name or (frame.caller.op_name if frame.caller else ""),
            source=self.module.source_of(instruction)
            or (self.module.source_of(frame.caller) if frame.caller is not None else ""),
            name=instruction.name,
            pairs=pairs,
        )


def _callees(instruction: Instruction) -> list[str]:
    if instruction.opcode == "while":
        return called(instruction, "body", "condition")
    if instruction.opcode == "conditional":
        return called(instruction, "branch_computations", "true_computation", "false_computation")
    return called(instruction, *_CALLS.get(instruction.opcode, ()))


def _has_custom_call(computation: Computation, target: str) -> bool:
    return any(
        i.opcode == "custom-call" and f'custom_call_target="{target}"' in i.text
        for i in computation.instructions.values()
    )


def _chain_key(instruction: Instruction) -> tuple[str, ...]:
    """What the parts of one overlapped collective share; the channel alone is shared by unrelated collectives too."""
    channel, chain = _CHANNEL.search(instruction.text), _CHAIN.search(instruction.text)
    shapes = "".join(f"{dtype}{dims}" for dtype, dims in array_shapes(instruction.type_text))
    return (_OPCODES[instruction.opcode], channel[1] if channel else "", chain[1] if chain else "", shapes)


def _operand_bytes(computation: Computation, instruction: Instruction) -> tuple[int, str]:
    """Bytes of the buffers that a collective is given on one device, and the first one's element type."""
    text = instruction.operands_text
    types = [text] if array_shapes(text) else []
    if not types:
        operands = instruction.operands
        if instruction.opcode.startswith("ragged"):
            operands = operands[:1]  # then come the output buffer, offsets and sizes
        types = [computation.instructions[name].type_text for name in operands if name in computation.instructions] or [
            instruction.type_text
        ]
    dtypes = [dtype for type_text in types for dtype, _ in array_shapes(type_text)]
    return sum(type_bytes(type_text) for type_text in types), dtypes[0] if dtypes else ""


def _sliced_bytes(instruction: Instruction, dtype: str) -> int:
    """Bytes of an in-place permutation, which names the slices that it sends; 0 for an ordinary one."""
    match = _SLICE_SIZES.search(instruction.attributes_text)
    if match is None:
        return 0
    slices = [[int(d) for d in re.findall(r"\d+", inner)] for inner in re.findall(r"\{([^}]*)\}", match[1])]
    return sum(-(-math.prod(dims) * element_bits(dtype) // 8) for dims in slices)


def _groups_of(instruction: Instruction, n_devices: int) -> Groups:
    mesh = _MESH_GROUPS.search(instruction.text)
    return parse_groups(mesh[1] if mesh else instruction.attribute("replica_groups") or "{}", n_devices)


def _is_reduce_scatter(frame: Frame, instruction: Instruction, payload_bytes: int, group_size: int) -> bool:
    """Whether an all-reduce inside a fusion keeps only one device's part of the sum, as XLA:TPU's fusions do."""
    if frame.caller is None or frame.caller.opcode not in ("fusion", "fusion-start", "async-start"):
        return False
    if "all-reduce-scatter" in frame.computation.name:
        return True
    start = next(
        (
            i
            for i in frame.computation.instructions.values()
            if i.opcode == "custom-call" and '"AsyncCollectiveStart"' in i.text and instruction.name in i.operands
        ),
        None,
    )
    root = frame.computation.root_instruction
    if start is not None:  # returns (operand, result, bookkeeping)
        arrays = array_shapes(start.type_text)
        kept = math.prod(arrays[1][1]) * element_bits(arrays[1][0]) // 8 if len(arrays) > 1 else payload_bytes
    elif root is not None and root.opcode == "dynamic-slice" and root.operands[:1] == [instruction.name]:
        kept = type_bytes(root.type_text)
    else:
        return False
    return kept * group_size <= payload_bytes

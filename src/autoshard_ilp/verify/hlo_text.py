"""A scanner of HLO text: computations, instructions, operands, element sizes. It reads, it does not interpret.

Compiled programs for TPU run to tens of megabytes, so a line is cut into name, type, operation and rest once, and
everything else (operands, attributes, shapes) is read only for the few instructions that are asked about.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

_HEADER = re.compile(r"^(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{\s*$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"%([^\s,(){}\[\]=]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_BITS = re.compile(r"\d+")
_SOURCE_FILE = re.compile(r'source_file="([^"]*)"(?:\s+source_line=(\d+))?')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TABLE_ROW = re.compile(r'^(\d+)\s+(?:"(.*)"|\{(.*)\})\s*$')
_NUM_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_REPLICA_COUNT = re.compile(r"\breplica_count=(\d+)")


@lru_cache(maxsize=256)
def element_bits(dtype: str) -> int:
    """Bits of one element of an XLA type: ``bf16`` 16, ``s4`` 4, ``f8e4m3fn`` 8, ``pred`` 8, ``token`` 0."""
    if dtype == "pred":
        return 8
    match = _BITS.search(dtype)
    return int(match[0]) if match and dtype not in ("token", "opaque", "tuple") else 0


def array_shapes(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """``(dtype, dims)`` of every array in a type, tuples flattened: ``(f32[2,3]{1,0}, token[])`` gives two."""
    found = []
    for dtype, dims in _SHAPE.findall(type_text):
        found.append((dtype, tuple(int(d.strip().lstrip("<=")) for d in dims.split(",") if d.strip())))
    return found


def type_bytes(type_text: str) -> int:
    """Bytes of a type, summed over a tuple's elements; sub-byte elements count as packed, each array rounded up."""
    return sum(-(-math.prod(dims) * element_bits(dtype) // 8) for dtype, dims in array_shapes(type_text))


@dataclass(slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        type_text: result type as printed, layouts included.
        opcode: ``all-reduce-start``, ``fusion``, ...
        text: everything after the opcode's opening parenthesis: operands, attributes, metadata.
    """

    name: str
    type_text: str
    opcode: str
    text: str

    def _operands_end(self) -> int:
        depth = 1
        for match in _PARENTHESIS.finditer(self.text):
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                return match.start()
        return len(self.text)

    @property
    def operands_text(self) -> str:
        """What stands between the operation's parentheses."""
        return self.text[: self._operands_end()]

    @property
    def attributes_text(self) -> str:
        """What follows the operands."""
        return self.text[self._operands_end() + 1 :]

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        text = self.operands_text
        if "%" in text:
            return _NAME.findall(text)
        parts = (part.split() for part in _COMMENT.sub("", text).split(","))
        return [words[-1] for words in parts if words]

    def attribute(self, name: str) -> str | None:
        """Value of ``name=value``: a bracketed group is returned whole, anything else up to the next comma."""
        text = self.attributes_text
        match = re.search(rf"(?:^|[\s,]){re.escape(name)}=", text)
        return None if match is None else _value_at(text, match.end())

    @property
    def op_name(self) -> str:
        """jax's name stack, such as ``jit(step)/jvp(dense)/dot_general``; empty when there is none."""
        match = _OP_NAME.search(self.text)
        return match[1] if match else ""


def _value_at(text: str, start: int) -> str:
    """The attribute value that begins at ``start``: up to the next comma or space outside brackets and quotes."""
    depth = 0
    quoted = False
    for position in range(start, len(text)):
        char = text[position]
        if char == '"' and text[position - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char in ", " and depth == 0:
            return text[start:position]
    return text[start:]


@dataclass(slots=True)
class Computation:
    """A named block of instructions; ``root`` is the name of the one that is returned."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @property
    def root_instruction(self) -> Instruction | None:
        """The returned instruction, None for an empty computation."""
        return self.instructions.get(self.root)


@dataclass
class Module:
    """A parsed HLO module.

    Attributes:
        computations: by name.
        entry: name of the entry computation.
        n_devices: partitions times replicas.
    """

    computations: dict[str, Computation]
    entry: str
    n_devices: int
    tables: dict[str, dict[int, str]]

    @cached_property
    def _frame_sources(self) -> dict[int, str]:
        sources = {}
        for frame, row in self.tables["StackFrames"].items():
            location = _BITS.search(row.partition("file_location_id=")[2])
            fields = self.tables["FileLocations"].get(int(location[0]), "") if location else ""
            file_id = _BITS.search(fields.partition("file_name_id=")[2])
            line = _BITS.search(fields.partition(" line=")[2])
            if file_id and line:
                sources[frame] = f"{self.tables['FileNames'].get(int(file_id[0]), '?')}:{line[0]}"
        return sources

    def source_of(self, instruction: Instruction) -> str:
        """``file:line`` of the Python that an instruction comes from; empty when the compiler did not say."""
        match = _SOURCE_FILE.search(instruction.text)
        if match:
            return f"{match[1]}:{match[2] or 0}"
        frame = _FRAME_ID.search(instruction.text)
        return self._frame_sources.get(int(frame[1]), "") if frame else ""


def parse_instruction(line: str) -> tuple[bool, Instruction] | None:
    """One stripped line as ``(is it the root, instruction)``; None for a line that is no instruction."""
    name, separator, rest = line.partition(" = ")
    if not separator:
        return None
    match = _OPCODE.search(rest)
    if match is None:
        return None
    is_root = name.startswith("ROOT ")
    name = (name[5:] if is_root else name).strip().lstrip("%")
    return is_root, Instruction(name, rest[: match.start()], match[1], rest[match.end() :])


def parse_module(text: str) -> Module:
    """Scan the text of one compiled module, in time linear in its length.

    Args:
        text: ``jax.stages.Compiled.as_text()``, or an HLO dump.

    Raises:
        ValueError: the text holds no computation.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    entry, last, table, current = "", "", "", None
    n_devices = 1
    for line in text.splitlines():
        if line.startswith(" "):
            parsed = parse_instruction(line.strip()) if current is not None else None
            if parsed is not None and current is not None:
                is_root, instruction = parsed
                current.instructions[instruction.name] = instruction
                if is_root:
                    current.root = instruction.name
            continue
        if line.startswith("HloModule"):
            partitions, replicas = _NUM_PARTITIONS.search(line), _REPLICA_COUNT.search(line)
            n_devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
        elif line in _TABLES:
            table = line
        elif line.startswith("}"):
            current = None
        elif table and (row := _TABLE_ROW.match(line)):
            tables[table][int(row[1])] = row[2] if row[2] is not None else row[3]
        elif header := _HEADER.match(line):
            current = Computation(header[2])
            computations[current.name] = current
            last = current.name
            table = ""
            if header[1]:
                entry = current.name
    if not computations:
        raise ValueError(f"HLO text holds no computation; received {text[:80]!r}. Pass compiled.as_text().")
    return Module(computations, entry or last, n_devices, tables)

"""How often a compiled while loop runs, when the compiler does not print it.

XLA:CPU and XLA:GPU annotate loops with ``known_trip_count``; XLA:TPU does not. There the number follows from the loop
itself: a counter that starts at ``init``, grows by ``step`` and is compared with ``limit`` runs

    ceil((limit - init) / step)   for ``counter < limit``,

and likewise for the other comparisons. A loop that may also stop early, since more than this comparison must hold, runs
so often at most, and the most is what the plan prices. The three values are found by following copies, tuples,
constants, fusions and the values that a loop hands through unchanged. Whatever cannot be followed gives ``None``:
unknown, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard_ilp.verify.hlo_text import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?')
_CONSTANT = re.compile(r"^\s*(-?\d+|true|false)\s*$")
_PASS_THROUGH = frozenset(
    ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier")
)
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_MAX_DEPTH = 200


@dataclass(frozen=True)
class Frame:
    """Where in the program a computation is running: the instruction that called it, and that one's own frame.

    ``loop`` is the loop's while instruction when the computation is a loop's body or condition.
    """

    computation: Computation
    caller: Instruction | None = None
    parent: Frame | None = None
    loop: bool = False


@dataclass(frozen=True)
class _Affine:
    """``(element number counter of the loop's tuple) + offset``; a plain number when ``counter`` is None."""

    counter: int | None
    offset: int


def called(instruction: Instruction, *attributes: str) -> list[str]:
    """Names of the computations in the given attributes, in order."""
    names: list[str] = []
    for attribute in attributes:
        value = instruction.attribute(attribute)
        if value:
            names += [name.strip().lstrip("%") for name in value.strip("{}").split(",") if name.strip()]
    return names


class _Tracer:
    """Follows scalar values backwards through one module."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def value(self, frame: Frame, name: str, depth: int = 0) -> _Affine | None:
        """The integer that ``name`` holds, or a loop counter plus a constant; None when it cannot be told."""
        instruction = frame.computation.instructions.get(name)
        if instruction is None or depth > _MAX_DEPTH:
            return None
        opcode = instruction.opcode
        if opcode == "constant":
            match = _CONSTANT.match(instruction.operands_text)
            return _Affine(None, {"true": 1, "false": 0}.get(match[1]) or int(match[1])) if match else None
        if opcode in _PASS_THROUGH:
            return self.value(frame, instruction.operands[0], depth + 1)
        if opcode == "get-tuple-element":
            index = int(instruction.attribute("index") or 0)
            return self.element(frame, instruction.operands[0], index, depth + 1)
        if opcode == "parameter":
            return self._parameter(frame, instruction, depth + 1)
        if opcode in ("add", "subtract", "multiply"):
            return self._arithmetic(frame, instruction, depth + 1)
        if opcode in ("fusion", "call"):
            inner = self._enter(frame, instruction)
            return self.value(inner, inner.computation.root, depth + 1) if inner else None
        return None

    def element(self, frame: Frame, name: str, index: int, depth: int) -> _Affine | None:
        """Element ``index`` of the tuple ``name``."""
        instruction = frame.computation.instructions.get(name)
        if instruction is None or depth > _MAX_DEPTH:
            return None
        opcode = instruction.opcode
        if opcode == "tuple":
            operands = instruction.operands
            return self.value(frame, operands[index], depth + 1) if index < len(operands) else None
        if opcode in _PASS_THROUGH:
            return self.element(frame, instruction.operands[0], index, depth + 1)
        if opcode == "parameter" and frame.loop:
            return self._carried(frame, index, depth + 1)
        if opcode == "parameter" and frame.caller is not None and frame.parent is not None:
            operands, number = frame.caller.operands, _parameter_number(instruction)
            return self.element(frame.parent, operands[number], index, depth + 1) if number < len(operands) else None
        if opcode == "while" and self._is_invariant(frame, instruction, index, depth + 1):
            return self.element(frame, instruction.operands[0], index, depth + 1)
        if opcode in ("fusion", "call"):
            inner = self._enter(frame, instruction)
            return self.element(inner, inner.computation.root, index, depth + 1) if inner else None
        return None

    def _carried(self, frame: Frame, index: int, depth: int) -> _Affine | None:
        """What a loop's body or condition sees in element ``index``: the initial value where it never changes."""
        assert frame.caller is not None and frame.parent is not None
        if self._is_invariant(frame.parent, frame.caller, index, depth):
            return self.element(frame.parent, frame.caller.operands[0], index, depth)
        return _Affine(index, 0)

    def _is_invariant(self, frame: Frame, loop: Instruction, index: int, depth: int) -> bool:
        """Whether the body returns element ``index`` as it came in."""
        bodies = called(loop, "body")
        body = self.module.computations.get(bodies[0]) if bodies else None
        root = body.root_instruction if body else None
        if body is None or root is None or root.opcode != "tuple" or index >= len(root.operands):
            return False
        instruction = body.instructions.get(root.operands[index])
        for _ in range(_MAX_DEPTH):
            if instruction is None:
                return False
            if instruction.opcode not in _PASS_THROUGH:
                break
            instruction = body.instructions.get(instruction.operands[0])
        if instruction is None or instruction.opcode != "get-tuple-element":
            return False
        source = body.instructions.get(instruction.operands[0])
        same = int(instruction.attribute("index") or 0) == index
        return same and source is not None and source.opcode == "parameter"

    def _parameter(self, frame: Frame, instruction: Instruction, depth: int) -> _Affine | None:
        if frame.caller is None or frame.parent is None or frame.loop:
            return None
        number, operands = _parameter_number(instruction), frame.caller.operands
        return self.value(frame.parent, operands[number], depth) if number < len(operands) else None

    def _arithmetic(self, frame: Frame, instruction: Instruction, depth: int) -> _Affine | None:
        left, right = (self.value(frame, name, depth) for name in instruction.operands[:2])
        if left is None or right is None:
            return None
        if instruction.opcode == "multiply":
            both_plain = left.counter is None and right.counter is None
            return _Affine(None, left.offset * right.offset) if both_plain else None
        if instruction.opcode == "subtract":
            return _Affine(left.counter, left.offset - right.offset) if right.counter is None else None
        if left.counter is not None and right.counter is not None:
            return None
        counter = left.counter if left.counter is not None else right.counter
        return _Affine(counter, left.offset + right.offset)

    def _enter(self, frame: Frame, instruction: Instruction) -> Frame | None:
        names = called(instruction, "calls", "to_apply")
        computation = self.module.computations.get(names[0]) if names else None
        return Frame(computation, instruction, frame) if computation else None

    def comparisons(self, frame: Frame, name: str) -> Iterator[tuple[_Affine, _Affine, str]]:
        """The comparisons that must all hold for a condition to: left side, right side, direction of each."""
        instruction = frame.computation.instructions.get(name)
        if instruction is None:
            return
        if instruction.opcode == "compare":
            left, right = (self.value(frame, operand) for operand in instruction.operands[:2])
            direction = instruction.attribute("direction")
            if left and right and direction:
                yield left, right, direction
        elif instruction.opcode == "and":
            for operand in instruction.operands:
                yield from self.comparisons(frame, operand)
        elif instruction.opcode in _PASS_THROUGH:
            yield from self.comparisons(frame, instruction.operands[0])
        elif instruction.opcode in ("fusion", "call"):
            inner = self._enter(frame, instruction)
            if inner:
                yield from self.comparisons(inner, inner.computation.root)

    def runs(
        self, frame: Frame, loop: Instruction, body: Computation, left: _Affine, right: _Affine, direction: str
    ) -> int | None:
        """How often a comparison holds in a row; None when it cannot be told."""
        if left.counter is None:
            left, right, direction = right, left, _MIRROR.get(direction, direction)
        if left.counter is None or right.counter is not None:
            return None
        initial = self.element(frame, loop.operands[0], left.counter, 0)
        following = self.element(Frame(body, loop, frame, loop=True), body.root, left.counter, 0)
        if initial is None or initial.counter is not None or following is None or following.counter != left.counter:
            return None
        return _runs(initial.offset + left.offset, following.offset, right.offset, direction)


def _parameter_number(instruction: Instruction) -> int:
    return int(instruction.operands_text.strip() or 0)


def _runs(first: int, step: int, limit: int, direction: str) -> int | None:
    """Number of k = 0, 1, ... in a row for which ``first + k*step  direction  limit`` holds; None when unbounded."""
    if direction == "NE":
        gap = limit - first
        if gap == 0:
            return 0
        return gap // step if step != 0 and gap % step == 0 and gap // step >= 0 else None
    if direction in ("GT", "GE"):
        first, step, limit, direction = -first, -step, -limit, _MIRROR[direction]
    if direction not in ("LT", "LE"):
        return None
    gap = limit - first + (1 if direction == "LE" else 0)
    if gap <= 0:
        return 0
    return -(-gap // step) if step > 0 else None


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """Number of times the body of ``loop`` runs.

    Args:
        module: the parsed program.
        loop: a ``while`` instruction.
        frame: the computation that holds it, and how it was reached.

    Returns:
        The number, or the most that it may be, from XLA's annotation or derived; None when neither can tell.
    """
    known = _KNOWN.search(loop.text)
    if known:
        return int(known[1])
    conditions, bodies = called(loop, "condition"), called(loop, "body")
    condition = module.computations.get(conditions[0]) if conditions else None
    body = module.computations.get(bodies[0]) if bodies else None
    if condition is None or body is None:
        return None
    tracer = _Tracer(module)
    compared = tracer.comparisons(Frame(condition, loop, frame, loop=True), condition.root)
    counts = [tracer.runs(frame, loop, body, *comparison) for comparison in compared]
    return min((n for n in counts if n is not None), default=None)

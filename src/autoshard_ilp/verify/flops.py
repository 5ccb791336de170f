"""Floating-point operations of the matrix multiplications and convolutions in compiled text, loops multiplied.

A ``dot`` does ``2 x (elements of the result) x (product of the contracted sizes)``. A convolution, which is also what
XLA:TPU makes of every dot, does ``2 x (elements of the result) x (elements of the kernel) / (output features)``; taps
that fall on padding or between dilated elements are not work, so each spatial dimension counts the taps that hit
the input. XLA:GPU may replace both by calls of its libraries, which keep the same dimension numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from autoshard_ilp.verify.hlo_text import Computation, Instruction, Module, array_shapes
from autoshard_ilp.verify.trip_count import Frame, called, trip_count

_DOT_OPCODES = ("dot", "convolution")
_CALLS = ("fusion", "call", "async-start", "custom-call", "fusion-start", "call-start")
_GEMM = re.compile(r'custom_call_target="__cublas\$[^"]*(?:gemm|matmul)[^"]*"')
_LIBRARY_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(Forward|BackwardInput|BackwardFilter|)[^"]*"')
_DIMENSION_NUMBERS = re.compile(r'"dot_dimension_numbers":(\{[^}]*\})')


def matmul_flops(module: Module) -> int:
    """Operations per device and step of every matrix multiplication and convolution.

    A loop of unknown length counts once. Of the branches of a conditional the one with the most operations counts.
    """
    return _Counter(module).of(Frame(module.computations[module.entry]))


class _Counter:
    def __init__(self, module: Module) -> None:
        self.module = module
        self._holds: dict[str, bool] = {}

    def of(self, frame: Frame) -> int:
        total = 0
        for instruction in frame.computation.instructions.values():
            opcode = instruction.opcode
            if _is_matmul(instruction):
                total += _flops(frame.computation, instruction)
            elif opcode == "while":
                inner = self._inside(frame, instruction, "body")
                if inner:
                    total += sum(inner) * (trip_count(self.module, instruction, frame) or 1)
            elif opcode == "conditional":
                names = ("branch_computations", "true_computation", "false_computation")
                total += max(self._inside(frame, instruction, *names), default=0)
            elif opcode in _CALLS:
                total += sum(self._inside(frame, instruction, "calls", "to_apply", "called_computations"))
        return total

    def _inside(self, frame: Frame, instruction: Instruction, *attributes: str) -> list[int]:
        loop = instruction.opcode == "while"
        return [
            self.of(Frame(self.module.computations[name], instruction, frame, loop=loop))
            for name in called(instruction, *attributes)
            if self._holds_matmul(name)
        ]

    def _holds_matmul(self, name: str) -> bool:
        if name not in self._holds:
            self._holds[name] = False
            computation = self.module.computations.get(name)
            self._holds[name] = computation is not None and any(
                _is_matmul(i)
                or any(
                    self._holds_matmul(inner)
                    for inner in called(
                        i, "calls", "to_apply", "body", "branch_computations", "true_computation", "false_computation"
                    )
                )
                for i in computation.instructions.values()
                if i.opcode in _DOT_OPCODES or i.opcode in _CALLS or i.opcode in ("while", "conditional")
            )
        return self._holds[name]


def _is_matmul(instruction: Instruction) -> bool:
    if instruction.opcode in _DOT_OPCODES:
        return True
    if instruction.opcode != "custom-call":
        return False
    return bool(_GEMM.search(instruction.text) or _LIBRARY_CONVOLUTION.search(instruction.text))


def _operand_dims(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    inline = array_shapes(instruction.operands_text)
    if inline:
        return [dims for _, dims in inline]
    found = [computation.instructions.get(name) for name in instruction.operands]
    return [array_shapes(operand.type_text)[0][1] for operand in found if operand is not None]


def _flops(computation: Computation, instruction: Instruction) -> int:
    arrays = array_shapes(instruction.type_text)
    operands = _operand_dims(computation, instruction)
    if not arrays or len(operands) < 2:
        return 0
    result = arrays[0][1]
    library = _LIBRARY_CONVOLUTION.search(instruction.text)
    if instruction.opcode == "convolution" or library:
        # A library's backward calls keep the forward convolution's labels and window.
        kind = library[1].lower() if library else ""
        if kind == "backwardinput":
            return _convolution_flops(instruction, result, operands[1], operands[0])
        if kind == "backwardfilter":
            return _convolution_flops(instruction, operands[0], result, operands[1])
        return _convolution_flops(instruction, operands[0], operands[1], result)
    contracting = instruction.attribute("lhs_contracting_dims")
    if contracting is not None:
        dims = [int(d) for d in re.findall(r"\d+", contracting)]
    else:
        match = _DIMENSION_NUMBERS.search(instruction.text)
        numbers = json.loads(match[1]) if match else {}
        dims = [int(d) for d in numbers.get("lhs_contracting_dimensions", ())]
    return 2 * math.prod(result) * math.prod(operands[0][d] for d in dims)


def _convolution_flops(
    instruction: Instruction, left: Sequence[int], kernel: Sequence[int], result: Sequence[int]
) -> int:
    """Operations of a convolution, from its ``dim_labels`` (``b01f_01io->b01f``) and ``window``."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        return 0
    lhs, rhs, out = labels[1], labels[2], labels[3]
    window = instruction.attribute("window") or ""
    work = 2 * result[out.index("b")] * result[out.index("f")] * kernel[rhs.index("i")]
    for position in range(len(lhs) - 2):
        label = str(position)
        size_in, size_out = left[lhs.index(label)], result[out.index(label)]
        taps = kernel[rhs.index(label)]
        work *= _hits(size_in, size_out, taps, *_window_of(window, position))
    return work


def _window_of(window: str, position: int) -> tuple[int, int, int, int]:
    """Stride, low padding, dilation of the input and of the kernel in one spatial dimension of ``window={...}``."""

    def value(name: str, default: int) -> int:
        match = re.search(rf"\b{name}=(\S+?)[\s}}]", window + "}")
        if match is None:
            return default
        return int(match[1].split("x")[position].split("_")[0])

    return value("stride", 1), value("pad", 0), value("lhs_dilate", 1), value("rhs_dilate", 1)


def _hits(size_in: int, size_out: int, taps: int, stride: int, pad: int, dilate_in: int, dilate_taps: int) -> int:
    """Pairs of an output position and a tap that meet an element of the input."""
    last = (size_in - 1) * dilate_in
    if stride == dilate_in == dilate_taps == 1:
        if taps <= size_out:  # sum over taps of the outputs that reach the input
            return sum(max(0, min(size_out - 1, last + pad - t) - max(0, pad - t) + 1) for t in range(taps))
        return sum(max(0, min(taps - 1, last + pad - o) - max(0, pad - o) + 1) for o in range(size_out))
    # XLA:TPU writes a batch dimension as a dilated spatial one; the arithmetic below is then long, hence numpy.
    outputs = np.arange(size_out) * stride - pad
    count = 0
    for tap in range(taps):
        where = outputs + tap * dilate_taps
        count += int(((where >= 0) & (where <= last) & (where % dilate_in == 0)).sum())
    return count

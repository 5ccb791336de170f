"""The graph of a step: operations and tensors, flattened from a jaxpr.

Calls (pjit, custom_jvp, custom_vjp, remat) are inlined. Loops and branches are inlined too, each into a *region* whose
operations carry how often they run per step, joined to the outside by pseudo-operations that compute nothing:

======================  =====================================================================================
``argument``            no operand; one result: an argument of the step
``constant``            no operand; one result: a constant captured by the jaxpr (of rank 1 or more)
``result``              one operand, no result: a result of the step
``loop_slice``          one operand (T, ...) outside, one result (...) inside: what a scan reads per iteration
``loop_stack``          one operand (...) inside, one result (T, ...) outside: what a scan writes per iteration
``loop_invariant``      identity on the way into a loop body, runs once per entry of the loop
``loop_carry``          two operands (initial value, value at the end of the body); two results of the same shape
                        (value inside the body, final value outside)
``branch_merge``        one operand per branch, one result
``hub``                 identity that stands between a tensor and several of its consumers (see :func:`insert_hubs`)
======================  =====================================================================================

Every other operation is one jaxpr equation. Operations are listed in program order, ``loop_carry`` before its body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Tensor:
    """A value. ``literal`` holds the value of a scalar literal; ``producer`` is then None and it is never sharded."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float  # bytes per element; extended key dtypes count their raw bits
    producer: int | None = None  # op id
    result_index: int = 0  # which result of the producer
    consumers: list[tuple[int, int]] = field(default_factory=list)  # (op id, operand index)
    literal: Any = None


@dataclass(eq=False)
class Op:
    """An operation or pseudo-operation; ``inputs`` and ``outputs`` are tensor ids."""

    id: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""  # Keras layer path, e.g. "gpt2_backbone/transformer_layer_0/self_attention/query"
    phase: str = "forward"  # "forward" | "backward" | "update"
    source: str = ""  # "file.py:123 (function)"
    count: float = 1.0  # executions per step (product of the trip counts of the loops around it)
    region: int = 0  # 0 is the top level
    position: int = 0  # index of an argument or result in the flat lists of the step
    path: str = ""  # argument and result: variable path, "inputs/..." or "outputs/..."

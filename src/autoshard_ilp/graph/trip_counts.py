"""How often a traced ``lax.while_loop`` runs, where its own constants say so.

A counter that starts at ``init``, grows by ``step`` in every iteration and is compared with ``limit`` runs

    ceil((limit - init) / step)   times, for ``counter < limit`` and ``step > 0``,

and likewise for the other comparisons. ``init``, ``step`` and ``limit`` must be integers known while tracing; they are
followed through additions, conversions, inlined calls and values that the loop hands through unchanged. Where the
condition is "counted *and* something else" the count is an upper bound, unless it is one that no step would wait for:
``jax.random.poisson`` rejects samples for at most 2^31 - 1 rounds, which only keeps its counter from overflowing.
Everything else is unknown (None), never a guess.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp import _jax_compat as compat

_HOLDS = {kind: getattr(operator, kind) for kind in ("lt", "le", "gt", "ge", "ne", "eq")}
_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "ne": "eq", "eq": "ne"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "ne": "ne", "eq": "eq"}
_SAME_VALUE = frozenset({"convert_element_type", "copy", "stop_gradient", "squeeze", "reshape", "broadcast_in_dim"})

MOST_ITERATIONS = 2**24
"""Upper bounds of more say nothing: at the few microseconds that starting one kernel takes, a step of minutes."""


@dataclass(frozen=True)
class TripCount:
    """Iterations of a loop; ``exact`` is False for an upper bound."""

    iterations: int
    exact: bool


@dataclass(frozen=True)
class _Affine:
    """Input number ``base`` of a jaxpr plus ``offset``; a plain integer where ``base`` is None."""

    base: int | None
    offset: int


@dataclass(frozen=True)
class _Test:
    """A comparison of two scalars."""

    kind: str
    left: _Affine
    right: _Affine


@dataclass(frozen=True)
class _Both:
    """A conjunction; a part that is None cannot be followed."""

    parts: tuple[Any, ...]


def counted_loop(params: Mapping[str, Any], known: Sequence[int | None]) -> TripCount | None:
    """Iterations of a ``while`` equation.

    Args:
        params: of the equation.
        known: the integer that each of its operands is (constants of the condition, of the body, initial values), None
            where it is not known while tracing.

    Returns:
        None where the loop does not say, or says no more than a bound above ``MOST_ITERATIONS``.
    """
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    start = list(known[n_cond + n_body :])
    carried = len(start)
    body = [_constant(v) for v in known[n_cond : n_cond + n_body]] + [_Affine(i, 0) for i in range(carried)]
    ends = _evaluate(params["body_jaxpr"], body)
    inputs = [_constant(v) for v in known[:n_cond]]
    for i, end in enumerate(ends):  # what the loop hands through unchanged is a constant
        unchanged = end == _Affine(i, 0)
        inputs.append(_constant(start[i]) if unchanged else _Affine(i, 0))
    (condition,) = _evaluate(params["cond_jaxpr"], inputs)
    found = _count(condition, start, ends)
    return None if found is not None and not found.exact and found.iterations > MOST_ITERATIONS else found


def _constant(value: int | None) -> _Affine | None:
    return None if value is None else _Affine(None, value)


def as_integer(value: Any) -> int | None:
    """A literal as an integer; None for anything else."""
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if shape or isinstance(value, bool) or (dtype is not None and dtype.kind not in "iu"):
        return None
    return int(value) if isinstance(value, int) or dtype is not None else None


def _evaluate(closed_jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Affine values, tests and Nones of a jaxpr's results."""
    jaxpr, constants = compat.open_jaxpr(closed_jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, (_constant(as_integer(c)) for c in constants), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return _constant(as_integer(atom.val)) if compat.is_literal(atom) else env.get(atom)

    for eqn in jaxpr.eqns:
        called = compat.called_jaxpr(eqn.primitive.name, eqn.params)
        args = [read(atom) for atom in eqn.invars]
        picked = [arg for part in called[2] for arg in args[part]] if called is not None else []
        if called is not None and len(called[0].invars) == len(picked):
            results = _evaluate_open(*called[:2], picked)
        else:
            results = [_result(eqn, args)] if len(eqn.outvars) == 1 else [None] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate_open(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return _evaluate(compat.close_jaxpr(jaxpr, constants), args)


def _result(eqn: Any, args: Sequence[Any]) -> Any:
    name = eqn.primitive.name
    out = eqn.outvars[0].aval
    if getattr(out, "shape", ()) != () or (any(a is None for a in args) and name != "and"):
        return None
    if name in _SAME_VALUE:
        # An integer that becomes a float is no counter any more.
        return args[0] if len(args) == 1 and out.dtype.kind in "iub" else None
    if name in ("add", "sub") and all(isinstance(a, _Affine) for a in args):
        left, right = args
        sign = 1 if name == "add" else -1
        if right.base is None:
            return _Affine(left.base, left.offset + sign * right.offset)
        return _Affine(right.base, left.offset + right.offset) if left.base is None and sign == 1 else None
    if name in _HOLDS and all(isinstance(a, _Affine) for a in args):
        return _Test(name, *args)
    if name == "not":
        return _Test(_NEGATED[args[0].kind], args[0].left, args[0].right) if isinstance(args[0], _Test) else None
    return _Both(tuple(args)) if name == "and" else None


def _count(condition: Any, start: Sequence[int | None], ends: Sequence[Any]) -> TripCount | None:
    if isinstance(condition, _Both):
        counts = [_count(part, start, ends) for part in condition.parts]
        known = [c for c in counts if c is not None]
        if not known:
            return None
        return TripCount(min(c.iterations for c in known), len(known) == len(counts) and all(c.exact for c in known))
    if not isinstance(condition, _Test):
        return None
    kind, left, right = condition.kind, condition.left, condition.right
    if left.base is None and right.base is None:  # constant: it never runs, or for ever
        return None if _HOLDS[kind](left.offset, right.offset) else TripCount(0, True)
    if left.base is None:
        kind, left, right = _MIRRORED[kind], right, left
    if left.base is None or right.base is not None:
        return None
    init, end = start[left.base], ends[left.base]
    if init is None or not isinstance(end, _Affine) or end.base != left.base:
        return None
    iterations = _iterations(kind, init + left.offset, end.offset, right.offset)
    return None if iterations is None else TripCount(iterations, True)


def _iterations(kind: str, init: int, step: int, limit: int) -> int | None:
    """Iterations while ``counter <kind> limit`` holds; None for a loop that does not end by it."""
    if kind in ("gt", "ge"):
        kind, init, step, limit = _MIRRORED[kind], -init, -step, -limit
    if kind == "le":
        kind, limit = "lt", limit + 1
    if kind == "lt":
        if init >= limit:
            return 0
        return -((init - limit) // step) if step > 0 else None
    if kind == "eq":
        return 0 if init != limit else (1 if step else None)
    away = limit - init
    if away == 0:
        return 0
    return away // step if step and away % step == 0 and away // step > 0 else None

"""The flat registry of sharding rules: one plain function ``OpView -> Rule`` per primitive name.

A rule function may raise :class:`NoRule` for a variant of its primitive that it does not cover; the operation is then
treated like an unknown primitive. Keeping a tensor whole is always correct, so nothing here can give a wrong result:
it can only miss a sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autoshard_ilp.errors import AutoshardError
from autoshard_ilp.rules.builder import Builder, NoRule
from autoshard_ilp.rules.rule import Dims, Kind, OpView, Rule

RuleFunction = Callable[[OpView], Rule]

_RULES: dict[str, RuleFunction] = {}


def register(*primitive_names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: make a function the rule of the named primitives.

    Raises:
        AutoshardError: one of the names already has a rule.
    """

    def add(function: RuleFunction) -> RuleFunction:
        for name in primitive_names:
            if name in _RULES:
                raise AutoshardError(
                    f"Every primitive has one sharding rule. Received a second one for {name!r}: "
                    f"{function.__module__}.{function.__qualname__}, after {_RULES[name].__module__}."
                    f"{_RULES[name].__qualname__}. Remove one of them."
                )
            _RULES[name] = function
        return function

    return add


def registered() -> list[str]:
    """Names of all primitives (and pseudo-operations of the graph) that have a rule, sorted."""
    return sorted(_RULES)


def unknown_rule(op: OpView) -> Rule:
    """Rule of an unknown primitive: every dimension is needed whole; marked ``known=False``."""
    b = Builder()
    operands = [b.dims(shape, Kind.REPLICATE) for shape in op.in_shapes]
    results = [b.dims(shape, Kind.REPLICATE) for shape in op.out_shapes]
    rule = b.rule(operands, results)
    return Rule(rule.operands, rule.results, rule.factors, known=False)


def rule_for(op: OpView) -> Rule:
    """Sharding rule of one operation.

    Args:
        op: the primitive's name, parameters, shapes and dtypes.

    Returns:
        The rule; for a primitive without one, or a variant that its rule does not cover, everything whole and
        ``known=False``.
    """
    function = _RULES.get(op.primitive)
    if function is None:
        return unknown_rule(op)
    try:
        rule = function(op)
    except NoRule:
        return unknown_rule(op)
    return unknown_rule(op) if misfits(op, rule) else rule


def misfits(op: OpView, rule: Rule) -> list[str]:
    """How a rule contradicts the shapes of its operation; empty when it fits.

    Checked for every operation: a future version of JAX may add operands to a primitive, and a rule that no longer
    fits must lead to whole tensors, not to wrong ones.
    """
    problems: list[str] = []
    for what, shapes, sides in (("operand", op.in_shapes, rule.operands), ("result", op.out_shapes, rule.results)):
        if len(shapes) != len(sides):
            problems.append(f"{len(sides)} {what}s in the rule, {len(shapes)} in the operation")
            continue
        for i, (shape, dims) in enumerate(zip(shapes, sides, strict=True)):
            if _sizes(dims, rule) != tuple(shape):
                problems.append(f"{what} {i} has shape {tuple(shape)}, the rule says {_sizes(dims, rule)}")
    return problems


def _sizes(dims: Dims, rule: Rule) -> tuple[int, ...]:
    return tuple(math.prod(rule.factors[f].size for f in dim) for dim in dims)

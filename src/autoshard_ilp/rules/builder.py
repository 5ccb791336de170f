"""Names and collects the factors of one rule while it is written down."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence

from autoshard_ilp.rules.rule import Dim, Dims, Factor, Kind, Rule


class NoRule(Exception):
    """Raised by a rule function for a variant that it does not cover; the operation is then kept whole."""


class Builder:
    """Makes factors in order of appearance: ``a``, ``b``, ... or a given stem, ``k``, ``k2``, ``k3``, ..."""

    def __init__(self) -> None:
        self._factors: dict[str, Factor] = {}
        self._letters = _letters()

    def dim(
        self, size: int, kind: Kind = Kind.PASS, *, stem: str = "", combine: str = "add", even: bool = False
    ) -> Dim:
        """A new factor as a dimension of its own; ``()`` for size 1, which there is nothing to shard of.

        An empty dimension (size 0) gets a factor that is never sharded.
        """
        if size == 1:
            return ()
        if size == 0:
            kind = Kind.REPLICATE
        name = self._name(stem)
        self._factors[name] = Factor(int(size), kind, combine, even and kind is not Kind.REPLICATE)
        return (name,)

    def dims(self, shape: Iterable[int], kind: Kind = Kind.PASS) -> Dims:
        """One new factor per dimension; an empty array stays whole, since XLA keeps no layout of it."""
        sizes = tuple(shape)
        return tuple(self.dim(size, kind if all(sizes) else Kind.REPLICATE) for size in sizes)

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims], flops: float = 0.0) -> Rule:
        """The finished rule."""
        return Rule(
            tuple(tuple(dims) for dims in operands), tuple(tuple(dims) for dims in results), self._factors, flops=flops
        )

    def _name(self, stem: str) -> str:
        if not stem:
            return next(letter for letter in self._letters if letter not in self._factors)
        if stem not in self._factors:
            return stem
        number = 2
        while f"{stem}{number}" in self._factors:
            number += 1
        return f"{stem}{number}"


def _letters() -> Iterator[str]:
    suffix = 0
    while True:
        for letter in string.ascii_lowercase:
            yield letter + (str(suffix) if suffix else "")
        suffix += 1


def without(dims: Sequence[Dim], axes: Iterable[int]) -> Dims:
    """The dimensions that are not in ``axes``, in order."""
    dropped = set(axes)
    return tuple(d for i, d in enumerate(dims) if i not in dropped)


def is_summable(dtype: str) -> bool:
    """Whether partial results of this dtype may be added up: numbers, not booleans and not random keys."""
    return dtype.startswith(("float", "bfloat", "int", "uint", "complex"))


def arithmetic_weight(dtype: str) -> float:
    """Real operations per multiply-add of this dtype, relative to a real one (a complex one takes 4)."""
    return 4.0 if dtype.startswith("complex") else 1.0

"""Repeated layers: operations that look alike, in surroundings that look alike, share one decision.

Two operations are tied when the windows of operations around them, in program order, are equal in primitive, shapes,
rule and buffers. Names play no part. Program order walks a layer before it enters the next, so a window a little
shorter than a layer tells its operations apart, yet ends within the first and the last layer, which stay free.

Tying is a restriction: every tied assignment is a valid assignment of the whole step, with exactly the cost of its
parts times their number. What it costs is asked of the step without ties (:mod:`autoshard_ilp.search.untied`).

Where memory binds, one decision for all layers is coarse: it moves gigabytes at once. :func:`split` loosens the tie:
the first layers decide for themselves, and so do the others. In a small step every layer does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

WINDOW = 40
"""Operations looked at on either side."""

ARGUMENT_WINDOW = 8
"""The same among arguments and results, which follow the order of the layers too but are fewer."""

LEAST_SPLIT = 4
"""Classes with fewer members stay whole in :func:`split`."""

FEW_OPERATIONS = 2000
"""Of a step so small that where memory binds nothing is tied: such programs are solved sooner than coarse ones."""

_MODULUS = (1 << 61) - 1
_BASE = 1_000_003


def fold(signatures: Sequence[Hashable], windows: Sequence[int]) -> list[int]:
    """Class of each operation, numbered by first appearance.

    Args:
        signatures: one per operation in program order; equal signatures price alike.
        windows: how many neighbours on either side must look alike as well.
    """
    names: dict[Hashable, int] = {}
    codes = [names.setdefault(s, len(names)) + 1 for s in signatures]
    prefix, powers = [0], [1]
    for code in codes:
        prefix.append((prefix[-1] * _BASE + code) % _MODULUS)
        powers.append(powers[-1] * _BASE % _MODULUS)

    def digest(start: int, stop: int) -> int:
        return (prefix[stop] - prefix[start] * powers[stop - start]) % _MODULUS

    classes: dict[Hashable, int] = {}
    result = []
    for i, (code, window) in enumerate(zip(codes, windows, strict=True)):
        start, stop = max(0, i - window), min(len(codes), i + window + 1)
        key = (code, i - start, stop - i, digest(start, i), digest(i, stop))
        result.append(classes.setdefault(key, len(classes)))
    return result


def split(classes: Sequence[int], backward: Sequence[bool], share: float) -> list[int]:
    """Finer classes: of each, the members in the first layers, and those in the others.

    Args:
        classes: class of each operation, in program order.
        backward: whether an operation is part of the backward pass, which walks the layers from the last to the first.
        share: of the layers, how many are the first (of a class that is split at least one, and not all).
    """
    whole = np.asarray(classes, np.int64)
    others = ~in_first_layers(whole, backward, share)
    return (whole + others * (int(whole.max(initial=0)) + 1)).tolist()


def in_first_layers(classes: Sequence[int] | np.ndarray, backward: Sequence[bool], share: float) -> np.ndarray:
    """Whether each operation is in the first layers; so is what repeats too little to be split. As in :func:`split`."""
    whole = np.asarray(classes, np.int64)
    order = np.argsort(whole, kind="stable")
    count = np.bincount(whole)
    start = np.concatenate(([0], np.cumsum(count)))
    place = np.empty(len(whole), np.int64)  # among the members of its class, by layer
    place[order] = np.arange(len(whole)) - start[whole[order]]
    size = count[whole]
    place = np.where(np.asarray(backward, bool), size - 1 - place, place)
    first = np.clip(np.ceil(share * size - 1e-9), 1, size - 1)
    return (size < LEAST_SPLIT) | (place < first)

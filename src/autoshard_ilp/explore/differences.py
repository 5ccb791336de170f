"""Which collectives, and how many bytes, make two plans of one step differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.names import pattern


@dataclass(frozen=True)
class Difference:
    """Collectives of one kind, place and tensor that one plan has more of than another.

    Attributes:
        kind, mesh_axes: of the collectives.
        tensor, operation: what is moved and what needs it; numbers that tell repeated layers apart become ``*``.
        seconds: per step, of the second plan minus the first.
        bytes_per_device: sent per step by one device, of the second minus the first.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    tensor: str
    operation: str
    seconds: float
    bytes_per_device: float

    def __str__(self) -> str:
        from autoshard_ilp.explore.show import signed_bytes, signed_seconds

        what = f"{self.kind} over {'+'.join(self.mesh_axes)} of {self.tensor}"
        return f"{signed_seconds(self.seconds)}: {what} ({signed_bytes(self.bytes_per_device)} sent)"


def collective_differences(before: Iterable[Any], after: Iterable[Any], most: int | None = None) -> list[Difference]:
    """What ``after`` has more of (positive) or less of (negative) than ``before``, the largest times first.

    Args:
        before, after: :class:`~autoshard_ilp.report.PlannedCollective` of two plans of one step.
        most: how many to keep; None: all.
    """
    total: dict[tuple[str, tuple[str, ...], str, str], list[float]] = {}
    for sign, collectives in ((-1.0, before), (1.0, after)):
        for c in collectives:
            key = (c.kind, tuple(c.mesh_axes), _starred(c.tensor), pattern(c.operation))
            found = total.setdefault(key, [0.0, 0.0])
            found[0] += sign * c.seconds * c.count
            found[1] += sign * c.bytes_per_device * c.count
    scale = max((abs(s) for s, _ in total.values()), default=0.0)
    changed = [
        Difference(*key, seconds=s, bytes_per_device=b)
        for key, (s, b) in total.items()
        if abs(s) > 1e-9 * scale or abs(b) >= 1
    ]
    return sorted(changed, key=lambda d: -abs(d.seconds))[:most]


def _starred(tensor: str) -> str:
    """Paths of repeated layers become one; the numbers of a shape stay."""
    return tensor if tensor.endswith("]") else pattern(tensor)

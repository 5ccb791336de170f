"""What it costs to resolve the partial results that a sharded reduction leaves: all-reduces and reduce-scatters."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard_ilp.costs.reshard import CollectiveSeconds
from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.strategies import Strategy


def resolution_payloads(
    strategy: Strategy,
    shape: tuple[int, ...],
    itemsize: float,
    axis_sizes: Sequence[int],
    costs: CollectiveSeconds | None = None,
) -> list[tuple[str, tuple[int, ...], float]]:
    """Collectives that resolve a strategy's partial results: (kind, mesh axes, payload bytes).

    ``costs`` tells into how many a reduce-scatter is split (:mod:`autoshard_ilp.costs.scatter`); without it, none is.
    """
    if not strategy.resolutions or strategy.partial is None:
        return []
    stages = getattr(costs, "scatter_stages", None)
    layout = list(strategy.partial)
    found = []
    for r in strategy.resolutions:
        scatters = r.kind == "reduce-scatter"
        for axes in stages(r.axes) if scatters and stages else (r.axes,):
            found.append((r.kind, axes, float(local_bytes(shape, itemsize, tuple(layout), axis_sizes))))
            for axis in axes if scatters else ():
                layout[axis] = r.dim
    return found


def resolution_seconds(
    strategy: Strategy,
    shape: tuple[int, ...],
    itemsize: float,
    axis_sizes: Sequence[int],
    costs: CollectiveSeconds,
    share: float = 1.0,
) -> float:
    """Seconds to resolve a strategy's partial results, which pay a ``share`` of the fixed ones."""
    payloads = resolution_payloads(strategy, shape, itemsize, axis_sizes, costs)
    return sum(costs.seconds(*what) - saved_seconds(costs, *what, share) for what in payloads)


def saved_seconds(
    costs: CollectiveSeconds, kind: str, axes: tuple[int, ...], payload_bytes: float, share: float
) -> float:
    """What a collective saves that pays only a share of the fixed seconds, because it is combined with others."""
    return (1.0 - share) * costs.alpha_beta(kind, axes)[0] if payload_bytes > 0 and share < 1.0 else 0.0

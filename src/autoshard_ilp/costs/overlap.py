"""Communication that hides behind compute.

A profile may declare, per kind of collective, the share of its time that runs while the device computes (``[overlap]``
in its TOML, 0 to 1, each with its source). The model is linear: of a collective that takes T seconds alone, the step
waits for ``(1 - share) * T``, the *exposed* time, and this is what the integer program minimises. The rest is *hidden*.

The assumption behind it: there is compute to hide behind, next to every collective. That cannot hold where more is
hidden than is computed in the whole step, and a plan says so. The default of every profile is 0 for all kinds, so that
nothing is promised that nobody measured: compilers overlap gathers and scatters of weights well, but the all-reduces of
tensor parallelism, whose result the next product needs at once, hardly at all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from autoshard_ilp.costs.collectives import CollectiveCosts


@lru_cache(maxsize=32)
def _alone(links: Any) -> CollectiveCosts:
    """The same links with nothing hidden."""
    return CollectiveCosts(replace(links, profile=replace(links.profile, overlap_by_kind={})))


def hidden_seconds(costs: Any, kind: str, axes: tuple[int, ...], payload_bytes: float) -> float:
    """Seconds of one collective that run behind compute.

    Args:
        costs: :class:`~autoshard_ilp.costs.collectives.CollectiveCosts`; other cost models hide nothing.
        kind, axes, payload_bytes: as for its ``seconds``.
    """
    links = getattr(costs, "links", None)
    if links is None or not links.profile.overlap_by_kind.get(kind, 0.0):
        return 0.0
    return _alone(links).seconds(kind, axes, payload_bytes) - float(costs.seconds(kind, axes, payload_bytes))


def overlap_notes(compute_s: float, hidden_s: float, profile: Any) -> tuple[str, ...]:
    """What a plan takes for granted about overlap: nothing where nothing is hidden.

    Args:
        compute_s, hidden_s: seconds of compute and of hidden communication in one step.
        profile: the hardware profile.
    """
    if not hidden_s:
        return ()
    declared = {k: share for k, share in sorted(profile.overlap_by_kind.items()) if share}
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in declared.items())
    notes = [f"Profile {profile.name} declares communication that hides behind compute: {shares}."]
    if hidden_s > compute_s:
        notes.append(
            f"It hides {hidden_s:.3g} s of communication behind {compute_s:.3g} s of compute, which is impossible: the "
            "step takes longer than predicted. Lower the shares under [overlap] in the profile."
        )
    return tuple(notes)

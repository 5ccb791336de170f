"""A hardware profile written as the TOML that ``costs.profile`` reads."""

from __future__ import annotations

from typing import Any

import tomlkit

from autoshard_ilp.costs.profile import HardwareProfile


def to_toml(profile: HardwareProfile) -> str:
    """The text of a profile's TOML; reading it gives an equal profile.

    Args:
        profile: figures without a known source (changed by ``dataclasses.replace``) are marked as assumptions.
    """
    document = tomlkit.document()
    document.add("name", tomlkit.item(profile.name))
    document.add("family", tomlkit.item(profile.family))
    document.add("description", tomlkit.item(profile.description))
    document.add("device_kinds", tomlkit.item(list(profile.device_kinds)))
    sections: dict[str, Any] = {}
    for key, value in profile.figures().items():
        section, _, name = key.partition(".")
        figure = tomlkit.inline_table()
        figure.update({"value": _plain(value), "source": _source(profile, key)})
        sections.setdefault(section, tomlkit.table()).add(name, figure)
    for section, table in sections.items():
        document.add(section, table)
    if profile.residuals:
        document.add("residuals", tomlkit.item({kind: dict(row) for kind, row in profile.residuals.items()}))
    document.add("sources", tomlkit.item(dict(profile.sources)))
    return tomlkit.dumps(document)


def _plain(value: Any) -> Any:
    """Torus shapes as "4x4"; numbers and texts as they are."""
    if isinstance(value, tuple):
        return ["x".join(map(str, shape)) for shape in value]
    return value


def _source(profile: HardwareProfile, key: str) -> str:
    text = profile.figure_sources.get(key, "assumption: set by hand")
    for name, place in profile.sources.items():
        if text.startswith(name):
            text = text.removesuffix(f" ({place})")
    return text

"""One set of colours for page and figures: middle tones that read on light and on dark ground."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard_ilp.course import COMPUTE

PARTS: Mapping[str, str] = {
    "parameters": "#4878b6",
    "optimizer": "#3a9e9e",
    "state": "#9d755d",
    "inputs": "#c9a227",
    "gradients": "#a56cc1",
    "activations": "#dd6b4d",
    "gathered": "#6aa84f",
}
"""Parts of the memory, from the one that stays to the one that comes and goes."""

KINDS: Mapping[str, str] = {
    COMPUTE: "#7f8c9b",
    "all-gather": "#4878b6",
    "reduce-scatter": "#6aa84f",
    "all-reduce": "#dd6b4d",
    "all-to-all": "#a56cc1",
    "collective-permute": "#c9a227",
}
OTHER = "#8a8a8a"
LAYERS = ("#4878b6", "#dd6b4d", "#6aa84f", "#a56cc1", "#c9a227", "#3a9e9e", "#b5658a", "#9d755d")
INK = "#7b8089"
"""Lines and text of figures whose ground is transparent: legible on white and on black alike."""
PALE, ON_PALE = "#e6e8ec", "#3f444c"
"""Ground of a box that covers what is drawn behind it, and the text on it."""


def part(name: str) -> str:
    """Colour of a part of the memory."""
    return PARTS.get(name, OTHER)


def kind(name: str) -> str:
    """Colour of compute or of a kind of collective."""
    return KINDS.get(name, OTHER)


def shard(index: int, count: int) -> str:
    """Colour of one of ``count`` shards: neighbours differ, all of middle lightness."""
    import colorsys

    hue = (0.58 + index / max(count, 1)) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.53 if index % 2 else 0.43, 0.5)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"

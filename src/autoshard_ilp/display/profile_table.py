"""The hardware profiles as a table; apart from plans' summaries, so that listing profiles loads no solver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autoshard_ilp.display.render import rendered, room, size, table


def profile_table(profiles: Iterable[Any], width: int | None = None, *, only_ascii: bool = False) -> str:
    """Main figures of hardware profiles (:class:`~autoshard_ilp.costs.profile.HardwareProfile`), one line each."""
    lines = []
    for p in profiles:
        peak = p.peak_flops_per_s("bfloat16") / p.matmul_efficiency
        link = f"{p.torus.dims}D torus" if p.torus else p.link_kind
        lines.append(
            [
                p.name,
                f"{peak / 1e12:.4g} TFLOP/s",
                size(p.memory_bytes),
                f"{p.memory_bytes_per_s / 1e9:.4g} GB/s",
                f"{link}, {p.link_bytes_per_s / 1e9:.4g} GB/s",
                str(p.domain_devices),
            ]
        )
    note = "Links: one way, nominal; one link of a torus, else all of a device. Domain: devices on fast links."
    columns = ["profile", "bf16 matmul", "memory", "bandwidth", "link", "domain"]
    if lines and room(width or 120, columns, lines) < max(len(line[0]) for line in lines):
        columns, lines = [*columns[:3], columns[4]], [[*line[:3], line[4]] for line in lines]
    made = table("Hardware profiles, figures per device", columns, lines, note=note)
    return rendered([made], width or 120, only_ascii)

"""What a search over meshes found, as records, tables and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard_ilp.explore import show
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.plan import Plan


@dataclass(frozen=True, eq=False)
class Candidate:
    """One mesh of the search.

    Attributes:
        hardware, devices, mesh: where.
        status: "optimal", "feasible", "pruned" (its bound shows that it is not the best), "infeasible" (memory),
            "refused" (the batch does not suit it), "failed", "unknown" (no plan in time) or "not tried".
        total_s, compute_s, communication_s, lower_bound_s: seconds per step.
        peak_bytes: per device.
        remat: rematerialisation policy.
        price_per_hour: of one device.
        minimum_bytes: of an infeasible mesh, the smallest budget that it has a plan for.
        reason: why it has no plan.
    """

    hardware: str
    devices: int
    mesh: MeshSpec
    status: str = "not tried"
    total_s: float = math.inf
    compute_s: float = math.nan
    communication_s: float = math.nan
    lower_bound_s: float = 0.0
    peak_bytes: int = 0
    remat: str = ""
    price_per_hour: float | None = None
    minimum_bytes: int | None = None
    reason: str = ""
    make: Callable[[], Plan] | None = field(default=None, repr=False)

    @property
    def price_per_step(self) -> float | None:
        """Price of one step on all devices, in the currency of the prices."""
        if self.price_per_hour is None or not math.isfinite(self.total_s):
            return None
        return self.price_per_hour * self.devices * self.total_s / 3600

    @cached_property
    def plan(self) -> Plan | None:
        """The plan; None where there is none."""
        return None if self.make is None else self.make()

    def order(self, rank: str) -> tuple[Any, ...]:
        """Best first: plans by time or price, then what was pruned by its bound, then the rest."""
        value = self.price_per_step if rank == "price" else self.total_s
        group = 0 if self.make is not None else 1 if self.status == "pruned" else 2
        key = value if value is not None and group == 0 else self.lower_bound_s
        return (group, key, len(self.mesh.axis_sizes), self.hardware, self.mesh.axis_sizes)


@dataclass(frozen=True, eq=False)
class MeshSearch:
    """Meshes, best first.

    Attributes:
        candidates: all of them.
        rank: "time" or "price".
        batch_size: global batch of every plan.
        interrupted: Ctrl-C came before all of them were tried.
    """

    candidates: tuple[Candidate, ...]
    rank: str
    batch_size: int
    interrupted: bool = False

    @property
    def best(self) -> Plan | None:
        """The plan on the best mesh."""
        return self.candidates[0].plan if self.candidates else None

    @property
    def best_by_hardware(self) -> dict[str, Candidate]:
        """The best mesh with a plan on each hardware."""
        found: dict[str, Candidate] = {}
        for c in self.candidates:
            if c.make is not None:
                found.setdefault(c.hardware, c)
        return found

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def rows(self) -> list[dict[str, Any]]:
        """One record per mesh, best first; times in seconds, sizes in bytes per device."""
        names = ("status", "total_s", "compute_s", "communication_s", "lower_bound_s", "peak_bytes", "remat")
        found = []
        for c in self.candidates:
            row = {"hardware": c.hardware, "devices": c.devices, "mesh": str(c.mesh)}
            row |= {n: getattr(c, n) for n in names}
            row |= {"price_per_step": c.price_per_step, "minimum_bytes": c.minimum_bytes, "reason": c.reason}
            found.append(row)
        return found

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        return show.dataframe(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{k: show.finite(v) if isinstance(v, float) else v for k, v in r.items()} for r in self.rows()]
        kept = {"rank": self.rank, "batch_size": self.batch_size, "interrupted": self.interrupted}
        return {**kept, "candidates": rows}

    def plot(self, ax: Any = None) -> Any:
        """Step time by mesh, compute and communication, as a ``matplotlib`` figure."""
        from autoshard_ilp.explore.figures import mesh_figure

        return mesh_figure(self, ax)

    def text(self, width: int | None = None, *, only_ascii: bool = False) -> str:
        """The search as a table."""
        from autoshard_ilp.display.render import rendered, room, size, table

        several = len({c.hardware for c in self.candidates}) > 1
        priced = any(c.price_per_hour is not None for c in self.candidates)
        lines = []
        for c in self.candidates:
            name = f"{c.mesh} ({c.hardware})" if several else str(c.mesh)
            if c.make is None:
                bound = f">= {show.seconds(c.lower_bound_s)}" if c.status == "pruned" else ""
                needs = f"needs {size(c.minimum_bytes)}" if c.minimum_bytes else ""
                lines.append([name, bound, "", "", needs, *([""] if priced else []), c.status])
                continue
            times = [show.seconds(c.total_s), show.seconds(c.compute_s), show.seconds(c.communication_s)]
            price = ["" if c.price_per_step is None else f"{c.price_per_step:.3g}"] if priced else []
            recompute = "" if c.remat in ("", "never") else f", recompute {c.remat}"
            lines.append([name, *times, size(c.peak_bytes), *price, c.status + recompute])
        columns = ["mesh", "step", "compute", "communication", "peak", *(["price"] if priced else []), "status"]
        for spared in (("compute", "communication"), ("peak",), ("price",)):
            if lines and room(width or 110, columns, lines) < max(len(x[0]) for x in lines):
                kept = [i for i, column in enumerate(columns) if column not in spared]
                columns, lines = [columns[i] for i in kept], [[x[i] for i in kept] for x in lines]
        first = self.candidates[0] if self.candidates else None
        where = "" if several or first is None else f" of {first.hardware}"
        title = (
            f"Meshes of {first.devices if first and not several else 'several'} devices{where}, batch {self.batch_size}"
        )
        note = "Price: of one step on all devices." if "price" in columns else ""
        parts: list[Any] = [table(title, columns, lines, note=note)]
        parts += ["Interrupted: not every mesh was tried."] if self.interrupted else []
        return rendered(parts, width or 110, only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(120))

"""Predicted against compiled: what a plan promised and what the target's compiler made of it."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.verify.compiled import compile_planned, flops_per_device, memory_bytes
from autoshard_ilp.verify.diff import Difference, differences
from autoshard_ilp.verify.hlo import CompiledCollective, parse_collectives
from autoshard_ilp.verify.hlo_text import parse_module
from autoshard_ilp.verify.prices import SecondsOf, plan_seconds
from autoshard_ilp.verify.replica_groups import IRREGULAR
from autoshard_ilp.verify.targets import Target, compile_only_mesh, parse_target, sized

# A compiler may write an all-reduce as reduce-scatter and all-gather, or the reverse: the ring bytes are equal.
_EQUIVALENT = {
    "all-reduce": ("all-reduce", "reduce-scatter", "all-gather"),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
    "all-gather": ("all-gather", "all-reduce"),
}


#: Share of the step's bytes below which a difference is not shown, and how many are shown at most.
SHOWN_DIFFERENCE, SHOWN_DIFFERENCES = 1e-3, 12


@dataclass(frozen=True)
class Row:
    """One kind of collective over one set of mesh axes, all of its executions in a step together.

    Attributes:
        kind: as in :class:`~autoshard_ilp.verify.hlo.CompiledCollective`.
        mesh_axes: in mesh order; ``("irregular",)`` when the compiled groups follow no axes.
        predicted_bytes_per_device, compiled_bytes_per_device: bytes one device sends per step under a ring.
        predicted_count, compiled_count: executions per step. Compilers merge and split collectives.
        predicted_seconds, compiled_seconds: per step under the plan's cost model; None when unknown.
        planned: whether the plan has this collective, or one that a compiler may write this way, on these axes.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    predicted_bytes_per_device: int = 0
    compiled_bytes_per_device: int = 0
    predicted_count: int = 0
    compiled_count: int = 0
    predicted_seconds: float | None = None
    compiled_seconds: float | None = None
    planned: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The row as a plain dictionary; axes joined by ``+``."""
        return {**vars(self), "mesh_axes": "+".join(self.mesh_axes)}


@dataclass(frozen=True)
class Verification:
    """What the compiler of a target made of a plan.

    Attributes:
        target: what was compiled for, such as ``"tpu-v5e:4x4"``, or ``"own devices"``.
        rows_by_collective: one :class:`Row` per kind and mesh axes, the most compiled bytes first.
        collectives: every compiled collective (:class:`~autoshard_ilp.verify.hlo.CompiledCollective`).
        predicted_peak_bytes, compiled_peak_bytes: per device; compiled is argument + output + temp - alias.
        memory: XLA's parts of that, per device.
        predicted_flops, compiled_flops: per device and step; None when unknown.
        compile_seconds: tracing, lowering and compiling.
        text: the optimized HLO.
        differences: what only the plan or only the compiled program sends, with tensor and layer, the most bytes first
            (:class:`~autoshard_ilp.verify.diff.Difference`).
    """

    target: str
    rows_by_collective: tuple[Row, ...]
    collectives: tuple[CompiledCollective, ...] = field(repr=False)
    predicted_peak_bytes: int | None
    compiled_peak_bytes: int | None
    memory: Mapping[str, int] = field(repr=False)
    predicted_flops: float | None
    compiled_flops: float | None
    compile_seconds: float
    text: str = field(repr=False)
    differences: tuple[Difference, ...] = field(default=(), repr=False)

    @property
    def predicted_bytes_per_device(self) -> int:
        """Bytes one device sends per step according to the plan."""
        return sum(row.predicted_bytes_per_device for row in self.rows_by_collective)

    @property
    def compiled_bytes_per_device(self) -> int:
        """Bytes one device sends per step in the compiled program."""
        return sum(row.compiled_bytes_per_device for row in self.rows_by_collective)

    @property
    def unplanned(self) -> tuple[Row, ...]:
        """Compiled collectives of a kind that the plan does not have on the same mesh axes, in any equivalent form."""
        return tuple(row for row in self.rows_by_collective if row.compiled_bytes_per_device and not row.planned)

    @property
    def unplanned_bytes_per_device(self) -> int:
        """Compiled bytes per step that no predicted bytes account for.

        What a kind sends beyond its prediction on the same mesh axes counts, unless it stands for another kind that
        sends as much less: an all-reduce for a reduce-scatter and an all-gather, or the reverse.
        """
        over: dict[tuple[str, ...], dict[str, int]] = {}
        for row in self.rows_by_collective:
            excess = row.compiled_bytes_per_device - row.predicted_bytes_per_device
            over.setdefault(row.mesh_axes, {})[row.kind] = excess
        total = 0
        for kinds in over.values():
            whole = kinds.pop("all-reduce", 0)
            halves = [kinds.pop(kind, 0) for kind in ("reduce-scatter", "all-gather")]
            surplus, deficit = (sum(max(0, sign * half) for half in halves) for sign in (1, -1))
            total += max(0, whole - deficit) + max(0, surplus - max(0, -whole))
            total += sum(max(0, excess) for excess in kinds.values())
        return total

    @property
    def predicted_communication_seconds(self) -> float | None:
        """Seconds of collectives per step in the plan; None when not every row has them."""
        return _total(row.predicted_seconds for row in self.rows_by_collective if row.predicted_count)

    @property
    def compiled_communication_seconds(self) -> float | None:
        """Seconds of the compiled collectives per step under the plan's cost model, nothing overlapped."""
        return _total(row.compiled_seconds for row in self.rows_by_collective if row.compiled_count)

    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of dictionaries."""
        return [row.as_dict() for row in self.rows_by_collective]

    def to_dataframe(self) -> Any:
        """The table as a ``pandas.DataFrame`` (the ``notebook`` extra)."""
        import pandas

        columns = list(Row("", ()).as_dict())
        return pandas.DataFrame(self.rows(), columns=columns)

    def _totals(self) -> list[tuple[str, str, str, str]]:
        """Name, predicted, compiled, ratio of the figures that are one number each."""
        lines = [
            (
                "sent per device",
                _size(self.predicted_bytes_per_device),
                _size(self.compiled_bytes_per_device),
                _ratio(self.predicted_bytes_per_device, self.compiled_bytes_per_device),
            ),
            (
                "of it not predicted",
                "",
                _size(self.unplanned_bytes_per_device),
                "",
            ),
            (
                "peak memory",
                _size(self.predicted_peak_bytes),
                _size(self.compiled_peak_bytes),
                _ratio(self.predicted_peak_bytes, self.compiled_peak_bytes),
            ),
            (
                "matmul FLOP",
                _number(self.predicted_flops),
                _number(self.compiled_flops),
                _ratio(self.predicted_flops, self.compiled_flops),
            ),
        ]
        predicted, compiled = self.predicted_communication_seconds, self.compiled_communication_seconds
        if predicted is not None or compiled is not None:
            lines.append(("communication", _time(predicted), _time(compiled), _ratio(predicted, compiled)))
        return lines

    def _lines(self) -> list[tuple[str, ...]]:
        """Cells of the table of collectives."""
        return [
            (
                row.kind,
                "+".join(row.mesh_axes),
                f"{row.predicted_count}",
                f"{row.compiled_count}",
                _size(row.predicted_bytes_per_device),
                _size(row.compiled_bytes_per_device),
                _ratio(row.predicted_bytes_per_device, row.compiled_bytes_per_device),
                _time(row.predicted_seconds),
                _time(row.compiled_seconds),
                "" if row.planned or not row.compiled_bytes_per_device else "unplanned",
            )
            for row in self.rows_by_collective
        ]

    def summary(self, width: int = 150, *, only_ascii: bool = False) -> str:
        """The comparison as text: collectives per kind and mesh axes, then memory, FLOP and totals.

        Args:
            width: in columns.
            only_ascii: draw lines with ASCII characters, for locales that have no others.
        """
        from rich import box
        from rich.table import Table

        from autoshard_ilp.display.render import rendered

        table = Table(title=f"Compiled for {self.target} in {self.compile_seconds:.1f} s", box=box.SIMPLE_HEAD)
        for position, name in enumerate(_COLUMNS):
            kind = position == 0 and width >= 100
            table.add_column(name, justify="left" if position < 2 else "right", overflow="fold", no_wrap=kind)
        for line in self._lines():
            table.add_row(*line)
        totals = Table("", "predicted", "compiled", "ratio", box=box.SIMPLE_HEAD)
        for total in self._totals():
            totals.add_row(*total)
        shown = [table, totals, *self._difference_table(Table)]
        return rendered(shown, width, only_ascii).rstrip("\n")

    def _difference_table(self, make: Any) -> list[Any]:
        """The differences that matter as a table of ``make`` (``rich.table.Table``), or nothing."""
        least = SHOWN_DIFFERENCE * max(self.predicted_bytes_per_device, self.compiled_bytes_per_device)
        lines = [d for d in self.differences if d.bytes_per_device > least][:SHOWN_DIFFERENCES]
        if not lines:
            return []
        table = make(title="Collectives that only the plan (missing) or only the compiled program (surplus) has")
        names = ("", "collective", "mesh axes", "sent per device", "tensor", "layer", "source")
        for position, name in enumerate(names):
            table.add_column(name, justify="right" if position == 3 else "left", overflow="fold")
        for d in lines:
            where = f"{d.layer}/{d.operation}".strip("/")
            table.add_row(d.status, d.kind, "+".join(d.mesh_axes), _size(d.bytes_per_device), d.tensor, where, d.source)
        return [table]

    def __repr__(self) -> str:
        return (
            f"Verification(target={self.target!r}, "
            f"sent={_size(self.predicted_bytes_per_device)} predicted / {_size(self.compiled_bytes_per_device)} "
            f"compiled, unplanned={_size(self.unplanned_bytes_per_device)}, "
            f"peak={_size(self.predicted_peak_bytes)} predicted / {_size(self.compiled_peak_bytes)} compiled, "
            f"compile_seconds={self.compile_seconds:.1f})"
        )

    def _repr_html_(self) -> str:
        title = f"<p>Compiled for <b>{html.escape(self.target)}</b> in {self.compile_seconds:.1f} s</p>"
        totals = _html_table(("", "predicted", "compiled", "ratio"), self._totals())
        return title + _html_table(_COLUMNS, self._lines()) + totals


_COLUMNS = (
    "collective",
    "mesh axes",
    "count predicted",
    "compiled",
    "sent per device predicted",
    "compiled",
    "ratio",
    "time predicted",
    "compiled",
    "note",
)


def _html_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row("th", columns) + "".join(row("td", line) for line in lines) + "</table>"


def _total(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else math.fsum(value for value in known if value is not None)


def _size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "?"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n_bytes >= 1024**power:
            return f"{n_bytes / 1024**power:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3f} ms"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3e}"


def _ratio(predicted: float | None, compiled: float | None) -> str:
    return f"{compiled / predicted:.2f}" if predicted and compiled is not None else ""


def compare_collectives(
    predicted: Iterable[Any],
    compiled: Sequence[CompiledCollective],
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
    seconds: SecondsOf | None = None,
) -> tuple[Row, ...]:
    """Predicted and compiled collectives side by side.

    Args:
        predicted: objects with ``kind``, ``bytes_per_device``, ``mesh_axes``, ``count`` and ``seconds`` (per
            execution, or None).
        compiled: what :func:`~autoshard_ilp.verify.hlo.parse_collectives` found.
        axis_names: of the mesh, major to minor.
        axis_sizes: devices along each axis. An axis of one device takes part in nothing.
        seconds: time of one compiled collective; None: unknown.
    """
    size_of = dict(zip(axis_names, axis_sizes, strict=True))
    cells: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}

    def cell(kind: str, axes: tuple[str, ...]) -> dict[str, Any]:
        return cells.setdefault((kind, axes), {"p_bytes": 0, "c_bytes": 0, "p_n": 0, "c_n": 0, "p_s": [], "c_s": []})

    for collective in predicted:
        kind = str(collective.kind).replace("_", "-")
        axes = tuple(name for name in axis_names if name in collective.mesh_axes and size_of[name] > 1)
        if not axes or not collective.bytes_per_device:
            continue
        entry, count = cell(kind, axes), collective.count
        entry["p_bytes"] += collective.bytes_per_device * count
        entry["p_n"] += count
        time_each = getattr(collective, "seconds", None)
        entry["p_s"].append(None if time_each is None else time_each * count)
    for found in compiled:
        axes = found.mesh_axes(axis_sizes, axis_names)
        entry = cell(found.kind, axes)
        entry["c_bytes"] += found.total_bytes_per_device
        entry["c_n"] += found.count
        time_each = seconds(found.kind, axes, found.payload_bytes) if seconds and axes != IRREGULAR else None
        entry["c_s"].append(None if time_each is None else time_each * found.count)
    predicted_keys = {key for key, entry in cells.items() if entry["p_n"]}
    rows = [
        Row(
            kind=kind,
            mesh_axes=axes,
            predicted_bytes_per_device=round(entry["p_bytes"]),
            compiled_bytes_per_device=entry["c_bytes"],
            predicted_count=round(entry["p_n"]),
            compiled_count=entry["c_n"],
            predicted_seconds=_total(entry["p_s"]),
            compiled_seconds=_total(entry["c_s"]),
            planned=any((other, axes) in predicted_keys for other in _EQUIVALENT.get(kind, (kind,))),
        )
        for (kind, axes), entry in cells.items()
    ]
    order = sorted(
        rows, key=lambda row: (-max(row.compiled_bytes_per_device, row.predicted_bytes_per_device), row.kind)
    )
    return tuple(order)


def verify(
    plan: Any, target: str | Target | None = None, *, mesh: Any | None = None, seconds: SecondsOf | None = None
) -> Verification:
    """Compile a plan for a target and compare what the compiler did with what the plan predicted.

    Args:
        plan: has ``mesh`` (axis names and sizes), ``jit(mesh)``, ``abstract_args(mesh)``, ``collectives``, ``memory``
            and ``cost``.
        target: such as ``"tpu-v5e:4x4"`` or ``"h100:8"``; None: the devices of the plan's own mesh.
        mesh: a ``jax.sharding.Mesh`` to compile for in place of a target.
        seconds: time of one compiled collective; None: the plan's own cost model.

    Raises:
        InputShapeError: ``seconds`` is no function.
        TargetError: unknown target, another number of devices than the mesh, or a compiler that is not installed.
    """
    from autoshard_ilp.mesh import as_mesh

    if seconds is not None and not callable(seconds):
        raise InputShapeError(
            f"seconds is a function of a collective's kind, mesh axes and payload in bytes, or None for the plan's own "
            f"prices. Received: {seconds!r}."
        )
    spec = as_mesh(plan.mesh)
    name, options = "own devices", {}
    if target is not None:
        chosen = sized(parse_target(target), spec.size)
        name, options = str(chosen), chosen.compiler_options
        mesh = compile_only_mesh(chosen, spec.axis_names, spec.axis_sizes)
    started = time.perf_counter()
    compiled = compile_planned(plan, mesh, compiler_options=options)
    elapsed = time.perf_counter() - started
    text = compiled.as_text()
    module = parse_module(text)
    collectives = tuple(parse_collectives(module))
    memory = memory_bytes(compiled)
    predicted_peak = getattr(getattr(plan, "memory", None), "peak_bytes", None)
    predicted_flops = getattr(getattr(plan, "cost", None), "flops", None)
    return Verification(
        target=name,
        rows_by_collective=compare_collectives(
            plan.collectives,
            collectives,
            spec.axis_names,
            spec.axis_sizes,
            seconds or plan_seconds(plan),
        ),
        collectives=collectives,
        predicted_peak_bytes=None if predicted_peak is None else int(predicted_peak),
        compiled_peak_bytes=memory.get("peak"),
        memory=memory,
        predicted_flops=None if predicted_flops is None else float(predicted_flops),
        compiled_flops=flops_per_device(compiled, module),
        compile_seconds=elapsed,
        text=text,
        differences=differences(
            plan.collectives,
            collectives,
            spec.axis_names,
            spec.axis_sizes,
            getattr(getattr(plan, "executable", None), "graph", None),
        ),
    )

"""What a sweep found: a tidy table, figures and a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard_ilp.arguments import file_path
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.results import COLUMNS, Row

PLANNED = ("optimal", "feasible")
INPUTS = (
    *("model", "mesh", "devices", "hardware", "memory_budget", "batch_size", "sequence_length"),
    *("mode", "objective", "remat", "strategy"),
)


@dataclass(frozen=True, eq=False)
class Sweep:
    """Results of a sweep, one row per finished case; see :data:`autoshard_ilp.explore.results.COLUMNS`.

    Attributes:
        rows: in the order of the cases.
        total: number of cases, finished or not.
        path: the results file, if there is one.
        interrupted: Ctrl-C came; the same call goes on from there.
    """

    rows: tuple[Row, ...]
    total: int
    path: Path | None = None
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        """Cases that ended in an error."""
        return tuple(r for r in self.rows if r["status"] == "failed")

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by status."""
        return dict(Counter(r["status"] for r in self.rows))

    def varying(self) -> list[str]:
        """Inputs that differ between rows."""
        return [name for name in INPUTS if len({r[name] for r in self.rows}) > 1]

    def to_dataframe(self) -> Any:
        """All rows as a ``pandas.DataFrame``, one column per variable, one line per case."""
        return show.dataframe(self.rows, list(COLUMNS))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        path = None if self.path is None else str(self.path)
        kept = {"total": self.total, "finished": len(self.rows), "interrupted": self.interrupted, "output": path}
        return {**kept, "counts": self.counts, "rows": [dict(r) for r in self.rows]}

    def plot(self, x: str | None = None, y: str = "total_s", color: str | None = None, ax: Any = None) -> Any:
        """One quantity against one input as a ``matplotlib`` figure.

        Args:
            x: a column; None: the input that varies most.
            y: a column of numbers, such as "total_s", "peak_bytes" or "gap".
            color: a column that tells series apart; None: another input that varies.
            ax: axes to draw into.

        Raises:
            InputShapeError: a column that does not exist, or is not made of numbers.
        """
        from autoshard_ilp.explore.figures import sweep_figure

        chosen, series = self.default_axes()
        x, color = x or chosen, color if color is not None else (series if series != x else None)
        for name in (x, y, color):
            if name is not None and name not in COLUMNS:
                raise InputShapeError(f"A sweep has the columns {', '.join(COLUMNS)}. Received: {name!r}.")
        if COLUMNS[y] is str:
            raise InputShapeError(f"y is a column of numbers. Received: {y!r}.")
        return sweep_figure(self, x, y, color, ax)

    def default_axes(self) -> tuple[str, str | None]:
        """The input that varies most, and the next one."""
        found = sorted(self.varying(), key=lambda n: -len({r[n] for r in self.rows}))
        found = [n for n in found if n != "devices"] or found or ["mesh"]
        return found[0], found[1] if len(found) > 1 else None

    def report(self, path: Any) -> Path:
        """Writes an HTML page that needs nothing else: the table, figures, failures, how it was made."""
        from autoshard_ilp.explore.sweep_report import write

        return write(self, file_path(path))

    def text(self, width: int | None = None, *, only_ascii: bool = False, most: int = 60) -> str:
        """The results as a table, fastest first within what varies."""
        from autoshard_ilp.display.render import rendered, room, size, table

        inputs = [n for n in self.varying() if n != "devices"] or ["model", "mesh"]
        ordered = sorted(self.rows, key=lambda r: math.inf if r["total_s"] is None else r["total_s"])
        lines = []
        for r in ordered[:most]:
            names = " | ".join("" if r[n] is None else str(r[n]) for n in inputs)
            if r["status"] in PLANNED:
                sure = "optimal" if r["status"] == "optimal" else f"gap {r['gap'] or 0:.2%}"
                lines.append([names, show.seconds(r["total_s"]), size(r["peak_bytes"] or 0), sure])
                continue
            needs = f"needs {size(r['minimum_budget_bytes'])}" if r["minimum_budget_bytes"] else ""
            lines.append([names, "", needs, r["status"]])
        columns = [" | ".join(inputs), "step", "peak", "status"]
        if lines and room(width or 110, columns, lines) < 20:
            columns, lines = [columns[0], columns[1], columns[3]], [[x[0], x[1], x[3]] for x in lines]
        rest = len(self.rows) - most
        counts = ", ".join(f"{n} {status}" for status, n in sorted(self.counts.items()))
        head = f"{len(self.rows)} of {self.total} cases finished: {counts or 'none'}"
        parts: list[Any] = [head, table("Results", columns, lines, note=f"{rest} more." if rest > 0 else "")]
        errors = Counter(f"{r['error_type']}: {r['error']}" for r in self.failed)
        parts += [f"failed ({n} x): {text[:300]}" for text, n in errors.most_common(5)]
        parts += ["Interrupted. The same call goes on from here."] if self.interrupted else []
        return rendered(parts, width or 110, only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(120))

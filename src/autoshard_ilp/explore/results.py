"""The results of a sweep on disk: whole rows survive a kill at any moment.

A row is appended as one line and synced before the next case is begun. In a CSV file that line is the row. A Parquet
file cannot grow, so beside it lies a journal (``<file>.journal``, one JSON object per line) to which rows are appended,
and the Parquet file is written anew from all rows, to a temporary file that then takes its place. A line that was cut
off is recognised by its missing end and dropped; a damaged Parquet file is rebuilt from its journal.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoshard_ilp.errors import SweepFileError

FORMAT = 1
"""Of the columns; a file of a newer format is refused."""

COLUMNS: Mapping[str, type] = {
    **dict.fromkeys(("case", "model", "mesh"), str),
    "devices": int,
    **dict.fromkeys(("hardware", "memory_budget"), str),
    **dict.fromkeys(("batch_size", "sequence_length"), int),
    **dict.fromkeys(("mode", "objective", "remat", "strategy", "status"), str),
    **dict.fromkeys(("total_s", "compute_s", "communication_s", "lower_bound_s", "gap"), float),
    **dict.fromkeys(("planned_batch_size", "budget_bytes", "peak_bytes"), int),
    **dict.fromkeys(("parameters_bytes", "optimizer_bytes", "gradients_bytes", "activations_bytes"), int),
    **dict.fromkeys(("gathered_bytes", "minimum_budget_bytes"), int),
    **dict.fromkeys(("recomputation",), str),
    **dict.fromkeys(("collectives", "sent_bytes"), float),
    **dict.fromkeys(("trace_s", "build_s", "solve_s", "wall_s"), float),
    **dict.fromkeys(("error_type", "error"), str),
    "time_limit_s": float,
    "relative_gap": float,
    "seed": int,
    **dict.fromkeys(("autoshard_ilp", "jax", "keras", "ortools", "python", "profile_hash", "program_hash"), str),
    "finished_at": str,
    "format": int,
}
"""Columns and their kinds. Times in seconds per step or per stage, sizes in bytes per device; UTC times."""

VERSIONS = ("autoshard_ilp", "jax", "keras", "ortools")
REWRITE_SECONDS = 2.0
"""A large Parquet file is rewritten at most this often; the journal has every row at once."""
SMALL_ROWS = 300

Row = dict[str, Any]


def journal_of(path: Path) -> Path:
    """Where rows are appended."""
    return path if path.suffix == ".csv" else path.with_name(path.name + ".journal")


def clean(row: Mapping[str, Any]) -> Row:
    """A row with all columns, each of its kind or None; text on one line."""
    found: Row = {}
    for name, kind in COLUMNS.items():
        value = row.get(name)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            found[name] = None
        elif kind is str:
            found[name] = " ".join(str(value).split())
        else:
            found[name] = kind(value)
    return found


def read(path: Path) -> list[Row]:
    """All whole rows of a results file and its journal, one per case, the last one of each.

    Raises:
        SweepFileError: unreadable, foreign, or of a newer format.
    """
    if path.suffix == ".csv":
        rows = _csv_rows(path)[0] if path.exists() else []
    else:
        journal = journal_of(path)
        kept = _journal_rows(journal)[0] if journal.exists() else []
        rows = [*_parquet_rows(path, recoverable=journal.exists()), *kept]
    newer = [r["format"] for r in rows if (r["format"] or 0) > FORMAT]
    if newer:
        raise SweepFileError(
            f"This release reads results of format {FORMAT}. Received: {path} with rows of format {max(newer)}. "
            "Upgrade autoshard-ilp, or choose another output file."
        )
    return list({r["case"]: r for r in rows}.values())


def _parquet_rows(path: Path, recoverable: bool) -> list[Row]:
    if not path.exists():
        return []
    pq = _parquet()
    try:
        table = pq.read_table(path)
    except Exception as error:  # pyarrow has an error of its own for every kind of damage
        if recoverable:
            return []
        raise SweepFileError(
            f"A results file is Parquet as a sweep writes it. Received: {path}, which cannot be read "
            f"({type(error).__name__}), and no journal beside it ({journal_of(path).name}). Choose another output file."
        ) from error
    missing = [c for c in ("case", "status", "format") if c not in table.column_names]
    if missing:
        raise _foreign(path, missing)
    return [clean(r) for r in table.to_pylist() if r.get("case") and r.get("status")]


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SweepFileError(
            'A .parquet file needs pyarrow: pip install "autoshard-ilp[sweep]". Received: none. Or write a .csv file.'
        ) from error
    return pyarrow.parquet


def _foreign(path: Path, missing: Iterable[str]) -> SweepFileError:
    return SweepFileError(
        f"Results are added to a file that a sweep wrote. Received: {path}, which lacks the columns "
        f"{', '.join(list(missing)[:4])}: another file, or results of another version. Choose another output file."
    )


def _lines(path: Path) -> list[tuple[int, str]]:
    """(end offset in bytes, text) of every whole line that is text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SweepFileError(f"A results file must be readable. Received: {path} ({error}).") from error
    found, start = [], 0
    while (end := data.find(b"\n", start)) >= 0:
        with contextlib.suppress(UnicodeDecodeError):
            found.append((end + 1, data[start:end].decode("utf-8").rstrip("\r")))
        start = end + 1
    return found


def _csv_rows(path: Path) -> tuple[list[Row], int]:
    """Whole rows, and how many bytes of the file are whole from its start."""
    lines = _lines(path)
    if not lines:
        if path.stat().st_size and not "".join(COLUMNS).startswith(path.read_text("utf-8", "replace")[:3]):
            raise _foreign(path, COLUMNS)
        return [], 0
    header = next(csv.reader([lines[0][1]]), [])
    missing = [c for c in COLUMNS if c not in header]
    if missing or len(header) != len(COLUMNS):
        raise _foreign(path, missing or ["(too many)"])
    rows, end = [], lines[0][0]
    for offset, text in lines[1:]:
        row = _typed(dict(zip(header, next(csv.reader([text]), []), strict=False)))
        if row is not None:
            rows.append(row)
            end = offset
    return rows, end


def _journal_rows(path: Path) -> tuple[list[Row], int]:
    rows, end = [], 0
    for offset, text in _lines(path):
        with contextlib.suppress(ValueError, TypeError):
            row = json.loads(text)
            if isinstance(row, dict) and row.get("case") and row.get("status"):
                rows.append(clean(row))
                end = offset
    return rows, end


def _typed(texts: Mapping[str, str]) -> Row | None:
    """A row of a CSV file; None when it is not whole."""
    if len(texts) != len(COLUMNS):
        return None
    try:
        row = {n: None if texts[n] == "" else kind(texts[n]) for n, kind in COLUMNS.items()}
    except ValueError:
        return None
    return row if row["case"] and row["status"] and row["format"] else None


class Store:
    """An open results file; :meth:`add` makes a row permanent before it returns.

    Args:
        path: ends in .parquet or .csv.

    Raises:
        SweepFileError: unreadable, foreign, newer, or another sweep is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix not in (".parquet", ".csv"):
            raise SweepFileError(f"Results are written to a .parquet or .csv file. Received: {path}.")
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise SweepFileError(f"Results are written to a file in a directory that exists. Received: {path}.")
        if path.suffix == ".parquet":
            _parquet()
        read(path)  # what is foreign or damaged is refused before there is a journal
        self._written = 0.0
        self._open()

    def _open(self) -> None:
        log = journal_of(self.path)
        try:
            self._file = open(log, "ab")  # noqa: SIM115  # stays open for the sweep
        except OSError as error:
            raise SweepFileError(f"A results file must be writable. Received: {log} ({error}).") from error
        _lock(self._file, self.path)
        self.rows = {r["case"]: r for r in read(self.path)}  # only now: until here another sweep may have added some
        whole = (_csv_rows if log.suffix == ".csv" else _journal_rows)(log)[1]
        if log.stat().st_size > whole:
            self._file.truncate(whole)  # what a kill cut off
        if not whole and log.suffix == ".csv":
            self._append(_csv_line(COLUMNS))
        if log.suffix != ".csv":
            known = {r["case"] for r in _journal_rows(log)[0]}
            for row in self.rows.values():  # a journal that was lost
                if row["case"] not in known:
                    self._append((json.dumps(row) + "\n").encode())

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, row: Mapping[str, Any]) -> None:
        """Keeps a row."""
        done = clean({**row, "format": FORMAT})
        self.rows[done["case"]] = done
        if self.path.suffix == ".csv":
            self._append(_csv_line("" if v is None else repr(v) if isinstance(v, float) else v for v in done.values()))
            return
        self._append((json.dumps(done) + "\n").encode())
        if len(self.rows) <= SMALL_ROWS or time.monotonic() - self._written > REWRITE_SECONDS:
            self._write_parquet()

    def _write_parquet(self) -> None:
        import pyarrow as pa

        kinds = {str: pa.string(), int: pa.int64(), float: pa.float64()}
        schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
        table = pa.Table.from_pylist(list(self.rows.values()), schema=schema)
        fresh = self.path.with_name(f".{self.path.name}.new")  # what a kill leaves behind is overwritten next time
        with open(fresh, "wb") as file:
            _parquet().write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)
        self._written = time.monotonic()

    def close(self) -> None:
        """Writes what is outstanding and lets others write."""
        if not self._file.closed:
            if self.path.suffix == ".parquet":
                self._write_parquet()
            self._file.close()


def _csv_line(values: Iterable[Any]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(list(values))
    return out.getvalue().encode("utf-8")


def _lock(file: Any, path: Path) -> None:
    """One sweep at a time; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise SweepFileError(
            f"One sweep at a time writes a results file. Received: {path}, which another process is writing. Wait for "
            "it, or choose another output file."
        ) from error

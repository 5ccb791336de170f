"""``autoshard.sweep``: every combination of models, meshes, hardware, budgets and batches, over night if need be."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard_ilp.arguments import file_path, flag, integer, is_one_of, real
from autoshard_ilp.errors import InputShapeError, SweepFileError
from autoshard_ilp.explore.cases import AXES, SOLVER, Case, Work, grouped, read_sweep, work_of
from autoshard_ilp.explore.results import VERSIONS, Row, Store, clean, read
from autoshard_ilp.explore.runcase import Planner, versions
from autoshard_ilp.explore.sweep_result import Sweep
from autoshard_ilp.progress import Progress

OTHER_VERSIONS = ("error", "keep", "redo")


def sweep(
    file: Any = None,
    *,
    models: Any = None,
    meshes: Any = None,
    hardware: Any = None,
    budgets: Any = None,
    batch_sizes: Any = None,
    sequence_lengths: Any = None,
    modes: Any = None,
    objectives: Any = None,
    remat: Any = None,
    strategies: Any = None,
    output: Any = None,
    solver: Any = None,
    workers: int | None = None,
    case_time_limit: float | None = None,
    retry_failed: bool = False,
    other_versions: str = "error",
    progress: Any = None,
) -> Sweep:
    """Plans every combination of some axes, in parallel, and keeps each result as soon as it is there.

    A sweep that was interrupted or killed goes on where it stopped when it is called again with the same output: no
    finished case is lost or planned twice. A case that fails is a row with its error; the others go on.

    Args:
        file: a sweep file (TOML) with the arguments below; what is also given here takes precedence.
        models: "hub:PRESET" and "module:factory" texts, builders or models; a list, or a mapping of names.
        meshes: as for :func:`autoshard_ilp.optimize`, or "data=2,model=4".
        hardware: profile names, slices, TOML files or profiles. None: "cpu-host".
        budgets: sizes per device; "hardware" or None in the list stands for what the hardware has.
        batch_sizes, sequence_lengths, modes, objectives, remat: values of these options of ``optimize``.
        strategies: "optimal" and names of baselines.
        output: a .parquet or .csv file; None: results are kept in memory only.
        solver: :class:`autoshard_ilp.SolverOptions`, or a mapping of time_limit, relative_gap, seed, workers.
        workers: processes; 0: this process; None: half of the processors. Builders and models that other processes
            cannot import, and profiles that are no files, are planned in this process.
        case_time_limit: seconds per case in a worker process; None: none besides the solver's own.
        retry_failed: plan failed cases of the file again.
        other_versions: finished rows of other versions of autoshard-ilp, JAX, Keras or OR-Tools: "error", "keep", or
            "redo" them.
        progress: as for ``optimize``; a callable receives ``{"stage": "sweep", "done", "total", "seconds_left"}``.

    Returns:
        The results; ``.interrupted`` when Ctrl-C came.

    Raises:
        SweepFileError: the sweep file or the results file cannot be used.
        InputShapeError, ProfileError, UnsupportedModelError: an axis makes no sense; nothing is planned then.
    """
    given = {"models": models, "meshes": meshes, "hardware": hardware, "budgets": budgets, "batch_sizes": batch_sizes}
    given |= {"sequence_lengths": sequence_lengths, "modes": modes, "objectives": objectives, "remat": remat}
    given |= {"strategies": strategies}
    plan = _settings(file, given, output, solver, workers, case_time_limit)
    if not is_one_of(other_versions, OTHER_VERSIONS):
        raise InputShapeError(f"other_versions is one of {OTHER_VERSIONS}. Received: {other_versions!r}.")
    flag("retry_failed", retry_failed)
    work = work_of(plan.axes, plan.solver)
    store = Store(plan.output) if plan.output is not None else None
    try:
        known = store.rows if store is not None else {}
        waiting = _waiting(work.cases, known, retry_failed, other_versions, plan.output)
        rows = {c.key: known[c.key] for c in work.cases if c.key in known and c not in waiting}
        interrupted = _run(work, waiting, plan, store, rows, progress)
    finally:
        if store is not None:
            store.close()
    ordered = tuple(rows[c.key] for c in work.cases if c.key in rows)
    return Sweep(ordered, len(work.cases), plan.output, interrupted)


def load_sweep(path: Any) -> Sweep:
    """The results of a sweep so far, from its .parquet or .csv file; whole rows of a damaged file are recovered.

    Raises:
        SweepFileError: missing, foreign or newer.
    """
    source = file_path(path)
    if source.is_dir():
        raise SweepFileError(
            f"Results are in a .parquet or .csv file. Received: the folder {str(path)!r}. Name the file."
        )
    if not source.exists() and not source.with_name(source.name + ".journal").exists():
        raise SweepFileError(f"A results file must exist. Received: {source}.")
    rows = tuple(read(source))
    return Sweep(rows, len(rows), source)


@dataclass(frozen=True, eq=False)
class _Settings:
    axes: Mapping[str, Any]
    output: Path | None
    solver: Mapping[str, Any]
    workers: int
    case_time_limit: float
    notes: tuple[str, ...] = field(default=())


def _settings(
    file: Any, given: Mapping[str, Any], output: Any, solver: Any, workers: int | None, case_time_limit: float | None
) -> _Settings:
    """A file's settings with what was given beside it. Paths in a file are relative to the file."""
    stored: dict[str, Any] = read_sweep(file) if file is not None else {}
    folder = Path(file).parent if file is not None else Path()
    axes = {name: stored.get(name) for name in AXES} | {k: v for k, v in given.items() if v is not None}
    if file is not None and given.get("hardware") is None and stored.get("hardware"):
        axes["hardware"] = [str(folder / h) if h.endswith(".toml") else h for h in stored["hardware"]]
    where = file_path(output) if output is not None else folder / stored["output"] if "output" in stored else None
    run = stored.get("run", {})
    count = integer(workers if workers is not None else run.get("workers", max(1, (os.cpu_count() or 2) // 2)))
    if count is None or count < 0:
        raise InputShapeError(f"workers is a number of processes, or 0 for this one. Received: {workers!r}.")
    limit = real(case_time_limit if case_time_limit is not None else run.get("case_time_limit", math.inf))
    if limit is None or not limit > 0:
        raise InputShapeError(f"case_time_limit is a positive number of seconds. Received: {case_time_limit!r}.")
    return _Settings(axes, where, {**stored.get("solver", {}), **_solver(solver)}, count, limit)


def _solver(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {k: getattr(given, k, None) for k in SOLVER}
    unknown = sorted(set(found) - set(SOLVER))
    if unknown:
        raise InputShapeError(f"The solver's options in a sweep are {', '.join(SOLVER)}. Received: {unknown[0]!r}.")
    return found


def _waiting(
    cases: Sequence[Case], known: Mapping[str, Row], retry_failed: bool, other_versions: str, path: Path | None
) -> list[Case]:
    """Cases to plan: those without a finished row."""
    own = {name: versions()[name] for name in VERSIONS}
    waiting, foreign = [], []
    for case in cases:
        row = known.get(case.key)
        if row is None or (retry_failed and row["status"] == "failed"):
            waiting.append(case)
        elif any(row[name] != version for name, version in own.items()):
            foreign.append(case)
    if foreign and other_versions == "error":
        row = known[foreign[0].key]
        theirs = ", ".join(f"{n} {row[n]}" for n, v in own.items() if row[n] != v)
        raise SweepFileError(
            f"Rows of one results file are made by one set of versions. Received: {path}, of which {len(foreign)} rows "
            f"are by {theirs} (here: {', '.join(f'{n} {v}' for n, v in own.items())}). Keep them with "
            'other_versions="keep", plan them again with "redo", or choose another output file.'
        )
    redo = {c.key for c in foreign} if other_versions == "redo" else set()
    chosen = {c.key for c in waiting} | redo
    return [c for c in cases if c.key in chosen]


def _run(
    work: Work, waiting: Sequence[Case], plan: _Settings, store: Store | None, rows: dict[str, Row], progress: Any
) -> bool:
    """Plans what is waiting; True when interrupted."""
    from autoshard_ilp.console import was_interrupted

    total, before = len(work.cases), len(work.cases) - len(waiting)
    began = time.monotonic()
    source = _in_processes(work, waiting, plan) if work.portable and plan.workers else _here(work, waiting)
    with Bar(progress, total, before) as bar:
        try:
            for row in source:
                done = clean({**row, "format": 1})
                if store is not None:
                    store.add(row)
                rows[done["case"]] = done
                finished = len(rows) - before if len(rows) >= before else 0
                left = (time.monotonic() - began) / max(1, finished) * (total - len(rows))
                bar.step(len(rows), left, done)
                if was_interrupted():  # libraries may swallow it while they load; this case is finished
                    return True
        except KeyboardInterrupt:
            return True
        finally:
            source.close()
    return False


def _in_processes(work: Work, waiting: Sequence[Case], plan: _Settings) -> Any:
    from autoshard_ilp.explore.pool import rows_of

    return rows_of(list(grouped(waiting)), work.models, plan.workers, plan.case_time_limit)


def _here(work: Work, waiting: Sequence[Case]) -> Any:
    def rows() -> Iterator[Row]:
        planner = Planner(work.models, work.profiles)
        for case in grouped(waiting):
            yield planner(case)

    return rows()


class Bar:
    """Progress of a sweep: a bar with the time left on a terminal or in a notebook, or calls of a function."""

    def __init__(self, show: Any, total: int, done: int) -> None:
        self._told: Callable[[dict[str, Any]], None] = Progress(show if callable(show) else False).tell
        self._draw = not callable(show) and Progress(show)._draw
        self._total, self._done = total, done
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self._draw:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        return self

    def step(self, done: int, seconds_left: float, row: Row) -> None:
        """One more row."""
        from autoshard_ilp.units import format_seconds

        news = {"stage": "sweep", "done": done, "total": self._total, "seconds_left": seconds_left}
        self._told({**news, "case": row["case"], "status": row["status"]})
        if self._bar is not None:
            left = f"{format_seconds(seconds_left)} left" if done < self._total else "done"
            self._bar.update(self._task, completed=done, description=left)

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

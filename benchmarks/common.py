"""What the drivers share: one process per case, the machine's description, Markdown tables."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def in_own_process(
    driver: str, case: str, extra: Sequence[str] = (), timeout_seconds: float = 3600.0, platforms: str = "cpu"
) -> list[Row]:
    """Runs one case of a driver in a fresh interpreter, so that memory and warm caches are its own.

    Args:
        platforms: that JAX may use there; "": whatever is attached.

    Returns:
        The rows it wrote; a case that fails is a row with its error.
    """
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": platforms, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        command = [sys.executable, driver, "--case", case, "--answer", str(answer), *extra]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return [{"case": case, "status": f"no answer within {timeout_seconds:g} s"}]
        if done.returncode == 0 and answer.exists():
            return json.loads(answer.read_text())
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return [{"case": case, "status": f"failed: {last[:200]}"}]


def driver_parser(description: str | None) -> argparse.ArgumentParser:
    """What the drivers of whole cases have in common; ``--case`` and ``--answer`` are for :func:`in_own_process`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one tiny case, printed only")
    parser.add_argument("--only", default="", help="cases whose name contains one of these texts, with commas")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    return parser


@dataclass(frozen=True)
class Timed:
    """A benchmark of whole cases under the solver's time limit, each case in a process of its own.

    Attributes:
        name: of the driver and of its result file.
        description: the driver's docstring.
        cases: names of all of them; ``smoke``: of the tiny one.
        measure: (case, seconds for the solver) -> rows.
        report: (all rows, seconds for the solver) -> the result file.
        columns: of the table that it shows.
        succeeded: whether a row is that of a case which went well.
    """

    name: str
    description: str | None
    cases: Sequence[str]
    smoke: Sequence[str]
    measure: Callable[[str, float], list[Row]]
    report: Callable[[list[Row], float], str]
    columns: Mapping[str, str]
    succeeded: Callable[[Row], bool]

    def main(self) -> int:
        """The driver: every case, rows printed as they come, the result file written again after each."""
        parser = driver_parser(self.description)
        parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver")
        parser.add_argument("--output", type=Path, help="file to write; partial runs are only printed without it")
        options = parser.parse_args()
        limit = options.time_limit
        if options.case:
            answer(options.answer, self.measure(options.case, limit))
            return 0
        output = options.output or (None if options.smoke or options.only else result_file(self.name))
        driver, rows = str(Path(__file__).with_name(f"{self.name}.py")), []
        for case in self.smoke if options.smoke else matching(self.cases, options.only):
            fresh = in_own_process(driver, case, ["--time-limit", str(limit)])
            rows += fresh
            print(*table(fresh, self.columns).splitlines()[2:], sep="\n", flush=True)
            if output:
                output.write_text(self.report(rows, limit))
        if not output:
            print(self.report(rows, limit))
        return 0 if rows and all(map(self.succeeded, rows)) else 1


def matching(names: Iterable[str], only: str) -> list[str]:
    """The names that contain one of the texts in ``only`` (separated by commas; the empty one is in all)."""
    return [name for name in names if any(text in name for text in only.split(","))]


def answer(path: str, rows: list[Row]) -> None:
    """Hands the rows of a case to the process that asked for them."""
    Path(path).write_text(json.dumps(rows))


def peak_process_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def import_everything() -> float:
    """Imports what planning needs, so that no stage pays for it; seconds it took."""
    import importlib

    began = time.perf_counter()
    for name in ("jax", "keras", "keras_hub", "scipy.optimize", "networkx", "autoshard_ilp.api"):
        importlib.import_module(name)
    from autoshard_ilp._ortools import load_cp_model

    load_cp_model()
    return time.perf_counter() - began


def commit() -> str:
    """The commit of this checkout, short; "unknown" outside of one."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return found.stdout.strip() or "unknown"


def machine() -> str:
    """Date, processor and versions, as a Markdown list."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    packages = ("autoshard-ilp", "jax", "keras", "keras-hub", "ortools", "numpy")
    versions = ", ".join(f"{p} {_version(p)}" for p in packages)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return "\n".join(
        (
            f"- date: {datetime.date.today().isoformat()}, commit {commit()}",
            f"- machine: {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GB, load average {load}",
            f"- Python {platform.python_version()}, {versions}",
        )
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table; ``columns`` maps keys to format specifications. Missing values stay empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = []
        for key, how in columns.items():
            value = row.get(key)
            cells.append("" if value is None else format(value, how) if not isinstance(value, str) else value)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def result_file(name: str) -> Path:
    """``results/<name>-<today>.md``."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}-{datetime.date.today().isoformat()}.md"

"""Pairs and executes the notebooks: `python notebooks/build.py [NAME...]`.

The text sources (`*.py`, percent format) are what people edit and what diffs show. This writes each one's `.ipynb` with
the output of a real run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def sources() -> list[Path]:
    """The notebooks' text sources, in reading order."""
    return sorted(HERE.glob("[0-9]*.py"))


def _is_noise(output: Any) -> bool:
    """What native libraries write to stderr when they are loaded."""
    noise = ("WARNING: All log messages before absl", "I0000 ", "W0000 ")
    return (
        output.output_type == "stream"
        and output.name == "stderr"
        and all(line.startswith(noise) for line in output.text.splitlines() if line.strip())
    )


def executed(source: Path, timeout_s: int = 600) -> Any:
    """The notebook of a text source, run from top to bottom in a kernel of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import jupytext
    from nbclient import NotebookClient

    for name, value in {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}.items():
        os.environ.setdefault(name, value)
    book = jupytext.read(source)
    for number, cell in enumerate(book.cells):
        cell["id"] = f"{source.stem.partition('_')[0]}-{number}"  # the same in every run
    NotebookClient(book, timeout=timeout_s, kernel_name="python3", record_timing=False).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            cell["outputs"] = [x for x in cell["outputs"] if not _is_noise(x)]
    book.metadata.pop("widgets", None)
    book.metadata["language_info"] = {"name": "python"}
    return book


def main(names: list[str]) -> None:
    """Builds the notebooks whose file name contains one of ``names``, or all."""
    import nbformat

    for source in sources():
        if names and not any(name in source.name for name in names):
            continue
        began = time.perf_counter()
        book = executed(source)
        nbformat.write(book, source.with_suffix(".ipynb"))
        size = source.with_suffix(".ipynb").stat().st_size
        print(f"{source.name}: {time.perf_counter() - began:.1f} s, {size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

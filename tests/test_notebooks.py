"""Every notebook runs from top to bottom, and the stored output belongs to the text source beside it."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def test_the_stories_are_all_there():
    titles = [re.search(r"# # (.*)", p.read_text(encoding="utf-8"))[1] for p in SOURCES]
    assert titles == [
        "A first plan",
        "A model that does not fit",
        "Reading and questioning a plan",
        "NVLink against ICI",
        "Memory against communication",
        "A rule for your own primitive",
        "Your own hardware",
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_stored_output_is_of_this_source(source):
    book = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    text = jupytext.read(source)
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in text.cells]
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    texts = [o.get("text", "") + "".join(v for k, v in o.get("data", {}).items() if "image" not in k) for o in outputs]
    assert not [text for text in texts if "/tmp/" in text or "<script" in text]
    assert source.with_suffix(".ipynb").stat().st_size < 1_000_000


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_a_notebook_runs(source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kernel's own, while it starts and stops
        book = build.executed(source)
    stored = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    for cell, before in zip(book.cells, stored.cells, strict=True):
        assert [kinds(o) for o in cell.get("outputs", ())] == [kinds(o) for o in before.get("outputs", ())], cell.source


def kinds(output):
    """What kind of output it is, without the output itself: figures and seconds differ from run to run."""
    return output.output_type, *sorted(output.get("data", ()))

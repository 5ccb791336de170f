"""The site builds without a warning, fetches nothing, and every Python block of the documentation runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:```python|<!-- setup)\n(.*?)^(?:```|-->)$", re.M | re.S)
"""What is run: blocks of Python, and comments that set up what a page of fragments takes for granted."""

PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(p.read_text(encoding="utf-8"))]


def blocks(page: Path) -> str:
    """The Python of a page as one program, at the lines where it stands."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for found in BLOCK.finditer(text):
        first = text.count("\n", 0, found.start(1))
        code = found[1].split("\n")
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def test_pages_are_found():
    assert {"tutorial.md", "mathematics.md", "pins.md", "looking.md"} <= {p.name for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    if "checkpoint" in page.name:
        pytest.importorskip("orbax.checkpoint")
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page), str(page), "exec"), {"__name__": "__main__"})
    assert "Traceback" not in capsys.readouterr().err


def test_a_rule_in_20_lines():
    """In a process of its own, since it registers a rule."""
    code = blocks(ROOT / "CONTRIBUTING.md")
    assert 5 < sum(bool(line.strip()) for line in code.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_has_every_page(site):
    pages = {str(p.relative_to(site)) for p in site.rglob("*.html")}
    made = {str(p.relative_to(ROOT / "docs").with_suffix(".html")) for p in (ROOT / "docs").rglob("*.md")}
    books = {f"notebooks/{p.stem}.html" for p in (ROOT / "notebooks").glob("[0-9]*.py")}
    assert made | books | {"changelog.html", "contributing.html"} <= pages


def test_the_site_fetches_nothing(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)"', text)
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]*)"', text)
        assert not fetched, (page.name, fetched)


def test_the_reference_has_every_public_name(site):
    from autoshard_ilp import _LAZY

    text = "".join(p.read_text(encoding="utf-8") for p in (site / "reference").glob("*.html"))
    for module, name in _LAZY.values():
        assert f'id="{module}.{name}"' in text, f"{module}.{name}"
    assert ":class:" not in text and ":func:" not in text, "roles of Sphinx are rewritten"


def test_the_reference_has_every_command(site):
    import typer

    from autoshard_ilp.cli import app

    text = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    for name in typer.main.get_command(app).commands:
        assert f"Usage: autoshard {name}" in text

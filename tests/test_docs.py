"""The site builds without a warning, fetches nothing, and every Python block of the documentation runs."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from browser import BROWSER, over_the_edge

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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1400, 360])
def test_no_page_of_the_site_is_wider_than_its_window(site, width, tmp_path):
    pages = sorted(site.rglob("*.html"))
    found = zip(pages, over_the_edge(pages, [width], tmp_path), strict=True)
    wide = {str(page.relative_to(site)): more for page, (more, _) in found if more > 0}
    assert not wide


def test_links_of_the_site_lead_somewhere(site):
    """Also those that mkdocs does not check: of pages that are made, and of HTML inside Markdown."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    ids = {page: set(re.findall(r'\sid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in re.findall(r'\s(?:href|src)="([^"]+)"', text):
            path, _, anchor = unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in ids and anchor not in ids[target]):
                broken.append((str(page.relative_to(site)), link))
    assert len(pages) > 30 and not broken


def test_the_reference_has_every_public_name(site):
    from autoshard_ilp import _LAZY

    text = "".join(p.read_text(encoding="utf-8") for p in (site / "reference").glob("*.html"))
    for module, name in _LAZY.values():
        assert f'id="{module}.{name}"' in text, f"{module}.{name}"
    assert ":class:" not in text and ":func:" not in text, "roles of Sphinx are rewritten"


def test_the_reference_has_every_command(site):
    import typer

    from autoshard_ilp.cli.app import app

    text = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    for name in typer.main.get_command(app).commands:
        assert f"Usage: autoshard {name}" in text

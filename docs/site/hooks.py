"""Pages that are made when the site is built: the notebooks with their output, the changelog, the contribution guide.

Also the order of the pages: guides and reference pages are those that exist.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SCROLLS = "overflow-x:auto"
"""What is wider than the page moves inside its own box."""
REPOSITORY_FILES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_config(config: Any) -> Any:
    """Sets the navigation."""
    docs = Path(config.docs_dir)

    def pages(folder: str) -> list[str]:
        return [f"{folder}/{p.name}" for p in sorted((docs / folder).glob("*.md"))]

    explanation = ["mathematics.md", "hardware.md", "fidelity.md", "architecture.md"]
    listed = {"index.md", "tutorial.md", "benchmarks.md", *explanation}
    others = [p.name for p in sorted(docs.glob("*.md")) if p.name not in listed]
    config.nav = [
        {"Home": "index.md"},
        {"Tutorial": ["tutorial.md", *(f"notebooks/{p.stem}.md" for p in notebooks())]},
        {"How-to guides": [*pages("guides"), *others]},
        {"Explanation": [p for p in explanation if (docs / p).exists()]},
        {"Reference": [*pages("reference"), "reference/other_names.md"]},
        {"Benchmarks": ["benchmarks.md"] if (docs / "benchmarks.md").exists() else []},
        {"Project": list(REPOSITORY_FILES)},
    ]
    config.nav = [entry for entry in config.nav if next(iter(entry.values()))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made here."""
    for book in notebooks():
        page = notebook_page(json.loads(book.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{book.stem}.md", content=page))
    files.append(File.generated(config, "reference/other_names.md", content=other_names(Path(config.docs_dir))))
    for name, source in REPOSITORY_FILES.items():
        files.append(File.generated(config, name, content=outside_links((ROOT / source).read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the help of the commands; links to files of the repository that are no pages become plain text."""
    if page.file.src_uri == "reference/command_line.md":
        markdown = markdown.replace("COMMANDS", commands())
    return outside_links(markdown)


def commands() -> str:
    """``autoshard COMMAND --help`` of every command."""
    import click
    import typer

    from autoshard_ilp.cli.app import app

    parts = []
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        context = click.Context(command, info_name=f"autoshard {name}", terminal_width=110)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def other_names(docs: Path) -> str:
    """A page of the public names that no other page of the reference describes."""
    from autoshard_ilp import _LAZY

    described = "".join(p.read_text(encoding="utf-8") for p in (docs / "reference").glob("*.md"))
    names = [f"{module}.{name}" for module, name in _LAZY.values()]
    missing = [name for name in dict.fromkeys(names) if f"::: {name}\n" not in described]
    return "# Other names\n\n" + "\n\n".join(f"::: {name}" for name in missing) + "\n"


def outside_links(markdown: str) -> str:
    """Replaces links that lead out of ``docs/`` by what they say."""
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    outside = r"(?<!!)\[([^\]]+)\]\((?:\.\./)*(?:(?:src|cost_models|benchmarks|tests)/[^)]*|LICENSE)\)"
    return re.sub(outside, r"\1", markdown)


def notebooks() -> list[Path]:
    """Executed notebooks, in reading order."""
    return sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def notebook_page(book: dict[str, Any]) -> str:
    """A notebook as Markdown, its images and HTML inline."""
    parts: list[str] = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _text("".join(output["text"])) if output["name"] == "stdout" else ""
    data = output.get("data", {})
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        return f'<img src="data:image/png;base64,{png}" alt="figure">'
    if "text/html" in data:
        return f'<div style="{SCROLLS}">' + re.sub(r"\n\s*\n", "\n", "".join(data["text/html"])) + "</div>"
    return _text("".join(data.get("text/plain", "")))


def _text(text: str) -> str:
    if not text.strip():
        return ""
    shown = html.escape(text.strip("\n")).replace("\n\n", "\n&#8203;\n")  # an empty line would end the block
    return f'<pre class="output" style="{SCROLLS}">{shown}</pre>'

"""docs/benchmarks.md is made from whatever results there are: pictures, tables, and how to make them again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import growth  # noqa: E402
import make_docs  # noqa: E402
import pictures  # noqa: E402

ABOUT = "- date: 2026-01-02, commit abc\n- machine: 2 cores\n"
FILES = {
    "plan_quality-2026-01-02": f"""# Plan quality

{ABOUT}
Words.

## mlp / h100

global batch 8

| plan | status | x optimum | sent MB |
|---|---|---|---|
| optimize | optimal | 1.00 | 1.0 |
| fsdp | optimal | 2.00 | 1.0 |
| zero1 | does not fit, needs 3 GB | | |

## cnn / h100

| plan | status | x optimum | sent MB |
|---|---|---|---|
| optimize | optimal | 1.00 | 1.0 |
| fsdp | optimal | 8.00 | 1.0 |
""",
    "plan_quality-2025-01-02": "# Plan quality\n\nsuperseded\n",
    "hub_layout_maps-2026-01-02": f"""# Layout maps

{ABOUT}
| model | program | status | sent MB | peak GB |
|---|---|---|---|---|
| hub:tiny | shipped | compiled | 1,200 | 3.00 |
| hub:tiny | plan | compiled | 300 | 1.50 |
""",
    "fidelity": f"""# Fidelity

{ABOUT}
| case | status | bytes ratio | peak ratio |
|---|---|---|---|
| mlp / h100:8 / train / loose | optimal | 0.950 | 1.10 |
| mlp / tpu-v5e:2x4 / train / loose | optimal | 1.050 | 0.90 |
""",
    "measured_steps-2026-01-02": f"""# Measured

{ABOUT}
| case | predicted ms | measured ms |
|---|---|---|
| mlp | 1.0 | 1.2 |
""",
    "measured_single_device-2026-01-02": f"""# Measured

{ABOUT}
| case | predicted ms | measured ms |
|---|---|---|
| mlp | 1.0 | 1.2 |
""",
    "plan_speed-2026-01-02": f"""# Speed

{ABOUT}
| case | mesh | trace s | solve s | status | gap |
|---|---|---|---|---|---|
| mlp | 2x4 | 0.5 | 1.5 | optimal | 0.00% |
""",
    "explore_speed-2026-01-02": f"""# Questions

{ABOUT}
| case | question | wall s | answer |
|---|---|---|---|
| mlp | optimize() | 0.5 | optimal |
| mlp | search_mesh(devices=8) | 12.0 | 4 meshes |
""",
    "another_kind": f"""# Another kind

{ABOUT}
| what | seconds |
|---|---|
| this | 3.0 |
""",
    "iopddl": f"""# IOPDDL

{ABOUT}
| instance | cost | cost / best |
|---|---|---|
| A | 10 | 1.0003 |
""",
}


def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.md").write_text(text)
    rows = [
        {"grows": kind, "size": size, "trace s": 0.5, "solve s": 1.0, "status": "optimal", "gap": 0.0}
        for kind, size in [("layers", "2"), ("layers", "4"), ("axes", "1")]
    ]
    (folder / "growth-2026-01-02.md").write_text(growth.report(rows, 60.0))
    return folder


def test_every_kind_of_result_has_a_picture_and_its_command(tmp_path):
    page = make_docs.make(results(tmp_path), tmp_path / "docs").read_text()
    parts = page.split("\n## ")[1:]
    assert len(parts) == len(make_docs.FAMILIES) + 1
    assert parts[-1].startswith("another kind") and "| this | 3.0 |" in parts[-1]
    for part, family in zip(parts[:-1], make_docs.FAMILIES, strict=True):
        assert part.startswith(family.title) and "](benchmarks/" in part and "Reproduce with" in part, family.title
        assert all(command in part for command in family.commands)
        assert ("2026-01-02" in part and "abc" in part) or family.stem == "growth"
    drawn = {p.name for p in (tmp_path / "docs" / "benchmarks").iterdir()}
    assert drawn == {f"{family.stem}.svg" for family in make_docs.FAMILIES}
    assert "| fsdp | 4.00 | 2 |" in page, "the geometric mean of 2 and 8"
    assert "| hub:tiny | 4.0 | 2.0 |  |  |" in page, "times what the plan sends and holds"
    assert "needs 3 GB" in page and "superseded" not in page.split("## Fidelity")[0]


def test_pictures_are_the_same_in_every_run(tmp_path):
    folder = results(tmp_path)
    make_docs.make(folder, tmp_path / "a")
    make_docs.make(folder, tmp_path / "b")
    for path in (tmp_path / "a" / "benchmarks").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "benchmarks" / path.name).read_bytes()


def test_without_results_the_page_says_how_to_make_them(tmp_path):
    (tmp_path / "none").mkdir()
    page = make_docs.make(tmp_path / "none", tmp_path / "docs").read_text()
    assert page.count("No result is recorded yet") == len(make_docs.FAMILIES)
    assert not list((tmp_path / "docs" / "benchmarks").iterdir())


def test_the_stored_results_can_be_drawn(tmp_path):
    page = make_docs.make(ROOT / "benchmarks" / "results", tmp_path).read_text()
    newest = {make_docs.DATE.sub("", p.stem): p.name for p in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}
    assert all(f"`benchmarks/results/{name}`" in page for name in newest.values())
    assert "](benchmarks/plan_speed.svg)" in page


def test_every_driver_named_exists():
    for family in make_docs.FAMILIES:
        for command in family.commands:
            assert (ROOT / command.split()[1]).exists() or family.stem in ("fidelity", "iopddl"), command


@pytest.mark.parametrize(
    ("cell", "value"), [("1.50", 1.5), ("12.5%", 0.125), ("", None), ("optimal", None), ("1,000", 1000.0), ("-2", -2.0)]
)
def test_numbers_of_cells(cell, value):
    assert pictures.number(cell) == (pytest.approx(value) if value is not None else None)

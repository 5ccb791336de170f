"""Writes docs/benchmarks.md and its pictures from the newest file of every benchmark in results/.

python benchmarks/make_docs.py

Nothing is measured here; every section names the command that made its figures.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pictures
from pictures import Table

HERE = Path(__file__).parent
DATE = re.compile(r"-?\d{4}-\d\d-\d\d$")
MAX_ROWS = 60
"""Rows of one table that the page shows; the result file has them all."""

Picture = tuple[str, object]  # name, figure


@dataclass(frozen=True)
class Family:
    """Results that belong together: files named ``<stem>*.md``, what they answer, and how to make them again."""

    stem: str
    title: str
    question: str
    commands: tuple[str, ...]
    draw: Callable[[str, Sequence[Table]], Iterator[Picture]]
    words: Callable[[Sequence[Table]], str] = lambda tables: ""


@dataclass(frozen=True)
class Result:
    """One result file: its title, the lines that say when and where, its prose, and its tables."""

    path: Path
    about: tuple[str, ...]
    prose: str
    tables: tuple[Table, ...]

    @property
    def name(self) -> str:
        """File name without the date."""
        return DATE.sub("", self.path.stem)


def read(path: Path) -> Result:
    """Reads a Markdown file of a driver."""
    about, prose, tables = [], [], []
    heading = note = ""
    rows: list[list[str]] = []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            continue
        if rows:
            header, _, *body = rows
            tables.append(Table(heading, note, tuple(dict(zip(header, r, strict=False)) for r in body), tuple(header)))
            rows, note = [], ""
        if line.startswith("## "):
            heading, note = line[3:], ""
        elif line.startswith("- ") and not tables:
            about.append(line[2:])
        elif line.strip() and not line.startswith("# "):
            if heading:
                note = f"{note} {line}".strip()
            else:
                prose.append(line)
    return Result(path, tuple(about), "\n".join(prose), tuple(tables))


def newest(folder: Path, stem: str) -> list[Result]:
    """The newest file of every kind that a family has (one per target, say)."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{stem}*.md"), key=lambda p: (p.stem[-10:], p.stem)):
        found[DATE.sub("", path.stem)] = path
    return [read(found[name]) for name in sorted(found)]


# -- words -------------------------------------------------------------------------------------------------------------


def geometric_means(tables: Sequence[Table]) -> str:
    """How much slower every kind of plan is than the optimum, over the cases in which it fits."""
    factors: dict[str, list[float]] = {}
    for table in tables:
        for row in table.rows:
            factor = pictures.number(row.get("x optimum", ""))
            if factor:
                factors.setdefault(row["plan"], []).append(factor)
    lines = [
        f"| {plan} | {math.exp(sum(map(math.log, f)) / len(f)):.2f} | {len(f)} |"
        for plan, f in factors.items()
        if plan != "optimize"
    ]
    if not lines:
        return ""
    return "\n".join(
        ["| plan | predicted time over the optimum, geometric mean | cases it fits |", "|---|---|---|", *lines]
    )


def times_of_layout_maps(tables: Sequence[Table]) -> str:
    """How much more KerasHub's own maps send and hold than the plan, by model."""
    lines = []
    for table in tables:
        models: dict[str, dict[str, Mapping[str, str]]] = {}
        for row in table.rows:
            if "program" in row:
                models.setdefault(row["model"], {})[row["program"]] = row
        for model, programs in models.items():
            cells = [_times(programs, name, column) for name in THEIRS for column in COMPARED]
            if any(cells):
                lines.append(f"| {model} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = [f"{name}: {what}" for name in THEIRS for what in COMPARED.values()]
    rule = "|---" * (len(head) + 1) + "|"
    return "\n".join(["Times what the plan sends and holds:", "", f"| model | {' | '.join(head)} |", rule, *lines])


THEIRS = ("shipped", "shipped + plan")
COMPARED = {"sent MB": "bytes", "peak GB": "peak"}


def _times(programs: Mapping[str, Mapping[str, str]], name: str, column: str) -> str:
    ours, theirs = (pictures.number(programs.get(n, {}).get(column, "")) for n in ("plan", name))
    return f"{theirs / ours:.1f}" if ours and theirs else ""


# -- the page ----------------------------------------------------------------------------------------------------------

FAMILIES = (
    Family(
        "plan_quality",
        "Plan quality",
        "How does the optimum compare with the strategies people use by hand, as predicted and as compiled?",
        (
            "python benchmarks/plan_quality.py",
            "python benchmarks/plan_quality.py --compile h100:8",
            "python benchmarks/plan_quality.py --compile tpu-v5e:2x4",
            "python benchmarks/plan_quality.py --compile tpu-v5e:4x4",
            "python benchmarks/plan_quality.py --compile tpu-v5p:2x2x2",
        ),
        pictures.quality,
        geometric_means,
    ),
    Family(
        "hub_layout_maps",
        "KerasHub's layout maps",
        "What does a training step send under the layout map that KerasHub ships for a model, and under a plan?",
        ("python benchmarks/hub_layout_maps.py --compile h100:8",),
        pictures.layout_maps,
        times_of_layout_maps,
    ),
    Family(
        "fidelity",
        "Fidelity",
        "Does the compiler send and hold what the plan predicts? Ratios are compiled over predicted.",
        ("python benchmarks/fidelity.py",),
        pictures.fidelity,
    ),
    Family(
        "measured_steps",
        "Measured steps",
        "Does a step take as long as predicted, on a machine that was calibrated?",
        ("python benchmarks/measured_steps.py",),
        pictures.measured,
    ),
    Family(
        "measured_single_device",
        "Measured steps on one GPU",
        "Is the compute side of a profile right: does a step on one GPU take as long as predicted?",
        ("python benchmarks/measured_single_device.py",),
        pictures.measured,
    ),
    Family(
        "plan_speed",
        "Speed per stage",
        "How long does planning take, and where do the seconds go?",
        ("python benchmarks/plan_speed.py",),
        pictures.speed,
    ),
    Family(
        "explore_speed",
        "Questions about a plan",
        "How long do what_if, explain, compare, frontiers and mesh searches take?",
        ("python benchmarks/explore_speed.py",),
        pictures.questions,
    ),
    Family(
        "growth",
        "Growth",
        "How do the seconds grow with layers, devices and mesh axes?",
        ("python benchmarks/growth.py",),
        pictures.growth,
    ),
    Family(
        "iopddl",
        "IOPDDL",
        "The public instances of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism.",
        ("python benchmarks/iopddl.py INSTANCE.json.gz --time-limit SECONDS --output solution.json",),
        pictures.iopddl,
    ),
)


def section(family: Family, results: Sequence[Result], folder: Path) -> str:
    """The Markdown of a family; its pictures are written into ``folder``."""
    commands = "\n".join(family.commands)
    parts = [f"## {family.title}", family.question]
    if not results:
        return "\n\n".join([*parts, f"No result is recorded yet. To make one:\n\n```bash\n{commands}\n```"])
    for result in results:
        if len(results) > 1:
            parts.append(f"### {result.name.replace('_', ' ')}")
        for name, figure in family.draw(result.name, result.tables):
            pictures.write(figure, folder / f"{name}.svg")
            parts.append(f"![{name.replace('_', ' ')}](benchmarks/{name}.svg)")
        if words := family.words(result.tables):
            parts.append(words)
        parts.append(result.prose)
        parts += [_table(t) for t in result.tables]
        source = f"benchmarks/results/{result.path.name}"
        parts.append(f"From `{source}`: {'; '.join(result.about)}.")
    parts.append(f"Reproduce with\n\n```bash\n{commands}\npython benchmarks/make_docs.py\n```")
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    """A table, its long cells cut, folded away where it is long."""
    columns = [c for c in table.columns if any(row.get(c) for row in table.rows)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in table.rows[:MAX_ROWS]:
        lines.append("| " + " | ".join(_cut(row.get(c, "")) for c in columns) + " |")
    more = len(table.rows) - MAX_ROWS
    text = "\n".join(lines) + (f"\n\n{more} more rows are in the result file." if more > 0 else "")
    title = ", ".join(x for x in (table.heading, table.note) if x)
    if len(table.rows) <= 12 and not table.heading:
        return text
    return f"<details markdown><summary>{title or 'Figures'}</summary>\n\n{text}\n\n</details>"


def _cut(cell: str) -> str:
    return cell if len(cell) <= 90 else cell[:87] + "..."


def make(results: Path, docs: Path) -> Path:
    """Writes ``benchmarks.md`` and ``benchmarks/*.svg`` into a folder."""
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    head = (
        "# Benchmarks\n\nMade by `python benchmarks/make_docs.py` from the files in `benchmarks/results/`, the newest "
        "of every kind. No accelerator is needed to run them again; wall-clock seconds depend on the machine and on "
        "what else it was doing, which every section names."
    )
    body = [section(family, newest(results, family.stem), folder) for family in FAMILIES]
    known = tuple(family.stem for family in FAMILIES)
    for stem in sorted({DATE.sub("", p.stem) for p in results.glob("*.md")}):
        if not stem.startswith(known):
            driver = re.split(r"[-.]", stem)[0]
            other = Family(stem, stem.replace("_", " "), "", (f"python benchmarks/{driver}.py",), pictures.nothing)
            body.append(section(other, newest(results, stem), folder))
    page = docs / "benchmarks.md"
    page.write_text("\n\n".join([head, *body]) + "\n", encoding="utf-8")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the result files")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder to write to")
    options = parser.parse_args()
    print(f"written: {make(options.results, options.docs)}")


if __name__ == "__main__":
    main()

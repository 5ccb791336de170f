"""Data flows one way: a module imports what comes before it, also inside functions and for types alone."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "autoshard_ilp"
FACES = {"", "plan"}
"""The package, and a plan, whose methods ask what is made of plans: they import it when asked."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autoshard_ilp":
            source = (node.module or "").removeprefix("autoshard_ilp").lstrip(".")
            for alias in node.names:
                inner = f"{source}.{alias.name}".lstrip(".")
                yield inner if inner in modules else source


def imports() -> nx.DiGraph:
    files = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = nx.DiGraph()
    for name, path in files.items():
        graph.add_edges_from((name, other) for other in imported(path, set(files)) if other != name)
    return graph


def test_modules_import_only_what_comes_before_them() -> None:
    graph = imports()
    assert {"api", "planning", "program.solve", "costs.build"} <= set(graph)  # or there would be nothing to find
    graph.remove_nodes_from(FACES)
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def found(name: str, package: str) -> bool:
    """Whether ``module.thing``, ``module.Class.method`` or a field of a dataclass is there."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join([package, *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, getattr(value, "__dataclass_fields__", {}).get(part))
        return value is not None
    return False


def test_the_program_on_one_page_names_what_is_there() -> None:
    page = (PACKAGE / "program" / "README.md").read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`((?:\w+\.)+\w+)`", page) if not name.endswith(".py")}
    assert len(names) > 50
    packages = ("autoshard_ilp.program", "autoshard_ilp")
    assert sorted(name for name in names if not any(found(name, package) for package in packages)) == []

"""Summary, pictures of characters and the notebook page: same content, any width, any locale."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp import names, report
from autoshard_ilp.course import Course, Segment
from autoshard_ilp.display import pictures, records
from autoshard_ilp.display.summary import text
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.placement import Placement
from autoshard_ilp.plan import Leaf, Plan
from autoshard_ilp.plots import svg
from autoshard_ilp.plots.page import html
from autoshard_ilp.report import Cost, Memory, PlannedCollective
from autoshard_ilp.sharding import divisible_layouts

NAMES = ("data", "model")
SIZES = (2, 4)


def segments() -> tuple[Segment, ...]:
    rows = [
        ("block_0", "forward", "compute", "", 2e-3),
        ("block_0", "forward", "all-gather", "model", 1e-3),
        ("block_1", "forward", "compute", "", 2e-3),
        ("block_1", "backward", "compute", "", 3e-3),
        ("block_0", "backward", "reduce-scatter", "data+model", 1e-3),
        ("", "update", "compute", "", 1e-3),
    ]
    found, now = [], 0.0
    for layer, phase, kind, axes, seconds in rows:
        found.append(Segment(layer, phase, kind, axes, now, seconds))
        now += seconds
    return tuple(found)


def some_plan(budget: int | None = 120_000_000, prefix: str = "") -> Plan:
    """A plan of known figures, made by hand: nothing is traced or solved."""
    kernel = [(f"{prefix}block_{i}/kernel", "parameter", (512, 1024), (1, 0)) for i in range(2)]
    slots = [(f"adam/{p.replace('/', '_')}_momentum", "optimizer", s, lay) for p, _, s, lay in kernel]
    rest = [("inputs/x", "input", (32, 512), (0, -1)), (f"{prefix}head/bias", "parameter", (4096,), (-1, -1))]
    leaves = tuple(Leaf(path, role, shape, "float32", lay) for path, role, shape, lay in (*kernel, *slots, *rest))
    course = Course(
        segments(),
        (0.0, 3e-3, 6e-3),
        {"parameters": (40_000_000,) * 3, "activations": (10_000_000, 60_000_000, 20_000_000)},
    )
    collectives = (
        PlannedCollective("all-gather", 1e6, ("model",), 1e-3, f"{prefix}block_0/kernel", "net/block_0/dot", "", 1.0),
        PlannedCollective("reduce-scatter", 2e6, NAMES, 1e-3, "float32[512]", "net/block_0/dot_general", "", 1.0),
    )
    return Plan(
        mesh=MeshSpec(NAMES, SIZES),
        hardware="toy",
        mode="train",
        batch_size=32,
        objective="step_time",
        arguments=leaves,
        results=(),
        cost=Cost(10e-3, 8e-3, 2e-3, {"model": 1e-3, "data+model": 1e-3}, {"all-gather": 1e-3, "reduce-scatter": 1e-3}),
        collectives=collectives,
        memory=Memory(
            100_000_000,
            budget,
            parameters=40_000_000,
            activations=60_000_000,
            contributors=(("net/block_0", 30_000_000), ("net/block_1", 30_000_000), ("block_0/kernel", 20_000_000)),
        ),
        status="optimal",
        lower_bound=10e-3,
        gap=0.0,
        timings={"solve": 0.5},
        placement=Placement((), (), ""),
        course=course,
    )


# -- characters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "sizes", "drawn", "in_ascii"),
    [
        ((-1, -1), (2, 4), "████ ████", "#### ####"),
        ((0, 1), (2, 4), "██░░ █░░░", "##.. #..."),
        ((1, 1), (2, 4), "████ ▌░░░", "#### :..."),
        ((0, 0), (8, 8), "▏░░░ ████", ":... ####"),
    ],
)
def test_a_bar_per_dimension(layout, sizes, drawn, in_ascii):
    assert pictures.held((64, 64), layout, sizes) == drawn
    assert pictures.held((64, 64), layout, sizes, only_ascii=True) == in_ascii
    assert pictures.held((), layout[:0], ()) == ""


def test_the_curve_shows_peak_and_budget():
    lines = pictures.memory_curve(some_plan().course, 120_000_000, 40, height=6)
    assert lines[0].startswith("120.0 MB │───") and lines[5].startswith("       0 │███")
    columns = list(zip(*(line[10:].ljust(30) for line in lines[:6]), strict=True))
    heights = [sum(c not in " ─" for c in column) for column in columns]
    assert heights == [3] * 9 + [5] * 9 + [3] * 12, "50, 100 and 60 MB of 120 on six lines"
    assert "forward" in lines[6] and "backward" in lines[6]
    loose = pictures.memory_curve(some_plan().course, 10**9, 40)
    assert loose[0].startswith("100.0 MB │") and "─" not in loose[0]
    assert pictures.memory_curve(Course(), 10**9, 40) == []


def test_the_timeline_says_what_runs_when():
    lines = pictures.timeline(some_plan().course, 15 + 20)
    assert lines[0] == "      compute │████  ██████████  ██"
    assert lines[1] == "communication │    gg          ss  "
    assert lines[2].startswith("      10.0 ms └forward") and "update" not in lines[2]
    assert "g all-gather, s reduce-scatter" in " ".join(lines[3:])
    assert all(line.isascii() for line in pictures.timeline(some_plan().course, 60, only_ascii=True))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("only_ascii", [False, True])
def test_a_summary_of_any_width(width, only_ascii):
    shown = text(some_plan(prefix="a_rather_long_name_of_a_model/"), width, only_ascii=only_ascii)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.isascii() or not only_ascii
    flat = " ".join(shown.split())
    for part in ("block_*", "120.0 MB", "100.0 MB", "all-gather", "optimal", "10.0 ms", "forward", "activations"):
        assert part in flat
    bar = "#" if only_ascii else "█"
    assert f"{bar}{'.' if only_ascii else '░'}" in shown, "the layouts have pictures"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_any_layout_has_pictures(data):
    sizes = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.sampled_from([8, 24, 64]), min_size=1, max_size=4)))
    layout = data.draw(st.sampled_from(divisible_layouts(shape, sizes)))
    drawn = pictures.held(shape, layout, sizes)
    assert len(drawn) == 5 * len(shape) - 1
    assert pictures.held(shape, layout, sizes, only_ascii=True).isascii()
    root = ElementTree.fromstring(svg.tensor(shape, layout, [f"a{i}" for i in range(len(sizes))], sizes))
    filled = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") != "none"]
    assert sum(r.get("fill-opacity") is None for r in filled) == 1, "one part is the first device's"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_summary_can_be_printed_in_any_locale(encoding):
    code = r"from test_pictures import some_plan; print(some_plan(prefix='caf\u00e9_\u5c64/').summary(60))"
    path = os.pathsep.join(p for p in (os.path.dirname(__file__), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode(encoding)
    assert ("caf\u00e9" in shown) == (encoding != "ascii") and ("\u2588" in shown) == (encoding == "utf-8")


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that every element is closed, and keeps what is shown and what is referred to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_the_page_has_the_content_of_the_summary():
    plan = some_plan()
    page = Page(html(plan))
    for part in ("block_*", "120.0 MB", "100.0 MB", "all-gather", "optimal", "10.0 ms", "forward", "solve 0.50 s"):
        assert part in page.text
    assert {"svg", "table", "polygon", "rect"} <= page.tags


def test_the_page_needs_nothing_from_elsewhere():
    page = html(some_plan())
    checked = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & checked.tags
    assert not [name for name, _ in checked.attributes if name in ("src", "href", "onclick")]
    assert "url(" not in page and "@import" not in page
    links = set(re.findall(r"https?://[^\"' ]+", page))
    assert links == {"http://www.w3.org/2000/svg"}, "a namespace, never fetched"


def test_the_page_is_readable_in_light_and_dark():
    """Ground and text come from one source each time: a theme's variables, or the reader's preference."""
    page = html(some_plan())
    sources = {"ground": ("layout-color1", "background", "bg", "g")}
    sources["text"] = ("content-font-color1", "foreground", "fg", "t")
    for name, (jupyter, code, material, own) in sources.items():
        wanted = f"var(--vscode-editor-{code},var(--md-default-{material}-color,var(--ap-{own})))"
        assert f"--ap-{name}:var(--jp-{jupyter},{wanted})" in page
    assert "prefers-color-scheme:dark" in page and page.count("--ap-g:") == page.count("--ap-t:") == 2


def test_names_cannot_break_the_page():
    page = Page(html(some_plan(prefix="<script>alert(1)</script>&\"'/")))
    assert "script" not in page.tags and "<script>" in page.text


def test_a_plan_without_a_course_shows_the_rest():
    from dataclasses import replace

    bare = replace(some_plan(), course=Course())
    assert "Timeline" not in Page(html(bare)).text and "Layouts" in text(bare)


def test_drawings_stay_small():
    many = tuple(Segment(f"l_{i % 50}", "forward", "compute", "", i * 1e-6, 1e-6) for i in range(20_000))
    assert len(svg.timeline(Course(many))) < 200_000


# -- records -----------------------------------------------------------------------------------------------------------


def test_repeated_layers_are_one_row():
    found = records.layouts(some_plan())
    assert [(r["path"], r["count"], r["slots"]) for r in found.rows] == [
        ("block_*/kernel", 2, 1),
        ("inputs/x", 1, 0),
        ("head/bias", 1, 0),
    ]
    rows = records.layer_rows(some_plan())
    assert [name for name, *_ in rows] == ["block_*", "other"]
    assert rows[0][1:] == (pytest.approx(7e-3), pytest.approx(2e-3))
    assert records.layer_rows(some_plan(), limit=1)[0][0] == "2 more"
    assert records.contributors(some_plan())[0] == ("net/block_* (x2)", 60_000_000)


def test_only_numbers_that_differ_become_stars():
    assert names.common(["llama3/layer_0/x", "llama3/layer_11/x"]) == "llama3/layer_*/x"
    assert names.common(["conv2d_1/kernel"]) == "conv2d_1/kernel"
    assert names.common(["a_0/b_0", "a_1/b_0", "a_1/b_1"]) == "a_*/b_*"


def test_every_kind_of_tensor_at_the_peak_is_named():
    """Many layers of one kind leave the others their place."""
    layers = {f"net2/block_{i}/dense": 1000 - i for i in range(40)}
    found = report._largest({**layers, "embedding": 30, **{f"input_{chr(97 + i)}": i for i in range(25)}})
    kinds = report.alike(found)
    assert kinds[:2] == [("net2/block_*/dense (x40)", sum(layers.values())), ("embedding", 30)]
    assert len(kinds) == report.MAX_CONTRIBUTORS and len(found) == 40 + len(kinds) - 1


def test_a_path_is_found_by_its_end_or_told_apart():
    plan = some_plan()
    assert records.find_leaf(plan, "inputs/x").shape == (32, 512)
    assert records.find_leaf(plan, "bias").path == "head/bias"
    with pytest.raises(InputShapeError, match=r"one variable.*'kernel'.*'block_0/kernel', 'block_1/kernel'"):
        records.find_leaf(plan, "kernel")
    with pytest.raises(InputShapeError, match=r"'block_0/kernal'.*Did you mean 'block_0/kernel'"):
        records.find_leaf(plan, "block_0/kernal")
    assert isinstance(InputShapeError("x"), autoshard.AutoshardError)

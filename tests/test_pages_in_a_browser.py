"""Pages as a browser lays them out: nothing runs over the edge, however narrow the window is."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from autoshard_ilp.explore.results import COLUMNS, clean
from autoshard_ilp.explore.sweep_report import page as report_page
from autoshard_ilp.explore.sweep_result import Sweep
from autoshard_ilp.plots.page import html as plan_page
from test_pictures import some_plan

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1400, 800, 500, 360)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

FRAMES = """<!doctype html><meta charset=utf-8><body>%s<pre id=found></pre><script>
onload = () => {
  const cut = frame => {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const clips = e => getComputedStyle(e).overflowX !== "visible";
    const scrolls = e => e && e !== page.body && (clips(e) || scrolls(e.parentElement));
    const over = [...page.querySelectorAll("body *")].filter(
      e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement));
    return [page.documentElement.scrollWidth - width, over.map(e => e.tagName + " " + e.textContent.slice(0, 40))];
  };
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(cut));
};
</script>"""


def over_the_edge(page: str, folder) -> dict[int, tuple[int, list[str]]]:
    """Width of the window -> pixels that the page is wider, and the elements that are to blame."""
    frame = '<iframe style="border:0;width:{}px;height:900px" srcdoc="{}"></iframe>'
    frames = "".join(frame.format(width, html.escape(page)) for width in WIDTHS)
    (folder / "frames.html").write_text(FRAMES % frames, encoding="utf-8")
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *quiet, "--dump-dom", (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre id=.?found.?>(.*?)</pre>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    measured = json.loads(html.unescape(found[1]))
    return dict(zip(WIDTHS, map(tuple, measured), strict=True))


NOTHING: dict[int, tuple[int, list[str]]] = {width: (0, []) for width in WIDTHS}


def some_sweep() -> Sweep:
    """Cases that ended well, without a plan, and in errors of long words."""
    inputs = {"mode": "train", "strategy": "optimal", "batch_size": 512, "format": 1}
    rows = []
    for number, mesh in enumerate(("data=2,model=2", "pod=2,data=2,model=2", "data=16,model=16")):
        case = {**inputs, "case": str(number), "model": "a_package.of_long_names:a_factory_of_models", "mesh": mesh}
        rows.append({**case, "status": "optimal", "total_s": 1e-3, "gap": 0.0, "peak_bytes": 10**9, "hardware": "h100"})
        rows.append({**case, "status": "infeasible", "minimum_budget_bytes": 10**10, "hardware": "tpu-v5e"})
        error = {"error_type": "RuntimeError", "error": "no_such_file_" * 20}
        rows.append({**case, "status": "failed", "hardware": "l4", **error})
    return Sweep(tuple(clean(dict.fromkeys(COLUMNS) | row) for row in rows), len(rows))


def test_what_runs_over_the_edge_is_found(tmp_path):
    found = over_the_edge("<body style='margin:0'><div style='width:600px'>wide</div></body>", tmp_path)
    assert found == {1400: (0, []), 800: (0, []), 500: (100, ["DIV wide"]), 360: (240, ["DIV wide"])}


def test_the_page_of_a_plan(tmp_path):
    long_names = plan_page(some_plan(prefix="a_rather_long_name_of_a_model/and_of_a_block_inside/"))
    assert over_the_edge(f"<!doctype html>{long_names}", tmp_path) == NOTHING


def test_the_report_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    assert over_the_edge(report_page(some_sweep()), tmp_path) == NOTHING

"""Pages as a browser lays them out: nothing runs over the edge, however narrow the window is."""

from __future__ import annotations

import pytest

from autoshard_ilp.explore.results import COLUMNS, clean
from autoshard_ilp.explore.sweep_report import page as report_page
from autoshard_ilp.explore.sweep_result import Sweep
from autoshard_ilp.plots.page import html as plan_page
from browser import BROWSER, over_the_edge
from test_pictures import some_plan

WIDTHS = (1400, 800, 500, 360)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

NOTHING: list[tuple[int, list[str]]] = [(0, [])] * len(WIDTHS)


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
    found = over_the_edge(["<body style='margin:0'><div style='width:600px'>wide</div></body>"], WIDTHS, tmp_path)
    assert found == [(0, []), (0, []), (100, ["DIV wide"]), (240, ["DIV wide"])]


def test_the_page_of_a_plan(tmp_path):
    long_names = plan_page(some_plan(prefix="a_rather_long_name_of_a_model/and_of_a_block_inside/"))
    assert over_the_edge([f"<!doctype html>{long_names}"], WIDTHS, tmp_path) == NOTHING


def test_the_report_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    assert over_the_edge([report_page(some_sweep())], WIDTHS, tmp_path) == NOTHING

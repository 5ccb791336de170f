"""The benchmark drivers still run: one tiny case each, in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def table_rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    return [dict(zip(header, (c.strip() for c in line.strip("|").split("|")), strict=True)) for line in lines[1:]]


def smoke(driver, folder):
    """What a driver prints of its smallest case, run from ``folder``, where it must leave nothing."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / driver), "--smoke"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    return done.stdout


@pytest.mark.parametrize("driver", ["plan_speed.py", "plan_quality.py"])
def test_smoke(driver, tmp_path):
    printed = smoke(driver, tmp_path)
    rows = table_rows(printed[printed.index("# Plan") :])
    if driver == "plan_speed.py":
        assert [(row["case"], row["status"], row["gap"]) for row in rows] == [("mlp", "optimal", "0.00%")]
        assert float(rows[0]["total s"]) >= float(rows[0]["trace s"]) > 0
    else:
        by_plan = {row["plan"]: row for row in rows}
        assert by_plan["optimize"]["status"] == "optimal" and by_plan["keras_hub"]["status"] == "no layout map"
        assert all(float(row["x optimum"]) >= 1 for row in rows if row["x optimum"])


@pytest.mark.slow
def test_growth_smoke(tmp_path):
    printed = smoke("growth.py", tmp_path)
    (row,) = table_rows(printed[printed.index("# Growth") :])
    assert (row["grows"], row["status"]) == ("mlp", "optimal")


@pytest.mark.slow
def test_explore_speed_smoke(tmp_path):
    printed = smoke("explore_speed.py", tmp_path)
    rows = table_rows(printed[printed.index("# Questions") :])
    found = {row["question"].split("(")[0]: row["answer"] for row in rows}
    assert set(found) == {"autoshard plan --help", "optimize", "what_if", "explain", "compare", "pareto", "search_mesh"}
    assert not any("Error" in answer for answer in found.values())
    assert all(float(row["processor s"]) >= 0 for row in rows)


@pytest.mark.slow
def test_measured_single_device_smoke(tmp_path):
    printed = smoke("measured_single_device.py", tmp_path)
    (row,) = table_rows(printed)
    assert row["case"] == "smoke"
    assert float(row["predicted ms"]) > 0 and float(row["measured ms"]) > 0
    assert float(row["measured / predicted"]) > 0


@pytest.mark.slow
def test_measured_steps_smoke(tmp_path):
    printed = smoke("measured_steps.py", tmp_path)
    rows = table_rows(printed[printed.index("## smoke") :])
    assert rows[0]["plan"] == "optimize" and len(rows) >= 5
    assert all(float(row["measured ms"]) > 0 and float(row["predicted ms"]) > 0 for row in rows)

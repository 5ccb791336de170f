"""The comparison of plans: which job begins when, resuming, and who counts as best."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import plan_quality
import quality_report

CASE = "wide_mlp / h100"


def row(budget: str, plan: str, compiled_ms: float | None = None, **more):
    found = {"case": CASE, "budget": budget, "plan": plan, "status": "optimal", "predicted ms": 1.0, "jax": "1.2"}
    return {**found, "budget_bytes": 10**9, "peak_bytes": 800, "compiled ms": compiled_ms, **more}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Jobs in the order in which they begin; every plan of the optimum finds a tight budget."""
    jobs = []

    def answered(driver, case, extra):
        job = json.loads(case)
        jobs.append((job["budget"], *job["kinds"], job["peak_bytes"], job["budget_bytes"]))
        return [{**row(job["budget"], kind, 1.0), "budget_bytes": 600} for kind in job["kinds"]]

    monkeypatch.setattr(plan_quality, "in_own_process", answered)
    return jobs


def test_a_tight_budget_follows_the_loose_optimum_and_its_baselines_follow_that(asked):
    done = {}
    rows = [r for rows in plan_quality.run([CASE], ["loose", "tight"], done, [], 1) for r in rows]
    kinds = plan_quality.KINDS
    assert [job[:2] for job in asked if job[0] == "loose"] == [("loose", kind) for kind in kinds]
    tight = [job for job in asked if job[0] == "tight"]
    assert tight[0] == ("tight", "optimize", 800, None)
    assert tight[1:] == [("tight", kind, None, 600) for kind in kinds[1:]]
    assert len(rows) == len(done) == 2 * len(kinds)


def test_two_processes_make_what_one_makes_each_row_once(asked):
    """Which of two threads runs first is not ours to say; what waits for the result of another is."""
    list(plan_quality.run([CASE], ["loose", "tight"], done := {}, [], 2))
    begun = [job[:2] for job in asked]
    both = [(budget, kind) for budget in ("loose", "tight") for kind in plan_quality.KINDS]
    assert sorted(begun) == sorted(both) == sorted(key[1:] for key in done)
    first = ("loose", "optimize"), ("tight", "optimize")
    assert begun.index(first[0]) < begun.index(first[1])
    assert all(begun.index(first[1]) < begun.index(job) for job in both if job[0] == "tight" and job != first[1])


def test_what_has_a_row_is_not_made_again(asked):
    known = [row(budget, kind) for budget in ("loose", "tight") for kind in plan_quality.KINDS]
    done = {(r["case"], r["budget"], r["plan"]): r for r in known if (r["budget"], r["plan"]) != ("tight", "fsdp")}
    list(plan_quality.run([CASE], ["loose", "tight"], done, [], 1))
    assert asked == [("tight", "fsdp", None, 10**9)]


def test_a_job_that_failed_leaves_rows_that_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_quality, "in_own_process", lambda *_: [{"case": "{...}", "status": "failed: no memory"}])
    done = {}
    list(plan_quality.run([CASE], ["loose", "tight"], done, [], 1))
    assert {key[2] for key in done} == set(plan_quality.KINDS) and {key[1] for key in done} == {"loose"}
    store = tmp_path / "rows.jsonl"
    store.write_text("".join(json.dumps(r) + "\n" for r in [*done.values(), row("loose", "fsdp", 2.0)]))
    assert {key[2] for key in plan_quality.stored(store)} == {"fsdp"}, "what failed is tried again"


def test_the_best_of_the_others_is_one_that_fits():
    rows = [
        row("loose", "optimize", 2.0, **{"compiled peak GB": 0.5}),
        row("loose", "fsdp", 2.5, **{"compiled peak GB": 0.5}),
        row("loose", "zero1", 1.0, **{"compiled peak GB": 1.5}),
        row("tight", "optimize", 2.0, **{"compiled peak GB": 1.1}),
        row("tight", "megatron-u", 1.9, **{"compiled peak GB": 0.9}),
    ]
    loose, tight = quality_report.verdicts(rows)
    assert (loose["best of the others"], loose["best / plan"], loose["remark"]) == ("fsdp", 1.25, "")
    assert tight["best / plan"] == 0.95
    assert tight["remark"] == "the plan, compiled, exceeds its budget; WORSE"
    text = quality_report.report(rows, "h100:8")
    assert f"{(1.25 * 0.95) ** 0.5:.3f}, over 2 cases" in text and "in 1." in text
    assert f"## {CASE}, tight" in text and "| zero1 | optimal |" in text


def test_a_difference_within_two_percent_is_not_worse():
    rows = [row("loose", "optimize", 2.0), row("loose", "fsdp", 1.965)]
    assert quality_report.verdicts(rows)[0]["remark"] == ""
    assert quality_report.verdicts(rows[:1])[0]["remark"] == "nothing else fits"

"""The fidelity sweep's bookkeeping: cases, resuming, and the tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fidelity


def row(case: str, predicted: int, compiled: int, **more):
    found = {"predicted_bytes": predicted, "compiled_bytes": compiled, "unplanned_bytes": 0, "differences": []}
    peaks = {"predicted_peak_bytes": 100, "compiled_peak_bytes": 104, "predicted_flops": 10.0, "compiled_flops": 10.0}
    return {"case": case, "status": "optimal", "budget_bytes": 103, **found, **peaks, **more}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "STORE", tmp_path / "fidelity.jsonl")
    monkeypatch.setattr(fidelity, "RESULTS", tmp_path)
    return fidelity.STORE


def test_every_model_meets_every_target_mode_and_budget():
    names = fidelity.case_names()
    assert len(names) == len(set(names)) == len(fidelity.MODELS) * len(fidelity.TARGETS) * 4
    assert all(name.split(" / ")[1] in fidelity.TARGETS for name in names)


def test_the_last_result_of_a_case_counts(store):
    case = fidelity.case_names()[0]
    store.write_text("".join(json.dumps(row(case, 100, n)) + "\n" for n in (150, 101)))
    assert fidelity.stored()[case]["compiled_bytes"] == 101
    assert f"| {case} | optimal |" in fidelity.report() and "1.010" in fidelity.report()


def test_agreement_is_counted_per_target(store):
    good, bad = (name for name in fidelity.case_names() if name.startswith("gpt2_small / h100:8 / train"))
    rows = [fidelity.shown(row(good, 100, 103)), fidelity.shown(row(bad, 100, 140, unplanned_bytes=40))]
    for line in fidelity.summary(rows):
        assert (line["cases"], line["bytes within 5 %"], line["unplanned below 1 %"]) == (2, 0.5, 0.5)
        assert line["peak within 10 %"] == 1.0
        assert line["fits its budget"] == 0.0, "104 bytes do not fit into 103"


def test_nothing_planned_and_nothing_sent_agrees():
    assert fidelity.shown(row("x", 0, 0))["bytes ratio"] == 1.0
    assert fidelity.shown(row("x", 0, 5))["bytes ratio"] == float("inf")


def test_the_largest_difference_is_named():
    difference = {"status": "surplus", "kind": "all-to-all", "bytes_per_device": 20, "tensor": "w", "layer": "dense"}
    assert "surplus all-to-all 16.7%: w dense" in fidelity.shown(row("x", 100, 120, differences=[difference])).values()


def test_finished_cases_are_not_repeated(store, monkeypatch, capsys):
    case = fidelity.case_names()[0]
    asked = []

    def run(driver, name, extra):
        asked.append(name)
        return [row(name, 100, 100)]

    monkeypatch.setattr(fidelity, "in_own_process", run)
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--only", case])
    assert fidelity.main() == 0 and fidelity.main() == 0
    assert asked == [case]
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--only", case, "--again"])
    assert fidelity.main() == 0 and asked == [case, case]
    assert (store.parent / "fidelity.md").exists()


def test_a_tight_budget_is_the_first_share_that_has_a_plan():
    import autoshard_ilp as autoshard

    asked = []

    def planned(least, known=None):
        def plan(budget):
            asked.append(budget)
            if budget < least:
                raise autoshard.InfeasibleError("no plan", minimum_budget=known)
            return budget

        return plan

    assert fidelity.tight(planned(700), 1000) == 750
    assert fidelity.tight(planned(900), 1000) == 950
    assert fidelity.tight(planned(900, known=900), 1000) == 918
    assert asked == [750, 750, 850, 950, 750, 918]
    with pytest.raises(autoshard.InfeasibleError):
        fidelity.tight(planned(2000), 1000)

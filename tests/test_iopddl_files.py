"""The contest's driver on files that are no instances, and instances nothing can solve: a sentence, not a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program import minimum_capacity, solve
from autoshard_ilp.program.model import SolverOptions
from test_iopddl import EXAMPLE, benchmark, run_driver


def broken(change):
    instance = copy.deepcopy(EXAMPLE)
    change(instance["problem"])
    return instance


def without_strategies(problem):
    problem["nodes"]["costs"][1] = problem["nodes"]["usages"][1] = []


@pytest.mark.parametrize(
    ("instance", "complaint"),
    [
        ([1, 2], "problem"),
        ({"problem": {}}, "problem.nodes"),
        (broken(lambda p: p.pop("edges")), "problem.edges"),
        (broken(lambda p: p["nodes"]["intervals"].pop()), "has 5 rows, not 4"),
        (broken(lambda p: p["nodes"]["usages"][1].pop()), "node 1 has 2 costs and 1 usages"),
        (broken(without_strategies), "node 1 has no strategy"),
        (broken(lambda p: p["nodes"]["intervals"][2].append(7)), "interval"),
        (broken(lambda p: p["nodes"]["costs"].__setitem__(0, ["a"])), "numbers"),
        (broken(lambda p: p["nodes"]["costs"].__setitem__(0, [None])), "number"),
        (broken(lambda p: p["edges"]["costs"][0].pop()), "edge 0 has a table of 1 costs, not 2"),
        (broken(lambda p: p["edges"]["nodes"].__setitem__(0, [0, 5])), "edge 0 joins"),
        (broken(lambda p: p["edges"]["nodes"].__setitem__(0, [0, -1])), "edge 0 joins"),
        (broken(lambda p: p["edges"]["costs"].pop()), "edges.costs has 4 rows, not 5"),
        (broken(lambda p: p.__setitem__("usage_limit", "50")), "usage_limit"),
    ],
)
def test_what_is_no_instance_is_named(instance, complaint, tmp_path: Path):
    driver = benchmark()
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(instance))
    with pytest.raises(driver.NotAnInstanceError, match=complaint):
        driver.read_instance(file)


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b\x08\x00broken", b"\xff\xfe", None])
def test_what_is_no_json_is_named(content, tmp_path: Path):
    driver = benchmark()
    file = tmp_path / "instance.json.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(driver.NotAnInstanceError, match=r"JSON|cannot be read"):
        driver.read_instance(file)


def test_the_driver_says_it_in_one_line(tmp_path: Path):
    (tmp_path / "list.json").write_text("[1]")
    done = run_driver(["list.json", "--time-limit", "60", "--output", "out.json"], tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == ['list.json: has no object "problem"']
    assert not (tmp_path / "out.json").exists()


def test_a_node_that_nothing_joins_and_nothing_allows():
    instance = broken(lambda p: p["nodes"]["costs"].append([10**18, 10**18]))
    instance["problem"]["nodes"]["usages"].append([1, 2])
    instance["problem"]["nodes"]["intervals"].append([30, 40])
    program = benchmark().build_program(instance)
    assert not np.isfinite(program.nodes[-1].costs).any() and program.capacity == 50
    assert solve(program, SolverOptions(time_limit=30.0)).status == "infeasible"
    with pytest.raises(InfeasibleError):
        minimum_capacity(program, SolverOptions(time_limit=30.0))

"""Large programs: reductions, bounds and search against brute force; the contest's format; the time limit."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_ilp.errors import InfeasibleError
from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.cpsat import CpOptions
from autoshard_ilp.program.large.crossover import combine, combine_best
from autoshard_ilp.program.large.dual import Dual
from autoshard_ilp.program.large.flat import Flat
from autoshard_ilp.program.large.flatten import flatten
from autoshard_ilp.program.large.graph import build_graph, with_rows
from autoshard_ilp.program.large.local import LocalSearch
from autoshard_ilp.program.large.reduce import STEPS, arc_consistency, reduce
from autoshard_ilp.program.large.route import solve_in_turn
from autoshard_ilp.program.large.solver import LargeSolver
from autoshard_ilp.program.large.undo import Elimination
from autoshard_ilp.program.model import Program, Solution, SolverOptions
from autoshard_ilp.program.nets.net import EmptyNodeError
from autoshard_ilp.program.search import Search
from program_cases import programs, random_program

ROOT = Path(__file__).parents[1]
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
FEW = settings(max_examples=25, deadline=None, derandomize=True)

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def benchmark():
    """The driver as a module."""
    spec = importlib.util.spec_from_file_location("iopddl_driver", ROOT / "benchmarks" / "iopddl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(limit: int | None) -> Program:
    return dataclasses.replace(benchmark().build_program(EXAMPLE), capacity=limit)


def run_driver(arguments: list[str], folder: Path, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "iopddl.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        timeout=300,
        **more,
    )


def solve_large(program: Program, time_limit: float = 60.0) -> Solution:
    """The large route alone, however small the program."""
    search = Search(program, SolverOptions(time_limit=time_limit), time.monotonic(), None)
    try:
        infeasible = LargeSolver(search).run()
    except EmptyNodeError:
        infeasible = True
    return search.finish(infeasible)


def assignments(flat: Flat):
    """All assignments of a small flat program."""
    return (np.array(x, np.int64) for x in itertools.product(*(range(n) for n in flat.counts)))


def optimum(flat: Flat, capacity: int) -> float:
    """By enumeration; ``inf`` when nothing fits."""
    best = math.inf
    for x in assignments(flat):
        cost = flat.value(x)
        if cost < best and flat.usage(x).max(initial=0) <= capacity:
            best = cost
    return best


def with_budget(program: Program, share: float) -> Program:
    """A capacity between the least and the largest peak of the finite assignments."""
    flat = flatten(dataclasses.replace(program, capacity=0))
    peaks = [int(flat.usage(x).max(initial=0)) for x in assignments(flat) if math.isfinite(flat.value(x))]
    if not peaks:
        return dataclasses.replace(program, capacity=0)
    return dataclasses.replace(program, capacity=round(min(peaks) + share * (max(peaks) - min(peaks))))


def without_edge_bytes(program: Program) -> Program:
    return dataclasses.replace(program, edges=tuple(dataclasses.replace(e, bytes=None) for e in program.edges))


@pytest.mark.parametrize("route", [solve_large, lambda p: solve(p, SolverOptions(time_limit=60.0))])
def test_example_of_the_contest(route) -> None:
    found = route(example(50))
    assert (found.status, found.objective, found.lower_bound) == ("optimal", 445.0, 445.0)
    assert found.choices.tolist() == [0, 0, 2, 1, 0]
    free = route(example(None))
    assert (free.status, free.objective) == ("optimal", 415.0)
    assert route(example(0)).status == "infeasible"


def test_driver_writes_a_list_of_strategies(tmp_path: Path) -> None:
    (tmp_path / "example.json.gz").write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    done = run_driver(["example.json.gz", "--time-limit", "60", "--output", "answer.json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "answer.json").read_text()) == [0, 0, 2, 1, 0]
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].isalpha())
    assert (lines["status"], lines["cost"], lines["gap"]) == ("optimal", "445", "0.000000%")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answer.json", "example.json.gz"]
    impossible = {"problem": {**EXAMPLE["problem"], "usage_limit": 0}}
    (tmp_path / "none.json").write_text(json.dumps(impossible))
    done = run_driver(["none.json", "--time-limit", "60", "--output", "none.out"], tmp_path)
    assert done.returncode == 2 and "infeasible" in done.stdout
    assert not (tmp_path / "none.out").exists()


def test_reader_forbids_what_is_impossible_and_folds_loops() -> None:
    problem = {
        "nodes": {"intervals": [[0, 2], []], "costs": [[1, 2], [10**18, 5]], "usages": [[1, 2], [9, 9]]},
        "edges": {"nodes": [[0, 1], [0, 0]], "costs": [[0, 1, 2, 2 * 10**18], [10, 99, 99, 20]]},
        "usage_limit": 2,
    }
    program = benchmark().build_program({"problem": problem})
    assert [n.costs.tolist() for n in program.nodes] == [[11.0, 22.0], [math.inf, 5.0]]
    assert program.edges[0].table.tolist() == [[0.0, 1.0], [2.0, math.inf]] and len(program.edges) == 1
    assert program.usage_over_time([1, 1]).tolist() == [2, 2]
    assert solve(program, SolverOptions(time_limit=30.0)).objective == 17.0


@SETTINGS
@given(programs(memory=True))
def test_flat_arrays_say_the_same_as_the_program(program: Program) -> None:
    flat = flatten(dataclasses.replace(program, capacity=10**6))
    known = len(program.nodes)
    finite: dict[tuple[int, ...], list[np.ndarray]] = {}
    if not np.prod(flat.counts.astype(float)) <= 20000:
        return
    for x in assignments(flat):
        if math.isfinite(flat.value(x)):
            finite.setdefault(tuple(x[:known].tolist()), []).append(x)
    for choices in itertools.product(*(range(len(n.costs)) for n in program.nodes)):
        cost = program.cost(choices)
        assert math.isfinite(cost) == (choices in finite)
        for x in finite.get(choices, ()):
            assert flat.value(x) == pytest.approx(cost, rel=1e-12)
            assert flat.usage(x).max(initial=0) == program.peak(choices)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@SETTINGS
@given(programs(memory=True), st.floats(0.0, 1.0))
def test_each_reduction_is_exact_and_invertible(step, program: Program, share: float) -> None:
    program = with_budget(without_edge_bytes(program), share)
    flat = flatten(program)
    expected = optimum(flat, flat.capacity)
    try:
        after, undo = step(flat)
    except EmptyNodeError:
        assert expected == math.inf
        return
    assert optimum(after, flat.capacity) == pytest.approx(expected, rel=1e-12)
    for x in assignments(after):
        back = x
        for entry in reversed(undo):
            back = entry.expand(back)
        if math.isfinite(after.value(x)):
            assert flat.value(back) == pytest.approx(after.value(x), rel=1e-12)
            assert np.array_equal(flat.usage(back), after.usage(x))


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 1.0))
def test_all_reductions_together(program: Program, share: float) -> None:
    program = with_budget(program, share)
    flat = flatten(program)
    expected = optimum(flat, flat.capacity)
    try:
        reduced = reduce(flat)
    except EmptyNodeError:
        assert expected == math.inf
        return
    assert optimum(reduced.flat, flat.capacity) == pytest.approx(expected, rel=1e-12)
    rows, _ = with_rows(reduced.flat)
    for x in assignments(reduced.flat):
        full = reduced.expand(x)
        fits = reduced.flat.usage(x).max(initial=0) <= flat.capacity
        assert fits == (rows.usage(x).max(initial=0) <= flat.capacity)
        assert fits == (flat.usage(full).max(initial=0) <= flat.capacity)
    if expected < math.inf and not any(isinstance(entry, Elimination) for entry in reduced.undo):
        best = next(
            x for x in assignments(flat) if flat.value(x) == expected and flat.usage(x).max(initial=0) <= flat.capacity
        )
        again = reduced.project(best)
        assert reduced.flat.value(again) == pytest.approx(expected, rel=1e-12)


@SETTINGS
@given(programs(memory=True), st.floats(0.0, 1.0))
def test_bounds_hold_for_the_whole_and_for_every_value(program: Program, share: float) -> None:
    try:
        flat, _ = with_rows(arc_consistency(flatten(with_budget(program, share)))[0])
    except EmptyNodeError:
        return
    dual = Dual(build_graph(flat))
    for _ in range(15):
        dual.step()
    best = np.full(len(flat.cost), math.inf)
    for x in assignments(flat):
        if flat.usage(x).max(initial=0) <= flat.capacity:
            own = flat.off[:-1] + x
            best[own] = np.minimum(best[own], flat.value(x))
    slack = 1e-9 * np.where(np.isfinite(best), np.abs(best), 0.0)
    assert dual.bound <= best.min() + slack.max()
    assert (dual.value_bounds <= best + slack).all()


@FEW
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_local_search_keeps_its_books(seed: int, share: float) -> None:
    program = without_edge_bytes(random_program(seed, 6, "random", "plain", 0.1, memory=True))
    try:
        flat, _ = with_rows(reduce(flatten(with_budget(program, share))).flat)
    except EmptyNodeError:
        return
    local = LocalSearch(build_graph(flat), np.zeros(flat.nodes, np.int64), seed)
    local.set_prices(np.full(len(flat.base), 1e-3))
    local.run(0.01, 8, 50, 0.01)
    kept = local.score.copy()
    best = local.best
    local.set_prices(np.full(len(flat.base), 1e-3))
    assert local.score[:3] == pytest.approx(kept[:3], rel=1e-9, abs=1e-9)
    if best is not None and math.isfinite(flat.value(best)):
        assert flat.value(best) == pytest.approx(kept[3], rel=1e-9)
        assert flat.usage(best).max(initial=0) <= flat.capacity


@FEW
@given(st.integers(0, 10**6))
def test_crossover_never_loses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    program = without_edge_bytes(random_program(seed, 8, "tree", "plain", 0.0, memory=True))
    flat, _ = with_rows(flatten(dataclasses.replace(program, capacity=200)))
    every = [x for x in itertools.islice(assignments(flat), 4000) if flat.usage(x).max(initial=0) <= flat.capacity]
    if len(every) < 2:
        return
    base, other = every[rng.integers(len(every))], every[rng.integers(len(every))]
    child = combine(flat, base, other, np.zeros(len(flat.base)))
    assert flat.value(child) <= flat.value(base) + 1e-12
    assert flat.usage(child).max(initial=0) <= flat.capacity
    assert ((child == base) | (child == other)).all()
    best = combine_best(flat, base, other, CpOptions(time.monotonic() + 30.0, 0, 1))
    assert flat.value(best) <= flat.value(child) + 1e-9
    assert flat.usage(best).max(initial=0) <= flat.capacity


def test_large_route_takes_over_when_the_exact_one_gives_up() -> None:
    def gives_up(search: Search) -> bool:
        raise InfeasibleError("nothing found in time")

    search = Search(example(50), SolverOptions(time_limit=60.0), time.monotonic(), None)
    assert not solve_in_turn(search, gives_up)
    assert search.upper == search.lower == 445.0 and search.options.time_limit == 60.0


@FEW
@given(programs(memory=True), st.floats(0.0, 1.0))
def test_large_route_proves_what_brute_force_finds(program: Program, share: float) -> None:
    program = with_budget(program, share)
    expected, found = brute_force(program), solve_large(program)
    assert found.status == expected.status
    if expected.choices is not None:
        assert found.objective == pytest.approx(expected.objective, rel=1e-9)
        assert program.cost(found.choices) == pytest.approx(found.objective, rel=1e-12)
        assert program.peak(found.choices) <= program.capacity


def contest_like(seed: int, layers: int, width: int, slack: float) -> dict:
    """An instance in the contest's format: chains of operations with hubs, costs over decades, 10**18 as impossible."""
    rng = np.random.default_rng(seed)
    costs, usages, intervals, pairs, tables = [], [], [], [], []
    kinds = rng.integers(2, 12, width)
    for v in range(layers * width):
        size = int(kinds[v % width])
        costs.append((10.0 ** rng.uniform(0, 6, size)).astype(np.int64).tolist())
        usages.append(np.sort(10.0 ** rng.uniform(2, 6, size)).astype(np.int64).tolist())
        intervals.append([v, v + int(rng.integers(1, 4 * width))])
        for w in [v - 1] + [v - width] * (v % 7 == 0):
            if w >= 0:
                table = (10.0 ** rng.uniform(3, 6, (len(costs[w]), size))).astype(np.int64)
                table[rng.random(table.shape) < 0.05] = 10**18
                like = np.arange(len(costs[w]))
                table[like, like * size // len(costs[w])] = 0  # alike strategies go together; the first ones hold least
                pairs.append([w, v])
                tables.append(table.ravel().tolist())
    low = np.zeros(layers * width + 4 * width, np.int64)
    for (begin, end), used in zip(intervals, usages, strict=True):
        low[begin:end] += min(used)
    return {
        "problem": {
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": pairs, "costs": tables},
            "usage_limit": int(low.max() * slack),
        }
    }


def test_middling_instance_is_solved_with_a_small_gap() -> None:
    program = benchmark().build_program(contest_like(3, 20, 10, 1.5))
    found = solve_large(program, 15.0)
    assert found.choices is not None and found.gap < 0.02
    assert program.peak(found.choices) <= program.capacity
    assert program.cost(found.choices) == pytest.approx(found.objective, rel=1e-12)


def test_interrupt_keeps_the_best(tmp_path: Path) -> None:
    (tmp_path / "big.json").write_text(json.dumps(contest_like(5, 150, 40, 1.3)))
    command = [sys.executable, str(ROOT / "benchmarks" / "iopddl.py"), "big.json"]
    command += ["--time-limit", "240", "--output", "answer.json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 200
        while not (tmp_path / "answer.json").exists() and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    choices = json.loads((tmp_path / "answer.json").read_text())
    program = benchmark().build_program(json.loads((tmp_path / "big.json").read_text()))
    assert program.peak(choices) <= program.capacity
    assert f"cost         {program.cost(choices):.0f}" in text


@pytest.mark.slow
@pytest.mark.parametrize("limit", [5, 20])
def test_time_limit_is_obeyed(tmp_path: Path, limit: int) -> None:
    (tmp_path / "big.json").write_text(json.dumps(contest_like(7, 800, 80, 1.2)))
    began = time.monotonic()
    done = run_driver(["big.json", "--time-limit", str(limit), "--output", "answer.json"], tmp_path)
    assert time.monotonic() - began < limit + 2, done.stdout + done.stderr
    if limit == 20:
        assert done.returncode == 0, done.stdout + done.stderr

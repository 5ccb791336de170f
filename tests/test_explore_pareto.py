"""autoshard.pareto against brute force over budgets: nothing between two points is missed."""

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard_ilp as autoshard
from autoshard_ilp.display.render import distinct_sizes
from autoshard_ilp.explore.again import Problem
from autoshard_ilp.explore.frontier import Frontier, Policy
from autoshard_ilp.explore.pareto import _steps, pareto
from autoshard_ilp.program.model import Lifetimes, Node, Program, SolverOptions
from autoshard_ilp.progress import Progress
from autoshard_ilp.request import Request
from explore_models import MESH, OPTIONS, mlp
from program_cases import random_program

LINE = {"data": 4}


@pytest.fixture(scope="module")
def frontier():
    return pareto(mlp, LINE, **OPTIONS)


def test_every_point_is_the_optimum_of_its_budgets(frontier):
    assert frontier.complete and frontier.status.startswith("Every breakpoint")
    assert frontier.minimum_bytes == frontier.minimum_bound_bytes == frontier.points[0].peak_bytes
    times = [p.total_s for p in frontier]
    assert times == sorted(times, reverse=True) and len(times) >= 2
    plan = autoshard.optimize(mlp, LINE, **OPTIONS)
    assert frontier.points[-1].total_s == pytest.approx(plan.cost.total_s, rel=1e-9)
    for point, following in zip(frontier.points, [*frontier.points[1:], None], strict=True):
        assert point.status == "optimal" and point.budget_bytes == point.peak_bytes
        assert point.up_to_bytes == (following.budget_bytes - 1 if following else None)
        for budget in {point.budget_bytes, point.up_to_bytes or 10**12}:
            best = plan.what_if(memory_budget=budget, remat=point.remat)
            assert best.cost.total_s == pytest.approx(point.total_s, rel=1e-9)
    with pytest.raises(autoshard.InfeasibleError):
        plan.what_if(memory_budget=frontier.minimum_bytes - 1)


def test_points_are_plans(frontier):
    for point in frontier:
        assert point.plan.status == "optimal" and point.plan.memory.peak_bytes == point.peak_bytes
        assert point.plan.cost.total_s == pytest.approx(point.total_s)
        assert point.plan.specs["wide/kernel"] is not None
    assert frontier.points[0].plan.what_if(memory_budget="1GB").cost.total_s == pytest.approx(
        frontier.points[-1].total_s
    )


def test_budgets_of_ones_own(frontier):
    low, high = frontier.points[0], frontier.points[-1]
    found = pareto(high.plan, budgets=[low.budget_bytes - 1, high.budget_bytes, "1GB", low.budget_bytes])
    assert [p.budget_bytes for p in found] == [low.budget_bytes - 1, low.budget_bytes, high.budget_bytes, 10**9]
    assert [p.status for p in found] == ["infeasible", "optimal", "optimal", "optimal"]
    assert found.points[0].minimum_bytes == low.budget_bytes and found.points[0].plan is None
    expected = [low.total_s, high.total_s, high.total_s]
    assert [p.total_s for p in found.points[1:]] == pytest.approx(expected, rel=1e-9)


def test_a_plan_is_asked_under_other_options(frontier):
    plan = frontier.points[-1].plan
    pins = {"wide/kernel": (None, "data")}
    asked = pareto(plan, hardware="a100-80", pins=pins, objective="communication", remat="never", max_points=2)
    best = plan.what_if(hardware="a100-80", pins=pins, objective="communication", remat="never")
    point = asked.points[-1]
    assert point.plan.cost.total_s == pytest.approx(best.cost.total_s, rel=1e-9) != plan.cost.total_s
    assert point.plan.specs["wide/kernel"] == best.specs["wide/kernel"] and {p.remat for p in asked} == {"never"}
    with pytest.raises(autoshard.InputShapeError, match=r"its own step. Received: a plan, and batch_size, mode"):
        pareto(plan, batch_size=8, mode="predict")


def test_it_says_when_it_stops_early():
    found = pareto(mlp, MESH, max_points=2, **OPTIONS)
    assert len(found) == 2 and not found.complete and "max_points=2" in found.status
    nothing = pareto(mlp, LINE, time_limit=0.0, budgets=["1GB"], **OPTIONS)
    assert not nothing.complete and nothing.points[0].status == "unknown"


def test_it_reads_well(frontier, tmp_path):
    for width in (60, 100):
        text = frontier.text(width, only_ascii=True)
        assert text.isascii() and max(map(len, text.splitlines())) <= width
    frame = frontier.to_dataframe()
    assert list(frame["status"]) == ["optimal"] * len(frontier)
    assert json.loads(json.dumps(frontier.to_dict(), allow_nan=False))["complete"]
    assert "<pre" in frontier._repr_html_() and "smallest budget" in repr(frontier)
    pytest.importorskip("matplotlib")
    figure = frontier.plot()
    assert figure.axes[0].get_xlabel() == "memory budget per device (MB)"
    figure.savefig(tmp_path / "pareto.svg")


@pytest.mark.parametrize(
    "options", [{"budgets": []}, {"max_points": 1}, {"budgets": ["16 bananas"]}, {"max_points": 2.5}]
)
def test_options_that_make_no_sense(options):
    with pytest.raises(autoshard.InputShapeError):
        pareto(mlp, MESH, **options)


# -- the search itself, on programs small enough to enumerate ----------------------------------------------------------


def found_by_enumeration(program):
    """(peak, cost) of the non-dominated assignments, the smallest peak first."""
    pairs = []
    for choices in itertools.product(*(range(len(n.costs)) for n in program.nodes)):
        cost = program.cost(choices)
        if math.isfinite(cost):
            pairs.append((program.peak(choices), cost))
    kept = []
    for peak, cost in sorted(pairs):
        if not kept or cost < kept[-1][1] * (1 - 1e-9):
            kept.append((peak, cost))
    return kept


def search_over(programs, most=200):
    request = Request(None, None, None, 0, None, "step_time", SolverOptions(time_limit=20.0))
    problems = [Problem(None, None, None, None, request, request, program) for program in programs]
    search = Frontier([Policy(p) for p in problems], most, time.monotonic() + 60.0, Progress(False))
    search.run()
    return search


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(2, 5),
    shape=st.sampled_from(["tree", "cycle", "random"]),
    style=st.sampled_from(["uniform", "ties", "decades"]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_breakpoint_of_a_small_program(seed, count, shape, style):
    program = random_program(seed, count, shape, style, memory=True, most=3)
    expected = found_by_enumeration(program)
    search = search_over([program])
    steps = _steps(search.probes)
    assert [p.peak for p, _ in steps] == [peak for peak, _ in expected]
    assert [p.cost for p, _ in steps] == pytest.approx([cost for _, cost in expected], rel=1e-8, abs=1e-12)
    assert all(p.proved for p, _ in steps) and not search.stopped


def test_two_policies_share_one_frontier():
    programs = [random_program(seed, 4, "tree", "uniform", 0.0, memory=True) for seed in (3, 4)]
    both = sorted(pair for program in programs for pair in found_by_enumeration(program))
    expected = [(peak, cost) for i, (peak, cost) in enumerate(both) if all(cost < c for _, c in both[:i])]
    steps = _steps(search_over(programs).probes)
    assert [p.peak for p, _ in steps] == [peak for peak, _ in expected]
    assert [p.cost for p, _ in steps] == pytest.approx([cost for _, cost in expected])


@pytest.mark.parametrize("budgets", [None, [8_000_000, 9_000_000, 12_000_000]])
def test_ctrl_c_keeps_what_is_found(monkeypatch, budgets):
    """Wherever it comes; before anything is found it ends the search."""
    probe, calls = Frontier.probe, []

    def interrupted(self, budget):
        calls.append(budget)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return probe(self, budget)

    monkeypatch.setattr(Frontier, "probe", interrupted)
    stop = 2
    found = pareto(mlp, MESH, budgets=budgets, **OPTIONS)
    assert found.interrupted and not found.complete and "interrupted" in found.text(100)
    assert [p.status for p in found if p.plan is not None] == ["optimal"] and found.to_dict()["interrupted"]
    calls.clear()
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        pareto(mlp, MESH, budgets=budgets, **OPTIONS)


def every_sum(powers):
    """A program of nodes that pay their own power of two in bytes or in seconds, so that every sum is a breakpoint."""
    nodes = tuple(Node(f"n{i}", np.array([0.0, float(n)]), np.array([n, 0])) for i, n in enumerate(powers))
    count = len(powers)
    start, end = np.zeros(count, np.int64), np.ones(count, np.int64)
    return Program(nodes, (), Lifetimes(np.zeros(count, bool), np.arange(count), start, end))


def test_breakpoints_in_clusters_need_few_probes():
    """The wide gaps between clusters are not halved down to their last byte."""
    search = search_over([every_sum([1, 2, 2**20, 2**21, 2**22])], most=100)
    assert len(_steps(search.probes)) == 32 and not search.stopped
    assert len(search.probes) <= 80


def test_few_points_are_spread():
    program = every_sum([2**i for i in range(6)])
    every = search_over([program])
    assert [(p.peak, p.cost) for p, _ in _steps(every.probes)] == [(n, 63.0 - n) for n in range(64)]
    few = search_over([program], most=9)
    assert len(few.probes) == 9 and few.stopped.startswith("max_points=9 reached")
    peaks = sorted(p.peak for p in few.probes)
    assert max(b - a for a, b in itertools.pairwise(peaks)) <= 16
    assert all(p.cost == 63.0 - p.peak for p in few.probes)


def test_a_legend_covers_no_line(frontier):
    """It lies below the axes in a figure of ours, and is the axes' own in a figure of the user's."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    ours = frontier.plot()
    ours.draw_without_rendering()
    (legend,) = ours.legends
    assert legend.get_window_extent().y1 <= ours.axes[0].get_window_extent().y0
    ax = matplotlib.Figure().subplots()
    frontier.plot(ax)
    with pytest.raises(autoshard.InputShapeError, match="ax is a matplotlib Axes"):
        frontier.plot(ax=3)
    assert ax.get_legend() is not None


def test_budgets_that_differ_look_different(frontier):
    assert distinct_sizes([8_400_000, 9_000_000]) == ["8.4 MB", "9.0 MB"]
    assert distinct_sizes([8_463_360, 8_493_000, 900_000]) == ["8.47 MB", "8.50 MB", "0.90 MB"]
    assert distinct_sizes([1_000_000_001, 1_000_000_002]) == ["1.000000001 GB", "1.000000002 GB"]
    shown = [line.split("  ")[0] for line in frontier.text(100).splitlines() if line.rstrip().endswith("proved")]
    assert len(set(shown)) == len(frontier.points)

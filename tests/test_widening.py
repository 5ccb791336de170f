"""Ever wider limits, where memory does not bind."""

from __future__ import annotations

import importlib
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard_ilp.program import brute_force, solve
from autoshard_ilp.program.cpsat import CpOptions
from autoshard_ilp.program.model import Program, SolverOptions
from autoshard_ilp.program.nets import core, widening
from autoshard_ilp.program.nets.net import EmptyNodeError, Net, build_net
from autoshard_ilp.program.nets.widening import Widening
from program_cases import load_in, programs
from test_strong import close, frustrated


def widen(program: Program, upper: float = math.inf, seconds: float = math.inf) -> tuple[float, float, Widening]:
    """Best cost below ``upper`` and lower bound of a search in the whole program, with nothing solved before."""
    costs, bounds = [upper], [-math.inf]

    def offer(choices: np.ndarray) -> float:
        costs.append(program.cost(choices))
        return min(costs)

    def done() -> bool:
        return max(bounds) >= min(costs)

    search = Widening(offer, bounds.append, done, time.monotonic() + seconds)
    try:
        search.run(build_net(program), upper)
    except EmptyNodeError:
        bounds.append(min(costs))
    return min(costs), max(bounds), search


@settings(deadline=None, max_examples=60, derandomize=True)
@given(programs(), st.sampled_from([1.0, 1.001, 1.5, math.inf]))
def test_the_optimum_is_found_and_proved(program: Program, factor: float) -> None:
    best = brute_force(program).objective
    assume(best > 0)  # limits are relative
    upper = math.inf if math.isinf(best) else best * factor
    cost, bound, _ = widen(program, upper)
    assert close(cost, min(best, upper)) and close(bound, best)


@pytest.mark.parametrize("seed", range(3))
def test_cycles_that_messages_leave_open_are_closed(seed: int) -> None:
    program = frustrated(seed, 4)
    best = solve(program, SolverOptions(time_limit=100.0)).objective
    cost, bound, search = widen(program)
    assert close(cost, best) and close(bound, best) and len(search.windows) > 1
    limits = [w["limit"] for w in search.windows]
    assert limits == sorted(limits), "ever wider"


def test_windows_that_take_too_long_leave_a_valid_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    program = frustrated(0, 6)
    best = solve(program, SolverOptions(time_limit=100.0)).objective
    monkeypatch.setattr(widening, "PATIENCE_SECONDS", -1.0)  # all windows end where they begin
    cost, bound, search = widen(program, 2 * best)
    assert cost == 2 * best and 0 < bound < best
    assert [w["status"] for w in search.windows] == ["unknown"] * widening.FAILURES


def test_wide_nodes_with_large_tables_are_left_to_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "TOO_DEAR", 0.0)
    monkeypatch.setattr(core, "DEAR", 0.0)
    monkeypatch.setattr(core, "load_windows", lambda: load_in(1000.0))  # compiling is no part of the limit
    program = frustrated(0, 6)
    solution = solve(program, SolverOptions(time_limit=100.0))
    assert solution.status == "optimal" and solution.report["branches"] == 0
    windows = [entry["windows"] for entry in solution.report["descent"] if "windows" in entry]
    assert len(windows) == 1 and windows[0][-1]["status"] in ("optimal", "infeasible")
    assert -1000.0 < solution.seconds < -800.0


@pytest.mark.slow
def test_what_follows_windows_has_the_time_that_compiling_them_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "TOO_DEAR", 0.0)
    monkeypatch.setattr(core, "DEAR", 0.0)
    monkeypatch.setattr(core, "load_windows", lambda: load_in(1000.0))
    monkeypatch.setattr(widening, "PATIENCE_SECONDS", -1.0)  # no window proves anything: CP-SAT is next
    left = list[float]()

    def spy(net: Net, program: Program, rows: Any, capacity: Any, options: CpOptions, **more: Any) -> None:
        left.append(options.deadline - time.monotonic())
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("autoshard_ilp.program.solve"), "solve_net", spy)
    assert solve(frustrated(0, 8), SolverOptions(time_limit=100.0)).report["interrupted"]
    assert len(left) == 1 and 500.0 < left[0] < 1100.0  # 100 without; a busy machine is slow

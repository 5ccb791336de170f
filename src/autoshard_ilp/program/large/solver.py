"""Solve a large program: reduce, bound, search, remove what cannot be better, repeat; CP-SAT on what is small.

One thread runs the dual (``dual.Dual``), which gives bounds, prices and starts; the main thread runs local search at
those prices. Whenever the bounds rule out enough values, the program is reduced again and both start over on it.
"""

from __future__ import annotations

import math
import sys
import threading
import time

import numpy as np

from autoshard_ilp.program.cpsat import CpOptions
from autoshard_ilp.program.large.dual import Dual
from autoshard_ilp.program.large.exact import solve_exactly
from autoshard_ilp.program.large.flat import Flat
from autoshard_ilp.program.large.flatten import flatten
from autoshard_ilp.program.large.graph import build_graph, with_rows
from autoshard_ilp.program.large.reduce import Reduced, reduce
from autoshard_ilp.program.large.schedule import Schedule
from autoshard_ilp.program.large.stage import Pool, Stage
from autoshard_ilp.program.nets.net import EmptyNodeError
from autoshard_ilp.program.search import Search

SLICE_SECONDS = 0.25
PROPOSE = 1e-3  # relative rise of the bound for which the dual takes over the walk's prices
STUCK_STEPS = 15  # .. if it has not got further itself for so long
DUAL_STEPS = 10  # between two turns of search in the second thread, once the bound hardly rises
RELATIVE_MARGIN = 1e-9  # a value goes only when its bound exceeds the best cost by this
SHRINK = 0.8  # reduce again when at most this part of the values is left
EXACT_VALUES = 4000  # CP-SAT takes the whole program below this ..
EXACT_CELLS = 120_000  # .. and this
STALL_SECONDS = 3.0  # without a better plan, for a program of the size above
SWITCH_SECONDS = 2e-4  # compiled kernels take milliseconds; Python's 5 ms would make each wait for the other thread


def ceiling(flat: Flat) -> float:
    """No finite assignment costs more than this."""
    finite = np.where(np.isfinite(flat.table), flat.table, -np.inf)
    most = np.maximum.reduceat(finite, flat.toff[:-1]) if len(finite) else np.zeros(0)
    own = np.where(np.isfinite(flat.cost), flat.cost, -np.inf)
    total = float(np.maximum.reduceat(own, flat.off[:-1]).sum() + most.sum())
    return total + 1e-9 * abs(total)


class LargeSolver:
    """One solve. ``run`` leaves plan and bound in ``search``.

    Args:
        search: the program, its options, and where plan and bound go.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.original = flatten(search.program)
        self.seed = search.options.seed
        self.ceiling = ceiling(self.original)
        self.improved = time.monotonic()
        self.told = 0.0
        self.log: list[dict] = search.report.setdefault("large", [])

    def run(self) -> bool:
        """Improve plan and bound until proved or out of time. True: proved infeasible."""
        search = self.search
        since = time.monotonic()
        reduced = reduce(self.original)
        search.add_seconds("presolve", since)
        if search.program.capacity is not None and int(reduced.flat.base.max(initial=0)) > reduced.flat.capacity:
            return True
        known = None
        if search.best is not None and len(search.best) == self.original.nodes:
            known = reduced.project(search.best)
        stage: Stage | None = self._open((reduced,), reduced, None, known)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            while stage is not None:
                stage = self._work(stage)
        except EmptyNodeError:
            return search.nothing_below()
        finally:
            sys.setswitchinterval(interval)
        return bool(search.best is None and search.lower == math.inf)

    def _open(self, way: tuple[Reduced, ...], reduced: Reduced, old: Stage | None, x: np.ndarray | None) -> Stage:
        """Arrays and searches for what ``reduced`` left, with the prices of the stage before."""
        flat, times = with_rows(reduced.flat)
        graph = build_graph(flat)
        dual = Dual(graph)
        if old is not None:
            dual.warm_start(old.dual, times)
        stage = Stage(way, graph, times, dual, Pool(graph))
        if x is not None and (flat.usage(x) <= flat.capacity).all():
            stage.pool.offer(x, flat.value(x))
        self.log.append({**flat.size(), "rows": len(times), "seconds": self.search.seconds})
        return stage

    def _work(self, stage: Stage) -> Stage | None:
        """Search on one stage; the next one, or None when there is nothing left to do."""
        stop = threading.Event()
        failed: list[BaseException] = []

        self.seed += 2
        main, helper = (Schedule(stage, self.seed + i, stage.pool.best, self.search.deadline) for i in range(2))

        def help_along() -> None:
            """Improve the bound; when that gets nowhere, search like the main thread."""
            try:
                while not stop.is_set():
                    for _ in range(1 if stage.dual.converged else DUAL_STEPS):
                        if not stage.dual.converged and not stop.is_set():
                            stage.starts.append(stage.dual.step())
                    if stage.dual.settled and not stop.is_set():
                        helper.turn(SLICE_SECONDS)
            except BaseException as error:  # raised again in the main thread
                failed.append(error)

        thread = threading.Thread(target=help_along, name="dual", daemon=True)
        thread.start()
        action = "end"
        try:
            action = self._loop(stage, main, helper, failed)
        finally:
            stop.set()
            thread.join()
            self._note(stage)
        if failed:
            raise failed[0]
        if action == "shrink":
            reduced = reduce(stage.graph.flat, self._alive(stage))
            x = None if stage.pool.best is None else reduced.project(stage.pool.best)
            return self._open((*stage.way, reduced), reduced, stage, x)
        if action == "exact":
            self._finish_exactly(stage)
        return None

    def _loop(self, stage: Stage, main: Schedule, helper: Schedule, failed: list[BaseException]) -> str:
        """Local search until something else is to be done: "shrink", "exact" or "end"."""
        search = self.search
        while not failed:
            left = search.deadline - time.monotonic()
            if left <= 0:
                return "end"
            main.turn(min(SLICE_SECONDS, left))
            self._note(stage)
            if search.done():
                return "end"
            flat = stage.graph.flat
            if math.isfinite(search.upper):
                for walk in (main.walk, helper.walk):
                    np.maximum(stage.dual.value_bounds, walk.value_bounds, out=stage.dual.value_bounds)
                    search.prove(min(walk.bound, search.upper))
                    stuck = stage.dual.steps - stage.dual.last_rise > STUCK_STEPS
                    if stuck and walk.bound > stage.dual.bound + PROPOSE * abs(stage.dual.bound):
                        stage.dual.proposal = walk.best_prices
                if np.count_nonzero(self._alive(stage)) < SHRINK * len(flat.cost):
                    return "shrink"
            small = len(flat.cost) <= EXACT_VALUES and len(flat.table) <= EXACT_CELLS
            patience = STALL_SECONDS * len(flat.cost) / EXACT_VALUES
            if small and stage.dual.settled and time.monotonic() - self.improved > patience:
                return "exact"
        return "end"

    def _alive(self, stage: Stage) -> np.ndarray:
        """Values that a plan better than the best may take."""
        return stage.dual.value_bounds <= self.search.upper + RELATIVE_MARGIN * abs(self.search.upper)

    def _note(self, stage: Stage) -> None:
        """Take over what the searches found."""
        search = self.search
        best = stage.pool.best
        if best is not None and stage.pool.cost < search.upper:
            self._offer(stage.expand(best))
        search.prove(min(stage.dual.bound, search.upper))
        if search.best is None and search.lower > self.ceiling:
            raise EmptyNodeError("prices")  # dearer than every assignment: none fits
        now = time.monotonic()
        if now - self.told > 1.0:
            self.told = now
            search.tell("large")

    def _offer(self, full: np.ndarray) -> None:
        """Check an assignment of the original nodes and keep it when it is better."""
        search, flat = self.search, self.original
        cost = flat.value(full)
        if not cost < search.upper:
            return
        if search.program.capacity is not None and len(flat.base) and int(flat.usage(full).max()) > flat.capacity:
            return
        search.best, search.upper = full[: len(search.program.nodes)].copy(), cost
        self.improved = self.told = time.monotonic()
        search.tell("large")

    def _finish_exactly(self, stage: Stage) -> None:
        """CP-SAT on the whole of what is left."""
        search, since = self.search, time.monotonic()
        options = CpOptions(search.deadline, search.options.seed, search.options.workers)
        answer = solve_exactly(stage.graph.flat, list(stage.dual.rows), search.upper, stage.pool.best, options)
        if answer.x is not None:
            self._offer(stage.expand(answer.x))
        search.report["rounding_error_seconds"] = max(search.rounding, answer.rounding)
        search.prove(min(answer.bound, search.upper))
        search.add_seconds("cp-sat", since)
        if answer.proved and search.best is None:
            raise EmptyNodeError("rows")
        if answer.interrupted:
            raise KeyboardInterrupt

"""Solves one instance of the contest on intra-operator parallelism (github.com/google/iopddl, ASPLOS 2025).

    python benchmarks/iopddl.py INSTANCE.json.gz --time-limit 60 --output solution.json

The instance becomes a ``Program``, the type that plans use (costs instead of seconds, any unit of memory), and goes
through ``program.solve``. The limit counts from the start of the process: Python, reading and compiling included. The
best solution so far, a JSON list with one strategy index per node, is replaced atomically whenever it improves; Ctrl-C
keeps it. Exit status: 0 with a solution, 1 without one, 2 proved infeasible, 3 the file is no instance (or the output
cannot be written).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import gzip
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
IMPOSSIBLE = 1e17  # the instances write 10**18 for choices that are impossible, and sums of such
MARGIN_SECONDS = 0.4  # to check, write and end
GRACE_SECONDS = 0.8  # after the limit, whatever is still running is cut off


def process_started() -> float:
    """Monotonic time at which this process began (where /proc tells it, else when this file was run)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return min(STARTED, time.monotonic() - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")))
    except (OSError, ValueError, IndexError):
        return STARTED


class NotAnInstanceError(Exception):
    """The file cannot be read as an instance; the text says what is wrong."""


def read_instance(path: Path) -> Any:
    """The program of an instance, ``.json`` or ``.json.gz``; NotAnInstanceError where it is none."""
    gc.disable()  # millions of small numbers and no cycles: the collector would only look at them again and again
    try:
        data = path.read_bytes()
        instance = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise NotAnInstanceError(f"cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise NotAnInstanceError(f"is no JSON: {error}") from error
    finally:
        gc.enable()
    check_instance(instance)
    return build_program(instance)


def check_instance(instance: Any) -> None:
    """Raises NotAnInstanceError unless ``instance`` has the parts of the contest's format, of sizes that agree."""

    def need(true: bool, rule: str) -> None:
        if not true:
            raise NotAnInstanceError(rule)

    problem = instance.get("problem") if isinstance(instance, dict) else None
    need(isinstance(problem, dict), 'has no object "problem"')
    nodes, edges = problem.get("nodes"), problem.get("edges")
    for name, table, keys in (("nodes", nodes, ("intervals", "costs", "usages")), ("edges", edges, ("nodes", "costs"))):
        need(isinstance(table, dict), f'has no object "problem.{name}"')
        for key in keys:
            rows = table.get(key)
            need(isinstance(rows, list) and all(isinstance(r, list) for r in rows), f"{name}.{key} is no list of lists")
            need(len(rows) == len(table[keys[0]]), f"{name}.{key} has {len(rows)} rows, not {len(table[keys[0]])}")
    sizes = [len(costs) for costs in nodes["costs"]]
    for v, (span, size, usages) in enumerate(zip(nodes["intervals"], sizes, nodes["usages"], strict=True)):
        need(size > 0, f"node {v} has no strategy")
        need(len(usages) == size, f"node {v} has {size} costs and {len(usages)} usages")
        need(len(span) in (0, 2) and all(map(_whole, span)), f"node {v} has the interval {span}, not [start, end)")
    for e, (ends, table) in enumerate(zip(edges["nodes"], edges["costs"], strict=True)):
        known = len(ends) == 2 and all(_whole(v) and 0 <= v < len(sizes) for v in ends)
        need(known, f"edge {e} joins {ends}, not two of {len(sizes)} nodes")
        size = sizes[ends[0]] * sizes[ends[1]]
        need(len(table) == size, f"edge {e} has a table of {len(table)} costs, not {size}")
    limit = problem.get("usage_limit")
    need(limit is None or _whole(limit), f"usage_limit is {limit!r}, no whole number")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def build_program(instance: dict[str, Any]) -> Any:
    """The program of an instance that has been parsed."""
    import numpy as np

    from autoshard_ilp.program.model import Edge, Lifetimes, Node, Program

    problem = instance["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    sizes = [len(c) for c in nodes["costs"]]
    start = list(itertools.accumulate(sizes, initial=0))
    place = list(itertools.accumulate((len(c) for c in edges["costs"]), initial=0))
    try:
        costs = np.fromiter(itertools.chain.from_iterable(nodes["costs"]), np.float64, start[-1])
        usages = np.fromiter(itertools.chain.from_iterable(nodes["usages"]), np.int64, start[-1])
        tables = np.fromiter(itertools.chain.from_iterable(edges["costs"]), np.float64, place[-1])
    except (TypeError, ValueError, OverflowError) as error:
        raise NotAnInstanceError(f"costs and usages are numbers: {error}") from error
    if np.isnan(costs).any() or np.isnan(tables).any():
        raise NotAnInstanceError("costs are numbers, and null or NaN is none")
    costs[costs >= IMPOSSIBLE] = np.inf
    tables[tables >= IMPOSSIBLE] = np.inf
    labels = {size: np.arange(size) for size in set(sizes)}
    joined = []
    for e, (i, j) in enumerate(edges["nodes"]):
        table = tables[place[e] : place[e + 1]].reshape(sizes[i], sizes[j])
        if i == j:
            costs[start[i] : start[i + 1]] += table.diagonal()
        else:
            joined.append(Edge(i, j, labels[sizes[i]], labels[sizes[j]], table))
    spans = [(v, *span) for v, span in enumerate(nodes["intervals"]) if len(span) == 2 and span[0] < span[1]]
    owner, begin, end = np.array(spans, np.int64).reshape(-1, 3).T
    decisions = [
        Node(str(v), costs[start[v] : start[v + 1]], usages[start[v] : start[v + 1]]) for v in range(len(sizes))
    ]
    lifetimes = Lifetimes(np.zeros(len(owner), bool), owner.copy(), begin.copy(), end.copy())
    return Program(tuple(decisions), tuple(joined), lifetimes, problem.get("usage_limit"))


class Output:
    """Writes the best solution and prints what is known; safe to call from several threads."""

    def __init__(self, path: Path | None, began: float) -> None:
        self.path, self.began = path, began
        self.lock = threading.Lock()
        self.cost, self.bound = float("inf"), float("-inf")
        self.choices: Any = None
        self.told = 0.0

    def seconds(self) -> float:
        """Since the process began."""
        return time.monotonic() - self.began

    def progress(self, news: dict[str, Any]) -> None:
        """Called by the solver."""
        self.bound = max(self.bound, news.get("lower_bound", self.bound))
        if news.get("choices") is not None and news["objective"] < self.cost:
            self.keep(news["choices"], news["objective"])
        if self.seconds() - self.told > 5.0:
            self.told = self.seconds()
            print(f"{self.told:7.1f} s  cost {self.cost:.0f}  bound {self.bound:.0f}", flush=True)

    def keep(self, choices: Any, cost: float) -> None:
        """Put a better solution in the place of the last one."""
        with self.lock:
            self.choices, self.cost = choices, cost
            if self.path is None:
                return
            folder = self.path.absolute().parent
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{self.path.name}.", delete=False) as file:
                json.dump([int(s) for s in choices], file)
            os.chmod(file.name, 0o644)
            os.replace(file.name, self.path)

    def summary(self, status: str) -> None:
        """The last lines."""
        gap = (self.cost - self.bound) / self.cost if 0 < self.cost < float("inf") else 0.0
        figures = f"{max(0.0, gap):.6%}" if self.choices is not None else "none"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
        print(f"status       {status}")
        print(f"cost         {self.cost:.0f}")
        print(f"lower bound  {min(self.bound, self.cost):.0f}")
        print(f"gap          {figures}")
        print(f"seconds      {self.seconds():.2f} in all, processor {time.process_time():.2f}, memory {memory:.2f} GB")
        sys.stdout.flush()


def cut_off(output: Output, at_seconds: float) -> None:
    """End the process when something does not return in time: what was found has been written."""

    def wait() -> None:
        time.sleep(max(0.0, at_seconds - output.seconds()))
        with output.lock:
            output.summary("feasible" if output.choices is not None else "no solution within the limit")
            os._exit(0 if output.choices is not None else 1)

    threading.Thread(target=wait, name="limit", daemon=True).start()
    # the same from a thread that needs no interpreter lock, should a long call into C hold it
    quiet = open(os.devnull, "w")  # noqa: SIM115  (stays open until the end)
    faulthandler.dump_traceback_later(max(0.1, at_seconds + 0.6 - output.seconds()), exit=True, file=quiet)


def load_solver() -> None:
    """Imports, while the instance is read."""
    from autoshard_ilp.program import solve  # noqa: F401


def compile_kernels(nodes: int) -> None:
    """What a program of that size needs first, which takes seconds on the first run: the limit counts it."""
    from autoshard_ilp.program.kernels.compiled import load_kernels
    from autoshard_ilp.program.large.route import LARGE_NODES

    if nodes < LARGE_NODES:
        load_kernels()
    else:
        from autoshard_ilp.program.large import solver  # noqa: F401


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("instance", type=Path, help="a .json or .json.gz of the contest")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds from the start of the process")
    parser.add_argument("--output", type=Path, help="where to write the list of strategy indices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="threads of CP-SAT (default: 8)")
    args = parser.parse_args(arguments)
    if not args.time_limit >= 0 or args.seed < 0 or (args.workers is not None and args.workers < 1):
        parser.error("--time-limit and --seed are at least 0, --workers at least 1")
    output = Output(args.output, process_started())
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    cut_off(output, args.time_limit + GRACE_SECONDS)
    loading = threading.Thread(target=load_solver, name="load", daemon=True)
    loading.start()
    try:
        if args.output is not None and not args.output.absolute().parent.is_dir():
            raise NotAnInstanceError(f"{args.output.parent} is no folder to write the solution to")
        program = read_instance(args.instance)
    except NotAnInstanceError as error:
        print(f"{args.instance}: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # without waiting for what is being loaded
    print(f"read         {args.instance.name}: {len(program.nodes)} nodes, {len(program.edges)} edges", end=", ")
    print(f"{output.seconds():.2f} s", flush=True)
    loading.join()
    compile_kernels(len(program.nodes))
    print(f"loaded       {output.seconds():.2f} s", flush=True)
    from autoshard_ilp.program.model import SolverOptions
    from autoshard_ilp.program.solve import solve

    left = max(0.1, args.time_limit - MARGIN_SECONDS - output.seconds())
    options = SolverOptions(time_limit=left, seed=args.seed, workers=args.workers)
    solution = solve(program, options, on_progress=output.progress)
    faulthandler.cancel_dump_traceback_later()
    if solution.choices is not None:
        cost, peak = program.cost(solution.choices), program.peak(solution.choices)
        assert cost < float("inf") and (program.capacity is None or peak <= program.capacity), "not a solution"
        output.keep(solution.choices, cost)
        output.bound = solution.lower_bound
        print(f"memory       {peak} of {program.capacity} at the peak")
    elif solution.status == "infeasible":
        print("infeasible   no choice of strategies keeps within the memory limit at finite cost")
    with output.lock:
        output.bound = max(output.bound, solution.lower_bound if solution.choices is not None else output.bound)
        output.summary(solution.status if solution.choices is not None else f"{solution.status}, no solution")
    return 0 if solution.choices is not None else 2 if solution.status == "infeasible" else 1


if __name__ == "__main__":
    sys.exit(main())

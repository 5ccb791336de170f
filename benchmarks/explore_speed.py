"""How long questions about a plan take: what if, explain, compare, pareto, search_mesh.

python benchmarks/explore_speed.py                 # every case, written to results/explore_speed-<date>.md
python benchmarks/explore_speed.py --only gpt2     # cases whose name contains "gpt2"
python benchmarks/explore_speed.py --smoke         # one tiny case, printed only
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from cases import CASES, SMOKE, Case
from common import Row, Timed, import_everything, machine, peak_process_bytes, table

EXPLORED = ("gpt2_small", "llama3_8b 4x4")
COLUMNS = {
    "case": "",
    "question": "",
    "wall s": ".1f",
    "processor s": ".1f",
    "answer": "",
    "process GB": ".2f",
}


def questions(plan: Any, case: Case, factory: Any, most_points: int) -> dict[str, Callable[[], Any]]:
    """Every question, by name. The kernel asked about is the largest that several layers have; ``most_points`` of a
    frontier are looked for."""
    import autoshard_ilp as autoshard

    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for leaf in plan.arguments:
        if leaf.role == "parameter" and len(leaf.shape) > 1:
            by_shape.setdefault(leaf.shape, []).append(leaf)
    kernel = max(by_shape.values(), key=lambda found: (len(found) > 1, found[0].shape))[0]
    size = len(kernel.shape)
    axis = next(iter(case.mesh))
    whole, other = (None,) * size, (axis, *(None,) * (size - 1))
    peak = plan.memory.peak_bytes
    options: dict[str, Any] = {"hardware": case.hardware, "progress": False, **case.options()}
    devices = 1
    for n in case.mesh.values():
        devices *= n

    def asked(**change: Any) -> Callable[[], Any]:
        return lambda: plan.what_if(progress=False, **change)

    return {
        "what_if()": asked(),
        "what_if(memory_budget=peak)": asked(memory_budget=peak),
        "what_if(memory_budget=peak - 5 %)": asked(memory_budget=int(0.95 * peak)),
        "what_if(memory_budget=peak + 5 %)": asked(memory_budget=int(1.05 * peak)),
        "what_if(pins=one kernel as it is)": asked(pins={f"^{kernel.path}$": plan.specs[kernel.path]}),
        f"what_if(pins=one kernel over {axis})": asked(pins={f"^{kernel.path}$": other}),
        "what_if(pins=one kernel whole)": asked(pins={f"^{kernel.path}$": whole}),
        "explain(one kernel)": lambda: plan.explain(kernel.path, progress=False),
        "compare(with FSDP)": lambda: plan.compare(
            autoshard.baseline(factory, case.mesh, "fsdp", solver=autoshard.SolverOptions(time_limit=60), **options)
        ),
        "pareto()": lambda: autoshard.pareto(factory, case.mesh, max_points=most_points, time_limit=300.0, **options),
        f"search_mesh(devices={devices})": lambda: autoshard.search_mesh(factory, devices, **options),
    }


def described(found: Any) -> str:
    """What came out, in few words."""
    if hasattr(found, "alternatives"):
        return f"{len(found.alternatives)} layouts, {sum(a.proof != 'bounded' for a in found.alternatives)} proved"
    if hasattr(found, "points"):
        return f"{len(found.points)} points, {sum(p.status == 'optimal' for p in found.points)} proved"
    if hasattr(found, "rows") and hasattr(found, "best"):
        best = found.best
        return f"{len(found.rows())} meshes" + ("" if best is None else f", best {best.mesh}, gap {best.gap:.2%}")
    if hasattr(found, "gap"):
        return f"{found.status}, gap {found.gap:.2%}, {found.cost.total_s * 1e3:.2f} ms"
    return "" if isinstance(found, subprocess.CompletedProcess) else type(found).__name__


def measure(name: str, time_limit: float) -> list[Row]:
    """Plans one case and asks every question about it, one after the other."""
    import_everything()
    import autoshard_ilp as autoshard
    from autoshard_ilp.program.kernels.compiled import load_kernels, load_windows

    load_kernels()
    load_windows()
    case = CASES[name]
    factory = case.factory()
    rows: list[Row] = []

    def timed(question: str, ask: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        try:
            found = ask()
            text = described(found)
        except autoshard.AutoshardError as error:
            found, text = None, f"{type(error).__name__}: {str(error)[:100]}"
        seconds = {"wall s": time.perf_counter() - wall, "processor s": time.process_time() - processor}
        rows.append({"case": name, "question": question, **seconds, "answer": text})
        rows[-1]["process GB"] = peak_process_bytes() / 1e9
        return found

    help_of_plan = [sys.executable, "-m", "autoshard_ilp", "plan", "--help"]
    timed("autoshard plan --help", lambda: subprocess.run(help_of_plan, capture_output=True, check=True))
    options: dict[str, Any] = {"hardware": case.hardware, "progress": False, **case.options()}
    solver = autoshard.SolverOptions(time_limit=time_limit)
    plan = timed("optimize()", lambda: autoshard.optimize(factory, case.mesh, solver=solver, **options))
    if plan is not None:
        for question, ask in questions(plan, case, factory, 2 if name in SMOKE else 40).items():
            timed(question, ask)
    return rows


def report(rows: list[Row], time_limit: float) -> str:
    """The result file."""
    return (
        f"# Questions about a plan\n\n{machine()}\n\nSeconds of wall clock and of processor time (all threads) in one "
        f"process per case, after the imports; the solver's time limit is {time_limit:g} s, that of a frontier 300 s. "
        f"GB (10**9): resident peak of the process so far.\n\n{table(rows, COLUMNS)}\n"
    )


if __name__ == "__main__":
    benchmark = Timed("explore_speed", __doc__, EXPLORED, SMOKE, measure, report, COLUMNS, lambda row: "wall s" in row)
    sys.exit(benchmark.main())

"""How long planning takes, stage by stage.

python benchmarks/plan_speed.py                 # every case, written to results/plan_speed-<date>.md
python benchmarks/plan_speed.py --only llama    # cases whose name contains "llama"
python benchmarks/plan_speed.py --smoke         # one tiny case, printed only
"""

from __future__ import annotations

import sys
import time

from cases import CASES, SMOKE, SPEED
from common import Row, Timed, import_everything, machine, peak_process_bytes, table

STAGES = ("trace", "graph", "strategies", "costs", "presolve", "solve", "proof")
COLUMNS = {
    "case": "",
    "mesh": "",
    "hardware": "",
    **{f"{stage} s": ".1f" for stage in STAGES},
    "total s": ".1f",
    "operations": "d",
    "nodes": "d",
    "status": "",
    "gap": ".2%",
    "predicted ms": ".3f",
    "planned GB": ".2f",
    "process GB": ".2f",
}


def measure(name: str, time_limit: float) -> list[Row]:
    """Plans one case and reads off the seconds of each stage."""
    import_everything()
    import autoshard_ilp as autoshard

    case = CASES[name]
    factory = case.factory()
    row = {"case": name, "mesh": case.mesh_text, "hardware": case.hardware}
    began = time.perf_counter()
    try:
        plan = autoshard.optimize(
            factory,
            case.mesh,
            hardware=case.hardware,
            solver=autoshard.SolverOptions(time_limit=time_limit),
            progress=False,
            **case.options(),
        )
    except autoshard.AutoshardError as error:
        return [
            {**row, "status": f"{type(error).__name__}: {str(error)[:160]}", "total s": time.perf_counter() - began}
        ]
    assert plan.trail is not None
    measured: Row = {
        **{f"{stage} s": plan.timings.get(stage, 0.0) for stage in STAGES},
        "total s": time.perf_counter() - began,
        "operations": len(plan.trail.graph.ops),
        "nodes": len(plan.trail.program.nodes),
        "status": plan.status,
        "gap": plan.gap,
        "predicted ms": plan.cost.total_s * 1e3,
        "planned GB": plan.memory.peak_bytes / 1e9,
        "process GB": peak_process_bytes() / 1e9,
    }
    return [{**row, **measured}]


def planned(row: Row) -> bool:
    """Whether a case ended with a plan."""
    return row.get("status") in ("optimal", "feasible")


def report(rows: list[Row], time_limit: float) -> str:
    """The result file."""
    return (
        f"# Planning speed\n\n{machine()}\n\nWhole training steps, mixed precision, AdamW. Seconds of wall clock in a "
        f"fresh process after the imports; the solver's time limit is {time_limit:g} s. Operations are those of the "
        "traced step; nodes those of the integer program once repeated layers are tied. GB (10**9): predicted peak per "
        f"device, and resident peak of the planning process.\n\n{table(rows, COLUMNS)}\n"
    )


if __name__ == "__main__":
    sys.exit(Timed("plan_speed", __doc__, SPEED, SMOKE, measure, report, COLUMNS, planned).main())

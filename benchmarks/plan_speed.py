"""How long planning takes, stage by stage.

python benchmarks/plan_speed.py                 # every case, written to results/plan_speed-<date>.md
python benchmarks/plan_speed.py --only llama    # cases whose name contains "llama"
python benchmarks/plan_speed.py --smoke         # one tiny case, printed only
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from cases import CASES, SMOKE, SPEED
from common import (
    answer,
    driver_parser,
    import_everything,
    in_own_process,
    machine,
    matching,
    peak_process_bytes,
    result_file,
    table,
)

STAGES = ("trace", "graph", "strategies", "costs", "presolve", "solve")
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


def measure(name: str, time_limit: float) -> dict[str, Any]:
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
        return {**row, "status": f"{type(error).__name__}: {str(error)[:160]}", "total s": time.perf_counter() - began}
    assert plan.trail is not None
    return {
        **row,
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


def report(rows: list[dict[str, Any]], time_limit: float) -> str:
    """The result file."""
    return (
        f"# Planning speed\n\n{machine()}\n\nWhole training steps, mixed precision, AdamW. Seconds of wall clock in a "
        f"fresh process after the imports; the solver's time limit is {time_limit:g} s. Operations are those of the "
        "traced step; nodes those of the integer program once repeated layers are tied. GB (10**9): predicted peak per "
        f"device, and resident peak of the planning process.\n\n{table(rows, COLUMNS)}\n"
    )


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver")
    parser.add_argument("--output", type=Path, help="file to write; partial runs are only printed without it")
    options = parser.parse_args()
    if options.case:
        answer(options.answer, [measure(options.case, options.time_limit)])
        return 0
    output = options.output or (None if options.smoke or options.only else result_file("plan_speed"))
    rows: list[dict[str, Any]] = []
    names = list(SMOKE) if options.smoke else matching(SPEED, options.only)
    for name in names:
        rows += in_own_process(__file__, name, ["--time-limit", str(options.time_limit)])
        print(table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
        if output:
            output.write_text(report(rows, options.time_limit))
    if not output:
        print(report(rows, options.time_limit))
    return 0 if all(row.get("status") in ("optimal", "feasible") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

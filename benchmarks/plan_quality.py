"""The optimum against the strategies people use by hand, predicted and, on request, compiled.

python benchmarks/plan_quality.py                          # predictions, written to results/plan_quality-<date>.md
python benchmarks/plan_quality.py --compile h100:8         # also compile every plan, for that target's cases
python benchmarks/plan_quality.py --only llama --smoke     # see --help
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from cases import CASES, QUALITY, SMOKE
from common import answer, driver_parser, import_everything, in_own_process, machine, matching, result_file, table
from propagation import Propagated

PROPAGATED = ("fsdp", "megatron")
"""Baselines that are also compiled with shardings on arguments and results only ("fsdp-u": unconstrained inside)."""

PREDICTED = {
    "plan": "",
    "status": "",
    "predicted ms": ".3f",
    "x optimum": ".2f",
    "compute ms": ".3f",
    "communication ms": ".3f",
    "sent MB": ".1f",
    "peak GB": ".2f",
    "gap": ".2%",
    "solve s": ".1f",
}
COMPILED = {
    "compiled ms": ".3f",
    "x plan": ".2f",
    "compiled sent MB": ".1f",
    "compiled communication ms": ".3f",
    "compiled peak GB": ".2f",
    "compile s": ".1f",
}


def measure(name: str, time_limit: float, target: str | None) -> list[dict[str, Any]]:
    """Plans one case by the optimum and by every baseline, from one trace."""
    import_everything()
    import autoshard_ilp as autoshard
    from autoshard_ilp import baselines
    from autoshard_ilp.planning import plan_step
    from autoshard_ilp.progress import Progress
    from autoshard_ilp.request import check_request
    from autoshard_ilp.step import trace_step

    case = CASES[name]
    solver = autoshard.SolverOptions(time_limit=time_limit)
    request = check_request(case.mesh, None, case.hardware, None, "step_time", solver)
    step, traced = trace_step(case.factory(), request.mesh, **case.options())
    rows: list[dict[str, Any]] = []
    best = None
    for kind in ("optimize", *baselines.BASELINES):
        row: dict[str, Any] = {"case": name, "plan": kind}
        rows.append(row)
        try:
            if kind == "optimize":
                shown = Progress(False)
                plan = plan_step(step, traced, request, shown, mode="train", batch_size=traced.batch_size)
                best = plan.cost.total_s
            else:
                plan = baselines.plan_baseline(traced, request, kind, Progress(False))
        except autoshard.InfeasibleError as error:
            needs = "" if error.minimum_budget is None else f", needs {error.minimum_budget / 1e9:.1f} GB"
            row["status"] = f"does not fit{needs}"
            continue
        except autoshard.UnsupportedModelError:
            row["status"] = "no layout map"
            continue
        row |= _predicted(plan)
        if best:
            row["x optimum"] = plan.cost.total_s / best
        if target:
            row |= _compiled(plan, plan.verify, target)
            if kind in PROPAGATED:
                bare = Propagated(plan)
                rows.append({"case": name, "plan": f"{kind}-u", **_compiled(plan, bare.verify, target)})
    return _against_plan(rows)


def _against_plan(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds how much longer than the plan every row's compiled program takes."""
    own = rows[0].get("compiled ms")
    return [{**row, "x plan": row["compiled ms"] / own} if own and row.get("compiled ms") else row for row in rows]


def geometric_mean(rows: list[dict[str, Any]]) -> float | None:
    """Over all cases, the best compiled baseline's time over the plan's."""
    ratios = []
    for name in dict.fromkeys(row["case"] for row in rows):
        others = [r["x plan"] for r in rows if r["case"] == name and r.get("plan") != "optimize" and r.get("x plan")]
        ratios += [min(others)] if others else []
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _predicted(plan: Any) -> dict[str, Any]:
    return {
        "status": plan.status,
        "predicted ms": plan.cost.total_s * 1e3,
        "compute ms": plan.cost.compute_s * 1e3,
        "communication ms": plan.cost.communication_s * 1e3,
        "sent MB": sum(c.bytes_per_device * c.count for c in plan.collectives) / 1e6,
        "peak GB": plan.memory.peak_bytes / 1e9,
        "gap": plan.gap,
        "solve s": plan.timings.get("presolve", 0.0) + plan.timings.get("solve", 0.0),
    }


def _compiled(plan: Any, verify: Any, target: str) -> dict[str, Any]:
    """What the target's compiler makes of a plan; a compilation that fails is told in the status."""
    try:
        found = verify(target)
    except Exception as error:
        return {"status": f"not compiled: {type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    seconds = found.compiled_communication_seconds
    share = found.compiled_flops / plan.cost.flops if found.compiled_flops and plan.cost.flops else 1.0
    return {
        "compiled ms": None if seconds is None else (seconds + share * plan.cost.compute_s) * 1e3,
        "compiled sent MB": found.compiled_bytes_per_device / 1e6,
        "compiled communication ms": None if seconds is None else seconds * 1e3,
        "compiled peak GB": None if found.compiled_peak_bytes is None else found.compiled_peak_bytes / 1e9,
        "compile s": found.compile_seconds,
    }


def report(rows: list[dict[str, Any]], target: str | None) -> str:
    """The result file: one table per case."""
    columns = {**PREDICTED, **(COMPILED if target else {})}
    compiled = ""
    if target:
        mean = geometric_mean(rows)
        compiled = (
            f" Compiled columns: every plan compiled for {target} without the hardware; compiled ms are its "
            "collectives under the profile and the predicted compute, scaled by the matmul FLOP really compiled; -u: "
            "shardings on arguments and results only, the interior left to XLA. Geometric mean of the best baseline "
            "over the plan: "
            f"{'unknown' if mean is None else format(mean, '.3f')}."
        )
    parts = [
        f"# Plan quality\n\n{machine()}\n\nTraining steps on a mesh data=2, model=4, under the profile's usable "
        "memory. A baseline is the best plan of its kind under the same cost model (see "
        "`src/autoshard_ilp/baselines.py`); `x optimum` is its predicted time over the optimal one. Sent: "
        f"ring bytes per device and step. GB and MB are powers of ten.{compiled}"
    ]
    for name in dict.fromkeys(row["case"] for row in rows):
        case = CASES[name]
        size = f"global batch {case.batch_size}" + (f" x {case.sequence_length}" if case.sequence_length else "")
        own = [{"plan": "", **row} for row in rows if row["case"] == name]
        parts.append(f"## {name}\n\n{size}\n\n{table(own, columns)}")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--compile", metavar="TARGET", help='compile the plans of this target\'s cases, e.g. "h100:8"')
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver, per plan")
    parser.add_argument("--output", type=Path, help="file to write; partial runs are only printed without it")
    options = parser.parse_args()
    if options.case:
        answer(options.answer, measure(options.case, options.time_limit, options.compile))
        return 0
    names = list(SMOKE) if options.smoke else matching(QUALITY, options.only)
    extra = ["--time-limit", str(options.time_limit)]
    if options.compile:
        chip = options.compile.partition(":")[0]
        names = [name for name in names if CASES[name].hardware == chip]
        extra += ["--compile", options.compile]
    suffix = f"-{options.compile.replace(':', '-')}" if options.compile else ""
    whole = not options.smoke and not options.only
    output = options.output or (result_file(f"plan_quality{suffix}") if whole else None)
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += in_own_process(__file__, name, extra)
        print(f"{name}: {rows[-1].get('status')}", file=sys.stderr, flush=True)
        if output:
            output.write_text(report(rows, options.compile))
    if not output:
        print(report(rows, options.compile))
    return 0 if rows and not any(str(row.get("status", "")).startswith("failed") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How well plans agree with the compilers: bytes sent, memory, FLOP; predicted against compiled, over the zoo.

python benchmarks/fidelity.py                          # every case that has no result yet
python benchmarks/fidelity.py --only h100:8,predict    # cases whose name contains all of these texts
python benchmarks/fidelity.py --report                 # only write the tables again

Each case is planned and compiled in its own process. Results are appended to ``results/fidelity.jsonl`` as they come,
so that a run may be stopped and started again; ``--again`` repeats cases that have one. The tables are in
``results/fidelity.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import REDUCED, Case
from common import RESULTS, answer, commit, import_everything, in_own_process, machine, table

MODELS = {**REDUCED, "mixtral_8x7b": ("hub:mixtral_8x7b?layers=1", 8, 512)}
"""Name -> factory, global batch, sequence length."""

TARGETS: dict[str, dict[str, int]] = {
    "h100:8": {"data": 2, "model": 4},
    "tpu-v5e:2x4": {"data": 2, "model": 4},
    "tpu-v5e:4x4": {"data": 4, "model": 4},
    "tpu-v5p:2x2x2": {"data": 2, "model": 4},
}
BUDGETS = ("loose", "tight")
TIGHT_SHARES = (0.75, 0.85, 0.95)
"""A tight budget is the first of these shares of the loose plan's peak for which a plan is found in the time limit, or
the smallest budget that fits, where that is known."""

STORE = RESULTS / "fidelity.jsonl"
COLUMNS = {
    "case": "",
    "status": "",
    "predicted MB": ".1f",
    "compiled MB": ".1f",
    "bytes ratio": ".3f",
    "unplanned": ".2%",
    "peak ratio": ".2f",
    "FLOP ratio": ".3f",
    "largest difference": "",
    "commit": "",
}


def case_names() -> list[str]:
    """Every case, "model / target / mode / budget", quick targets first."""
    return [
        f"{model} / {target} / {mode} / {budget}"
        for target in TARGETS
        for model in MODELS
        for mode in ("train", "predict")
        for budget in BUDGETS
    ]


def measure(name: str, time_limit: float) -> list[dict[str, Any]]:
    """Plans and compiles one case."""
    import_everything()
    import autoshard_ilp as autoshard

    model, target, mode, budget = name.split(" / ")
    factory, batch, length = MODELS[model]
    case = Case(factory, TARGETS[target], target, batch, length)
    options: dict[str, Any] = {
        **case.options(),
        "mode": mode,
        "hardware": target if target.startswith("tpu") else target.partition(":")[0],
        "progress": False,
        "solver": autoshard.SolverOptions(time_limit=time_limit),
    }
    plan = autoshard.optimize(case.factory(), case.mesh, **options)
    if budget == "tight":
        plan = tight(lambda b: autoshard.optimize(case.factory(), case.mesh, b, **options), plan.memory.peak_bytes)
    began = time.perf_counter()
    found = plan.verify(target)
    seconds = round(time.perf_counter() - began, 1)
    return [{"case": name, **row_of(plan, found), "seconds": seconds, "commit": commit()}]


def tight(planned: Callable[[int], Any], peak_bytes: int) -> Any:
    """The plan of a case under a tight budget; ``planned`` plans under the bytes it is given."""
    import autoshard_ilp as autoshard

    for share in TIGHT_SHARES:
        try:
            return planned(round(share * peak_bytes))
        except autoshard.InfeasibleError as error:
            if error.minimum_budget is not None:
                return planned(math.ceil(error.minimum_budget * 1.02))
            if share == TIGHT_SHARES[-1]:
                raise
    raise AssertionError


def row_of(plan: Any, found: Any) -> dict[str, Any]:
    """What one verification tells, as plain data."""
    return {
        "status": plan.status,
        "remat": plan.remat_policy,
        "budget_bytes": plan.memory.budget_bytes,
        "predicted_bytes": found.predicted_bytes_per_device,
        "compiled_bytes": found.compiled_bytes_per_device,
        "unplanned_bytes": found.unplanned_bytes_per_device,
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "compiled_peak_bytes": found.compiled_peak_bytes,
        "predicted_flops": found.predicted_flops,
        "compiled_flops": found.compiled_flops,
        "predicted_seconds": found.predicted_communication_seconds,
        "compiled_seconds": found.compiled_communication_seconds,
        "rows": found.rows(),
        "differences": [vars(d) for d in found.differences[:12]],
    }


def stored() -> dict[str, dict[str, Any]]:
    """The last result of every case."""
    lines = STORE.read_text().splitlines() if STORE.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {row["case"]: row for row in rows}


def _ratio(row: dict[str, Any], compiled: str, predicted: str) -> float | None:
    if row.get(predicted) is None or row.get(compiled) is None:
        return None
    if not row[predicted]:
        return 1.0 if not row[compiled] else math.inf
    return row[compiled] / row[predicted]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the report."""
    if "compiled_bytes" not in row:
        return row
    largest = max(row["predicted_bytes"], row["compiled_bytes"], 1)
    first = next(iter(row["differences"]), None)
    named = ""
    if first is not None and first["bytes_per_device"] > 0.005 * largest:
        share = first["bytes_per_device"] / largest
        named = f"{first['status']} {first['kind']} {share:.1%}: {first['tensor']} {first['layer']}"
    return {
        **row,
        "predicted MB": row["predicted_bytes"] / 1e6,
        "compiled MB": row["compiled_bytes"] / 1e6,
        "bytes ratio": _ratio(row, "compiled_bytes", "predicted_bytes"),
        "unplanned": row["unplanned_bytes"] / largest,
        "peak ratio": _ratio(row, "compiled_peak_bytes", "predicted_peak_bytes"),
        "FLOP ratio": _ratio(row, "compiled_flops", "predicted_flops"),
        "largest difference": named,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per target: how many cases agree how well."""
    lines = []
    for target in (*TARGETS, "all"):
        mine = [r for r in rows if "bytes ratio" in r and (target == "all" or f" / {target} / " in r["case"])]
        if not mine:
            continue

        def share(holds: Any, mine: list[dict[str, Any]] = mine) -> float:
            return sum(map(bool, map(holds, mine))) / len(mine)

        lines.append(
            {
                "target": target,
                "cases": len(mine),
                "bytes within 5 %": share(lambda r: abs(r["bytes ratio"] - 1) <= 0.05),
                "bytes within 15 %": share(lambda r: abs(r["bytes ratio"] - 1) <= 0.15),
                "unplanned below 1 %": share(lambda r: r["unplanned"] < 0.01),
                "peak within 10 %": share(lambda r: abs((r["peak ratio"] or 0) - 1) <= 0.10),
                "peak not under by 5 %": share(lambda r: (r["peak ratio"] or 0) <= 1.05),
                "fits its budget": share(lambda r: (r["compiled_peak_bytes"] or 0) <= (r["budget_bytes"] or math.inf)),
            }
        )
    return lines


def report() -> str:
    """The result file."""
    found = stored()
    rows = [shown(found[name]) for name in case_names() if name in found]
    columns = {"target": "", "cases": "d"} | dict.fromkeys(
        (
            *("bytes within 5 %", "bytes within 15 %", "unplanned below 1 %"),
            *("peak within 10 %", "peak not under by 5 %", "fits its budget"),
        ),
        ".0%",
    )
    return (
        f"# Fidelity\n\n{machine()}\n\nPlans compiled for their target without the hardware. Ratios are compiled over "
        "predicted: ring bytes sent per device and step, peak memory, matmul FLOP. Unplanned: bytes of collectives "
        "that no prediction accounts for, as a share of the step's. A tight budget is "
        f"{TIGHT_SHARES[0]:.0%} of the loose plan's peak, or the smallest for which a plan was found.\n\n"
        f"{table(summary(rows), columns)}\n\n{table(rows, COLUMNS)}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains all of these texts, with commas")
    parser.add_argument("--again", action="store_true", help="also cases that have a result")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver, per plan")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        answer(options.answer, measure(options.case, options.time_limit))
        return 0
    known = stored()
    wanted = [name for name in case_names() if all(text in name for text in options.only.split(","))]
    for name in [] if options.report else wanted:
        if name in known and not options.again:
            continue
        rows = in_own_process(__file__, name, ["--time-limit", str(options.time_limit)])
        RESULTS.mkdir(exist_ok=True)
        with STORE.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        (RESULTS / "fidelity.md").write_text(report())
        line = shown(rows[0])
        print(f"{name}: {line['status']}, bytes ratio {line.get('bytes ratio')}", file=sys.stderr, flush=True)
    (RESULTS / "fidelity.md").write_text(report())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

"""The report of ``plan_quality.py``: a table per case and budget, who is best, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cases import CASES
from common import Row, machine, table

WORSE = 0.02
"""A plan that takes so much longer than the best baseline that fits is a bug to be found."""

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
VERDICTS = {
    "case": "",
    "budget GB": ".2f",
    "plan, compiled ms": ".3f",
    "best of the others": "",
    "its compiled ms": ".3f",
    "best / plan": ".3f",
    "remark": "",
}


def groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by case and budget, each beside how much longer than the plan it takes."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["budget"]), []).append(dict(row))
    for own in found.values():
        plan = next((row for row in own if row["plan"] == "optimize"), {})
        for row in own:
            for key, text in (("predicted ms", "x optimum"), ("compiled ms", "x plan")):
                if row.get(key) and plan.get(key):
                    row[text] = row[key] / plan[key]
    return found


def fits(row: Row) -> bool:
    """Whether what was compiled stays within the budget."""
    peak, budget = row.get("compiled peak GB"), row.get("budget_bytes")
    return peak is None or budget is None or peak * 1e9 <= budget


def verdicts(rows: Iterable[Row]) -> list[Row]:
    """Per case and budget: the plan against the best of the others that fits, as compiled."""
    found = []
    for (case, budget), own in groups(rows).items():
        plan = next((row for row in own if row["plan"] == "optimize"), {})
        others = [row for row in own if row["plan"] != "optimize" and row.get("x plan") and fits(row)]
        if not plan.get("compiled ms"):
            continue
        best = min(others, key=lambda row: row["x plan"], default={})
        remarks = [] if fits(plan) else ["the plan, compiled, exceeds its budget"]
        if not best:
            remarks.append("nothing else fits")
        elif best["x plan"] < 1 / (1 + WORSE):
            remarks.append("WORSE")
        found.append(
            {
                "case": f"{case}, {budget}",
                "budget GB": plan["budget_bytes"] / 1e9,
                "plan, compiled ms": plan["compiled ms"],
                "best of the others": best.get("plan", ""),
                "its compiled ms": best.get("compiled ms"),
                "best / plan": best.get("x plan"),
                "remark": "; ".join(remarks),
            }
        )
    return found


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def report(rows: list[Row], target: str | None) -> str:
    """The result file."""
    found = dict.fromkeys(tuple(CASES[row["case"]].mesh.items()) for row in rows if row["case"] in CASES)
    meshes = " and ".join("a mesh " + ", ".join(f"{name}={size}" for name, size in mesh) for mesh in found)
    versions = ", ".join(sorted({row["jax"] for row in rows if row.get("jax")}))
    parts = [
        f"# Plan quality\n\n{machine()}\n\nTraining steps on {meshes}; jax {versions}. Loose: under the "
        "profile's usable memory; tight: under three quarters of the peak of the plan for that, or the first larger "
        "share, up to the smallest budget that is known to do, for which there is a plan. A baseline is the best plan "
        "of its kind under the same cost model (see `src/autoshard_ilp/baselines.py`; `keras_hub`: the layout map that "
        "is shipped, with the best interior); `x optimum` is its predicted time over the plan's. Sent: ring bytes per "
        "device and step. GB and MB are powers of ten."
    ]
    if target:
        parts.append(_compiled_part(rows, target))
    columns = {**PREDICTED, **(COMPILED if target else {})}
    for (name, budget), own in groups(rows).items():
        case = CASES[name]
        size = f"global batch {case.batch_size}" + (f" x {case.sequence_length}" if case.sequence_length else "")
        parts.append(f"## {name}, {budget}\n\n{size}\n\n{table(own, columns)}")
    return "\n\n".join(parts) + "\n"


def _compiled_part(rows: list[Row], target: str) -> str:
    found = verdicts(rows)
    ratios = [row["best / plan"] for row in found if row["best / plan"]]
    mean = geometric_mean(ratios)
    worse = sum("WORSE" in row["remark"] for row in found)
    told = (
        "nothing could be compared."
        if mean is None
        else f"{mean:.3f}, over {len(ratios)} cases with another that fits; the plan is worse than the best of them by "
        f"more than {WORSE:.0%} in {worse}."
    )
    return (
        f"Compiled columns: every plan compiled for {target} without the hardware; compiled ms are its collectives "
        "under the profile and the predicted compute, with the difference of the matmul FLOP at full rate; -u: "
        "shardings on arguments and results only, the interior left to XLA (`keras_hub-u`: the layout map as shipped, "
        "as Keras runs it). What compiles to more than the budget does not fit.\n\n"
        "Geometric mean of the best of the others over the plan: "
        f"{told}\n\n{table(found, VERDICTS)}"
    )

"""The optimum against the strategies people use by hand, predicted and, on request, compiled.

python benchmarks/plan_quality.py                          # predictions, written to results/plan_quality-<date>.md
python benchmarks/plan_quality.py --compile h100:8         # also compile every plan, for that target's cases
python benchmarks/plan_quality.py --compile h100:8 --jobs 8 --workers 2    # eight plans at a time on 16 cores
python benchmarks/plan_quality.py --only llama --smoke     # see --help

Every plan is made, and compiled, in a process of its own. Rows are appended to ``results/plan_quality*.jsonl`` as they
come, so that a run may be stopped and started again; ``--again`` repeats what has a row.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import CASES, QUALITY, SMOKE
from common import RESULTS, Row, answer, commit, driver_parser, import_everything, in_own_process, matching, result_file
from fidelity import tight
from propagation import Propagated
from quality_report import report

PROPAGATED = ("fsdp", "megatron", "keras_hub")
"""Baselines that are also compiled with shardings on arguments and results only ("fsdp-u": unconstrained inside)."""

BUDGETS = ("loose", "tight")
KINDS = ("optimize", "data_parallel", "fsdp", "zero1", "megatron", "fsdp+megatron", "keras_hub")


@dataclass(frozen=True)
class Job:
    """Plans of one case under one budget, to be made in one process.

    Attributes:
        case, budget: of ``CASES`` and ``BUDGETS``.
        kinds: of plans.
        budget_bytes: per device; None: the profile's usable memory, or, of a tight optimum, still to be found.
        peak_bytes: of the optimum under the loose budget, from which a tight one is found.
    """

    case: str
    budget: str
    kinds: tuple[str, ...]
    budget_bytes: int | None = None
    peak_bytes: int | None = None


def measure(job: Job, time_limit: float, workers: int | None, target: str | None) -> list[Row]:
    """The rows of a job, all from one trace."""
    import_everything()
    import jax

    import autoshard_ilp as autoshard
    from autoshard_ilp import baselines
    from autoshard_ilp.graph.step import trace
    from autoshard_ilp.planning import plan_traced
    from autoshard_ilp.progress import Progress
    from autoshard_ilp.request import check_request, remat_policies

    case = CASES[job.case]
    solver = autoshard.SolverOptions(time_limit=time_limit, workers=workers)
    policies = remat_policies("auto", "train")

    def under(budget_bytes: int | None) -> Any:
        return check_request(case.mesh, budget_bytes, case.hardware, None, "step_time", solver)

    def optimum(budget_bytes: int | None) -> Any:
        return plan_traced(traced, under(budget_bytes), Progress(False), policies)

    traced = trace(case.factory(), under(None).mesh, **case.options())
    rows: list[Row] = []
    for kind in job.kinds:
        row: Row = {"case": job.case, "budget": job.budget, "plan": kind, "commit": commit(), "jax": jax.__version__}
        rows.append(row)
        try:
            if kind != "optimize":
                request = under(job.budget_bytes)
                plan = baselines.plan_baseline(traced, request, kind, Progress(False), policies)
            elif job.peak_bytes is not None:
                plan = tight(optimum, job.peak_bytes)
            else:
                plan = optimum(job.budget_bytes)
        except autoshard.InfeasibleError as error:
            needs = "" if error.minimum_budget is None else f", needs {error.minimum_budget / 1e9:.2f} GB"
            row["status"] = f"does not fit{needs}"
            continue
        except autoshard.UnsupportedModelError:
            row["status"] = "no layout map"
            continue
        row |= _predicted(plan)
        if target:
            row |= _compiled(plan, plan.verify, target)
            if kind in PROPAGATED:
                bare = {key: row[key] for key in ("case", "budget", "commit", "jax", "budget_bytes")}
                rows.append({**bare, "plan": f"{kind}-u", **_compiled(plan, Propagated(plan).verify, target)})
    return rows


def _predicted(plan: Any) -> dict[str, Any]:
    return {
        "status": plan.status if plan.remat_policy == "never" else f"{plan.status}, remat {plan.remat_policy}",
        "budget_bytes": plan.memory.budget_bytes,
        "predicted ms": plan.cost.total_s * 1e3,
        "compute ms": plan.cost.compute_s * 1e3,
        "communication ms": plan.cost.communication_s * 1e3,
        "sent MB": sum(c.bytes_per_device * c.count for c in plan.collectives) / 1e6,
        "peak_bytes": plan.memory.peak_bytes,
        "peak GB": plan.memory.peak_bytes / 1e9,
        "gap": plan.gap,
        "solve s": plan.timings.get("presolve", 0.0) + plan.timings.get("solve", 0.0),
    }


def _compiled(plan: Any, verify: Any, target: str) -> Row:
    """What the target's compiler makes of a plan; a compilation that fails is told in the status.

    Its seconds are those of its collectives under the profile, and the predicted compute with the difference of the
    matmul FLOP at full rate: what else is computed follows from the layouts of the state and of the batch.
    """
    try:
        found = verify(target)
    except Exception as error:
        return {"status": f"not compiled: {type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    seconds = found.compiled_communication_seconds
    more = found.compiled_flops - plan.cost.flops if found.compiled_flops else 0.0
    compute_s = plan.cost.compute_s + more / plan.trail.request.profile.peak_flops_per_s(_product_dtype(plan))
    return {
        "compiled ms": None if seconds is None else (seconds + compute_s) * 1e3,
        "compiled TFLOP": (found.compiled_flops or 0.0) / 1e12,
        "compiled sent MB": found.compiled_bytes_per_device / 1e6,
        "compiled communication ms": None if seconds is None else seconds * 1e3,
        "compiled peak GB": None if found.compiled_peak_bytes is None else found.compiled_peak_bytes / 1e9,
        "compile s": found.compile_seconds,
    }


def _product_dtype(plan: Any) -> str:
    """Of the operands of the largest product."""
    graph = plan.trail.graph

    def operations(op: Any) -> float:  # (m k) (k n) (m n) grows with m k n
        return math.prod(float(math.prod(graph.tensors[t].shape)) for t in (*op.inputs[:2], op.outputs[0]))

    products = [op for op in graph.ops if op.primitive in ("dot_general", "conv_general_dilated")]
    return graph.tensors[max(products, key=operations).inputs[0]].dtype if products else "float32"


def possible(case: str, budgets: Sequence[str], done: Mapping[tuple[str, str, str], Row]) -> Iterator[Job]:
    """All jobs of a case that can begin: a tight budget needs the loose optimum, its baselines need the budget."""
    first, *others = KINDS
    yield from (Job(case, "loose", (kind,)) for kind in KINDS)
    loose, least = (done.get((case, budget, first), {}) for budget in BUDGETS)
    if "tight" in budgets and loose.get("peak_bytes"):
        yield Job(case, "tight", (first,), peak_bytes=loose["peak_bytes"])
    if least.get("budget_bytes"):
        yield from (Job(case, "tight", (kind,), budget_bytes=least["budget_bytes"]) for kind in others)


def run(
    cases: Sequence[str], budgets: Sequence[str], done: dict[tuple[str, str, str], Row], extra: Sequence[str], jobs: int
) -> Iterator[list[Row]]:
    """Rows as they come, by as many processes as ``jobs``; what is ``done`` is not repeated, and grows."""
    running: dict[Future[list[Row]], Job] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            left = (job for case in cases for job in possible(case, budgets, done) if not _keys(job) & {*done})
            for job in left:
                if len(running) < jobs and job not in running.values():
                    running[pool.submit(_in_own_process, job, extra)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                rows = future.result()
                done |= {_key(row): row for row in rows}
                yield rows


def _keys(job: Job) -> set[tuple[str, str, str]]:
    return {(job.case, job.budget, kind) for kind in job.kinds}


def _key(row: Row) -> tuple[str, str, str]:
    return row["case"], row["budget"], row["plan"]


def _in_own_process(job: Job, extra: Sequence[str]) -> list[Row]:
    found = in_own_process(__file__, json.dumps(vars(job)), extra)
    if "plan" in found[0]:
        return found
    return [{**found[0], "case": job.case, "budget": job.budget, "plan": kind} for kind in job.kinds]  # it failed


def stored(path: Path) -> dict[tuple[str, str, str], Row]:
    """The last row of every plan."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {_key(row): row for row in rows if not str(row.get("status", "")).startswith("failed")}


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--compile", metavar="TARGET", help='compile the plans of this target\'s cases, e.g. "h100:8"')
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver, per plan")
    parser.add_argument("--workers", type=int, help="threads of the solver; default: its own")
    parser.add_argument("--budgets", default=",".join(BUDGETS), help='"loose", or "loose,tight"')
    parser.add_argument("--jobs", type=int, default=1, help="plans that are made at the same time")
    parser.add_argument("--again", action="store_true", help="also plans that have a row")
    parser.add_argument("--output", type=Path, help="file to write; its rows lie beside it")
    options = parser.parse_args()
    if options.case:
        job = Job(**{**(given := json.loads(options.case)), "kinds": tuple(given["kinds"])})
        answer(options.answer, measure(job, options.time_limit, options.workers, options.compile))
        return 0
    names = matching(QUALITY, options.only)
    extra = ["--time-limit", str(options.time_limit)]
    extra += ["--workers", str(options.workers)] if options.workers else []
    if options.compile:
        names = [name for name in names if CASES[name].on(options.compile)]
        extra += ["--compile", options.compile]
    if options.smoke:
        rows = _in_own_process(Job(next(iter(SMOKE)), "loose", KINDS), extra)
        print(report(rows, options.compile))
        return int(any(_failed(row) for row in rows))
    suffix = f"-{options.compile.replace(':', '-')}" if options.compile else ""
    store = options.output.with_suffix(".jsonl") if options.output else RESULTS / f"plan_quality{suffix}.jsonl"
    output = options.output or result_file(f"plan_quality{suffix}")
    done = stored(store)
    if options.again:
        done = {key: row for key, row in done.items() if key[0] not in names}
    for rows in run(names, options.budgets.split(","), done, extra, options.jobs):
        with store.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        output.write_text(report(in_order(done), options.compile))
        for row in rows:
            print(*_key(row), row.get("status"), row.get("compiled ms"), sep=" | ", file=sys.stderr, flush=True)
    output.write_text(report(in_order(done), options.compile))
    return int(any(_failed(row) for row in done.values()))


def in_order(done: Mapping[tuple[str, str, str], Row]) -> list[Row]:
    """Rows as the report has them: by case, budget and kind."""

    def place(row: Row) -> tuple[int, int, int, str]:
        kind = row["plan"].removesuffix("-u")
        return list(CASES).index(row["case"]), BUDGETS.index(row["budget"]), KINDS.index(kind), row["plan"]

    return sorted((row for row in done.values() if row["case"] in CASES), key=place)


def _failed(row: Row) -> bool:
    return str(row.get("status", "")).startswith("failed")


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured seconds of whole steps on one attached accelerator: the compute side of a profile.

python benchmarks/measured_single_device.py                   # on the attached device, writes results/
python benchmarks/measured_single_device.py --predict FILE    # measured before: compares with today's predictions
python benchmarks/measured_single_device.py --smoke           # one tiny model, printed only; a CPU will do

Cases plan and trace beside each other, and take turns on the device. What was measured is kept as JSON beside the
report, so that predictions can be made again where the device is not.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import more_models
from common import answer, driver_parser, import_everything, in_own_process, machine, matching, result_file, table

MESH = {"device": 1}
WARM_SECONDS, TIMED_SECONDS, MIN_STEPS, MAX_STEPS = 0.5, 2.0, 5, 100
COLUMNS = {
    "case": "",
    "predicted ms": ".2f",
    "predicted before ms": ".2f",
    "measured ms": ".2f",
    "spread": ".1%",
    "measured / predicted": ".2f",
    "TFLOP": ".2f",
    "TFLOP/s": ".0f",
    "recomputes": "",
    "budget GB": ".2f",
    "predicted peak GB": ".2f",
    "compiled peak GB": ".2f",
    "used GB": ".2f",
}


@dataclass(frozen=True)
class Step:
    """A step to be run: a model (see ``cases.Case``), its batch and what is done with it."""

    model: str
    batch_size: int
    sequence_length: int | None = None
    mode: str = "train"
    budget: float | None = None  # share of the peak without a budget; None: nothing is recomputed
    fused: bool = False  # flash attention and cuDNN's loops, which Keras chooses where a GPU is attached

    def factory(self) -> Callable[[], Any]:
        """Builder of the compiled model."""
        from keras.src.backend.jax import nn

        if not self.fused:  # the plan is then the same with and without a device; KerasHub does not ask Keras's switch
            nn._can_use_flash_attention = lambda *args, **kwargs: False
        if self.model in OTHERS:
            return OTHERS[self.model]
        return cases.Case(self.model, MESH, "", self.batch_size, self.sequence_length).factory()


OTHERS: Mapping[str, Callable[[], Any]] = {
    "wavenet": more_models.wavenet,
    "xception": lambda: more_models.application("Xception", 299),
    "densenet121": lambda: more_models.application("DenseNet121"),
    "efficientnet_v2": lambda: more_models.application("EfficientNetV2B2", 260),
    "translator": more_models.translator,
    "mixer": more_models.mixer,
    "unet": more_models.unet,
}

CASES: Mapping[str, Step] = {
    "gpt2_small bf16": Step("hub:gpt2_small", 16, 1024),
    "gpt2_small f32": Step("hub:gpt2_small?dtype=float32", 16, 1024),
    "bert_base bf16": Step("hub:bert_base", 64, 512),
    "resnet50 bf16": Step("hub:resnet50", 256),
    "llama3_8b, 2 layers bf16": Step("hub:llama3_8b?layers=2", 8, 1024),
    "vit_base bf16": Step("hub:vit_base", 128),
    "wide_mlp bf16": Step("wide_mlp", 4096),
    "lstm f32": Step("lstm", 128),
    "bert_base f32": Step("hub:bert_base?dtype=float32", 32, 512),
    "resnet50 f32": Step("hub:resnet50?dtype=float32", 128),
    "vit_base f32": Step("hub:vit_base?dtype=float32", 64),
    "llama3_8b, 2 layers bf16 predict": Step("hub:llama3_8b?layers=2", 8, 1024, "predict"),
    "resnet50 bf16 predict": Step("hub:resnet50", 256, None, "predict"),
    "bert_base bf16 predict": Step("hub:bert_base", 64, 512, "predict"),
    "mobilenet_v2 bf16": Step("hub:mobilenet_v2", 256),
    "mlp f32": Step("mlp", 8192),
    "llama3_8b, 2 layers bf16 fused": Step("hub:llama3_8b?layers=2", 8, 1024, fused=True),
    "lstm f32 fused": Step("lstm_of_keras", 128, fused=True),
    "wavenet f32": Step("wavenet", 32),
    "xception bf16": Step("xception", 64),
    "densenet121 bf16": Step("densenet121", 128),
    "efficientnet_v2 bf16": Step("efficientnet_v2", 128),
    "translator f32": Step("translator", 128),
    "mixer bf16": Step("mixer", 128),
    "unet bf16": Step("unet", 32),
    "mixtral_8x7b, 1 layer bf16": Step("hub:mixtral_8x7b?layers=1", 8, 512),
    "gemma2_2b, 2 layers bf16": Step("hub:gemma2_2b?layers=2", 8, 1024),
    "opt_6.7b, 2 layers bf16": Step("hub:opt_6.7b?layers=2", 8, 1024),
    "gpt2_small bf16 at 0.75": Step("hub:gpt2_small", 16, 1024, budget=0.75),
    "gpt2_small bf16 at 0.5": Step("hub:gpt2_small", 16, 1024, budget=0.5),
    "gpt2_small bf16 at 0.3": Step("hub:gpt2_small", 16, 1024, budget=0.3),
    "bert_base bf16 at 0.5": Step("hub:bert_base", 64, 512, budget=0.5),
    "vit_base bf16 at 0.5": Step("hub:vit_base", 128, budget=0.5),
    "vit_base bf16 at 0.25": Step("hub:vit_base", 128, budget=0.25),
    "resnet50 bf16 at 0.75": Step("hub:resnet50", 256, budget=0.75),
    "resnet50 bf16 at 0.5": Step("hub:resnet50", 256, budget=0.5),
    "mobilenet_v2 bf16 at 0.6": Step("hub:mobilenet_v2", 256, budget=0.6),
    "densenet121 bf16 at 0.6": Step("densenet121", 128, budget=0.6),
    "mixer bf16 at 0.5": Step("mixer", 128, budget=0.5),
    "unet bf16 at 0.75": Step("unet", 32, budget=0.75),
    "wavenet f32 at 0.75": Step("wavenet", 32, budget=0.75),
}
"""The first lines are what the formulas of ``costs/kernels.py`` were corrected by; those from wavenet on are not.

Those "at" a share have so much of their own peak, without a budget, as their budget, and recompute for it."""


def planned(step: Step, hardware: str) -> Any:
    """The plan of a step on one device."""
    import autoshard_ilp as autoshard

    options: dict[str, Any] = {"hardware": hardware, "batch_size": step.batch_size, "mode": step.mode}
    options |= {"sequence_length": step.sequence_length, "progress": False}
    plan = autoshard.optimize(step.factory(), MESH, remat="never", **options)
    if step.budget is None:
        return plan
    return autoshard.optimize(step.factory(), MESH, int(step.budget * plan.memory.peak_bytes), **options)


def predictions(plan: Any, step: Step) -> dict[str, Any]:
    """What a plan says of its step."""
    return {
        "predicted ms": plan.cost.total_s * 1e3,
        "TFLOP": plan.cost.flops / 1e12,
        "budget GB": plan.memory.budget_bytes / 1e9 if step.budget else None,
        "recomputes": plan.remat_policy if step.budget else None,
        "predicted peak GB": plan.memory.peak_bytes / 1e9,
        "unknown": list(plan.unknown),
    }


def measure(name: str, hardware: str, lock: str, raw: Path | None) -> list[dict[str, Any]]:
    """Plans, compiles and times one step."""
    import_everything()
    import jax

    from autoshard_ilp.verify.compiled import memory_bytes

    began = time.perf_counter()
    step = CASES.get(name) or Step("mlp", 64)
    plan = planned(step, hardware)
    seconds = {"plan": time.perf_counter() - began}
    row = {
        "case": name,
        **predictions(plan, step),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    lowered = plan.jit(marked=True).lower(*plan.abstract_args())
    state, batch = plan.init_state(seed=0), _batch(plan)
    jax.block_until_ready((state, batch))
    seconds["prepare"] = time.perf_counter() - began - seconds["plan"]
    with _alone(lock):
        began = time.perf_counter()
        compiled = lowered.compile()
        seconds["compile"] = time.perf_counter() - began
        state, timed = _timed(compiled, state, batch)
        row |= timed
        row["used GB"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9 or None
        if raw is not None:
            _recorded(lowered, state, batch, raw / name.replace(" ", "_").replace(",", ""))
        seconds["alone"] = time.perf_counter() - began
    row["compiled peak GB"] = memory_bytes(compiled).get("peak", 0) / 1e9 or None
    counted = compiled.cost_analysis() or {}
    row["xla TFLOP"], row["xla GB accessed"] = (
        counted.get("flops", 0.0) / 1e12,
        counted.get("bytes accessed", 0.0) / 1e9,
    )
    row["seconds"] = seconds
    return [row]


def _batch(plan: Any) -> Any:
    """Random inputs: small class and token numbers, no token masked."""
    import jax
    import jax.numpy as jnp

    def drawn(path: Any, a: Any) -> Any:
        key = jax.random.key(len(jax.tree_util.keystr(path)))
        if "mask" in jax.tree_util.keystr(path):
            value = jnp.ones(a.shape, a.dtype)
        elif jnp.issubdtype(a.dtype, jnp.integer):
            value = jax.random.randint(key, a.shape, 0, 2 if "segment" in jax.tree_util.keystr(path) else 1000, a.dtype)
        else:
            value = jax.random.normal(key, a.shape).astype(a.dtype)
        return jax.device_put(value, a.sharding)

    return jax.tree_util.tree_map_with_path(drawn, plan.abstract_args()[1])


def _timed(compiled: Any, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Seconds per step: one at a time, and with the next ones waiting in the queue."""
    import jax

    def run(count: int) -> float:
        nonlocal state
        began, logs = time.perf_counter(), None
        for _ in range(count):
            state, logs = compiled(state, batch)
        jax.block_until_ready((state, logs))
        return time.perf_counter() - began

    began = time.perf_counter()
    last = run(1)
    while time.perf_counter() - began < WARM_SECONDS or last == 0.0:
        last = run(1)
    steps = max(MIN_STEPS, min(MAX_STEPS, int(TIMED_SECONDS / last)))
    taken = sorted(run(1) for _ in range(steps))
    quarter = len(taken) // 4
    median = statistics.median(taken)
    timed = {
        "measured ms": run(steps) / steps * 1e3,
        "one at a time ms": median * 1e3,
        "spread": (taken[-1 - quarter] - taken[quarter]) / median,
        "steps": steps,
    }
    return state, timed


def _recorded(lowered: Any, state: Any, batch: Any, to: Path) -> None:
    """Writes the compiled text and the device's seconds by operation, to find out where predictions differ."""
    import gzip
    import tempfile
    import warnings

    import jax

    # Kernels inside of a recorded graph are not told apart.
    gpu = jax.devices()[0].platform == "gpu"
    compiled = lowered.compile({"xla_gpu_enable_command_buffer": ""} if gpu else None)
    with gzip.open(f"{to}.hlo.gz", "wt") as file:
        file.write(compiled.as_text())
    steps = 3
    state, _ = compiled(state, batch)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, logs = compiled(state, batch)
            jax.block_until_ready((state, logs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(_device_seconds(folder))
    rows = [{"kernel": k, "op": op, "seconds": s / steps, "count": n / steps} for (k, op), (s, n) in found.items()]
    with gzip.open(f"{to}.ops.json.gz", "wt") as file:
        file.write(json.dumps(sorted(rows, key=lambda r: -r["seconds"])))


def _device_seconds(folder: str) -> Iterator[tuple[tuple[str, str], tuple[float, int]]]:
    import jax

    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if plane.name.startswith("/device:") else ():
                for event in line.events:
                    stats = {str(k): v for k, v in event.stats}
                    key = f"{line.name} | {event.name}", str(stats.get("hlo_op", ""))
                    seconds, count = sums.get(key, (0.0, 0))
                    sums[key] = seconds + event.duration_ns * 1e-9, count + 1
    yield from sums.items()


@contextmanager
def _alone(lock: str) -> Iterator[None]:
    """One case at a time on the device."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what follows from prediction and measurement."""
    if "measured ms" not in row:
        return dict(row)
    return {
        **row,
        "measured / predicted": row["measured ms"] / row["predicted ms"],
        "TFLOP/s": row["TFLOP"] / row["measured ms"] * 1e3,
    }


def report(rows: list[dict[str, Any]], hardware: str, about: str) -> str:
    """The result file."""
    timed = [compared(r) for r in rows if "measured ms" in r]
    kinds = ", ".join(sorted({r["device"] for r in timed}))
    versions = ", ".join(sorted({r["jax"] for r in timed}))
    parts = [
        f"# Measured steps on one device\n\n{about}\n- device: one {kinds}, jax {versions}; predictions: the profile "
        f"`{hardware}`\n\nWhole steps on one device, so without any communication. Measured: seconds per step with the "
        "next ones waiting in the queue; spread: of the middle half of steps run one at a time. `used` is the "
        "allocator's peak, with what was needed to draw the weights."
    ]
    known = [r for r in timed if not r.get("unknown")]
    within = [abs(r["measured / predicted"] - 1) <= 0.25 for r in known]
    if any("predicted before ms" in r for r in timed):
        parts.append("Predicted before: by the profile and the formulas that were shipped when this was measured.")
    if known:
        parts.append(f"{sum(within)} of {len(within)} predictions are within 25 % of what was measured.")
    parts.append(f"## Steps\n\n{_table(known)}")
    if unknown := [r for r in timed if r.get("unknown")]:
        parts.append(
            "## With kernels that plans did not know\n\nWhere a GPU is attached, Keras chooses cuDNN's flash attention "
            f"and loops. Their time and memory are not in these predictions.\n\n{_table(unknown)}"
        )
    failed = [f"- {r['case']}: {r['status']}" for r in rows if "measured ms" not in r]
    return "\n\n".join([*parts, *(["Failed:\n\n" + "\n".join(failed)] if failed else [])]) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    return table(rows, {key: how for key, how in COLUMNS.items() if any(row.get(key) is not None for row in rows)})


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--hardware", default="", help="profile of the predictions; default: that of the device")
    parser.add_argument("--predict", type=Path, help="JSON of an earlier run: predict its cases again")
    parser.add_argument("--output", type=Path, help="report to write; its JSON lies beside it")
    parser.add_argument("--raw", type=Path, help="folder for compiled texts and seconds by operation")
    parser.add_argument("--jobs", type=int, default=4, help="cases that are prepared at the same time")
    parser.add_argument("--lock", default="", help="file that is locked by what uses the device")
    options = parser.parse_args()
    if options.case:
        if options.predict:
            step = CASES[options.case]
            rows = [{"case": options.case, **predictions(planned(step, options.hardware), step)}]
        else:
            rows = measure(options.case, options.hardware, options.lock, options.raw)
        answer(options.answer, rows)
        return 0
    if options.predict:
        return _predict_again(options)
    return _measure_all(options)


def _measure_all(options: Any) -> int:
    import tempfile

    hardware = options.hardware or _attached()
    names = ["smoke"] if options.smoke else matching(CASES, options.only)
    output = options.output or (None if options.smoke else result_file(f"measured_single_device-{Path(hardware).stem}"))
    if options.raw:
        options.raw.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor(options.jobs) as pool:
        extra = ["--hardware", hardware, "--lock", options.lock or file.name]
        extra += ["--raw", str(options.raw)] if options.raw else []
        waited = [pool.submit(in_own_process, __file__, n, extra, platforms="") for n in names]
        for done in as_completed(waited):
            found = done.result()
            rows += found
            rows.sort(key=lambda r: names.index(r["case"]))
            print(found, file=sys.stderr, flush=True)
            if output:
                output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
                output.write_text(report(rows, hardware, machine()))
    if output is None:
        print(report(rows, hardware, machine()))
    return 0 if all("measured ms" in row for row in rows) else 1


def _attached() -> str:
    """The profile of the attached device, asked in a process that ends, so that none of its memory is held."""
    import subprocess

    code = (
        "import jax; from autoshard_ilp.costs.profile import profile_for_device_kind as p; "
        "d = jax.devices()[0]; print(p(d.device_kind) or 'cpu-host')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def _predict_again(options: Any) -> int:
    rows = json.loads(options.predict.read_text())
    hardware = options.hardware or options.predict.stem.removeprefix("measured_single_device-")[:-11]
    about = options.predict.with_suffix(".md").read_text().split("\n\n")[1].rpartition("\n- device")[0]
    for row in rows:
        if row["case"] in matching(CASES, options.only) and not CASES[row["case"]].fused:
            row.setdefault("predicted before ms", row.get("predicted ms"))
            extra = ["--hardware", hardware, "--predict", str(options.predict)]
            row |= in_own_process(__file__, row["case"], extra)[0]
            print(compared(row).get("measured / predicted"), row["case"], file=sys.stderr, flush=True)
    text = report(rows, hardware, about)
    if options.output:
        options.output.write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

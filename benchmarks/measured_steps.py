"""Predicted against measured step time on attached devices: the plan and every baseline, for several models.

python benchmarks/measured_steps.py                      # calibrates 8 CPU devices, writes results/measured_steps*
python benchmarks/measured_steps.py --profile here.toml  # with a profile calibrated before (autoshard calibrate)
python benchmarks/measured_steps.py --jobs 6             # plans six models at once, then measures one after the other
python benchmarks/measured_steps.py --smoke              # one tiny model on the assumed profile, printed only
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import answer, driver_parser, import_everything, in_own_process, machine, matching, result_file, table

MESH = {"data": 2, "model": 4}
CALIBRATION_SECONDS = 240.0
POLL_SECONDS = 0.2
COLUMNS = {
    "plan": "",
    "predicted ms": ".2f",
    "compute ms": ".2f",
    "communication ms": ".2f",
    "measured ms": ".2f",
    "noise ms": ".2f",
    "measured / predicted": ".2f",
}


def _compiled(model: Any, loss: str = "mse") -> Any:
    model.compile(optimizer="adam", loss=loss)
    return model


def wide_mlp() -> Any:
    """Large weights, small batch."""
    import keras

    dense = [keras.layers.Dense(2048, "relu") for _ in range(4)]
    return _compiled(keras.Sequential([keras.Input((2048,)), *dense]))


def narrow_mlp() -> Any:
    """Small weights, large batch."""
    import keras

    dense = [keras.layers.Dense(256, "relu") for _ in range(6)]
    return _compiled(keras.Sequential([keras.Input((256,)), *dense]))


def two_layers() -> Any:
    import keras

    dense = [keras.layers.Dense(64, "relu") for _ in range(2)]
    return _compiled(keras.Sequential([keras.Input((64,)), *dense]))


def tokens(preset: str, **config: Any) -> Callable[[], Any]:
    """A KerasHub language model of reduced size."""

    def build() -> Any:
        import keras
        import keras_hub

        backbone = getattr(keras_hub.models, f"{preset}Backbone")(**config)
        inputs = {k: keras.Input((128,), dtype="int32", name=k) for k in ("token_ids", "padding_mask")}
        logits = backbone.token_embedding(backbone(inputs), reverse=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return _compiled(keras.Model(inputs, logits), loss)

    return build


def convolutions() -> Any:
    """A small residual network."""
    import keras

    x = inputs = keras.Input((32, 32, 16))
    for width in (64, 128):
        x = keras.layers.Conv2D(width, 3, strides=2, padding="same")(x)
        y = keras.layers.BatchNormalization()(keras.layers.Conv2D(width, 3, padding="same")(x))
        x = keras.layers.ReLU()(x + y)
    return _compiled(keras.Model(inputs, keras.layers.Dense(100)(keras.layers.GlobalAveragePooling2D()(x))))


def recurrent() -> Any:
    """An LSTM: a loop in the step."""
    import keras

    return _compiled(
        keras.Sequential([keras.Input((32, 256)), keras.layers.LSTM(256), keras.layers.Dense(256)]),
    )


_GPT2 = {
    "vocabulary_size": 4096,
    "num_layers": 2,
    "num_heads": 8,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "max_sequence_length": 128,
}
_LLAMA = {
    "vocabulary_size": 4096,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
}
MODELS: Mapping[str, tuple[Callable[[], Any], int]] = {
    "wide_mlp": (wide_mlp, 64),
    "narrow_mlp": (narrow_mlp, 8192),
    "gpt2": (tokens("GPT2", **_GPT2), 16),
    "llama": (tokens("Llama", **_LLAMA, tie_word_embeddings=True), 16),
    "convolutions": (convolutions, 128),
    "lstm": (recurrent, 128),
}
"""Models that fit eight virtual devices on a small host, with their global batch."""
SMOKE: Mapping[str, tuple[Callable[[], Any], int]] = {"smoke": (two_layers, 512)}


def measure(name: str, profile: str, steps: int, queue: Path | None, raw: Path | None) -> list[dict[str, Any]]:
    """Plans and runs one model by the optimum and every baseline, interleaved so that disturbances hit all of them.

    Args:
        queue: folder by which models that are planned at the same time take turns to be measured (see ``_turn``).
        raw: folder for compiled texts and seconds by operation.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", math.prod(MESH.values()))
    import_everything()
    import autoshard_ilp as autoshard
    from autoshard_ilp.baselines import BASELINES

    build, batch_size = {**MODELS, **SMOKE}[name]
    options = {"hardware": profile, "batch_size": batch_size, "progress": False, "remat": "never"}
    rows, runs = [], []
    for kind in ("optimize", *BASELINES):
        try:
            if kind == "optimize":
                plan = autoshard.optimize(build, MESH, **options)
            else:
                plan = autoshard.baseline(build, MESH, kind, **options)
        except (autoshard.InfeasibleError, autoshard.UnsupportedModelError):
            continue
        rows.append(
            {
                "case": name,
                "plan": kind,
                "predicted ms": plan.cost.total_s * 1e3,
                "compute ms": plan.cost.compute_s * 1e3,
                "communication ms": plan.cost.communication_s * 1e3,
            }
        )
        runs.append(_Run(plan))
    seconds: list[list[float]] = [[] for _ in runs]
    with _turn(queue, name):
        for run in runs:
            run.step()
        for _ in range(steps):
            for run, taken in zip(runs, seconds, strict=True):
                taken.append(run.step())
        for row, run in zip(rows if raw else [], runs, strict=False):
            run.record(f"{raw}/{name}-{row['plan']}")
    for row, taken in zip(rows, seconds, strict=True):
        best = sorted(taken)[: max(1, len(taken) // 2)]
        row["measured ms"] = statistics.median(best) * 1e3
        row["noise ms"] = (best[-1] - best[0]) * 1e3
        row["measured / predicted"] = row["measured ms"] / row["predicted ms"]
    return rows


@contextmanager
def _turn(queue: Path | None, name: str) -> Iterator[None]:
    """Waits until all models are planned, and those before this one are measured.

    The folder holds a file per model: "waits-<place>-<name>" from the start, "ready-..." once it is planned, none once
    it is measured (or has failed: ``_queued`` removes it then).
    """
    if queue is None:
        yield
        return
    (mine,) = queue.glob(f"waits-*-{name}")
    ready = mine.rename(mine.with_name(mine.name.replace("waits", "ready", 1)))
    while any(queue.glob("waits-*")) or min(queue.glob("ready-*")) != ready:
        time.sleep(POLL_SECONDS)
    yield
    ready.unlink()


def _queued(names: list[str], extra: list[str], jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of every model; ``jobs`` of them are planned at the same time, none while another one is measured."""
    if jobs == 1:
        yield from (in_own_process(__file__, name, extra) for name in names)
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for begin in range(0, len(names), jobs):
            group = names[begin : begin + jobs]
            for place, name in enumerate(group):
                (Path(folder) / f"waits-{place:02d}-{name}").touch()

            def rows_of(name: str) -> list[dict[str, Any]]:
                found = in_own_process(__file__, name, [*extra, "--queue", folder])
                for left in Path(folder).glob(f"*-{name}"):
                    left.unlink()
                return found

            yield from pool.map(rows_of, group)


class _Run:
    """A plan's program with its state, ready to step."""

    def __init__(self, plan: Any) -> None:
        import jax
        import jax.numpy as jnp

        self.program = plan.jit()
        self.state = plan.init_state(seed=0)
        batch = plan.abstract_args()[1]
        self.batch = jax.tree.map(lambda a: jax.device_put(jnp.ones(a.shape, a.dtype), a.sharding), batch)
        self.step()

    def step(self) -> float:
        import jax

        began = time.perf_counter()
        self.state, logs = self.program(self.state, self.batch)
        jax.block_until_ready((self.state, logs))
        return time.perf_counter() - began

    def record(self, to: str) -> None:
        """Writes the compiled text and the seconds of every operation, of all devices together."""
        import jax

        with gzip.open(f"{to}.hlo.gz", "wt") as file:
            file.write(self.program.lower(self.state, self.batch).compile().as_text())
        seconds: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.step()
            for path in Path(folder).rglob("*.xplane.pb"):
                for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                    for event in (event for line in plane.lines for event in line.events):
                        op = str(dict(event.stats).get("hlo_op", ""))
                        seconds[op] = seconds.get(op, 0.0) + event.duration_ns * 1e-9 if op else 0.0
        with gzip.open(f"{to}.ops.json.gz", "wt") as file:
            json.dump(dict(sorted(seconds.items(), key=lambda item: -item[1])), file, indent=0)


def ranks(rows: list[dict[str, Any]]) -> float:
    """Spearman's rank correlation of predicted and measured time."""
    from scipy.stats import spearmanr

    return float(spearmanr([r["predicted ms"] for r in rows], [r["measured ms"] for r in rows]).statistic)


def report(rows: list[dict[str, Any]], profile: Path | None) -> str:
    """The result file."""
    figures = f"the profile `{profile.name}`, measured on the same devices" if profile else "assumed figures (cpu-host)"
    parts = [
        f"# Measured steps\n\n{machine()}\n\nWhole training steps on 8 virtual CPU devices, mesh data=2, model=4, "
        f"predicted with {figures}. The plans of a model take turns; measured: median of the faster half of the steps, "
        "noise: spread of that half. Reproduce with `python benchmarks/measured_steps.py`."
    ]
    timed = [r for r in rows if "measured ms" in r]
    if len(timed) > 2:
        parts.append(f"Rank correlation over all {len(timed)} plans: {ranks(timed):.3f}.")
    for name in dict.fromkeys(r["case"] for r in timed):
        own = [r for r in timed if r["case"] == name]
        best = min(own[1:], key=lambda r: r["measured ms"], default=own[0])
        slower = own[0]["measured ms"] - best["measured ms"]
        noise = max(own[0]["noise ms"], best["noise ms"])
        verdict = "not slower than" if slower <= noise else "SLOWER than"
        parts.append(
            f"## {name}\n\nThe plan is {verdict} the best baseline ({best['plan']}) within the noise: "
            f"{slower:+.2f} ms against {noise:.2f} ms. Rank correlation {ranks(own):.2f}.\n\n{table(own, COLUMNS)}"
        )
    failed = [f"- {r['case']}: {r['status']}" for r in rows if "measured ms" not in r]
    return "\n\n".join([*parts, *(["Failed:\n\n" + "\n".join(failed)] if failed else [])]) + "\n"


def calibrated(path: Path) -> None:
    """Writes the profile of 8 CPU devices."""
    import jax

    jax.config.update("jax_num_cpu_devices", math.prod(MESH.values()))
    import autoshard_ilp as autoshard

    autoshard.calibrate(MESH, output=path, time_limit=CALIBRATION_SECONDS)


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--profile", type=Path, help="a profile of these devices; default: calibrate now")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per plan")
    parser.add_argument("--jobs", type=int, default=1, help="models that are planned at the same time")
    parser.add_argument("--output", type=Path, help="file to write; partial runs are only printed without it")
    parser.add_argument("--raw", type=Path, help="folder for compiled texts and seconds by operation")
    parser.add_argument("--queue", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        rows = measure(options.case, str(options.profile), options.steps, options.queue, options.raw)
        answer(options.answer, rows)
        return 0
    output = options.output or (None if options.smoke or options.only else result_file("measured_steps"))
    profile = options.profile
    if profile is None and output is not None:
        profile = output.with_name("cpu-8-measured.toml")
        calibrated(profile)
    names = list(SMOKE) if options.smoke else matching(MODELS, options.only)
    rows: list[dict[str, Any]] = []
    steps = 3 if options.smoke else options.steps
    extra = ["--profile", str(profile or "cpu-host"), "--steps", str(steps)]
    if options.raw:
        options.raw.mkdir(parents=True, exist_ok=True)
        extra += ["--raw", str(options.raw)]
    for found in _queued(names, extra, options.jobs):
        rows += found
        print(f"{found[0]['case']}: {len(found)} rows", file=sys.stderr, flush=True)
        if output:
            output.write_text(report(rows, profile))
    if not output:
        print(report(rows, profile))
    return 0 if rows and all("measured ms" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

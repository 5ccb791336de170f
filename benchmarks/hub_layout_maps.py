"""KerasHub's own layout maps, as Keras runs them, against our plan: what each compiled training step communicates.

    python benchmarks/hub_layout_maps.py                      # XLA:CPU, eight virtual devices
    python benchmarks/hub_layout_maps.py --compile h100:8     # XLA:GPU, no GPU needed

Per model three programs are compiled on a mesh of 2 (batch) x 4 (model):

* ``shipped``: the backbone's ``get_layout_map`` under ``keras.distribution.ModelParallel``: the layouts of variables
  and batch are given to the model's own step, and XLA propagates them;
* ``shipped + plan``: the same layouts of variables and batch, with the best interior for them (``baseline``);
* ``plan``: ours, nothing given.

Bytes are what one device sends per step under a ring, read off the optimized program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import answer, in_own_process, machine, result_file, table

MODELS = {
    # preset with two layers -> global batch, sequence length, profile
    "hub:llama3_8b?layers=2": (8, 1024, "h100"),
    "hub:gemma2_2b?layers=2": (8, 512, "h100"),
    "hub:gemma2_9b?layers=2": (8, 512, "h100"),
    "hub:qwen3_moe_30b?layers=2": (8, 512, "h100"),
}
MESH = {"batch": 2, "model": 4}
COLUMNS = {
    "model": "",
    "program": "",
    "status": "",
    "sent MB": ",.0f",
    "collectives": ",d",
    "by kind": "",
    "peak GB": ".2f",
    "predicted ms": ".1f",
}


def measure(name: str, target: str | None) -> list[dict[str, Any]]:
    """The three programs of one model."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import autoshard_ilp as autoshard
    from autoshard_ilp.models import load_model_factory

    batch_size, length, hardware = MODELS[name]
    options = {"hardware": hardware, "batch_size": batch_size, "sequence_length": length, "progress": False}
    build = load_model_factory(name, sequence_length=length)
    rows = []
    shipped = autoshard.baseline(build, MESH, "keras_hub", memory_budget="1TB", **options)
    plan = autoshard.optimize(build, MESH, **options)
    for label, made in (("shipped", shipped), ("shipped + plan", shipped), ("plan", plan)):
        row: dict[str, Any] = {"model": name, "program": label}
        row["predicted ms"] = None if label == "shipped" else made.cost.total_s * 1e3
        try:
            row |= _figures(_compiled(made, target, interior=label != "shipped"))
        except Exception as error:
            row["status"] = f"not compiled: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        rows.append(row)
    return rows


def _compiled(plan: Any, target: str | None, interior: bool) -> Any:
    """A plan's step, or the model's own one between the plan's layouts of arguments and new state, as Keras has it."""
    import jax

    from autoshard_ilp.verify.targets import compile_only_mesh, parse_target, sized

    mesh, flags = plan.mesh.concrete(), {}
    if target is not None:
        found = sized(parse_target(target), plan.mesh.size)
        mesh, flags = compile_only_mesh(found, plan.mesh.axis_names, plan.mesh.axis_sizes), found.compiler_options
    if interior:
        return plan.jit(mesh).lower(*plan.abstract_args(mesh)).compile(compiler_options=dict(flags))
    arguments = plan.abstract_args(mesh)
    state = jax.tree.map(lambda x: x.sharding, arguments[0])
    step = jax.jit(plan.executable.traced.fn, donate_argnums=0, out_shardings=(state, None))
    return step.lower(*arguments).compile(compiler_options=dict(flags))


def _figures(compiled: Any) -> dict[str, Any]:
    from collections import Counter

    from autoshard_ilp.verify.compiled import memory_bytes
    from autoshard_ilp.verify.hlo import parse_collectives

    found = parse_collectives(compiled.as_text())
    by_kind: Counter[str] = Counter()
    for c in found:
        by_kind[c.kind] += c.total_bytes_per_device
    peak = memory_bytes(compiled).get("peak")
    return {
        "status": "compiled",
        "sent MB": sum(by_kind.values()) / 1e6,
        "collectives": sum(c.count for c in found),
        "by kind": ", ".join(f"{k} {v / 1e6:,.0f}" for k, v in by_kind.most_common()),
        "peak GB": None if peak is None else peak / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--compile", metavar="TARGET", help='compile for this target, e.g. "h100:8"')
    parser.add_argument("--output", type=Path, help="file to write; default: results/hub_layout_maps-<date>.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        answer(options.answer, measure(options.case, options.compile))
        return 0
    extra = ["--compile", options.compile] if options.compile else []
    rows = [row for name in MODELS if options.only in name for row in in_own_process(__file__, name, extra)]
    text = (
        f"# KerasHub's layout maps\n\n{machine()}\n\nTraining steps (AdamW, mixed bfloat16), two layers at true width, "
        f"on a mesh batch=2, model=4, compiled for {options.compile or 'eight CPU devices'}. Bytes: what one device "
        f"sends per step; MB and GB are powers of ten.\n\n{table(rows, COLUMNS)}\n"
    )
    print(text)
    suffix = "-" + options.compile.replace(":", "-") if options.compile else ""
    (options.output or result_file(f"hub_layout_maps{suffix}")).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

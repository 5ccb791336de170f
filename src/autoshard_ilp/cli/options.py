"""Options that several commands of the command line share, with what a shell completes for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def _one_of(*names: str) -> Callable[[str], list[str]]:
    """Completes one of some names. They are those that the checks of these options know, without importing those."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def hardware_names(incomplete: str) -> list[str]:
    """Completes the name of a profile."""
    from autoshard_ilp.costs.profile import profiles

    return [name for name in profiles() if name.startswith(incomplete)]


BASELINES = ("data_parallel", "fsdp", "zero1", "megatron", "fsdp+megatron", "keras_hub")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan written by autoshard plan --output.")]
Model = Annotated[str, typer.Argument(help="hub:PRESET (hub:llama3_8b, hub:gpt2_small?layers=2) or module:factory.")]
OtherModel = Annotated[str | None, typer.Option(help="Build this model instead of the one that the plan names.")]
Mesh = Annotated[str, typer.Option(help="Axes of the device mesh, such as data=4,model=4.")]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Profile name (autoshard profiles), tpu-v5e:4x4, or a TOML. [default: cpu-host]",
        autocompletion=hardware_names,
    ),
]
Budget = Annotated[str | None, typer.Option(help="Per device: 16GB, 16GiB or bytes. [default: what the hardware has]")]
Batch = Annotated[int | None, typer.Option(help="Global batch. [default: 32, rounded up]")]
Length = Annotated[int | None, typer.Option(help="Size of unknown dimensions, such as tokens.")]
Mode = Annotated[
    str,
    typer.Option(help="train (the whole step) or predict (forward only).", autocompletion=_one_of("train", "predict")),
]
Objective = Annotated[
    str,
    typer.Option(help="step_time or communication.", autocompletion=_one_of("step_time", "communication")),
]
Remat = Annotated[
    str,
    typer.Option(
        help="Recompute activations: auto (only if nothing else fits), never, selective, full or full:6.",
        autocompletion=_one_of("auto", "never", "selective", "full"),
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(help="REGEX=SPEC, repeatable: 'query/kernel=(None, \"model\")' or query/kernel=None,model."),
]
Baseline = Annotated[
    list[str] | None,
    typer.Option(
        help="Compare with data_parallel, fsdp, zero1, megatron, ...; repeatable.", autocompletion=_one_of(*BASELINES)
    ),
]
Limit = Annotated[float, typer.Option(help="Seconds for the solver, per plan.", min=0.0)]
Figure = Annotated[Path | None, typer.Option("--plot", help="Draw into this file (.png, .svg or .pdf).")]
Table = Annotated[Path | None, typer.Option("--output", "-o", help="Write the table to this CSV file.")]

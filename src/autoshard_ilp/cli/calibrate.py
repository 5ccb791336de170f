"""``autoshard calibrate``: measure the attached devices and write their hardware profile."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard_ilp.cli.options import hardware_names
from autoshard_ilp.console import print_json, print_text, quiet_native_logs, reported, say


@reported
def calibrate(
    output: Annotated[Path, typer.Argument(help="The TOML to write.", show_default=False)],
    mesh: Annotated[
        str | None, typer.Option("--mesh", help='Such as "data=2,model=4"; default: all devices on one axis.')
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Profile to correct; default: the devices'.", autocompletion=hardware_names),
    ] = None,
    cpu_devices: Annotated[
        int | None, typer.Option("--cpu-devices", min=1, help="Simulate this many devices on the CPU.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per measurement.")] = 5,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds, then nothing more is measured.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's figures as JSON.")] = False,
) -> None:
    """Measure collectives and matrix products on the attached devices and write a hardware profile."""
    from autoshard_ilp.calibration.calibrate import calibrate as run
    from autoshard_ilp.mesh import parse_mesh

    where: Any = None if mesh is None else parse_mesh(mesh)
    with quiet_native_logs():
        import jax

        if cpu_devices is not None:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        jax.devices()
    say(f"measuring collectives, matrix products and memory for at most {time_limit:g} s")
    with warnings.catch_warnings(record=True) as told:
        profile = run(where, output=output, hardware=hardware, repeats=repeats, time_limit=time_limit)
    for warning in told:
        say(f"warning: {warning.message}")
    if as_json:
        print_json({"output": str(output), "figures": profile.figures(), "residuals": profile.residuals})
        return
    lines = ["Difference between the profile and what was measured"]
    lines += [f"{k:20s} median {r['median']:6.1%}  worst {r['worst']:6.1%}" for k, r in profile.residuals.items()]
    print_text("\n".join(lines))
    say(f"wrote {output}; use it with --hardware {output}")

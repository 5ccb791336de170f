"""The command line, ``autoshard plan | explain | verify | sweep | pareto | mesh | compare | profiles | calibrate``.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 no plan fits the budget and the pins, 2 input
that makes no sense (usage errors too), 3 a fault of this program, 130 interrupted. What is slow to import is imported
inside the commands, so that ``--help`` and usage errors are immediate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from autoshard_ilp import __version__
from autoshard_ilp.cli import explore as cli_explore
from autoshard_ilp.cli.arguments import budget_of, factory_of, parse_pins, with_origin
from autoshard_ilp.cli.calibrate import calibrate
from autoshard_ilp.cli.options import (
    Baseline,
    Batch,
    Budget,
    Hardware,
    Json,
    Length,
    Mesh,
    Mode,
    Model,
    Objective,
    OtherModel,
    Pin,
    PlanFile,
    Remat,
)
from autoshard_ilp.console import (
    BAD_INPUT,
    INTERRUPTED,
    keep,
    lead_nowhere,
    only_ascii,
    prepare,
    print_json,
    print_text,
    quiet_native_logs,
    reported,
    reserve_streams,
    say,
    width,
)
from autoshard_ilp.errors import InfeasibleError, InputShapeError, PlanFileError


class _Commands(typer.core.TyperGroup):
    """Its own flags (help, completion) are False where not given: typer loads pydantic, 0.1 s, to make that of None."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return parameters


app = typer.Typer(
    name="autoshard",
    cls=_Commands,
    help="Provably optimal sharding of Keras 3 models on JAX, without an accelerator attached.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoshard-ilp {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# -- commands ----------------------------------------------------------------------------------------------------------


@app.command()
@reported
def plan(
    model: Model,
    mesh: Mesh,
    hardware: Hardware = None,
    memory_budget: Budget = None,
    batch_size: Batch = None,
    sequence_length: Length = None,
    mode: Mode = "train",
    objective: Objective = "step_time",
    remat: Remat = "auto",
    pin: Pin = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.0)] = 60.0,
    relative_gap: Annotated[float, typer.Option(help="Stop at this gap; 0 proves optimality.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the solver.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Solver threads. [default: 8]", min=1)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="An operation without a sharding rule is an error.")] = False,
    compiled: Annotated[
        bool, typer.Option("--verify", help="Compile the plan, and plan again while it exceeds the budget.")
    ] = False,
    baseline: Baseline = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest layout of every tensor of a model's step on a mesh, and prove it."""
    prepare()
    from autoshard_ilp import api
    from autoshard_ilp.mesh import parse_mesh
    from autoshard_ilp.program.model import SolverOptions
    from autoshard_ilp.request import check_request

    spec = parse_mesh(mesh)
    budget = budget_of(memory_budget) if memory_budget else memory_budget
    pins = parse_pins(pin or [])
    solver = SolverOptions(time_limit=time_limit, relative_gap=relative_gap, seed=seed, workers=workers)
    check_request(spec, budget, hardware, pins, objective, solver)  # before the slow part
    _check_writable(output)
    _check_baselines(baseline or [])
    if compiled:
        _virtual_cpu_devices(spec.size)
    options: dict[str, Any] = {
        "hardware": hardware,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "mode": mode,
        "objective": objective,
        "solver": solver,
        "strict": strict,
        "remat": remat,
    }
    api.compile_ahead()  # while the model's libraries load
    with contextlib.redirect_stdout(sys.stderr):  # a model's own prints are no result
        factory = factory_of(model, sequence_length)
        found = api.optimize(factory, spec, budget, pins=pins or None, verify=compiled, **options)
    origin = {
        "model": model,
        "batch_size": found.batch_size,
        "sequence_length": sequence_length,
        "mode": mode,
        "hardware": hardware or found.hardware,
    }
    others: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for name in baseline or []:
                others[name] = _baseline(name, factory, spec, budget, options)
    finally:  # a baseline that the model has not, or Ctrl-C meanwhile, does not cost the plan
        _show(with_origin(found, origin), others, output, as_json)


def _check_writable(output: Path | None, option: str = "--output") -> None:
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        what = "A plan" if option == "--output" else "A compiled program"
        raise PlanFileError(
            f"{what} is written to a file in a directory that exists. Received: {option} {output}. "
            "Create the directory, or name another file."
        )


def _check_baselines(names: Sequence[str]) -> None:
    from autoshard_ilp.baselines import BASELINES

    for name in names:
        if name not in BASELINES:
            raise InputShapeError(f"A baseline is one of {', '.join(BASELINES)}. Received: {name!r}.")


def _baseline(name: str, factory: Any, mesh: Any, budget: Any, options: Mapping[str, Any]) -> Any:
    """The baseline's plan, or why it does not fit."""
    from autoshard_ilp import baseline

    try:
        return baseline(factory, mesh, name, memory_budget=budget, **options)
    except InfeasibleError as error:
        return error


def _show(found: Any, others: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    from autoshard_ilp.display.summary import comparison, text
    from autoshard_ilp.saved.planfile import to_dict

    with contextlib.ExitStack() as after:
        if output is not None:
            after.callback(_saved, found, output)  # a file that cannot be written does not cost the answer
        if as_json:
            return print_json(_with_baselines(to_dict(found), others))
        print_text(text(found, width(), only_ascii=only_ascii()).rstrip())
        if others:
            print_text(comparison({"this plan": found, **others}, width(), only_ascii=only_ascii()).rstrip())
    return None


def _saved(found: Any, output: Path) -> None:
    found.save(output)
    say(f"written to {output}")


def _with_baselines(data: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    from autoshard_ilp.saved.planfile import to_dict

    if others:
        data["baselines"] = {
            name: {"infeasible": str(other), "minimum_budget": other.minimum_budget}
            if isinstance(other, InfeasibleError)
            else {k: v for k, v in to_dict(other).items() if k in ("status", "specs", "cost", "memory", "gap")}
            for name, other in others.items()
        }
    return data


@app.command()
@reported
def verify(
    plan_file: PlanFile,
    target: Annotated[
        str | None,
        typer.Option(help="Compile for tpu-v5e:4x4, h100:8, cpu:8, ... [default: the plan's hardware]"),
    ] = None,
    model: OtherModel = None,
    hlo: Annotated[Path | None, typer.Option(help="Write the compiled program's text to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compile a plan for real hardware, without the hardware, and compare with what was predicted."""
    prepare()
    from autoshard_ilp.api import load
    from autoshard_ilp.verify.targets import parse_target

    _check_writable(hlo, "--hlo")
    stored = load(plan_file)
    origin = stored.origin
    if model is None and not origin.get("model"):
        raise PlanFileError(
            f"Verifying needs the model that a plan was made for. Received: {plan_file}, which names none. "
            "Pass --model module:factory or --model hub:PRESET."
        )
    where = parse_target(target or stored.hardware.replace("cpu-host", "cpu"))
    if where.platform == "cpu":
        _virtual_cpu_devices(stored.mesh.size)
    sequence_length = origin.get("sequence_length")
    with contextlib.redirect_stdout(sys.stderr):
        factory = factory_of(model or str(origin["model"]), sequence_length)
        bound = stored.bind(factory, sequence_length=sequence_length)
        checked = _compiled(bound, str(where))
    if hlo is not None:
        keep(hlo, checked.text.encode())
    if as_json:
        return print_json(_verification(checked))
    return print_text(checked.summary(width(), only_ascii=only_ascii()))


def _compiled(bound: Any, target: str) -> Any:
    try:
        with quiet_native_logs():
            return bound.verify(target)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InfeasibleError(
            f"The compiler of the target must find room for the step. Received from {target}: "
            f"{' '.join(str(error).split())[:500]} Plan again with a smaller memory budget."
        ) from error


def _virtual_cpu_devices(count: int) -> None:
    import jax

    with contextlib.suppress(RuntimeError):  # backends already run; the target's own check says what to do
        jax.config.update("jax_num_cpu_devices", count)


def _verification(checked: Any) -> dict[str, Any]:
    names = (
        "target",
        "predicted_bytes_per_device",
        "compiled_bytes_per_device",
        "unplanned_bytes_per_device",
        "predicted_peak_bytes",
        "compiled_peak_bytes",
        "predicted_flops",
        "compiled_flops",
        "predicted_communication_seconds",
        "compiled_communication_seconds",
        "compile_seconds",
    )
    return {**{n: getattr(checked, n) for n in names}, "memory": dict(checked.memory), "collectives": checked.rows()}


@app.command()
@reported
def profiles(as_json: Json = False) -> None:
    """List the hardware profiles and their main figures."""
    from dataclasses import asdict

    from autoshard_ilp.costs.profile import load_profile
    from autoshard_ilp.costs.profile import profiles as names
    from autoshard_ilp.display.profile_table import profile_table

    found = [load_profile(name) for name in names()]
    if as_json:
        return print_json([asdict(p) for p in found])
    return print_text(profile_table(found, width(), only_ascii=only_ascii()).rstrip())


app.command()(calibrate)
cli_explore.register(app)


def main() -> None:
    """Entry point of the ``autoshard`` command."""
    reserve_streams()
    try:
        app()
    except KeyboardInterrupt:
        say("interrupted")
        _end_interrupted()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _end_interrupted()
        raise
    except OSError:  # the parser's own message of bad input, on a stream that takes none
        lead_nowhere(sys.stderr)
        sys.exit(BAD_INPUT)


def _end_interrupted() -> NoReturn:
    """Ends the process; at once where a solver that did not stop in time still runs in a thread.

    Python's own end would unwind such a thread inside C++, which aborts the process and hides the exit code.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(INTERRUPTED)

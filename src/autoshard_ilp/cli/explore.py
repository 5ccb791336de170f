"""``autoshard explain | compare | pareto | mesh | sweep``: questions on the command line, see :mod:`.cli`."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard_ilp.cli.arguments import budget_of, factory_of, parse_pins, with_origin
from autoshard_ilp.cli.options import (
    Batch,
    Budget,
    Figure,
    Hardware,
    Json,
    Length,
    Limit,
    Mesh,
    Mode,
    Model,
    Objective,
    OtherModel,
    Pin,
    PlanFile,
    Remat,
    Table,
    hardware_names,
)
from autoshard_ilp.console import (
    INFEASIBLE,
    INTERRUPTED,
    keep,
    only_ascii,
    prepare,
    print_json,
    print_text,
    quiet_native_logs,
    reported,
    say,
    width,
)
from autoshard_ilp.errors import InputShapeError, PlanFileError, SweepFileError


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    for command in (explain, compare, pareto, mesh, sweep):
        app.command()(command)


@reported
def explain(
    plan_file: PlanFile,
    path: Annotated[str, typer.Argument(help="Path of a variable, input or output, or a regular expression.")],
    model: OtherModel = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for all layouts together.", min=0.0)] = 60.0,
    as_json: Json = False,
) -> None:
    """Why a tensor lies as it does: every other layout with the cost of the best plan that uses it."""
    prepare()
    found = _bound(plan_file, model)
    with contextlib.redirect_stdout(sys.stderr):
        why = found.explain(path, time_limit=time_limit)
    _answer(why, as_json)


@reported
def compare(
    first: PlanFile,
    second: Annotated[Path, typer.Argument(help="Another plan of the same model.")],
    price: Annotated[bool, typer.Option("--price", help="Solve for the best plan with each difference alone.")] = False,
    model: OtherModel = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for --price.", min=0.0)] = 60.0,
    as_json: Json = False,
) -> None:
    """Which tensors lie differently in two plans of a model, and what the differences cost."""
    prepare()
    from autoshard_ilp.api import load

    other = load(second)
    mine = _bound(first, model) if price else load(first)
    with contextlib.redirect_stdout(sys.stderr):
        if price:
            from autoshard_ilp.explore.whatif import with_trail

            mine = with_trail(mine)
        found = mine.compare(other, price=price, time_limit=time_limit)
    _answer(found, as_json)


@reported
def pareto(
    model: Model,
    mesh: Mesh,
    hardware: Hardware = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="A budget per device, repeatable. [default: find every breakpoint]")
    ] = None,
    max_points: Annotated[int, typer.Option(help="Most plans looked for.")] = 40,
    total_time_limit: Annotated[float | None, typer.Option(help="Seconds after the trace.", min=0.0)] = None,
    batch_size: Batch = None,
    sequence_length: Length = None,
    mode: Mode = "train",
    objective: Objective = "step_time",
    remat: Remat = "auto",
    pin: Pin = None,
    time_limit: Limit = 60.0,
    output: Table = None,
    plot: Figure = None,
    as_json: Json = False,
) -> None:
    """Step time against memory budget, every breakpoint of it, each point a proved plan."""
    prepare()
    from autoshard_ilp.explore.pareto import pareto as find
    from autoshard_ilp.mesh import parse_mesh
    from autoshard_ilp.program.model import SolverOptions

    sizes = [budget_of(b) for b in budget] if budget else None
    options: dict[str, Any] = {"hardware": hardware, "batch_size": batch_size, "sequence_length": sequence_length}
    options |= {"mode": mode, "objective": objective, "remat": remat, "pins": parse_pins(pin or []) or None}
    spec, solver = parse_mesh(mesh), SolverOptions(time_limit=time_limit)
    _check_outputs(output, plot)
    _check_figure(plot)
    with contextlib.redirect_stdout(sys.stderr):
        found = find(
            _model(model, sequence_length), spec, budgets=sizes, max_points=max_points, time_limit=total_time_limit,
            solver=solver, **options,
        )  # fmt: skip
    with _answered(found, as_json):
        _keep(found, output, plot)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    if found.points and all(p.status in ("infeasible", "unknown") for p in found.points):
        raise typer.Exit(INFEASIBLE)


@reported
def mesh(
    model: Model,
    devices: Annotated[int | None, typer.Option(help="How many, where --hardware does not say.")] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help="Profile, slice (tpu-v5e:4x4) or PROFILE=DEVICES; repeatable to compare.",
            autocompletion=hardware_names,
        ),
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="HARDWARE=PRICE per device and hour, repeatable, any currency.")
    ] = None,
    rank: Annotated[str, typer.Option(help="time or price (per step).")] = "time",
    max_axes: Annotated[int, typer.Option(help="Most mesh axes.")] = 3,
    smallest: Annotated[bool, typer.Option("--smallest", help="Find the fewest devices on which it fits.")] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest batch that fits the mesh of --axes.")
    ] = False,
    axes: Annotated[str | None, typer.Option(help="The mesh of --largest-batch, such as data=4,model=4.")] = None,
    multiple_of: Annotated[
        int | None, typer.Option(help="Batches of --largest-batch. [default: the number of devices]", min=1)
    ] = None,
    memory_budget: Budget = None,
    batch_size: Batch = None,
    sequence_length: Length = None,
    mode: Mode = "train",
    objective: Objective = "step_time",
    remat: Remat = "auto",
    time_limit: Limit = 60.0,
    save: Annotated[Path | None, typer.Option("--save", help="Write the best plan to this file.")] = None,
    output: Table = None,
    plot: Figure = None,
    as_json: Json = False,
) -> None:
    """The best mesh shape for a model, across hardware; the smallest slice; the largest batch."""
    prepare()
    from autoshard_ilp.program.model import SolverOptions

    if smallest and largest_batch:
        raise InputShapeError("One question is asked at a time. Received: --smallest and --largest-batch.")
    if (axes is not None) != largest_batch:
        raise InputShapeError(f"--largest-batch needs --axes, and nothing else takes it. Received: --axes {axes}.")
    if largest_batch and (batch_size is not None or plot is not None):
        given = f"--batch-size {batch_size}" if plot is None else f"--plot {plot}"
        raise InputShapeError(
            f"--largest-batch finds the batch, and has no figure: drop --batch-size and --plot. Received: {given}."
        )
    if multiple_of is not None and not largest_batch:
        raise InputShapeError(f"--multiple-of goes with --largest-batch. Received: --multiple-of {multiple_of}.")
    _check_outputs(output, plot, save)
    _check_figure(plot)
    budget = budget_of(memory_budget) if memory_budget else memory_budget
    options: dict[str, Any] = {"memory_budget": budget, "sequence_length": sequence_length, "mode": mode}
    options |= {"objective": objective, "remat": remat, "solver": SolverOptions(time_limit=time_limit)}
    chips = _chips(hardware or [], devices)
    several = {**options, "batch_size": batch_size, "max_axes": max_axes, "prices": _prices(price or [])}
    with contextlib.redirect_stdout(sys.stderr):
        question: Callable[[Any], Any]
        if largest_batch:
            question = _largest_batch(str(axes), chips, {**options, "multiple_of": multiple_of})
        elif smallest:
            question = _smallest(chips, several)
        else:
            question = _search(chips, devices, {**several, "rank": rank})
        found = question(_model(model, sequence_length))
    best = getattr(found, "best", None) or getattr(found, "plan", None)
    with _answered(found, as_json):
        if save is not None and best is not None:
            chip = best.origin.get("hardware", best.hardware)
            origin = {"model": model, "batch_size": best.batch_size, "sequence_length": sequence_length, "mode": mode}
            with_origin(best, {**origin, "hardware": chip}).save(save)
            say(f"written to {save}")
        _keep(found, output, plot, found if hasattr(found, "plot") else found.search)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


@reported
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (TOML): models, meshes, hardware, budgets, ...")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Results, .parquet or .csv. [default: the file's own]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; 0: this one. [default: half of the cores]", min=0)
    ] = None,
    case_time_limit: Annotated[float | None, typer.Option(help="Seconds per case, then it has failed.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Plan failed cases again.")] = False,
    other_versions: Annotated[str, typer.Option(help="Rows of other versions: error, keep or redo.")] = "error",
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report to this file.")] = None,
    plot: Figure = None,
    as_json: Json = False,
) -> None:
    """Plan every combination of a sweep file; goes on where it stopped when called again."""
    prepare()
    from autoshard_ilp.explore.sweep import sweep as run

    _check_outputs(None, plot, report)
    _check_figure(plot)
    with contextlib.redirect_stdout(sys.stderr), quiet_native_logs() if workers == 0 else contextlib.nullcontext():
        found = run(
            file,
            output=output,
            workers=workers,
            case_time_limit=case_time_limit,
            retry_failed=retry_failed,
            other_versions=other_versions,
        )
    if found.path is None:
        say("The sweep file names no output, and no --output was given: results are printed only.")
    with _answered(found, as_json):
        if report is not None:
            found.report(report)
            say(f"report written to {report}")
        _keep(found, None, plot)
    if found.interrupted:
        say(f"interrupted: {len(found)} of {found.total} cases are finished; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if found.counts and not any(s in found.counts for s in ("optimal", "feasible")):
        raise typer.Exit(INFEASIBLE)


# -- what they share ---------------------------------------------------------------------------------------------------


def _model(text: str, sequence_length: int | None) -> Any:
    from autoshard_ilp.api import compile_ahead

    compile_ahead()  # while the model's libraries load
    return factory_of(text, sequence_length)


def _bound(path: Path, model: str | None) -> Any:
    """A stored plan with its model."""
    from autoshard_ilp.api import load

    stored = load(path)
    if model is None and not stored.origin.get("model"):
        raise PlanFileError(
            f"This question needs the model that a plan was made for. Received: {path}, which names none. "
            "Pass --model module:factory or --model hub:PRESET."
        )
    length = stored.origin.get("sequence_length")
    with contextlib.redirect_stdout(sys.stderr):
        factory = _model(model or str(stored.origin["model"]), length)
        return stored.bind(factory, sequence_length=length)


@contextlib.contextmanager
def _answered(found: Any, as_json: bool) -> Iterator[None]:
    """Prints the answer after what is done inside, also where that fails: it may have taken hours."""
    try:
        yield
    finally:
        _answer(found, as_json)


def _answer(found: Any, as_json: bool) -> None:
    if as_json:
        return print_json(found.to_dict())
    return print_text(found.text(width(), only_ascii=only_ascii()).rstrip())


def _check_outputs(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise SweepFileError(
                f"Results are written to a file in a directory that exists. Received: {path}. Create the directory, or "
                "name another file."
            )


def _check_figure(plot: Path | None) -> None:
    """Raises InputShapeError unless a figure can be drawn into this file, before anything is searched for it."""
    if plot is None:
        return
    try:
        from autoshard_ilp.plots.base import drawable
    except ImportError as error:
        raise InputShapeError(
            f'Figures need matplotlib: pip install "autoshard-ilp[notebook]". Received: --plot {plot} ({error}).'
        ) from error
    if not drawable(plot.suffix):
        raise InputShapeError(f"A figure is drawn into a .png, .svg or .pdf file. Received: {plot}.")


def _keep(found: Any, output: Path | None, plot: Path | None, drawn: Any = None) -> None:
    """Writes the table and the figure where they were asked for."""
    if output is not None:
        import csv

        rows = found.rows()
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"])
        writer.writeheader()
        writer.writerows({k: "" if _missing(v) else v for k, v in row.items()} for row in rows)
        keep(output, file.getvalue().encode())
        say(f"written to {output}")
    if plot is not None:
        drawing = io.BytesIO()
        (found if drawn is None else drawn).plot().savefig(drawing, format=plot.suffix.removeprefix("."))
        keep(plot, drawing.getvalue())
        say(f"drawn into {plot}")


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _chips(texts: Sequence[str], devices: int | None) -> dict[str, int | None]:
    """``PROFILE[=DEVICES]`` options."""
    found: dict[str, int | None] = {}
    for text in texts:
        name, equals, count = text.rpartition("=")
        if equals and not (count.isdecimal() and len(count) < 19):  # Python reads no number of thousands of digits
            raise InputShapeError(f"Hardware is PROFILE or PROFILE=DEVICES. Received: {text!r}.")
        key = name if equals else text
        if key in found:
            raise InputShapeError(f"Hardware is named once. Received: {key!r} twice.")
        found[key] = int(count) if equals else devices
    return found


def _prices(texts: Sequence[str]) -> dict[str, float] | None:
    found = {}
    for text in texts:
        name, equals, price = text.rpartition("=")
        try:
            found[name] = float(price)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise InputShapeError(f"A price is HARDWARE=PRICE, such as tpu-v5e=1.2. Received: {text!r}.")
    return found or None


def _search(chips: Mapping[str, int | None], devices: int | None, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    from autoshard_ilp.explore.meshes import _devices_of, search_mesh

    if not chips:
        return lambda model: search_mesh(model, devices, None, **options)
    counts = {name: count if count is not None else _devices_of(name) for name, count in chips.items()}
    return lambda model: search_mesh(model, hardware=counts, **options)


def _one(chips: Mapping[str, int | None], option: str) -> str | None:
    if len(chips) > 1:
        raise InputShapeError(f"{option} looks at one hardware. Received: {', '.join(chips)}.")
    return next(iter(chips), None)


def _smallest(chips: Mapping[str, int | None], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    from autoshard_ilp.explore.sizing import smallest_slice

    chip = _one(chips, "--smallest")
    return lambda model: smallest_slice(model, chip, max_devices=chips.get(chip or ""), **options)


def _largest_batch(axes: str, chips: Mapping[str, int | None], options: dict[str, Any]) -> Callable[[Any], Any]:
    from autoshard_ilp.explore.sizing import largest_batch
    from autoshard_ilp.mesh import parse_mesh

    chip, spec = _one(chips, "--largest-batch"), parse_mesh(axes)
    if chips.get(chip or "", None) not in (None, spec.size):
        raise InputShapeError(
            "The mesh of --axes has as many devices as --hardware or --devices says. Received: "
            f"{chips[chip or '']} devices of {chip} and --axes {axes}. Drop the number."
        )
    return lambda model: largest_batch(model, spec, hardware=chip, **options)

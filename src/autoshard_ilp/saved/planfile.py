"""Plan files: versioned JSON, no pickle."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from autoshard_ilp import course
from autoshard_ilp.arguments import file_path
from autoshard_ilp.errors import InputShapeError, PlanFileError
from autoshard_ilp.files import write_whole
from autoshard_ilp.mesh import as_mesh
from autoshard_ilp.placement import Placement
from autoshard_ilp.plan import Leaf, Plan
from autoshard_ilp.report import Cost, Memory, PlannedCollective
from autoshard_ilp.saved import signature
from autoshard_ilp.schema import problem
from autoshard_ilp.sharding import divides

FORMAT = "autoshard-ilp plan"
VERSION = 1
AGREE = 1e-3
"""Relative difference of what one number says and others do: bounds may be rounded."""
_DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan; the file appears whole or not at all."""
    target = file_path(path)
    try:
        write_whole(target, as_text(plan).encode("utf-8"))
    except OSError as error:
        raise PlanFileError(f"A plan is saved to a file that can be written. Received: {target} ({error}).") from error


def as_text(plan: Plan) -> str:
    """A plan as the text of its file."""
    return json.dumps(to_dict(plan), separators=(",", ":"))


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan.

    Raises:
        PlanFileError: the file is missing, truncated, not JSON, not a plan, damaged, or of a newer version.
    """
    source = file_path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(f"A plan file must exist and be readable. Received: {source} ({error}).") from error
    except ValueError as error:
        raise _no_json(str(source), error) from error
    return parsed(text, str(source))


def parsed(text: str, source: str = "a pickled plan") -> Plan:
    """The plan that a text holds.

    Args:
        text: of a plan file.
        source: its name in errors.

    Raises:
        PlanFileError: as :func:`load` does.
    """
    try:
        data = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # half a character, which cannot be written anywhere
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # of JSON, of numbers with too many digits
        raise _no_json(source, error) from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PlanFileError(f'A plan file says "format": "{FORMAT}". Received: {source}, which is something else.')
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise PlanFileError(
            f"This release reads plan files up to version {VERSION}. Received: {source} of version {version!r}. "
            "Upgrade autoshard-ilp, or plan again."
        )
    wrong = problem(data, "plan")
    if wrong is not None:
        raise PlanFileError(
            f"A plan file of version {version} follows its schema (schemas/plan.schema.json). Received: {source} with "
            f"a missing or wrong field: {wrong} Save the plan again."
        )
    try:
        return from_dict(data)
    except (*_DAMAGE, InputShapeError) as error:
        raise PlanFileError(
            f"A plan file of version {version} has all its fields. Received: {source} with a missing or wrong field "
            f"({type(error).__name__}: {error}). Save the plan again."
        ) from error


def _no_json(source: str, error: Exception) -> PlanFileError:
    return PlanFileError(
        f"A plan file is JSON. Received: {source}, which is damaged or cut off ({error}). Save the plan again."
    )


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    simple = (
        "remat_policy",
        "remat",
        "hardware",
        "mode",
        "batch_size",
        "objective",
        "status",
        "lower_bound",
        "gap",
        "unknown",
        "notes",
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": {"axis_names": plan.mesh.axis_names, "axis_sizes": plan.mesh.axis_sizes},
        **{name: getattr(plan, name) for name in simple},
        "timings": dict(plan.timings),
        "origin": dict(plan.origin),
        "signature": dict(plan.signature),
        "specs": _plain(plan.specs),
        "arguments": [dataclasses.asdict(x) for x in plan.arguments],
        "results": [dataclasses.asdict(x) for x in plan.results],
        "cost": dataclasses.asdict(plan.cost),
        "collectives": [dataclasses.asdict(x) for x in plan.collectives],
        "memory": dataclasses.asdict(plan.memory),
        "course": course.to_dict(plan.course),
        "placement": dataclasses.asdict(plan.placement),
    }


def from_dict(data: Mapping[str, Any]) -> Plan:
    """A plan from plain data; raises an error of Python on wrong fields."""
    mesh = as_mesh(list(zip(data["mesh"]["axis_names"], data["mesh"]["axis_sizes"], strict=True)))
    n_axes = len(mesh.axis_names)

    def layout(value: Any) -> tuple[int, ...]:
        if len(value) != n_axes or not all(isinstance(x, int) for x in value):
            raise ValueError(f"layout {value!r}")
        return tuple(value)

    def leaf(value: Mapping[str, Any]) -> Leaf:
        shape, where = tuple(int(n) for n in value["shape"]), layout(value["layout"])
        if max(where) >= len(shape) or not divides(shape, where, mesh.axis_sizes):
            raise ValueError(f"{value['path']!r} of shape {shape} cannot have the layout {list(where)}")
        return Leaf(value["path"], value["role"], shape, value["dtype"], where)

    memory = {**data["memory"], "contributors": tuple((str(n), int(b)) for n, b in data["memory"]["contributors"])}
    stored = data["placement"]
    choices = tuple(
        (tuple(None if lay is None else layout(lay) for lay in operands), tuple(layout(lay) for lay in results))
        for operands, results in stored["choices"]
    )
    if any(not 0 <= i < len(choices) for i in stored["of_op"]):
        raise ValueError("placement refers to a choice that does not exist")
    names = ("hardware", "mode", "batch_size", "objective", "status", "lower_bound", "gap")
    plan = Plan(
        mesh=mesh,
        **{name: data[name] for name in names},
        remat_policy=data["remat_policy"],
        remat=tuple(data["remat"]),
        unknown=tuple(data["unknown"]),
        notes=tuple(data["notes"]),
        timings=dict(data["timings"]),
        origin=dict(data["origin"]),
        signature=_signature(data["signature"]),
        arguments=tuple(leaf(x) for x in data["arguments"]),
        results=tuple(leaf(x) for x in data["results"]),
        cost=Cost(**data["cost"]),
        collectives=tuple(_collective(x) for x in data["collectives"]),
        memory=Memory(**memory),
        course=course.from_dict(data["course"]) if data["course"] else course.Course(),
        placement=Placement(
            choices,
            tuple(int(i) for i in stored["of_op"]),
            stored["fingerprint"],
            tuple((int(op), int(i), tuple(layout(lay) for lay in between)) for op, i, between in stored["via"]),
            tuple((str(name), int(count)) for name, count in stored["primitives"]),
        ),
    )
    _agrees(plan, data.get("specs"))
    return plan


def _agrees(plan: Plan, specs: Mapping[str, Any] | None) -> None:
    """ValueError where a file says a thing twice, and otherwise."""
    total, bound = plan.cost.total_s, plan.lower_bound
    if plan.objective == "step_time" and total > 0:
        if bound > total * (1 + AGREE):
            raise ValueError(f"lower_bound {bound:g} of a step that takes {total:g} s")
        if abs(plan.gap - max(0.0, 1 - bound / total)) > AGREE:
            raise ValueError(f"gap {plan.gap:g} between lower_bound {bound:g} and cost.total_s {total:g}")
    if specs is not None and _plain(plan.specs) != specs:
        raise ValueError("specs that are not the layouts of arguments and results")


def _plain(specs: Mapping[str, Any]) -> dict[str, Any]:
    return {path: [list(e) if isinstance(e, tuple) else e for e in spec] for path, spec in specs.items()}


def _signature(stored: Mapping[str, Any]) -> dict[str, Any]:
    if stored.get("args") is not None:
        signature.check(stored["args"])
    return dict(stored)


def _collective(fields: Mapping[str, Any]) -> PlannedCollective:
    named = {name: tuple(fields[name]) for name in ("mesh_axes", "op_ids") if name in fields}
    return PlannedCollective(**{**fields, **named})

"""What a sweep is made of: cases, each one planning problem in plain data, with a key that does not change."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard_ilp.arguments import file_path, integer
from autoshard_ilp.errors import InputShapeError, SweepFileError
from autoshard_ilp.mesh import MeshSpec, as_mesh, parse_mesh
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.schema import problem
from autoshard_ilp.units import parse_bytes

OPTIMAL = "optimal"
HARDWARE_BUDGET = "hardware"
AXES = (
    *("models", "meshes", "hardware", "budgets", "batch_sizes", "sequence_lengths"),
    *("modes", "objectives", "remat", "strategies"),
)
SOLVER = {"time_limit": 60.0, "relative_gap": 0.0, "seed": 0, "workers": None}


@dataclass(frozen=True)
class Case:
    """One planning problem.

    Attributes:
        model: as it is named in the results.
        mesh: such as "data=2,model=4".
        hardware: profile name, slice or TOML file.
        profile_hash: of the profile's figures, so that a changed profile is another case.
        memory_budget: as given; "hardware" for what the hardware has.
        batch_size, sequence_length: None: as ``optimize`` chooses.
        mode, objective, remat: as for ``optimize``.
        strategy: "optimal", or the name of a baseline.
        time_limit_s, relative_gap, seed: of the solver.
        solver_workers: threads of the solver; no part of the key.
    """

    model: str
    mesh: str
    hardware: str
    profile_hash: str
    memory_budget: str
    batch_size: int | None
    sequence_length: int | None
    mode: str
    objective: str
    remat: str
    strategy: str
    time_limit_s: float
    relative_gap: float
    seed: int
    solver_workers: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Hash of everything that decides the result but the model's own code."""
        text = json.dumps({k: v for k, v in self.__dict__.items() if k != "solver_workers"}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def trace_key(self) -> tuple[Any, ...]:
        """Cases with equal ones share a trace."""
        devices = None if self.batch_size is not None else parse_mesh(self.mesh).size
        return (self.model, self.batch_size, self.sequence_length, self.mode, devices)

    @property
    def budget(self) -> str | int | None:
        """As ``optimize`` takes it."""
        if self.memory_budget == HARDWARE_BUDGET:
            return None
        return int(self.memory_budget) if self.memory_budget.isdecimal() else self.memory_budget


@dataclass(frozen=True, eq=False)
class Work:
    """A whole sweep.

    Attributes:
        cases: in order, each key once.
        models: name -> "hub:..." or "module:factory", or an object that only this process has.
        profiles: hardware objects that only this process has, by name.
    """

    cases: tuple[Case, ...]
    models: Mapping[str, Any]
    profiles: Mapping[str, Any]

    @property
    def portable(self) -> bool:
        """Whether other processes can run it."""
        return not self.profiles and all(isinstance(m, str) for m in self.models.values())


def read_sweep(path: Any) -> dict[str, Any]:
    """Reads and checks a sweep file (TOML).

    Raises:
        SweepFileError: missing, no TOML, an unknown key, an empty axis, a value of the wrong kind.
    """
    source = file_path(path)
    try:
        data = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepFileError(f"A sweep file must exist and be readable. Received: {source} ({error}).") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SweepFileError(f"A sweep file is TOML. Received: {source} ({error}).") from error
    wrong = problem(data, "sweep")
    if wrong is not None:
        raise SweepFileError(
            f"A sweep file has models and meshes, and optional axes ({', '.join(AXES[2:])}), output, [solver] and "
            f"[run]. Received: {source}, in which {wrong}"
        )
    return data


def work_of(axes: Mapping[str, Any], solver: Mapping[str, Any]) -> Work:
    """Every combination of some axes, checked.

    Args:
        axes: of :data:`AXES`; None or absent: the default of ``optimize``. ``models`` may be a mapping name -> model.
        solver: of :data:`SOLVER`.

    Raises:
        InputShapeError: an unknown or empty axis, or a value that makes no sense.
        ProfileError: unknown hardware.
        UnsupportedModelError: an unknown model.
    """
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise InputShapeError(f"The axes of a sweep are {', '.join(AXES)}. Received: {unknown[0]!r}.")
    models = _models(axes.get("models"))
    chips, profiles = _hardware(axes.get("hardware"))
    options = {**SOLVER, **solver}
    SolverOptions(**options)  # checked here, not case by case
    lists: tuple[list[Any], ...] = (
        list(models),
        [_mesh_text(m) for m in _axis(axes, "meshes", None)],
        chips,
        [_budget_text(b) for b in _axis(axes, "budgets", [None])],
        _integers(axes, "batch_sizes"),
        _integers(axes, "sequence_lengths"),
        _names(axes, "modes", "train", ("train", "predict")),
        _names(axes, "objectives", "step_time", ("step_time", "communication")),
        [_policy(p) for p in _axis(axes, "remat", ["auto"])],
        _strategies(axes),
    )
    cases = []
    for model, mesh, (chip, digest), *rest in itertools.product(*lists):
        budget, batch, length, mode, objective, remat, strategy = rest
        cases.append(
            Case(model, mesh, chip, digest, budget, batch, length, mode, objective, remat, strategy,
                 float(options["time_limit"]), float(options["relative_gap"]), int(options["seed"]),
                 integer(options["workers"]))
        )  # fmt: skip
    return Work(tuple(dict.fromkeys(cases)), models, profiles)


def _axis(axes: Mapping[str, Any], name: str, default: list[Any] | None) -> list[Any]:
    values = axes.get(name)
    if values is None:
        if default is None:
            raise InputShapeError(f"A sweep needs {name}. Received: none.")
        return default
    if isinstance(values, str | int | Mapping) or not hasattr(values, "__iter__"):
        values = [values]  # one value is an axis of one
    found = list(values)
    if not found:
        raise InputShapeError(f"Every axis of a sweep has at least one value. Received: {name}=[]. Drop the axis.")
    return found


def _models(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        named = {str(name): model for name, model in given.items()}
    else:
        named = {}
        for model in _axis({"models": given if not callable(given) else [given]}, "models", None):
            name = model if isinstance(model, str) else getattr(model, "name", None) or getattr(model, "__name__", "")
            if not _is_model(model):
                raise _no_model(model)
            if not name or name in named:
                raise InputShapeError(
                    f"The models of a sweep have different names. Received: {name!r}. Pass a mapping."
                )
            named[str(name)] = model
    if not named:
        raise InputShapeError("Every axis of a sweep has at least one value. Received: models={}.")
    return {name: _portable(name, model) for name, model in named.items()}


def _portable(name: str, model: Any) -> Any:
    """A model's text where it has one, since other processes can build it from that; checked."""
    from autoshard_ilp.models import load_model_factory

    if isinstance(model, str):
        load_model_factory(model)
        return model
    module, qualname = getattr(model, "__module__", ""), getattr(model, "__qualname__", "")
    if callable(model) and module not in ("", "__main__", None) and "<" not in qualname and "." not in qualname:
        import sys

        if getattr(sys.modules.get(module), qualname, None) is model:
            return f"{module}:{qualname}"
    if not _is_model(model):
        raise _no_model(model, f"{name!r}: ")
    return model


def _is_model(given: Any) -> bool:
    return isinstance(given, str) or callable(given) or hasattr(given, "trainable_variables")


def _no_model(given: Any, where: str = "") -> InputShapeError:
    return InputShapeError(
        "A model of a sweep is text (hub:PRESET, module:factory), a builder or a keras.Model. Received: "
        f"{where}{given!r} of type {type(given).__name__}."
    )


def _hardware(given: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """(name, hash of its figures) of every profile, and those that are objects."""
    from autoshard_ilp.costs.profile import HardwareProfile, load_profile

    found, objects = [], {}
    many = [given] if isinstance(given, HardwareProfile) else _axis({"h": given}, "h", ["cpu-host"])
    for chip in many:
        if isinstance(chip, HardwareProfile):
            name, profile = chip.name, chip
            objects[name] = chip
        else:
            name = str(chip)
            profile = load_profile(name if name.endswith(".toml") else name.partition(":")[0])
        figures = {k: dict(v) if isinstance(v, Mapping) else v for k, v in profile.__dict__.items()}
        figures.pop("figure_sources", None)
        digest = hashlib.sha256(repr(sorted(figures.items(), key=lambda x: x[0])).encode()).hexdigest()[:12]
        found.append((name, digest))
    return found, objects


def _mesh_text(mesh: Any) -> str:
    spec: MeshSpec = parse_mesh(mesh) if isinstance(mesh, str) else as_mesh(mesh)
    return ",".join(f"{n}={s}" for n, s in zip(spec.axis_names, spec.axis_sizes, strict=True))


def _budget_text(budget: Any) -> str:
    if budget is None or budget == HARDWARE_BUDGET:
        return HARDWARE_BUDGET
    digits = isinstance(budget, str) and re.fullmatch("[0-9]{1,18}", budget)  # more would not be read as a number
    parse_bytes(int(budget) if digits else budget)
    return str(budget)


def _integers(axes: Mapping[str, Any], name: str) -> list[int | None]:
    values = _axis(axes, name, [None])
    for value in values:
        if value is not None and (integer(value) or 0) < 1:
            raise InputShapeError(f"{name} are positive integers. Received: {value!r}.")
    return [integer(value) for value in values]


def _names(axes: Mapping[str, Any], name: str, default: str, known: Sequence[str]) -> list[str]:
    values = _axis(axes, name, [default])
    for value in values:
        if value not in known:
            raise InputShapeError(f"{name} are of {', '.join(known)}. Received: {value!r}.")
    return values


def _policy(text: Any) -> str:
    from autoshard_ilp.request import remat_policies

    remat_policies(text, "train")
    return str(text)


def _strategies(axes: Mapping[str, Any]) -> list[str]:
    from autoshard_ilp.baselines import BASELINES

    return _names(axes, "strategies", OPTIMAL, (OPTIMAL, *BASELINES))


def grouped(cases: Sequence[Case]) -> Iterator[Case]:
    """Cases in an order in which those that share a trace follow each other."""
    order: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        order.setdefault(case.trace_key, []).append(case)
    return (case for group in order.values() for case in group)

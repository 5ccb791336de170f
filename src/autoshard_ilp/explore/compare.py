"""``plan.compare``: which tensors lie differently in another plan, and what the differences cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp.errors import PlanMismatchError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.differences import Difference, collective_differences
from autoshard_ilp.names import common, pattern
from autoshard_ilp.plan import Plan
from autoshard_ilp.sharding import local_bytes, to_partition_spec

SHOWN = 30


@dataclass(frozen=True, eq=False)
class TensorDifference:
    """Tensors (of repeated layers) that lie one way in the first plan and another way in the second.

    Attributes:
        name: path, with ``*`` for numbers where it stands for several.
        paths: all of them.
        shape, dtype: of each.
        spec, other_spec: layouts in the two plans.
        bytes_per_device: all of them together in the second plan, minus the first.
        collective_s: seconds per step of collectives that move these tensors, in the second plan minus the first.
        alone_s: seconds per step that the first plan would gain or lose if it were made to lay out only these tensors
            as the second does, everything else staying as it is; None when the first plan has no trail.
        best_s: the same when everything else may follow: the cost of the best plan with this difference, minus the
            first plan's; None unless it was asked for.
        proved: whether ``best_s`` is exact.
    """

    name: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: Any
    other_spec: Any
    bytes_per_device: int
    collective_s: float
    alone_s: float | None = None
    best_s: float | None = None
    proved: bool = False


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two plans of one model side by side; every difference is the second minus the first.

    Attributes:
        first, second: the plans.
        tensors: what lies differently, the dearest first.
        collectives: what the second sends more of (or less).
        notes: what the plans do not share (mesh, hardware, batch, policy).
    """

    first: Plan
    second: Plan
    tensors: tuple[TensorDifference, ...]
    collectives: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds per step that the second plan takes more than the first."""
        return self.second.cost.total_s - self.first.cost.total_s

    def totals(self) -> list[tuple[str, float, float]]:
        """(what, first, second): seconds and bytes of the two plans."""
        a, b = self.first, self.second
        found = [(f"{name}_s", getattr(a.cost, f"{name}_s"), getattr(b.cost, f"{name}_s"))
                 for name in ("total", "compute", "communication")]  # fmt: skip
        kinds = dict.fromkeys([*a.cost.per_kind, *b.cost.per_kind])
        found += [(f"{kind}_s", a.cost.per_kind.get(kind, 0.0), b.cost.per_kind.get(kind, 0.0)) for kind in kinds]
        found.append(("peak_bytes", a.memory.peak_bytes, b.memory.peak_bytes))
        parts = a.memory.parts
        found += [(f"{part}_bytes", held, b.memory.parts[part]) for part, held in parts.items()]
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One record per differing tensor (repeated layers together); seconds and bytes, second minus first."""
        return [
            {
                "tensor": t.name,
                "count": len(t.paths),
                "shape": t.shape,
                "dtype": t.dtype,
                "layout": show.spec_text(t.spec, len(t.shape)),
                "other_layout": show.spec_text(t.other_spec, len(t.shape)),
                "bytes_per_device": t.bytes_per_device,
                "collective_s": t.collective_s,
                "alone_s": t.alone_s,
                "best_s": t.best_s,
            }
            for t in self.tensors
        ]

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        columns = ("tensor", "count", "shape", "dtype", "layout", "other_layout", "bytes_per_device")
        return show.dataframe(self.rows(), (*columns, "collective_s", "alone_s", "best_s"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "totals": {name: {"first": a, "second": b} for name, a, b in self.totals()},
            "tensors": [
                row | {"shape": list(t.shape), "paths": list(t.paths), "proved": t.proved}
                for row, t in zip(self.rows(), self.tensors, strict=True)
            ],
            "collectives": [d.__dict__ | {"mesh_axes": list(d.mesh_axes)} for d in self.collectives],
            "notes": list(self.notes),
        }

    def text(self, width: int | None = None, *, only_ascii: bool = False) -> str:
        """The comparison as plain text."""
        from autoshard_ilp.explore.compare_text import text

        return text(self, width or 110, only_ascii=only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(130))


def compare(plan: Plan, other: Plan, *, price: bool = False, time_limit: float = 60.0) -> Comparison:
    """Which tensors lie differently in another plan of the same model, and what each difference costs.

    Args:
        plan, other: two plans of one model; their meshes, hardware and batches may differ.
        price: solve again for every difference: the best plan that has just this one (``best_s``). Needs the plan's
            model (a plan made by this process, or bound to it) and the same mesh.
        time_limit: seconds for all of that together.

    Raises:
        PlanMismatchError: the plans are of different models.
    """
    _check_same_model(plan, other)
    notes = _notes(plan, other)
    same_mesh = plan.mesh == other.mesh
    if price and not same_mesh:
        raise PlanMismatchError(
            f"A difference is priced on one mesh. Received: plans on {plan.mesh} and on {other.mesh} with price=True. "
            "Compare without price=, or plan.what_if(mesh=...) first."
        )
    groups = _groups(plan, other)
    tensors = [_difference(plan, other, name, pairs) for name, pairs in groups.items()]
    if same_mesh and plan.trail is not None:
        tensors = [_alone(plan, t, pairs) for t, pairs in zip(tensors, groups.values(), strict=True)]
    if price:
        tensors = [_priced(plan, t, time_limit / len(tensors)) for t in tensors]
    tensors.sort(key=lambda t: (-abs(t.best_s or 0.0), -abs(t.alone_s or 0.0), -abs(t.bytes_per_device), t.name))
    return Comparison(
        plan, other, tuple(tensors), tuple(collective_differences(plan.collectives, other.collectives)), notes
    )


def _check_same_model(plan: Plan, other: Plan) -> None:
    def variables(p: Plan) -> list[Any]:
        return [x for x in p.arguments if x.role not in ("input", "target", "sample_weight")]

    if not isinstance(other, Plan):
        raise PlanMismatchError(f"A plan is compared with a plan. Received: {type(other).__name__}.")
    mine, theirs = variables(plan), variables(other)  # by position: Keras numbers the names of a model built twice
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        pairs = zip(mine, theirs, strict=False)
        found = next((f"{a.path} {a.shape} and {b.path} {b.shape}" for a, b in pairs if a.shape != b.shape), "")
        raise PlanMismatchError(
            f"Two plans are compared for one model. Received: plans of {len(mine)} and {len(theirs)} variables"
            f"{', which differ from ' + found if found else ''}. Plan one model twice."
        )


def _notes(plan: Plan, other: Plan) -> tuple[str, ...]:
    found = []
    for what in ("mode", "batch_size", "hardware", "objective", "remat_policy"):
        a, b = getattr(plan, what), getattr(other, what)
        if a != b:
            found.append(f"{what.replace('_', ' ')}: {a} against {b}")
    if plan.mesh != other.mesh:
        found.append(f"mesh: {plan.mesh} against {other.mesh}")
    if plan.memory.budget_bytes != other.memory.budget_bytes:
        from autoshard_ilp.display.render import size

        budgets = [size(p.memory.budget_bytes) if p.memory.budget_bytes else "none" for p in (plan, other)]
        found.append(f"memory budget: {budgets[0]} against {budgets[1]}")
    return tuple(found)


Pairs = list[tuple[Any, Any]]


def _groups(plan: Plan, other: Plan) -> dict[str, Pairs]:
    """Leaves that lie differently, those of repeated layers under one name."""
    found: dict[tuple[Any, ...], Pairs] = {}
    state = {leaf.path for leaf in plan.arguments}
    results = [(a, b) for a, b in zip(plan.results, other.results, strict=False) if a.path not in state]
    sides = [*zip(plan.arguments, other.arguments, strict=False), *results]
    for leaf, twin in sides:
        if len(twin.shape) != len(leaf.shape):
            continue
        specs = _spec(plan, leaf), _spec(other, twin)
        if specs[0] != specs[1]:
            key = (pattern(leaf.path), leaf.role, leaf.shape, leaf.dtype, *map(str, specs))
            found.setdefault(key, []).append((leaf, twin))
    named: dict[str, Pairs] = {}
    for pairs in found.values():
        name = common(leaf.path for leaf, _ in pairs)
        while name in named:
            name += " "  # the same layers in two ways: both are shown
        named[name] = pairs
    return named


def _spec(plan: Plan, leaf: Any) -> Any:
    return to_partition_spec(leaf.layout, len(leaf.shape), plan.mesh.axis_names)


def _difference(plan: Plan, other: Plan, name: str, pairs: Pairs) -> TensorDifference:
    from autoshard_ilp.display.records import itemsize

    leaf, twin = pairs[0]
    paths = tuple(a.path for a, _ in pairs)

    def held(p: Plan, leaves: Sequence[Any]) -> int:
        return sum(local_bytes(x.shape, itemsize(x.dtype), x.layout, p.mesh.axis_sizes) for x in leaves)

    def moved(p: Plan, names: Sequence[str]) -> float:
        return sum(c.seconds * c.count for c in p.collectives if c.tensor in names)

    return TensorDifference(
        name.rstrip(),
        paths,
        leaf.shape,
        leaf.dtype,
        _spec(plan, leaf),
        _spec(other, twin),
        held(other, [b for _, b in pairs]) - held(plan, [a for a, _ in pairs]),
        moved(other, [b.path for _, b in pairs]) - moved(plan, paths),
    )


def _alone(plan: Plan, tensor: TensorDifference, pairs: Pairs) -> TensorDifference:
    """What changes when only these tensors lie as in the other plan and no other decision follows."""
    from autoshard_ilp.pins import boundary_layouts

    trail = plan.trail
    assert trail is not None
    table, program = trail.costs, trail.program
    wanted = {a.path: b.layout for a, b in pairs}
    choices = trail.solution.choices.copy()
    for index in {int(table.class_of[op]) for op in (*table.graph.arguments, *table.graph.results)
                  if table.graph.ops[op].path in wanted}:  # fmt: skip
        layout = wanted[_path_in(table, index, wanted)]
        options = [s for s, lay in enumerate(boundary_layouts(table, index)) if lay == layout]
        if not options:
            return tensor
        trials = []
        for s in options:
            choices[index] = s
            trials.append((program.cost(choices), s))
        choices[index] = min(trials)[1]
    extra = program.cost(choices) - program.cost(trail.solution.choices)
    return replace(tensor, alone_s=extra) if math.isfinite(extra) else tensor


def _path_in(table: Any, index: int, wanted: Mapping[str, Any]) -> str:
    ops = (table.graph.ops[op] for op in (*table.graph.arguments, *table.graph.results))
    return next(op.path for op in ops if int(table.class_of[op.id]) == index and op.path in wanted)


def _priced(plan: Plan, tensor: TensorDifference, seconds: float) -> TensorDifference:
    """The best plan with this difference."""
    from autoshard_ilp.errors import InfeasibleError
    from autoshard_ilp.explore.whatif import what_if, with_trail

    plan = with_trail(plan)
    assert plan.trail is not None
    request = plan.trail.request
    kept = {
        text: spec for text, spec in (request.pins or {}).items() if not any(re.search(text, p) for p in tensor.paths)
    }
    pins = kept | {rf"^{re.escape(path)}$": tensor.other_spec for path in tensor.paths}
    solver = replace(request.solver, time_limit=seconds)
    try:
        found = what_if(plan, pins=pins, remat=plan.remat_policy if plan.mode == "train" else None, solver=solver)
    except InfeasibleError:
        return replace(tensor, best_s=math.inf, proved=True)
    extra = found.cost.total_s - plan.cost.total_s
    return replace(tensor, best_s=extra, proved=found.status == "optimal")

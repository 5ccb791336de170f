"""A plan as Keras's own objects: ``keras.distribution.Distribution`` and ``LayoutMap``.

Both carry every variable's layout exactly. What they cannot carry is said in a warning: Keras gives an optimizer's
slots the layout of their parameter, and shards data over one mesh axis. Interior layouts are left to XLA's propagation;
``plan.apply`` and ``plan.scope`` enforce those as well.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoshard_ilp.errors import PlanMismatchError
from autoshard_ilp.plan import Leaf, Plan
from autoshard_ilp.sharding import to_partition_spec

_VARIABLES = ("parameter", "non_trainable", "optimizer", "metric", "seed")
_AT_MOST = 4


def planned_distribution(plan: Plan) -> Any:
    """``plan.distribution()``; see there."""
    from autoshard_ilp.keras_integration.distribution import PlannedDistribution, device_mesh

    variables = _variables(plan, "distribution")
    _warn(_slots_that_follow(plan), "A keras.distribution.Distribution")
    traced = plan.executable.traced if plan.executable is not None else None
    creation = () if traced is None else traced.creation
    return PlannedDistribution(
        device_mesh(plan.mesh.concrete()),
        {x.path: _axes(plan, x) for x in variables},
        {x.path: x.shape for x in variables},
        [None if i is None else plan.arguments[i].path for i in creation],
        [(x.shape, _axes(plan, x)) for x in plan.arguments if x.role not in _VARIABLES],
    )


def planned_layout_map(plan: Plan) -> Any:
    """``plan.layout_map()``; see there."""
    from autoshard_ilp.keras_integration.distribution import PlannedLayoutMap, device_mesh

    variables = _variables(plan, "layout_map")
    lost = [*_slots_that_follow(plan), *_data_elsewhere(plan), *_same_paths(plan)]
    _warn(lost, "A keras.distribution.LayoutMap")
    layouts = {x.path: _axes(plan, x) for x in variables if "#" not in x.path}
    return PlannedLayoutMap(device_mesh(plan.mesh.concrete()), layouts, lost)


def _variables(plan: Plan, what: str) -> list[Leaf]:
    if plan.mode == "function":
        raise PlanMismatchError(
            f"plan.{what}() takes a plan of a Keras model, whose variables have paths. Received: a plan of a plain JAX "
            "function. Use plan.in_shardings."
        )
    return [x for x in plan.arguments if x.role in _VARIABLES]


def _axes(plan: Plan, leaf: Leaf) -> tuple[Any, ...]:
    spec = tuple(to_partition_spec(leaf.layout, len(leaf.shape), plan.mesh.axis_names))
    return spec + (None,) * (len(leaf.shape) - len(spec))


def _warn(lost: list[str], what: str) -> None:
    if lost:
        warnings.warn(f"{what} cannot express all of this plan: {' '.join(lost)}", stacklevel=4)


def _named(leaves: list[Leaf]) -> str:
    more = f" and {len(leaves) - _AT_MOST} more" if len(leaves) > _AT_MOST else ""
    return ", ".join(repr(x.path) for x in leaves[:_AT_MOST]) + more


def _slots_that_follow(plan: Plan) -> list[str]:
    """Optimizer slots that the plan lays out in another way than their parameter."""
    traced = plan.executable.traced if plan.executable is not None else None
    if traced is None:
        return _slots_by_name(plan)
    slots = [
        leaf
        for leaf, info in zip(plan.arguments, traced.arguments, strict=True)
        if info.reference is not None
        and leaf.shape == plan.arguments[info.reference].shape
        and leaf.layout != plan.arguments[info.reference].layout
    ]
    return _slot_text(slots)


def _slots_by_name(plan: Plan) -> list[str]:
    """As above for a loaded plan: a slot's name begins with its parameter's path."""
    parameters = {x.path.replace("/", "_"): x for x in plan.arguments if x.role == "parameter"}
    slots = []
    for x in plan.arguments:
        name = x.path.split("/")[-1]
        owner = next((p for path, p in parameters.items() if name.startswith(path + "_")), None)
        if x.role == "optimizer" and owner is not None and x.shape == owner.shape and x.layout != owner.layout:
            slots.append(x)
    return _slot_text(slots)


def _slot_text(slots: list[Leaf]) -> list[str]:
    if not slots:
        return []
    return [
        f"Keras lays out an optimizer's slots like their parameter, which the plan does not for {len(slots)} of them "
        f"({_named(slots)}); their memory and collectives will not be the plan's. Use plan.apply or plan.scope."
    ]


def _data_elsewhere(plan: Plan) -> list[str]:
    """Inputs that Keras's ModelParallel, which splits the batch over one axis, would lay out in another way."""
    first = plan.mesh.axis_names[0]
    data = [x for x in plan.arguments if x.role not in _VARIABLES and x.shape]
    other = [x for x in data if _axes(plan, x)[0] != first or any(_axes(plan, x)[1:])]
    if not other:
        return []
    alone = {_axes(plan, x)[0] for x in data}
    axis = next(iter(alone)) if len(alone) == 1 else None
    if isinstance(axis, str) and not any(any(_axes(plan, x)[1:]) for x in data):
        return [f"ModelParallel splits the batch over {first!r} unless it is given batch_dim_name={axis!r}."]
    return [
        f"ModelParallel splits every input's first dimension over one mesh axis, which the plan does not for "
        f"{_named(other)}. plan.distribution() keeps the plan's data layout."
    ]


def _same_paths(plan: Plan) -> list[str]:
    """Variables that share their path with another one of another layout."""
    by_path = {x.path: x for x in plan.arguments}
    twins = [x for x in plan.arguments if "#" in x.path and x.role in _VARIABLES]
    twins = [x for x in twins if by_path[x.path.split("#")[0]].layout != x.layout]
    if not twins:
        return []
    return [f"Several variables have one path, so {_named(twins)} get the layout of the first of them."]

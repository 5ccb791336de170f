"""``with plan.scope(): model = build()``: variables and optimizer slots that are born sharded.

Inside the scope a variable gets a shape, a dtype and its initializer, but no value; a value that is assigned to it
(loading weights) is laid out at once. At the end one compiled program runs all initializers that are left, each device
computing its own shards, and the plan is applied. The values are those of a build without the scope from the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard_ilp import keras_integration as ki
from autoshard_ilp.errors import PlanMismatchError
from autoshard_ilp.keras_runtime.runtime import apply_plan
from autoshard_ilp.plan import Plan


@contextlib.contextmanager
def planned_scope(plan: Plan) -> Iterator[Plan]:
    """``plan.scope()``; see there."""
    if plan.mode == "function":
        raise PlanMismatchError(
            "plan.scope() takes a plan of a Keras model. Received: a plan of a plain JAX function. Lay out your own "
            "state with jax.device_put(state, plan.in_shardings[0])."
        )
    ki.ensure_jax_backend()
    expected = _Expected(plan)
    with ki.abstract_construction(expected.sharding) as build:
        yield plan
    model = _planned_model(plan, build.models)
    mine = {id(v) for mode in ki.GROUPS for group in ki.state_variables(model, mode) for v in group}
    for variable in build.variables:
        if id(variable) not in mine and variable._value is None:
            variable._initialize_with_initializer(variable._initializer)  # of another model built on the way
    if plan.mode == "train" and not model.compiled:
        _apply_when_compiled(plan, model, expected)
        return
    try:
        apply_plan(plan, model)
    except PlanMismatchError as error:
        # KerasHub's tasks compile themselves; the user's own compile() may follow after the scope.
        variables = [tuple(v.shape) for group in ki.state_variables(model, "predict") for v in group]
        if plan.mode != "train" or variables != [x.shape for x in plan.arguments[: len(variables)]]:
            raise
        _apply_when_compiled(plan, model, expected)
        ki.refuse_training(model, error)


class _Expected:
    """The sharding of every variable that a scope is about to see."""

    def __init__(self, plan: Plan) -> None:
        from jax.sharding import NamedSharding

        from autoshard_ilp.sharding import to_partition_spec

        mesh, names = plan.mesh.concrete(), plan.mesh.axis_names
        self.leaves = plan.arguments
        self.shardings = [NamedSharding(mesh, to_partition_spec(x.layout, len(x.shape), names)) for x in plan.arguments]
        traced = plan.executable.traced if plan.executable is not None else None
        self.creation: Sequence[int | None] = () if traced is None else traced.creation
        self.by_path = {x.path: i for i, x in enumerate(plan.arguments)}

    def sharding(self, position: int, variable: Any) -> Any:
        """By order of creation where the plan knows it, else by path; None where neither fits."""
        candidates = [self.creation[position] if position < len(self.creation) else None]
        candidates.append(self.by_path.get(variable.path))
        for i in candidates:
            if i is not None and self.leaves[i].shape == tuple(variable.shape):
                return self.shardings[i]
        return None


def _planned_model(plan: Plan, models: Sequence[Any]) -> Any:
    """The outermost model that was built in the scope; of several, the one whose variables are the planned ones."""
    inner = {id(layer) for m in models for layer in m._flatten_layers(include_self=False)}
    inner |= {id(m._functional) for m in models if getattr(m, "_functional", None) is not None}
    roots = [m for m in models if id(m) not in inner]
    if len(roots) > 1:
        planned = sorted(x.shape for x in plan.arguments if x.role in ("parameter", "non_trainable", "seed"))
        fitting = [m for m in roots if sorted(_shapes(m)) == planned]
        roots = fitting[-1:] if fitting else roots
    if len(roots) != 1:
        raise PlanMismatchError(
            f"plan.scope() is for building the planned model, one model. Received: "
            f"{', '.join(repr(m.name) for m in roots) or 'no model'}. Build it inside: with plan.scope(): "
            "model = build()."
        )
    return roots[0]


def _shapes(model: Any) -> list[tuple[int, ...]]:
    return [tuple(v.shape) for group in ki.state_variables(model, "predict") for v in group]


def _apply_when_compiled(plan: Plan, model: Any, expected: _Expected) -> None:
    """Creates the variables now; the optimizer's slots, and the step, follow when the model is compiled."""
    variables = [v for group in ki.state_variables(model, "predict") for v in group]
    found = [tuple(v.shape) for v in variables]
    if found != [x.shape for x in plan.arguments[: len(found)]]:
        raise PlanMismatchError(
            f"plan.scope() is for building the planned model. Received: {model.name!r}, whose {len(found)} variables "
            "have other shapes than the planned ones, or which is not built yet. Build and compile it inside the scope."
        )
    shardings = expected.shardings[: len(found)]
    for variable, sharding, value in zip(variables, shardings, ki.create_values(variables, shardings), strict=True):
        variable._value, variable._layout = value, sharding
    compile_model = model.compile

    def compile_and_apply(*args: Any, **kwargs: Any) -> None:
        ki.allow_training(model)
        compile_model(*args, **kwargs)
        del model.compile
        apply_plan(plan, model)

    model.compile = compile_and_apply

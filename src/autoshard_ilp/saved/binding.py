"""Joining a plan with a step again: after loading it from a file, or for another instance of the same model.

The step is traced anew and compared with what the plan was made for. A plan is a layout per operation, in order, so it
fits exactly the graphs that hash alike; everything below the hash only serves to say what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoshard_ilp.errors import InputShapeError, PlanFileError, PlanMismatchError, UnsupportedModelError
from autoshard_ilp.graph.step import Step
from autoshard_ilp.placement import misfit
from autoshard_ilp.saved import signature as structure
from autoshard_ilp.saved.identity import differences
from autoshard_ilp.saved.renaming import named_as

if TYPE_CHECKING:
    from autoshard_ilp.plan import Plan

_BATCH = ("inputs", "targets", "sample_weight")


def bind(plan: Plan, target: Any, **options: Any) -> Plan:
    """``plan`` with the step of ``target``, traced again.

    Args:
        plan: any plan; one just loaded has no step.
        target: a Keras model or a builder, or the function of a plan made by ``optimize_fn``.
        options: for a model, those of :func:`autoshard_ilp.trace.trace_model`; for a function ``args``, as for
            ``optimize_fn``, needed only where they hold classes of their own.

    Raises:
        PlanMismatchError: the step is not the one that the plan was made for.
        InputShapeError: unknown options, or the plan cannot know the arguments and none were given.
    """
    if plan.mode == "function":
        what, step = "function", _function_step(plan, target, **options)
        difference = next(differences(plan, step.graph), None)
    else:
        what, step = "model", _traced_model(plan, target, options)
        difference = _model_difference(plan, step)
    if difference is not None:
        raise PlanMismatchError(
            f"A plan fits the {what} it was made for. {difference}{_other_versions(plan)} Plan again for this {what}."
        )
    damage = misfit(plan.placement, step.graph, len(plan.mesh.axis_names))
    if damage is not None:
        raise PlanFileError(
            f"A plan says where every tensor of its step lies. Received: a plan whose {damage}. Plan again."
        )
    return replace(named_as(plan, step), executable=step, signature=structure.signature_of(step))


def _traced_model(plan: Plan, model: Any, options: Mapping[str, Any]) -> Step:
    """The step of a model; where it has none, because its variables have changed, what has changed."""
    from autoshard_ilp.keras_runtime.mismatch import differences as in_keras_terms
    from autoshard_ilp.trace import variables_of

    try:
        return _model_step(plan, model, options)
    except (UnsupportedModelError, InputShapeError) as error:
        found = variables_of(model, plan.mode)
        roles = {argument.role for argument in found}
        what = in_keras_terms([x for x in plan.arguments if x.role in roles], found) if found else ""
        if not what:
            raise
        raise PlanMismatchError(
            f"A plan fits the model it was made for. Received: a model that differs: {what}. Its own step fails, too; "
            f"compile it again, then plan again. ({error})"
        ) from error


def _model_difference(plan: Plan, step: Step) -> str | None:
    """What differs, in Keras's terms where they tell it."""
    from autoshard_ilp.keras_runtime.mismatch import differences as in_keras_terms

    difference = next(differences(plan, step.graph), None)
    if difference is None:
        return None
    graph = plan.executable.graph if plan.executable is not None else None
    what = in_keras_terms(plan.arguments, step.traced.arguments, graph, step.graph)
    return f"Received: a model that differs: {what}." if what else difference


def _model_step(plan: Plan, model: Any, options: Mapping[str, Any]) -> Step:
    from autoshard_ilp.graph.step import trace_step

    known: dict[str, Any] = {"batch_size": plan.batch_size, "mode": plan.mode, "remat": plan.remat_policy}
    known["one_copy"] = plan.one_copy
    stored = plan.signature.get("args")
    # The remembered batch stands for what the caller leaves out; a batch of his own replaces all of it.
    if stored is not None and not any(options.get(name) is not None for name in _BATCH):
        known |= dict(zip(_BATCH, _decoded(stored), strict=False))
    step, _ = trace_step(model, plan.mesh, **{**known, **options})
    return step


def _decoded(stored: Mapping[str, Any]) -> Any:
    """The remembered arguments; PlanFileError where they cannot be read."""
    try:
        found = structure.decode(stored)
        if not isinstance(found, (tuple, list)):
            raise TypeError(f"{type(found).__name__} instead of arguments")
        return found
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PlanFileError(
            "A plan file describes the arguments of its step. Received: a description that cannot be read "
            f"({type(error).__name__}: {error}). Pass the arguments, or plan again."
        ) from error


def _function_step(plan: Plan, fn: Any, args: tuple[Any, ...] | None = None, **unknown: Any) -> Step:
    from autoshard_ilp.functions import check_function, trace_function
    from autoshard_ilp.graph.step import step_of

    if unknown:
        raise InputShapeError(
            f"A plan of a function is bound to the function and its args=. Received: {', '.join(sorted(unknown))}."
        )
    stored = plan.signature.get("args")
    if args is None and stored is None:
        raise InputShapeError(
            "A plan file keeps arguments made of dictionaries, lists and tuples; containers that are classes it cannot "
            f"keep. Received: a plan of {len(plan.arguments)} arrays without its arguments. Pass args=, as for "
            "optimize_fn (shapes are enough)."
        )
    given = _decoded(stored or {}) if args is None else args
    try:
        check_function(fn, given)
        traced = trace_function(fn, given, tuple(plan.signature.get("donated", ())))
    except UnsupportedModelError as error:
        raise PlanMismatchError(
            f"A plan fits the function it was made for. Planned: a function of {len(plan.arguments)} arrays, "
            f"{', '.join(leaf.path for leaf in plan.arguments[:4])}, ... Received: {error}"
        ) from error
    return step_of(traced, traced.args, traced.donated, one_copy=plan.one_copy)


def _other_versions(plan: Plan) -> str:
    planned = plan.signature.get("versions") or {}
    here = structure.versions("keras" in planned)
    changed = [
        f"{name} {planned[name]} (now {here[name]})" for name in here if planned.get(name, here[name]) != here[name]
    ]
    return f" It was made with {', '.join(changed)}." if changed else ""

"""Joining a plan with a step again: after loading it from a file, or for another instance of the same model.

The step is traced anew and compared with what the plan was made for. A plan is a layout per operation, in order, so it
fits exactly the graphs that hash alike; everything below the hash only serves to say what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from autoshard_ilp.errors import InputShapeError, PlanFileError, PlanMismatchError, UnsupportedModelError
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.step import Step
from autoshard_ilp.placement import fingerprint as graph_fingerprint
from autoshard_ilp.placement import misfit, primitive_counts
from autoshard_ilp.saved import signature as structure
from autoshard_ilp.saved.renaming import named_as

if TYPE_CHECKING:
    from autoshard_ilp.plan import Plan

_BATCH = ("inputs", "targets", "sample_weight")


def signature_of(step: Step) -> dict[str, Any]:
    """What a plan keeps of its step in order to trace it again, as plain data.

    Returns:
        "args": structure of a function's arguments, or of a Keras model's batch (None where it holds classes of its
        own); "donated": positions, for a function; "versions": of what traced it; "one_copy": whether equal casts
        of a variable are one (:mod:`autoshard_ilp.graph.equal`).
    """
    keeps: dict[str, Any] = {"versions": _versions(step.traced is not None), "one_copy": step.one_copy}
    if step.traced is not None:
        return {**keeps, "args": structure.encode(tuple(step.args[1]))}
    return {**keeps, "args": structure.encode(tuple(step.args)), "donated": list(step.donated)}


def _versions(with_keras: bool) -> dict[str, str]:
    from importlib import metadata

    names = ("jax", "keras") if with_keras else ("jax",)
    return {name: metadata.version(name) for name in names}


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
    return replace(named_as(plan, step), executable=step, signature=signature_of(step))


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


# -- what differs ------------------------------------------------------------------------------------------------------


def differences(plan: Plan, graph: Graph) -> Iterator[str]:
    """Sentences that say how a graph differs from the one that the plan was made for, the most telling one first."""
    ops, tensors = graph.ops, graph.tensors
    arguments = [(ops[a].path, tensors[ops[a].outputs[0]]) for a in graph.arguments]
    results = [(ops[r].path, tensors[ops[r].inputs[0]]) for r in graph.results]
    named = plan.mode == "function"  # Keras numbers the layers of every instance anew
    yield from _leaf_differences("arguments" if named else "variables and inputs", plan.arguments, arguments, named)
    yield from _leaf_differences("results", plan.results, results, named)
    if graph_fingerprint(graph) == plan.placement.fingerprint:
        return
    planned, found = Counter(dict(plan.placement.primitives)), Counter(dict(primitive_counts(graph)))
    if plan.placement.primitives and planned != found:
        more = ", ".join(f"{n} {name}" for name, n in sorted((planned - found).items())) or "none"
        less = ", ".join(f"{n} {name}" for name, n in sorted((found - planned).items())) or "none"
        yield (
            "Received: the same variables, but a step that computes something else. Operations of the planned step "
            f"that it lacks: {more}; that it has besides: {less} (another loss, optimizer or activation?)."
        )
    yield (
        "Received: the same variables and kinds of operations, but in another order or on other values (another "
        "loss, optimizer, dtype policy, or another version of Keras or JAX?), so the step computes something else."
    )


def _leaf_differences(
    what: str, planned: Sequence[Any], found: Sequence[tuple[str, Any]], named: bool
) -> Iterator[str]:
    number = ""
    if len(found) != len(planned):
        number = f"Planned: {len(planned)} {what}. Received: {len(found)}. The first that differs: "
    for leaf, (path, tensor) in zip(planned, found, strict=False):
        if leaf.shape != tensor.shape or (named and leaf.path != path):
            found_text = f"{path!r} of shape {tensor.shape} in its place"
            yield f"{number}Planned: {leaf.path!r} of shape {leaf.shape}. Received: {found_text}."
        if leaf.dtype != tensor.dtype:
            yield f"{number}Planned: {leaf.path!r} of dtype {leaf.dtype}. Received: {path!r} of dtype {tensor.dtype}."
    if number:
        longer = [leaf.path for leaf in planned] if len(planned) > len(found) else [path for path, _ in found]
        yield f"{number}{longer[min(len(planned), len(found))]!r}, which only one of them has."


def _other_versions(plan: Plan) -> str:
    planned = plan.signature.get("versions") or {}
    here = _versions("keras" in planned)
    changed = [
        f"{name} {planned[name]} (now {here[name]})" for name in here if planned.get(name, here[name]) != here[name]
    ]
    return f" It was made with {', '.join(changed)}." if changed else ""


# -- identity ----------------------------------------------------------------------------------------------------------


def fingerprint(plan: Plan) -> str:
    """SHA-256 in hexadecimal of what a plan makes run; see :attr:`autoshard_ilp.plan.Plan.fingerprint`."""
    placement = asdict(plan.placement)
    placement.pop("primitives")
    runs = {
        "mesh": [plan.mesh.axis_names, plan.mesh.axis_sizes],
        "mode": plan.mode,
        "remat": plan.remat_policy,
        "arguments": [(x.role, x.shape, x.dtype, x.layout) for x in plan.arguments],
        "results": [(x.role, x.shape, x.dtype, x.layout) for x in plan.results],
        "placement": placement,
        "donated": list(plan.signature.get("donated", ())),
    }
    return hashlib.sha256(json.dumps(runs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

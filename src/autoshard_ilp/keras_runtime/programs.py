"""Compiled programs of a model under a plan: one per kind of step and shape of batch, all on the plan's variables.

A plan is made for one step on one shape of batch. A model in use meets others: the last, smaller batch of an epoch, a
validation batch, ``predict``, sample weights. Each becomes a plan of its own that keeps the variables where they are:

* the same operations on other shapes take over every decision (:func:`at_other_shapes`). An interior tensor may be
  sharded unevenly; arguments and results of a compiled program may not, so those that do not divide arrive whole;
* another program is planned with every variable pinned to its layout (:func:`companion`).

Nothing is padded and no sample is dropped, so statistics, losses and metrics are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp import agreement, interrupts, processes
from autoshard_ilp import keras_integration as ki
from autoshard_ilp.errors import InfeasibleError, ProfileError
from autoshard_ilp.graph import Graph
from autoshard_ilp.placement import Placement
from autoshard_ilp.plan import Plan, leaves
from autoshard_ilp.sharding import WHOLE, Layout, divides, shards_of_dims

Program = Callable[[Sequence[Sequence[Any]], Any], tuple[Any, Any]]
"""(state, batch) -> (logs or outputs, new state)."""

SECONDS_TO_PLAN = 20.0  # a companion is solved well within this, its variables being pinned
_UNLIMITED_BYTES = 2**60


def at_other_shapes(plan: Plan, step: Any) -> Plan | None:
    """The plan's decisions for the same step on a batch of another size; ``None`` where the operations differ."""
    if plan.executable is None or not _same_operations(plan.executable.graph, step.graph):
        return None
    from autoshard_ilp.placement import fingerprint

    placement = _even_where_it_must_be(plan.placement, step.graph, plan.mesh.axis_sizes)
    sizes, infos = plan.mesh.axis_sizes, step.traced
    arguments = [_dividing(x.layout, i.shape, sizes) for x, i in zip(plan.arguments, infos.arguments, strict=True)]
    results = [_dividing(x.layout, i.shape, sizes) for x, i in zip(plan.results, infos.results, strict=True)]
    return dataclasses.replace(
        plan,
        arguments=leaves(infos.arguments, arguments),
        results=leaves(infos.results, results),
        placement=dataclasses.replace(placement, fingerprint=fingerprint(step.graph)),
        batch_size=infos.batch_size,
        executable=step,
        trail=None,
    )


def _even_where_it_must_be(placement: Placement, graph: Graph, axis_sizes: Sequence[int]) -> Placement:
    """The placement without the mesh axes that would shard a factor unevenly whose padding XLA takes for values.

    Such an operation (a scatter, which counts the samples of a batch in a metric) runs whole over these axes.
    """
    from autoshard_ilp.rules import rule_for

    choices = {choice: i for i, choice in enumerate(placement.choices)}
    of_op, moved = list(placement.of_op), set()
    for op in graph.ops:
        operands, results = choice = placement.of(op.id)
        if op.eqn is None or not any(dim != WHOLE for x in (*operands, *results) if x is not None for dim in x):
            continue
        rule = rule_for(graph.view(op))
        if not any(f.even for f in rule.factors.values()):
            continue
        axes_of: dict[str, set[int]] = {}
        for dims, layout in zip((*rule.operands, *rule.results), (*operands, *results), strict=True):
            for axis, dim in enumerate(layout or ()):
                if dim >= 0 and dims[dim]:
                    axes_of.setdefault(dims[dim][0], set()).add(axis)
        uneven = {
            axis
            for name, axes in axes_of.items()
            if rule.factors[name].even and rule.factors[name].size % math.prod(axis_sizes[a] for a in axes)
            for axis in axes
        }
        if uneven:
            kept = tuple(
                tuple(None if x is None else tuple(WHOLE if a in uneven else d for a, d in enumerate(x)) for x in side)
                for side in choice
            )
            of_op[op.id] = choices.setdefault(kept, len(choices))  # type: ignore[arg-type]
            moved.add(op.id)
    via = tuple(detour for detour in placement.via if detour[0] not in moved)
    return dataclasses.replace(placement, choices=tuple(choices), of_op=tuple(of_op), via=via)


def _same_operations(a: Graph, b: Graph) -> bool:
    def wiring(graph: Graph) -> list[Any]:
        ranks = [len(t.shape) for t in graph.tensors]
        return [
            (op.primitive, op.inputs, op.outputs, op.region, [ranks[t] for t in (*op.inputs, *op.outputs)])
            for op in graph.ops
        ]

    return len(a.ops) == len(b.ops) and len(a.tensors) == len(b.tensors) and wiring(a) == wiring(b)


def _dividing(layout: Layout, shape: Sequence[int], axis_sizes: Sequence[int]) -> Layout:
    """The layout without the axes (minor ones first) that a dimension does not divide by."""
    kept = list(layout)
    for axis in reversed(range(len(kept))):
        dim = kept[axis]
        if dim != WHOLE and shape[dim] % shards_of_dims(tuple(kept), len(shape), axis_sizes)[dim]:
            kept[axis] = WHOLE
    assert divides(shape, tuple(kept), axis_sizes)
    return tuple(kept)


def companion(plan: Plan, step: Any, layouts: Mapping[int, Layout]) -> Plan:
    """A plan of another step of the same model, its variables where ``plan`` has put them.

    Args:
        plan: gives mesh, hardware, budget and objective.
        step: of the model, traced live.
        layouts: ``id`` of a Keras variable -> its layout; variables that are absent are free.
    """
    from autoshard_ilp.program.model import SolverOptions
    from autoshard_ilp.request import Request

    traced = step.traced
    variables = [v for group in ki.state_variables(traced.model, traced.mode) for v in group]
    kept = {
        argument.path: frozenset({layouts[id(variable)]})
        for variable, argument in zip(variables, traced.arguments, strict=False)
        if id(variable) in layouts
    }
    profile = profile_of(plan)
    options = SolverOptions(time_limit=SECONDS_TO_PLAN, relative_gap=0.01)
    budget = plan.memory.budget_bytes or profile.usable_memory_bytes
    for capacity in (budget, _UNLIMITED_BYTES):
        request = Request(plan.mesh, profile, None, capacity, None, plan.objective, options, lambda shapes: kept)
        try:
            with processes.together(f"planning the {traced.mode} step") as meeting:
                return agreement.planned_once(
                    meeting,
                    functools.partial(agreement.facts_of_graph, step, traced, plan.mesh, traced.mode),
                    functools.partial(_solved, step, traced, request),
                    lambda policy: step,
                )
        except InfeasibleError:
            # What the plan promised was another step. This one runs as well as it can; a device says if it does not.
            if capacity == _UNLIMITED_BYTES:
                raise
    raise AssertionError("unreachable")


def _solved(step: Any, traced: Any, request: Any) -> Plan:
    from autoshard_ilp.planning import plan_step
    from autoshard_ilp.progress import Progress

    return plan_step(step, traced, request, Progress(False), mode=traced.mode, batch_size=traced.batch_size)


def profile_of(plan: Plan) -> Any:
    """The hardware profile of a plan; that of the CPU where a loaded plan names one that is not installed."""
    from autoshard_ilp.costs.profile import load_profile

    if plan.trail is not None:
        return plan.trail.costs.profile
    try:
        return load_profile(plan.hardware)
    except ProfileError:
        return load_profile("cpu-host")


@compat.with_jit()
def compiled_program(plan: Plan) -> Program:
    """Compiles a plan's step for its mesh, as a function that lays out whatever it is given.

    The training step is ``plan.jit()`` itself and takes over the buffers of its state. The others leave the state alone
    and return only what they change.
    """
    return _training_program(plan) if plan.mode == "train" else _forward_program(plan)


def _training_program(plan: Plan) -> Program:
    compiled = plan.jit().lower(*plan.abstract_args()).compile()
    state_shardings, batch_shardings = plan.in_shardings
    batch_specs = plan.executable.args[1] if plan.executable is not None else None

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = tuple(_placed(group, s) for group, s in zip(state, state_shardings, strict=True))
        laid_out = _laid_out(batch, batch_specs, batch_shardings)
        interrupts.hold()  # whoever called for the step releases them once the new state is attached
        new_state, logs = compiled(_each_once(placed), laid_out)
        return processes.fetchable(logs), new_state

    return run


def _forward_program(plan: Plan) -> Program:
    """Results that are an argument as it was (weights, seeds that nobody draws from) are not computed at all."""
    import jax

    from autoshard_ilp.apply import planned_function

    step = plan.executable
    assert step is not None
    graph = step.graph
    ins, outs = (jax.tree.leaves(x) for x in (plan.in_shardings, plan.out_shardings))
    n_state = len(jax.tree.leaves(step.args[0]))
    unchanged = {i: a for i, r in enumerate(graph.results) if (a := _argument_behind(graph, r)) is not None}
    unchanged = {i: a for i, a in unchanged.items() if i < n_state and a < n_state}
    wanted = [i for i in range(len(graph.results)) if i not in unchanged]
    flat_step = planned_function(graph, plan.decisions(), plan.mesh.concrete(), plan.mesh.axis_names)

    def changed(*arguments: Any) -> list[Any]:
        results = flat_step(*arguments)
        return [results[i] for i in wanted]

    jitted = jax.jit(changed, in_shardings=tuple(ins), out_shardings=[outs[i] for i in wanted])
    compiled = jitted.lower(*jax.tree.leaves(plan.abstract_args())).compile()
    state_shardings, batch_shardings = plan.in_shardings

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = tuple(_placed(group, s) for group, s in zip(state, state_shardings, strict=True))
        flat = jax.tree.leaves((placed, _laid_out(batch, step.args[1], batch_shardings)))
        results: list[Any] = [flat[unchanged[i]] if i in unchanged else None for i in range(len(graph.results))]
        for i, value in zip(wanted, compiled(*flat), strict=True):
            results[i] = value
        new_state, out = jax.tree.unflatten(step.out_tree, results)
        return processes.fetchable(out), new_state

    return run


def _argument_behind(graph: Graph, result: int) -> int | None:
    """Position of the argument that a result is, unchanged."""
    op = graph.ops[result]
    while op.primitive in ("result", "hub"):
        producer = graph.tensors[op.inputs[0]].producer
        if producer is None:
            return None
        op = graph.ops[producer]
    return op.position if op.primitive == "argument" else None


def own_program(model: Any, mode: str, state_shardings: Sequence[Sequence[Any]]) -> Program:
    """The model's own step, compiled around the laid-out state; its interior is left to XLA's propagation."""
    import jax

    donated = (0,) if mode == "train" else ()
    jitted = jax.jit(ki.own_step(model, mode), donate_argnums=donated, out_shardings=(None, tuple(state_shardings)))

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = tuple(_placed(group, s) for group, s in zip(state, state_shardings, strict=True))
        batch = jax.tree.map(_as_array, batch)
        if mode == "train":
            interrupts.hold()
        return jitted(_each_once(placed), batch)

    return run


def eager_program(model: Any, mode: str, state_shardings: Sequence[Sequence[Any]]) -> Program:
    """The model's own step, operation by operation, as the user asked for; the new state goes back to its layout."""
    import jax

    own = ki.own_step(model, mode)

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        placed = tuple(_placed(group, s) for group, s in zip(state, state_shardings, strict=True))
        logs, new_state = own(placed, jax.tree.map(_as_array, batch))
        return logs, tuple(_placed(group, s) for group, s in zip(new_state, state_shardings, strict=True))

    return run


def _placed(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [ki.place(v, s) for v, s in zip(values, shardings, strict=True)]


def _each_once(state: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
    """Copies of arrays that stand for several variables (an average assigned to its variable): each is given away."""
    seen: set[int] = set()
    for group in state:
        for i, value in enumerate(group):
            if id(value) in seen:
                group[i] = value.copy()
            seen.add(id(value))
    return state


def _laid_out(batch: Any, specs: Any, shardings: Any) -> Any:
    import jax

    flat = [
        ki.place(_as_dtype(_as_array(x), spec.dtype), s)
        for x, spec, s in zip(jax.tree.leaves(batch), jax.tree.leaves(specs), jax.tree.leaves(shardings), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), flat)


def _as_array(value: Any) -> Any:
    import jax
    import numpy as np

    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def _as_dtype(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)

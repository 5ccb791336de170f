"""A live Keras model under a plan: laid out in place, its trainer running planned programs.

:func:`apply_plan` traces the model's step again, compares it with the plan and compiles it; only then are the variables
touched. From there on a :class:`Runtime` answers the trainer: it holds the layout of every variable, and compiles a
program for each kind of step and shape of batch when it first sees one (:mod:`.programs`). Every program takes and
returns the variables in the same layout, so nothing drifts, and no other copy of the state exists.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp import agreement, processes
from autoshard_ilp import keras_integration as ki
from autoshard_ilp.calling import keeps_meaning
from autoshard_ilp.errors import PlanMismatchError, UnsupportedModelError
from autoshard_ilp.keras_runtime import programs
from autoshard_ilp.keras_runtime.programs import Program
from autoshard_ilp.plan import Plan
from autoshard_ilp.sharding import Layout


@processes.announced
@compat.without_explicit_mesh()
@compat.with_jit()
def apply_plan(plan: Plan, model: Any) -> None:
    """Lays out a live model in place and makes ``fit``, ``evaluate`` and ``predict`` run planned programs.

    Args:
        plan: of the model's training or prediction step.
        model: a ``keras.Model``; for a training plan it is compiled. Variables without a value (a model built in
            ``plan.scope()``) are created in their layout.

    Raises:
        PlanMismatchError: the model's step is not the planned one, one of its variables holds a consumed array, or
            there are too few devices. The model is then exactly as it was.
    """
    if plan.mode == "function":
        raise PlanMismatchError(
            "plan.apply takes a plan of a Keras model. Received: a plan of a plain JAX function (optimize_fn). Use "
            "plan.jit(), or plan the model with autoshard.optimize."
        )
    ki.sync(model)
    bound = bind_again(plan, model)
    _refuse_deleted(model, plan.mode)
    with processes.together("plan.apply") as meeting:
        agreement.agree_on_program(meeting, bound, model)
    program = programs.compiled_program(bound)
    shardings = bound.in_shardings[0]
    values = ki.initial_state(bound.executable.traced, shardings)  # type: ignore[union-attr]
    _wait_for(values)
    # From here on nothing can fail.
    Runtime(bound, model, program).take_over(values)


def bind_again(plan: Plan, model: Any) -> Plan:
    """The plan with the step of ``model`` as it is now, traced on the planned batch."""
    traced = plan.executable.traced if plan.executable is not None else None
    if traced is not None:
        return plan.bind(model, **dict(zip(("inputs", "targets", "sample_weight"), traced.batch, strict=False)))
    return plan.bind(model)


def _refuse_deleted(model: Any, mode: str) -> None:
    ki.refuse_deleted(model, mode, [[v._value for v in group] for group in ki.state_variables(model, mode)])


def _wait_for(values: Any) -> None:
    import jax

    jax.block_until_ready(values)


class Runtime:
    """What answers the trainer of one model under one plan."""

    def __init__(self, plan: Plan, model: Any, program: Program) -> None:
        self.plan, self.model = plan, model
        self.mesh = plan.mesh.concrete()
        self.variables = _flat(ki.state_variables(model, plan.mode))
        self.layouts: dict[int, Layout] = {
            id(v): leaf.layout for v, leaf in zip(self.variables, plan.arguments, strict=False)
        }
        self.signatures = dict.fromkeys(ki.GROUPS, _signature(model))
        self.bases: dict[str, Plan] = {plan.mode: plan}
        self.programs: dict[Any, Program] = {}
        self.unused = {plan.mode: ki.attributes(model)}  # what programs compiled by ``apply`` read, until they run
        self.agreed: set[str] = set()  # kinds of steps whose first batch all processes have compared
        if plan.executable is not None:
            self.programs[self._key(plan.mode, plan.executable.args[1])] = program

    # -- the variables

    def take_over(self, values: Any) -> None:
        """Gives every variable its value and layout, and installs the functions that the trainer runs."""
        ki.attach(self.model, self.plan.mode, values)
        for mode in ki.GROUPS:
            for variable in _flat(ki.state_variables(self.model, mode)):
                if id(variable) in self.layouts:
                    variable._layout = self.sharding(variable)
        ki.install(self.model, {mode: self._step(mode) for mode in ki.GROUPS}, self.check)

    def sharding(self, variable: Any) -> Any:
        """``NamedSharding`` of a variable; one that the plan does not know is replicated."""
        from jax.sharding import NamedSharding, PartitionSpec

        from autoshard_ilp.sharding import to_partition_spec

        layout = self.layouts.get(id(variable))
        names = self.plan.mesh.axis_names
        spec = PartitionSpec() if layout is None else to_partition_spec(layout, len(variable.shape), names)
        return NamedSharding(self.mesh, spec)

    # -- what the trainer calls

    def check(self, mode: str) -> None:
        """Called before the trainer takes the variables; raises where the model can no longer run under its plan."""
        if mode == "train" and self.plan.mode == "predict":
            raise PlanMismatchError(
                "A plan made for mode='predict' has no training step: no gradients, no optimizer. Received: fit or "
                "train_on_batch. Plan the training step, autoshard.optimize(model, mesh), and apply that plan."
            )
        _refuse_deleted(self.model, mode)
        signature = _signature(self.model)
        read = self.unused.get(mode)  # Keras compiles at the first step, with what the layers are by then
        stale = read is not None and not ki.same_attributes(read, ki.attributes(self.model))
        if not stale and _is_same(signature, self.signatures[mode]):
            return
        if mode == "train" or stale:
            self._follow_change()
        else:
            self._forget(mode)
        self.signatures[mode] = signature

    def _forget(self, mode: str) -> None:
        """Programs of steps that are no longer the model's."""
        self.bases.pop(mode, None)
        self.programs = {key: program for key, program in self.programs.items() if mode not in key}

    def _follow_change(self) -> None:
        """The model was compiled again or changed: the plan must still be that of its step."""
        try:
            apply_plan(self.plan, self.model)
        except PlanMismatchError as error:
            known = {id(v) for v in self.variables}
            current = _flat(ki.state_variables(self.model, "predict"))
            added = [v for v in current if id(v) not in known]
            kept = {id(v) for v in current}
            roles = ("parameter", "non_trainable", "seed")
            planned = [v for v, x in zip(self.variables, self.plan.arguments, strict=False) if x.role in roles]
            is_lora = added and all("lora" in v.path for v in added) and all(id(v) in kept for v in planned)
            if not is_lora:
                raise
            warnings.warn(
                f"The model has changed since it was planned ({len(added)} LoRA variables are new), so the plan's cost "
                f"and proof no longer speak for its training step. It is planned again around the layouts that stay. "
                f"For a plan of the whole, call autoshard.optimize once more. ({error})",
                stacklevel=5,
            )
            self._forget("train")

    def _step(self, mode: str) -> Any:
        def step(state: Any, data: Any) -> tuple[Any, Any]:
            batch = _batch_of(data, mode)
            ki.refuse_deleted(self.model, mode, state)  # a callback may have assigned one
            self.unused.pop(mode, None)
            if mode not in self.agreed:
                agreement.agree_on_batch(mode, batch)
                self.agreed.add(mode)
            return self._program(mode, batch)(state, batch)

        return step

    # -- programs

    def _key(self, mode: str, batch: Any) -> Any:
        import jax

        flat: Any
        tree: Any
        flat, tree = jax.tree.flatten(batch)
        return mode, tree, tuple((tuple(x.shape), str(jax.dtypes.canonicalize_dtype(x.dtype))) for x in flat)

    def _program(self, mode: str, batch: Any) -> Program:
        import jax

        traced = self.plan.executable.traced if self.plan.executable is not None else None
        eager = ki.runs_eagerly(self.model, draws=traced is not None and traced.draws)
        specs = jax.tree.map(_spec, batch)
        key = ("eager", mode) if eager else self._key(mode, specs)
        if key not in self.programs:
            self.programs[key] = self._eager(mode) if eager else self._alike(mode, specs) or self._new(mode, specs)
        return self.programs[key]

    def _eager(self, mode: str) -> Program:
        return programs.eager_program(self.model, mode, self._state_shardings(mode))

    def _state_shardings(self, mode: str) -> tuple[list[Any], ...]:
        return tuple([self.sharding(v) for v in group] for group in ki.state_variables(self.model, mode))

    def _alike(self, mode: str, specs: Any) -> Program | None:
        """A program for the same shapes, whose dtypes the batch can be converted to without loss of meaning."""
        import jax

        flat = jax.tree.leaves(specs)
        for (kind, tree, leaves), program in [(k, p) for k, p in self.programs.items() if len(k) == 3]:
            same = kind == mode and _plain(tree, leaves) == _plain(jax.tree.structure(specs), flat)
            if same and all(
                shape == tuple(x.shape) and keeps_meaning(x.dtype, dtype)
                for x, (shape, dtype) in zip(flat, leaves, strict=True)
            ):
                return program
        return None

    def _new(self, mode: str, specs: Any) -> Program:
        from autoshard_ilp.graph.step import graph_of
        from autoshard_ilp.trace import trace_batch

        try:
            traced = trace_batch(self.model, mode, specs)
        except UnsupportedModelError as error:
            planned = [x for x in self.plan.arguments if x.path.startswith(("inputs/", "targets/", "sample_weight"))]
            raise PlanMismatchError(
                f"A batch must fit the model's {mode} step. Planned: "
                f"{', '.join(f'{x.path} {tuple(x.shape)} {x.dtype}' for x in planned)}. Received: {_described(specs)}. "
                f"Pass such batches (of any size), or plan for these. ({error})"
            ) from error
        try:
            policy = self.plan.remat_policy if mode == "train" else "never"
            step = graph_of(traced, policy, one_copy=self.plan.one_copy)
            base = self.bases.get(mode)
            plan = programs.at_other_shapes(base, step) if base is not None else None
            if plan is None:
                plan = programs.companion(self.plan, step, self.layouts)
                self._adopt(plan, mode)
            self.bases.setdefault(mode, plan)
            return programs.compiled_program(plan)
        except Exception as error:
            warnings.warn(
                f"No plan was found for this {mode} step, so it runs as XLA partitions it around the plan's variables. "
                f"({type(error).__name__}: {error})",
                stacklevel=6,
            )
            return programs.own_program(self.model, mode, self._state_shardings(mode))

    def _adopt(self, plan: Plan, mode: str) -> None:
        """Variables that have come since (LoRA, quantised kernels) stay where the first plan with them puts them."""
        for variable, leaf in zip(_flat(ki.state_variables(self.model, mode)), plan.arguments, strict=False):
            if id(variable) not in self.layouts:
                self.layouts[id(variable)] = leaf.layout
                self.variables.append(variable)  # so that its id is not given to another one
                variable._layout = self.sharding(variable)


def _flat(groups: Any) -> list[Any]:
    return [v for group in groups for v in group]


def _signature(model: Any) -> tuple[Any, ...]:
    """The objects that make up a model's step; another object means that the step may be another."""
    layers = model._flatten_layers()
    return (
        *_flat(ki.state_variables(model, "predict")),
        *ki.optimizer_parts(model),
        getattr(model, "_compile_loss", None),
        getattr(model, "_compile_metrics", None),
        *(part for layer in layers for part in (layer, layer.dtype_policy.name, layer.trainable)),
    )


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(x is y or (isinstance(x, (str, bool)) and x == y) for x, y in pairs)


def _batch_of(data: Any, mode: str) -> tuple[Any, ...]:
    """The trainer's data without trailing parts that are absent; only the inputs for ``predict``."""
    parts = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    parts = parts[:1] if mode == "predict" else parts
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return parts


def _spec(value: Any) -> Any:
    import jax
    import numpy as np

    if not hasattr(value, "shape") or not hasattr(value, "dtype") or not isinstance(value, (np.ndarray, jax.Array)):
        value = np.asarray(value)
    return jax.ShapeDtypeStruct(tuple(value.shape), jax.dtypes.canonicalize_dtype(value.dtype))


def _described(specs: tuple[Any, ...]) -> str:
    """Shapes and dtypes of a batch, part by part."""
    import jax

    names = ("inputs", "targets", "sample_weight")
    parts = [
        f"{name} {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in jax.tree.leaves(part))}"
        for name, part in zip(names, specs, strict=False)
    ]
    return "; ".join(parts)


def _plain(tree: Any, leaves: Any) -> str:
    """A tree's structure in which lists and tuples are the same."""
    return f"{len(leaves)} {tree}".replace("[", "(").replace("]", ")").replace(",)", ")")

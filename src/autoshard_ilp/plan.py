"""The plan: layouts of a step, what they cost, the proof, and the means to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoshard_ilp.calling import PlannedJit, check_layouts, check_structure, checked_leaves
from autoshard_ilp.course import Course
from autoshard_ilp.enforce.latesums import Room
from autoshard_ilp.errors import PlanMismatchError, UnsupportedModelError
from autoshard_ilp.graph import Graph
from autoshard_ilp.graph.step import Step
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.placement import Placement, decisions
from autoshard_ilp.report import Cost, Memory, PlannedCollective
from autoshard_ilp.sharding import Layout, to_partition_spec
from autoshard_ilp.units import format_bytes

if TYPE_CHECKING:  # what later stages answer with
    from autoshard_ilp.explore.compare import Comparison
    from autoshard_ilp.explore.explain import Explanation
    from autoshard_ilp.plots import Plots
    from autoshard_ilp.verify.report import Verification


@dataclass(frozen=True)
class Leaf:
    """One argument or result of the step: path, role (see traced.ArgumentInfo), shape, dtype, layout."""

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@dataclass(frozen=True, eq=False)
class Trail:
    """Every intermediate on the way to a plan, for notebooks: ``jaxpr``, ``graph``, ``costs``, ``program``, ``built``,
    ``solution``; and what another question about the plan needs.

    Attributes:
        infos: the trace, with ``arguments`` and ``results``.
        request: checked options (:class:`autoshard_ilp.request.Request`).
        priced: the options under which ``costs`` was built; ``program`` may forbid more.
        policies: rematerialisation policies that were allowed, in order.
        failures: those tried in vain (:class:`autoshard_ilp.search.attempt.Failure`).
    """

    jaxpr: Any
    graph: Graph
    costs: Any
    program: Any
    built: Any
    solution: Any
    infos: Any = None
    request: Any = None
    priced: Any = None
    policies: tuple[str, ...] = ()
    failures: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A proved layout of every tensor of a step on a mesh.

    Attributes:
        mesh: axis names and sizes.
        hardware: profile name.
        mode: "train", "predict" or "function".
        batch_size: global batch (0 for plain functions).
        arguments, results: every argument and result with its layout, in flat order.
        cost, collectives, memory: predictions, see :mod:`autoshard_ilp.report`.
        status: "optimal", proved for the program that was solved, or "feasible". Where repeated layers share decisions,
            that program has fewer plans than the step.
        lower_bound: seconds; no plan of the step is faster, tied or not, under any of the recomputation policies that
            were tried for all blocks, unless ``notes`` say that there was no time to show that. ``gap`` = (total -
            bound) / total.
        timings: seconds per stage.
        placement: layouts of every operation.
        remat_policy, remat: rematerialisation policy, and the layers whose activations are recomputed under it.
        unknown: unknown primitives with their source lines, kept whole.
        notes: what the plan takes for granted, e.g. tied layers, and what that may cost.
        course: what runs when in the predicted step, and what fills the memory meanwhile.
        origin: how the command line finds the model again (spec, batch_size, sequence_length).
        signature: what to trace to run the plan again: structure of the arguments (of the batch, for Keras models) as
            :mod:`autoshard_ilp.saved.signature` writes it, and donated positions of a plain function.
    """

    mesh: MeshSpec
    hardware: str
    mode: str
    batch_size: int
    objective: str
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    cost: Cost
    collectives: tuple[PlannedCollective, ...]
    memory: Memory
    status: str
    lower_bound: float
    gap: float
    timings: Mapping[str, float]
    placement: Placement
    remat_policy: str = "never"
    remat: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    course: Course = field(default_factory=Course)
    origin: Mapping[str, Any] = field(default_factory=dict)
    signature: Mapping[str, Any] = field(default_factory=dict)
    executable: Step | None = field(default=None, repr=False)
    trail: Trail | None = field(default=None, repr=False)

    @property
    def one_copy(self) -> bool:
        """Whether equal casts of a variable are one operation of its graph (:mod:`autoshard_ilp.graph.equal`)."""
        return bool(self.signature.get("one_copy", False))

    # -- layouts -----------------------------------------------------------------------------------------------------

    @cached_property
    def specs(self) -> dict[str, Any]:
        """``{path: PartitionSpec}`` of every variable, input and output."""
        leaves = [*self.results, *self.arguments]
        return {x.path: to_partition_spec(x.layout, len(x.shape), self.mesh.axis_names) for x in leaves}

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Pytrees of ``NamedSharding``, one per positional argument of ``step``."""
        return self._shardings(self._mesh())[0]

    @property
    def out_shardings(self) -> Any:
        """Pytree of ``NamedSharding`` of ``step``'s result."""
        return self._shardings(self._mesh())[1]

    def _mesh(self, mesh: Any = None) -> Any:
        if mesh is None:
            return self.mesh.concrete()
        from autoshard_ilp.apply import auto_mesh

        mesh = getattr(mesh, "backend_mesh", mesh)  # of a keras.distribution.DeviceMesh
        if not hasattr(mesh, "axis_names"):
            raise PlanMismatchError(f"A plan runs on a jax.sharding.Mesh of {self.mesh}. Received: {mesh!r}.")
        sizes = tuple(dict(mesh.shape).get(n, 0) for n in self.mesh.axis_names)
        if sizes != self.mesh.axis_sizes or len(mesh.axis_names) != len(sizes):
            raise PlanMismatchError(
                f"A plan runs on a mesh of the axes it was made for. Planned for: {self.mesh}. Received: "
                f"{dict(mesh.shape)}. Plan again for this mesh."
            )
        return auto_mesh(mesh)

    def _shardings(self, mesh: Any) -> tuple[tuple[Any, ...], Any]:
        import jax
        from jax.sharding import NamedSharding

        step = self._step()

        def named(leaf: Leaf) -> Any:
            return NamedSharding(mesh, to_partition_spec(leaf.layout, len(leaf.shape), self.mesh.axis_names))

        ins = jax.tree.unflatten(jax.tree.structure(step.args), [named(x) for x in self.arguments])
        outs = jax.tree.unflatten(step.out_tree, [named(x) for x in self.results])
        return ins, outs

    # -- running -----------------------------------------------------------------------------------------------------

    def _step(self) -> Step:
        if self.executable is None:
            raise UnsupportedModelError(
                "A plan from a file, or unpickled, holds layouts, not the model. Received: a call that runs the model. "
                'Load it with autoshard.load("plan.json", model=model_or_builder), or call plan.bind(model_or_builder).'
            )
        return self.executable

    @property
    def step(self) -> Any:
        """Pure function of the step's arguments, ``(state, batch) -> (state, logs)`` for Keras models, with the
        decided layouts as interior constraints. Call it under ``jax.jit``, or use :meth:`jit`."""
        return self._function(self._mesh())

    def decisions(self) -> Any:
        """What running the step enforces (:class:`autoshard_ilp.apply.Decisions`), as tight as the budget is."""
        memory, graph = self.memory, self._step().graph
        room = Room(memory.peak_bytes, memory.budget_bytes, self.course)
        return decisions(graph, self.placement, room=room, axis_sizes=self.mesh.axis_sizes)

    def _function(self, mesh: Any, marked: bool = False) -> Any:
        import jax

        from autoshard_ilp.apply import planned_function

        step = self._step()
        decided = self.decisions()
        run = planned_function(step.graph, decided, mesh, self.mesh.axis_names, marked=marked)

        def planned_step(*args: Any) -> Any:
            check_structure(args, step.args)
            return jax.tree.unflatten(
                step.out_tree, run(*checked_leaves(self.arguments, jax.tree.leaves(args), convert=True))
            )

        return planned_step

    def jit(self, mesh: Any = None, *, marked: bool = False) -> PlannedJit:
        """``jax.jit`` of :attr:`step` with shardings and donation; errors of its arguments are ours.

        Args:
            mesh: a ``jax.sharding.Mesh`` of the planned axes, for example of compile-only devices; None: the mesh's
                own devices.
            marked: for :func:`autoshard_ilp.verify.verify`: name scopes also number the operations, and arguments that
                nothing reads count.

        Raises:
            PlanMismatchError: the mesh has other axes, or there are too few devices.
        """
        import jax

        on = self._mesh(mesh)
        ins, outs = self._shardings(on)
        step = self._step()
        run = self._function(on, marked)
        # What a step never reads (Adafactor's whole slots of factored kernels) is on the devices all the same.
        options: dict[str, Any] = {"donate_argnums": step.donated, "keep_unused": marked}
        jitted = jax.jit(run, in_shardings=ins, out_shardings=outs, **options)

        def check(args: Sequence[Any]) -> None:
            check_structure(args, step.args)
            values = jax.tree.leaves(args)
            checked_leaves(self.arguments, values, convert=False)
            check_layouts(self.arguments, values, jax.tree.leaves(ins))

        return PlannedJit(jitted, check, ins)

    def abstract_args(self, mesh: Any = None) -> tuple[Any, ...]:
        """The step's arguments as ``jax.ShapeDtypeStruct`` with shardings, for ``plan.jit().lower(...)``."""
        import jax

        ins, _ = self._shardings(self._mesh(mesh))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._step().args, ins)

    def init_state(self, seed: int | None = 0) -> Any:
        """Creates the state already sharded: no full tensor exists on any one device.

        Args:
            seed: of the initializers; a live model's own values are laid out instead of being drawn again.
        """
        from autoshard_ilp import keras_integration
        from autoshard_ilp.arguments import whole_number

        whole_number("seed", seed, 0, none="a new seed each time")
        traced = self._step().traced
        if traced is None:
            raise UnsupportedModelError(
                "init_state creates the variables of a Keras model. Received: a plan of a plain function. Lay out your "
                "own state with jax.device_put(state, plan.in_shardings[0])."
            )
        return keras_integration.initial_state(traced, self.in_shardings[0], seed)

    def apply(self, model: Any) -> Any:
        """Lays out a built model in place; ``fit``, ``evaluate`` and ``predict`` then run planned programs.

        The step is compiled first, so that a failure leaves the model as it was. A batch of another shape, ``evaluate``
        and ``predict`` run on the same layout of the variables, see :mod:`autoshard_ilp.keras_runtime.programs`.

        Returns:
            the model.

        Raises:
            PlanMismatchError: the model is not the one that was planned (it says what differs), or there are too few
                devices.
        """
        from autoshard_ilp.arguments import keras_model
        from autoshard_ilp.keras_runtime import apply_plan

        keras_model(model, "plan.apply")
        apply_plan(self, model)
        return model

    def scope(self) -> Any:
        """``with plan.scope(): model = build()``: variables and optimizer slots are born sharded, and the plan applied.

        No full tensor exists on any one device (but inside initializers that do not partition, such as the QR of
        Orthogonal). The initial values are those of a build without the scope from the same seed. A model that is
        compiled only after the scope gets its slots, and its planned step, then.

        Raises:
            PlanMismatchError: at the end of the scope, another model than the planned one was built in it.
        """
        from autoshard_ilp.keras_runtime.scope import planned_scope

        return planned_scope(self)

    def distribution(self) -> Any:
        """A ``keras.distribution.Distribution`` for ``keras.distribution.set_distribution``.

        Models built under it have the plan's layouts of variables and data; the interior is left to XLA. Warns where
        Keras cannot express the plan (slots that are not laid out like their parameter).
        """
        from autoshard_ilp.keras_runtime.layouts import planned_distribution

        return planned_distribution(self)

    def layout_map(self) -> Any:
        """A ``keras.distribution.LayoutMap`` for Keras's own ``ModelParallel``: every variable, by its full path.

        Warns where a LayoutMap cannot express the plan, and says what is lost (also in ``.lost``). A variable that the
        plan does not know is replicated with a warning.
        """
        from autoshard_ilp.keras_runtime.layouts import planned_layout_map

        return planned_layout_map(self)

    def bind(self, model: Any, **inputs: Any) -> Plan:
        """This plan with the step of ``model``, traced again; see :func:`autoshard_ilp.saved.binding.bind`.

        Args:
            model: a Keras model or a builder; for a plan of :func:`autoshard_ilp.optimize_fn`, the function.
            inputs: options of tracing that the plan does not remember: ``inputs``, ``targets``, ... of a model;
                ``args`` of a function whose arguments are classes of its own.

        Returns:
            The plan under the names of ``model``, whose layers Keras may have numbered otherwise.

        Raises:
            PlanMismatchError: the step is not the one this plan was made for; says what differs.
        """
        from autoshard_ilp.saved.binding import bind

        return bind(self, model, **inputs)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the plan makes run: mesh, step, layouts; not of names, costs or timings.

        Two processes that run plans of one fingerprint on the same variables run the same program.
        """
        from autoshard_ilp.saved.identity import fingerprint

        return fingerprint(self)

    # -- checking and keeping ----------------------------------------------------------------------------------------

    def verify(self, target: Any = None, *, mesh: Any = None, seconds: Any = None) -> Verification:
        """Compiles the plan and compares what XLA made of it; see :func:`autoshard_ilp.verify.verify`."""
        from autoshard_ilp.verify import verify

        return verify(self, target, mesh=mesh, seconds=seconds)

    def save(self, path: Any) -> None:
        """Writes the plan as versioned JSON; an existing file is replaced whole or not at all."""
        from autoshard_ilp.saved.planfile import save

        save(self, path)

    def __reduce__(self) -> Any:
        """Pickled as its file is written: layouts and predictions travel, the model does not (:meth:`bind` it)."""
        from autoshard_ilp.saved.planfile import as_text, parsed

        return parsed, (as_text(self),)

    def __copy__(self) -> Plan:
        return replace(self)  # plans are not changed, so a copy shares its parts, the traced step among them

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return replace(self)

    # -- asking ------------------------------------------------------------------------------------------------------

    def what_if(
        self,
        *,
        pins: Mapping[str, Any] | None = None,
        memory_budget: str | int | None = None,
        objective: str | None = None,
        mesh: Any = None,
        hardware: Any = None,
        remat: str | None = None,
        solver: Any = None,
        progress: Any = None,
    ) -> Plan:
        """The plan under other pins, memory budget, objective, mesh or hardware, without tracing again; see
        :func:`autoshard_ilp.explore.whatif.what_if`."""
        from autoshard_ilp.explore.whatif import what_if

        changes = {"pins": pins, "memory_budget": memory_budget, "objective": objective, "mesh": mesh}
        return what_if(self, **changes, hardware=hardware, remat=remat, solver=solver, progress=progress)

    def explain(self, path: str, *, time_limit: float = 60.0, progress: Any = None) -> Explanation:
        """Why a tensor lies as it does: every other layout with the cost of the best plan that uses it; see
        :func:`autoshard_ilp.explore.explain.explain`."""
        from autoshard_ilp.explore.explain import explain

        return explain(self, path, time_limit=time_limit, progress=progress)

    def compare(self, other: Plan, *, price: bool = False, time_limit: float = 60.0) -> Comparison:
        """Which tensors lie differently in another plan, and what each difference costs; see
        :func:`autoshard_ilp.explore.compare.compare`."""
        from autoshard_ilp.explore.compare import compare

        return compare(self, other, price=price, time_limit=time_limit)

    # -- looking -----------------------------------------------------------------------------------------------------

    def summary(self, width: int | None = None) -> str:
        """The plan as text: layouts by repeated layer, cost, timeline, memory over the step, proof, timings.

        Args:
            width: in columns; None: 120. Where standard output is not UTF-8, lines and pictures are drawn in ASCII.
        """
        from autoshard_ilp.arguments import whole_number
        from autoshard_ilp.display.render import only_ascii, printable
        from autoshard_ilp.display.summary import text

        whole_number("width", width, none="120")

        return printable(text(self, width, only_ascii=only_ascii()))

    def rows(self) -> list[dict[str, Any]]:
        """One record per variable, input and output."""
        from autoshard_ilp.display.records import rows

        return rows(self)

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        from autoshard_ilp.display.records import dataframe

        return dataframe(self)

    @cached_property
    def plot(self) -> Plots:
        """Figures: ``.memory()``, ``.communication()``, ``.timeline()``, ``.mesh(path)``, ``.graph(layer)``; see
        :class:`autoshard_ilp.plots.Plots`."""
        from autoshard_ilp.plots import Plots

        return Plots(self)

    def to_perfetto(self, path: Any) -> None:
        """Writes the predicted step as a trace for https://ui.perfetto.dev; see :mod:`autoshard_ilp.plots.perfetto`."""
        from autoshard_ilp.plots.perfetto import write

        write(self, path)

    def __repr__(self) -> str:
        peak = format_bytes(self.memory.peak_bytes).partition(" (")[0]
        return (
            f"Plan({self.status}, {self.mode} step on {self.mesh} of {self.hardware}: "
            f"{self.cost.total_s * 1e3:.3f} ms, gap {self.gap:.2%}, peak {peak})"
        )

    def _repr_html_(self) -> str:
        from autoshard_ilp.plots.page import html

        return html(self)


def leaves(infos: Sequence[Any], layouts: Sequence[Any]) -> tuple[Leaf, ...]:
    """Arguments or results with their layouts."""
    return tuple(Leaf(i.path, i.role, tuple(i.shape), i.dtype, lay) for i, lay in zip(infos, layouts, strict=True))

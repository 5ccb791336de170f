"""A planned step as a function: every operation in order, loops and branches rebuilt around theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.apply.decisions import Decisions, auto_mesh
from autoshard_ilp.apply.operations import Operations
from autoshard_ilp.apply.planned import Planned
from autoshard_ilp.apply.values import Frame, Values
from autoshard_ilp.errors import InputShapeError, PlanMismatchError
from autoshard_ilp.graph import Graph, Op, Region
from autoshard_ilp.sharding import Layout


def planned_function(
    graph: Graph, decisions: Decisions, mesh: Mesh | AbstractMesh, axis_names: Sequence[str], *, marked: bool = False
) -> Callable[..., list[Any]]:
    """The step as a function of its flat arguments, to be called under ``jax.jit``.

    Args:
        graph: of the step, hubs included if ``decisions`` was made with them.
        decisions: layouts to enforce.
        mesh: where the constraints refer to; axes of another type than Auto are taken as Auto.
        axis_names: the mesh axis behind each entry of a layout.
        marked: add the number of every operation to its name scope (:func:`mark`), so that a compiled program tells
            which operation an instruction comes from; nothing else changes.

    Returns:
        ``f(*arguments) -> list of results``, in the order of the graph's arguments and results.

    Raises:
        InputShapeError: ``mesh`` is no mesh, or does not have ``axis_names``.
        PlanMismatchError: (from the function) it was called with another number of arguments.
    """
    mesh = auto_mesh(mesh)
    missing = [name for name in axis_names if name not in mesh.axis_names]
    if missing:
        raise InputShapeError(f"Layouts refer to mesh axes {missing}, but the mesh has axes {tuple(mesh.axis_names)}.")
    plan = Planned(graph, decisions, mesh, tuple(axis_names), marked)

    def step(*arguments: Any) -> list[Any]:
        if len(arguments) != len(graph.arguments):
            raise PlanMismatchError(
                f"The planned step takes {len(graph.arguments)} flat arguments. Received: {len(arguments)}."
            )
        return Run(plan, arguments).results()

    return step


class Run:
    """One trace of the planned step.

    Args:
        arguments: of the step, in the order of the graph's.
    """

    def __init__(self, plan: Planned, arguments: Sequence[Any]) -> None:
        self.plan, self.graph, self.values = plan, plan.graph, Values(plan)
        self.operations = Operations(plan, self.values, arguments)

    def results(self) -> list[Any]:
        top = Frame()
        self.run(0, top)
        ops = self.graph.ops
        return [self.values.outcome(top, ops[r]) for r in self.graph.results]

    def run(self, region: int, frame: Frame) -> None:
        for item in self.plan.schedule[region]:
            if isinstance(item, Region):
                {"scan": self.scan, "while": self.while_loop, "cond": self.cond}[item.kind](item, frame)
            else:
                self.operations.run(item, frame)

    def carries(self, region: Region, outer: Frame) -> list[Any]:
        ops = self.graph.ops
        return [self.values.array(outer, ops[c], 0) for c in region.carries]

    def enter(self, region: Region, outer: Frame, carried: Sequence[Any]) -> Frame:
        frame = Frame(outer)
        for c, value in zip(region.carries, carried, strict=True):
            self.values.write(frame, self.graph.ops[c], 0, value)
        return frame

    def leave(self, region: Region, frame: Frame) -> list[Any]:
        """Values at the end of a loop body, in the layout that they have at its beginning."""
        ends = []
        for c in region.carries:
            op = self.graph.ops[c]
            layout = self.plan.decisions.results.get((c, 0))
            ends.append(self.plan.constrain(self.values.array(frame, op, 1), op.outputs[0], layout))
        return ends

    def finals(self, region: Region, outer: Frame, values: Sequence[Any]) -> None:
        for c, value in zip(region.carries, values, strict=True):
            self.values.write(outer, self.graph.ops[c], 1, value)

    def scan(self, region: Region, outer: Frame) -> None:
        ops = self.graph.ops
        xs = [self.values.read(outer, ops[s], 0) for s in region.slices]

        def body(carried: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            frame = self.enter(region, outer, carried)
            for s, value in zip(region.slices, x, strict=True):
                self.values.write(frame, ops[s], 0, self.plan.as_stacked(value, ops[s]))
            self.run(region.id, frame)
            ys = [self.plan.as_stacked(self.values.array(frame, ops[s], 0), ops[s]) for s in region.stacks]
            return self.leave(region, frame), ys

        with compat.under_name_stack(region.name_stack):
            finals, ys = jax.lax.scan(
                body,
                self.carries(region, outer),
                xs,
                length=region.trip_count,
                reverse=region.params["reverse"],
                unroll=region.params["unroll"],
            )
            self.finals(region, outer, finals)
            for s, value in zip(region.stacks, ys, strict=True):
                self.values.write(outer, ops[s], 0, value)

    def while_loop(self, region: Region, outer: Frame) -> None:
        ops = self.graph.ops
        assert region.condition is not None
        test = ops[region.condition]

        def condition(carried: Sequence[Any]) -> Any:
            frame = self.enter(region, outer, carried)
            operands: list[Any] = [None] * test.params["n_operands"]
            for i, position in enumerate(test.params["used"]):
                operands[position] = self.values.read(frame, test, i)
            return compat.run_jaxpr(test.params["jaxpr"], operands)[0]

        def body(carried: Sequence[Any]) -> list[Any]:
            frame = self.enter(region, outer, carried)
            self.run(region.id, frame)
            return self.leave(region, frame)

        with compat.under_name_stack(region.name_stack):
            self.finals(region, outer, jax.lax.while_loop(condition, body, self.carries(region, outer)))

    def merged_layout(self, merge: Op) -> Layout | None:
        """The layout in which every branch returns its value: XLA refuses branches that differ."""
        decided = self.plan.decisions
        wanted = [decided.results.get((merge.id, 0))]
        wanted += [decided.operands.get((merge.id, i)) for i in range(len(merge.inputs))]
        wanted += [self.plan.layout(t) for t in merge.inputs]
        return next((layout for layout in wanted if layout is not None), None)

    def cond(self, region: Region, outer: Frame) -> None:
        ops = self.graph.ops
        assert region.index is not None
        merges = [ops[m] for m in region.merges]
        layouts = [self.merged_layout(op) for op in merges]

        def branch(position: int) -> Callable[[], list[Any]]:
            def run_branch() -> list[Any]:
                frame = Frame(outer)
                self.run(region.branches[position], frame)
                ends = [self.values.array(frame, op, position) for op in merges]
                return [
                    self.plan.constrain(v, op.outputs[0], at) for v, op, at in zip(ends, merges, layouts, strict=True)
                ]

            return run_branch

        with compat.under_name_stack(region.name_stack):
            index = self.values.value(outer, region.index)
            values = jax.lax.switch(index, [branch(i) for i in range(len(region.branches))])
            for op, value in zip(merges, values, strict=True):
                self.values.write(outer, op, 0, value)

"""A step to be planned: traced once, its graph built, activations recomputed where asked, hubs inserted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard_ilp.arguments import integer
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.garbage import collector_paused, old_objects_left
from autoshard_ilp.graph import Graph
from autoshard_ilp.mesh import MeshSpec

LARGEST_BATCH = 2**31 - 1
"""JAX counts in integers of 32 bits."""


@dataclass(frozen=True, eq=False)
class Step:
    """The traced step a plan runs: needed to execute it, absent from a plan just loaded from a file.

    Attributes:
        graph: with hubs, as planned.
        args: pytree of ``jax.ShapeDtypeStruct`` per positional argument.
        out_tree: tree structure of the results.
        donated: positional arguments whose buffers the results take over.
        traced: the Keras trace, or None for a plain function.
        remat: rematerialisation policy that the graph was rewritten under.
        while_trip_count: as asked for; None: every while loop's own.
        blocks: parts of the forward pass that may recompute, each by a policy of its own.
        one_copy: equal casts of a variable were merged whatever reads them (:mod:`autoshard_ilp.graph.equal`).
    """

    graph: Graph
    args: tuple[Any, ...]
    out_tree: Any
    donated: tuple[int, ...]
    traced: Any = None
    remat: str = "never"
    while_trip_count: int | None = None
    blocks: int = 1
    one_copy: bool = False


@old_objects_left()
@collector_paused()
def trace(model: Any, mesh: MeshSpec, **options: Any) -> Any:
    """Traces the step once (:func:`autoshard_ilp.trace.trace_model`) and checks the batch against the mesh."""
    from autoshard_ilp.trace import trace_model

    batch_size = options.get("batch_size")
    whole = integer(batch_size)
    if batch_size is not None and (whole is None or not 1 <= whole <= LARGEST_BATCH):
        raise InputShapeError(f"batch_size is a positive integer of 31 bits. Received: {batch_size!r}.")
    for name in ("batch_size", "sequence_length"):  # NumPy's integers as those that a file of the plan can hold
        options[name] = options.get(name) if integer(options.get(name)) is None else integer(options.get(name))
    traced = trace_model(model, device_count=mesh.size, **options)
    axes = [s for s in mesh.axis_sizes if s > 1]
    if axes and traced.batch_size > 1 and all(traced.batch_size % s for s in axes):
        raise InputShapeError(
            f"The global batch must divide by at least one mesh axis. Received: batch_size={traced.batch_size} on a "
            f"mesh of {mesh}. Use a multiple of {min(axes)}."
        )
    return traced


def trace_step(model: Any, mesh: MeshSpec, **options: Any) -> tuple[Step, Any]:
    """Trace and graph in one go; ``remat`` and ``one_copy`` among the options."""
    remat, one_copy = options.pop("remat", "never"), options.pop("one_copy", False)
    traced = trace(model, mesh, **options)
    return graph_of(traced, remat, one_copy=one_copy), traced


def graph_of(
    traced: Any,
    remat: str = "never",
    while_trip_count: int | None = None,
    whole: Graph | None = None,
    *,
    one_copy: bool = False,
) -> Step:
    """The graph of a Keras step, hubs inserted; ``whole`` and ``one_copy`` as in :func:`step_of`."""
    args = traced.state, traced.batch
    return step_of(traced, args, (0,), traced, remat, while_trip_count, whole, one_copy=one_copy)


@collector_paused()
def whole_graph(infos: Any, while_trip_count: int | None = None, *, one_copy: bool = False) -> Graph:
    """The graph of a traced step before rematerialisation and hubs: the same under every policy."""
    from autoshard_ilp.graph.equal import merge_equal_casts
    from autoshard_ilp.graph.flatten import build_graph
    from autoshard_ilp.graph.groups import merge_groups

    graph = build_graph(
        infos.closed_jaxpr,
        argument_paths=[a.path for a in infos.arguments],
        result_paths=[r.path for r in infos.results],
        aliases=infos.aliases,
        while_trip_count=while_trip_count,
    )
    return merge_groups(merge_equal_casts(graph, one_copy))


def check_trip_count(while_trip_count: Any) -> int | None:
    """``while_trip_count`` as it may be: None or a positive integer; else InputShapeError."""
    if while_trip_count is None:
        return None
    if isinstance(while_trip_count, bool) or not isinstance(while_trip_count, int) or while_trip_count < 1:
        raise InputShapeError(f"while_trip_count is a positive integer. Received: {while_trip_count!r}.")
    return while_trip_count


def loop_notes(graph: Graph) -> tuple[str, ...]:
    """What a plan says about while loops whose number of iterations is not certain."""
    loops = [r for r in graph.regions if r.kind == "while" and r.condition is not None]
    notes = []
    unknown = [r for r in loops if r.params.get("counted") == "unknown"]
    if unknown:
        notes.append(
            f"{len(unknown)} while loop(s) whose number of iterations is not known are priced at one; "
            "while_trip_count= says how many."
        )
    bounds = sorted({r.trip_count for r in loops if r.params.get("counted") == "bound"})
    if bounds:
        notes.append(
            f"While loops that may stop early are priced at their most: {', '.join(map(str, bounds))} iterations."
        )
    return tuple(notes)


@collector_paused()
def step_of(
    infos: Any,
    args: tuple[Any, ...],
    donated: tuple[int, ...],
    traced: Any = None,
    remat: str = "never",
    while_trip_count: int | None = None,
    whole: Graph | None = None,
    *,
    one_copy: bool = False,
) -> Step:
    """The graph of any traced step, hubs inserted.

    Args:
        infos: has ``closed_jaxpr``, ``arguments``, ``results`` (both with paths), ``aliases`` and ``out_tree``.
        args: pytree of ``jax.ShapeDtypeStruct`` per positional argument.
        donated: positional arguments whose buffers the results take over.
        traced: the Keras trace, or None for a plain function.
        remat: rematerialisation policy.
        while_trip_count: iterations that each ``while_loop`` is priced at; None: what its constants say, else 1.
        whole: what :func:`whole_graph` gives for this step, where it is known.
        one_copy: as :func:`autoshard_ilp.graph.equal.has_one_copy` says of the hardware.
    """
    from autoshard_ilp.graph import insert_hubs
    from autoshard_ilp.graph.blocks import Blocks
    from autoshard_ilp.graph.remat import rematerialise

    graph = whole_graph(infos, while_trip_count, one_copy=one_copy) if whole is None else whole
    blocks = Blocks(graph)
    planned = insert_hubs(rematerialise(graph, remat, blocks))
    return Step(planned, args, infos.out_tree, donated, traced, remat, while_trip_count, blocks.count, one_copy)

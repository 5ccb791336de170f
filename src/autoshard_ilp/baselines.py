"""The strategies people use by hand, as restrictions of the same integer program.

A baseline says which layouts each variable and each input may have; everything inside the step stays for the solver to
decide. So a baseline is the *best* plan of its kind under the same cost model, and no baseline can be predicted to be
faster than :func:`autoshard_ilp.optimize`, whose feasible set contains all of them.

==================  ==================================================================================================
``data_parallel``   all state whole on every device; the batch over all mesh axes
``fsdp``            weights and optimizer slots over all axes, on their largest dimension that divides; the batch too
``zero1``           weights whole, slots as under ``fsdp``; the batch over all axes (Rajbhandari et al. 2020, stage 1)
``megatron``        weights and slots over the last mesh axis only, each on the dimension that suits it best; the batch
                    over the other axes (Shoeybi et al. 2019, with the dimensions found instead of given)
``fsdp+megatron``   as ``megatron``, and every weight and slot also over the other axes
``keras_hub``       the layout map that KerasHub ships with the model's backbone; slots like their weights; the batch
                    over the other axes
==================  ==================================================================================================

"Weights" are trainable and non-trainable variables alike (frozen weights too). Biases, scales and other small variables
(:func:`.search.recipes.is_small`) are left whole by ``fsdp`` and ``zero1``, and are free under ``fsdp+megatron``:
gathering them costs a latency and saves nothing. Metrics, seeds and other scalars are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard_ilp.arguments import is_one_of
from autoshard_ilp.errors import InfeasibleError, InputShapeError, UnsupportedModelError
from autoshard_ilp.mesh import MeshSpec
from autoshard_ilp.plan import Plan
from autoshard_ilp.program.model import SolverOptions
from autoshard_ilp.search.recipes import RECIPES, WEIGHTS, Recipe, Restriction, other_axes, restrict
from autoshard_ilp.sharding import WHOLE, Layout, divides, from_partition_spec, replicated


def baseline(
    model: Any,
    mesh: Any,
    name: str,
    memory_budget: str | int | None = None,
    *,
    hardware: Any = None,
    batch_size: int | None = None,
    inputs: Any = None,
    targets: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    mode: str = "train",
    pins: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    solver: SolverOptions | None = None,
    remat: str = "auto",
    strict: bool = False,
    progress: Any = None,
) -> Plan:
    """Plans a model by a well-known hand strategy, to compare with :func:`autoshard_ilp.optimize`.

    Args:
        model, mesh: as for ``optimize``.
        name: one of :data:`BASELINES`; the module's docstring says what each of them fixes.
        memory_budget, hardware, batch_size, inputs, targets, sample_weight, sequence_length, mode, objective, solver,
            remat, strict, progress: as for ``optimize``.
        pins: as for ``optimize``; a pin takes precedence over the baseline.

    Returns:
        The best plan of this kind; ``plan.notes`` names the baseline and what of it could not be kept.

    Raises:
        InputShapeError: unknown name, or options that make no sense.
        UnsupportedModelError: ``keras_hub`` for a model without a layout map; a model that cannot be traced.
        InfeasibleError: the strategy does not fit the memory budget; carries the smallest budget that it fits.
    """
    from autoshard_ilp import api
    from autoshard_ilp.progress import Progress
    from autoshard_ilp.request import check_request, remat_policies

    check_name(name)
    request = check_request(mesh, memory_budget, hardware, pins, objective, solver, strict)
    policies = remat_policies(remat, mode)
    with Progress(progress).running() as shown:
        with shown.stage("trace"):
            options = {
                "batch_size": batch_size,
                "inputs": inputs,
                "targets": targets,
                "sample_weight": sample_weight,
                "sequence_length": sequence_length,
                "mode": mode,
            }
            traced = api.trace(model, request.mesh, **options)
        return plan_baseline(traced, request, name, shown, policies)


def plan_baseline(traced: Any, request: Any, name: str, progress: Any, policies: Sequence[str] = ("never",)) -> Plan:
    """Plans a step that is already traced by a baseline; several baselines can share one trace.

    Args:
        traced: from :func:`autoshard_ilp.graph.step.trace`.
        request: from :func:`autoshard_ilp.request.check_request`.
        name: one of :data:`BASELINES`.
        progress: an :class:`autoshard_ilp.progress.Progress`.
        policies: rematerialisation policies to try in order.
    """
    from autoshard_ilp.planning import plan_traced

    check_name(name)
    restriction = BASELINES[name](traced, request.mesh)
    request = replace(request, restriction=restriction.of_paths)
    try:
        plan = plan_traced(traced, request, progress, policies)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"Baseline {name!r}: {error}",
            minimum_budget=error.minimum_budget,
            minimum_budget_bound=error.minimum_budget_bound,
            contributors=error.contributors,
            conflicts=error.conflicts,
        ) from error
    notes = (f"Restricted to the baseline {name!r}.", *restriction.notes, *plan.notes)
    return replace(plan, notes=notes, origin={**plan.origin, "baseline": name})


def check_name(name: str) -> None:
    """Raises InputShapeError for an unknown baseline."""
    if not is_one_of(name, BASELINES):
        raise InputShapeError(f"A baseline is one of {', '.join(BASELINES)}. Received: {name!r}.")


# -- KerasHub's layout maps ------------------------------------------------------------------------------------------


def _keras_hub(traced: Any, mesh: MeshSpec) -> Restriction:
    """The shipped map, on a mesh of two axes: "batch" stands for all axes but the last together, "model" for that."""
    layout_map = _shipped_layout_map(traced.model, mesh)
    sizes = mesh.axis_sizes
    whole = frozenset({replicated(len(sizes))})
    dropped: list[str] = []
    by_path: dict[str, frozenset[Layout]] = {}
    for info in traced.arguments:
        if info.role not in WEIGHTS:
            continue
        axes = _map_entry(layout_map, info.path.partition("#")[0])
        if axes is None:
            continue
        layout = _layout_of_entry(axes, mesh)
        if len(axes) != len(info.shape) or not divides(info.shape, layout, sizes):
            dropped.append(f"{info.path} of shape {info.shape}: {axes}")
        else:
            by_path[info.path] = frozenset({layout})
    notes = (
        (f"Entries of KerasHub's layout map that do not fit were dropped: {'; '.join(dropped)}.",) if dropped else ()
    )

    def weight(info: Any) -> frozenset[Layout]:
        return by_path.get(info.path, whole)

    def slot(info: Any) -> frozenset[Layout]:
        # Keras gives a slot its variable's layout (Optimizer.add_variable_from_reference).
        if info.reference is None or traced.arguments[info.reference].shape != info.shape:
            return whole
        return weight(traced.arguments[info.reference])

    return restrict(traced, mesh, batch_axes=other_axes(mesh), weight=weight, slot=slot, notes=notes)


def _shipped_layout_map(model: Any, mesh: MeshSpec) -> Any:
    import keras

    backbone = next((b for b in _backbones(model) if hasattr(b, "get_layout_map")), None)
    if backbone is None:
        received = ", ".join(sorted({type(b).__name__ for b in _backbones(model)})) or type(model).__name__
        raise UnsupportedModelError(
            "The baseline 'keras_hub' needs a KerasHub backbone that ships a layout map: "
            f"{', '.join(_backbones_with_layout_map()) or 'KerasHub is not installed'}. Received: {received}. "
            "Choose another baseline, or pass your layouts as pins."
        )
    shape = (math.prod(mesh.axis_sizes[:-1]), mesh.axis_sizes[-1])
    names = [f"planned:{i}" for i in range(math.prod(shape))]  # a layout map never looks at its devices
    devices = keras.distribution.DeviceMesh(shape, ("batch", "model"), names)
    return backbone.get_layout_map(devices, model_parallel_dim_name="model", data_parallel_dim_name="batch")


def _backbones(model: Any) -> list[Any]:
    """KerasHub backbones that the model is or contains."""
    try:
        from keras_hub.models import Backbone
    except ImportError:
        return []
    return [layer for layer in model._flatten_layers() if isinstance(layer, Backbone)]


def _backbones_with_layout_map() -> list[str]:
    try:
        import keras_hub
    except ImportError:
        return []
    found = (getattr(keras_hub.models, name) for name in dir(keras_hub.models) if name.endswith("Backbone"))
    return sorted({backbone.__name__ for backbone in found if hasattr(backbone, "get_layout_map")})


def _map_entry(layout_map: Any, path: str) -> tuple[str | None, ...] | None:
    try:
        found = layout_map[path]
    except ValueError as error:  # two of its regular expressions match
        raise UnsupportedModelError(
            f"KerasHub's layout map must be unambiguous. Received: {error} Choose another baseline."
        ) from error
    return None if found is None else tuple(found.axes)


def _layout_of_entry(axes: Sequence[str | None], mesh: MeshSpec) -> Layout:
    """Layout of a map entry; axes of size 1 shard nothing."""
    real: dict[str | None, Any] = {None: None, "batch": mesh.axis_names[:-1], "model": mesh.axis_names[-1:]}
    layout = from_partition_spec([real[a] for a in axes], mesh.axis_names)
    return tuple(WHOLE if size == 1 else dim for dim, size in zip(layout, mesh.axis_sizes, strict=True))


BASELINES: Mapping[str, Recipe] = {**RECIPES, "keras_hub": _keras_hub}
"""Name -> function of (traced step, mesh) -> :class:`Restriction`."""

"""How much hardware a model needs, and how large a batch the hardware takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.arguments import integer, whole_number
from autoshard_ilp.errors import InfeasibleError, InputShapeError
from autoshard_ilp.explore import show
from autoshard_ilp.explore.meshes import (
    AXIS_NAMES,
    _batch_fits,
    axes_within,
    factorisations,
    hardware_list,
    names_of,
    search_mesh,
)
from autoshard_ilp.explore.meshes_table import MeshSearch
from autoshard_ilp.explore.source import Source
from autoshard_ilp.mesh import MOST_DEVICES, MeshSpec
from autoshard_ilp.plan import Plan
from autoshard_ilp.program import minimum_capacity
from autoshard_ilp.progress import Progress
from autoshard_ilp.units import format_bytes

MOST_BATCH = 1 << 20
LARGEST = 256


@dataclass(frozen=True)
class Fit:
    """Whether something fits.

    Attributes:
        size: devices, or the global batch.
        fits: a plan within the budget exists.
        proved: True when ``fits`` is certain; False when no plan was found but none was excluded either.
        mesh: the first mesh found that fits.
        minimum_bytes: a budget per device that is known to suffice, where one was looked for; the smallest where an
            error names it.
    """

    size: int
    fits: bool
    proved: bool
    mesh: str = ""
    minimum_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Sizing:
    """The answer to "how small" or "how large".

    Attributes:
        question: in words.
        size: devices, or the global batch.
        plan: the best plan of that size.
        tried: everything looked at, by size.
        proved: the next size (smaller slice, larger batch) is proved not to fit.
        search: the mesh search of that size, for slices.
        interrupted: Ctrl-C came before it was done.
    """

    question: str
    size: int
    plan: Plan
    tried: tuple[Fit, ...]
    proved: bool
    search: MeshSearch | None = None
    interrupted: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """One record per size looked at."""
        return [dict(t.__dict__) for t in self.tried]

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``."""
        return show.dataframe(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        cost = self.plan.cost
        best = {"mesh": str(self.plan.mesh), "total_s": cost.total_s, "peak_bytes": self.plan.memory.peak_bytes}
        answer = {"question": self.question, "size": self.size, "proved": self.proved, "interrupted": self.interrupted}
        return {**answer, "plan": best, "tried": self.rows()}

    def text(self, width: int | None = None, *, only_ascii: bool = False) -> str:
        """The answer in words, and what was tried."""
        from autoshard_ilp.display.render import rendered, size, table

        lines = []
        for t in self.tried:
            fits = "fits" if t.fits else "does not fit" if t.proved else "no plan found"
            lines.append([str(t.size), fits, t.mesh, size(t.minimum_bytes) if t.minimum_bytes else ""])
        sure = "proved" if self.proved else "the next size was not excluded by proof"
        sure += "; interrupted" if self.interrupted else ""
        head = f"{self.question} {self.size} ({sure}): {self.plan!r}"
        made = table("Tried", ["size", "", "mesh", "enough"], lines, left=3)
        return rendered([head, made], width or 100, only_ascii)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.html_block(self.text(110))


def smallest_slice(
    model: Any,
    hardware: Any,
    *,
    memory_budget: str | int | None = None,
    max_axes: int = 3,
    max_devices: int | None = None,
    batch_size: int | None = None,
    inputs: Any = None,
    targets: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    mode: str = "train",
    pins: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    solver: Any = None,
    remat: str = "auto",
    prices: Mapping[str, float] | None = None,
    progress: Any = None,
) -> Sizing:
    """The fewest devices on which a model's step fits, and the best plan there.

    Sizes are those that can be rented: a TPU's slice shapes; on GPUs powers of two up to a domain, then whole domains.

    Args:
        model, memory_budget, batch_size, inputs, targets, sample_weight, sequence_length, mode, pins, objective,
            solver, remat, progress: as for :func:`autoshard_ilp.optimize`; the global batch is the same for every size
            (None: what the model or the inputs fix, else 32).
        hardware: one profile.
        max_axes, prices: as for :func:`autoshard_ilp.search_mesh`.
        max_devices: largest size looked at; None: the largest slice, or 256.

    Raises:
        InfeasibleError: it fits on none of them.
    """
    name, (chip, _) = next(iter(hardware_list(hardware, 1).items()))
    whole_number("max_devices", max_devices, none="the largest slice, or 256")
    axes_within(max_axes, AXIS_NAMES)
    from autoshard_ilp.request import check_request, remat_policies

    probe = check_request({"data": 1}, memory_budget, chip, None, objective, solver)
    sizes = rentable(probe.profile, max_devices)
    options = {"batch_size": batch_size, "inputs": inputs, "targets": targets, "sample_weight": sample_weight}
    options |= {"sequence_length": sequence_length, "mode": mode}
    policies = remat_policies(remat, mode)
    tried: list[Fit] = []
    with Progress(progress).running() as shown:
        source = Source.of_model(model, MeshSpec(("all",), (1,)), shown, **options)
        options["batch_size"] = source.batch_size  # that of every size
        meshes = {n: [MeshSpec(names_of(len(f), AXIS_NAMES), f) for f in factorisations(n, max_axes)] for n in sizes}
        suits = (n for n in sizes if any(not _batch_fits(source.batch_size, mesh) for mesh in meshes[n]))
        largest = max(suits, default=0)
        for count, specs in meshes.items():
            requests = [check_request(s, memory_budget, chip, pins, objective, solver) for s in specs]
            tried.append(_fit_of_size(source, count, requests, policies, shown, needed=count == largest))
            if tried[-1].fits:
                break
    if not tried or not tried[-1].fits:
        least, of = min(((t.minimum_bytes, t.size) for t in tried if t.minimum_bytes), default=(None, 0))
        needs = f" On {of} devices it needs {format_bytes(least)}." if least else ""
        raise InfeasibleError(
            f"A model must fit some slice. Received: {name} with up to {sizes[-1]} devices, which it does not fit."
            f"{needs} Use a smaller batch, or hardware with more memory.",
            minimum_budget=least,
        )
    found = search_mesh(
        model, tried[-1].size, {name: tried[-1].size} if isinstance(chip, str) or chip is None else chip,
        max_axes=max_axes, memory_budget=memory_budget, pins=pins, objective=objective, solver=solver, remat=remat,
        prices=prices, progress=progress, **options,
    )  # fmt: skip
    assert found.best is not None
    proved = all(t.proved for t in tried[:-1])
    question = f"Smallest number of {name} devices:"
    return Sizing(question, tried[-1].size, found.best, tuple(tried), proved, found, found.interrupted)


def rentable(profile: Any, max_devices: int | None = None) -> list[int]:
    """Numbers of devices that can be had together, ascending."""
    limit = LARGEST if max_devices is None else max_devices
    if profile.torus is not None and profile.torus.slice_shapes:
        sizes = {math.prod(shape) * profile.torus.cores_per_chip for shape in profile.torus.slice_shapes}
        limit = max(sizes) if max_devices is None else max_devices
    else:
        domain = profile.domain_devices
        sizes = {2**i for i in range(12) if 2**i <= domain} | {domain * 2**i for i in range(12)}
    kept = sorted(s for s in sizes if s <= min(limit, MOST_DEVICES))
    if not kept:
        raise InputShapeError(f"max_devices must hold the smallest size of {profile.name}. Received: {max_devices!r}.")
    return kept


def _fit_of_size(
    source: Source, count: int, requests: Sequence[Any], policies: Sequence[str], progress: Any, *, needed: bool
) -> Fit:
    """Whether some mesh of a size fits, the policy that saves most memory first.

    ``needed`` asks for the smallest budget even where it is plain that nothing fits: an error names that of the largest
    size.
    """
    capacity = requests[0].capacity
    held = sum(_held(a, count) for a in source.infos.arguments if a.role in ("parameter", "optimizer"))
    suiting = [r for r in requests if not _batch_fits(source.batch_size, r.mesh)]
    nearest, proved, least = next(iter(suiting), None), True, None
    for request in suiting if held <= capacity else ():  # else not even if all of it were divided by their number
        lower, upper = _least(source, request, policies, progress)
        if upper is not None and upper <= capacity:
            return Fit(count, True, True, str(request.mesh), None)
        proved = proved and lower > capacity
        if upper is not None and (least is None or upper < least):
            nearest, least = request, upper
    if needed and nearest is not None:
        _, least = _least(source, nearest, policies, progress, exact=True)
    return Fit(count, False, proved, "", least)


def _held(argument: Any, count: int) -> int:
    from autoshard_ilp.display.records import itemsize

    return math.ceil(math.prod(argument.shape) * itemsize(argument.dtype) / count)


def _least(
    source: Source, request: Any, policies: Sequence[str], progress: Any, *, exact: bool = False
) -> tuple[float, int | None]:
    """Bounds of the smallest budget over the policies; stops once the capacity is known to suffice, or not to.

    ``exact`` goes on to the smallest budget itself, where the capacity does not suffice.
    """
    lower, upper = math.inf, None
    for policy in reversed(source.different(tuple(policies), request.profile, progress)):
        problem = source.problem(policy, request, progress)
        limits = {"beyond": upper} if exact else {"enough": request.capacity}
        with progress.stage("solve"):
            low, high, _ = minimum_capacity(problem.program, request.solver, **limits)
        lower, upper = min(lower, low), high if upper is None else min(upper, high)
        if upper <= request.capacity:
            break
    return lower, upper


def largest_batch(
    model: Any,
    mesh: Any,
    *,
    memory_budget: str | int | None = None,
    hardware: Any = None,
    multiple_of: int | None = None,
    sequence_length: int | None = None,
    mode: str = "train",
    pins: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    solver: Any = None,
    remat: str = "auto",
    progress: Any = None,
) -> Sizing:
    """The largest global batch whose step fits, and the best plan for it.

    Doubles the batch until it does not fit, then halves the interval. Memory is taken to grow with the batch. The model
    is traced once per batch that is tried. An interrupt ends the search with the largest batch seen to fit.

    Args:
        model, mesh, memory_budget, hardware, sequence_length, mode, pins, objective, solver, remat, progress: as for
            :func:`autoshard_ilp.optimize`.
        multiple_of: only multiples of this; None: of the number of devices.

    Raises:
        InfeasibleError: not even the smallest batch fits.
        InputShapeError: there is no largest batch up to a million: nothing in the step grows with it.
    """
    from autoshard_ilp.planning import plan_traced
    from autoshard_ilp.request import check_request, remat_policies

    request = check_request(mesh, memory_budget, hardware, pins, objective, solver)
    policies = remat_policies(remat, mode)
    step = request.mesh.size if multiple_of is None else integer(multiple_of) or 0
    if step < 1:
        raise InputShapeError(f"multiple_of is a positive integer. Received: {multiple_of!r}.")
    tried: dict[int, Fit] = {}
    sources: dict[int, Source] = {}
    smallest: Source | None = None

    with Progress(progress).running() as shown:

        def fits(count: int) -> bool:
            nonlocal smallest
            size = count * step
            options = {"batch_size": size, "sequence_length": sequence_length, "mode": mode}
            from autoshard_ilp.graph.step import trace

            with shown.stage("trace"):
                traced = trace(model, request.mesh, **options)
            source = Source(traced, traced.mode, traced.batch_size)
            smallest = smallest or source  # the first that is looked at
            lower, upper = _least(source, request, policies, shown)
            good = upper is not None and upper <= request.capacity
            tried[size] = Fit(size, good, good or lower > request.capacity, str(request.mesh), None if good else upper)
            if good:
                sources.clear()
                sources[size] = source
            return good

        interrupted = False
        try:
            count = _last_that_fits(fits)
        except KeyboardInterrupt:
            if not sources:
                raise
            interrupted = True
            count = max(sources) // step  # the largest that was seen to fit is an answer, too
        if count * step > MOST_BATCH:
            raise InputShapeError(f"Nothing in the step grows with the batch: {count * step} still fits.")
        if count == 0 and smallest is not None:
            _, least = _least(smallest, request, policies, shown, exact=True)
            raise InfeasibleError(
                f"The smallest batch must fit. Received: a batch of {step} on a mesh of {request.mesh}, which needs "
                f"{format_bytes(least or 0)} per device. Use more devices or multiple_of=.",
                minimum_budget=least,
            )
        plan = plan_traced(sources[count * step].infos, request, shown, policies)
    question = "Largest global batch:"
    above = tried.get((count + 1) * step)  # not looked at where the search was interrupted
    proved = above is not None and above.proved
    looked_at = tuple(tried[s] for s in sorted(tried))
    return Sizing(question, count * step, plan, looked_at, proved, interrupted=interrupted)


def _last_that_fits(fits: Any) -> int:
    """Largest n >= 1 with ``fits(n)`` (0: none), by doubling and halving; more than MOST_BATCH: no end found."""
    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
        if high > MOST_BATCH:
            return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

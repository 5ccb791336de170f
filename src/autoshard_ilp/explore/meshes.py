"""``autoshard.search_mesh``: which mesh shape, on which hardware, trains a model fastest (or cheapest).

The model is traced once. Every way to write the number of devices as a product of one, two or three axes is priced
where its axes really lie on the links. First each is solved without memory, which is quick and bounds it from below; a
plan that happens to fit is final. The others are solved within memory in the order of their bounds, until no bound left
is below the best plan found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard_ilp.arguments import flag, integer, is_one_of, mapping, real
from autoshard_ilp.errors import AutoshardError, InfeasibleError, InputShapeError
from autoshard_ilp.explore.again import Known, Problem, failure_of, plan_of, solved
from autoshard_ilp.explore.meshes_table import Candidate, MeshSearch
from autoshard_ilp.explore.source import Source
from autoshard_ilp.mesh import MOST_DEVICES, MeshSpec
from autoshard_ilp.progress import Progress
from autoshard_ilp.search.rematsearch import blocks_of, recomputed_share, search

AXIS_NAMES = ("replica", "data", "model")
RANKS = ("time", "price")


def factorisations(devices: int, max_axes: int = 3) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of up to ``max_axes`` factors of at least 2; (1,) for 1."""
    yield (devices,)
    if max_axes > 1:
        small = [d for d in range(2, math.isqrt(devices) + 1) if devices % d == 0]
        for first in sorted({*small, *(devices // d for d in small)}):
            yield from ((first, *rest) for rest in factorisations(devices // first, max_axes - 1))


def search_mesh(
    model: Any,
    devices: int | None = None,
    hardware: Any = None,
    *,
    prices: Mapping[str, float] | None = None,
    rank: str = "time",
    max_axes: int = 3,
    axis_names: Sequence[str] = AXIS_NAMES,
    prune: bool = True,
    memory_budget: str | int | None = None,
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
    progress: Any = None,
) -> MeshSearch:
    """Finds the best mesh shape for a model, on one kind of hardware or across several.

    Args:
        model: a ``keras.Model`` or a builder, as for :func:`autoshard_ilp.optimize`. Traced once, with one batch.
        devices: how many; None where ``hardware`` says it.
        hardware: a profile name ("tpu-v5e", or a slice "tpu-v5e:4x4"), a profile, a list of them, or
            ``{name: devices}`` to compare different numbers ("v5e-16 or 8 H100?").
        prices: per device and hour, by hardware as it was named, in any currency.
        rank: "time" per step, or "price" per step (needs ``prices``).
        max_axes: most mesh axes.
        axis_names: names of the axes; the last is the innermost, and a mesh of fewer axes takes the last ones, but
            for a single axis, which is called as the last but one.
        prune: leave meshes unsolved whose bound shows that they cannot be the best of their hardware.
        memory_budget, batch_size, inputs, targets, sample_weight, sequence_length, mode, pins, objective, solver,
            remat, progress: as for ``optimize``. Pins may only name axes that every mesh has.

    Returns:
        Every mesh, best first, with ``.best`` as a plan.

    Raises:
        InputShapeError, ProfileError, UnsupportedModelError: as ``optimize``.
        InfeasibleError: no mesh fits; carries the smallest budget over all of them.
    """
    kinds = hardware_list(hardware, devices)
    _check(rank, prices, kinds, max_axes, axis_names)
    flag("prune", prune)
    options = {"batch_size": batch_size, "inputs": inputs, "targets": targets, "sample_weight": sample_weight}
    options |= {"sequence_length": sequence_length, "mode": mode}
    from autoshard_ilp.request import check_request, remat_policies

    requests = {}
    for name, (chip, count) in kinds.items():
        for sizes in factorisations(count, max_axes):
            spec = MeshSpec(names_of(len(sizes), axis_names), sizes)
            requests[name, sizes] = check_request(spec, memory_budget, chip, pins, objective, solver)
    with Progress(progress).running() as shown:
        source = trace_for(model, [count for _, count in kinds.values()], shown, options)
        policies = remat_policies(remat, mode)
        different = source.different(policies, next(iter(requests.values())).profile, shown)
        search = Search(source, different, shown, prune, rank, prices or {})
        for name, (_, count) in kinds.items():
            search.group(name, count, {sizes: r for (n, sizes), r in requests.items() if n == name})
    return search.result()


def hardware_list(hardware: Any, devices: int | None) -> dict[str, tuple[Any, int]]:
    """``{name: (hardware, devices)}`` of every accepted form."""
    if isinstance(hardware, Mapping):
        entries = list(hardware.items())
    else:
        many = hardware if isinstance(hardware, list | tuple) else [hardware]
        entries = [(chip, devices if devices is not None else _devices_of(chip)) for chip in many]
    found: dict[str, tuple[Any, int]] = {}
    for chip, count in entries:
        name = "cpu-host" if chip is None else chip if isinstance(chip, str) else getattr(chip, "name", repr(chip))
        if (integer(count) or 0) < 1:
            raise InputShapeError(
                f"A mesh search needs a positive number of devices. Received: {count!r} for {name!r}. Pass devices=32, "
                'hardware="tpu-v5e:4x8", or hardware={"tpu-v5e": 16, "h100": 8}.'
            )
        if int(count) > MOST_DEVICES:
            raise InputShapeError(
                f"A mesh has at most {MOST_DEVICES} devices. Received: {int(count)} for {name!r}. Ask for fewer."
            )
        if name in found:
            raise InputShapeError(f"Hardware is named once. Received: {name!r} twice. Drop one of them.")
        found[name] = (chip, int(count))
    if not found:
        raise InputShapeError(f"A mesh search needs some hardware. Received: {hardware!r}.")
    return found


def _devices_of(chip: Any) -> int | None:
    """Devices of a slice such as "tpu-v5e:4x4", or of "h100:8"."""
    if not isinstance(chip, str) or ":" not in chip or chip.endswith(".toml"):
        return None
    from autoshard_ilp.costs.profile import load_profile

    name, _, shape = chip.partition(":")
    torus = load_profile(name).torus
    sizes = shape.split("x")
    if not all(s.isdecimal() and len(s) < 19 for s in sizes):  # Python reads no number of thousands of digits
        return None
    return math.prod(map(int, sizes)) * (torus.cores_per_chip if torus is not None else 1)


def axes_within(max_axes: Any, axis_names: Sequence[str]) -> None:
    """Raises InputShapeError unless there is a name for each of ``max_axes`` axes, at least one."""
    if not 1 <= (integer(max_axes) or 0) <= len(axis_names):
        raise InputShapeError(
            f"max_axes is from 1 to the number of axis names. Received: {max_axes!r}, {axis_names!r}."
        )


def _check(rank: str, prices: Any, kinds: Mapping[str, Any], max_axes: int, axis_names: Sequence[str]) -> None:
    if not is_one_of(rank, RANKS):
        raise InputShapeError(f"rank is one of {RANKS}. Received: {rank!r}.")
    several = isinstance(axis_names, Sequence) and not isinstance(axis_names, str | bytes)
    if not several or not all(isinstance(n, str) for n in axis_names):
        raise InputShapeError(f"axis_names is a sequence of names. Received: {axis_names!r}.")
    axes_within(max_axes, axis_names)
    mapping("prices", prices, '{"h100": 2.5}')
    for name, price in (prices or {}).items():
        if name not in kinds:
            raise InputShapeError(f"A price is for hardware of the search: {', '.join(kinds)}. Received: {name!r}.")
        found = real(price)
        if found is None or not 0 <= found < math.inf:
            raise InputShapeError(f"A price is a number per device and hour. Received: {name!r}: {price!r}.")
    missing = [name for name in kinds if name not in (prices or {})]
    if rank == "price" and missing:
        raise InputShapeError(f'rank="price" needs a price of all hardware. Received: none for {", ".join(missing)}.')


def names_of(count: int, axis_names: Sequence[str] = AXIS_NAMES) -> tuple[str, ...]:
    """Names of the axes of a mesh."""
    if count == 1 and len(axis_names) > 1:
        return (axis_names[-2],)
    return tuple(axis_names[len(axis_names) - count :])


def trace_for(model: Any, counts: Sequence[int], progress: Any, options: dict[str, Any]) -> Source:
    """Traces a model for meshes of several sizes: one batch for all of them."""
    free = options.get("batch_size") is None and options.get("inputs") is None
    spec = MeshSpec(("all",), (math.lcm(*counts) if free else 1,))
    return Source.of_model(model, spec, progress, **options)


@dataclass(eq=False)
class _Open:
    """A mesh that is not decided: its problem under the first policy, and the solution without memory."""

    candidate: Candidate
    request: Any
    problem: Problem | None = None
    relaxed: Any = None


PRUNED: dict[str, Any] = {"status": "pruned", "reason": "no plan on this mesh can be as fast as the best"}


class Search:
    """The search over meshes; see the module docstring."""

    def __init__(
        self,
        source: Source,
        policies: Sequence[str],
        progress: Any,
        prune: bool,
        rank: str,
        prices: Mapping[str, float],
    ) -> None:
        self.source, self.progress, self.prune, self.rank, self.prices = (
            source, progress, prune, rank, {name: float(price) for name, price in prices.items()},
        )  # fmt: skip
        self.policies = tuple(policies)
        self.found: list[Candidate] = []
        self.errors: list[InfeasibleError] = []
        self.interrupted = False

    def group(self, name: str, devices: int, requests: Mapping[tuple[int, ...], Any]) -> None:
        """All meshes of one hardware."""
        best = math.inf
        waiting: list[_Open] = []
        for request in requests.values():
            candidate = Candidate(name, devices, request.mesh, price_per_hour=self.prices.get(name))
            if self.interrupted:
                self.found.append(replace(candidate, status="not tried", reason="interrupted"))
                continue
            try:
                one = self._bounded(candidate, request)
            except KeyboardInterrupt:
                self.found.append(self._not_tried(candidate))
                continue
            if one is None:
                best = min(best, self.found[-1].total_s)
            else:
                waiting.append(one)
        for one in sorted(waiting, key=lambda o: o.candidate.lower_bound_s):
            try:
                decided = self._decided(one, best)
            except KeyboardInterrupt:
                decided = self._not_tried(one.candidate)
            self.found.append(decided)
            best = min(best, self.found[-1].total_s)

    def _not_tried(self, candidate: Candidate) -> Candidate:
        """A mesh at which Ctrl-C came; it is raised again where no plan would be kept."""
        self.interrupted = True
        if all(c.make is None for c in self.found):
            raise KeyboardInterrupt
        return replace(candidate, status="not tried", reason="interrupted")

    def _bounded(self, candidate: Candidate, request: Any) -> _Open | None:
        """The mesh without memory; None when that decides it (and it is noted)."""
        self.progress.tell({"stage": f"mesh {candidate.mesh}"})
        refused = _batch_fits(self.source.batch_size, request.mesh)
        if refused:
            self.found.append(replace(candidate, status="refused", reason=refused))
            return None
        try:
            problem, solution = self._relaxed(request)
        except AutoshardError as error:
            self.found.append(replace(candidate, status="failed", reason=str(error)))
            return None
        if solution.choices is not None and solution.status == "optimal" and solution.peak_bytes <= request.capacity:
            self.found.append(self._solved(candidate, problem, solution))
            return None
        candidate = replace(candidate, lower_bound_s=max(0.0, solution.lower_bound))
        return _Open(candidate, request, problem, solution)

    def _relaxed(self, request: Any) -> tuple[Problem, Any]:
        """The first policy on a mesh, solved without memory."""
        problem = self.source.problem(self.policies[0], request, self.progress)
        free = replace(problem, program=replace(problem.program, capacity=None))
        return problem, self._watched(solved(free, self.progress))

    def _watched(self, solution: Any) -> Any:
        self.interrupted = self.interrupted or bool(solution.report.get("interrupted"))
        return solution

    def _decided(self, one: _Open, best: float) -> Candidate:
        """Solves a mesh within memory, unless its bounds show that it cannot be the best."""
        if self.interrupted:
            return replace(one.candidate, status="not tried", reason="interrupted")
        if self.prune and one.candidate.lower_bound_s >= best:  # what recomputes is no faster: copies only add cost
            return replace(one.candidate, **PRUNED)
        cutoff, slower = (best if self.prune else math.inf), math.inf  # what no plan of any policy is below
        solutions: dict[str, tuple[Problem, Any]] = {}

        def tried(policy: str, seconds: float, worse_than: float, dear: float) -> Any:
            nonlocal slower
            problem = one.problem or self.source.problem(policy, one.request, self.progress)
            relaxed = one.relaxed
            one.problem = one.relaxed = None  # only the first policy is priced already
            known = Known()
            if relaxed is not None and relaxed.choices is not None:
                known = Known((relaxed.choices,), relaxed.lower_bound)
            solution = self._watched(solved(problem, self.progress, known, seconds, cutoff=min(cutoff, worse_than)))
            if solution.status != "infeasible":
                slower = min(slower, solution.lower_bound)
            if solution.choices is None or solution.status == "infeasible":
                failed = failure_of(problem, solution)
                return failed if policy in self.policies else failed.without_tables()
            plan = plan_of(problem, solution, Progress(False), self.source)
            solutions[plan.remat_policy] = (problem, solution)
            return plan

        found = search(
            self.policies,
            tried,
            blocks_of,
            one.request.solver.time_limit,
            share=recomputed_share,
        )
        if found.plan is None and cutoff <= slower < math.inf:
            return replace(one.candidate, lower_bound_s=slower, **PRUNED)
        if found.plan is None:
            return self._failed(one, found.failures)
        return self._solved(one.candidate, *solutions[found.plan.remat_policy])

    def _failed(self, one: _Open, failures: list[Any]) -> Candidate:
        from autoshard_ilp.search.infeasible import infeasible

        error = infeasible(failures, one.request)
        self.errors.append(error)
        status = "infeasible" if error.minimum_budget is not None or error.conflicts else "unknown"
        return replace(one.candidate, status=status, minimum_bytes=error.minimum_budget, reason=str(error))

    def _solved(self, candidate: Candidate, problem: Problem, solution: Any) -> Candidate:
        from autoshard_ilp.report import planned_collectives, total_cost

        cost = total_cost(problem.table, solution.choices, planned_collectives(problem.table, solution.choices))
        return replace(
            candidate,
            status=solution.status,
            total_s=cost.total_s,
            compute_s=cost.compute_s,
            communication_s=cost.communication_s,
            lower_bound_s=solution.lower_bound,
            peak_bytes=solution.peak_bytes,
            remat=problem.step.remat,
            make=lambda: plan_of(problem, solution, Progress(False), self.source),
        )

    def result(self) -> MeshSearch:
        """All meshes, best first; InfeasibleError when none has a plan."""
        ordered = sorted(self.found, key=lambda c: c.order(self.rank))
        if not any(c.status in ("optimal", "feasible") for c in ordered) and not self.interrupted:
            raise _nothing(ordered, self.errors)
        return MeshSearch(tuple(ordered), self.rank, self.source.batch_size, self.interrupted)


def _batch_fits(batch_size: int, mesh: MeshSpec) -> str:
    """Why a batch cannot be laid on a mesh; "" when it can. The rule is that of ``optimize``."""
    axes = [s for s in mesh.axis_sizes if s > 1]
    if axes and batch_size > 1 and all(batch_size % s for s in axes):
        return f"the global batch of {batch_size} divides by no mesh axis"
    return ""


def _nothing(found: Sequence[Candidate], errors: Sequence[InfeasibleError]) -> AutoshardError:
    fits = [e for e in errors if e.minimum_budget is not None]
    if not fits:
        reasons = "; ".join(f"{c.mesh}: {c.reason}" for c in found[:3])
        return errors[0] if errors else InputShapeError(f"At least one mesh must suit the model. Received: {reasons}.")
    least = min(fits, key=lambda e: e.minimum_budget or 0)
    return InfeasibleError(
        f"No mesh of the search fits the memory budget. The best of them: {least}",
        minimum_budget=least.minimum_budget,
        minimum_budget_bound=min(e.minimum_budget_bound or 0 for e in fits),
        contributors=least.contributors,
        conflicts=least.conflicts,
    )

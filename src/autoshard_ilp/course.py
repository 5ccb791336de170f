"""The predicted course of one step: what runs when, and what fills the memory meanwhile.

Read off the cost table under the chosen strategies, in the order that :mod:`autoshard_ilp.costs.memory` schedules:
program order, parameter updates as soon as their operands are known. Compute and exposed communication alternate, as
the cost model adds them up. What a profile declares to hide behind compute takes no time of its own; the cost model
says how much of it there is, not when it runs, so it is laid on the compute nearest to it (:func:`behind_compute`).

A course is small: neighbouring operations of one layer and kind are one segment, and the memory is sampled. So a plan
file holds it, and a loaded plan shows what the fresh one did.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from autoshard_ilp.costs.build import Built
from autoshard_ilp.costs.table import CostTable
from autoshard_ilp.names import common, pattern
from autoshard_ilp.report import ON_CHIP_FIRST, collective_sites, held_by_all

COMPUTE = "compute"
MAX_SEGMENTS = 2000
SAMPLES = 240
"""Samples of the memory curve, evenly spread over the step's seconds."""

MOST_SECONDS, MOST_BYTES = 1e15, 1 << 60
"""What no step takes, and no device has."""


@dataclass(frozen=True)
class Segment:
    """Consecutive work of one layer and kind.

    Attributes:
        layer: layer of the model, without the name of the model itself; "" where an operation belongs to none.
        phase: "forward", "backward" or "update".
        kind: "compute", or the kind of collective.
        axes: mesh axes of the collective, joined by "+"; "" for compute.
        start_s, seconds: when, from the start of the step, and how long, all executions in a loop together.
        hidden_s: seconds of a collective that run behind compute, on top.
    """

    layer: str
    phase: str
    kind: str
    axes: str
    start_s: float
    seconds: float
    hidden_s: float = 0.0

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Course:
    """A step over its predicted time.

    Attributes:
        segments: in order, without gaps.
        at_s: times of the samples of memory, ascending; sample i stands for the fullest instant from ``at_s[i]`` until
            the next one.
        held: bytes per device at every sample, by part (see :class:`~autoshard_ilp.report.Memory`).
    """

    segments: tuple[Segment, ...] = ()
    at_s: tuple[float, ...] = ()
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """End of the last segment."""
        return self.segments[-1].end_s if self.segments else 0.0

    def total_bytes(self) -> tuple[int, ...]:
        """Bytes per device at every sample, all parts together."""
        return tuple(sum(column) for column in zip(*self.held.values(), strict=True))

    def peak_index(self) -> int:
        """The fullest sample; the first of several."""
        total = self.total_bytes()
        return max(range(len(total)), key=total.__getitem__) if total else 0

    def hidden(self) -> tuple[Segment, ...]:
        """Communication that runs while the device computes, in order: the stretches of :func:`behind_compute`."""
        found = behind_compute(self.segments)
        return tuple(replace(self.segments[i], start_s=a, seconds=n, hidden_s=0.0) for i, a, n in found)

    def by_layer(self) -> dict[str, dict[str, float]]:
        """Seconds by layer and kind; layers whose names differ in numbers only are one, written with ``*``."""
        named = repeated_names(dict.fromkeys(s.layer for s in self.segments))
        found: dict[str, dict[str, float]] = {}
        for s in self.segments:
            kinds = found.setdefault(named[s.layer], {})
            kinds[s.kind] = kinds.get(s.kind, 0.0) + s.seconds
        return found


def repeated_names(layers: Iterable[str]) -> dict[str, str]:
    """Layer -> its name with ``*`` for numbers, where several layers then share the name."""
    groups: dict[str, list[str]] = {}
    for layer in layers:
        groups.setdefault(pattern(layer), []).append(layer)
    return {layer: common(group) for group in groups.values() for layer in group}


def behind_compute(segments: Sequence[Segment]) -> list[tuple[int, float, float]]:
    """Where hidden communication runs: (number of its segment, start, seconds), ascending by start.

    Every collective takes the compute that comes last before it, and what does not fit there the compute that comes
    next after it; two collectives over the same axes never run at once. What finds no compute is left out (a plan that
    hides more than it computes says so, :func:`~autoshard_ilp.costs.overlap.overlap_notes`).
    """
    free: dict[str, list[tuple[float, float]]] = {s.axes: [] for s in segments if s.hidden_s}
    owed: dict[str, deque[tuple[int, float]]] = {lane: deque() for lane in free}
    found = []
    for i, s in enumerate(segments):
        if s.kind == COMPUTE:
            for lane, waiting in owed.items():
                start = s.start_s
                while waiting and start < s.end_s:
                    number, left = waiting.popleft()
                    taken = min(left, s.end_s - start)
                    found.append((number, start, taken))
                    start += taken
                    if left > taken:
                        waiting.appendleft((number, left - taken))
                if start < s.end_s:
                    free[lane].append((start, s.end_s))
        left, before = s.hidden_s, free.get(s.axes, [])
        while left > 0 and before:
            start, end = before.pop()
            taken = min(left, end - start)
            found.append((i, end - taken, taken))
            left -= taken
            if end - taken > start:
                before.append((start, end - taken))
        if left > 0:
            owed[s.axes].append((i, left))
    return sorted(found, key=lambda x: x[1])


# -- from the cost table -----------------------------------------------------------------------------------------------


def course_of(built: Built, table: CostTable, choices: Sequence[int]) -> Course:
    """The course of a step under the chosen strategy per class."""
    events = list(op_events(table, choices))
    segments = _merged(events)
    if len(segments) > MAX_SEGMENTS:
        segments = _merged(_by_visit(segments))
    at_s, held = _memory(built, table, choices, events)
    return Course(tuple(segments), at_s, held)


@dataclass(frozen=True)
class OpEvent:
    """One operation's compute, or one of its collectives: a :class:`Segment` with what runs.

    ``name`` is the primitive or the tensor that is moved; ``n_bytes`` are sent per device, all executions together.
    """

    segment: Segment
    op_id: int
    name: str
    n_bytes: float = 0.0


def op_events(table: CostTable, choices: Sequence[int]) -> Iterator[OpEvent]:
    """Every operation and collective of the step that takes time, one after the other."""
    graph = table.graph
    layer_of = layers_of((op.scope for op in graph.ops), (op.scope for op in graph.ops if op.phase == "forward"))
    before: dict[int, list[tuple[Any, float]]] = defaultdict(list)
    after: dict[int, list[tuple[Any, float]]] = defaultdict(list)
    for collective, sites in collective_sites(table, choices):
        for op_id, comes_first in sites:
            (before if comes_first else after)[op_id].append((collective, collective.count / len(sites)))
    seconds_of: dict[int, float] = {}  # of one execution of each operation
    for c, choice in zip(table.classes, choices, strict=True):
        seconds_of |= dict.fromkeys(c.members, float(c.compute_seconds[choice]))
    now = 0.0
    for op_id in np.argsort(table.buffers.time, kind="stable").tolist():
        op = graph.ops[op_id]
        own = op.count * seconds_of.get(op_id, 0.0)
        layer = layer_of[op.scope]
        parts = [(COMPUTE, "", own, 0.0, op.primitive, 0.0)]
        if op_id in before or op_id in after:
            parts = [*map(_part, before[op_id]), *parts, *map(_part, after[op_id])]
        for kind, axes, seconds, hidden, name, sent in parts:
            if seconds > 0 or hidden > 0:
                yield OpEvent(Segment(layer, op.phase, kind, axes, now, seconds, hidden), op_id, name, sent)
                now += seconds


def _part(collective_and_count: tuple[Any, float]) -> tuple[str, str, float, float, str, float]:
    c, n = collective_and_count
    axes = "+".join(c.mesh_axes)
    return c.kind, axes, c.seconds * n, c.hidden_seconds * n, c.tensor, c.bytes_per_device * n


def layers_of(scopes: Iterable[str], forward: Iterable[str]) -> dict[str, str]:
    """Scope of an operation -> the layer to name it by: the first part below the model itself.

    A part that holds more than 60 % of the forward pass's operations, and has several parts below it, is a model (or
    a backbone inside one), whose name says nothing.

    Args:
        scopes: of all operations.
        forward: those of the forward pass, one per operation.
    """
    counted = Counter(tuple(x.split("/")) for x in forward if x)
    models: list[tuple[str, ...]] = [()]
    total = sum(counted.values())
    while True:
        top = models[-1]
        inside = {s: n for s, n in counted.items() if s[: len(top)] == top and len(s) > len(top)}
        heads: Counter[str] = Counter()
        for s, n in inside.items():
            heads[s[len(top)]] += n
        if not heads:
            break
        name, n = heads.most_common(1)[0]
        deeper = {s[len(top) + 1] for s in inside if s[len(top)] == name and len(s) > len(top) + 1}
        if n <= 0.6 * total or len(deeper) < 2:
            break
        models.append((*top, name))
    found = {"": ""}
    for s in (tuple(x.split("/")) for x in {*scopes} - {""}):
        depth = max(len(m) for m in models if s[: len(m)] == m)
        found["/".join(s)] = s[depth] if len(s) > depth else s[-1]
    return found


def _merged(events: Iterable[Any]) -> list[Segment]:
    """Neighbours of the same layer, phase, kind and axes as one; times follow on each other."""
    found: list[Segment] = []
    segments = (event if isinstance(event, Segment) else event.segment for event in events)
    for _, alike in groupby(segments, key=attrgetter("layer", "phase", "kind", "axes")):
        first, *others = alike
        seconds, hidden = first.seconds, first.hidden_s
        for s in others:
            seconds, hidden = seconds + s.seconds, hidden + s.hidden_s
        start = found[-1].end_s if found else 0.0
        found.append(replace(first, start_s=start, seconds=seconds, hidden_s=hidden))
    return found


def _by_visit(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Every visit of a layer with its work sorted by kind: fewer segments, the order inside a layer lost."""
    start = 0
    for i in range(1, len(segments) + 1):
        s = segments[start]
        if i == len(segments) or (segments[i].layer, segments[i].phase) != (s.layer, s.phase):
            yield from sorted(segments[start:i], key=lambda x: (x.kind != COMPUTE, x.kind, x.axes))
            start = i


def _memory(
    built: Built, table: CostTable, choices: Sequence[int], events: Sequence[OpEvent]
) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """Samples of the bytes held by part. Each is the fullest instant of its stretch, so the peak is among them."""
    lt = built.program.lifetimes
    if not len(lt.owner):
        return (), {}
    horizon = table.buffers.horizon
    held: dict[str, np.ndarray] = {}
    stays = np.zeros(2 * horizon + 1, np.int64)  # arguments and results, and after the horizon what is large
    n_bytes = np.array(held_by_all(built, choices), np.int64)
    categories = np.array(built.categories)
    begun = (n_bytes > 0) & (lt.start < horizon)
    for category in dict.fromkeys(categories[begun].tolist()):
        own = begun & (categories == category)
        change = held.setdefault(category, np.zeros(horizon + 1, np.int64))
        np.add.at(change, lt.start[own], n_bytes[own])
        np.subtract.at(change, np.minimum(lt.end[own], horizon), n_bytes[own])
    kept = (n_bytes > 0) & (lt.end >= horizon)
    start, end = lt.start[kept], lt.end[kept]
    np.add.at(stays, np.maximum(start, horizon), n_bytes[kept])
    np.subtract.at(stays, np.where(start >= horizon, end, 2 * horizon), n_bytes[kept])
    if not held:
        return (), {}
    held = {name: np.cumsum(change)[:-1] for name, change in held.items()}
    if built.program.on_chip_bytes:
        _take_on_chip(held, np.cumsum(stays)[horizon:-1], built.program.on_chip_bytes)
    total = np.sum(list(held.values()), axis=0)
    spent = np.zeros(horizon)
    for e in events:
        spent[min(int(table.buffers.time[e.op_id]), horizon - 1)] += e.segment.seconds
    begins = np.concatenate([[0.0], np.cumsum(spent)[:-1]])
    step_s = float(spent.sum())
    bucket = np.minimum((begins / step_s * SAMPLES).astype(int), SAMPLES - 1) if step_s else np.zeros(horizon, int)
    order = np.lexsort((np.arange(horizon), -total, bucket))
    fullest = order[np.unique(bucket[order], return_index=True)[1]]
    at_s = tuple(float(x) for x in np.unique(bucket) * (step_s / SAMPLES))
    return at_s, {name: tuple(int(x) for x in values[fullest]) for name, values in held.items()}


def _take_on_chip(held: dict[str, np.ndarray], least: np.ndarray, size: int) -> None:
    """Takes what lies in a TPU's vector memory out of the bytes held by part, instant by instant, in place.

    Args:
        held: bytes by part and instant.
        least: bytes that are in device memory at each instant in any case.
        size: of the vector memory.
    """
    total = np.sum(list(held.values()), axis=0)
    on_chip = total - np.maximum(total - size, np.minimum(least, total))
    held["activations"] = held.get("activations", 0) + np.maximum(0, least - total)  # results that are still to come
    for part in dict.fromkeys((*ON_CHIP_FIRST, *held)):
        if part in held:
            taken = np.minimum(on_chip, held[part])
            held[part], on_chip = held[part] - taken, on_chip - taken


# -- as plain data -----------------------------------------------------------------------------------------------------


def to_dict(course: Course) -> dict[str, Any]:
    """A course as plain data: names once, segments as rows of numbers; hidden seconds last, where there are any."""
    names = sorted({x for s in course.segments for x in (s.layer, s.phase, s.kind, s.axes)})
    index = {name: i for i, name in enumerate(names)}
    rows = [
        [*(index[x] for x in (s.layer, s.phase, s.kind, s.axes)), s.seconds, *([s.hidden_s] if s.hidden_s else [])]
        for s in course.segments
    ]
    return {
        "names": names,
        "segments": rows,
        "at_s": list(course.at_s),
        "held": {k: list(v) for k, v in course.held.items()},
    }


def without_course(plan: Any) -> str:
    """Why a plan has no segments, as the end of a sentence."""
    if plan.trail is not None or plan.course.at_s:
        return "a plan of a step without operations: nothing is computed or sent."
    return "a plan without one, from a file of an earlier version. Plan again."


def from_dict(data: Mapping[str, Any]) -> Course:
    """A course from plain data; raises KeyError, TypeError, ValueError or IndexError on wrong fields."""
    names = [str(x) for x in data["names"]]
    segments: list[Segment] = []
    now = 0.0
    for layer, phase, kind, axes, seconds, *rest in data["segments"]:
        if min(layer, phase, kind, axes) < 0:
            raise ValueError("a segment refers to a name that does not exist")
        hidden = rest[0] if rest else 0.0
        if len(rest) > 1 or not (0 <= seconds < MOST_SECONDS and 0 <= hidden < MOST_SECONDS):
            raise ValueError("a segment takes no negative or endless time")
        where = (names[layer], names[phase], names[kind], names[axes])
        segments.append(Segment(*where, now, float(seconds), float(hidden)))
        now = segments[-1].end_s
    at_s = tuple(float(x) for x in data["at_s"])
    held = {str(k): tuple(int(x) for x in v) for k, v in data["held"].items()}
    if any(len(v) != len(at_s) for v in held.values()):
        raise ValueError("as many samples of memory as times")
    if any(not 0 <= x < MOST_BYTES for v in held.values() for x in v) or any(x > MOST_SECONDS for x in at_s):
        raise ValueError("samples of memory are bytes of a device, at seconds of a step")
    if any(b < a for a, b in zip((0.0, *at_s), at_s, strict=False)):
        raise ValueError("samples of memory ascend in time")
    return Course(tuple(segments), at_s, held)

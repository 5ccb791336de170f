"""The predicted step in the trace event format that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", Google, 2016. Times are microseconds; complete events ("X") on one thread per lane,
counters ("C") for the memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from autoshard_ilp.arguments import file_path
from autoshard_ilp.course import COMPUTE, Segment, behind_compute, op_events, without_course
from autoshard_ilp.errors import InputShapeError, PlanFileError
from autoshard_ilp.files import write_whole

LAYERS = "layers"


def write(plan: Any, path: str | os.PathLike[str]) -> None:
    """Writes a plan's predicted step as trace events.

    Args:
        plan: one fresh from the planner is written operation by operation, with the user's line; one from a file by
            layer and kind.
        path: of the JSON file.

    Raises:
        InputShapeError: the plan has no course.
        PlanFileError: the file cannot be written.
    """
    if not plan.course.segments:
        raise InputShapeError(f"A trace shows the course of a step. Received: {without_course(plan)}")
    from autoshard_ilp.display.records import headline

    document = {
        "traceEvents": sorted(trace_events(plan), key=lambda e: (e.get("ts", -1.0), -e.get("dur", 0.0))),
        "displayTimeUnit": "ms",
        "otherData": {"plan": headline(plan), "what": "predicted by autoshard_ilp, not measured"},
    }
    try:
        write_whole(file_path(path), json.dumps(document, separators=(",", ":")).encode())
    except OSError as error:
        raise PlanFileError(f"A trace is written to a file that can be written. Received: {path} ({error}).") from error


def trace_events(plan: Any) -> Iterator[dict[str, Any]]:
    """Events in order: names of the lanes, layers, work, memory."""
    course = plan.course
    axes = [f"over {a}" for a in dict.fromkeys(s.axes for s in course.segments if s.kind != COMPUTE)]
    lanes = {name: i for i, name in enumerate([LAYERS, COMPUTE, *axes])}
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"one of {plan.mesh.size} x {plan.hardware}"}}
    for name, thread in lanes.items():
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for layer, phase, start, end in _visits(course.segments):
        yield _complete(layer or "other", phase, start, end - start, lanes[LAYERS], {})
    work = list(_work(plan))
    for name, s, details in work:
        lane = lanes.get(COMPUTE if s.kind == COMPUTE else f"over {s.axes}", lanes[COMPUTE])
        if s.seconds:
            yield _complete(name, s.phase, s.start_s, s.seconds, lane, {"layer": s.layer, **details})
    for i, start_s, seconds in behind_compute([s for _, s, _ in work]):
        name, s, details = work[i]
        lane = lanes.get(f"over {s.axes}", lanes[COMPUTE])
        told = {"layer": s.layer, "runs": "behind compute", **details}
        yield _complete(name, s.phase, start_s, seconds, lane, told)
    for i, at in enumerate(course.at_s):
        held = {part: values[i] for part, values in course.held.items()}
        yield {"ph": "C", "pid": 0, "name": "memory per device (bytes)", "ts": at * 1e6, "args": held}


def _visits(segments: tuple[Segment, ...]) -> Iterator[tuple[str, str, float, float]]:
    start = 0
    for i in range(1, len(segments) + 1):
        first = segments[start]
        if i == len(segments) or (segments[i].layer, segments[i].phase) != (first.layer, first.phase):
            yield first.layer, first.phase, first.start_s, segments[i - 1].end_s
            start = i


def _work(plan: Any) -> Iterator[tuple[str, Segment, dict[str, Any]]]:
    if plan.trail is None:
        for s in plan.course.segments:
            yield s.kind, s, {}
        return
    graph = plan.trail.graph
    for event in op_events(plan.trail.costs, plan.trail.solution.choices):
        op, s = graph.ops[event.op_id], event.segment
        details: dict[str, Any] = {"scope": op.scope, "executions": op.count, "source": op.source}
        if s.kind != COMPUTE:
            details |= {"tensor": event.name, "sent bytes per device": event.n_bytes}
        yield event.name if s.kind == COMPUTE else s.kind, s, details


def _complete(
    name: str, phase: str, start_s: float, seconds: float, lane: int, details: dict[str, Any]
) -> dict[str, Any]:
    where = {"ph": "X", "pid": 0, "tid": lane, "ts": start_s * 1e6, "dur": seconds * 1e6}
    return {**where, "name": name, "cat": phase, "args": {"phase": phase, **details}}

"""Whether two steps are the same one: what a plan makes run as one number, and in words what differs from a graph."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autoshard_ilp.graph import Graph
from autoshard_ilp.placement import fingerprint as graph_fingerprint
from autoshard_ilp.placement import primitive_counts

if TYPE_CHECKING:
    from autoshard_ilp.plan import Plan


def fingerprint(plan: Plan) -> str:
    """SHA-256 in hexadecimal of what a plan makes run; see :attr:`autoshard_ilp.plan.Plan.fingerprint`."""
    placement = asdict(plan.placement)
    placement.pop("primitives")
    runs = {
        "mesh": [plan.mesh.axis_names, plan.mesh.axis_sizes],
        "mode": plan.mode,
        "remat": plan.remat_policy,
        "arguments": [(x.role, x.shape, x.dtype, x.layout) for x in plan.arguments],
        "results": [(x.role, x.shape, x.dtype, x.layout) for x in plan.results],
        "placement": placement,
        "donated": list(plan.signature.get("donated", ())),
    }
    return hashlib.sha256(json.dumps(runs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(plan: Plan, graph: Graph) -> Iterator[str]:
    """Sentences that say how a graph differs from the one that the plan was made for, the most telling one first."""
    ops, tensors = graph.ops, graph.tensors
    arguments = [(ops[a].path, tensors[ops[a].outputs[0]]) for a in graph.arguments]
    results = [(ops[r].path, tensors[ops[r].inputs[0]]) for r in graph.results]
    named = plan.mode == "function"  # Keras numbers the layers of every instance anew
    yield from _leaf_differences("arguments" if named else "variables and inputs", plan.arguments, arguments, named)
    yield from _leaf_differences("results", plan.results, results, named)
    if graph_fingerprint(graph) == plan.placement.fingerprint:
        return
    planned, found = Counter(dict(plan.placement.primitives)), Counter(dict(primitive_counts(graph)))
    if plan.placement.primitives and planned != found:
        more = ", ".join(f"{n} {name}" for name, n in sorted((planned - found).items())) or "none"
        less = ", ".join(f"{n} {name}" for name, n in sorted((found - planned).items())) or "none"
        yield (
            "Received: the same variables, but a step that computes something else. Operations of the planned step "
            f"that it lacks: {more}; that it has besides: {less} (another loss, optimizer or activation?)."
        )
    yield (
        "Received: the same variables and kinds of operations, but in another order or on other values (another "
        "loss, optimizer, dtype policy, or another version of Keras or JAX?), so the step computes something else."
    )


def _leaf_differences(
    what: str, planned: Sequence[Any], found: Sequence[tuple[str, Any]], named: bool
) -> Iterator[str]:
    number = ""
    if len(found) != len(planned):
        number = f"Planned: {len(planned)} {what}. Received: {len(found)}. The first that differs: "
    for leaf, (path, tensor) in zip(planned, found, strict=False):
        if leaf.shape != tensor.shape or (named and leaf.path != path):
            found_text = f"{path!r} of shape {tensor.shape} in its place"
            yield f"{number}Planned: {leaf.path!r} of shape {leaf.shape}. Received: {found_text}."
        if leaf.dtype != tensor.dtype:
            yield f"{number}Planned: {leaf.path!r} of dtype {leaf.dtype}. Received: {path!r} of dtype {tensor.dtype}."
    if number:
        longer = [leaf.path for leaf in planned] if len(planned) > len(found) else [path for path, _ in found]
        yield f"{number}{longer[min(len(planned), len(found))]!r}, which only one of them has."

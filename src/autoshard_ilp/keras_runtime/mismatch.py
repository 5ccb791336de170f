"""What differs between the step that was planned and the step of the model at hand, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_NAMES = {
    "parameter": "trainable variable",
    "non_trainable": "non-trainable variable",
    "optimizer": "optimizer variable",
    "metric": "metric variable",
    "seed": "seed state",
    "input": "input",
    "target": "target",
    "sample_weight": "sample weight",
}
_AT_MOST = 4


def differences(planned: Sequence[Any], found: Sequence[Any], planned_graph: Any = None, graph: Any = None) -> str:
    """What has changed, as one sentence or several.

    Args:
        planned, found: the arguments of both steps in flat order, each with path, role, shape and dtype.
        planned_graph, graph: both steps' graphs, where they are known.

    Returns:
        the text; empty when nothing tells the two apart.
    """
    texts = _optimizers(planned, found) + _moved(planned, found)
    if not texts or _optimizers(planned, found):
        texts += [t for role in _NAMES if role != "optimizer" or not texts for t in _of_role(role, planned, found)]
    if not texts and planned_graph is not None and graph is not None:
        texts = _operations(planned_graph, graph)
    return "; ".join(dict.fromkeys(texts))


def _plain(path: str) -> str:
    """A path without the numbers that Keras gives to layers of the same kind."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def _select(arguments: Sequence[Any], role: str) -> list[Any]:
    return [a for a in arguments if a.role == role]


def _optimizer_name(arguments: Sequence[Any]) -> str:
    slots = _select(arguments, "optimizer")
    return _plain(slots[0].path.split("/")[0]) if slots else "none"


def _optimizers(planned: Sequence[Any], found: Sequence[Any]) -> list[str]:
    before, after = _optimizer_name(planned), _optimizer_name(found)
    if before == after:
        return []
    now, then = (len(_select(arguments, "optimizer")) for arguments in (found, planned))
    return [f"the optimizer is {after!r} instead of {before!r} ({now} optimizer variables instead of {then})"]


def _moved(planned: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """Variables that were frozen or made trainable."""
    texts = []
    frozen = ("parameter", "non_trainable", "is no longer trainable")
    for source, target, what in (frozen, ("non_trainable", "parameter", "is now trainable")):
        gained = _keys(found, target) - _keys(planned, target)
        lost = _keys(planned, source) - _keys(found, source)
        changed = [key for key in lost if key in gained]
        texts += [f"{path!r} {what}" for path, _, _ in changed[:_AT_MOST]]
    return texts


def _key(argument: Any) -> tuple[str, tuple[int, ...], str]:
    return _plain(argument.path), tuple(argument.shape), argument.dtype


def _keys(arguments: Sequence[Any], role: str) -> Counter[tuple[str, tuple[int, ...], str]]:
    return Counter(_key(a) for a in _select(arguments, role))


def _described(argument: Any) -> str:
    return f"{argument.path!r} {tuple(argument.shape)} {argument.dtype}"


def _of_role(role: str, planned: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """Differences among the arguments of one role: their number, else their shapes and dtypes in order."""
    before, after, name = _select(planned, role), _select(found, role), _NAMES[role]
    if len(before) == len(after):
        texts = []
        for a, b in zip(before, after, strict=True):
            if tuple(a.shape) != tuple(b.shape):
                texts.append(
                    f"{name} {b.path!r} has shape {tuple(b.shape)} instead of {tuple(a.shape)} (planned as {a.path!r})"
                )
            elif a.dtype != b.dtype:
                texts.append(f"{name} {b.path!r} is {b.dtype} instead of {a.dtype}")
        return texts[:_AT_MOST]
    keys_before, keys_after = Counter(map(_key, before)), Counter(map(_key, after))
    added = [_described(a) for a in after if _key(a) in keys_after - keys_before]
    gone = [_described(a) for a in before if _key(a) in keys_before - keys_after]
    text = f"{len(after)} {name}s instead of {len(before)}"
    text += f", new: {', '.join(added[:_AT_MOST])}" if added else ""
    text += f", gone: {', '.join(gone[:_AT_MOST])}" if gone else ""
    return [text]


def _operations(planned: Any, graph: Any) -> list[str]:
    """The first operation that differs, and dtypes that only one of the graphs computes in."""
    texts = []
    before, after = ({t.dtype for t in g.tensors if t.shape} for g in (planned, graph))
    if before != after:
        texts.append(
            f"it computes in {', '.join(sorted(after - before)) or 'fewer dtypes'}"
            f"{' instead of ' + ', '.join(sorted(before - after)) if before - after else ' too'} (a dtype policy?)"
        )
    for a, b in zip(planned.ops, graph.ops, strict=False):
        results_a, results_b = _results(planned, a), _results(graph, b)
        if (a.primitive, a.inputs) != (b.primitive, b.inputs) or results_a != results_b:
            where = f" at {b.source}" if b.source else ""
            scope = f" in {b.scope!r}" if b.scope else ""
            what = a.primitive if a.primitive != b.primitive else f"{a.primitive} of {results_a}"
            texts.append(f"it computes {b.primitive}{scope}{where} where {what} was planned")
            break
    return texts


def _results(graph: Any, op: Any) -> list[Any]:
    return [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in op.outputs]

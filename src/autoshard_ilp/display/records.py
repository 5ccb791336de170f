"""What a plan says, as plain records: the one content of the terminal summary, the notebook page and the figures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard_ilp.course import COMPUTE
from autoshard_ilp.display.render import size
from autoshard_ilp.errors import InputShapeError
from autoshard_ilp.names import common, pattern
from autoshard_ilp.report import alike
from autoshard_ilp.sharding import local_bytes
from autoshard_ilp.units import format_bytes, format_seconds

MAX_LAYOUTS = 40
"""Kinds of variables that a table of layouts shows, the largest first to stay."""
MAX_COLLECTIVES = 8
MAX_LAYERS = 12
MAX_CONTRIBUTORS = 6

# -- variables and inputs ----------------------------------------------------------------------------------------------


def rows(plan: Any) -> list[dict[str, Any]]:
    """One record per argument and per result that is not state."""
    state = {leaf.path for leaf in plan.arguments}
    found = []
    for leaf in [*plan.arguments, *(r for r in plan.results if r.path not in state)]:
        held = local_bytes(leaf.shape, itemsize(leaf.dtype), leaf.layout, plan.mesh.axis_sizes)
        found.append(
            {
                "path": leaf.path,
                "role": leaf.role,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "spec": spec_text(leaf.layout, len(leaf.shape), plan.mesh.axis_names),
                "bytes_per_device": held,
            }
        )
    return found


def dataframe(plan: Any) -> Any:
    """:func:`rows` as a pandas DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError('to_dataframe() needs pandas: pip install "autoshard-ilp[notebook]".') from error
    return pandas.DataFrame(rows(plan))


def itemsize(dtype: str) -> float:
    """Bytes per element of a dtype given by name; 4-bit types count half a byte."""
    digits = re.search(r"(\d+)", dtype)
    if dtype == "bool" or digits is None:
        return 1
    return max(int(digits.group(1)), 4) / 8


def spec_text(layout: Sequence[int], rank: int, axis_names: Sequence[str]) -> str:
    per_dim = [[n for n, d in zip(axis_names, layout, strict=True) if d == dim] for dim in range(rank)]
    return "(" + ", ".join("-" if not names else "+".join(names) for names in per_dim) + ")"


def grouped(plan: Any) -> list[dict[str, Any]]:
    """Rows with repeated layers merged: paths that differ in numbers only, with equal shape and layout.

    An optimizer variable of the shape and layout of its own variable is merged into that one's row, which counts it
    under ``slots`` and adds its bytes. Others follow as ``<path of the variable> slots``.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    for row in _with_slots(rows(plan)):
        name = pattern(row["path"])
        key = (name, row["role"], row["shape"], row["dtype"], row["spec"], row["slots"])
        if key in groups:
            groups[key]["count"] += 1
            groups[key]["bytes_per_device"] += row["bytes_per_device"]
            groups[key]["paths"].add(row["path"])
        else:
            groups[key] = {**row, "count": 1, "paths": {row["path"]}}
    for row in groups.values():
        row["path"] = common(row.pop("paths"))
    return list(groups.values())


def _with_slots(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with optimizer variables next to their variable. Keras names such a variable
    ``<optimizer>/<path of the variable, with _ for />_<slot>``."""
    own: list[dict[str, Any]] = [{**row, "slots": 0} for row in found]
    owners = {row["path"].replace("/", "_"): row for row in own if row["role"] == "parameter"}
    below: dict[int, list[dict[str, Any]]] = {}
    placed = set()
    for row in own:
        if row["role"] != "optimizer":
            continue
        slot = row["path"].rpartition("/")[2]
        ends = [i for i, letter in enumerate(slot) if letter == "_"]
        owner = next((owners[slot[:end]] for end in reversed(ends) if slot[:end] in owners), None)
        if owner is None:
            continue
        placed.add(id(row))
        if (row["shape"], row["spec"]) == (owner["shape"], owner["spec"]):
            owner["slots"] += 1
            owner["bytes_per_device"] += row["bytes_per_device"]
        else:
            below.setdefault(id(owner), []).append({**row, "path": f"{owner['path']} slots"})
    return [line for row in own if id(row) not in placed for line in (row, *below.get(id(row), ()))]


@dataclass(frozen=True)
class Layouts:
    """The rows of :func:`grouped` that are worth showing.

    Attributes:
        rows: with their ``layout`` (see :mod:`autoshard_ilp.sharding`) added.
        dtype: the commonest, left out where it is repeated.
        hidden: variables that are not shown.
    """

    rows: tuple[dict[str, Any], ...]
    dtype: str
    hidden: int

    @property
    def slots(self) -> bool:
        """Whether any row counts optimizer variables laid out alike."""
        return any(r["slots"] for r in self.rows)


def layouts(plan: Any) -> Layouts:
    """Variables and inputs by repeated layer, without seeds, metrics and what is too small to matter."""
    found = grouped(plan)
    by_spec = {
        (leaf.shape, spec_text(leaf.layout, len(leaf.shape), plan.mesh.axis_names)): leaf.layout
        for leaf in (*plan.arguments, *plan.results)
    }
    worth = [r for r in found if r["role"] not in ("seed", "metric") and r["shape"]]
    small = 1e-4 * sum(r["bytes_per_device"] for r in worth)
    worth = [r for r in worth if r["bytes_per_device"] >= small or r["role"] in ("input", "target")]
    kept = {id(r) for r in sorted(worth, key=lambda r: -r["bytes_per_device"])[:MAX_LAYOUTS]}
    shown = tuple({**r, "layout": by_spec[r["shape"], r["spec"]]} for r in worth if id(r) in kept)
    commonest = Counter(r["dtype"] for r in shown).most_common(1)
    hidden = sum(r["count"] * (1 + r["slots"]) for r in found if id(r) not in kept)
    return Layouts(shown, commonest[0][0] if commonest else "", hidden)


def find_leaf(plan: Any, path: str) -> Any:
    """The variable, input or output of a path; the end of a path will do where it names one.

    Raises:
        InputShapeError: nothing, or more than one thing, has this path.
    """
    leaves = {leaf.path: leaf for leaf in (*plan.results, *plan.arguments)}
    if path in leaves:
        return leaves[path]
    ending = [p for p in leaves if p.endswith(f"/{path}")]
    if len(ending) == 1:
        return leaves[ending[0]]
    if ending:
        rule, near = "names one variable, input or output", sorted(ending)
    else:
        import difflib

        rule, near = "is one of plan.specs", difflib.get_close_matches(path, leaves, 5, 0.3) or sorted(leaves)[:5]
    raise InputShapeError(f"A path {rule}. Received: {path!r}. Did you mean {', '.join(map(repr, near[:8]))}?")


# -- cost --------------------------------------------------------------------------------------------------------------


def headline(plan: Any) -> str:
    """Mode, mesh, hardware and batch."""
    batch = f", global batch {plan.batch_size}" if plan.batch_size else ""
    return f"{plan.mode} step on {plan.mesh} ({plan.mesh.size} x {plan.hardware}){batch}"


def cost_rows(plan: Any) -> list[tuple[str, float, float]]:
    """(name, seconds, share of the step): compute, communication by kind, then by mesh axis, the total; what hides."""
    total = plan.cost.total_s or 1.0
    items = [("compute", plan.cost.compute_s)]
    items += sorted(plan.cost.per_kind.items(), key=lambda x: -x[1])
    items += [(f"  over {axis}", s) for axis, s in sorted(plan.cost.per_axis.items(), key=lambda x: -x[1])]
    items.append(("total", plan.cost.total_s))
    if plan.cost.hidden_s:
        items.append(("hidden behind compute", plan.cost.hidden_s))
    return [(name, seconds, seconds / total) for name, seconds in items]


def layer_rows(plan: Any, limit: int = MAX_LAYERS) -> list[tuple[str, float, float]]:
    """(layer, seconds of compute, seconds of communication), dearest first; repeated layers together.

    Those beyond ``limit`` are one last row. Work outside any layer is called ``other``.
    """
    found = []
    for layer, kinds in plan.course.by_layer().items():
        compute = kinds.get(COMPUTE, 0.0)
        found.append((layer or "other", compute, sum(kinds.values()) - compute))
    found.sort(key=lambda x: -(x[1] + x[2]))
    if len(found) > limit:
        rest = found[limit - 1 :]
        found = [*found[: limit - 1], (f"{len(rest)} more", sum(x[1] for x in rest), sum(x[2] for x in rest))]
    return found


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of the same kind, size and place together."""

    what: str
    kind: str
    axes: str
    bytes_each: int
    count: float
    seconds: float


def collective_rows(plan: Any) -> list[CollectiveRow]:
    """The plan's collectives, dearest first, repeated layers together."""
    scopes = Counter(c.operation.partition("/")[0] for c in plan.collectives if c.operation.count("/") > 1)
    top = f"{scopes.most_common(1)[0][0]}/" if scopes else ""  # the model's own name says nothing
    together: dict[tuple[str, str, str, int], tuple[float, float]] = {}
    for c in plan.collectives:
        named = c.tensor if "/" in c.tensor else f"{c.operation.removeprefix(top).removesuffix('/hub')} {c.tensor}"
        path, _, rest = named.partition(" ")
        what = f"{pattern(path) if c.count > 1 else path} {rest}".rstrip()
        key = (what, c.kind, "+".join(c.mesh_axes), int(c.bytes_per_device))
        count, seconds = together.get(key, (0.0, 0.0))
        together[key] = (count + c.count, seconds + c.seconds * c.count)
    order = sorted(together.items(), key=lambda item: -item[1][1])
    return [CollectiveRow(*key, count, seconds) for key, (count, seconds) in order]


# -- memory and proof --------------------------------------------------------------------------------------------------


def memory_rows(plan: Any) -> list[tuple[str, int, float | None]]:
    """(part, bytes, share of the budget) at the peak, then the peak and the budget."""
    budget = plan.memory.budget_bytes
    items = [*plan.memory.parts.items(), ("peak", plan.memory.peak_bytes), ("budget", budget or 0)]
    return [(name, held, held / budget if budget else None) for name, held in items if held]


def contributors(plan: Any, limit: int = MAX_CONTRIBUTORS) -> list[tuple[str, int]]:
    """What fills the peak: (path or layer, bytes), the largest first, repeated layers together."""
    return alike(plan.memory.contributors)[:limit]


def proof_lines(plan: Any) -> list[str]:
    """Status, bound and gap; what is recomputed; notes; what has no rule; seconds of planning."""
    bound = format_seconds(plan.lower_bound) if math.isfinite(plan.lower_bound) else "none"
    among = " among plans with these ties" if plan.status == "optimal" and plan.gap > 0 else ""
    lines = [
        f"{plan.status}{among}: total {format_seconds(plan.cost.total_s)}, lower bound {bound}, gap {plan.gap:.2%}"
    ]
    if plan.remat:
        where = f"policy {plan.remat_policy!r}; plan.remat names the {len(plan.remat)} layers"
        lines.append(f"activations are recomputed in the backward pass ({where})")
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"kept whole, no rule: {name}" for name in plan.unknown]
    if plan.timings:
        lines.append("planned in " + ", ".join(f"{stage} {s:.2f} s" for stage, s in plan.timings.items()))
    return lines


def readable(name: str, held: float) -> str:
    """Bytes in one unit, in both for the figures people compare with data sheets."""
    return format_bytes(held) if name in ("peak", "budget") else size(held)

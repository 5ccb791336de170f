"""What the processes of a job compare before they plan together, and before they run together."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoshard_ilp import errors
from autoshard_ilp.errors import AutoshardError, InfeasibleError, PlanMismatchError
from autoshard_ilp.processes import Meeting, together

if TYPE_CHECKING:
    from autoshard_ilp.plan import Plan


# -- planning once -----------------------------------------------------------------------------------------------------


def planned_once(
    meeting: Meeting | None, facts: Callable[[], Mapping[str, Any]], plan: Callable[[], Plan], step: Callable[..., Any]
) -> Plan:
    """``plan()``, computed by the first process alone.

    Args:
        meeting: of all processes; None for one process.
        facts: what all processes must have in common, as plain data.
        plan: makes the plan.
        step: gives this process's own step under the plan's rematerialisation policy.

    Raises:
        PlanMismatchError: the processes are about to plan different things.
        AutoshardError: planning failed; the same error in every process.
    """
    if meeting is None:
        return plan()
    meeting.agree(facts(), "Build the same model with the same options in every process.")
    if meeting.process == 0:
        try:
            found = plan()
        except BaseException as error:
            meeting.send(json.dumps({"error": _error_to_dict(error)}))
            raise
        from autoshard_ilp.saved.planfile import to_dict

        meeting.send(json.dumps({"plan": to_dict(found)}))
        return found
    received = json.loads(meeting.receive())
    if "error" in received:
        raise _error_from_dict(received["error"])
    return _joined(received["plan"], step)


def _joined(data: Mapping[str, Any], step: Callable[..., Any]) -> Plan:
    from dataclasses import replace

    from autoshard_ilp.saved.identity import differences
    from autoshard_ilp.saved.planfile import from_dict

    plan = from_dict(data)
    own = step(plan.remat_policy)
    difference = next(differences(plan, own.graph), None)
    if difference is not None:
        raise PlanMismatchError(f"All processes must build the same model. {difference}")
    return replace(plan, executable=own)


def _error_to_dict(error: BaseException) -> dict[str, Any]:
    fields = ("minimum_budget", "minimum_budget_bound", "contributors", "conflicts")
    return {
        "type": type(error).__name__,
        "text": str(error),
        "fields": {f: getattr(error, f) for f in fields} if isinstance(error, InfeasibleError) else {},
    }


def _error_from_dict(data: Mapping[str, Any]) -> AutoshardError:
    kind = getattr(errors, data["type"], None)
    if kind is InfeasibleError:
        fields = {**data["fields"], "contributors": [(n, b) for n, b in data["fields"]["contributors"]]}
        return InfeasibleError(data["text"], **fields)
    if isinstance(kind, type) and issubclass(kind, AutoshardError):
        return kind(data["text"])
    return PlanMismatchError(
        f"All processes plan together. Received: process 0 stopped with {data['type']}: {data['text']}"
    )


def facts_of_step(step: Any, infos: Any, request: Any, mode: str) -> dict[str, Any]:
    """What two processes that plan together must have in common: the options, and the step."""
    return {
        "the memory budget": request.capacity,
        "the hardware": request.profile.name,
        "the objective": request.objective,
        "the pins": str(request.pins),
        **facts_of_graph(step, infos, request.mesh, mode),
    }


def facts_of_graph(step: Any, infos: Any, mesh: Any, mode: str) -> dict[str, Any]:
    """The step alone, of which a loaded plan knows no options."""
    from autoshard_ilp.placement import fingerprint

    return {
        "the mesh": str(mesh),
        "the mode": mode,
        "arguments": [f"{a.role} of shape {tuple(a.shape)} and dtype {a.dtype}" for a in infos.arguments],
        "the traced step": fingerprint(step.graph)[:16],
    }


# -- running together --------------------------------------------------------------------------------------------------


def agree_on_program(meeting: Meeting | None, plan: Plan, model: Any = None) -> None:
    """All processes are about to run the same program on the same variables.

    Args:
        meeting: of all processes; None for one process.
        plan: with its step.
        model: whose variables' values are compared as well, where they are not shared between the processes yet.

    Raises:
        PlanMismatchError: they are not; says what differs.
    """
    if meeting is None:
        return
    text = plan.jit().lower(*plan.abstract_args()).as_text()
    facts = {
        "the plan": plan.fingerprint[:16],
        "the step's program": hashlib.sha256(text.encode()).hexdigest()[:16],
        "variable": [] if model is None else _values(plan, model),
    }
    remedy = "Build the same model in every process, after keras.utils.set_random_seed with one seed."
    meeting.agree(facts, remedy)


def _values(plan: Plan, model: Any) -> list[str]:
    """Path and checksum of every variable of which each process has a copy of its own."""
    from autoshard_ilp import keras_integration as ki

    variables = [v for group in ki.state_variables(model, plan.mode) for v in group]
    local = [v for v in variables if v._value is not None and v._value.is_fully_addressable]
    return [f"({v.path}) of checksum {checksum(v._value)}" for v in local]


def checksum(value: Any) -> str:
    """CRC-32 of an array's bytes, in hexadecimal."""
    import numpy as np

    return f"{zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"


def agree_on_batch(mode: str, batch: Any) -> None:
    """Every process passes the same global batch; arrays that the processes share already are taken as they are.

    Raises:
        PlanMismatchError: the batches differ.
    """
    with together(f"the first batch of {mode}") as meeting:
        if meeting is None:
            return
        import jax
        import numpy as np

        found = []
        for leaf in jax.tree.leaves(batch):
            shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            content = "shared" if shared else f"of checksum {checksum(leaf)}"
            found.append(f"of shape {np.shape(leaf)}, {content}")
        meeting.agree(
            {"array": found},
            "Pass the same global batch in every process: the same data, shuffled by one seed "
            "(keras.utils.set_random_seed). Where each process reads its own part, pass a generator of global arrays "
            "made by jax.make_array_from_process_local_data.",
        )

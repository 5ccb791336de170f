"""Many processes, one plan: the processes of a ``jax.distributed`` job agree before they compute together.

Every process runs the same script. A collective in which one of them runs another program hangs all of them, and a
device cannot say why. So whatever they are about to share is compared first, through the job's key-value store (texts
over the network, no collective, with a time limit):

* ``optimize``: mesh, options and traced step are compared; the first process plans, the others receive its plan;
* ``plan.apply``: the plan's fingerprint, a hash of the program and the variables' values are compared;
* the first batch of each kind: every process passes the same global batch and keeps the shards of its own devices.

Where they differ, or where one of them has failed, every process raises the same ``PlanMismatchError``.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from autoshard_ilp import _jax_compat as compat
from autoshard_ilp.errors import PlanMismatchError

TIMEOUT_VARIABLE = "AUTOSHARD_PROCESS_TIMEOUT_SECONDS"
_DEFAULT_TIMEOUT_S = 300.0
_PIECE = 2**19  # characters per entry of the store, whose messages may be limited to some megabytes
_WHILE_PLANNING_S = 30.0
_LOOK_S = 2.0
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class _Ledger:
    """What this process has been through; equal in all processes as long as they go on together."""

    meetings: int = 0  # begun, or missed by a failure
    inside: int | None = None  # the meeting that is going on
    at_exit: bool = False


_ledger = _Ledger()


def _failure_key(process: int, meeting: int) -> str:
    return f"autoshard_ilp/failed/{process}/{meeting}"


def _end_key(process: int) -> str:
    return f"autoshard_ilp/ended/{process}"


def _tell_end(store: compat.Coordination) -> None:
    """Run when the interpreter ends: JAX's own barrier would keep the others waiting for minutes."""
    error = getattr(sys, "last_value", None)
    text = f"{type(error).__name__}: {error}" if error is not None else "the end of its script"
    with contextlib.suppress(Exception):
        store.put(_end_key(store.process), text[:2000])


def _told(text: str) -> PlanMismatchError:
    """A disagreement that every process sees by itself; nobody needs to be told again."""
    error = PlanMismatchError(text)
    error._autoshard_announced = True  # type: ignore[attr-defined]
    return error


class Meeting:
    """One point of the program that every process passes, in the same order.

    Attributes:
        what: the point's name.
        process, count: this process and how many there are.
    """

    def __init__(self, store: compat.Coordination, what: str, number: int) -> None:
        self._store, self.what, self._number, self._prefix = store, what, number, f"autoshard_ilp/{number}"
        self.process, self.count = store.process, store.count
        self._round = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every process's ``value`` (plain data), by process.

        Raises:
            PlanMismatchError: a process has failed, is at another point of the program, or does not answer in time.
        """
        number, self._round = self._round, self._round + 1
        own = {"at": self.what, "value": value}
        self._store.put(f"{self._prefix}/{number}/{self.process}", json.dumps(own))
        seconds = timeout_seconds()
        found = []
        for process in range(self.count):
            answer = own if process == self.process else self._get(number, process, seconds)
            if answer["at"] != self.what:
                raise _told(
                    f"Every process runs the same script. Received: process {process} at {answer['at']} while process "
                    f"{self.process} is at {self.what}. Call both in all processes, in the same order."
                )
            found.append(answer["value"])
        return found

    def agree(self, facts: Mapping[str, Any], remedy: str) -> None:
        """Compares ``facts`` (plain data; lists are compared entry by entry) over all processes.

        Raises:
            PlanMismatchError: they differ; the same text in every process.
        """
        first, *others = self.exchange(json.loads(json.dumps(facts)))
        for process, theirs in enumerate(others, start=1):
            if (difference := _difference(first, theirs)) is not None:
                name, ours, other = difference
                raise _told(
                    f"All processes must agree at {self.what}. Received: {name} is {ours} in process 0 and {other} in "
                    f"process {process}. {remedy}"
                )

    def send(self, text: str) -> None:
        """Publishes a text of any length to the others."""
        packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii")
        pieces = [packed[i : i + _PIECE] for i in range(0, len(packed), _PIECE)]
        for i, piece in enumerate(pieces):
            self._store.put(f"{self._prefix}/text/{i}", piece)
        self._store.put(f"{self._prefix}/text", str(len(pieces)))

    def receive(self) -> str:
        """The text that another process sends; waits as long as that process lives."""
        while (count := self._store.get(f"{self._prefix}/text", _WHILE_PLANNING_S)) is None:
            pass  # JAX ends this process when the other one is gone
        pieces = [self._store.get(f"{self._prefix}/text/{i}", timeout_seconds()) or "" for i in range(int(count))]
        return zlib.decompress(base64.b64decode("".join(pieces))).decode("utf-8")

    def _get(self, number: int, process: int, seconds: float) -> Any:
        """Another process's answer; looks now and then whether that process has failed instead."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            text = self._store.get(f"{self._prefix}/{number}/{process}", max(0.01, min(_LOOK_S, left)))
            if text is not None:
                return json.loads(text)
            for key in (_failure_key(process, self._number), _end_key(process)):
                failure = self._store.get(key, 0.01)
                if failure is not None:
                    raise _told(f"All processes go on together. Received: process {process} stopped with {failure}")
            if left <= 0:
                raise _told(
                    f"Every process runs the same script. Received: no answer of process {process} within {seconds:g} "
                    f"s at {self.what}. See what it has printed; {TIMEOUT_VARIABLE} sets the limit."
                )


def _difference(first: Any, other: Any, name: str = "") -> tuple[str, str, str] | None:
    """Where two plain values differ first: its name and both values, as texts."""
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        for key in first:
            if (found := _difference(first[key], other[key], f"{name} {key}".strip())) is not None:
                return found
        return None
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            if a != b:
                return f"{name} {i}", str(a), str(b)
        return None
    if isinstance(first, list) and isinstance(other, list):
        return f"the number of {name}", str(len(first)), str(len(other))
    return None if first == other else (name, str(first), str(other))


def timeout_seconds() -> float:
    """How long one process waits for another: 300 s, or what AUTOSHARD_PROCESS_TIMEOUT_SECONDS says."""
    try:
        return max(1.0, float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_S)))
    except ValueError:
        return _DEFAULT_TIMEOUT_S


@contextlib.contextmanager
def together(what: str) -> Iterator[Meeting | None]:
    """A point that all processes pass; None where there is only one. A failure inside is told to the others.

    Args:
        what: the point's name, for messages.
    """
    store = compat.coordination()
    if store is None:
        yield None
        return
    if not _ledger.at_exit:
        atexit.register(_tell_end, store)
        _ledger.at_exit = True
    number, _ledger.meetings = _ledger.meetings, _ledger.meetings + 1
    _ledger.inside = number
    try:
        with _announcing(store):
            yield Meeting(store, what, number)
    finally:
        _ledger.inside = None


def announced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose failure in one process is told to those that wait for it."""

    @functools.wraps(function)
    def run(*args: _P.args, **keywords: _P.kwargs) -> _R:
        store = compat.coordination()
        if store is None:
            return function(*args, **keywords)
        with _announcing(store):
            return function(*args, **keywords)

    return run


@contextlib.contextmanager
def _announcing(store: compat.Coordination) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not getattr(error, "_autoshard_announced", False):
            _announce(store, error)
        raise


def _announce(store: compat.Coordination, error: BaseException) -> None:
    """The failure takes the place of the meeting in which, or before which, it happened: nobody waits there in vain."""
    number = _ledger.inside
    if number is None:
        number, _ledger.meetings = _ledger.meetings, _ledger.meetings + 1
    with contextlib.suppress(Exception):
        error._autoshard_announced = True  # type: ignore[attr-defined]
        store.put(_failure_key(store.process, number), f"{type(error).__name__}: {error}"[:2000])


# -- arrays over many processes ----------------------------------------------------------------------------------------


def fetchable(tree: Any) -> Any:
    """Results that this process can read: arrays spread over other processes are gathered, all others stay."""
    if compat.coordination() is None:
        return tree
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def fetch(value: Any) -> Any:
        if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
            return value
        whole = NamedSharding(value.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        return jax.jit(lambda x: x, out_shardings=whole)(value)

    return jax.tree.map(fetch, tree)


def place_arguments(args: Sequence[Any], shardings: Sequence[Any]) -> Sequence[Any]:
    """Arguments of a planned step, each global value cut to this process's shards; one process: as they are."""
    if compat.coordination() is None:
        return args
    import jax

    from autoshard_ilp.keras_integration import place

    found: Any = jax.tree.structure(tuple(args))
    if found != jax.tree.structure(tuple(shardings)):
        return args  # explained by the caller
    return jax.tree.map(
        lambda x, s: place(jax.numpy.asarray(x) if not hasattr(x, "shape") else x, s), tuple(args), shardings
    )

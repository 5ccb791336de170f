"""Every error a user can meet. Each message states the rule, what was received, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def said_by(error: BaseException) -> str:
    """The message of an error from elsewhere, without the colours that Keras gives some of it on a terminal."""
    return _COLOURS.sub("", str(error))


class AutoshardError(Exception):
    """Base of all errors raised on purpose by autoshard_ilp."""


class InputShapeError(AutoshardError, ValueError):
    """Input shapes, batch size, mesh, pins or memory budget that do not make sense."""


class UnsupportedModelError(AutoshardError, ValueError):
    """A model that cannot be planned: not built, not compiled, the wrong backend, unknown primitives under strict."""


class ProfileError(AutoshardError, ValueError):
    """A hardware profile that is unknown, unreadable or invalid. ``key`` names the offending TOML key."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class PlanMismatchError(AutoshardError, ValueError):
    """A plan applied to something other than what it was made for (model, mesh, batch or mode)."""


class PlanFileError(AutoshardError, ValueError):
    """A plan file that is missing, corrupt, foreign, or written by a newer version."""


class CheckpointError(AutoshardError, ValueError):
    """A checkpoint that is missing, damaged, foreign, or of other variables than those to restore."""


class SweepFileError(AutoshardError, ValueError):
    """A sweep file with an unknown key or an empty axis; a results file that is foreign, newer, or in use."""


class TargetError(AutoshardError, ValueError):
    """A verification target that is unknown, or whose compiler is not installed."""


class CompileError(AutoshardError, RuntimeError):
    """The compiler of a target gave up on a plan's program; the plan itself is unharmed.

    Attributes:
        needed_bytes: memory per device that the compiler says it needs, when it gave up for want of it.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class InfeasibleError(AutoshardError):
    """No plan satisfies the memory budget and the pins.

    Attributes:
        minimum_budget: smallest per-device budget in bytes known to be feasible (``None`` when pins alone conflict).
        minimum_budget_bound: proved lower bound in bytes; equal to ``minimum_budget`` when it is proved smallest. Under
            ``remat="auto"`` of no, selective and full recomputation, and of some mixtures of the two.
        contributors: ``(path, bytes)`` of the largest tensors alive at the peak, largest first.
        conflicts: pins (regex texts) that conflict with each other or with the budget.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_budget: int | None = None,
        minimum_budget_bound: int | None = None,
        contributors: Sequence[tuple[str, int]] = (),
        conflicts: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.minimum_budget = minimum_budget
        self.minimum_budget_bound = minimum_budget_bound
        self.contributors = list(contributors)
        self.conflicts = list(conflicts)

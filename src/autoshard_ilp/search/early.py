"""The proof that layers need not decide for themselves, begun while the program with shared decisions is being solved.

The bound of a chain of layers needs no plan. A second process (:mod:`autoshard_ilp.program.repeated.beside`) computes
it on a processor that has nothing else to do, and :mod:`.search.untied` asks for it when the plan is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard_ilp.garbage import collector_paused

OPS = 2500
"""Operations of a step from which on its proof may take longer than a second process takes to begin (1.5 s) ..."""

CELLS = 150_000
"""... and table cells of its program."""


@dataclass(frozen=True, eq=False)
class Begun:
    """A proof that was begun.

    Attributes:
        table: of the step, with shared decisions.
        prices: time -> seconds per byte in use then.
        step: the program without ties made from it, at these prices, a :class:`~autoshard_ilp.costs.apart.Apart`.
        job: the second process's, a :class:`~autoshard_ilp.program.repeated.beside.Job`.
    """

    table: Any
    prices: Mapping[int, float]
    step: Any
    job: Any


class EarlyProofs:
    """Proofs of one plan's search, begun ahead; a context, after which nothing is computed any more.

    Args:
        objective: what programs are built for.
    """

    def __init__(self, objective: str) -> None:
        from autoshard_ilp.program.repeated.beside import Beside

        self.objective, self.beside = objective, Beside()
        self.begun: Begun | None = None

    def __enter__(self) -> EarlyProofs:
        return self

    def __exit__(self, *error: object) -> None:
        self.beside.__exit__(*error)

    def expect(self, graph: Any) -> None:
        """A step is about to be priced: the process may load what it needs in the meantime."""
        if len(graph.ops) >= OPS:
            self.beside.start()

    def begin(self, problem: Any, prices: Mapping[int, float], known: np.ndarray | None, seconds: float) -> None:
        """Begin the proof of a step, unless that was done for such prices, or would hardly save anything.

        Args:
            problem: of the step, with ``table`` and ``built``.
            prices: time -> seconds per byte in use then; empty where memory is not known to bind.
            known: a plan of it, if there is one.
            seconds: that the proof may take.
        """
        from autoshard_ilp.costs.apart import apart

        table, program = problem.table, problem.built.program
        if not table.tied or len(table.graph.ops) < OPS or program.cells() < CELLS or self.of(table, prices):
            return
        prices = {t: p for t, p in prices.items() if p > 0}
        try:
            with collector_paused():
                step = apart(table, problem.built, self.objective, prices)
        except MemoryError:  # a plan is worth more than its proof
            return
        start = None if known is None or not np.isfinite(program.cost(known)) else known[step.classes]
        job = self.beside.begin(step.program, step.alike, start, seconds)
        self.begun = None if job is None else Begun(table, prices, step, job)

    def of(self, table: Any, prices: Mapping[int, float]) -> Begun | None:
        """The proof of a table's step at such prices as these, or of the table without any, if it was begun."""
        begun, priced = self.begun, any(prices.values())
        if begun is None or begun.table.graph is not table.graph or bool(begun.prices) != priced:
            return None
        return begun if priced or begun.table is table else None

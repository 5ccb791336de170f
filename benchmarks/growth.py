"""How the seconds of planning grow with layers, devices and mesh axes: GPT-2 at its own width, all else equal.

python benchmarks/growth.py            # about ten minutes on two cores, written to results/growth-<date>.md
python benchmarks/growth.py --smoke    # one tiny case, printed only; see --help
"""

from __future__ import annotations

import sys

import plan_speed
from cases import GROWTH, SMOKE
from common import Row, Timed, machine, table

GROWTH_COLUMNS = {"grows": "", "size": "", **{k: v for k, v in plan_speed.COLUMNS.items() if k != "case"}}


def named(row: Row) -> Row:
    """A row of planning speed with what grows and how large it is."""
    grows, _, size = row.get("case", "").partition(" / ")
    return {"grows": grows, "size": size, **row}


def report(rows: list[Row], time_limit: float) -> str:
    """The result file."""
    return (
        f"# Growth of planning\n\n{machine()}\n\nTraining steps of GPT-2 small on TPU v5e, global batch 256 x 256: 2 "
        "to 32 layers on 8 devices, and 4 layers on meshes of two equal axes, and on 16 devices in one to four axes. "
        "Seconds of wall clock in a fresh process after the imports; the solver's time limit is "
        f"{time_limit:g} s.\n\n"
        f"{table(map(named, rows), GROWTH_COLUMNS)}\n"
    )


if __name__ == "__main__":
    grown = Timed(
        "growth", __doc__, list(GROWTH), SMOKE, plan_speed.measure, report, plan_speed.COLUMNS, plan_speed.planned
    )
    sys.exit(grown.main())

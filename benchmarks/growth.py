"""How the seconds of planning grow with layers, devices and mesh axes: GPT-2 at its own width, all else equal.

python benchmarks/growth.py            # about ten minutes on two cores, written to results/growth-<date>.md
python benchmarks/growth.py --smoke    # one tiny case, printed only; see --help
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cases import GROWTH, SMOKE
from common import driver_parser, in_own_process, machine, matching, result_file, table
from plan_speed import COLUMNS

DRIVER = str(Path(__file__).with_name("plan_speed.py"))
GROWTH_COLUMNS = {"grows": "", "size": "", **{k: v for k, v in COLUMNS.items() if k != "case"}}


def report(rows: list[dict[str, Any]], time_limit: float) -> str:
    """The result file."""
    return (
        f"# Growth of planning\n\n{machine()}\n\nTraining steps of GPT-2 small on TPU v5e, global batch 256 x 256: 2 "
        "to 32 layers on 8 devices, and 4 layers on meshes of two equal axes, and on 16 devices in one to three axes. "
        "Seconds of wall clock in a fresh process after the imports; the solver's time limit is "
        f"{time_limit:g} s.\n\n"
        f"{table(rows, GROWTH_COLUMNS)}\n"
    )


def main() -> int:
    parser = driver_parser(__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver")
    parser.add_argument("--output", type=Path, help="file to write; partial runs are only printed without it")
    options = parser.parse_args()
    output = options.output or (None if options.smoke or options.only else result_file("growth"))
    names = list(SMOKE) if options.smoke else matching(GROWTH, options.only)
    rows: list[dict[str, Any]] = []
    for name in names:
        grows, _, size = name.partition(" / ")
        for row in in_own_process(DRIVER, name, ["--time-limit", str(options.time_limit)]):
            rows.append({**row, "grows": grows, "size": size})
        print(table(rows[-1:], GROWTH_COLUMNS).splitlines()[-1], flush=True)
        if output:
            output.write_text(report(rows, options.time_limit))
    if not output:
        print(report(rows, options.time_limit))
    return 0 if all(row.get("status") in ("optimal", "feasible") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

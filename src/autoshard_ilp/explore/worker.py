"""A process that plans cases of a sweep: one JSON object per line in, one per line out.

``python -m autoshard_ilp.explore.worker`` reads ``{"path": [...], "models": {...}}`` and then cases. What models print
goes to stderr. It ends with its parent, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Serves until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    sys.path[:] = first["path"]
    from autoshard_ilp.console import prepare

    prepare()
    from autoshard_ilp.explore.cases import Case
    from autoshard_ilp.explore.runcase import Planner
    from autoshard_ilp.program.repeated.beside import keep_to_one_process

    keep_to_one_process()
    planner = Planner(first["models"])
    for line in sys.stdin:
        fields: dict[str, Any] = json.loads(line)
        answers.write(json.dumps(planner(Case(**fields))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

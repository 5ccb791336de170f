"""A second Python with this package, for work that goes on beside this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGE_FIRST = "import sys; sys.path.insert(0, sys.argv[1])\n"


def begin_python(code: str, **pipes: Any) -> subprocess.Popen[Any] | None:
    """Begin a process that runs ``code``; None where there is none to be had, or no interpreter.

    It has a session of its own, so that Ctrl-C is for this process alone. What it writes to stderr is lost.

    Args:
        code: finds this package, wherever that lies.
        pipes: options of ``subprocess.Popen``.
    """
    if not sys.executable:
        return None
    root = Path(__file__).resolve().parents[2]  # the folder that holds the package
    arguments = [sys.executable, "-c", _PACKAGE_FIRST + code, str(root)]
    try:
        return subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True, **pipes)
    except (OSError, ValueError):
        return None

"""Imports OR-Tools so that it survives next to TensorFlow.

TensorFlow (which KerasHub imports) loads its libraries with global symbols. OR-Tools brings other versions of the same
C++ libraries (Abseil, Protocol Buffers); imported later, it would bind to TensorFlow's and crash in the first model or
at exit (seen with ortools 9.15 after tensorflow 2.21: segmentation fault). ``RTLD_DEEPBIND`` makes a library look up
its own symbols first; see dlopen(3). It exists on Linux with glibc, the only place where the conflict arises.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def load_cp_model() -> Any:
    """The module ``ortools.sat.python.cp_model``, loaded safely whatever was imported before."""
    name = "ortools.sat.python.cp_model"
    if name in sys.modules:
        return sys.modules[name]
    deep = getattr(os, "RTLD_DEEPBIND", 0)
    if not deep:
        from ortools.sat.python import cp_model

        return cp_model
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | deep)
    try:
        from ortools.sat.python import cp_model
    finally:
        sys.setdlopenflags(flags)
    return cp_model

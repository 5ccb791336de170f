"""autoshard_ilp: provably optimal sharding of Keras 3 models on JAX.

    import autoshard_ilp as autoshard
    plan = autoshard.optimize(model, mesh, memory_budget="16GB")

Importing this package imports neither Keras nor JAX nor OR-Tools; they are loaded by the first call that needs them.
It chooses the JAX backend for Keras where nothing has chosen one yet, so that ``import keras`` may follow.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from autoshard_ilp.errors import AutoshardError as AutoshardError
from autoshard_ilp.errors import CheckpointError as CheckpointError
from autoshard_ilp.errors import CompileError as CompileError
from autoshard_ilp.errors import InfeasibleError as InfeasibleError
from autoshard_ilp.errors import InputShapeError as InputShapeError
from autoshard_ilp.errors import PlanFileError as PlanFileError
from autoshard_ilp.errors import PlanMismatchError as PlanMismatchError
from autoshard_ilp.errors import ProfileError as ProfileError
from autoshard_ilp.errors import SweepFileError as SweepFileError
from autoshard_ilp.errors import TargetError as TargetError
from autoshard_ilp.errors import UnsupportedModelError as UnsupportedModelError

if TYPE_CHECKING:
    from autoshard_ilp.api import load as load
    from autoshard_ilp.api import optimize as optimize
    from autoshard_ilp.baselines import baseline as baseline
    from autoshard_ilp.calibration.calibrate import calibrate as calibrate
    from autoshard_ilp.checkpoint.restoring import restore_checkpoint as restore_checkpoint
    from autoshard_ilp.checkpoint.saving import save_checkpoint as save_checkpoint
    from autoshard_ilp.costs.profile import HardwareProfile as HardwareProfile
    from autoshard_ilp.costs.profile import load_profile
    from autoshard_ilp.costs.profile import profiles as profiles
    from autoshard_ilp.explore.meshes import search_mesh as search_mesh
    from autoshard_ilp.explore.pareto import pareto as pareto
    from autoshard_ilp.explore.sizing import largest_batch as largest_batch
    from autoshard_ilp.explore.sizing import smallest_slice as smallest_slice
    from autoshard_ilp.explore.sweep import load_sweep as load_sweep
    from autoshard_ilp.explore.sweep import sweep as sweep
    from autoshard_ilp.functions import optimize_fn as optimize_fn
    from autoshard_ilp.plan import Plan as Plan
    from autoshard_ilp.program.model import SolverOptions as SolverOptions

    profile = load_profile

__version__ = "0.1.0"

if "keras" not in sys.modules:  # Keras reads it once, when it is imported
    os.environ.setdefault("KERAS_BACKEND", "jax")

_LAZY = {
    "optimize": ("autoshard_ilp.api", "optimize"),
    "load": ("autoshard_ilp.api", "load"),
    "calibrate": ("autoshard_ilp.calibration.calibrate", "calibrate"),
    "baseline": ("autoshard_ilp.baselines", "baseline"),
    "save_checkpoint": ("autoshard_ilp.checkpoint.saving", "save_checkpoint"),
    "restore_checkpoint": ("autoshard_ilp.checkpoint.restoring", "restore_checkpoint"),
    "search_mesh": ("autoshard_ilp.explore.meshes", "search_mesh"),
    "smallest_slice": ("autoshard_ilp.explore.sizing", "smallest_slice"),
    "largest_batch": ("autoshard_ilp.explore.sizing", "largest_batch"),
    "sweep": ("autoshard_ilp.explore.sweep", "sweep"),
    "load_sweep": ("autoshard_ilp.explore.sweep", "load_sweep"),
    "pareto": ("autoshard_ilp.explore.pareto", "pareto"),
    "optimize_fn": ("autoshard_ilp.functions", "optimize_fn"),
    "Plan": ("autoshard_ilp.plan", "Plan"),
    "SolverOptions": ("autoshard_ilp.program.model", "SolverOptions"),
    "HardwareProfile": ("autoshard_ilp.costs.profile", "HardwareProfile"),
    "profile": ("autoshard_ilp.costs.profile", "load_profile"),
    "profiles": ("autoshard_ilp.costs.profile", "profiles"),
}


if not TYPE_CHECKING:  # else every misspelled name would be an attribute of this module

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            module, attribute = _LAZY[name]
            value = getattr(importlib.import_module(module), attribute)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

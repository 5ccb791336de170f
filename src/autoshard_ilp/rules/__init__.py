"""Sharding rules: what each primitive lets one shard, as one printable line. See README.md for how to add one."""

from autoshard_ilp.rules import (
    attention,
    control,
    elementwise,
    indexing,
    linear_algebra,
    random,
    reduce,
    shape,
    sort,
    windows,
)
from autoshard_ilp.rules.local import axes_of_factors, local_params, run_locally, runs_locally
from autoshard_ilp.rules.registry import register, registered, rule_for
from autoshard_ilp.rules.rule import Dim, Dims, Factor, Kind, OpView, Rule

__all__ = [
    "Dim",
    "Dims",
    "Factor",
    "Kind",
    "OpView",
    "Rule",
    "attention",
    "axes_of_factors",
    "control",
    "elementwise",
    "indexing",
    "linear_algebra",
    "local_params",
    "random",
    "reduce",
    "register",
    "registered",
    "rule_for",
    "run_locally",
    "runs_locally",
    "shape",
    "sort",
    "windows",
]

"""Verification of a plan: compile it for the target, read back what the compiler made of it, compare.

``targets`` names hardware and makes meshes of compile-only devices; ``hlo`` reads the collectives of a compiled
program (``hlo_text`` scans its text, ``replica_groups`` and ``trip_count`` interpret parts of it); ``flops`` counts its
matrix multiplications; ``report`` compares, ``diff`` names what differs. Nothing here imports jax before it is used.
"""

from autoshard_ilp.verify.diff import Difference as Difference
from autoshard_ilp.verify.hlo import CompiledCollective as CompiledCollective
from autoshard_ilp.verify.hlo import parse_collectives as parse_collectives
from autoshard_ilp.verify.replica_groups import mesh_axes_of as mesh_axes_of
from autoshard_ilp.verify.report import Verification as Verification
from autoshard_ilp.verify.report import verify as verify
from autoshard_ilp.verify.targets import Target as Target
from autoshard_ilp.verify.targets import compile_only_mesh as compile_only_mesh
from autoshard_ilp.verify.targets import parse_target as parse_target

"""The integer program: data, presolve, bounds, OR-Tools, brute force. Its one-page statement is README.md here."""

from autoshard_ilp.program.bruteforce import brute_force as brute_force
from autoshard_ilp.program.infeasible import minimum_capacity as minimum_capacity
from autoshard_ilp.program.solve import solve as solve

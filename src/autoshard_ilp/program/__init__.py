"""The integer program: data, presolve, bounds, OR-Tools, brute force."""

from autoshard_ilp.program.bruteforce import brute_force as brute_force
from autoshard_ilp.program.solve import solve as solve

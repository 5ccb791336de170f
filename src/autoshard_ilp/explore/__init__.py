"""Questions about plans: what if, why, how do two differ, memory against time, which mesh, and sweeps over all of it.

Nothing is imported here; ``autoshard_ilp`` names the public functions.
"""

"""From a step's graph to the best plan that was found: one attempt per recomputation policy, and ways to look for it.

README.md says who calls whom.
"""

"""Verification of a plan: compile it for the target, read back what the compiler made of it, compare."""

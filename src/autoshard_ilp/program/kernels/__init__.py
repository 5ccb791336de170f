"""Compiled inner loops (Numba), and compiling them: once per machine, before a clock starts."""

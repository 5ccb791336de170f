"""The tile in which XLA:TPU lays out the two dimensions of an array that vary fastest.

"Tiled layout", https://openxla.org/xla/tiled_layout.
"""

ROWS, LANES = 8, 128
"""Of 32-bit numbers: rows, and elements of each, as many as a vector has."""

SHORT_ROWS = 16
"""Rows of a tile of 16-bit numbers."""

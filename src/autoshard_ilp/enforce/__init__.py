"""What makes a compiler run the program that was planned, where it would run another one.

One habit of XLA per file, and what is done about it: collectives and sums written out device by device, work that waits
for the backward pass by a dependency on it, results that are computed where they are read, and in whose place they are
written. README.md says what is where.
"""

"""What XLA:GPU makes of a step, as far as seconds and bytes depend on it: one habit per file."""

"""Programs too large for the exact route: flat arrays, compiled kernels, bounds and plans that improve with time."""

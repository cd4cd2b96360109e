"""Linear layers of 8-bit integers: spec, dense, op, kernels, and the grids that lead to integers."""
